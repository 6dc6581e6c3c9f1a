#!/usr/bin/env bash
# pfl 0.6.0, torch 2.13.0: FederatedAveraging averages the users' parameters. A batch norm's running
# mean and variance are no parameters: nothing averages them, and nothing sets them back between users,
# who train one after the other in the one model of the process. So the model of a round has the
# statistics of the user who came last in it, and the order of the users changes its answers, while its
# parameters are the same. Three users, whose inputs lie at -6, 0 and 6: a mean would be 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 pfl==0.6.0
cd "$folder"
OMP_NUM_THREADS=1 env/bin/python - <<'PYTHON'
import contextlib
import io

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy

PLACES = -6.0, 0.0, 6.0


class Normalised(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.norm(torch.as_tensor(x)))

    def loss(self, x, y, is_eval=False):
        self.train(not is_eval)
        return cross_entropy(self(x), torch.as_tensor(y).long())

    @torch.no_grad()
    def metrics(self, x, y):
        return {"loss": Weighted(float(self.loss(x, y, is_eval=True)) * len(y), len(y))}


def of_user(number):
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(64, 4, generator=draw) + PLACES[number]
    return Dataset(raw_data=(x.numpy(), torch.randint(0, 3, (64,), generator=draw).numpy()))


def trained(order):
    model, turns = Normalised(), iter(order)
    users = FederatedDataset(of_user, lambda: next(turns))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=1, evaluation_frequency=1000,
            train_cohort_size=3, val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=None),
        model=PyTorchModel(
            model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=0.1, local_batch_size=4
        ),
        model_eval_params=None,
        callbacks=[],
    )
    return model


with contextlib.redirect_stdout(io.StringIO()):  # a table of figures a round
    models = {order: trained(order) for order in ((0, 1, 2), (2, 1, 0))}
for order, model in models.items():
    mean, last = float(model.norm.running_mean.mean()), PLACES[order[-1]]
    print(f"users at {[PLACES[n] for n in order]}: running mean {mean:.1f} after a round")
    assert abs(mean - last) < 2
one, other = models.values()
for (name, p), q in zip(one.named_parameters(), other.parameters()):
    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
x = torch.randn(100, 4, generator=torch.Generator().manual_seed(9))
with torch.no_grad():
    apart = (one.eval()(x).argmax(1) != other.eval()(x).argmax(1)).float().mean()
print(f"the same parameters, other answers to {apart:.0%} of inputs")
assert apart > 0.2
PYTHON
