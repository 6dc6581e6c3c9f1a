"""A merge rule that remembers something: a hub that is killed and restored has the same bits."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from fleet import Disk, Fleet
from hypothesis import example, given
from hypothesis import strategies as st
from merging_room import PART, Room, closed, filled

from edgetrain import codecs
from edgetrain.exchange.hub.effects import Save, Write
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.records import Round, decode, encode
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import PROTOCOL, Base, Contribute, Join, Leave
from edgetrain.strategies.merging.rule import Mean, StatefulRule
from edgetrain.vectors.vector import checksum

DATA = Path(__file__).parent / "data"


class Momentum:
    """The mean, with momentum over rounds: v = v / 2 + mean."""

    keeps_late = True

    def __init__(self):
        self.velocity, self.rounds = None, 0

    def _push(self, merged, start):
        velocity = self.velocity[start : start + merged.size]
        velocity *= np.float32(0.5)
        velocity += merged
        merged[:] = velocity

    def state(self):
        return {} if self.velocity is None else {"v": self.velocity, "rounds": self.rounds}

    def restore(self, state):
        self.velocity = state["v"].copy() if state else None
        self.rounds = state.get("rounds", 0)


class RoundMomentum(Momentum):
    """As a RoundRule."""

    def merge_round(self, contributions, out):
        for part, merged in enumerate(out):
            Mean().merge([pieces[part] for pieces in contributions], merged)
        if self.velocity is None:
            self.velocity = np.zeros(sum(merged.size for merged in out), np.float32)
        start = 0
        for merged in out:
            self._push(merged, start)
            start += merged.size
        self.rounds += 1
        return ()


class SliceMomentum(Momentum):
    """As a SliceRule, which knows its place by the slices before."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.at = elements, 0

    def merge(self, pieces, out):
        Mean().merge(pieces, out)
        if self.velocity is None:
            self.velocity = np.zeros(self.elements, np.float32)
        self._push(out, self.at)
        self.at = (self.at + out.size) % self.elements
        self.rounds += not self.at

    def restore(self, state):
        super().restore(state)
        self.at = 0


def made(kind, elements):
    return RoundMomentum() if kind == "round" else SliceMomentum(elements)


def fleet(kind, seed, codec, reply_codec, *, kills=(), every_snapshot=0):
    class Trained(Fleet):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            terms, policy = self.hub.terms, self.hub.policy
            named = self.hub.rounds.merger.codecs
            self.fresh_hub = lambda: Hub(terms, policy, made(kind, 24), *named)
            self.hub = self.fresh_hub()

    return Trained(
        "dga", 3, 2, 4, 12, rng=random.Random(seed), disk=Disk(every_snapshot), kills=kills,
        codec=codec, reply_codec=reply_codec, elements=24,
    ).run()  # fmt: skip


CODECS = st.sampled_from([("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "int8")])


@example("round", ("fp32", "fp32"), [12, 9], 1, 0)  # a base whose answer a dying hub began
@given(
    st.sampled_from(["round", "slice"]),
    CODECS,
    st.lists(st.integers(0, 150), min_size=1, max_size=3),
    st.sampled_from([0, 1, 3]),
    st.integers(0, 2**32),
)
def test_a_hub_killed_at_any_record_goes_on_with_the_same_momentum(
    kind, named, kills, every_snapshot, seed
):
    unhurt = fleet(kind, seed, *named)
    found = fleet(kind, seed, *named, kills=kills, every_snapshot=every_snapshot)
    assert found.hub.round == unhurt.hub.round
    if every_snapshot:  # members that missed replies take the base: as good, but not the same
        assert found.hub.base.tobytes() == found.members[0].params.tobytes()
        return
    assert found.hub.base.tobytes() == unhurt.hub.base.tobytes()
    rule, other = found.hub.rounds.merger.rule, unhurt.hub.rounds.merger.rule
    assert rule.velocity.tobytes() == other.velocity.tobytes()
    assert rule.rounds == other.rounds == found.hub.round


@given(st.sampled_from(["round", "slice"]), CODECS, st.sampled_from([0, 1, 3]), st.data())
def test_a_rule_restored_after_any_record_has_the_same_state(kind, named, every_snapshot, data):
    whole = fleet(kind, 5, *named, every_snapshot=every_snapshot)
    disk = whole.disk
    assert disk.state.rule == {} or every_snapshot
    again = whole.fresh_hub()
    again.restore(disk.state, disk.records(), 0.0)
    assert again.base.tobytes() == whole.hub.base.tobytes()
    mine, theirs = again.rounds.merger.rule_state(), whole.hub.rounds.merger.rule_state()
    assert {n: a.tobytes() for n, a in mine.items()} == {n: a.tobytes() for n, a in theirs.items()}
    end = data.draw(st.integers(0, len(disk.log)))
    halfway = whole.fresh_hub()
    halfway.restore(disk.state, disk.records()[:end], 0.0)
    # Through a snapshot of the restored hub, and on: the same bits.
    header, payloads = encode(halfway.state())
    last = whole.fresh_hub()
    rounds = [record for record in disk.records()[end:] if isinstance(record, Round)]
    last.restore(decode(header, b"".join(payloads)), rounds, 0.0)
    assert last.base.tobytes() == whole.hub.base.tobytes()


@pytest.mark.parametrize("kind", ["round", "slice"])
def test_a_spoilt_contribution_leaves_no_trace_in_the_state(kind):
    def run(spoil):
        rule = made(kind, 11)
        assert isinstance(rule, StatefulRule)
        room = Room(rule, "abc")
        for round in range(2):
            for name, value in zip("ab", (1.0, 3.0), strict=True):
                room.contribute(name, round, filled(value))
            if round == 0:
                room.contribute("c", 0, filled(5.0))
            elif spoil:
                bad = filled(9.0)
                bad[PART + 1] = np.nan  # of the second slice
                assert closed(room.contribute("c", 1, bad))
            else:
                room.say("c", Leave("done"))
        assert room.hub.round == 2
        return room.hub.base.tobytes(), rule.velocity.tobytes(), rule.rounds

    assert run(spoil=True) == run(spoil=False)


# -- journals of rules without state --------------------------------------------------------------

CHECKSUMS = {"fp32": 0xB37D97F1BD1756D4, "int8": 0x716D33D73CA0B393}


def hub_of_fixtures(reply):
    terms = Terms("dga", 1, job="job-a")
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
def test_a_rule_without_state_writes_the_same_bytes_as_before(reply, tmp_path):
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
