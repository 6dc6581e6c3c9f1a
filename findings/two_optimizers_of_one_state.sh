#!/usr/bin/env bash
# torch 2.13.0: Module.load_state_dict copies, Optimizer.load_state_dict does not. Where dtype and
# device fit, the state that it is given becomes the optimizer's own: two optimizers that load one
# state (members of a simulated round, which all begin with the server's) share their moments and
# their count of steps, and each step of one moves the other. After a deepcopy they do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
OMP_NUM_THREADS=1 env/bin/python - <<'PYTHON'
import copy

import torch

MAKERS = {
    "SGD with momentum": lambda many: torch.optim.SGD(many, lr=0.1, momentum=0.9),
    "Adam": lambda many: torch.optim.Adam(many, lr=0.1),
    "AdamW, fused": lambda many: torch.optim.AdamW(many, lr=0.1, fused=True),
}


def stepped(optimizer, model, value):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()


def moved_by_the_other(make, copied):
    """Names of the first member's state, and of its model, that a step of the second changed."""
    server = torch.nn.Linear(3, 2)
    of_server = make(server.parameters())
    stepped(of_server, server, 1.0)
    saved = of_server.state_dict()
    models, optimizers = [], []
    for _ in range(2):
        models.append(torch.nn.Linear(3, 2))
        models[-1].load_state_dict(server.state_dict())
        optimizers.append(make(models[-1].parameters()))
        optimizers[-1].load_state_dict(copy.deepcopy(saved) if copied else saved)
    state = optimizers[0].state[models[0].weight]
    watched = {**state, "the model": models[0].weight}
    before = {name: value.detach().clone() for name, value in watched.items()}
    stepped(optimizers[1], models[1], 5.0)
    return sorted(n for n, value in watched.items() if not torch.equal(value, before[n]))


for (name, make), expected in zip(
    MAKERS.items(), (["momentum_buffer"], *[["exp_avg", "exp_avg_sq", "step"]] * 2)
):
    shared, apart = moved_by_the_other(make, False), moved_by_the_other(make, True)
    print(f"{name}: another's step moves {', '.join(shared)}; of deep copies {apart or 'nothing'}")
    assert shared == expected, shared
    assert apart == [], apart
PYTHON
