"""Run jobs emulated and simulated, for a report on how far the simulation is off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edgetrain.jobs.resolved import Resolved
from edgetrain.runs.folder import create_inside, read_metrics
from edgetrain.runs.reports.calibration import CalibratedPair, bases_of, pair
from edgetrain.training import emulated
from edgetrain.training.simulated import simulation

Make = Callable[[str], Path]
"""Makes the folder of one run."""


def run(
    name: str,
    plan: Resolved,
    folder: Path,
    draws: int,
    report: Callable[[str], None],
    clock: Callable[[], float],
) -> CalibratedPair:
    """Run a planned job both ways, each run in a folder of its own inside `folder`.

    A job whose links lose packets, or have jitter, is simulated `draws` times, each time with other
    losses and delays. `report` is called with "emulated" and "simulated" before each of the first
    two runs. Raises what `emulated.run` and `simulation.run` raise.
    """
    make = partial(create_inside, folder)
    report("emulated")
    real = _timed(f"{name} emulated", make, lambda inside: emulated.run(plan, inside), clock)
    report("simulated")
    found = _timed(f"{name} simulated", make, lambda inside: simulation.run(plan, inside), clock)
    drawn = [
        simulation.run(plan, make(f"{name} simulated {luck}"), luck=luck)
        for luck in range(1, draws if depends_on_luck(plan) else 1)
    ]
    bases, seconds = (real.bases, found.bases), (real.real_s, found.real_s)
    return pair(name, real.summary, found.summary, bases, seconds, drawn)


@dataclass(frozen=True)
class Done:
    """A run of a job: its summary, the bases of its members, and its seconds on this machine."""

    summary: dict[str, Any]
    bases: set[str]
    real_s: float


def _timed(
    name: str, make: Make, start: Callable[[Path], dict[str, Any]], clock: Callable[[], float]
) -> Done:
    inside = make(name)
    began = clock()
    summary = start(inside)
    real_s = clock() - began
    return Done(summary, bases_of(read_metrics(inside, "event")), real_s)


def depends_on_luck(plan: Resolved) -> bool:
    """Whether any link of the job loses packets or has a delay that is drawn."""
    uplinks = [site.uplink for site in plan.sites]
    profiles = [*plan.network_profiles.values(), *uplinks]
    return any(
        profile.has_loss or profile.up.jitter_ms or profile.down.jitter_ms for profile in profiles
    )
