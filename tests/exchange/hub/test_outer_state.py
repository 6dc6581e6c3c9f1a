"""Outer rules at the hub: one that is killed and restored has the same bits, their state included,
and its journal keeps one vector more of a round."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from fleet import Disk, Fleet
from hypothesis import example, given
from hypothesis import strategies as st
from merging_room import PART, PARTS, Counting, Room, closed, filled

from edgetrain import codecs
from edgetrain.exchange.hub.effects import Save, Write
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.records import Round, decode, encode
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import NO_WEIGHT, PROTOCOL, Base, Contribute, Join, Leave
from edgetrain.strategies import find, merging, outer
from edgetrain.strategies.merging.private import PrivateMean
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.noise import Gaussian
from edgetrain.vectors.vector import checksum

DATA = Path(__file__).parent / "data"


RULES = st.sampled_from(["nesterov(0.7, 0.9)", "momentum(0.5, 0.9)", "yogi(0.1, 0.9, 0.99, 0.001)"])
MERGES = st.sampled_from(["mean", "median", "multi-krum(0, 2)"])
CODECS = st.sampled_from([("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "int8")])


def fleet(rule, merge, seed, codec, reply_codec, *, kills=(), every_snapshot=0):
    return Fleet(
        f"dga | {rule}", 3, 2, 4, 12, rng=random.Random(seed), disk=Disk(every_snapshot),
        kills=kills, codec=codec, reply_codec=reply_codec, elements=24, merge=merge,
    ).run()  # fmt: skip


def state_of(hub):
    return {name: vector.tobytes() for name, vector in hub.rounds.merger.outer_state().items()}


# A base whose answer a dying hub began.
@example("nesterov(0.7, 0.9)", "median", ("fp32", "fp32"), [12, 9], 1, 0)
@given(
    RULES,
    MERGES,
    CODECS,
    st.lists(st.integers(0, 150), min_size=1, max_size=3),
    st.sampled_from([0, 1, 3]),
    st.integers(0, 2**32),
)
def test_a_hub_killed_at_any_record_goes_on_with_the_same_outer_state(
    rule, merge, named, kills, every_snapshot, seed
):
    unhurt = fleet(rule, merge, seed, *named)
    found = fleet(rule, merge, seed, *named, kills=kills, every_snapshot=every_snapshot)
    assert found.hub.round == unhurt.hub.round
    if every_snapshot:  # members that missed replies take the base: as good, but not the same
        assert found.hub.base.tobytes() == found.members[0].params.tobytes()
        return
    assert found.hub.base.tobytes() == unhurt.hub.base.tobytes()
    assert state_of(found.hub) == state_of(unhurt.hub) != {}


@given(RULES, MERGES, CODECS, st.sampled_from([0, 1, 3]), st.data())
def test_a_hub_restored_after_any_record_has_the_same_outer_state(
    rule, merge, named, every_snapshot, data
):
    whole = fleet(rule, merge, 5, *named, every_snapshot=every_snapshot)
    disk = whole.disk
    assert np.any(next(iter(disk.state.outer.values()))) == bool(every_snapshot)
    again = whole.fresh_hub()
    again.restore(disk.state, disk.records(), 0.0)
    assert again.base.tobytes() == whole.hub.base.tobytes()
    assert state_of(again) == state_of(whole.hub)
    end = data.draw(st.integers(0, len(disk.log)))
    halfway = whole.fresh_hub()
    halfway.restore(disk.state, disk.records()[:end], 0.0)
    # Through a snapshot of the restored hub, and on: the same bits.
    header, payloads = encode(halfway.state())
    last = whole.fresh_hub()
    rounds = [record for record in disk.records()[end:] if isinstance(record, Round)]
    last.restore(decode(header, b"".join(payloads)), rounds, 0.0)
    assert last.base.tobytes() == whole.hub.base.tobytes()


@pytest.mark.parametrize("merge", ["mean", "median"])
@pytest.mark.parametrize("bad", [np.nan, 2.0**50], ids=["not finite", "too large"])
def test_a_spoilt_contribution_leaves_no_trace_in_the_state(merge, bad):
    def run(spoil):
        room = Room(merging.parse(merge), "abc", outer=outer.parse("nesterov"))
        for round in range(2):
            for name, value in zip("ab", (1.0, 3.0), strict=True):
                room.contribute(name, round, filled(value))
            if round == 0:
                room.contribute("c", 0, filled(5.0))
            elif spoil:
                wrong = filled(9.0)
                wrong[PART + 1] = bad  # of the second slice
                assert closed(room.contribute("c", 1, wrong))
            else:
                room.say("c", Leave("done"))
        assert room.hub.round == 2
        return room.hub.base.tobytes(), state_of(room.hub)

    if merge == "median" and bad > 1:  # a robust rule leaves it out by itself
        assert run(spoil=True)[1].keys() == {"velocity"}
        return
    assert run(spoil=True) == run(spoil=False)


def test_parts_are_merged_early_with_an_outer_rule_too():
    rule = Counting()
    room = Room(rule, "ab", outer=outer.parse("nesterov"))
    for part in range(PARTS):
        for name in "ab":
            room.contribute_part(name, 0, part, filled(3.0))
        assert rule.merged == part + 1
    np.testing.assert_array_equal(room.hub.base, filled(np.float32(0.7) * (3 + np.float32(2.7))))


def test_a_round_in_which_nobody_counts_is_no_step():
    """Momentum would carry on; but nothing is known of where it leads now."""

    def base_of(*weights):
        room = Room(Mean(), "a", outer=outer.parse("nesterov"))
        for round, weight in enumerate(weights):
            room.contribute("a", round, filled(1.0), weight=weight)
        assert room.hub.round == len(weights)
        return room.hub.base.tobytes()

    assert base_of(1.0, NO_WEIGHT, 1.0) == base_of(1.0, 1.0)


MEMBERS, ELEMENTS = 8, 20_000


@pytest.mark.parametrize("rule", ["nesterov", "adam"])
@pytest.mark.parametrize(("codec", "reply_codec"), [("fp32", "fp32"), ("fp32", "topk(0.01) | q2")])
def test_a_round_takes_one_vector_more_than_its_reply_in_the_journal(
    rule, codec, reply_codec, tmp_path
):
    hub_row = find(f"local-sgd | {rule}")
    hub = Hub(
        Terms(hub_row, 1), Policy(MEMBERS), Mean(), codecs.parse(codec),
        codecs.parse(reply_codec), outer=hub_row.outer_rule(),
    )  # fmt: skip
    rng, journal, replies = np.random.default_rng(1), Journal(tmp_path), 0
    zeros = np.zeros(ELEMENTS, np.float32)

    def carry(effects):
        nonlocal replies
        for effect in effects:
            if isinstance(effect, Write):
                journal.append(effect.record)
                if isinstance(effect.record, Round):
                    replies += sum(memoryview(p).nbytes for p in effect.record.reply)
            elif isinstance(effect, Save):
                journal.save(effect.state)

    for index in range(MEMBERS):
        join = Join(PROTOCOL, "", "model", ELEMENTS, f"m{index}", 1.0, checksum(zeros), index + 1)
        carry(hub.handle(b"m%d" % index, join, 0.0))
    carry(hub.handle(b"m0", Base(0, 1, zeros.tobytes()), 0.0))
    before = journal.bytes_written
    for round in range(5):
        for index in range(MEMBERS):
            own = rng.standard_normal(ELEMENTS).astype(np.float32).tobytes()
            known = hub.checksum(round)
            message = Contribute(round, 0, 1, 1.0, round, known, 0, own)
            carry(hub.handle(b"m%d" % index, message, 0.0))
    journal.close()
    assert hub.round == 5
    written, allowed = journal.bytes_written - before, replies + 5 * 4 * ELEMENTS
    print(f"{rule}, {reply_codec}: {written / 5:,.0f} bytes a round, {written / allowed:.3f} of "
          f"reply and one vector, {written / (replies + MEMBERS * 5 * 4 * ELEMENTS):.3f} of reply "
          "and contributions")  # fmt: skip
    assert written <= 1.1 * allowed


# -- journals without outer rules ------------------------------------------------------------------

CHECKSUMS = {"fp32": 0xB37D97F1BD1756D4, "int8": 0x716D33D73CA0B393}


def hub_of_fixtures(reply):
    terms = Terms(find("dga"), 1, job="job-a")
    return Hub(terms, Policy(3), Mean(), codecs.Dense(), codecs.parse(reply))


@pytest.mark.parametrize("reply", CHECKSUMS)
def test_a_journal_of_before_the_rooms_opens(reply, tmp_path):
    """Written when all modules lay beside each other, by a hub that lost a member after round 1."""
    shutil.copy(DATA / f"{reply}-snapshot.bin", tmp_path / f"{0:020d}.base")
    shutil.copy(DATA / f"{reply}-records.bin", tmp_path / f"{0:020d}.log")
    journal = Journal(tmp_path)
    assert journal.mended == []
    hub = hub_of_fixtures(reply)
    hub.restore(journal.state, journal.records(), 0.0)
    journal.close()
    assert (hub.round, checksum(hub.base)) == (4, CHECKSUMS[reply])
    assert hub.present == ["a", "b"]
    assert [member.name for member in hub.members.away] == ["c"]


@pytest.mark.parametrize("reply", CHECKSUMS)
def test_without_an_outer_rule_a_hub_writes_the_same_bytes_as_before(reply, tmp_path):
    journal, hub = Journal(tmp_path), hub_of_fixtures(reply)
    zeros = np.zeros(5, np.float32)

    def carry(effects):
        for effect in effects:
            if isinstance(effect, Write):
                journal.append(effect.record)
            elif isinstance(effect, Save):
                journal.save(effect.state)

    for session, name in enumerate("abc", 7):
        join = Join(PROTOCOL, "job-a", "model", 5, name, 1.0, checksum(zeros), session)
        carry(hub.handle(name.encode(), join, 0.0))
    carry(hub.handle(b"a", Base(0, 1, zeros.tobytes()), 0.0))
    rng = np.random.default_rng(5)
    for round in range(4):
        for name in "abc" if round < 2 else "ab":
            own = rng.standard_normal(5).astype(np.float32).tobytes()
            known = hub.checksum(round)
            message = Contribute(round, 0, 1, 1.0, round, known, 0, own)
            carry(hub.handle(name.encode(), message, float(round)))
        if round == 1:
            carry(hub.unreachable(b"c", 1.0))
            carry(hub.tick(20.0))
    journal.close()
    for kind, written in (("snapshot", "base"), ("records", "log")):
        (path,) = tmp_path.glob(f"*.{written}")
        assert path.read_bytes() == (DATA / f"{reply}-{kind}.bin").read_bytes()


def test_a_restored_hub_does_not_draw_its_noise_again():
    """The journal has the merged contribution, noise included."""
    made = Fleet("local-sgd | nesterov", 3, 2, 0, 12, disk=Disk(), elements=24)
    terms, policy, named = made.hub.terms, made.hub.policy, made.hub.rounds.merger.codecs

    def private_hub():
        rule = PrivateMean(Gaussian(1.0, 0.5))  # of the operating system's randomness
        return Hub(terms, policy, rule, *named, outer=outer.parse("nesterov"))

    made.hub = private_hub()
    made.run()
    assert made.hub.round == 6
    again = private_hub()
    again.restore(made.disk.state, made.disk.records(), 0.0)
    assert again.base.tobytes() == made.hub.base.tobytes()
    assert state_of(again) == state_of(made.hub)
