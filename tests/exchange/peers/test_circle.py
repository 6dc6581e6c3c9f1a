"""Members that average among themselves over real connections: attempts, and what ends them."""

from __future__ import annotations

import itertools
import threading
import time
import weakref

import numpy as np
import pytest
from patience import patience

from edgetrain.exchange.further_messages import Segment
from edgetrain.exchange.keys.pairs import spell
from edgetrain.exchange.messages import Map, Peer, pack
from edgetrain.exchange.peers.circle import Circle, PeerLost, Turn
from edgetrain.exchange.peers.dialled import dialling
from edgetrain.exchange.peers.listener import listen
from edgetrain.exchange.peers.neighbours import Neighbours
from edgetrain.exchange.peers.schedules import SHAPES, SumOrder
from edgetrain.exchange.transport import Traffic
from edgetrain.exchange.zeromq.curve import new_pair
from tests.fakes.circle import means

PATIENCE_S = patience(60.0)


class Table:
    """Members a, b, c, ... that know where the others listen."""

    def __init__(self, members, encrypted=False, clock=time.monotonic, patience_s=PATIENCE_S):
        self.names = tuple("abcdefgh"[:members])
        pairs = [new_pair() if encrypted else None for _ in self.names]
        found = [listen("tcp://127.0.0.1:0", pair) for pair in pairs]
        self.listeners = [listener for listener, _ in found]
        peers = tuple(
            Peer(name, address, spell(pair.public) if pair else "")
            for name, (_, address), pair in zip(self.names, found, pairs, strict=True)
        )
        self.circles, self.neighbours = [], []
        for name, listener, pair in zip(self.names, self.listeners, pairs, strict=True):
            neighbours = Neighbours.of(Map(1, False, 7, name, 0, 1, peers), encrypted)
            listener.let_in(neighbours)
            circle = Circle(listener, dialling(pair), clock, patience_s)
            circle.accept(neighbours)
            self.circles.append(circle)
            self.neighbours.append(neighbours)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for circle, listener in zip(self.circles, self.listeners, strict=True):
            circle.close()
            listener.close()

    def average(self, attempts, contributions):
        """What each member that is named in the attempts has from each."""
        found = {}

        def play(name, circle, own):
            found[name] = [
                np.concatenate(circle.average(turn, own))
                for turn in attempts
                if name in turn.places
            ]

        threads = [
            threading.Thread(target=play, args=each)
            for each in zip(self.names, self.circles, contributions, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        return found


def drawn(members, elements):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(elements).astype(np.float32) for _ in range(members)]


@pytest.mark.parametrize("topology", SHAPES)
def test_rounds_have_the_bits_of_members_in_memory(topology):
    elements, weights = 300_001, (1.0, 2.0, 1.0)
    contributions = drawn(3, elements)
    with Table(3, encrypted=topology == "ring") as table:
        attempts = [Turn(round, 0, topology, table.names, weights) for round in range(3)]
        found = table.average(attempts, contributions)
    expected, _ = means(SumOrder(topology, 3, elements), contributions, weights)
    for name in table.names:
        assert [mean.tobytes() for mean in found[name]] == 3 * [expected[0].tobytes()]


def test_who_is_left_runs_again_from_the_contributions_it_kept():
    contributions = drawn(3, 2000)
    with Table(3) as table:
        late = Turn(4, 0, "ring", table.names, (1.0,) * 3)

        class Told(Exception):
            """The hub has said that the attempt is over."""

        def over():
            raise Told

        for circle, own in zip(table.circles[:2], contributions, strict=False):
            with pytest.raises(Told):
                circle.average(late, own, over)
        again = Turn(4, 1, "ring", ("b", "a"), (1.0, 1.0))
        found = table.average([again], contributions)
    expected, _ = means(SumOrder("ring", 2, 2000), contributions[1::-1], (1.0, 1.0))
    assert found["a"][0].tobytes() == found["b"][0].tobytes() == expected[0].tobytes()
    assert found["c"] == []


def test_a_member_that_says_nothing_is_named():
    ticks = itertools.count()
    with Table(3, clock=lambda: float(next(ticks)), patience_s=30.0) as table:
        turn = Turn(0, 0, "ring", table.names, (1.0,) * 3)
        with pytest.raises(PeerLost) as lost:
            table.circles[0].average(turn, np.zeros(10, np.float32))
        assert lost.value.names == ("b",)


def test_a_member_that_cannot_be_reached_is_named():
    with Table(2) as table:
        peers = tuple(peer._replace(address="") for peer in table.neighbours[0].map.peers)
        neighbours = Neighbours.of(Map(2, False, 7, "a", 0, 1, peers), encrypted=False)
        table.circles[0].accept(neighbours)
        turn = Turn(0, 0, "ring", table.names, (1.0,) * 2)
        with pytest.raises(PeerLost) as lost:
            table.circles[0].average(turn, np.zeros(10, np.float32))
        assert lost.value.names == ("b",)


class Scripted:
    """A listener at which these messages have come from member b."""

    def __init__(self, *messages):
        self.messages = [pack(message) for message in messages]

    def traffic(self):
        return Traffic(0, 0, 0, 0.0)

    def poll(self, timeout_s):
        came, self.messages = self.messages, []
        return ((b"b", frames) for frames in came)

    def name_of(self, sender):
        return sender.decode()


class Deaf:
    """A connection to a member that has answered, and takes everything."""

    greeted = 1

    def greet(self):
        pass

    def close(self):
        pass

    def send(self, frames):
        pass

    def receive(self, timeout_s):
        return None

    def traffic(self):
        return Traffic(0, 0, 0, 0.0)


def alone(*messages):
    """What member a of a ring of two has in the end, and its part, where these came from b."""
    peers = (Peer("a", "tcp://127.0.0.1:1", ""), Peer("b", "tcp://127.0.0.1:2", ""))
    ticks = itertools.count()
    circle = Circle(Scripted(*messages), lambda *_: Deaf(), lambda: float(next(ticks)), 9.0)
    circle.accept(Neighbours.of(Map(1, False, 7, "a", 0, 1, peers), encrypted=False))
    turn = Turn(5, 1, "ring", ("a", "b"), (1.0, 1.0))
    return np.concatenate(circle.average(turn, np.ones(32, np.float32))), circle


def segment(round, attempt, number, adds, value=3.0, elements=16):
    return Segment(round, attempt, number, adds, np.full(elements, value, np.float32).tobytes())


GOOD = segment(5, 1, 1, True), segment(5, 1, 0, False, 2.0)


def test_what_earlier_attempts_left_is_dropped():
    old = segment(5, 0, 1, True, 9.0), segment(4, 7, 1, True, 9.0)
    mean, _ = alone(*old, *GOOD)
    assert mean.tolist() == [2.0] * 32


@pytest.mark.parametrize("wrong", [segment(5, 1, 0, True), segment(5, 1, 1, False)])
def test_a_segment_that_does_not_come_next_ends_the_attempt(wrong):
    with pytest.raises(PeerLost, match="comes next"):
        alone(wrong, *GOOD)


def test_of_what_comes_too_early_little_is_kept():
    flood = [np.zeros(1 << 16, np.float32) for _ in range(100)]
    kept = [weakref.ref(each) for each in flood]
    messages = [Segment(6, 0, 1, True, each.data) for each in flood]
    del flood
    mean, circle = alone(*GOOD, *[messages.pop() for _ in range(100)])
    assert mean.tolist() == [2.0] * 32
    assert 1 <= sum(each() is not None for each in kept) <= 6
    circle.close()
