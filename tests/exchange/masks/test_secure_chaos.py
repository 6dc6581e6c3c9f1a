"""Masked jobs in virtual time, through what goes wrong: the real hub, links and halves.

Members show here what nobody else sees, what they masked; with it each reply in the journal is made
again, from integers that anyone can add.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from chaos import schedule
from chaos.machines import FailingSimulation
from chaos.schedule import Happening
from chaos.simulated import strike

from edgetrain import strategies
from edgetrain.errors import EdgetrainError
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.masked_rounds import ROUNDS_IN_BLOCK
from edgetrain.exchange.masks.fixed_point import FixedPoint
from edgetrain.exchange.masks.masker import Masker
from edgetrain.exchange.masks.terms import default_threshold
from edgetrain.exchange.member import link
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.resolved import journal_settings
from edgetrain.runs.folder import read_metrics
from edgetrain.tasks.flat import FlatModel
from edgetrain.vectors.vector import checksum

MEMBERS, SPAN = 5, 8.0
BASIS = (
    "fleet.members=5", "pace_s=0.1", "network=wan-50ms", "batch=2", "delay=5", "secure=true",
    "optimizer={ name = 'sgd', lr = 0.05 }", "evaluate_every=1000000", "fsync=never",
)  # fmt: skip


SHORT = f" of at least {default_threshold(MEMBERS)} members are left"
MOST_TOGETHER = 2 * ROUNDS_IN_BLOCK
"""Rounds that may be closed at one time, where no delay makes blocks longer: those of a block whose
secrets are lost, and of the one that was begun before its end."""


@dataclass
class Confided:
    """What members have masked: (member, round) -> the integers, and how much they count."""

    given: dict[tuple[str, int], tuple[np.ndarray, float]] = field(default_factory=dict)
    masked: set[tuple[int, int]] = field(default_factory=set)
    keep: list[Masker] = field(default_factory=list)


@pytest.fixture
def confided(monkeypatch):
    found = Confided()
    masker_of, mask = link.masker_of, Masker.mask

    def owned_masker(welcome, request, elements):
        masker = masker_of(welcome, request, elements)
        masker.owner = welcome.name
        return masker

    def tell_mask(self, round, vector, weight, out):
        share = min(1.0, weight / self.block_of(round).unit)
        words = np.empty(vector.size, np.uint32)
        FixedPoint(SPAN, MEMBERS).encode(vector, words, share)
        assert (id(self), round) not in found.masked, "masked twice by one member"
        found.masked.add((id(self), round))  # who lost power may do it again: its round is new
        found.keep.append(self)
        found.given[self.owner, round] = words, share
        mask(self, round, vector, weight, out)

    monkeypatch.setattr(link, "masker_of", owned_masker)
    monkeypatch.setattr(Masker, "mask", tell_mask)
    return found


@dataclass(frozen=True)
class Ended:
    """A run, and what is left of it."""

    simulation: FailingSimulation
    planned: int
    """Rounds of a run without faults."""
    rounds: list
    events: list
    bases: dict[str, str]
    together: int
    """The most rounds that the hub closed at one time."""
    error: str
    """With which the run ended; "": it did not."""

    @property
    def given_up(self) -> int:
        """Rounds that nobody's contribution counted in."""
        return sum(not keys for _, keys, _ in self.rounds)


def run(folder: Path, happenings=(), *overrides: str) -> Ended:
    job = load(None, [*BASIS, *overrides])
    planned = plan(job)

    def begin():
        for each in happenings:
            simulation.at(each.at_s, functools.partial(strike, simulation, each))

    open_journal = functools.partial(Journal, folder / "journal", journal_settings(job))
    simulation = FailingSimulation(planned, folder, open_journal, begin)
    try:
        simulation.run(lambda: None, 1.0, time.monotonic, 2000.0)
        error = ""
        try:
            simulation.verdict()
        except EdgetrainError as failed:
            error = str(failed)
    finally:
        simulation.close()
    events = list(read_metrics(folder, "event"))
    bases = {
        event["member"]: event["reason"].rpartition("base ")[2]
        for event in events
        if event["event"] == "finished" and "base " in event["reason"]
    }
    with contextlib.closing(Journal(folder / "journal")) as journal:
        rounds = [
            (r.round, [(c.member, c.meant_for) for c in r.counted], b"".join(map(bytes, r.reply)))
            for r in journal.replies(0)
        ]
    closed = Counter(record["t"] for record in read_metrics(folder, "round"))
    planned_rounds = -(-job.train.steps // planned.local_steps)
    return Ended(
        simulation, planned_rounds, rounds, events, bases, max(closed.values(), default=0), error
    )


def broken_laws(ended: Ended, confided: Confided, gradient: bool = False) -> list[str]:
    """What of the laws does not hold; `laws.judge` for contributions that only their sum is known
    of."""
    is_short = ended.error.endswith(SHORT)
    given_up = ended.simulation.hub.given_up  # the hub may have ended before they were back
    broken = [
        f"{e.get('about')}: {e['reason']}"
        for e in ended.events
        if e["event"] == "error" and e["about"] not in given_up
        if not e["reason"].endswith(SHORT)
    ]
    if ended.error and not is_short:
        broken.append(ended.error)
    if ended.given_up > ended.planned:
        broken.append(f"{ended.given_up} rounds were given up")
    if ended.together > MOST_TOGETHER:
        broken.append(f"{ended.together} rounds were closed at one time")
    torch.manual_seed(0)
    base = FlatModel(ended.simulation.task.model()).params.copy()
    fixed, counted = FixedPoint(SPAN, MEMBERS), set()
    for round, keys, reply in ended.rounds:
        merged, total, weight = np.zeros_like(base), np.zeros(base.size, np.uint32), 0.0
        for key in keys:
            if key in counted or key[1] != round:
                broken.append(f"{key} counts in round {round}")
            counted.add(key)
            words, share = confided.given[key]
            total += words
            weight += share
        if keys:
            fixed.decode(total, weight, merged)
        if merged.tobytes() != reply:
            broken.append(f"the reply of round {round} is not the sum of {keys}")
        base += merged
    if not gradient:
        wanted = f"{checksum(base):016x}"
        broken += [
            f"{m} ended with {b}, not {wanted}" for m, b in ended.bases.items() if b != wanted
        ]
    elif len(set(ended.bases.values())) != 1:
        broken.append("bases differ")
    if any(e["reason"].endswith(SHORT) for e in ended.events):
        return broken
    steady = {f"m{i}" for i, m in enumerate(ended.simulation.members) if not m.was_off}
    missing = steady - given_up - set(ended.bases)
    # Behind the last round too few are left for those that came back late; and people may end it.
    if len(ended.rounds) > ended.planned or _people_ended(ended):
        missing -= {m.name for m in ended.simulation.members if m.process.over}
    return broken + [f"{name} did not come to the end" for name in missing]


def _people_ended(ended: Ended) -> bool:
    told = (f"{each['event']} {each['reason']}" for each in ended.events)
    return any(each.startswith("told") and "stop" in each for each in told)


@pytest.mark.parametrize("strategy", ["dga", "fedavg", "sync-sgd"])
def test_without_faults_every_round_is_the_sum_of_all(strategy, confided, tmp_path):
    steps = 12 if strategy == "sync-sgd" else 100
    other = [] if strategies.find(strategy).delays else ["delay=auto"]
    ended = run(tmp_path, (), f"strategy={strategy}", f"steps={steps}", *other)
    assert not broken_laws(ended, confided, gradient=strategy == "sync-sgd")
    assert len(ended.rounds) == (12 if strategy == "sync-sgd" else 20)
    assert all(len(keys) == 5 for _, keys, _ in ended.rounds)


def test_setting_up_a_block_keeps_no_round_waiting(confided, tmp_path):
    """Blocks are 16 rounds; a member in the middle of them sees the time of one round trip more
    than without masks, and no more at the ends of blocks."""
    ended = run(tmp_path, (), "steps=200", "delay=20", "network=wan-200ms")
    assert not broken_laws(ended, confided)
    waits = [s["wait_s"] for s in read_metrics(tmp_path, "step") if s["member"] == "m0"]
    assert max(waits[20:-1]) < 0.01


def seeds(*few, more):
    """`few` of them always, `more` with `make test-masks`."""
    return pytest.mark.parametrize(
        "seed", [*few, *(pytest.param(seed, marks=pytest.mark.masks) for seed in more)]
    )


@seeds(0, 5, more=(2, 7, 9, 114))
def test_whatever_goes_wrong_replies_are_sums_and_replicas_are_equal(seed, confided, tmp_path):
    drawn = schedule.draw(seed, 5, 20.0, 5, schedule.FAULTS)
    ended = run(tmp_path, drawn, "steps=200")
    assert not broken_laws(ended, confided), [str(each) for each in drawn]


def test_a_hub_that_is_restored_gives_up_what_was_under_way_and_goes_on(confided, tmp_path):
    ended = run(tmp_path, (Happening(8.0, "hub", 1.0),), "steps=200")
    assert not broken_laws(ended, confided)
    empty = [round for round, keys, _ in ended.rounds if not keys]
    assert 1 <= len(empty) <= 4
    assert len(ended.rounds) == 40
    assert sorted(ended.bases) == [f"m{i}" for i in range(MEMBERS)]


@pytest.mark.parametrize(
    "words",
    [("reply_codec=topk(0.1) | q2",), ("strategy=diloco", "local_steps=5", "delay=auto")],
    ids=str,
)
def test_a_restored_hub_knows_what_does_not_follow_from_replies(words, tmp_path):
    """What lossy ones left out, or an outer rule's state: the journal holds the mean, which is all
    that was ever known."""
    ended = run(tmp_path, (Happening(6.0, "hub", 1.0),), "steps=120", *words)
    assert not [e for e in ended.events if e["event"] in ("error", "refused")]
    assert sorted(ended.bases) == [f"m{i}" for i in range(MEMBERS)]
    assert len(set(ended.bases.values())) == 1
    assert len(ended.rounds) == 24


def test_too_few_members_learn_nothing_together_and_the_job_ends(confided, tmp_path):
    gone = tuple(Happening(6.0, "power", 1000.0, (member,)) for member in (1, 3))
    ended = run(tmp_path, gone, "steps=150", "deadline_s=5", "hub.rejoin_s=30")
    assert not broken_laws(ended, confided)
    assert ended.error == "3 of at least 4 members are left"
    said = [e["t"] for e in ended.events if "is given up" in e["reason"]]
    assert 1 <= len(said) <= 6
    assert all(b - a >= 5 for a, b in itertools.pairwise(said)), "one for each deadline"
    gone_at = next(e["t"] for e in ended.events if e["event"] == "gone")
    assert said[-1] - gone_at <= 31
    refused = {e["about"] for e in ended.events if e["event"] == "error"} - {"hub"}
    assert refused == {"m0", "m2", "m4"}


def test_members_that_come_back_in_time_go_on_with_new_keys(confided, tmp_path):
    gone = tuple(Happening(6.0, "power", 20.0, (member,)) for member in (1, 3))
    ended = run(tmp_path, gone, "steps=200", "deadline_s=60")
    assert not broken_laws(ended, confided)
    assert not ended.error
    assert len(ended.rounds[-1][1]) == 5


@seeds(306, more=(303, 308))
def test_short_deadlines_and_long_delays(seed, confided, tmp_path):
    """Rounds close without members that stand still; those learn it, and leave the rounds out."""
    drawn = schedule.draw(seed, 5, 20.0, 7)
    ended = run(tmp_path, drawn, "steps=200", "delay=40", "local_steps=2", "deadline_s=3")
    assert not broken_laws(ended, confided), [str(each) for each in drawn]


@pytest.mark.masks
@pytest.mark.parametrize("seed", range(300))
def test_members_go_below_the_threshold(seed, confided, tmp_path):
    """Two to five of five go within a second, for seconds or minutes, beside what else goes
    wrong."""
    rng = random.Random(f"{seed} below the threshold")
    who, at_s = rng.sample(range(MEMBERS), rng.randint(2, MEMBERS)), rng.uniform(1.0, 6.0)
    gone = [
        Happening(at_s + rng.random(), rng.choice(("power", "kill", "link")), for_s, (member,))
        for member in who
        for for_s in (4 * 30 ** rng.random(),)
    ]
    drawn = (*schedule.draw(seed, MEMBERS, 8.0, 2), *gone)
    ended = run(
        tmp_path, drawn, "steps=80", "deadline_s=3", "hub.lost_after_s=1", "hub.rejoin_s=20",
        "hub.empty_after_s=300",
    )  # fmt: skip
    assert not broken_laws(ended, confided), [str(each) for each in drawn]
