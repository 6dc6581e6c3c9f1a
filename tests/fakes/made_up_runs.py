"""Run folders for tests of what reads them: made up, but written by the real MetricsLog."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgetrain.runs.folder import metrics_path, write_job, write_summary
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.runs.summary import summarise


@dataclass
class Clock:
    """A clock that a test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Story:
    """How a made-up run went. Seconds and bytes."""

    strategy: str = "dga"
    members: int = 8
    steps: int = 400
    local_steps: int = 5
    delay: int = 20
    compute_s: float = 0.05
    wait_s: float = 0.0  # at each exchange
    overhead_s: float = 0.002
    message_bytes: int = 19_000
    best: float = 0.985
    half_life_steps: float = 25.0
    lost: str | None = None  # this member dies half way
    joules: bool = True
    timing_ok: bool = True
    network: str = "wan-200ms"
    device: str | None = "raspberry-pi-4b"

    @property
    def exchanges_every(self) -> int:
        return 1 if self.strategy == "sync-sgd" else self.local_steps

    @property
    def step_s(self) -> float:
        return self.compute_s + self.overhead_s + self.wait_s / self.exchanges_every

    def accuracy(self, step: int) -> float:
        wiggle = 0.004 * math.sin(step / 7.0)
        return self.best - (self.best - 0.1) * 0.5 ** (step / self.half_life_steps) + wiggle


SYNC = Story(strategy="sync-sgd", local_steps=1, delay=0, wait_s=0.42, best=0.984)
FEDAVG = Story(strategy="fedavg", delay=0, wait_s=0.42, half_life_steps=28)
DGA = Story()


def job(story: Story) -> dict[str, Any]:
    return {
        "task": "edgetrain.tasks:digits",
        "seed": 0,
        "fleet": {
            "members": story.members,
            "network": story.network,
            "device": story.device,
        },
        "train": {"steps": story.steps, "batch": 16, "optimizer": {"name": "sgd", "lr": 0.05}},
        "strategy": {
            "name": story.strategy,
            "local_steps": story.local_steps,
            "delay": story.delay,
        },
    }


def extra(story: Story) -> dict[str, Any]:
    return {
        "name": story.strategy,
        "metric": "accuracy",
        "better": "higher",
        "target": 0.97,
        "joules_source": "estimated" if story.joules else None,
        "emulation": {
            "backend": "packet",
            "late_ms_p99": 0.4 if story.timing_ok else 31.0,
            "late_limit_ms": 4.0,
            "timing_ok": story.timing_ok,
        },
    }


def write_run(folder: Path, story: Story = DGA, *, upto: int | None = None) -> Path:
    """A whole run folder. With `upto` it was only followed that many steps and has no summary."""
    folder.mkdir(parents=True, exist_ok=True)
    write_job(folder, job(story))
    for _ in write_metrics(folder, story, upto=upto):
        pass
    if upto is None:
        write_summary(folder, summarise(folder, extra(story)))
    return folder


def write_metrics(folder: Path, story: Story, *, upto: int | None = None) -> Iterator[float]:
    """Writes step by step, yielding the time after each."""
    clock = Clock()
    with ExitStack() as stack:
        logs = [
            stack.enter_context(MetricsLog(metrics_path(folder), name, clock, 0.0))
            for name in [*(f"m{i}" for i in range(story.members)), "hub"]
        ]
        *members, hub = logs
        for log in members:
            log.event("joined", "10.0.0.7")
        for step in range(1, (upto or story.steps) + 1):
            clock.now += story.step_s
            _one_step(story, members, hub, step)
            yield clock.now
        if upto is None:
            for log in members:
                if log.member != story.lost:
                    log.event("finished")


def _one_step(story: Story, members: list[MetricsLog], hub: MetricsLog, step: int) -> None:
    rounds = step // story.exchanges_every
    waits = story.wait_s if step % story.exchanges_every == 0 else 0.0
    alive = [log for log in members if log.member != story.lost or step <= story.steps // 2]
    for place, log in enumerate(alive):
        log.step(
            step=step,
            round=rounds,
            loss=2.3 * 0.5 ** (step / story.half_life_steps) + 0.05,
            wait_s=waits,
            compute_s=story.compute_s * (1 + 0.01 * place),
            overhead_s=story.overhead_s,
            sent_bytes=rounds * story.message_bytes,
            received_bytes=rounds * story.message_bytes,
            cpu_s=step * 0.01,
            peak_bytes=260_000_000 + place * 1_000_000,
            joules=step * 0.3 if story.joules else None,
        )
    if story.lost is not None and step == story.steps // 2 + 1:
        hub.event("gone", "silent for 5.0 s", about=story.lost)
    if step % story.exchanges_every == 0:
        hub.round(
            round=rounds,
            members=[log.member for log in alive],
            missing=[] if len(alive) == story.members else [str(story.lost)],
            weight=float(len(alive)),
            close_s=0.003,
            sent_bytes=rounds * story.message_bytes * len(alive),
            received_bytes=rounds * story.message_bytes * len(alive),
            cpu_s=rounds * 0.001,
            peak_bytes=90_000_000,
        )
    if step % 10 == 0 or step == story.steps:
        figures = {"accuracy": story.accuracy(step), "loss": 1.2 * (1 - story.accuracy(step))}
        alive[0].evaluation(step=step, round=rounds, figures=figures, eval_s=0.0)


def write_comparison(root: Path, *stories: Story) -> list[Path]:
    """A folder of run folders, as `compare` leaves it, and their paths in its order."""
    stories = stories or (SYNC, FEDAVG, DGA)
    folders = [write_run(root / story.strategy, story) for story in stories]
    write_job(root, job(stories[0]))
    write_summary(root, {"runs": [folder.name for folder in folders]})
    return folders


def slower(story: Story, times: float) -> Story:
    return replace(story, compute_s=story.compute_s * times)
