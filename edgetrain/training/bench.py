"""How fast this machine trains: the figures of a device profile, measured within some seconds.

Steps of four sizes are timed, and `operators * dispatch_s + flops / train_gflops`, which is what a
step takes on a device (`fleet.devices.Device.step_seconds`), is fitted to them. What else runs
meanwhile makes the figures worse: that nothing does is for callers to see to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.fleet import devices
from edgetrain.fleet.devices import Device
from edgetrain.fleet.devices.cost import measure_step
from edgetrain.fleet.devices.energy import READ_EVERY_S
from edgetrain.fleet.devices.sensors import PowerSensor, find_sensor

SIZES = ((64, 16), (256, 16), (256, 256), (1024, 256))
"""Width of the layers and samples of a step: from one that is all calls to one that is all
arithmetic."""
LEAST_STEPS = 5
COPIED_BYTES = 64 << 20
"""More than any cache of a device holds."""


@dataclass(frozen=True)
class MeasuredSpeed:
    dispatch_s: float
    train_gflops: float
    memory_gbyte_s: float
    """Bytes read and written while memory is copied, in 1e9 a second."""
    idle_watts: float | None = None
    """None: the machine has no sensor of the whole board that this user may read."""
    load_watts: float | None = None


def measure(
    seconds: float = 20.0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    root: Path = Path("/"),
) -> MeasuredSpeed:
    """Measure this machine, with all its cores. Raises ConfigError if the steps fit no device."""
    sensor = find_sensor(root, clock())
    board = sensor if isinstance(sensor, PowerSensor) else None
    idle = _Watts(board, clock)
    for _ in range(4):
        idle.read()
        sleep(seconds / 40)
    rate = _memory_rate(seconds / 20, clock)
    load = _Watts(board, clock)
    rows = [_timed(width, batch, seconds / 5, clock, load) for width, batch in SIZES]
    return MeasuredSpeed(*fit(rows), rate, idle.mean, load.mean)


def fit(rows: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """dispatch_s and train_gflops of a machine on which steps of so many (flops, operators) took
    these seconds: least squares of the relative error. Raises ConfigError if there are none."""
    import numpy as np

    work = np.array([[operators / s, flops / s] for flops, operators, s in rows])
    (dispatch_s, per_flop), *_ = np.linalg.lstsq(work, np.ones(len(rows)), rcond=None)
    if dispatch_s <= 0 or per_flop <= 0:
        raise ConfigError(
            "the times of these steps fit no device", "measure again, with nothing else running"
        )
    return float(dispatch_s), float(1e-9 / per_flop)


def profile(base: Device, speeds: Sequence[MeasuredSpeed], who: str) -> dict[str, Any]:
    """The table of a device profile: `base` with the medians of what was measured on machines of
    its kind; who: these machines and the day, for people."""
    found = {
        key: float(f"{statistics.median(values):.3g}")
        for key in ("train_gflops", "dispatch_s", "idle_watts", "load_watts")
        if (values := [v for speed in speeds if (v := getattr(speed, key)) is not None])
    }
    source = dict.fromkeys(found, f"measured: edgetrain devices bench, {who}")
    kept = {key: getattr(base, key) for key in devices.FIGURES}
    return {
        "title": base.title, "boards": list(base.boards), **kept, **found,
        "source": {**base.source, **source},
    }  # fmt: skip


class _Watts:
    """Mean watts of a board between the first and the last reading."""

    def __init__(self, sensor: PowerSensor | None, clock: Callable[[], float]) -> None:
        self._sensor, self._clock = sensor, clock
        self._first: tuple[float, float] | None = None
        self._last = (0.0, 0.0)

    def read(self) -> None:
        now = self._clock()
        if self._sensor is None or now - self._last[0] < READ_EVERY_S:
            return
        self._last = now, self._sensor.joules(now)
        self._first = self._first or self._last

    @property
    def mean(self) -> float | None:
        if self._first is None or self._last[0] <= self._first[0]:
            return None
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])


def _timed(
    width: int, batch: int, seconds: float, clock: Callable[[], float], watts: _Watts
) -> tuple[int, int, float]:
    """Flops, operators and the median time of a step: gradients zeroed, forward, backward, SGD with
    momentum."""
    import torch
    from torch import nn

    from edgetrain.training.member.train import device_for

    place = device_for("auto")
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    ).to(place)
    samples = torch.randn(batch, 64, device=place), torch.randint(10, (batch,), device=place)

    def loss(model: nn.Module, samples: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(samples[0]), samples[1])

    flops, operators = measure_step(model, samples, loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    taken: list[float] = []
    until = clock() + seconds
    while clock() < until or len(taken) < LEAST_STEPS:
        began = clock()
        optimizer.zero_grad(set_to_none=False)
        loss(model, samples).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if place.type == "cuda":
            torch.cuda.synchronize()
        taken.append(clock() - began)
        watts.read()
    return flops, operators, statistics.median(taken)


def _memory_rate(seconds: float, clock: Callable[[], float]) -> float:
    import torch

    source = torch.ones(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    taken: list[float] = []
    until = clock() + seconds
    while clock() < until or len(taken) < LEAST_STEPS:
        began = clock()
        target.copy_(source)
        taken.append(clock() - began)
    return 2 * COPIED_BYTES / min(taken) / 1e9
