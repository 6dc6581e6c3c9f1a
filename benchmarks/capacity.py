"""The timing-only plan against the simulator: milliseconds of a step of the same jobs.

Below them, how long estimates of 10 to 100,000 members take, with gateways and without.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness import Measured, measure

from edgetrain.jobs.capacity import estimate
from edgetrain.jobs.capacity.question import Options, question_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve

BASIS = ("members=8", "pace_s=0.05", "steps=100", "optimizer={ name = 'sgd', lr = 0.2 }")
JOBS = {
    "sync-sgd, 200 ms": ("strategy=sync-sgd", "delay=0", "network=wan-200ms"),
    "fedavg, 500 ms": ("strategy=fedavg", "delay=0", "network=wan-500ms"),
    "dga, D = 12, 500 ms": ("strategy=dga(paper)", "delay=12", "network=wan-500ms"),
    "dga, D = 20, 200 ms": ("strategy=dga(paper)", "delay=20", "network=wan-200ms"),
    "fedavg, shared uplink": (
        "strategy=fedavg", "delay=0", "network=ethernet", "fleet.sites=home-fixed: 0-7",
    ),
    "fedavg, 4g-medium, loss": ("strategy=fedavg", "delay=0", "network=4g-medium"),
    "dga, D = 5, wifi, loss": ("strategy=dga(paper)", "delay=5", "network=wifi"),
    "fedavg, int8, 3g": ("strategy=fedavg", "delay=0", "network=3g", "codec=int8"),
}  # fmt: skip


def compared(words: tuple[str, ...]) -> dict[str, float]:
    """A job, simulated and planned. The simulator's hub has no port and merges in no time: only
    its messages cost."""
    from edgetrain.training.simulated import simulation

    job = load(None, [*BASIS, *words])
    with tempfile.TemporaryDirectory() as folder:
        simulated = 1 / float(simulation.run(plan(job), Path(folder))["steps_per_second"])
    found = resolve(job)
    rounds = job.train.steps // found.local_steps
    options = Options(rounds=rounds, hub_rate_mbit=0, merge_bytes_per_s=0)
    planned = estimate.answer(question_of(found, options)).seconds_per_step
    return {
        "simulated, ms": 1000 * simulated,
        "planned, ms": 1000 * planned,
        "off by, %": 100 * (planned / simulated - 1),
    }


def scaling() -> dict[str, float]:
    """Seconds that estimates of a hundred rounds take."""
    job = load(None, ["device=raspberry-pi-4b", "network=wan-200ms", "delay=20"])
    found = {}
    for gateways in (0, 100):
        options = Options(parameters=11_000_000, step_s=0.4, shards=4, gateways=gateways)
        question = question_of(resolve(job), options)
        for members in estimate.COUNTS:
            began = time.perf_counter()
            estimate.answers(question, [members])
            took = time.perf_counter() - began
            found[f"{members:,} members, {gateways} gateways, s"] = took
    return found


def measured() -> Iterator[Measured]:
    """Each job, then the estimates."""
    for name, words in JOBS.items():
        yield measure(name, lambda: compared(words), 1)  # noqa: B023
    yield measure("an estimate of 100 rounds", scaling, 1)
