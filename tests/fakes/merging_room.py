"""A hub with a merge rule, and members that are talked to by name."""

from __future__ import annotations

import numpy as np

from edgetrain.codecs import Dense
from edgetrain.exchange.hub.effects import Closed, Send
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import PROTOCOL, Base, Contribute, Join, Reply
from edgetrain.strategies import find
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.vector import checksum

ELEMENTS, PART, PARTS = 11, 4, 3


START = np.zeros(ELEMENTS, np.float32)


class Counting(Mean):
    """A mean that says how often it merged."""

    merged = 0

    def merge(self, pieces, out):
        self.merged += 1
        super().merge(pieces, out)


class Room:
    """A hub with members that are talked to by name."""

    def __init__(self, rule, names, quorum=1, closing=None, outer=None):
        codec = Dense()
        codec.part_elements = PART
        terms = Terms(find("local-sgd"), 1)
        policy = Policy(len(names), quorum, deadline_s=10.0)
        self.hub = Hub(terms, policy, rule, codec, codec, closing=closing, outer=outer)
        self.known = [checksum(START)]
        for name in names:
            self.say(name, Join(PROTOCOL, "", "model", ELEMENTS, name, 1.0, self.known[0]))
        self.say(names[0], Base(0, 1, memoryview(START).cast("B")))
        assert self.hub.started

    def say(self, name, message, now=0.0):
        return self.hub.handle(name.encode(), message, now)

    def contribute(self, name, round, vector, now=0.0, weight=1.0):
        parts = range(PARTS)
        return [e for p in parts for e in self.contribute_part(name, round, p, vector, now, weight)]

    def contribute_part(self, name, round, part, vector, now=0.0, weight=1.0):
        payload = memoryview(vector[PART * part : PART * (part + 1)].copy()).cast("B")
        checksum, applied = self.known[-1], len(self.known) - 1
        message = Contribute(round, part, PARTS, weight, applied, checksum, 0, payload)
        effects = self.say(name, message, now)
        self.known += [e.message.checksum for e in effects if is_reply_to("a", e)]
        return effects


def is_reply_to(name, effect):
    return (
        isinstance(effect, Send)
        and effect.to == name.encode()
        and isinstance(effect.message, Reply)
        and effect.message.part == 0
    )


def filled(value):
    return np.full(ELEMENTS, value, np.float32)


def closed(effects):
    return [effect for effect in effects if isinstance(effect, Closed)]
