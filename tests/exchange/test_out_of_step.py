"""Members that are out of step: real drivers, links and hub in memory, in an order drawn."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from fleet import Disk, Fleet
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgetrain import strategies
from edgetrain.errors import ConfigError
from edgetrain.exchange.hub.terms import Policy
from edgetrain.jobs.reading import parse
from edgetrain.jobs.rules import resolve
from edgetrain.strategies.arrivals import ArrivalTerms
from edgetrain.vectors.vector import checksum

ROWS = ("fedbuff(2, 0.5)", "fedbuff(3, 0, none)", "ssp(0)", "ssp(2)", "ssp(inf)", "async-sgd(2)")


def fleet_of(strategy, members, local_steps, delay, steps, seed, **other):
    policy = Policy(members, deadline_s=1e3, lost_after_s=5.0)
    rng = random.Random(seed)
    return Fleet(strategy, members, local_steps, delay, steps, rng=rng, policy=policy, **other)


def check_merged_once(fleet, disk, killed=()):
    """Every contribution counts once, and none of those that came to the end is lost."""
    counted = Counter(disk.counted)
    assert max(counted.values()) == 1
    for member in fleet.members:
        if member.index not in killed:
            given = {(f"m{member.index}", number) for number in member.submitted}
            assert given <= counted.keys()


def check_replicas(fleet, disk):
    """Bases after the same reply have the same bits; the hub's has them too."""
    known = {}
    for member in fleet.members:
        for applied, base in member.checksums.items():
            assert known.setdefault(applied, base) == base
            assert fleet.hub.checksum(applied, base) == base
    ends = [m.half.applied for m in fleet.members if m.state == "done"]
    # What a member has sent that was killed may be merged when the others are through.
    assert fleet.dead or max(ends) > max(record.round for record in disk.rounds() if record.counted)


@given(
    st.sampled_from(ROWS),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([0, 2, 1000]),
    st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_every_contribution_counts_once_and_replicas_are_equal(
    row, members, local_steps, delay, seed
):
    disk = Disk()
    fleet = fleet_of(row, members, local_steps, delay, 7, seed, disk=disk).run()
    assert [member.state for member in fleet.members] == ["done"] * members
    check_merged_once(fleet, disk)
    check_replicas(fleet, disk)


@given(
    st.sampled_from(ROWS),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from([0, 2, 1000]),
    st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_who_waits_for_all_ends_with_what_all_gave(row, steps, local_steps, delay, seed):
    disk = Disk()
    fleet = fleet_of(row, len(steps), local_steps, delay, 1, seed, disk=disk)
    for member, count in zip(fleet.members, steps, strict=True):
        member.steps = count
    fleet.members[0].waits_for_all = True
    fleet.run()
    assert [member.state for member in fleet.members] == ["done"] * len(steps)
    check_merged_once(fleet, disk)
    check_replicas(fleet, disk)
    assert fleet.members[0].params.tobytes() == fleet.hub.base.tobytes()
    assert fleet.members[0].half.applied == len(disk.rounds())


@pytest.mark.parametrize("row", ["fedbuff(3, 0.5)", "ssp(0)", "fedbuff(3, 0.5, none)"])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_with_all_members_and_no_delay_it_is_local_sgd_bit_for_bit(row, local_steps):
    ends = []
    for strategy in ("local-sgd", row):
        fleet = fleet_of(strategy, 3, local_steps, 0, 8, 5).run()
        ends.append([member.params.tobytes() for member in fleet.members])
        assert fleet.hub.round == -(-8 // local_steps)
    assert ends[0] == ends[1]


def breaking(fleet, cuts, silences, kills):
    """What goes wrong after each event: connections break, with a word or without, members die."""
    turns = itertools.count()

    def go_wrong():
        turn = next(turns)
        for happens, to in ((fleet.cut, cuts), (fleet.unplug, silences)):
            if (index := to.get(turn)) is not None and index < len(fleet.members):
                happens(index)
        if turn in kills and fleet.hub.started and len(fleet.dead) < len(fleet.members) - 1:
            fleet.kill(len(fleet.members) - 1 - len(fleet.dead))

    return go_wrong


TURNS = st.dictionaries(st.integers(0, 200), st.integers(0, 3), max_size=4)


@given(
    row=st.sampled_from(ROWS),
    members=st.integers(1, 4),
    delay=st.sampled_from([0, 3, 1000]),
    codec=st.sampled_from(["fp32", "topk(0.5) | q2"]),
    hub_kills=st.lists(st.integers(0, 150), max_size=2),
    cuts=TURNS,
    silences=TURNS,
    kills=st.sets(st.integers(0, 200), max_size=2),
    seed=st.integers(0, 2**32),
)
def test_whatever_breaks_contributions_count_once_and_members_come_to_the_end(
    row, members, delay, codec, hub_kills, cuts, silences, kills, seed
):
    silences = {} if hub_kills else silences  # that would outlast the members' patience
    disk = Disk()
    fleet = fleet_of(
        row, members, 2, delay, 9, seed, disk=disk, kills=hub_kills, codec=codec, elements=24
    )
    fleet.members[0].waits_for_all = seed % 2 == 0
    fleet.run(breaking(fleet, cuts, silences, kills))
    living = [member for member in fleet.members if member.index not in fleet.dead]
    assert [member.state for member in living] == ["done"] * len(living)
    check_merged_once(fleet, disk, fleet.dead)
    check_replicas(fleet, disk)


def check_no_base_is_too_old(fleet, disk, lead, steps):
    """The law of `ssp(lead)`; `steps` are (member, its number, replies applied) of each step."""
    merged = {(c.member, c.meant_for): r.round for r in disk.rounds() for c in r.counted}
    for member, number, applied in steps:
        for other in fleet.members:
            lacks = [
                given
                for given in other.submitted
                if given < number - lead and merged.get((f"m{other.index}", given), 0) >= applied
            ]
            assert not lacks, (member, number, applied, other.index, lacks)


# m0 joins twice, as the hub dies, and begins from the first of two answers.
@example(
    lead=3, members=3, local_steps=1, correction="own", cuts={12: 2}, kills=set(), hub_kills=[8],
    seed=1715345022,
)  # fmt: skip
@given(
    lead=st.integers(0, 3),
    members=st.integers(1, 4),
    local_steps=st.integers(1, 3),
    correction=st.sampled_from(["own", "none"]),
    cuts=TURNS,
    kills=st.sets(st.integers(0, 200), max_size=2),
    hub_kills=st.lists(st.integers(0, 150), max_size=1),
    seed=st.integers(0, 2**32),
)
def test_no_step_is_taken_on_a_base_that_lacks_what_is_older_than_s_rounds(
    lead, members, local_steps, correction, cuts, kills, hub_kills, seed
):
    disk, steps = Disk(), []
    row = f"ssp({lead}, {correction})"
    fleet = fleet_of(row, members, local_steps, 1000, 9, seed, disk=disk, kills=hub_kills)
    local_step = fleet.local_step

    def note(index, step, params):
        half = fleet.members[index].half
        steps.append((index, half.round, half.applied))
        return local_step(index, step, params)

    fleet.local_step = note
    fleet.run(breaking(fleet, cuts, {}, kills))
    check_no_base_is_too_old(fleet, disk, lead, steps)
    living = [m for m in fleet.members if m.index not in fleet.dead]
    assert [member.state for member in living] == ["done"] * len(living)


@pytest.mark.parametrize("row", ["fedbuff(2, 0.5)", "ssp(1)", "async-sgd(2)"])
def test_a_hub_killed_at_any_instant_goes_on_with_the_same_bits(row):
    """Its base is what the records in the journal lead to, at every cut; nothing is lost."""
    for cut in range(0, 200, 3):
        disk = Disk()
        fleet = fleet_of(row, 2, 2, 1000, 7, 3, disk=disk, kills=[cut]).run()
        if fleet.fuse is not None:
            break  # the run was over before
        assert [member.state for member in fleet.members] == ["done"] * 2
        check_merged_once(fleet, disk)
        check_replicas(fleet, disk)
        base = fleet.initial.copy()
        for record in disk.rounds():
            base += np.frombuffer(b"".join(record.reply), np.float32)
            assert checksum(base) == record.checksum
        assert base.tobytes() == fleet.hub.base.tobytes()
    else:
        pytest.fail("the run did more than 200 things")
    assert cut > 25


def closed(row, *ages, members=4):
    """What a hub makes of contributions of ones with these ages, one of each member, in the order
    in which they come: (reply, number of contributions) for each round."""
    find = strategies.find(row)
    rule = find.closing_rule(ArrivalTerms(members, 1, 60.0))
    found, given = [], []
    for number, age in enumerate(ages):
        given.append(age)
        view = SimpleNamespace(
            opened=0.0,
            contributions=len(given),
            lacks_nobody=number == members - 1,
            advances=number == members - 1,
        )
        if rule.due(view, 1.0):
            found.append((sum(rule.weight(a, len(given), members) for a in given), len(given)))
            given = []
    return found


@pytest.mark.parametrize(
    ("row", "replies"),
    [
        # (1/2) (1 + 3^-0.5), as in the paper's algorithm 1: not divided by the sum of the factors.
        ("fedbuff(2, 0.5)", [((1 + 3**-0.5) / 2, 2), ((1 + 4**-0.5) / 2, 2)]),
        ("fedbuff(4, 0)", [(1.0, 4)]),
        ("fedbuff(3, 1)", [((1 + 1 / 3 + 1) / 3, 3), (1 / 4, 1)]),
        ("ssp(0)", [(1.0, 4)]),
        ("ssp(3)", [(0.25, 1)] * 4),
        ("async-sgd(1)", [(4.0, 4)]),
    ],
)
def test_a_reply_is_what_the_paper_says(row, replies):
    assert closed(row, 0, 2, 0, 3) == [(pytest.approx(reply), count) for reply, count in replies]


def test_a_round_closes_at_its_deadline_and_when_nobody_can_add_to_it():
    rule = strategies.find("fedbuff(3, 0)").closing_rule(ArrivalTerms(4, 1, 60.0))
    view = SimpleNamespace(opened=0.0, contributions=1, lacks_nobody=False, advances=True)
    assert not rule.due(view, 59.0)
    assert rule.due(view, 60.0)
    assert rule.due(SimpleNamespace(**{**vars(view), "lacks_nobody": True}), 1.0)
    assert not rule.due(SimpleNamespace(**{**vars(view), "contributions": 0}), 99.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["strategy=fedbuf(4, 0.5)"], "no strategy 'fedbuf' (did you mean 'fedbuff'?)"),
        (["strategy=ssp(-1)"], "ssp: s = -1 (allowed are whole numbers from 0 to 100000 and inf)"),
        (
            ["strategy=fedbuff(0, 1)"],
            "fedbuff: M = 0 (allowed are whole numbers from 1 to 100000)",
        ),
        (
            ["strategy=fedbuff(9, 1)", "members=8"],
            "fedbuff(9, 1) with 8 members: a round would wait for more than there are (M = 8, or "
            "less)",
        ),
        (
            ["strategy=fedbuff(2, 1)", "members=8", "merge=median"],
            "strategy.merge = 'median' and fedbuff(2, 1): a round has 2 contributions, and the "
            "rule compares at least 3 (fedbuff with M = 3 or more, or merge = 'mean')",
        ),
        (
            ["strategy=ssp(3)", "members=8", "secure=true"],
            "strategy.secure and ssp(3): masks are removed from the sum of all members' whole "
            "vectors, at one hub (leave secure out, or choose dga or fedavg)",
        ),
        (
            ["strategy=async-sgd(5)", "unit=member", "noise=1"],
            "privacy.unit = 'member' and async-sgd(5): how much a member counts depends on when "
            "its contributions arrive, as would epsilon (leave privacy out, or choose dga or "
            "fedavg)",
        ),
        (
            ["strategy=ssp(inf)", "codec=auto"],
            "ssp(inf) and strategy.codec = 'auto': it follows rounds that all members share, "
            "whenever they end (choose dga or fedavg, or name a codec: fp16, topk(0.01) | q2)",
        ),
        (
            ["strategy=ssp(3)", "final_sync=0.2"],
            "ssp(3) and strategy.final_sync = 0.2: members are out of step, and have no rounds "
            "together (choose dga or fedavg, or leave final_sync out)",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(words, said):
    with pytest.raises(ConfigError) as refused:
        resolve(parse({}, words))
    assert str(refused.value) == said
