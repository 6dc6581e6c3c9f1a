#!/usr/bin/env bash
# flwr 1.42.0, torch 2.13.0: FedAdam steps everything that clients send. Of a model with a batch
# norm, which clients send as its state_dict, these are running means and variances, too. A
# variance that falls from 1, where torch begins, to that of the layer is overshot by Adam's steps
# of its rate, whatever is left to go, and ends below zero: every answer of the final model is NaN,
# and so is no parameter. FedAvg, with the same clients, answers well.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 "flwr[simulation]==1.42.0" ray==2.55.1
cd "$folder"
cat > fleet.py <<'PYTHON'
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from flwr.simulation import run_simulation
from torch import nn

client, server, found = ClientApp(), ServerApp(), {}


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def data(number, count=96):
    """Which of the first three of four small numbers is the largest."""
    x = 0.1 * torch.randn(count, 4, generator=torch.Generator().manual_seed(number))
    return x, x[:, :3].argmax(1)


@client.train()
def train(message, context):
    model = made()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(*(each.split(16) for each in data(context.node_config["partition-id"]))):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": 96})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server.main()
def main(grid, context):
    for make in (FedAvg, FedAdam):
        first = ArrayRecord(made().state_dict())
        end = make(fraction_evaluate=0.0).start(grid=grid, initial_arrays=first, num_rounds=20)
        found[make.__name__] = end.arrays.to_torch_state_dict()


run_simulation(
    server, client, 2,
    backend_config={
        "init_args": {"num_cpus": 2, "include_dashboard": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0},
    },
)
x, y = data(99, 500)
right, lost, least = {}, {}, {}
for name, state in found.items():
    model = made()
    model.load_state_dict(state)
    assert all(each.isfinite().all() for each in model.parameters())
    with torch.no_grad():
        answers = model.eval()(x)
    least[name] = float(model[1].running_var.min())
    lost[name] = float(answers.isnan().float().mean())
    right[name] = float((answers.argmax(1) == y).float().mean())
    print(f"{name}: least variance {least[name]:.4f}, NaN {lost[name]:.0%}, right {right[name]:.0%}")
assert least["FedAvg"] > 0 and lost["FedAvg"] == 0 and right["FedAvg"] > 0.9
assert least["FedAdam"] < 0 and lost["FedAdam"] == 1
PYTHON
OMP_NUM_THREADS=1 env/bin/python fleet.py 2> said || { tail -20 said; exit 1; }
