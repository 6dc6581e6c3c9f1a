"""Several hubs, each with a stretch of the vector, give the bits of one that has all of it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from children import HubThread, in_threads
from flat_vectors import FlatVectors
from hypothesis import given
from hypothesis import strategies as st
from loopback import Loopback

from edgetrain import codecs
from edgetrain.codecs.pieces import in_pieces
from edgetrain.errors import BadPayload, ConfigError, Refused
from edgetrain.exchange.member.driver import Driver
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.member.ranges import RangedExchange
from edgetrain.exchange.seam import Request
from edgetrain.vectors.ranges import Stretch, shared
from edgetrain.vectors.vector import checksum

pytestmark = pytest.mark.real

RANGES, ELEMENTS = 16, 16 * 256 + 100
PATIENT = {"lost_after_s": 30.0, "heartbeat_s": 0.05}


class Descent:
    """An optimizer on a model that is pulled to a point of the member's own."""

    def __init__(self, flat, member):
        self.flat = flat
        self.target = np.random.default_rng(member).normal(size=ELEMENTS).astype(np.float32)

    def backward(self):
        self.flat.gradient[:] = self.flat.params - self.target

    def step(self):
        self.flat.params -= np.float32(0.1) * self.flat.gradient


def step(driver):
    driver.optimizer.backward()
    driver.step()


def start_of(member):
    """Each member brings other parameters: the base has to be one member's."""
    return np.random.default_rng(100 + member).normal(size=ELEMENTS).astype(np.float32)


class Fleet:
    """Hubs over transports in memory, and members of them."""

    def __init__(self, stretches, strategy, codec, delay=0, members=3, local_steps=2, hubs=None):
        self.wires = hubs or [Loopback() for _ in stretches]
        self.threads = [
            HubThread(
                wire, strategy, members, local_steps=local_steps, delay=delay, codec=codec,
                policy=PATIENT, stretch=stretch,
            )
            for wire, stretch in zip(self.wires, stretches, strict=True)
        ]  # fmt: skip

    @contextlib.contextmanager
    def serving(self):
        with contextlib.ExitStack() as stack:
            for thread in self.threads:
                stack.enter_context(thread.serving())
            yield self

    def exchange(self):
        links = [Link(wire.connect(), time.monotonic) for wire in self.wires]
        return links[0] if len(links) == 1 else RangedExchange(links)

    def join(self, member, exchange=None):
        params = start_of(member)
        request = Request("model", f"m{member}", 1.0 + member)
        exchange = exchange or self.exchange()
        flat = FlatVectors(params)
        return Driver.join(exchange, flat, Descent(flat, member), request, time.monotonic)

    def train(self, member, steps, exchange=None, meanwhile=lambda driver: None):
        driver = self.join(member, exchange)
        for _ in range(steps):
            step(driver)
            meanwhile(driver)
        driver.drain()
        driver.leave("done")
        return driver.flat.params


def whole_run(stretches, strategy, codec, delay=0, members=3, steps=9):
    results = {}
    with Fleet(stretches, strategy, codec, delay, members).serving() as fleet:

        def life(member):
            # The first member's parameters become the base: the others come after it.
            while member and not fleet.threads[0].hub.present:
                time.sleep(0.001)
            results[member] = fleet.train(member, steps)

        in_threads(*[lambda m=member: life(m) for member in range(members)])
    assert len({params.tobytes() for params in results.values()}) == 1
    return results[0].tobytes()


@pytest.mark.parametrize("codec", ["fp32", "int8", "topk(0.1) | q2"])
@pytest.mark.parametrize(("strategy", "delay"), [("fedavg", 0), ("dga", 3), ("diloco", 0)])
def test_any_number_of_hubs_gives_the_bits_of_one(strategy, delay, codec):
    star = whole_run([Stretch(RANGES, 0, RANGES)], strategy, codec, delay)
    for hubs in (2, 3, 16):
        assert whole_run(shared(RANGES, hubs), strategy, codec, delay) == star, hubs


def test_a_lead_without_a_range_leads():
    star = whole_run([Stretch(RANGES, 0, RANGES)], "dga", "int8", 3)
    hubs = [Stretch(RANGES, 0, 0), *shared(RANGES, 2)]
    assert whole_run(hubs, "dga", "int8", 3) == star


@pytest.mark.parametrize(
    "stretches", [shared(RANGES, 3), [Stretch(RANGES, 0, 0), *shared(RANGES, 2)]]
)
def test_what_is_not_sent_yet_is_that_of_one_hub(stretches):
    """For a checkpoint: also where the lead, which has no range, leaves nothing out."""
    rests = []
    for each in ([Stretch(RANGES, 0, RANGES)], stretches):
        with Fleet(each, "sync-sgd", "topk(0.1) | q2", members=1).serving() as fleet:
            driver = fleet.join(0)
            for _ in range(4):
                step(driver)
            rest = driver.exchange.unsent()["residual"].copy()
            driver.exchange.restore_unsent({"residual": rest})
            rests.append(rest)
            assert driver.exchange.unsent()["residual"].tobytes() == rest.tobytes()
            driver.leave("done")
    assert np.any(rests[0])
    assert rests[0].tobytes() == rests[1].tobytes()


def test_gradients_go_through_several_hubs():
    star = whole_run([Stretch(RANGES, 0, RANGES)], "sync-sgd", "fp32")
    assert whole_run(shared(RANGES, 3), "sync-sgd", "fp32") == star


def test_without_a_lossy_codec_ranges_change_no_bit():
    whole = whole_run([Stretch()], "dga", "fp32", 3)
    assert whole_run(shared(RANGES, 4), "dga", "fp32", 3) == whole


def test_hubs_that_are_not_one_vector_are_refused():
    parts = shared(RANGES, 3)
    with Fleet([parts[0], parts[2]], "dga", "fp32", members=1).serving() as fleet:
        with pytest.raises(Refused, match="ranges 0 to 5 of 16; ranges 10 to 16 of 16"):
            fleet.join(0)
        for thread in fleet.threads:
            thread.stop()


def test_a_connection_that_breaks_on_one_link_loses_nothing():
    stretches = shared(RANGES, 3)
    star = whole_run([Stretch(RANGES, 0, RANGES)], "dga", "int8", 3, members=1, steps=12)
    with Fleet(stretches, "dga", "int8", 3, members=1).serving() as fleet:
        links = [Link(wire.connect(), time.monotonic) for wire in fleet.wires]

        def cut(driver):
            if driver.steps in (3, 7):
                links[1].ask_again()

        exchange = RangedExchange(links)
        assert fleet.train(0, 12, exchange, meanwhile=cut).tobytes() == star


def test_a_member_that_one_hub_has_left_behind_goes_on_from_one_base():
    """One hub gave it up for a while and closed rounds without it: all give it one base."""
    with Fleet(shared(RANGES, 3), "fedavg", "fp32", members=2).serving() as fleet:
        hub = fleet.threads[1].hub
        ready, lost, found = threading.Event(), threading.Event(), {}

        def steady():
            driver = fleet.join(0)
            for number in range(24):
                if number == 8:
                    ready.set()
                    assert lost.wait(30)
                step(driver)
            finish(driver, 0)

        def unlucky():
            driver = fleet.join(1)
            for _ in range(8):
                step(driver)
            assert ready.wait(30)
            hub.policy = replace(hub.policy, lost_after_s=0.0)
            hub.members.named("m1").mark_unreachable(0.0)
            while hub.members.named("m1") is not None:
                time.sleep(0.01)
            hub.policy = replace(hub.policy, lost_after_s=30.0)
            lost.set()
            while hub.round < fleet.threads[0].hub.round + 1:  # that one waits for it
                time.sleep(0.01)
            for _ in range(16):
                step(driver)
            finish(driver, 1)

        def finish(driver, member):
            driver.wait_for_fleet(lambda: None)
            driver.drain()
            driver.leave("done")
            found[member] = driver.flat.params

        in_threads(steady, unlucky)
        events = [note.event for note in fleet.threads[1].notes if note.member == "m1"]
        assert ("gone" in events, "back" in events) == (True, True)
        assert found[0].tobytes() == found[1].tobytes()


def test_a_member_that_comes_late_starts_from_one_base():
    with Fleet(shared(RANGES, 3), "fedavg", "fp32", members=2).serving() as fleet:
        found = {}
        early_ones = threading.Barrier(2)

        def early():
            driver = fleet.join(0)
            early_ones.wait(30)
            for _ in range(20):
                step(driver)
            driver.wait_for_fleet(lambda: None)
            driver.drain()
            driver.leave("done")
            found[0] = driver.flat.params

        def replaced():
            driver = fleet.join(1)
            early_ones.wait(30)
            for _ in range(4):
                step(driver)
            driver.leave("enough")
            late = fleet.join(2)
            assert checksum(late.flat.params) == late.half.checksum
            for _ in range(10):
                step(late)
            late.wait_for_fleet(lambda: None)
            late.drain()
            late.leave("done")
            found[2] = late.flat.params

        in_threads(early, replaced)
        assert found[0].tobytes() == found[2].tobytes()


# -- stretches and pieces ---------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3000))
def test_what_is_shared_out_is_the_whole_vector_in_order(count, reducers, more):
    elements = 256 * count + more
    if reducers > count:
        with pytest.raises(ConfigError, match="each has at least one range"):
            shared(count, reducers)
        return
    stretches = shared(count, reducers)
    borders = [stretch.of(elements) for stretch in stretches]
    assert (borders[0].start, borders[-1].stop) == (0, elements)
    for before, here in itertools.pairwise(borders):
        assert before.stop == here.start
        assert here.start % 256 == 0
    sizes = [stretch.end - stretch.first for stretch in stretches]
    assert max(sizes) - min(sizes) <= 1
    for stretch in stretches:
        pieces = stretch.pieces(elements)
        assert sum(piece.stop - piece.start for piece in pieces) == stretch.size(elements)


@given(st.sampled_from(["fp32", "int8", "topk(0.1) | q2", "sign", "fp16"]), st.integers(1, 9))
def test_pieces_are_encoded_as_if_each_were_alone(name, count):
    codec = codecs.parse(name)
    elements = 256 * count + 17
    vector = np.random.default_rng(count).normal(size=elements).astype(np.float32)
    pieces = Stretch(count, 0, count).pieces(elements)
    cut = in_pieces(codec, pieces)
    alone = [bytes(payload) for piece in pieces for payload in codec.encode(vector[piece])]
    assert [bytes(payload) for payload in cut.encode(vector)] == alone
    residual, same = np.zeros_like(vector), np.zeros_like(vector)
    drained = [bytes(payload) for payload in cut.drain(residual, vector)]
    each = [bytes(p) for piece in pieces for p in codec.drain(same[piece], vector[piece])]
    assert drained == each
    assert residual.tobytes() == same.tobytes()


def test_codecs_of_the_whole_vector_are_refused():
    for name in ("auto", "dgc(0.1)"):
        with pytest.raises(ConfigError, match="looks at the whole vector"):
            in_pieces(codecs.parse(name), [slice(0, 256)])


def test_a_vector_of_nothing_is_one_part_without_bytes():
    nothing = in_pieces(codecs.parse("int8"), [])
    empty = np.empty(0, np.float32)
    assert (nothing.encode(empty), nothing.slices(0), nothing.max_bytes(0)) == (
        [b""], [slice(0, 0)], 0,
    )  # fmt: skip
    nothing.decode(b"", empty)
    with pytest.raises(BadPayload):
        nothing.decode(b"x", empty)


class Quiet:
    """A transport over which nothing comes; `waits` are how long it was waited for."""

    def __init__(self, most):
        self.waits, self.most = [], most

    def send(self, frames):
        """Nothing takes it."""

    def receive(self, timeout_s):
        self.waits.append(timeout_s)
        if len(self.waits) == self.most:
            raise InterruptedError

    def received_bytes(self):
        return 0


def test_a_link_that_waits_looks_at_the_others_less_and_less_often():
    quiet, looks = Quiet(7), []
    link = Link(quiet, lambda: 0.0)
    link.first_pause_s, link.while_idle = 0.05, lambda: looks.append(len(quiet.waits))
    link.ask_in(Request("model"), np.zeros(2, np.float32), 0)
    with pytest.raises(InterruptedError):
        link.await_welcome()
    assert quiet.waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert looks == [1, 2, 3, 4, 5, 6]
