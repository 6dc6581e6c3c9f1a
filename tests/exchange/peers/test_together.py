"""Members that average among themselves, and a hub that counts rounds: vote, run, commit."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from flat_vectors import FlatVectors
from patience import patience

from edgetrain import codecs, strategies
from edgetrain.exchange.hub.collective import CollectivePart
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.serve import serve
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.member.driver import Driver
from edgetrain.exchange.messages import CLIENT
from edgetrain.exchange.peers.listener import listen
from edgetrain.exchange.peers.peering import Peering
from edgetrain.exchange.peers.schedules import SHAPES, SumOrder
from edgetrain.exchange.peers.together import CollectiveExchange
from edgetrain.exchange.seam import Request
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.strategies.merging.rule import Mean
from tests.fakes.children import in_threads
from tests.fakes.circle import means

pytestmark = pytest.mark.real

ELEMENTS, MEMBERS, STEPS = 1000, 3, 6
PATIENCE_S = patience(30.0)


def start_of(member):
    return np.random.default_rng(member).standard_normal(ELEMENTS).astype(np.float32)


class Descent:
    """Steps towards a point of the member's own."""

    def __init__(self, flat, member):
        self.flat, self.target = flat, start_of(50 + member)

    def step(self):
        self.flat.params -= np.float32(0.1) * (self.flat.params - self.target)


class Gradient(Descent):
    """Plain steps, from gradients that members exchange."""

    def step(self):
        self.flat.params -= np.float32(0.1) * self.flat.gradient


class Served:
    """A hub in a thread."""

    def __init__(self, topology, strategy, local_steps):
        terms = Terms(strategies.find(strategy), local_steps, job="job")
        policy = Policy(MEMBERS, heartbeat_s=0.1, lost_after_s=1.0)
        dense = codecs.Dense()
        self.hub = CollectivePart(topology, 1).attach(Hub(terms, policy, Mean(), dense, dense))
        self.socket, self.seen, self.stopped = HubSocket("tcp://127.0.0.1:0"), [], False
        self.thread = threading.Thread(target=self.run)

    def run(self):
        over = lambda: self.stopped or self.hub.finished  # noqa: E731
        serve(self.hub, self.socket, time.monotonic, self.seen.append, over)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopped = True
        self.thread.join()
        self.socket.close()


class Joined:
    """A member's exchange, and what it owns."""

    def __init__(self, hub, client=False):
        listener, self.address = (None, CLIENT) if client else listen("tcp://127.0.0.1:0", None)
        end = MemberSocket(hub.socket.address)
        waits = time.monotonic, PATIENCE_S, PATIENCE_S, PATIENCE_S
        self.exchange = CollectiveExchange(end, Peering(listener, None), *waits)


def life(hub, member, steps, results, strategy, client=False, before_step=lambda driver: None):
    joined = Joined(hub, client)
    try:
        params = start_of(member)
        flat = FlatVectors(params)
        optimizer = (Gradient if strategy == "sync-sgd" else Descent)(flat, member)
        request = Request("model", f"m{member}", 1.0 + member, address=joined.address, job="job")
        driver = Driver.join(joined.exchange, flat, optimizer, request, time.monotonic)
        joined.exchange.base_of = lambda: (driver.half.applied, driver.half.base)
        while driver.steps < steps if steps < STEPS else driver.progress < STEPS:
            before_step(driver)
            flat.gradient[:] = flat.params - start_of(50 + member)
            driver.step()
        if steps == STEPS:
            driver.drain()
        driver.leave("done")
        results[member] = params
    finally:
        joined.exchange.vanish()


def whole_run(topology, strategy, local_steps, steps=(STEPS,) * MEMBERS, clients=()):
    results = {}
    with Served(topology, strategy, local_steps) as hub:

        def one(member):
            while member and not hub.hub.present:
                time.sleep(0.001)
            life(hub, member, steps[member], results, strategy, member in clients)

        in_threads(*[lambda m=member: one(m) for member in range(MEMBERS)])
    return results, hub


def by_hand(topology, strategy, local_steps, order):
    """The same training, with members in memory."""
    base = start_of(0)
    row = strategies.find(strategy)
    weights = [1.0 + m if row.weighted else 1.0 for m in order]
    for _ in range(STEPS // local_steps):
        given = []
        for member in order:
            flat = FlatVectors(base.copy())
            if strategy == "sync-sgd":
                given.append(flat.params - start_of(50 + member))
                continue
            for _ in range(local_steps):
                Descent(flat, member).step()
            given.append(flat.params - base)
        mean = means(SumOrder(topology, MEMBERS, ELEMENTS), given, weights)[0][0]
        base = base - np.float32(0.1) * mean if strategy == "sync-sgd" else base + mean
    return base


@pytest.mark.parametrize("topology", SHAPES)
@pytest.mark.parametrize(("strategy", "local_steps"), [("sync-sgd", 1), ("fedavg", 2)])
def test_a_whole_run_has_the_bits_of_its_own_order(topology, strategy, local_steps):
    results, hub = whole_run(topology, strategy, local_steps)
    assert len({params.tobytes() for params in results.values()}) == 1
    expected = by_hand(topology, strategy, local_steps, range(MEMBERS))
    assert np.allclose(results[0], expected, rtol=0, atol=1e-6)
    assert hub.hub.round == STEPS // local_steps


def test_who_is_left_goes_on():
    results, hub = whole_run("ring", "fedavg", 2, (STEPS, 2, STEPS))
    assert results[0].tobytes() == results[2].tobytes()
    assert hub.hub.round == STEPS // 2


def test_who_joins_after_the_start_gets_the_base_from_a_member():
    results, entries = {}, []
    with Served("ring", "fedavg", 2) as hub:

        def one(member, steps):
            while member and not hub.hub.present:
                time.sleep(0.001)
            life(hub, member, steps, results, "fedavg", before_step=wait_for_late)

        def wait_for_late(driver):
            while driver.steps == 4 and "m9" not in hub.hub.present:
                time.sleep(0.001)

        def late():
            while "left" not in [getattr(note, "event", "") for note in hub.seen]:
                time.sleep(0.001)
            life(hub, 9, STEPS, results, "fedavg", before_step=lambda d: entries.append(d.entry))

        in_threads(late, *[lambda m=m: one(m, 2 if m == 2 else STEPS) for m in range(MEMBERS)])
    assert entries[0].applied > 0
    assert results[0].tobytes() == results[1].tobytes() == results[9].tobytes()


@pytest.mark.parametrize("topology", SHAPES)
def test_where_members_cannot_connect_the_hub_adds_up(topology):
    clients = (1,)
    results, hub = whole_run(topology, "fedavg", 2, clients=clients)
    assert len({params.tobytes() for params in results.values()}) == 1
    assert hub.hub.part.is_star
    reasons = [getattr(note, "reason", "") for note in hub.seen]
    why = f"star: the hub adds up, because members cannot connect as a {topology}"
    assert reasons.count(why) == 1
    star, _ = whole_run("ring", "fedavg", 2)
    assert np.allclose(results[0], star[0], rtol=0, atol=1e-6)
