"""A hub as tests talk to it: one desk, where members are letters and time is a number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgetrain import codecs, strategies
from edgetrain.exchange.delay import Delay
from edgetrain.exchange.hub.direct import MappedPart
from edgetrain.exchange.hub.effects import Closed, Note, Send
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import (
    CODES,
    PROTOCOL,
    Base,
    Contribute,
    Join,
    Refuse,
    Resume,
    pack,
)
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.vector import checksum

ELEMENTS = 5


ZEROS = np.zeros(ELEMENTS, np.float32)


def raw(vector) -> bytes:
    return np.asarray(vector, np.float32).tobytes()


class Desk:
    """A hub and what it said; members are called by the letter that is also their address."""

    def __init__(
        self,
        members=2,
        *,
        gradient=False,
        weighted=False,
        codec=None,
        reply_codec=None,
        delay=0,
        assign=None,
        gateways=False,
        **policy,
    ):
        row = replace(strategies.find("sync-sgd" if gradient else "dga"), weighted=weighted)
        terms = Terms(row, 1, Delay(delay or 0, delay is None), "job-a")
        terms = replace(terms, gateways=gateways)
        codec = codec or codecs.Dense()
        reply_codec = reply_codec or codecs.Dense()
        parts = terms, Policy(members, **policy), Mean(not gradient), codec, reply_codec
        self.hub = Hub(*parts)
        if assign:
            MappedPart(assign).attach(self.hub)
        self.now = 0.0
        self.said: dict[str, list] = {}
        self.notes: list[Note] = []
        self.closed: list[Closed] = []

    def take(self, effects):
        for effect in effects:
            if isinstance(effect, Send):
                pack(effect.message)  # all that a hub says can be packed
                self.said.setdefault(effect.to.decode(), []).append(effect.message)
            elif isinstance(effect, Note):
                self.notes.append(effect)
            elif isinstance(effect, Closed):
                self.closed.append(effect)

    def tell(self, who, message):
        """What the hub answers to everyone."""
        self.said = {}
        self.take(self.hub.handle(who.encode(), message, self.now))
        return self.said

    def tick(self, seconds):
        self.now += seconds
        self.said = {}
        self.take(self.hub.tick(self.now))
        return self.said

    def join(self, who, **other):
        asked = {
            "protocol": PROTOCOL, "job": "job-a", "model": "model", "elements": ELEMENTS,
            "name": who, "weight": 1.0, "checksum": checksum(ZEROS),
        }  # fmt: skip
        return self.tell(who, Join(**(asked | other)))

    def give(self, who, round, vector=ZEROS, **other):
        given = {
            "round": round, "part": 0, "parts": 1, "weight": 1.0, "applied": 0,
            "checksum": checksum(ZEROS), "wanted_delay": 0, "payload": raw(vector),
        }  # fmt: skip
        return self.tell(who, Contribute(**(given | other)))

    def started(self, names="ab", **other):
        for name in names:
            self.join(name, **other)
        self.tell(names[0], Base(0, 1, raw(ZEROS)))
        assert self.hub.started
        self.notes.clear()
        return self

    def events(self):
        return [(note.event, note.member) for note in self.notes]


def the(kind, messages):
    (found,) = [message for message in messages if isinstance(message, kind)]
    return found


def refusal(desk, said, who):
    """(code, reason); and the code is one of the documented ones."""
    found = the(Refuse, said[who])
    assert found.code in CODES
    return found.code, found.reason


RESUME = {
    "protocol": PROTOCOL, "model": "model", "elements": ELEMENTS, "name": "b", "session": 7,
    "applied": 0, "checksum": 0, "submitted": 1, "oldest": 0, "attempt": 1,
}  # fmt: skip


def back(desk, who="z", **other):
    return desk.tell(who, Resume(**(RESUME | other)))


def with_session(**policy):
    desk = Desk(2, **policy)
    desk.join("a")
    desk.join("b", session=7)
    desk.tell("a", Base(0, 1, raw(ZEROS)))
    desk.notes.clear()
    return desk


def lost(desk, *names):
    """These members cannot be reached any more, for as long as the hub has patience."""
    for name in names:
        desk.take(desk.hub.unreachable(name.encode(), desk.now))
    desk.tick(desk.hub.policy.lost_after_s)
