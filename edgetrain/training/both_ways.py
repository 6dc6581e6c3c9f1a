"""Run jobs emulated and simulated, for a report on how far the simulation is off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from edgetrain.jobs.plan import Plan
from edgetrain.runs.folder import create_inside, read_metrics
from edgetrain.runs.reports.calibration import Pair, bases_of, pair
from edgetrain.training import emulated
from edgetrain.training.finished import Done, Finished
from edgetrain.training.simulated import simulation

Make = Callable[[str], Path]
"""Makes the folder of one run."""


def run(
    name: str,
    plan: Plan,
    folder: Path,
    draws: int,
    report: Callable[[str], None],
    clock: Callable[[], float],
    finished: Finished | None = None,
) -> Pair:
    """Run a planned job both ways, each run in a folder of its own inside `folder`; what is
    `finished` is not run again, and what is run is added to it.

    A job whose links lose packets, or have jitter, is simulated `draws` times, each time with other
    losses and delays. `report` is called with "emulated" and "simulated" before each of the first
    two runs. Raises what `emulated.run` and `simulation.run` raise.
    """
    finished = Finished() if finished is None else finished
    if (known := finished.pair(name)) is not None:
        return known
    make = partial(create_inside, folder, again=finished.resumed)
    if (real := finished.emulated(name)) is None:
        report("emulated")
        real = _timed(f"{name} emulated", make, lambda inside: emulated.run(plan, inside), clock)
        finished.add_emulated(name, real)
    report("simulated")
    found = _with_simulated(name, plan, make, draws, real, clock)
    finished.add_pair(name, found)
    return found


def run_side_by_side(
    planned: Mapping[str, Plan],
    folder: Path,
    draws: int,
    at_once: int,
    report: Callable[[str, str], None],
    clock: Callable[[], float],
    finished: Finished | None = None,
) -> Iterator[Pair]:
    """Emulate up to `at_once` jobs at a time, then simulate one after the other, as `run` does.

    Yields the pairs in order, with those that are `finished`. `report` is called with the name of a
    job and "emulated" or "simulated", after the one and before the other. Where it, or the caller,
    is interrupted, the emulated runs end first.
    """
    finished = Finished() if finished is None else finished
    make = partial(create_inside, folder, again=finished.resumed)
    _emulate_all(planned, make, at_once, report, clock, finished)
    for name, plan in planned.items():
        if (known := finished.pair(name)) is None:
            report(name, "simulated")
            real = finished.emulated(name)
            assert real is not None
            known = _with_simulated(name, plan, make, draws, real, clock)
            finished.add_pair(name, known)
        yield known


def _emulate_all(
    planned: Mapping[str, Plan],
    make: Make,
    at_once: int,
    report: Callable[[str, str], None],
    clock: Callable[[], float],
    finished: Finished,
) -> None:
    """Emulate what is not finished, up to `at_once` jobs at a time."""
    stop = threading.Event()

    def watch() -> None:
        if stop.is_set():
            raise KeyboardInterrupt

    def emulate(name: str) -> Done:
        watch()

        def start(inside: Path) -> dict[str, Any]:
            return emulated.run(planned[name], inside, watch)

        return _timed(f"{name} emulated", make, start, clock)

    left = [n for n in planned if finished.pair(n) is None and finished.emulated(n) is None]
    with ThreadPoolExecutor(at_once) as pool:
        running: dict[Future[Done], str] = {pool.submit(emulate, name): name for name in left}
        try:
            for each in as_completed(running):
                finished.add_emulated(running[each], each.result())
                report(running[each], "emulated")
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _with_simulated(
    name: str, plan: Plan, make: Make, draws: int, real: Done, clock: Callable[[], float]
) -> Pair:
    def start(inside: Path) -> dict[str, Any]:
        return simulation.run(plan, inside)

    found = _timed(f"{name} simulated", make, start, clock)
    drawn = [
        simulation.run(plan, make(f"{name} simulated {luck}"), luck=luck)
        for luck in range(1, draws if depends_on_luck(plan) else 1)
    ]
    bases, seconds = (real.bases, found.bases), (real.real_s, found.real_s)
    return pair(name, real.summary, found.summary, bases, seconds, drawn)


def _timed(
    name: str, make: Make, start: Callable[[Path], dict[str, Any]], clock: Callable[[], float]
) -> Done:
    inside = make(name)
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
