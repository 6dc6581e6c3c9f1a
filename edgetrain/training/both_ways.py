"""Run jobs emulated and simulated, for a report on how far the simulation is off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgetrain.jobs.plan import Plan
from edgetrain.runs.folder import create_inside, read_metrics
from edgetrain.runs.reports.calibration import Pair, bases_of, pair
from edgetrain.training import emulated
from edgetrain.training.simulated import simulation


@dataclass(frozen=True)
class Done:
    """A run of a job: its summary, the bases of its members, and its seconds on this machine."""

    summary: dict[str, Any]
    bases: set[str]
    real_s: float


def run(
    name: str,
    plan: Plan,
    folder: Path,
    draws: int,
    report: Callable[[str], None],
    clock: Callable[[], float],
) -> Pair:
    """Run a planned job both ways, each run in a folder of its own inside `folder`.

    A job whose links lose packets, or have jitter, is simulated `draws` times, each time with other
    losses and delays. `report` is called with "emulated" and "simulated" before each of the first
    two runs. Raises what `emulated.run` and `simulation.run` raise.
    """
    report("emulated")
    real = _timed(f"{name} emulated", folder, lambda inside: emulated.run(plan, inside), clock)
    report("simulated")
    return _with_simulated(name, plan, folder, draws, real, clock)


def run_side_by_side(
    planned: Mapping[str, Plan],
    folder: Path,
    draws: int,
    at_once: int,
    report: Callable[[str, str], None],
    clock: Callable[[], float],
) -> Iterator[Pair]:
    """Emulate up to `at_once` jobs at a time, then simulate one after the other, as `run` does.

    Yields the pairs in order. `report` is called with the name of a job and "emulated" or
    "simulated", after the one and before the other. Where it, or the caller, is interrupted, the
    emulated runs end first.
    """
    stop = threading.Event()

    def watch() -> None:
        if stop.is_set():
            raise KeyboardInterrupt

    def emulate(name: str) -> Done:
        watch()

        def start(inside: Path) -> dict[str, Any]:
            return emulated.run(planned[name], inside, watch)

        return _timed(f"{name} emulated", folder, start, clock)

    with ThreadPoolExecutor(at_once) as pool:
        running: dict[Future[Done], str] = {pool.submit(emulate, name): name for name in planned}
        try:
            for each in as_completed(running):
                each.result()
                report(running[each], "emulated")
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    for each, name in running.items():
        report(name, "simulated")
        yield _with_simulated(name, planned[name], folder, draws, each.result(), clock)


def _with_simulated(
    name: str, plan: Plan, folder: Path, draws: int, real: Done, clock: Callable[[], float]
) -> Pair:
    def start(inside: Path) -> dict[str, Any]:
        return simulation.run(plan, inside)

    found = _timed(f"{name} simulated", folder, start, clock)
    drawn = [
        simulation.run(plan, create_inside(folder, f"{name} simulated {luck}"), luck=luck)
        for luck in range(1, draws if depends_on_luck(plan) else 1)
    ]
    bases, seconds = (real.bases, found.bases), (real.real_s, found.real_s)
    return pair(name, real.summary, found.summary, bases, seconds, drawn)


def _timed(
    name: str, folder: Path, start: Callable[[Path], dict[str, Any]], clock: Callable[[], float]
) -> Done:
    inside = create_inside(folder, name)
    began = clock()
    summary = start(inside)
    real_s = clock() - began
    return Done(summary, bases_of(read_metrics(inside, "event")), real_s)


def depends_on_luck(plan: Plan) -> bool:
    """Whether any link of the job loses packets or has a delay that is drawn."""
    uplinks = [site.uplink for site in plan.sites]
    profiles = [*plan.network_profiles.values(), *uplinks]
    return any(
        profile.has_loss or profile.up.jitter_ms or profile.down.jitter_ms for profile in profiles
    )
