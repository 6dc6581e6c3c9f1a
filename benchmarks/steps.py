"""How long a training step takes here, and how long it would on each device of the catalog.

    python benchmarks/steps.py

Times steps of four sizes on one thread, fits `operators * dispatch_s + flops / train_gflops` to
them by least squares of the relative error, and prints what the device profiles predict. The
fitted line is what devices/*.toml call "the reference machine".
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from edgetrain.fleet import devices
from edgetrain.fleet.devices.cost import measure_step
from edgetrain.tasks import Task, char_lm, digits
from edgetrain.training.bench import fit

STEPS = 60


def step_s(model: torch.nn.Module, task: Task, batches: Iterator[Any]) -> float:
    """The median step: gradients zeroed, forward, backward, SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    taken = []
    for batch in itertools.islice(batches, STEPS):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for task, size in ((digits(), 16), (digits(), 256), (char_lm(), 4), (char_lm(), 16)):
        torch.manual_seed(0)
        model = task.model()
        batches = task.batches(0, 8, size, seed=0)
        flops, operators = measure_step(model, next(batches), task.loss)
        rows.append((f"{task.name} x {size}", flops, operators, step_s(model, task, batches)))
    names = devices.names()
    print(f"{'step':14} {'Mflop':>8} {'calls':>6} {'here ms':>8}", *(f"{n:>20}" for n in names))
    for name, flops, operators, seconds in rows:
        there = [devices.load(n).step_seconds(flops, operators) * 1e3 for n in names]
        print(
            f"{name:14} {flops / 1e6:8.1f} {operators:6} {seconds * 1e3:8.2f}",
            *(f"{ms:20.2f}" for ms in there),
        )
    dispatch_s, train_gflops = fit([row[1:] for row in rows])
    print(f"this machine, one thread: dispatch_s = {dispatch_s:.2g}", end=", ")
    print(f"train_gflops = {train_gflops:.3g}")
    matrix = torch.rand(1024, 1024)
    taken = []
    for _ in range(20):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        taken.append(time.perf_counter() - began)
    print(f"matrix product of 1024 x 1024 float32: {2 * 1024**3 / min(taken) / 1e9:.3g} Gflop/s")


if __name__ == "__main__":
    main()
