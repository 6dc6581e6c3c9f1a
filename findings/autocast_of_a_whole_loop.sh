#!/usr/bin/env bash
# torch 2.13.0: within one torch.autocast, a parameter's half-precision copy is made once and kept
# until the block ends, whatever happens to the parameter. A loop that is all in one block
# computes each forward with the weights of the first: its loss stays where it was, to the bit, while
# the optimizer goes on moving the parameters. A model that is filled with other parameters, for an
# evaluation within the block, answers as before, too. torch.clear_autocast_cache() ends both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
OMP_NUM_THREADS=1 env/bin/python - <<'PYTHON'
import contextlib

import torch
from torch.nn.functional import mse_loss

draw = torch.Generator().manual_seed(0)
x = torch.randn(64, 4, generator=draw)
y = x.sum(1, keepdim=True)


def half():
    return torch.autocast("cpu", torch.bfloat16)


def made():
    torch.manual_seed(1)
    return torch.nn.Linear(4, 1)


def losses(around_loop, around_step, clears=False):
    model = made()
    begun = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    with around_loop():
        for _ in range(20):
            with around_step():
                loss = mse_loss(model(x).float(), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if clears:
                    torch.clear_autocast_cache()
            found.append(loss.item())
    assert not torch.equal(model.weight, begun)
    return found


none = contextlib.nullcontext
whole = losses(half, none)
each, cleared = losses(none, half), losses(half, none, clears=True)
print(f"one block around the loop: loss {whole[0]:.3f}, after 20 steps {whole[-1]:.3f}")
print(f"one around each step: {each[0]:.3f}, {each[-1]:.3f}; cache cleared: {cleared[-1]:.3f}")
assert len(set(whole)) == 1
assert each == cleared and each[-1] < each[0] / 2

model = made()
with half():
    first = model(x).detach()
    model.load_state_dict({name: torch.zeros_like(p) for name, p in model.state_dict().items()})
    stale = model(x)
    torch.clear_autocast_cache()
    fresh = model(x)
print(f"filled with zeros: the largest answer is {stale.abs().max():.3f}, cleared {fresh.abs().max():.3f}")
assert torch.equal(stale, first) and not fresh.any()
PYTHON
