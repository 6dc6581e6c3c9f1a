"""The codec `auto`: a ladder of codecs, and payloads that name the one they were encoded with.

Which rung is taken is decided elsewhere, from what links were measured to carry (the hub's
`density`). A payload is one byte, the number of its rung, and that codec's payload: decoding
needs no message, and a rung may change between any two of them. Nothing is lost by a change: what
one rung leaves out is in the residual that the next one encodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from edgetrain.codecs.base import DENSE_PART_ELEMENTS, Codec
from edgetrain.codecs.blocks import Planes, int4, int8
from edgetrain.codecs.dense import Half
from edgetrain.codecs.feedback import Feedback
from edgetrain.codecs.kernels import wire
from edgetrain.codecs.sparse import TopK
from edgetrain.errors import BadPayload, ConfigError
from edgetrain.vectors.vector import Buffer, Vector

FLOOR = 0.01
"""Default of the smallest share of the elements that is sent; auto(0.05) sets another."""

_DENSITIES = (0.3, 0.1, 0.05, 0.02, 0.01)
_BITS = 2
"""Bits of each value that a sparse rung keeps: more indices are worth more than finer values."""


def _rungs() -> tuple[Codec, ...]:
    rungs: tuple[Codec, ...] = (
        Half(),
        int8(),
        int4(),
        *(TopK(density, Planes(_BITS)) for density in _DENSITIES),
    )
    for rung in rungs:  # all cut a vector into the same parts, so parts do not depend on the rung
        rung.part_elements = DENSE_PART_ELEMENTS
    return rungs


RUNGS = _rungs()
"""Codecs of the ladder, from the smallest loss to the fewest bytes. A payload names its rung by the
place here: append, never insert."""


def element_bytes(rung: int) -> float:
    """Bytes that an element of a long vector takes on this rung, typically."""
    codec = RUNGS[rung]
    if isinstance(codec, TopK):
        d = codec.density
        return d * (math.log2(1 / d) + 1.5 + _BITS + 0.1) / 8
    return codec.max_bytes(DENSE_PART_ELEMENTS) / DENSE_PART_ELEMENTS


def finest_rung(elements: int, most_bytes: float, floor: float = FLOOR) -> int:
    """The finest rung with payloads of at most `most_bytes`, else the last one above `floor`."""
    last = lowest_rung(floor)
    for rung in range(last):
        if elements * element_bytes(rung) <= most_bytes:
            return rung
    return last


def lowest_rung(floor: float) -> int:
    """The last rung that sends at least this share of the elements."""
    return sum(density >= floor for density in _DENSITIES) + len(RUNGS) - len(_DENSITIES) - 1


class Auto(Codec):
    """`auto`, `auto(0.05)`: encodes on `rung`, decodes every rung.

    A new one stands on its lowest rung, `at` makes one on another. Bound: that of the rung.
    """

    few_elements = adapts = whole = True

    def __init__(self, floor: float = FLOOR, rung: int | None = None) -> None:
        """No rung sends less than the share `floor` of elements, 0.01 to 1. ConfigError."""
        if not FLOOR <= floor <= 1:
            raise ConfigError(
                f"auto({floor:g}): the smallest share of the elements that is sent is {FLOOR:g} "
                "to 1",
                "auto(0.05) never sends less than 5 %; auto stands for auto(0.01)",
            )
        self.floor = floor
        self.lowest = lowest_rung(floor)
        self.rung = self.lowest if rung is None else min(rung, self.lowest)
        self.nearly_all = self.chosen.nearly_all
        self.name = "auto" if floor == FLOOR else f"auto({floor!r})"

    def at(self, rung: int) -> Auto:
        """This codec, encoding on another rung, or on its lowest one if that is above."""
        return Auto(self.floor, rung)

    @property
    def chosen(self) -> Codec:
        return RUNGS[self.rung]

    def encode(self, vector: Vector, salt: int = 0) -> list[Buffer]:
        return self._marked(self.chosen.encode(vector, salt))

    def drain(self, residual: Vector, vector: Vector, salt: int = 0) -> list[Buffer]:
        return self._marked(self.chosen.drain(residual, vector, salt))

    def check(self, payload: Buffer, elements: int) -> None:
        codec, rest = _split(payload)
        codec.check(rest, elements)

    def apply(self, payload: Buffer, weight: float | None, out: Vector) -> None:
        codec, rest = _split(payload)
        codec.apply(rest, weight, out)

    def decode(self, payload: Buffer, out: Vector) -> None:
        codec, rest = _split(payload)
        codec.decode(rest, out)

    def add_many(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Vector) -> None:
        """Most often all are of one rung, which may have a faster way for many."""
        split = [_split(payload) for payload in payloads]
        codecs = {id(codec) for codec, _ in split}
        if len(codecs) == 1:
            split[0][0].add_many([rest for _, rest in split], weights, out)
            return
        super().add_many(payloads, weights, out)

    def max_bytes(self, elements: int) -> int:
        return 1 + max(rung.max_bytes(elements) for rung in RUNGS)

    def _marked(self, payloads: Sequence[Buffer]) -> list[Buffer]:
        mark = bytes([self.rung])
        return [b"".join((mark, payload)) for payload in payloads]


def rung_of(payload: Buffer) -> int:
    """The rung that a payload names. BadPayload."""
    rung = payload[0] if len(payload) else len(RUNGS)
    if rung >= len(RUNGS):
        raise wire.bad(wire.TRUNCATED) if not len(payload) else BadPayload(f"auto: rung {rung}")
    return int(rung)


def _split(payload: Buffer) -> tuple[Codec, Buffer]:
    view = memoryview(payload).cast("B")
    return RUNGS[rung_of(view)], view[1:]


class OnRungs(Feedback):
    """Error feedback around `auto`, which `climb` puts on another rung. It is in the state."""

    def __init__(self, codec: Auto, elements: int) -> None:
        super().__init__(codec, elements)
        self._auto = codec
        self._rung = np.array([codec.rung], np.float32)

    @property
    def rung(self) -> int:
        return int(self._rung[0])

    def climb(self, rung: int) -> None:
        self.codec = self._auto = self._auto.at(rung)
        self._rung[0] = self._auto.rung

    def state(self) -> dict[str, Vector]:
        return {**super().state(), "rung": self._rung}

    def restore(self, state: Mapping[str, Vector]) -> None:
        super().restore(state)
        self.climb(self.rung)
