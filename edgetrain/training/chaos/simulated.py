"""One chaos schedule over a simulated fleet: run it, and judge it by the laws."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from edgetrain.errors import EdgetrainError
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.records import Round
from edgetrain.jobs.plan import Plan
from edgetrain.runs import folder as runs
from edgetrain.tasks.flat import FlatModel
from edgetrain.training.chaos import laws
from edgetrain.training.chaos.laws import Merging, Outcome
from edgetrain.training.chaos.schedule import Happening
from edgetrain.training.simulated.simulation import Simulation
from edgetrain.vectors import layout as layouts

MOST_TIMES = 20.0
"""A run that takes so many times what it takes without faults, and two minutes, stands still."""


def run(planned: Plan, seed: int, happenings: Sequence[Happening], calm_s: float) -> Outcome:
    """Run a planned job through one schedule. `calm_s` is what it takes without: `calm_seconds`."""
    merging = laws.Merging.of(planned.job)
    broken: list[str] = []
    with tempfile.TemporaryDirectory(prefix="edgetrain-chaos-") as made:
        folder = Path(made)
        simulation = Simulation(planned, folder, False, folder / "journal", happenings)
        try:
            try:
                simulation.run(lambda: None, 1.0, time.monotonic, MOST_TIMES * calm_s + 120)
                simulation.verdict()
            except EdgetrainError as error:
                broken.append(f"the run failed: {error}")
            simulation.close()
            broken += _judged(planned, simulation, folder, merging)
        finally:
            simulation.close()
    rounds = len(simulation.merged)
    return Outcome(seed, tuple(happenings), rounds, simulation.seconds, tuple(broken))


def _judged(planned: Plan, simulation: Simulation, folder: Path, merging: Merging) -> list[str]:
    events = list(runs.read_metrics(folder, "event"))
    applied = {member.name: member.half.applied for member in simulation.trained.values()}
    ended = {
        name: laws.Ended(applied[name], event["reason"].rpartition("base ")[2])
        for event in events
        if event["event"] == "finished" and "base " in event["reason"]
        for name in [event["member"]]
    }
    # Of a member that was away for longer than the hub waits, and whose job ended meanwhile, only
    # what was answered is promised.
    names = [f"m{i}" for i in range(planned.job.fleet.members) if i not in simulation.cut_off]
    steady = [name for name in names if name not in simulation.given_up]
    torch.manual_seed(planned.job.seed)
    flat = FlatModel(simulation.task.model())
    initial = flat.params.copy()
    merging = merging.bound(layouts.read(flat.description, flat.elements))
    told = [simulation.merged[round] for round in sorted(simulation.merged)]
    broken = laws.judge(told, simulation.witness, merging, initial, ended, steady)
    if planned.job.hub.when_full == "stop":  # else the journal has what came after the last gap
        broken += _compared(folder / "journal", told)
    broken += [
        f"{event.get('about')}: {event['reason']}"
        for event in events
        if event["event"] == "error" and event.get("about") not in simulation.given_up
    ]
    missing = [name for name in steady if name not in ended]
    if missing:
        broken.append(f"{', '.join(missing)} never came to the end")
    return broken


def _compared(folder: Path, told: Sequence[Round]) -> list[str]:
    """What members were told and the journal, opened again, does not have."""
    with contextlib.closing(Journal(folder)) as journal:
        kept = list(journal.replies(journal.tail or 0))
    later = told[-len(kept) :] if kept else []
    same = [_known_by(record) for record in kept] == [_known_by(record) for record in later]
    return [] if same and (kept or not told) else ["the journal has not what members were told"]


def _known_by(record: Round) -> tuple[object, ...]:
    return record.round, record.counted, record.checksum, b"".join(map(bytes, record.reply))


def calm_seconds(planned: Plan) -> float:
    """Virtual seconds that the job takes when nothing goes wrong."""
    with tempfile.TemporaryDirectory(prefix="edgetrain-chaos-") as made:
        simulation = Simulation(planned, Path(made), False)
        try:
            simulation.run(lambda: None, 1.0, time.monotonic)
            simulation.verdict()
        finally:
            simulation.close()
    return simulation.seconds
