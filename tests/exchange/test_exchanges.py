"""One suite for every Exchange: members that meet directly, and links over loopback and ZeroMQ."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from children import HubThread, in_threads
from direct import Direct
from every_strategy import OUT_OF_STEP, SPELLED
from flat_vectors import FlatVectors
from loopback import Loopback

from edgetrain import strategies
from edgetrain.errors import Diverged, Refused
from edgetrain.exchange.delay import Delay
from edgetrain.exchange.member.doubled import Doubled
from edgetrain.exchange.member.driver import Driver
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Past, Request, Submission
from edgetrain.exchange.transport import Traffic
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.vector import checksum

ELEMENTS = 12


@contextlib.contextmanager
def direct(members, strategy="local-sgd", local_steps=1, delay=0):
    yield Direct(members, strategy, local_steps, delay).connect


@contextlib.contextmanager
def loopback(members, strategy="local-sgd", local_steps=1, delay=0):
    hub = Loopback()
    with serving(hub, members, strategy, local_steps, delay):
        yield lambda: Link(hub.connect(), time.monotonic)


@contextlib.contextmanager
def zeromq(members, strategy="local-sgd", local_steps=1, delay=0):
    hub = HubSocket("tcp://127.0.0.1:0")
    with serving(hub, members, strategy, local_steps, delay):
        yield lambda: Link(MemberSocket(hub.address), time.monotonic)


def serving(hub, members, strategy, local_steps, delay):
    return HubThread(
        hub, strategy, members, local_steps=local_steps, delay=delay, policy={"lost_after_s": 30.0}
    ).serving()


@pytest.fixture(params=[direct, loopback, zeromq], ids=lambda meeting: meeting.__name__)
def meeting(request):
    """Call it for a context in which exchanges can be made: `with meeting(2) as connect`."""
    return request.param


class Life:
    """One member, by hand: what it joined with, and its exchange."""

    def __init__(self, connect, name="", start=0.0, weight=1.0, model="model"):
        self.exchange = connect()
        self.params = np.full(ELEMENTS, start, np.float32)
        self.weight, self.base = weight, None
        self.request = Request(model, name, weight)

    def join(self):
        self.entry = self.exchange.join(self.request, self.params, checksum(self.params))
        self.base = self.params.copy()
        self.applied = self.entry.applied
        return self

    def give(self, round, value):
        vector = self.exchange.memory.borrow_vector()
        vector[:] = value
        return self.exchange.submit(
            Submission(round, vector, self.weight, self.applied, checksum(self.base))
        )

    def take(self, round):
        reply = self.exchange.wait(round)
        assert reply.round == round == self.applied
        whole = np.concatenate(reply.pieces)
        self.base += whole
        self.applied += 1
        assert reply.checksum in (0, checksum(self.base))
        return whole


def joined(connect, *starts, **other):
    """Members that have joined, all at once."""
    lives = [Life(connect, f"m{i}", start, **other) for i, start in enumerate(starts)]
    in_threads(*[life.join for life in lives])
    return lives


def leave(*lives):
    for life in lives:
        life.exchange.leave("done")


def test_all_start_from_one_base_with_places_of_their_own(meeting):
    with meeting(3, "dga", 2, 5) as connect:
        lives = joined(connect, 1.0, 2.0, 3.0)
        assert len({life.params.tobytes() for life in lives}) == 1
        assert lives[0].params[0] in (1.0, 2.0, 3.0)
        entries = [life.entry for life in lives]
        assert [entry.name for entry in entries] == ["m0", "m1", "m2"]
        assert {entry.index for entry in entries} == {0, 1, 2}
        for entry in entries:
            assert (entry.members, entry.strategy) == (3, "dga")
            assert (entry.local_steps, entry.delay) == (2, Delay(5))
            assert (entry.round, entry.applied) == (0, 0)
            assert entry.checksum == checksum(lives[0].params)
            assert (entry.is_exact, entry.is_masked) == (True, False)
        leave(*lives)


def test_the_reply_is_the_mean_and_the_same_for_all(meeting):
    with meeting(2) as connect:
        a, b = joined(connect, 0.0, 0.0)
        for round in range(3):
            assert a.give(round, 1.0 + round) is None
            b.give(round, 4.0)
            assert a.take(round).tobytes() == b.take(round).tobytes()
        np.testing.assert_allclose(a.base, 2.5 + 3.0 + 3.5)
        leave(a, b)


def test_replies_come_in_round_order_long_after_later_contributions(meeting):
    with meeting(2, "dga", 1, 3) as connect:
        a, b = joined(connect, 0.0, 0.0)
        for life, value in ((a, 1.0), (b, 3.0)):
            for round in range(3):
                life.give(round, value * 10**round)
        for life in (a, b):
            life.exchange.poll()
            assert [life.take(round)[0] for round in range(3)] == [2.0, 20.0, 200.0]
        leave(a, b)


def test_pieces_stay_as_they_are_while_they_are_held(meeting):
    with meeting(2) as connect:
        a, b = joined(connect, 0.0, 0.0)
        held = []
        for round in range(4):
            a.give(round, round)
            b.give(round, round)
            held.append(a.exchange.wait(round).pieces)
            a.base += np.concatenate(held[-1])
            a.applied += 1
            b.take(round)
        assert [pieces[0][0] for pieces in held] == [0.0, 1.0, 2.0, 3.0]
        leave(a, b)


def test_members_weigh_as_many_samples_as_they_have(meeting):
    with meeting(2, "fedavg") as connect:
        lives = [Life(connect, "m0", weight=1.0), Life(connect, "m1", weight=3.0)]
        a, b = in_threads(*[life.join for life in lives])
        a.give(0, 0.0)
        b.give(0, 4.0)
        np.testing.assert_allclose(a.take(0), 3.0)
        np.testing.assert_allclose(b.take(0), 3.0)
        leave(a, b)


@pytest.mark.parametrize("how", ["leave", "give and leave"])
def test_a_member_that_leaves_is_not_waited_for(meeting, how):
    with meeting(2) as connect:
        a, b = joined(connect, 0.0, 0.0)
        if how == "give and leave":
            b.give(0, 3.0)
        b.exchange.leave("done")
        b.exchange.leave("done")
        b.exchange.vanish()
        a.give(0, 1.0)
        np.testing.assert_allclose(a.take(0), 2.0 if how == "give and leave" else 1.0)
        leave(a)


def test_a_newcomer_starts_from_the_base_as_it_is(meeting):
    with meeting(2) as connect:
        a, b = joined(connect, 1.0, 1.0)
        for round in range(2):
            a.give(round, 2.0)
            b.give(round, 2.0)
            a.take(round)
            b.take(round)
        b.exchange.leave("done")
        a.give(2, 2.0)  # once its reply is here, the place of the other is free for sure
        a.take(2)
        late = Life(connect, "late", 9.0).join()
        assert late.params.tobytes() == a.base.tobytes()
        assert (late.entry.round, late.entry.applied) == (3, 3)
        a.give(3, 1.0)
        late.give(3, 3.0)
        assert a.take(3)[0] == late.take(3)[0] == 2.0
        assert a.base.tobytes() == late.base.tobytes()
        leave(a, late)


@pytest.mark.parametrize("refused", ["model", "name", "session"])
def test_members_that_do_not_fit_are_refused_with_a_code(meeting, refused):
    with meeting(2) as connect:
        a, b = joined(connect, 0.0, 0.0)
        other = Life(connect, "m0", model="other model" if refused == "model" else "model")
        past = Past(7, "m9", 3, 3, 1, False) if refused == "session" else None
        with pytest.raises(Refused) as caught:
            other.exchange.join(other.request, other.params, checksum(other.params), past)
        assert caught.value.code == refused
        other.exchange.vanish()
        leave(a, b)


class Enough(Exception):
    pass


def test_what_interrupt_raises_ends_a_wait(meeting):
    with meeting(2) as connect:
        a, b = joined(connect, 0.0, 0.0)

        def enough():
            raise Enough

        a.give(0, 1.0)
        a.exchange.interrupt = enough
        with pytest.raises(Enough):
            a.exchange.wait(0)
        a.exchange.poll()  # does not wait, so it does not ask
        a.exchange.interrupt = lambda: None
        b.give(0, 3.0)
        assert a.take(0)[0] == 2.0
        leave(a, b)


def test_a_base_that_differs_is_divergence(meeting):
    with meeting(2) as connect:
        a, b = joined(connect, 0.0, 0.0)
        a.give(0, 1.0)
        b.base += 1
        b.give(0, 1.0)
        with pytest.raises(Diverged):
            b.exchange.wait(0)
        b.exchange.vanish()
        leave(a)


def test_nothing_is_left_unsent_and_traffic_is_counted_or_not(meeting):
    with meeting(1) as connect:
        (a,) = joined(connect, 0.0)
        assert a.exchange.factors() is None
        a.give(0, 1.0)
        a.take(0)
        assert a.exchange.unsent() == {}
        a.exchange.restore_unsent({})
        assert isinstance(a.exchange.traffic(), Traffic)
        leave(a)


def test_out_of_step_a_reply_says_whose_contributions_it_has(meeting):
    with meeting(2, "fedbuff(2, 0)", 1, 100) as connect:
        a, b = joined(connect, 0.0, 0.0)
        assert a.exchange.ready == b.exchange.ready == 0
        a.give(0, 1.0)
        a.give(1, 3.0)  # both are in the first reply
        first = [life.exchange.wait(0) for life in (a, b)]
        assert [reply.pieces[0][0] for reply in first] == [2.0, 2.0]
        assert [reply.merged for reply in first] == [2, 0]
        for life in (a, b):
            life.base += 2.0
            life.applied = 1
        a.exchange.end(2)
        b.give(0, 4.0)  # nobody else will give anything
        assert b.exchange.wait(1).merged == 1
        while a.exchange.ready < 2:  # without waiting for it
            a.exchange.poll()
        assert a.exchange.wait(1).pieces[0][0] == 4.0
        assert a.exchange.settle()
        leave(a, b)


class Descent:
    def __init__(self, flat):
        self.flat = flat

    def step(self):
        self.flat.params -= self.flat.gradient


@pytest.mark.parametrize("strategy", SPELLED + OUT_OF_STEP)
def test_every_strategy_trains_to_the_same_bits_over_every_exchange(meeting, strategy):
    row = strategies.find(strategy)
    local_steps, delay = (
        3 if row.has_local_steps else 1,
        4 if row.delays and row.is_synchronous else 0,
    )

    def train(connect, index):
        described = layouts.describe([("w", (ELEMENTS,), "float32")])
        flat = FlatVectors(np.zeros(ELEMENTS, np.float32), described)
        optimizer = Descent(flat)
        sent = Doubled(flat) if row.has_variates else flat
        sent_as = layouts.digest(sent.description)
        request = Request(sent_as, f"m{index}", layout=sent.description)
        driver = Driver.join(connect(), sent, optimizer, request, time.monotonic)
        for step in range(7):
            flat.gradient[:] = 0.1 * (flat.params - index) + 0.01 * step
            driver.step()
        driver.drain()
        driver.leave("done")
        return flat.params, driver.half.checksum

    ends = []
    for where in (direct, meeting):
        with where(2, strategy, local_steps, delay) as connect:
            ends += in_threads(*[lambda i=i, c=connect: train(c, i) for i in range(2)])
    (params, base), *others = ends
    for found, found_base in others:
        assert found.tobytes() == params.tobytes()
        assert found_base == base
