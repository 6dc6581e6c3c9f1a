"""A member without torch: the driver over a link, in memory and over ZeroMQ."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from children import HubThread, in_threads
from every_strategy import OUT_OF_STEP, SPELLED
from flat_vectors import FlatVectors
from loopback import Loopback

from edgetrain import strategies
from edgetrain.errors import Diverged
from edgetrain.exchange.delay import Delay
from edgetrain.exchange.member.doubled import Doubled
from edgetrain.exchange.member.driver import DelayMeter, Driver
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import CatchUp, Entry, Exchange, Request, RoundReply
from edgetrain.exchange.transport import Traffic
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import checksum

ELEMENTS = 12
DESCRIPTION = layouts.describe([("w", (3, 4), "float32")])


class Descent:
    """Steps towards a point of each member's own; the gradient is what it steps with."""

    def __init__(self, index, flat):
        self.index, self.flat, self.steps = index, flat, 0

    def backward(self):
        self.flat.gradient[:] = 0.1 * (self.flat.params - self.index) + 0.01 * self.steps

    def step(self):
        self.flat.params -= self.flat.gradient
        self.steps += 1


def train(transport, index, steps, doubled=False):
    """A member's whole life; its parameters and its driver."""
    flat = FlatVectors(np.zeros(ELEMENTS, np.float32), DESCRIPTION)
    optimizer = Descent(index, flat)
    flat = Doubled(flat) if doubled else flat
    request = Request(layouts.digest(flat.description), f"m{index}", layout=flat.description)
    link = Link(transport, time.monotonic)
    driver = Driver.join(link, flat, optimizer, request, time.monotonic)
    for _ in range(steps):
        optimizer.backward()
        driver.step()
    driver.drain()
    driver.leave("done")
    return driver.flat.params, driver


@pytest.fixture(params=["loopback", "zeromq"])
def wires(request):
    """A hub's end, and a function that makes members' ends."""
    if request.param == "loopback":
        hub = Loopback()
        return hub, hub.connect
    hub = HubSocket("tcp://127.0.0.1:0")
    return hub, lambda: MemberSocket(hub.address)


@pytest.mark.parametrize("strategy", SPELLED + OUT_OF_STEP)
def test_every_strategy_trains_to_one_base(strategy, wires):
    hub_end, connect = wires
    row = strategies.find(strategy)
    local_steps, doubled = 3 if row.has_local_steps else 1, row.has_variates
    with HubThread(
        hub_end, strategy, members=2, local_steps=local_steps, policy={"lost_after_s": 30.0}
    ).serving():
        found = in_threads(*[lambda i=i: train(connect(), i, 7, doubled) for i in range(2)])
    (a, first), (b, second) = found
    assert a.tobytes() == b.tobytes() == first.half.base.tobytes()
    assert first.half.checksum == second.half.checksum == checksum(a)
    assert first.steps == second.steps == 7
    assert first.progress == 7, "the last round was cut short"
    assert not first.is_mid_step


class Alone:
    """An exchange with nobody: the reply is one's own contribution, or what `replies` has."""

    def __init__(self, strategy="local-sgd", *, auto_delay=False, replies=(), known=0):
        self.strategy, self.auto_delay, self.known = strategy, auto_delay, known
        self.interrupt = lambda: None
        self.memory = VectorPool(ELEMENTS)
        self.session = 1
        self.submitted, self.replies = [], list(replies)
        self.sent_nearly_all = True
        self.ready = 0
        self.ended = []

    def join(self, request, params, checksum, past=None):
        return Entry(
            name="m0", index=0, members=1, strategy=self.strategy, local_steps=1,
            delay=Delay(0, self.auto_delay), codec="fp32", is_masked=False, round=0, applied=0,
            checksum=self.known or checksum, resend=0,
        )  # fmt: skip

    def factors(self):
        return None

    def unsent(self):
        return {}

    def restore_unsent(self, unsent):
        pass

    def submit(self, submission):
        self.submitted.append(submission)

    def wait(self, round):
        if self.replies:
            return self.replies.pop(0)
        return RoundReply(round, 1, 7, 0, 0.0, [self.submitted[round].vector])

    def settle(self):
        return True

    def poll(self):
        pass

    def traffic(self):
        return Traffic(0, 0, 0, 0.0)

    def leave(self, reason):
        self.ended.append(reason)

    def vanish(self):
        self.ended.append(None)


def driver_over(exchange: Exchange, release=None):
    """A driver that has joined, and its optimizer."""
    flat = FlatVectors(np.zeros(ELEMENTS, np.float32))
    optimizer = Descent(1, flat)
    driver = Driver.join(exchange, flat, optimizer, Request("x"), time.monotonic, release)
    return driver, optimizer


def test_any_exchange_will_do():
    exchange = Alone()
    driver, optimizer = driver_over(exchange)
    for _ in range(3):
        optimizer.backward()
        driver.step()
    assert [given.round for given in exchange.submitted] == [0, 1, 2]
    driver.drain()
    driver.drain()
    driver.leave("done")
    assert exchange.ended == ["done"]
    plain = FlatVectors(np.zeros(ELEMENTS, np.float32))
    other = Descent(1, plain)
    for _ in range(3):
        other.backward()
        other.step()
    np.testing.assert_allclose(driver.flat.params, plain.params, atol=1e-6)


def test_what_is_given_up_at_the_end_leaves_the_model_as_well():
    """A dense codec: there is no last round, whose reply would bring the base to the model."""

    class Rounding(Alone):
        def submit(self, submission):
            rounded = submission.vector.round(1)
            super().submit(replace(submission, vector=rounded))
            return rounded

    class Copy(FlatVectors):
        is_storage = False
        model = None

        def push_params(self):
            self.model = self.params.copy()

    exchange, flat = Rounding(), Copy(np.zeros(ELEMENTS, np.float32))
    optimizer = Descent(1, flat)
    driver = Driver.join(exchange, flat, optimizer, Request("x"), time.monotonic)
    for _ in range(3):
        optimizer.backward()
        driver.step()
    assert flat.model.tobytes() != driver.half.base.tobytes(), "the rest is in the parameters"
    driver.drain()
    assert len(exchange.submitted) == 3
    assert flat.model.tobytes() == flat.params.tobytes() == driver.half.base.tobytes()


def test_a_base_that_arrived_damaged_is_noticed():
    with pytest.raises(Diverged, match="arrived damaged"):
        driver_over(Alone(known=5))


def test_a_base_that_differs_after_a_reply_is_noticed():
    wrong = RoundReply(0, 1, 0, 5, 0.0, [np.zeros(ELEMENTS, np.float32)])
    driver, _ = driver_over(Alone(replies=[wrong]))
    with pytest.raises(Diverged, match="after round 0 the base has checksum"):
        driver.step()


def test_decoding_is_overhead_and_not_a_wait():
    """Of four seconds in `wait` one was decoding; half a second went into `poll`."""
    now = 0.0

    class Slow(Alone):
        def wait(self, round):
            nonlocal now
            now += 4.0
            reply = super().wait(round)
            return replace(reply, decode_s=1.5, wait_decode_s=1.0, sent_bytes=12, received_bytes=7)

        def poll(self):
            nonlocal now
            now += 0.5

    flat = FlatVectors(np.zeros(ELEMENTS, np.float32))
    optimizer = Descent(1, flat)
    driver = Driver.join(Slow(), flat, optimizer, Request("x"), lambda: now)
    seen = []
    driver.observe = seen.append
    optimizer.backward()
    driver.step()
    driver.drain()
    assert (driver.wait_s, driver.exchange_s) == (3.0, 1.5)
    (exchanged,) = seen
    assert (exchanged.decode_s, exchanged.sent_bytes, exchanged.received_bytes) == (1.5, 12, 7)


def test_the_fleet_may_have_gone_on_without_it():
    base = np.full(ELEMENTS, 3, np.float32)
    driver, _ = driver_over(Alone(replies=[CatchUp(5, 2, 5, checksum(base), base)]))
    driver.step()
    assert driver.half.base.tobytes() == base.tobytes()
    assert (driver.half.applied, driver.half.round) == (5, 5)
    damaged = CatchUp(5, 2, 5, 1, base)
    driver, _ = driver_over(Alone(replies=[damaged]))
    with pytest.raises(Diverged, match="arrived damaged"):
        driver.step()


@pytest.mark.parametrize("auto_delay", [False, True])
def test_the_delay_is_what_the_reply_says(auto_delay):
    """A fixed one, too: members take short rounds when the hub says so."""
    driver, optimizer = driver_over(Alone(auto_delay=auto_delay))
    optimizer.backward()
    driver.step()
    assert driver.half.delay == 7


def test_what_is_released_is_sent_and_the_half_keeps_the_whole():
    exchange = Alone()

    def half_of_it(contribution, out):
        np.multiply(contribution, 0.5, out=out)

    driver, optimizer = driver_over(exchange, half_of_it)
    optimizer.backward()
    driver.step()
    (given,) = exchange.submitted
    sent = given.vector
    np.testing.assert_allclose(sent, 0.05, rtol=1e-6)
    assert given.rest_later
    assert driver.flat.params.tobytes() == driver.half.base.tobytes() == sent.tobytes()


def test_a_gradient_strategy_waits_before_the_optimizer_steps():
    exchange = Alone("sync-sgd")
    driver, optimizer = driver_over(exchange)
    waited_at = []
    wait = exchange.wait

    def watched(round):
        waited_at.append((optimizer.steps, driver.is_mid_step))
        return wait(round)

    exchange.wait = watched
    for _ in range(2):
        optimizer.backward()
        driver.step()
    assert waited_at == [(0, True), (1, True)]
    assert driver.progress == driver.steps == 2


def test_a_meter_wants_the_steps_that_hide_a_round_trip():
    meter = DelayMeter()
    meter.add_round_trip(1.0)
    assert meter.wanted == 0, "no step was measured yet"
    for seconds in (0.1, 0.1, 5.0):
        meter.add_step(seconds)
    meter.add_round_trip(1.0)
    assert meter.wanted == 11, "a tenth more than the round trip"
    meter.add_round_trip(0.0)
    assert meter.wanted == 11
