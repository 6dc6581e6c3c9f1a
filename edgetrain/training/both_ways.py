"""Run one job emulated and simulated, for a report on how far the simulation is off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgetrain.jobs.plan import Plan
from edgetrain.runs.folder import create_inside, read_metrics
from edgetrain.runs.reports.calibration import Pair, bases_of, pair
from edgetrain.training import emulated
from edgetrain.training.simulated import simulation


def run(
    name: str,
    plan: Plan,
    folder: Path,
    draws: int,
    report: Callable[[str], None],
    clock: Callable[[], float],
) -> Pair:
    """Run a planned job both ways, each run in a folder of its own inside `folder`.

    A job whose links lose packets is simulated `draws` times, each time with other losses. `report`
    is called with "emulated" and "simulated" before each of the first two runs. Raises what
    `emulated.run` and `simulation.run` raise.
    """
    found, real_s, bases = [], [], []
    for how, start in (("emulated", emulated.run), ("simulated", simulation.run)):
        report(how)
        inside = create_inside(folder, f"{name} {how}")
        began = clock()
        found.append(start(plan, inside))
        real_s.append(clock() - began)
        bases.append(bases_of(read_metrics(inside, "event")))
    drawn = [
        simulation.run(plan, create_inside(folder, f"{name} simulated {luck}"), luck=luck)
        for luck in range(1, draws if loses_packets(plan) else 1)
    ]
    return pair(name, found[0], found[1], (bases[0], bases[1]), (real_s[0], real_s[1]), drawn)


def loses_packets(plan: Plan) -> bool:
    """Whether any link of the job loses packets."""
    uplinks = [site.uplink for site in plan.sites]
    return any(profile.has_loss for profile in (*plan.network_profiles.values(), *uplinks))
