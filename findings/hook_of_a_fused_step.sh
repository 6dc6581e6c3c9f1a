#!/usr/bin/env bash
# torch 2.13.0: what a hook before an optimizer's step sees under a GradScaler depends on `fused`. An
# AdamW that is not fused is stepped with gradients that are unscaled, and not at all if one of them is not
# finite. A fused one says that it takes care of scales itself: its hook sees gradients that are
# still multiplied by the scale (65,536 at first), and is called, too, before a step that leaves the
# parameters alone. So is any hook of metrics, clipping or communication.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
OMP_NUM_THREADS=1 env/bin/python - <<'PYTHON'
import torch

FINITE, INFINITE = [1.0, 2.0, 3.0], [1.0, float("inf"), 3.0]


def seen(fused, gradient, unscales):
    """Gradients that hooks before and after a step see, and whether the step moved anything."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    before, after = [], []
    optimizer.register_step_pre_hook(lambda *_: before.append(p.grad.tolist()))
    optimizer.register_step_post_hook(lambda *_: after.append(p.grad.tolist()))
    scaler.scale((p * torch.tensor(gradient)).sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return before, after, not torch.equal(p.detach(), torch.ones(3))


scale = torch.amp.GradScaler("cpu").get_scale()
for gradient, moves in ((FINITE, True), (INFINITE, False)):
    for unscales in (False, True):
        for fused in (False, True):
            before, after, moved = seen(fused, gradient, unscales)
            print(f"gradient {gradient}, fused={fused}, unscale_ first={unscales}: hook before {before}, after "
                  f"{after}, {'moved' if moved else 'not moved'}")
            assert moved == moves
            factor = scale if fused and not unscales else 1.0
            assert before == ([[factor * g for g in gradient]] if moves or fused else [])
            assert after == ([gradient] if moves else [[factor * g for g in gradient]] * fused)
PYTHON
