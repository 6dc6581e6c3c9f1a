#!/usr/bin/env bash
# torch 2.13.0: PowerSGD of a layer that has no gradient in the first step that is compressed, as an
# expert that no token chose. By default (orthogonalization_epsilon=0) that step divides by zero and
# the whole model is NaN. With the epsilon that the documentation names for this, 1e-8, nothing is
# divided by zero, and the warm start, which is the default, keeps the layer as it is for ever,
# whatever its gradients then are: its factor is zero, and zero times any gradient is the next one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
cat > layer.py <<'PYTHON'
import warnings

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")
COMPRESSED = 2
"""The first step that is: the hook takes no smaller start_powerSGD_iter with feedback."""


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x, share):
        return self.first(x) + share * self.second(x)


def trained(epsilon, warm, chosen):
    """The last gradient's length and the way of the second expert, not chosen before `chosen`."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Experts())
    state = PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=COMPRESSED, warm_start=warm,
        orthogonalization_epsilon=epsilon,
    )
    model.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second, target = model.module.second.weight, torch.randn(64, 64) / 8
    start = second.detach().clone()
    for step in range(200):
        x = torch.randn(32, 64)
        optimizer.zero_grad()
        loss = ((model(x, float(step >= chosen)) - x @ target) ** 2).mean()
        loss.backward()
        optimizer.step()
        if step == COMPRESSED:
            start = second.detach().clone()
    alone = torch.autograd.grad(((model.module(x, 1.0) - x @ target) ** 2).mean(), second)[0]
    return float(alone.norm()), float((second - start).norm())


dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
for epsilon, warm, chosen, expected in (
    (0, True, 0, "moves"), (0, True, 3, "NaN"), (1e-8, True, 0, "moves"),
    (1e-8, True, 3, "stays"), (1e-8, False, 3, "moves"),
):
    gradient, way = trained(epsilon, warm, chosen)
    became = "NaN" if way != way else "moves" if way > 0.5 else "stays" if way == 0 else "?"
    start = "chosen from the first step on" if chosen == 0 else f"not chosen before step {chosen}"
    print(f"epsilon {epsilon:g}, warm start {warm}, {start}: {became} "
          f"(in 197 steps by {way:.2f}; the last gradient is {gradient:.2f} long)")
    assert became == expected, (became, expected)
PYTHON
OMP_NUM_THREADS=1 env/bin/python layer.py 2> said || { tail -20 said; exit 1; }
