"""Closing rules on rounds that are only described."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from merging_room import Room, closed, filled, is_reply_to

from edgetrain.errors import ConfigError
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.runs.folder import create, read_metrics
from edgetrain.strategies.closing import ENOUGH, ROUNDS, LearnedDeadline, QuorumAndDeadline
from edgetrain.strategies.merging.rule import Mean
from edgetrain.training.simulated import simulation


@dataclass(frozen=True)
class Seen:
    """An open round."""

    opened: float
    members: tuple[str, ...] = ()
    missing: tuple[str, ...] = field(default=("z",))
    begun: float | None = None
    in_time: int = 4

    @property
    def contributions(self) -> int:
        return len(self.members)


@given(
    quorum=st.integers(1, 5), deadline_s=st.floats(0, 100), opened=st.floats(0, 100),
    later_s=st.floats(0, 100) | st.none(), waited_s=st.floats(0, 2000), count=st.integers(0, 9),
)  # fmt: skip
def test_a_round_closes_at_its_deadline_with_a_quorum_and_never_before(
    quorum, deadline_s, opened, later_s, waited_s, count
):
    """It runs from the round's first own contribution, of late ones alone ten times as long."""
    rule = QuorumAndDeadline(quorum, deadline_s)
    begun = None if later_s is None else opened + later_s
    now = opened + waited_s
    due = rule.due(Seen(opened, tuple(f"m{i}" for i in range(count)), begun=begun), now)
    is_over = (now - opened) / 10 >= deadline_s if begun is None else now - begun >= deadline_s
    assert due == (count >= quorum and is_over)


def test_late_contributions_are_of_the_quorum():
    rule = QuorumAndDeadline(3, 10.0)
    assert not rule.due(Seen(0.0, ("a", "b"), begun=0.0), 10.0)
    assert rule.due(Seen(0.0, ("a", "b", "b"), begun=0.0), 10.0)


# -- a deadline that is learned -------------------------------------------------------------------


def learned(rounds, quorum=1, most_s=60.0, every_s=1.0):
    """A rule that has seen these rounds: (seconds after the first, members missing)."""
    rule = LearnedDeadline(quorum, most_s)
    for number, (waited_s, missing) in enumerate(rounds):
        rule.note_round(every_s * number, waited_s, missing)
    return rule


def naive(rounds, most_s, every_s):
    waits = [w for waited_s, missing in rounds[-ROUNDS:] for w in (*waited_s, *[inf] * missing)]
    if len(rounds) < ENOUGH or not waits:
        return most_s
    middle = median(waits)
    if middle == inf:
        return most_s
    late = max(4 * median([abs(w - middle) for w in waits]), 0.1, 0.1 * every_s)
    return min(middle + late, most_s)


ROUNDS_SEEN = st.lists(
    st.tuples(st.lists(st.floats(0, 100), max_size=6), st.integers(0, 3)), max_size=24
)


@given(ROUNDS_SEEN, st.floats(0.2, 100), st.floats(0.01, 100))
def test_the_deadline_is_the_median_and_four_deviations(rounds, most_s, every_s):
    rule = learned(rounds, most_s=most_s, every_s=every_s)
    assert rule.deadline_s == pytest.approx(naive(rounds, most_s, every_s))
    assert rule.deadline_s <= most_s


def test_one_member_that_is_ten_times_slower_is_not_waited_for_and_half_of_them_are():
    fast = [0.01, 0.02, 0.03, 0.02, 0.04, 0.01]
    assert learned([([*fast, 9.0], 0)] * (ENOUGH - 1)).deadline_s == 60.0, "too few rounds"
    assert learned([([*fast, 9.0], 0)] * ENOUGH).deadline_s == pytest.approx(0.12)
    assert learned([(fast, 1)] * ENOUGH).deadline_s == pytest.approx(0.12), (
        "and it stays so while it is missing"
    )
    assert learned([([9.0], 0)] * ENOUGH).deadline_s == 9.1, "one of two is no outlier"
    assert learned([(fast[:1], 1)] * 2 * ENOUGH).deadline_s == 60.0
    assert learned([(fast, 0)] * ENOUGH, every_s=20.0).deadline_s == 2.02


def test_a_round_with_nothing_but_late_contributions_is_not_over():
    rule = learned([([0.01] * 6, 1)] * ENOUGH)
    assert not rule.due(Seen(0.0, ("a",), begun=None), 50.0)
    assert not rule.due(Seen(0.0, ("a",), begun=None), 599.0)
    assert rule.due(Seen(0.0, ("a",), begun=None), 600.0)
    assert not rule.due(Seen(0.0, ("a", "b"), begun=5.0), 5.05)
    assert rule.due(Seen(0.0, ("a", "b"), begun=5.0), 5.2)
    assert not rule.due(Seen(0.0, ("a", "b"), begun=5.0, in_time=3), 5.2), "3 of 8"
    assert not learned([([0.01] * 6, 1)] * ENOUGH, quorum=3).due(Seen(0.0, ("a", "b")), 90.0)


def test_one_member_ten_times_slower_holds_up_seven_others_no_longer_and_nothing_is_lost():
    """A hub and members that are only arithmetic: a round takes them 1 s, and one of them 10 s."""
    names, rounds, ends = "abcdefgh", 30, []
    takes_s = {name: 10.0 if name == "h" else 1.0 + 0.01 * names.index(name) for name in names}
    for rule in (QuorumAndDeadline(1, 60.0), LearnedDeadline(1, 60.0)):
        room, now, found = Room(Mean(), names, closing=rule), 0.0, []
        sent = dict.fromkeys(names, 0)
        busy_until = dict(takes_s)
        while room.hub.round < rounds:
            now += 0.25
            effects = room.hub.tick(now)
            for name in [name for name, until in busy_until.items() if until <= now]:
                del busy_until[name]
                effects += room.contribute(name, sent[name], filled(1.0), now=now)
                sent[name] += 1
            found += closed(effects)
            for name in names:  # the reply to its last contribution is there
                if name not in busy_until and sent[name] <= room.hub.round:
                    busy_until[name] = now + takes_s[name]
        counted = Counter(name for each in found for name in each.members)
        assert all(sent[name] - counted[name] <= (name == "h") for name in names), "none is lost"
        ends.append((now, [each.round for each in found if "h" in each.missing]))
    (fixed_s, none), (learned_s, without) = ends
    assert none == []
    assert without == list(range(ENOUGH, rounds))
    assert learned_s < 0.4 * fixed_s


@pytest.mark.parametrize("rule", [QuorumAndDeadline, LearnedDeadline])
@given(later=st.lists(st.integers(0, 40), min_size=3, max_size=6))
def test_members_that_begin_at_other_times_come_together_within_two_rounds(rule, later):
    """A round takes each member 40 s, the deadline is a seventh of that, and each began at a moment
    of its own: a late contribution waits for the others' round, and closes none of its own."""
    names = "abcdef"[: len(later)]
    room, now, found = Room(Mean(), names, closing=rule(1, 6.0)), 0.0, []
    sent, busy_until = dict.fromkeys(names, 0), {}
    for name, begins_s in zip(names, later, strict=True):
        busy_until[name] = 40.0 + begins_s
    while room.hub.round < 8 and now < 500:
        now += 1.0
        effects = room.hub.tick(now)
        room.known += [e.message.checksum for e in effects if is_reply_to("a", e)]
        for name in [name for name, until in busy_until.items() if until <= now]:
            del busy_until[name]
            effects += room.contribute(name, sent[name], filled(1.0), now=now)
            sent[name] += 1
        found += closed(effects)
        for name in names:  # the reply to its last contribution is there
            if name not in busy_until and sent[name] <= room.hub.round:
                busy_until[name] = now + 40.0
    assert {"".join(sorted(set(each.members))) for each in found[2:]} == {names}
    assert now < 500


def test_a_simulated_job_has_a_deadline_that_is_learned(tmp_path):
    words = [
        *("members=8", "device=raspberry-pi-5:7, raspberry-pi-zero-2w:1", "network=rtt-20ms"),
        *(
            "strategy=fedavg",
            "steps=140",
            "local_steps=20",
            "batch=48",
            "deadline_s=auto",
            "final_sync=0",
        ),
    ]
    folder = create(tmp_path, "auto")
    summary = simulation.run(plan(load(None, words)), folder)
    assert (summary["status"], summary["members_lost"]) == ("finished", [])
    rounds = list(read_metrics(folder, "round"))
    without = [r["round"] for r in rounds if "m7" in r["missing"]]
    assert without
    assert min(without) >= ENOUGH
    counted = Counter(name for record in rounds for name in record["members"])
    assert min(counted.values()) >= 7, "what came late counts, too"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["secure=true"], "it follows rounds that all members share"),
        (["strategy=fedbuff(4, 0.5)"], "it follows rounds that all members share"),
        (["deadline_s=soon"], "allowed is a number or 'auto' from 0.01 to 86400"),
    ],
)
def test_where_there_is_no_learned_deadline_is_one_clear_line(words, said):
    with pytest.raises(ConfigError) as refused:
        resolve(load(None, ["members=4", "deadline_s=auto", *words]))
    assert said in str(refused.value)
