"""A hub that is killed between any two of its effects, and restored: nothing is lost or doubled."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from fleet import Disk, Fleet
from hub_desk import ZEROS, Desk, back, lost, raw, the
from hypothesis import example, given
from hypothesis import strategies as st
from loopback import Loopback

from edgetrain import codecs
from edgetrain.errors import ConfigError, Diverged
from edgetrain.exchange.delay import Delay
from edgetrain.exchange.hub.effects import Save, Send, Write
from edgetrain.exchange.hub.journal import Journal, JournalSettings
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.records import Restarted, Round, decode, encode
from edgetrain.exchange.hub.serve import serve
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import PROTOCOL, Base, Beat, Contribute, Join, Leave, Start, pack
from edgetrain.strategies import find
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.blocks import BLOCK
from edgetrain.vectors.vector import checksum

STREAMING = "streaming-diloco(3, 0.5)"
STRATEGIES = ("sync-sgd", "local-sgd", "fedavg", "dga", "diloco", "fedyogi", STREAMING)


def elements_of(strategy):
    """Enough for the ranges that its rounds concern."""
    return 3 * BLOCK - 8 if strategy == STREAMING else 24


def fleet(
    strategy, seed, *, kills=(), members=3, local_steps=2, delay=5, steps=11, every_snapshot=0, **o
):
    disk = Disk(every_snapshot)
    made = Fleet(
        strategy, members, local_steps, delay, steps, rng=random.Random(seed), disk=disk,
        kills=kills, weights=[1.0, 2.0, 3.0, 4.0][:members], elements=elements_of(strategy), **o,
    )  # fmt: skip
    return made.run()


def assert_nothing_lost(found, unhurt):
    """Everyone got to the end, with the bits that a run without a kill gives."""
    assert [m.state for m in found.members] == ["done"] * len(found.members)
    assert {m.params.tobytes() for m in found.members} == {unhurt.members[0].params.tobytes()}
    if unhurt.hub.base is not None:
        assert found.hub.base.tobytes() == unhurt.hub.base.tobytes()
    assert found.hub.round == unhurt.hub.round
    assert_once(found)


def assert_once(found):
    """Every contribution that was answered is in the journal, and none is in it twice."""
    counted = found.disk.counted
    assert len(counted) == len(set(counted))
    for member in found.members:
        gave = member.answered & member.submitted
        assert {(f"m{member.index}", round) for round in gave} <= set(counted)


@given(
    st.sampled_from(STRATEGIES),
    st.lists(st.integers(0, 150), min_size=1, max_size=3),
    st.integers(0, 2**32),
    st.sampled_from(["fp32", "bf16", "topk(0.5) | q2", "auto(0.3)"]),
)
def test_a_hub_killed_between_any_two_effects_loses_nothing(strategy, kills, seed, codec):
    unhurt = fleet(strategy, seed, codec=codec)
    found = fleet(strategy, seed, kills=kills, codec=codec)
    assert_nothing_lost(found, unhurt)


@given(
    st.sampled_from(STRATEGIES),
    st.dictionaries(st.integers(0, 200), st.integers(0, 2), min_size=1, max_size=12),
    st.lists(st.integers(0, 150), max_size=2),
    st.integers(0, 2**32),
    st.sampled_from(["fp32", "topk(0.5) | q2"]),
)
# A member that comes back, and then the hub dies.
@example("sync-sgd", {41: 0, 69: 0, 0: 0, 1: 0, 2: 0, 3: 0}, [43], 0, "fp32")
def test_connections_that_break_lose_nothing(strategy, cuts, kills, seed, codec):
    """Whatever was on its way, and whatever follows what was lost."""
    disk = Disk()
    found = Fleet(
        strategy, 3, 2, 5, 11, rng=random.Random(seed), disk=disk, kills=kills,
        weights=[1.0, 2.0, 3.0], codec=codec, elements=elements_of(strategy),
    )  # fmt: skip
    turns = itertools.count()

    def cut():
        index = cuts.get(next(turns))
        if index is not None:
            found.cut(index)

    found.run(cut)
    assert_nothing_lost(found, fleet(strategy, seed, codec=codec))


@given(
    st.sampled_from(["local-sgd", "fedavg", "dga", STREAMING]),
    st.dictionaries(st.integers(0, 200), st.integers(0, 2), min_size=1, max_size=4),
    st.sampled_from([0, 5]),
    st.integers(0, 2**32),
    st.sampled_from(["fp32", "topk(0.5) | q2"]),
)
# m0 waits for the reply to its last contribution while the next round closes without it.
@example("local-sgd", {41: 0}, 0, 0, "fp32")
# m2 sends again what came too late, and is cut off once more when it has every reply.
@example("dga", {76: 2, 107: 2}, 5, 20, "fp32")
# m0 is told twice to leave rounds out, and what it gave in between is lost on the way.
@example("local-sgd", {60: 0, 70: 2, 86: 0, 99: 0, 115: 1}, 5, 2195, "fp32")
def test_members_that_come_back_after_rounds_closed_without_them_go_on(
    strategy, silences, delay, seed, codec
):
    """Neither end knows that a connection is dead, and rounds have a short deadline."""
    found = Fleet(
        strategy, 3, 2, delay, 11, rng=random.Random(seed), disk=Disk(), codec=codec,
        policy=Policy(3, deadline_s=20.0), elements=elements_of(strategy),
    )  # fmt: skip
    turns = itertools.count()

    def unplug():
        index = silences.get(next(turns))
        if index is not None:
            found.unplug(index)

    found.run(unplug)
    assert [m.state for m in found.members] == ["done"] * 3
    for member in found.members:  # those that missed rounds train on when the others are done
        assert member.params.tobytes() == member.half.base.tobytes()
        for applied, base in member.checksums.items():
            assert base == found.hub.checksum(applied)
    assert_once(found)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_single_cut_point(strategy):
    unhurt = fleet(strategy, 7, members=2, steps=10)
    for cut in range(200):
        found = fleet(strategy, 7, kills=[cut], members=2, steps=10)
        if found.fuse is not None:
            break  # the run was over before
        assert_nothing_lost(found, unhurt)
    else:
        pytest.fail("the run did more than 200 things")
    assert cut > 25


@given(
    st.sampled_from(["local-sgd", "dga", STREAMING]), st.integers(10, 150), st.integers(0, 2**32)
)
def test_members_that_missed_too_much_go_on_from_the_base(strategy, kill, seed):
    """The journal has a snapshot after every round and nothing before it."""
    found = fleet(strategy, seed, kills=[kill], every_snapshot=1)
    assert [m.state for m in found.members] == ["done"] * 3
    assert {m.params.tobytes() for m in found.members} == {found.hub.base.tobytes()}
    counted = found.disk.counted
    assert len(counted) == len(set(counted))
    if strategy != "local-sgd":
        return  # what a member gets at once it would have got later: as good, but not the same
    unhurt = fleet(strategy, seed)
    np.testing.assert_allclose(found.hub.base, unhurt.hub.base, rtol=1e-4, atol=1e-5)


# -- the hub alone --------------------------------------------------------------------------------


def books(hub):
    """All that a restored hub has to have in common with the one before."""
    state = hub.state()
    return {
        "base": None if state.base is None else state.base.tobytes(),
        "round": state.round,
        "delay": state.delay,
        "checksums": {round: c for round, c in state.checksums if round <= state.round},
        "members": {
            seat.name: (
                seat.next_round,
                seat.by_range,
                seat.session,
                seat.index,
                seat.weight,
                seat.address,
            )
            for seat in state.seats
        },
        "unsent": {name: array.tobytes() for name, array in state.memory.items()},
        "outer": {name: array.tobytes() for name, array in state.outer.items()},
    }


@given(
    st.sampled_from(STRATEGIES),
    st.integers(0, 2**32),
    st.sampled_from(["fp32", "topk(0.5)", "int8", "auto"]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([None, 4]),
)
def test_a_restored_hub_is_the_hub_bit_for_bit(strategy, seed, codec, every_snapshot, delay):
    disk = Disk(every_snapshot)
    made = Fleet(
        strategy, 2, 2, delay, 9, rng=random.Random(seed), disk=disk, codec=codec,
        wanted_delay=3, elements=elements_of(strategy),
    )  # fmt: skip

    def compare():
        if disk.state is None:
            return
        again = made.fresh_hub()
        again.restore(disk.state, disk.records(), made.now)
        lost, found = books(made.hub), books(again)
        if not made.strategy.hub_keeps_base:  # told by members, for the open round too
            lost["checksums"].pop(made.hub.round, None)
            found["checksums"].pop(made.hub.round, None)
            found["base"] = None
        assert found == lost
        assert again.epoch == made.hub.epoch + 1

    made.run(compare)
    assert made.hub.round > 3


def test_a_restored_hub_waits_for_everyone_but_not_for_ever():
    disk = Disk()
    made = Fleet("local-sgd", 2, 1, 0, 50, disk=disk, policy=Policy(2, rejoin_s=30.0))
    while made.hub.round < 5:
        made.advance()
    made.kill(1)
    made.restart_hub()
    assert made.hub.present == ["m0", "m1"]
    made.run()
    assert made.members[0].state == "done"
    assert ("gone", "m1") in [(note.event, note.member) for note in made.notes]
    assert made.now > 30


def test_the_record_of_a_round_that_does_not_lead_to_its_checksum_is_divergence():
    found = fleet("dga", 1)
    records = found.disk.records()
    index = next(i for i, r in enumerate(records) if isinstance(r, Round) and r.round == 2)
    header, payloads = encode(records[index])
    wrong = bytearray(b"".join(payloads))
    wrong[3] ^= 1
    records[index] = decode(header, bytes(wrong))
    with pytest.raises(Diverged, match="after round 2 of the journal"):
        found.fresh_hub().restore(found.disk.state, records, 0.0)


def test_the_journal_of_another_job_is_refused_with_both():
    found = fleet("dga", 1)
    terms = Terms(find("dga"), 3, Delay(5))
    other = Hub(terms, Policy(3), Mean(), codecs.Dense(), codecs.Dense())
    with pytest.raises(ConfigError, match=r"every 2, delay 5.*this one is dga, every 3, delay 5"):
        other.restore(found.disk.state, [], 0.0)


def test_a_restored_hub_writes_its_epoch_before_anyone_hears_of_it():
    found = fleet("dga", 1)
    again = found.fresh_hub()
    again.restore(found.disk.state, found.disk.records()[:5], 0.0)
    effects = again.handle(b"member-0", Beat(), 0.0)
    assert effects[0] == Write(Restarted(1))
    assert Send(b"member-0", Beat(1)) in effects[1:]
    assert Write(Restarted(1)) not in again.tick(0.0)


# -- nobody is there ------------------------------------------------------------------------------


class Kept(Desk):
    """A desk that keeps a journal."""

    def __init__(self, **policy):
        super().__init__(2, **policy)
        self.disk = Disk()
        self.join("a", session=6)
        self.join("b", session=7)
        self.tell("a", Base(0, 1, raw(ZEROS)))

    def take(self, effects):
        super().take(effects)
        for effect in effects:
            if isinstance(effect, Write):
                self.disk.append(effect.record)
            elif isinstance(effect, Save):
                self.disk.save(effect.state)

    def restored(self):
        again = Kept()
        again.disk, again.now = self.disk, self.now
        again.hub = Desk(2).hub
        again.hub.policy = self.hub.policy
        again.hub.restore(self.disk.state, self.disk.records(), self.now)
        return again


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_hub_that_is_killed_while_it_waits_for_everyone_waits_again(snapshot):
    desk = Kept(rejoin_s=3, empty_after_s=30, lost_after_s=5)
    desk.give("a", 0)
    desk.give("b", 0)
    lost(desk, "a", "b")
    if snapshot:  # what `edgetrain hub` writes when it is told to stop
        desk.disk.save(desk.hub.state())
    for _ in range(3):
        desk = desk.restored()
        assert desk.hub.present == []
        desk.tick(1)
        desk.tick(28)
        assert not desk.hub.finished
    assert the(Start, back(desk, applied=1, checksum=desk.hub.checksum(1), submitted=1)["z"])
    assert desk.hub.present == ["b"]


def test_a_restored_hub_that_nobody_comes_back_to_ends_after_a_while():
    desk = Kept(rejoin_s=3, empty_after_s=30, lost_after_s=5)
    lost(desk, "a", "b")
    desk = desk.restored()
    desk.tick(1)
    desk.tick(31)
    assert desk.hub.finished


def test_after_a_power_cut_a_hub_waits_until_devices_have_booted():
    desk = Kept(lost_after_s=5).restored()
    for _ in range(50):  # a Raspberry Pi boots, enrols and asks within one to three minutes
        desk.tick(10)
    assert desk.hub.present == ["a", "b"], "both keep their places"
    assert the(Start, back(desk, submitted=0)["z"])
    desk.tick(desk.hub.policy.rejoin_s - 1)
    assert not desk.hub.finished
    assert desk.hub.present == ["a", "b"], "the second has as long as ever once the first is back"
    desk.tick(2)
    assert desk.hub.present == ["b"], "then the fleet goes on without it"


@pytest.mark.parametrize(("rejoin_s", "empty_after_s"), [(3, 30), (30, 3)])
def test_a_hub_whose_members_all_stay_away_after_a_power_cut_ends(rejoin_s, empty_after_s):
    desk = Kept(rejoin_s=rejoin_s, empty_after_s=empty_after_s, lost_after_s=5).restored()
    desk.tick(29)
    assert desk.hub.present == ["a", "b"]
    desk.tick(2)
    assert desk.hub.present == []
    assert desk.hub.finished


@given(st.lists(st.tuples(st.sampled_from(["leave", "lost", "back"]), st.sampled_from("ab"))))
def test_a_restored_hub_is_finished_where_the_one_before_was(history):
    desk = Kept(empty_after_s=1e9, lost_after_s=1)
    sessions = {"a": 6, "b": 7}
    for number, (deed, name) in enumerate(history):
        there = desk.hub.members.named(name)
        if deed == "back":
            back(desk, f"{name}{number}", name=name, session=sessions[name], submitted=0)
        elif there is not None and deed == "leave":
            desk.tell(there.sender.decode(), Leave(""))
        elif there is not None:
            lost(desk, there.sender.decode())
        desk.tick(0.1)
        assert desk.restored().hub.finished == desk.hub.finished
        if desk.hub.finished:
            break


def test_a_job_that_is_over_leaves_no_snapshot_that_looks_deserted(tmp_path):
    journal = Journal(tmp_path, JournalSettings(snapshot_every=1))
    codec = codecs.Dense()
    hub = Hub(Terms(find("local-sgd"), 1), Policy(2), Mean(), codec, codec)
    wires = Loopback()
    a, b = wires.connect(), wires.connect()
    zeros = np.zeros(3, np.float32)
    for session, (member, name) in enumerate([(a, "a"), (b, "b")], 1):
        member.send(pack(Join(PROTOCOL, "", "model", 3, name, 1.0, checksum(zeros), session)))
    a.send(pack(Base(0, 1, zeros.tobytes())))
    a.send(pack(Contribute(0, 0, 1, 1.0, 0, checksum(zeros), 0, zeros.tobytes())))
    for member in (a, b):  # the round closes with the last leave, and a snapshot is due
        member.send(pack(Leave("done")))
    turns = iter([False, True])
    serve(hub, wires, lambda: 0.0, lambda effect: None, lambda: next(turns), journal)
    assert hub.finished
    assert journal.due
    journal.close()
    opened = Journal(tmp_path, JournalSettings())
    again = Hub(Terms(find("local-sgd"), 1), Policy(2), Mean(), codec, codec)
    again.restore(opened.state, opened.records(), 0.0)
    opened.close()
    assert again.finished
