"""Deep Gradient Compression taken apart: what each of its parts is worth on a small model.

    python benchmarks/codecs_dgc.py                      digits, 8 members, 0.1 %, six minutes
    python benchmarks/codecs_dgc.py --density 0.01 --seeds 3

Synchronous SGD on gradients, members in one process, each with its own shard and its own residual;
the mean of the decoded gradients is applied by every member alike. Momentum is 0.9 everywhere: in
the optimizer where the codec has none, in the codec (momentum correction) where it has.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import numpy as np
import torch

from edgetrain.codecs import DeepGradient, Feedback, TopK
from edgetrain.tasks import load_task
from edgetrain.vectors.vector import Vector

Encode = Callable[[Vector], Vector]
Variant = tuple[Callable[[int], Encode], bool]
MOMENTUM = 0.9


def sent_by(encoder: object, codec: TopK, elements: int) -> Encode:
    """What the others see of a gradient that this encoder is given."""

    def encode(gradient: Vector) -> Vector:
        out = np.empty(elements, np.float32)
        step = codec.part_elements
        for i, payload in enumerate(encoder.encode(gradient)):  # type: ignore[attr-defined]
            codec.decode(payload, out[i * step : (i + 1) * step])
        return out

    return encode


def variants(density: float, members: int, warmup: int) -> dict[str, Variant]:
    """(encoder of one member for so many elements, whether the optimizer has momentum) by name."""
    codec = TopK(density)

    def deep(elements: int, **options: object) -> Encode:
        memory = DeepGradient(codec, elements, MOMENTUM, members=members, **options)  # type: ignore[arg-type]
        return sent_by(memory, codec, elements)

    return {
        "dense": (lambda n: lambda gradient: gradient, True),
        "sparse": (lambda n: sent_by(codec, codec, n), True),
        "+ feedback": (lambda n: sent_by(Feedback(codec, n), codec, n), True),
        "+ momentum correction": (lambda n: deep(n, masking=False), False),
        "+ masking": (lambda n: deep(n), False),
        "+ masking, warm-up": (lambda n: deep(n, warmup=warmup), False),
        "+ masking, warm-up, clipping": (lambda n: deep(n, warmup=warmup, clip=4.0), False),
    }


def run(task_name: str, variant: Variant, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Train with one variant; what the task's evaluation says in the end."""
    make, momentum = variant
    torch.manual_seed(seed)
    task = load_task(task_name, {"seed": seed})
    model = task.model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    elements = sum(p.numel() for p in parameters)
    encoders = [make(elements) for _ in range(args.members)]
    data = [iter(task.batches(m, args.members, args.batch, seed)) for m in range(args.members)]
    optimizer = torch.optim.SGD(parameters, lr=args.rate, momentum=MOMENTUM if momentum else 0.0)
    for _ in range(args.steps):
        total = np.zeros(elements, np.float32)
        for encode, batches in zip(encoders, data, strict=True):
            optimizer.zero_grad()
            task.loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
            gradient = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
            total += encode(gradient.numpy()) / np.float32(args.members)
        at = 0
        for p in parameters:
            p.grad = torch.from_numpy(total[at : at + p.numel()].copy()).view_as(p)
            at += p.numel()
        optimizer.step()
    return task.evaluate(model)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="edgetrain.tasks:digits")
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.task}, density {args.density}, {args.members} members, {args.steps} steps")
    for name, variant in variants(args.density, args.members, args.warmup).items():
        results = [run(args.task, variant, args, seed) for seed in range(args.seeds)]
        words = []
        for key in results[0]:
            figures = [result[key] for result in results]
            spread = statistics.stdev(figures) if len(figures) > 1 else 0.0
            words.append(f"{key} {statistics.mean(figures):.4f} ± {spread:.4f}")
        print(f"{name:<30} {', '.join(words)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
