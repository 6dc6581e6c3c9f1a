"""Hubs that hand out work and have a stretch each, message by message: whatever is lost on the way,
and whichever hub dies, every slice counts once in each stretch, and all decide the same."""

import random
from collections import defaultdict

import numpy as np
import pytest
from fakes.hub_desk import Desk, raw, refusal

from edgetrain import codecs, strategies
from edgetrain.exchange.further_messages import Assign, Computed, Products
from edgetrain.exchange.hub.deal import SliceSums
from edgetrain.exchange.hub.dealing import DealingPart
from edgetrain.exchange.hub.effects import Save, Write
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.records import Round, Sent, pack_state, unpack_state
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import PROTOCOL, Base, Reply, Resume
from edgetrain.strategies.lbfgs import joined
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.ranges import shared
from edgetrain.vectors.vector import checksum

ELEMENTS, SAMPLES, SLICES, STEPS = 3 * 256, 24, 6, 8
DATA = np.random.default_rng(3).normal(size=(SAMPLES, ELEMENTS + 1)).astype(np.float32) / 16
SESSIONS = {"a": 11, "b": 12}


def compute(base, number: int):
    """The mean loss and gradient of a slice, least squares, and its samples."""
    rows = DATA[number * SAMPLES // SLICES : (number + 1) * SAMPLES // SLICES]
    error = rows[:, :-1] @ base - rows[:, -1]
    gradient = (2 * error @ rows[:, :-1] / len(rows)).astype(np.float32)
    return float(np.mean(error.astype(np.float64) ** 2)), gradient, len(rows)


def naive(row, stretches):
    """The bases of a run by one process that has a search for each stretch."""
    owns = [stretch.of(ELEMENTS) for stretch in stretches]
    searches, base, bases = [row.search() for _ in owns], np.zeros(ELEMENTS, np.float32), []
    for search, own in zip(searches, owns, strict=True):
        search.start(own.stop - own.start)
        search.summed_in = np.float64
    for step in range(STEPS):
        sums, wants = SliceSums(), searches[0].wants_gradient
        for slice in range(SLICES):
            loss, gradient, samples = compute(base, slice)
            sums.add(slice, samples, loss, gradient if wants else None)
        mean, each = sums.mean(), list(zip(searches, owns, strict=True))
        told, parts = None, [None for _ in owns]
        if mean.vector is not None:
            parts = [mean.vector[own] for own in owns]
            shares = [s.products(base[own], mean.vector[own]) for s, own in each]
            told = joined([np.append(mean.loss, share) for share in shares])[1:]
        moves = [
            search.move(base[own], mean.loss, part, step + 1 == STEPS, told)
            for (search, own), part in zip(each, parts, strict=True)
        ]
        base = base + np.concatenate(moves)
        bases.append(base)
        if searches[0].phase == "over":
            break
    return bases


class OneOfSeveral(Desk):
    """A hub of several, and what it wrote."""

    def __init__(self, row, stretches, number, **policy):
        super().__init__(2)
        self.parts = row, stretches, stretches[number], policy
        self.journal: list = []
        self.hub = self.fresh()

    def fresh(self):
        row, stretches, own, policy = self.parts
        terms = Terms(row, 1, job="job-a", steps=STEPS, stretch=own)
        search, dense = row.search(), codecs.Dense()
        hub = Hub(terms, Policy(2, **policy), Mean(), dense, dense, outer=search)
        return DealingPart(search, SLICES, 1, stretches).attach(hub)

    def take(self, effects):
        effects = list(effects)
        for effect in effects:
            if isinstance(effect, Save):
                self.journal = [unpack_state(pack_state(effect.state))]
            elif isinstance(effect, Write):
                self.journal.append(effect.record)
        super().take(effects)


class Town:
    """Hubs, and two members that are at all of them, carry products, and answer work. `loses` says
    of each message whether it is lost."""

    def __init__(self, text="lbfgs(4, 3)", hubs=2, loses=lambda message: False):
        self.row, self.stretches = strategies.find(text), shared(3, hubs)
        self.hubs = [
            OneOfSeveral(self.row, self.stretches, n, heartbeat_s=1.0) for n in range(hubs)
        ]
        self.owns = [stretch.of(ELEMENTS) for stretch in self.stretches]
        self.bases = {who: np.zeros(ELEMENTS, np.float32) for who in "ab"}
        self.applied, self.attempts = dict.fromkeys("ab", 0), 0
        self.work, self.replies = defaultdict(list), defaultdict(dict)
        self.loses = lambda message: False
        for number, hub in enumerate(self.hubs):
            for who in "ab":
                self.hear(number, hub.join(who, elements=ELEMENTS, session=SESSIONS[who]))
            own = self.owns[number]
            self.tell(number, "a", Base(0, 1, raw(np.zeros(own.stop - own.start))))
            assert hub.hub.started
        self.loses = loses

    def tell(self, number, who, message):
        if not self.loses(message):
            self.hear(number, self.hubs[number].tell(who, message))

    def hear(self, number, said):
        for who, messages in [(who, list(each)) for who, each in said.items()]:
            for message in messages:
                if isinstance(message, Products) and not self.loses(message):
                    for other in range(1, len(self.hubs)) if number == 0 else [0]:
                        self.tell(other, who, message)
                elif isinstance(message, Assign) and message.slices:
                    self.work[number, who].append((message, list(message.slices)))
                elif isinstance(message, Reply):
                    self.replies[number, who].setdefault(message.round, []).append(message.payload)
        self.collect()

    def collect(self):
        for who, applied in self.applied.items():
            found = [self.replies[number, who].get(applied) for number in range(len(self.hubs))]
            if all(found):
                step = [np.frombuffer(b"".join(map(bytes, each)), np.float32) for each in found]
                self.bases[who] = self.bases[who] + np.concatenate(step)
                self.applied[who] += 1
                self.collect()

    def tick(self):
        for number, hub in enumerate(self.hubs):
            self.hear(number, hub.tick(0.5))

    def answer_one(self, who):
        """The member's next slice at the base that it has; whether there was one."""
        for number in range(len(self.hubs)):
            queue = self.work[number, who]
            while queue and (queue[0][0].round < self.applied[who] or not queue[0][1]):
                queue.pop(0)
            if queue and queue[0][0].round == self.applied[who]:
                message, slices = queue[0]
                slice = slices.pop(0)
                self.answer(who, number, message, slice)
                return True
        return False

    def answer(self, who, number, message, slice, **other):
        loss, gradient, samples = compute(self.bases[who], slice)
        is_for_all = message.gradient and number == 0
        for to in range(len(self.hubs)) if is_for_all else [number]:
            own = self.owns[to]
            pieces = [gradient[own][here] for here in self.cuts(to)] if message.gradient else [[]]
            for part, piece in enumerate(pieces):
                sum_ = checksum(self.bases[who][own], own.start)
                payload = raw(piece) if message.gradient else b""
                given = message.round, slice, samples, loss, part, len(pieces), sum_, payload
                self.tell(to, who, Computed(*given))

    def cuts(self, number):
        merger = self.hubs[number].hub.rounds.merger
        own = self.owns[number]
        return merger.codec.slices(own.stop - own.start)

    def crash(self, number):
        """The hub is killed, another goes on from its journal, and members come back."""
        desk = self.hubs[number]
        state, *records = desk.journal
        desk.hub = desk.fresh()
        desk.hub.restore(state, records, desk.now)
        desk.hub.tail = 0
        for who in "ab":
            self.come_back(number, who)

    def come_back(self, number, who):
        desk, own, applied = self.hubs[number], self.owns[number], self.applied[who]
        self.attempts += 1
        self.work.pop((number, who), None)
        sum_ = checksum(self.bases[who][own], own.start) if applied else 0
        asked = PROTOCOL, "model", ELEMENTS, who, SESSIONS[who], applied, sum_, applied, applied
        for record in desk.journal:  # what a driver would send
            if isinstance(record, Round) and record.round >= applied:
                self.replies[number, who][record.round] = list(record.reply)
        self.hear(number, desk.tell(who, Resume(*asked, self.attempts)))

    def sent(self, number):
        return [record for record in self.hubs[number].journal if isinstance(record, Sent)]


@pytest.mark.parametrize("kind", ["armijo", "wolfe"])
@pytest.mark.parametrize("hubs", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_lost_all_hubs_come_to_the_bits_of_one_process(seed, hubs, kind):
    chooser = random.Random(seed)

    def loses(message):
        return isinstance(message, Products | Computed) and chooser.random() < 0.1

    town = Town(f"lbfgs(3, 3, all, 1, {kind})", hubs, loses)
    wanted = naive(town.row, town.stretches)
    for _ in range(4000):
        if all(desk.hub.round == len(wanted) for desk in town.hubs):
            break
        what, number = chooser.random(), chooser.randrange(hubs)
        if what < 0.02:
            town.crash(number)
        elif what < 0.05:
            town.come_back(number, chooser.choice("ab"))
        elif what < 0.2 or not town.answer_one(chooser.choice("ab")):
            town.tick()
        for desk, own in zip(town.hubs, town.owns, strict=True):
            if desk.hub.round:
                assert desk.hub.base.tobytes() == wanted[desk.hub.round - 1][own].tobytes()
    assert [desk.hub.round for desk in town.hubs] == [len(wanted)] * hubs
    for number, own in enumerate(town.owns):
        town.crash(number)
        assert town.hubs[number].hub.base.tobytes() == wanted[-1][own].tobytes()


def drop_products_to(number, town):
    tell = town.tell

    def told(to, who, message):
        if not (to == number and isinstance(message, Products)):
            tell(to, who, message)

    town.tell = told
    return tell


def finish_batch(town):
    while any(town.answer_one(who) for who in "ab"):
        pass


def test_the_lead_closes_a_round_once_it_knows_all_products_and_others_by_its_sum():
    town = Town()
    tell = drop_products_to(0, town)
    finish_batch(town)
    lead, other = (desk.hub for desk in town.hubs)
    assert (lead.round, other.round) == (0, 0)
    assert other.part.deal.is_whole
    town.tell = tell
    town.tick()
    town.tick()  # it says them again with its beat
    assert (lead.round, other.round) == (1, 1)
    assert town.applied == {"a": 1, "b": 1}


def test_what_a_hub_has_given_products_of_it_has_in_its_journal():
    town = Town()
    drop_products_to(1, town)
    finish_batch(town)
    lead, other = town.hubs
    assert (lead.hub.round, other.hub.round) == (1, 0)
    assert [record.round for record in town.sent(1)] == [0]
    town.tell = Town.tell.__get__(town)
    town.bases = {}  # and no member is left that could compute it again
    other.journal = [unpack_state(pack_state(other.hub.state()))]
    for desk in town.hubs:
        state, *records = desk.journal
        desk.hub = desk.fresh()
        desk.hub.restore(state, records, desk.now)
    assert other.hub.state().outer["offered"].any()


def test_a_hub_that_lacks_a_slice_gives_it_out_once_the_lead_waits():
    lost = []

    def loses(message):
        is_first = isinstance(message, Computed) and message.slice == 2 and message.parts == 2
        lost.extend([message] if is_first and len(lost) < 2 else [])
        return is_first and lost[-1] is message

    town = Town(loses=loses)  # its part for the second hub, which has two ranges
    finish_batch(town)
    other = town.hubs[1].hub
    assert town.hubs[0].hub.part.deal.is_whole
    assert not other.part.deal.is_whole
    assert not any(town.work[1, who] for who in "ab")
    for _ in range(2):
        town.tick()
    assert [m.slices for who in "ab" for m, _ in town.work[1, who]] == [(2,)]
    finish_batch(town)
    assert min(town.hubs[0].hub.round, other.round) > 1
    assert not any(closed.dealt.wasted for closed in town.hubs[1].closed)


@pytest.mark.parametrize(
    ("first", "end", "numbers", "code"),
    [
        (0, 1, np.zeros(5), "order"),  # the lead's own
        (1, 2, np.zeros(5), "order"),
        (1, 3, np.zeros(4), "size"),
        (1, 3, np.full(5, np.nan), "payload"),
    ],
)
def test_what_products_may_not_be(first, end, numbers, code):
    town = Town()
    said = town.hubs[0].tell("b", Products(0, first, end, numbers.tobytes()))
    assert refusal(town.hubs[0], said, "b")[0] == code


def test_products_of_another_round_do_not_count():
    town = Town()
    assert not town.hubs[1].tell("b", Products(7, 0, 3, np.zeros(5).tobytes()))
    assert town.hubs[1].hub.round == 0


def test_one_hub_says_no_products():
    town = Town(hubs=1)
    said = town.hubs[0].tell("b", Products(0, 0, 3, np.zeros(5).tobytes()))
    assert refusal(town.hubs[0], said, "b")[0] == "order"
