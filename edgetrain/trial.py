"""One chaos schedule over a simulated fleet: run it, and judge it by the laws of `chaos`."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from edgetrain import chaos, codecs, runs, strategies
from edgetrain.chaos import Happening, Outcome
from edgetrain.config import Job
from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.journal import Journal
from edgetrain.merge import SliceRule
from edgetrain.plans import Plan
from edgetrain.records import Round
from edgetrain.simulate import Simulation
from edgetrain.vector import FlatModel

MOST_TIMES = 20.0
"""A run that takes so many times what it takes without faults, and two minutes, stands still."""


def merge_rule(job: Job) -> SliceRule:
    """The rule that a verdict merges again with; ConfigError for a job that cannot be judged so."""
    if job.strategy.secure:
        raise ConfigError(
            "chaos with strategy.secure: its verdict merges contributions again, and nobody can "
            "read these",
            "leave secure out",
        )
    rule = strategies.find(job.strategy.name).merge_rule(job.strategy.merge)
    if strategies.find(job.strategy.name).contributes != "displacement":
        raise ConfigError(
            f"chaos with {job.strategy.name}: a device that comes back cannot join",
            "choose dga or fedavg",
        )
    named = {job.strategy.codec, job.strategy.reply_codec or job.strategy.codec}
    if any(not isinstance(codecs.parse(name), codecs.Dense) for name in named):
        raise ConfigError(f"chaos with codec {' and '.join(sorted(named))}", "leave it at fp32")
    if not isinstance(rule, SliceRule):
        raise ConfigError(f"chaos with merge = '{job.strategy.merge}'", "leave it at 'mean'")
    return rule


def run(planned: Plan, seed: int, happenings: Sequence[Happening], calm_s: float) -> Outcome:
    """Run a planned job through one schedule. `calm_s` is what it takes without: `calm_seconds`."""
    rule = merge_rule(planned.job)
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
            broken += _judged(planned, simulation, folder, rule)
        finally:
            simulation.close()
    rounds = len(simulation.merged)
    return Outcome(seed, tuple(happenings), rounds, simulation.seconds, tuple(broken))


def _judged(planned: Plan, simulation: Simulation, folder: Path, rule: SliceRule) -> list[str]:
    events = list(runs.read_metrics(folder, "event"))
    applied = {member.name: member.half.applied for member in simulation.trained.values()}
    ended = {
        name: chaos.Ended(applied[name], event["reason"].rpartition("base ")[2])
        for event in events
        if event["event"] == "finished" and "base " in event["reason"]
        for name in [event["member"]]
    }
    # Of a member that was away for longer than the hub waits, and whose job ended meanwhile, only
    # what was answered is promised.
    names = [f"m{i}" for i in range(planned.job.fleet.members) if i not in simulation.cut_off]
    steady = [name for name in names if name not in simulation.given_up]
    torch.manual_seed(planned.job.seed)
    initial = FlatModel(simulation.task.model()).params.copy()
    told = [simulation.merged[round] for round in sorted(simulation.merged)]
    broken = chaos.judge(told, simulation.witness, rule, initial, ended, steady)
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
