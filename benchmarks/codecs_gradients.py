"""Real gradients to code, made by training a task for a while; nothing of it is shipped.

    python benchmarks/codecs_gradients.py edgetrain.tasks:char_lm char.npz
    python benchmarks/codecs_speed.py --only index --gradients char.npz

The file holds `gradient` (of the last step), `displacement` (of the last 20 steps, what DGA sends)
and, for each density, `feedback_<density>`: the error-feedback vector, residual plus gradient, as a
codec at that density meets it after all these steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

from edgetrain.codecs import Feedback, TopK
from edgetrain.tasks import Task, load_task
from edgetrain.vectors.vector import Vector

DENSITIES = (0.001, 0.01, 0.1)
DISPLACED_STEPS = 20


def train(task: Task, steps: int, batch: int, rate: float, told: bool = True) -> dict[str, Vector]:
    """Train one member's model and keep the vectors named above; print the loss if `told`."""
    torch.manual_seed(0)
    model = task.model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    elements = sum(p.numel() for p in parameters)
    feedback = {density: Feedback(TopK(density), elements) for density in DENSITIES}
    kept: dict[str, Vector] = {}
    start = flat(parameters)
    for step, data in zip(range(steps), task.batches(0, 1, batch, 0), strict=False):
        if step == steps - DISPLACED_STEPS:
            start = flat(parameters)
        optimizer.zero_grad()
        loss = task.loss(model, data)
        loss.backward()  # type: ignore[no-untyped-call]
        gradient = flat([p.grad for p in parameters if p.grad is not None])
        for density, memory in feedback.items():
            if step == steps - 1:
                kept[f"feedback_{density}"] = memory.residual + gradient
            memory.encode(gradient)
        optimizer.step()
        if told and (step % 50 == 0 or step == steps - 1):
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)
    return {**kept, "gradient": gradient, "displacement": flat(parameters) - start}


def flat(tensors: list[torch.Tensor] | list[torch.nn.Parameter]) -> Vector:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).numpy().astype(np.float32)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", help="module:object, as in a job")
    parser.add_argument("file", type=Path, help=".npz to write")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    np.savez(args.file, **train(load_task(args.task, {}), args.steps, args.batch, args.rate))  # type: ignore[arg-type]
    print(f"wrote {args.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
