"""A run in which nothing moves says who waits for whom."""

from __future__ import annotations

import numpy as np

from edgetrain import codecs
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.standstill import Standstill
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import PROTOCOL, Base, Beat, Contribute, Join, Telemetry
from edgetrain.strategies import find
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.vector import checksum

START = np.zeros(3, np.float32)


class Watched:
    """A hub of two members, and the watch over it, as the hub's driver runs them."""

    def __init__(self):
        dense = codecs.Dense()
        self.hub = Hub(Terms(find("local-sgd"), 1), Policy(2, status_s=5.0), Mean(), dense, dense)
        self.watch = Standstill(self.hub, 0.0)
        for name in ("a", "b"):
            self.say(name, Join(PROTOCOL, "", "model", 3, name, 1.0, checksum(START)), 0.0)
        self.say("a", Base(0, 1, START.tobytes()), 0.0)
        assert self.hub.started

    def say(self, name, message, now):
        effects = self.hub.handle(name.encode(), message, now)
        self.watch.note_received(name.encode(), message, now)
        for each in effects:
            if hasattr(each, "to"):
                self.watch.note_sent(each.to, each.message, now)

    def contribute(self, name, round, now):
        known = self.hub.checksum(round)
        message = Contribute(round, 0, 1, 1.0, round, known, 0, START.tobytes())
        self.say(name, message, now)


def test_a_run_that_stands_says_which_round_waits_for_whom():
    run = Watched()
    run.contribute("a", 0, 1.0)
    run.contribute("b", 0, 2.0)
    run.contribute("a", 1, 3.0)
    run.say("b", Beat(0), 11.0)
    assert run.watch.check(12.9) is None
    note = run.watch.check(13.0)
    assert (note.event, note.member) == ("stands", "hub")
    assert note.reason == (
        "no progress for 10 s: round 1 (open for 10.0 s) is missing 1 of 2 contributions; "
        "contributions by open round: 1: 1; b (connected, training, 0 replies applied, next "
        "round 1) last from it: Contribute 11.0 s ago, a sign of life 2.0 s ago; last to it: "
        "Reply 11.0 s ago, a sign of life 11.0 s ago"
    )
    assert run.watch.check(14.0) is None, "it is said again after twice as long"
    assert run.watch.check(23.0) is not None
    run.hub.unreachable(b"b", 24.0)
    assert "b (unreachable for 19.0 s" in run.watch.check(43.0).reason
    run.contribute("b", 1, 44.0)
    assert run.watch.check(44.1).reason == "it moves again"
    assert run.watch.check(44.2) is None


def test_steps_that_members_report_are_movement_and_beats_are_not():
    run = Watched()
    for number in range(20):
        run.say("a", Telemetry(number, 0), 5.0 * number)
        assert run.watch.check(5.0 * number + 4.9) is None
    for number in range(20):
        run.say("a", Telemetry(19, 0), 100.0 + number)
        run.say("b", Beat(0), 100.0 + number)
    assert "is missing 2 of 2 contributions" in run.watch.check(120.0).reason


def test_a_hub_that_waits_for_members_does_not_stand():
    dense = codecs.Dense()
    hub = Hub(Terms(find("local-sgd"), 1), Policy(2), Mean(), dense, dense)
    watch = Standstill(hub, 0.0)
    assert watch.check(1000.0) is None
