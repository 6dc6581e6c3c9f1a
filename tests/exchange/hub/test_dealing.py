"""A hub that hands out slices, message by message: the bits depend on no member, no crash of the
hub and no lost message, and every slice counts once."""

import heapq
import random
from dataclasses import replace

import numpy as np
import pytest
from fakes.hub_desk import ELEMENTS, RESUME, Desk, raw, refusal, the
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import codecs, strategies
from edgetrain.exchange.further_messages import Assign, Computed
from edgetrain.exchange.hub.deal import Deal, SliceSums
from edgetrain.exchange.hub.dealing import DealingPart
from edgetrain.exchange.hub.effects import Save, Write
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.records import pack_state, unpack_state
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import Base, Beat, Contribute, Leave, Refuse, Reply, Resume, Start
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.vector import checksum

SAMPLES, STEPS = 24, 14
DATA = np.random.default_rng(3).normal(size=(SAMPLES, ELEMENTS + 1)).astype(np.float32)


def compute(base, number: int, of: int):
    """The mean loss and gradient of a slice, least squares, and its samples."""
    rows = DATA[number * SAMPLES // of : (number + 1) * SAMPLES // of]
    error = rows[:, :-1] @ base - rows[:, -1]
    gradient = (2 * error @ rows[:, :-1] / len(rows)).astype(np.float32)
    return float(np.mean(error.astype(np.float64) ** 2)), gradient, len(rows)


def naive(row, of: int):
    """The bases of a run by one process, without hub or messages, until nothing moves."""
    search, base, bases = row.search(), np.zeros(ELEMENTS, np.float32), []
    search.start(ELEMENTS)
    for step in range(STEPS):
        sums = SliceSums()
        for slice in range(of):
            loss, gradient, samples = compute(base, slice, of)
            sums.add(slice, samples, loss, gradient if search.wants_gradient else None)
        mean = sums.mean()
        base = base + search.move(base, mean.loss, mean.vector, step + 1 == STEPS)
        bases.append(base.tobytes())
        if search.phase == "over":
            break
    return bases


class DealingDesk(Desk):
    """A desk whose members answer work. `journal` is what the hub wrote."""

    def __init__(self, members=2, text="lbfgs(4, 3)", **policy):
        super().__init__(members)
        self.row, self._members, self._policy = strategies.find(text), members, policy
        self.journal: list = []
        self.bases = {letter: np.zeros(ELEMENTS, np.float32) for letter in "abcdef"}
        self.applied = dict.fromkeys("abcdef", 0)
        self.work: dict[str, list] = {}
        self.hub = self.fresh()

    def fresh(self):
        terms = Terms(self.row, 1, job="job-a", steps=STEPS)
        search, dense = self.row.search(), codecs.Dense()
        self.slices = self.row.argument("slices") * self._members
        policy = Policy(self._members, **self._policy)
        part = DealingPart(search, self.slices, self.row.argument("copies"))
        return part.attach(Hub(terms, policy, Mean(), dense, dense, outer=search))

    def take(self, effects):
        effects = list(effects)
        for effect in effects:
            if isinstance(effect, Save):
                self.journal = [unpack_state(pack_state(effect.state))]
            elif isinstance(effect, Write):
                self.journal.append(effect.record)
        super().take(effects)
        for who, messages in self.said.items():
            for message in messages:
                self.hear(who, message)
        self.said = {who: list(each) for who, each in self.said.items()}

    def hear(self, who, message):
        if isinstance(message, Assign) and message.slices and message not in self.work.get(who, []):
            self.work.setdefault(who, []).append(message)

    def collect(self):
        """Apply what has been said to the members, once."""
        for who, messages in self.said.items():
            for message in messages:
                if isinstance(message, Reply) and message.round == self.applied[who]:
                    self.bases[who] = self.bases[who] + np.frombuffer(message.payload, np.float32)
                    self.applied[who] += 1
                    assert message.checksum == checksum(self.bases[who])

    def tell(self, who, message):
        said = super().tell(who, message)
        self.collect()
        return said

    def tick(self, seconds):
        said = super().tick(seconds)
        self.collect()
        return said

    def answer_one(self, who, **other):
        """The member's next slice that is of the base that it has."""
        while queue := self.work.get(who):
            work = queue[0]
            if work.round < self.applied[who]:
                queue.pop(0)
                continue
            slice, *rest = work.slices
            queue[:1] = [replace(work, slices=tuple(rest))] if rest else []
            loss, gradient, samples = compute(self.bases[who], slice, work.of)
            self.now += 0.1
            given = {
                "round": work.round, "slice": slice, "samples": samples, "loss": loss, "part": 0,
                "parts": 1, "checksum": checksum(self.bases[who]),
                "payload": raw(gradient) if work.gradient else b"",
            }  # fmt: skip
            return self.tell(who, Computed(**(given | other)))
        return None

    def crash(self):
        """The hub is killed, and another goes on from its journal."""
        state, *records = self.journal
        self.hub = self.fresh()
        self.hub.restore(state, records, self.now)
        self.work = {}
        self.said = {}

    def resume(self, who, session):
        self.work.pop(who, None)
        asked = RESUME | {
            "name": who, "session": session, "applied": self.applied[who],
            "checksum": checksum(self.bases[who]) if self.applied[who] else 0,
            "submitted": self.applied[who], "oldest": self.applied[who],
        }  # fmt: skip
        return self.tell(who, Resume(**asked))


SESSIONS = {letter: number for number, letter in enumerate("abcdef", 11)}


def begun(names="ab", **other):
    desk = DealingDesk(len(names), **other)
    for name in names:
        desk.join(name, session=SESSIONS[name])
    desk.tell(names[0], Base(0, 1, raw(np.zeros(ELEMENTS))))
    assert desk.hub.started
    desk.collect()
    return desk


@pytest.mark.parametrize("names", ["a", "ab", "abcdef"])
@pytest.mark.parametrize("kind", ["armijo", "wolfe"])
def test_bits_are_those_of_one_process_whoever_computes(names, kind):
    per_member = 12 // len(names)
    desk = begun(names, text=f"lbfgs(4, {per_member}, all, 1, {kind})")
    chooser = random.Random(5)
    wanted = naive(desk.row, 12)
    while desk.hub.round < len(wanted):
        before = desk.hub.round
        desk.answer_one(chooser.choice(names))
        if desk.hub.round > before:
            assert desk.hub.base.tobytes() == wanted[before]
    assert [closed.dealt.slices for closed in desk.closed] == [12] * len(wanted)
    assert all(desk.answer_one(name) is None for name in names)


@given(st.integers(0, 10_000))
def test_crashes_losses_and_members_that_come_and_go_cost_slices_and_nothing_else(seed):
    chooser = random.Random(seed)
    desk = begun("abc", text="lbfgs(3, 4)", lost_after_s=2.0, rejoin_s=1.0)
    wanted, away = naive(desk.row, 12), set()
    for _ in range(3000):
        if desk.hub.round >= len(wanted):
            break
        before = desk.hub.round
        what = chooser.random()
        who = chooser.choice("abc")
        if what < 0.02:
            desk.crash()
            away = set("abc")
        elif what < 0.05 and len(away) < 2:
            desk.take(desk.hub.unreachable(who.encode(), desk.now))
            desk.work.pop(who, None)
            away.add(who)
        elif who in away:
            if what < 0.4:
                # What it missed is in the journal, from which a driver would send it.
                while desk.applied[who] < desk.hub.round:
                    desk.bases[who] = np.frombuffer(wanted[desk.applied[who]], np.float32).copy()
                    desk.applied[who] += 1
                desk.hub.tail = 0
                said = desk.resume(who, SESSIONS[who])
                if not any(isinstance(each, Refuse) for each in said.get(who, [])):
                    away.discard(who)
        elif what < 0.15:
            desk.tick(chooser.random())
        else:
            desk.answer_one(who)
        if desk.hub.round > before:
            assert desk.hub.base.tobytes() == wanted[before]
    assert desk.hub.round == len(wanted)
    desk.crash()
    assert desk.hub.base.tobytes() == wanted[-1]


def test_a_snapshot_and_what_follows_it_lead_to_the_same_bits():
    desk = begun("ab", text="lbfgs(4, 6)")
    while desk.hub.round < 3:
        desk.answer_one("a")
    desk.journal = [unpack_state(pack_state(desk.hub.state()))]
    while desk.hub.round < 6:
        desk.answer_one("a")
    wanted = desk.hub.base.tobytes()
    desk.crash()
    assert (desk.hub.round, desk.hub.base.tobytes()) == (6, wanted)
    assert desk.hub.base.tobytes() == naive(desk.row, 12)[5]


def test_a_lost_member_s_slices_are_given_out_again():
    desk = begun("ab", text="lbfgs(4, 3, all, 0)", lost_after_s=5.0)
    while desk.answer_one("a") is not None:
        pass
    assert desk.hub.round == 0
    desk.take(desk.hub.unreachable(b"b", desk.now))
    desk.tick(0.1)  # it is still in the job
    assert desk.hub.present == ["a", "b"]
    while desk.hub.round == 0:
        assert desk.answer_one("a") is not None


def seconds_of_batches(deal, trips, computes, count):
    """How long batches take members whose messages travel for half of `trips` each way."""
    now, found = deal.began, []

    def send(name, slice):
        free[name] = max(free[name], now + trips[name] / 2) + computes[name]
        heapq.heappush(coming, (free[name] + trips[name] / 2, name, slice))

    for round in range(deal.round + 1, deal.round + 1 + count):
        began, coming, free = now, [], dict.fromkeys(trips, 0.0)
        deal.begin(round, now)
        for name, slices in deal.give_all(trips, now).items():
            for slice in slices:
                send(name, slice)
        while not deal.is_whole:
            now, name, slice = heapq.heappop(coming)
            deal.accept(name, slice, now)
            if (more := deal.give(name, now)) is not None:
                send(name, more)
        found.append(now - began)
    return found


def test_a_member_gets_as_many_slices_as_keep_it_busy_over_its_link():
    names = "abcdefgh"
    for trip, first in ((0.2, 1.9), (0.001, 1.0)):
        trips, computes = dict.fromkeys(names, trip), dict.fromkeys(names, 0.04)
        took = seconds_of_batches(Deal(8 * len(names), 0), trips, computes, 6)
        least = trip + 8 * 0.04  # one trip, and nobody ever waits
        assert took[0] == pytest.approx(first * least, rel=0.1)
        assert took[-1] == pytest.approx(least, rel=0.05)


def test_a_slow_member_has_few_slices_and_a_newcomer_two():
    names = "abcdefgh"
    trips, computes = dict.fromkeys(names, 0.2), dict.fromkeys(names, 0.04)
    equal = seconds_of_batches(Deal(64, 0), trips, computes, 8)
    deal = Deal(64, 0)
    took = seconds_of_batches(deal, trips, computes | {"a": 0.4}, 8)
    assert took[-1] <= 1.3 * equal[-1]
    deal.begin(8, 100.0)
    given = deal.give_all([*names, "new"], 100.0)
    assert [len(given[name]) for name in ("a", "b", "new")] == [1, 7, 2]
    deal.keep_only("a")  # all others have gone: now it is the fastest
    assert deal.give("a", 100.1) is None
    assert deal.give("a", 102.0) is not None


def test_a_member_that_was_slow_is_tried_again():
    trips, computes = {"a": 0.2, "b": 0.2}, {"a": 0.04, "b": 40.0}
    deal = Deal(16, 0)
    seconds_of_batches(deal, trips, computes, 2)
    took = seconds_of_batches(deal, trips, computes | {"b": 0.04}, 30)
    assert took[0] > 1.5 * took[-1]
    assert took[-1] == pytest.approx(0.2 + 8 * 0.04, rel=0.1)


def test_a_newcomer_gets_the_base_and_work():
    desk = begun("ab")
    for name in "ab":
        desk.answer_one(name)
    desk.tell("b", Leave("done"))
    while desk.hub.round < 2:
        desk.answer_one("a")
    said = desk.join("c", session=13)
    assert the(Start, said["c"]).round == 2
    assert the(Assign, said["c"]).round == 2


def test_what_an_answer_may_not_be():
    cases = [
        ({"payload": raw(np.zeros(ELEMENTS - 1))}, "size"),
        ({"payload": raw([np.nan] * ELEMENTS)}, "payload"),
        ({"checksum": 1}, "diverged"),
        ({"round": 1}, "order"),
        ({"parts": 2}, "order"),
    ]
    for other, code in cases:
        desk = begun("ab")
        assert refusal(desk, desk.answer_one("b", **other), "b")[0] == code
        while desk.hub.round == 0:  # the others go on, and its slices are theirs
            desk.tick(0.1)
            desk.answer_one("a")


def test_an_answer_for_what_a_member_does_not_have_does_not_count():
    desk = begun("ab")
    taken = [slice for work in desk.work["a"] for slice in work.slices]
    said = desk.answer_one("b", slice=taken[0])
    assert not any(isinstance(each, Refuse) for each in said.get("b", []))
    assert desk.hub.part.deal.holds("a", taken[0])


def test_contributions_are_refused():
    desk = begun("ab")
    zeros = raw(np.zeros(ELEMENTS))
    known = checksum(np.zeros(ELEMENTS, np.float32))
    said = desk.tell("b", Contribute(0, 0, 1, 1.0, 0, known, 0, zeros))
    assert refusal(desk, said, "b")[0] == "order"


def test_a_member_with_other_data_is_refused():
    desk = DealingDesk(2)
    desk.join("a", model="model:data-1")
    assert refusal(desk, desk.join("b", model="model:data-2"), "b")[0] == "data"


def test_signs_of_life_move_no_slices():
    desk = begun("ab")
    before = {who: list(each) for who, each in desk.work.items()}
    desk.tell("a", Beat())
    assert desk.work == before


def test_members_are_told_once_each_time_they_come_that_nothing_moves_any_more():
    desk = begun("ab")
    nothing = {"payload": raw(np.zeros(ELEMENTS))}
    while desk.hub.round == 0:
        desk.answer_one("a", **nothing)
    over = Assign(1, 6, False, ())
    assert [the(Assign, desk.said[who]) for who in "ab"] == [over, over]
    said = desk.tick(0.1)
    assert not any(isinstance(each, Assign) for who in said for each in said[who])
    desk.crash()
    assert the(Assign, desk.resume("b", SESSIONS["b"])["b"]) == over
    for who in "ab":
        desk.tell(who, Leave("done"))
    assert desk.hub.finished
