#!/usr/bin/env bash
# schedulefree 1.4.1, torch 2.13.0: an optimizer that keeps the parameters a second time. In train mode
# the model has a point between two sequences, one of which is in the optimizer's state: what a fleet
# adds to the model is taken back within some hundred steps, and two members whose parameters are
# averaged after every ten steps evaluate two models. Averaged in eval mode, after optimizer.eval(),
# the models are equal, and the state is still each member's own. SGD and AdamW keep what is added.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 schedulefree==1.4.1 numpy
cd "$folder"
OMP_NUM_THREADS=1 env/bin/python - <<'PYTHON'
import torch
from schedulefree import AdamWScheduleFree, SGDScheduleFree

MAKERS = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0),
    "SGDScheduleFree": lambda p: SGDScheduleFree(p, lr=0.5),
    "AdamWScheduleFree": lambda p: AdamWScheduleFree(p, lr=0.02),
}
torch.manual_seed(0)
X, WAY = torch.randn(2000, 20), torch.randn(20, 1)


def mode(optimizer, name):
    getattr(optimizer, name, lambda: None)()


def left_of_a_move(make):
    """How much is left, after 200 steps without a gradient, of 1 that was added after 50 steps."""
    model = torch.nn.Linear(20, 1, bias=False)
    optimizer = make(model.parameters())
    mode(optimizer, "train")
    for step in range(250):
        if step == 50:
            before = model.weight.detach().clone()
            with torch.no_grad():
                model.weight += 1
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    mode(optimizer, "eval")
    return float((model.weight - before).detach().mean())


def apart(make, averaged_in):
    """How far the members' models are apart that are evaluated after 20 rounds with a mean."""
    models = [torch.nn.Linear(20, 1, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [make(model.parameters()) for model in models]
    for round in range(20):
        for member, (model, optimizer) in enumerate(zip(models, optimizers)):
            mode(optimizer, "train")
            for batch in X.split(200):
                optimizer.zero_grad()
                ((model(batch) - batch @ WAY + 2 * member - 1) ** 2).mean().backward()
                optimizer.step()
            mode(optimizer, averaged_in)
        mean = sum(model.weight.detach() for model in models) / 2
        for model in models:
            model.load_state_dict({"weight": mean})
    for optimizer in optimizers:
        mode(optimizer, "eval")
    return float((models[0].weight - models[1].weight).detach().norm())


for name, make in MAKERS.items():
    left, train, evaluated = left_of_a_move(make), apart(make, "train"), apart(make, "eval")
    print(f"{name}: {left:.2f} is left of a move of 1; models averaged in train mode are "
          f"{train:.2g} apart, in eval mode {evaluated:g}")
    free = "Free" in name
    assert evaluated == 0
    assert (0.1 < left < 0.4 and train > 0.01) if free else (left == 1 and train == 0)
PYTHON
