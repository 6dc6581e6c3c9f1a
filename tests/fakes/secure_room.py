"""Both pure sides of secure aggregation in one room: every message is looked at, none is lost but
those of members who have dropped out."""

from __future__ import annotations

import zlib
from collections.abc import Collection

import numpy as np

from edgetrain.exchange.further_messages import Masking, Unmask
from edgetrain.exchange.masks.aggregator import Aggregator, Outgoing, Sum
from edgetrain.exchange.masks.fixed_point import FixedPoint
from edgetrain.exchange.masks.masker import Masker, parts
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.exchange.messages import pack, unpack
from tests.fakes.patience import patience

PATIENCE_S = patience(60.0)
PART = 8


class Room:
    """`members` maskers and their hub."""

    def __init__(
        self, members: int, threshold: int, elements: int = 20, clip_range: float = 8.0
    ) -> None:
        self.terms = MaskTerms(members, threshold, clip_range)
        self.elements = elements
        self.hub = Aggregator(self.terms)
        self.hub.start_masks(0)
        self.maskers = {f"m{i}": Masker(self.terms, elements) for i in range(members)}
        self.weights = dict.fromkeys(self.maskers, 1.0)
        self.gone: set[str] = set()
        self.now = 0.0
        self.asked: list[tuple[str, Unmask]] = []
        """Every request for shares, and who it went to."""
        self.said: list[bytes] = []
        """Everything that members told the hub but for contributions."""

    @property
    def present(self) -> list[str]:
        return sorted(set(self.maskers) - self.gone)

    def deliver(self, outgoing: Outgoing, drop: Collection[str] = ()) -> None:
        """Carry messages to members and their answers back; `drop`: who is gone before it comes."""
        self.gone |= set(drop)
        for name, message in outgoing:
            if isinstance(message, Unmask):
                self.asked.append((name, message))
            if name in self.gone:
                continue
            answer = self.maskers[name].answer_hub(over_the_wire(message))
            if answer is not None:
                self.said.append(b"".join(bytes(frame) for frame in pack(answer)))
                self.hub.accept_message(name, over_the_wire(answer))

    def set_up(
        self, rounds: int = 2, advertise: Collection[str] = (), share: Collection[str] = ()
    ) -> None:
        """A block of keys; `advertise` and `share` drop out before they have done that."""
        self.deliver(self.hub.begin_block(self.weights, 0, rounds, self.now), advertise)
        self.deliver(self.step(), share)
        self.deliver(self.step())

    def step(self) -> Outgoing:
        return self.hub.advance_blocks(self.present, PATIENCE_S, self.now)

    def give(self, name: str, round: int, vector: np.ndarray) -> np.ndarray:
        """One member's masked contribution reaches the hub; this is what it looked like."""
        masked = np.empty(self.elements, np.uint32)
        self.maskers[name].mask(round, vector, self.weights[name], masked)
        self.hub.add_contribution(name, round, parts(masked, PART))
        return masked

    def unmask(self, round: int, drop: Collection[str] = ()) -> Sum | None:
        """Close a round; `drop` are gone before they reveal anything."""
        self.deliver(self.hub.close_round(round, self.now), drop)
        return self.hub.unmask_round(round, PATIENCE_S, self.now)

    def able(self, round: int) -> list[str]:
        """Who is there and can give to a round."""
        return sorted((self.hub.contributors(round) or set()) - self.gone)

    def expected(self, vectors: dict[str, np.ndarray]) -> np.ndarray:
        """The mean of what these vectors are as integers, added up where everyone can see it."""
        fixed = FixedPoint(self.terms.clip_range, self.terms.members)
        unit = self.hub.blocks[-1].unit
        total, weight = np.zeros(self.elements, np.uint32), 0.0
        for name, vector in sorted(vectors.items()):
            words = np.empty_like(total)
            fixed.encode(vector, words, self.weights[name] / unit)
            total += words
            weight += self.weights[name] / unit
        mean = np.empty(self.elements, np.float32)
        fixed.decode(total, weight, mean)
        return mean


def over_the_wire(message: Masking) -> Masking:
    return unpack([bytes(frame) for frame in pack(message)])


def vector(seed: object, elements: int = 20) -> np.ndarray:
    generator = np.random.default_rng(zlib.crc32(repr(seed).encode()))
    return generator.standard_normal(elements).astype(np.float32)
