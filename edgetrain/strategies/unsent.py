"""The part of contributions that a lossy codec has not sent yet, and where it waits.

Pure: float32 vectors in and out. docs/decisions/012 has the rule's table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import BadMessage
from edgetrain.vectors.vector import Vector

FORGET = 0.9
"""Factor by which a new reply weakens older evidence."""

LEAVE, RETURN = 0.3, 0.4
"""Agreement below which the unsent part leaves the parameters, and above which it returns."""

EVIDENCE = 64
"""Elements to compare before the unsent part is moved for the first time."""

SAMPLE = 16_384
"""Elements, spread evenly over the vector, that are compared; at most."""


def stride_of(elements: int, sample: int = SAMPLE) -> int:
    return max(1, math.ceil(elements / sample))


def sampled(piece: Vector, start: int, stride: int) -> tuple[slice, NDArray[np.float64]]:
    """The sample's elements in a piece that begins at `start`: places, float64 copies."""
    skip = -start % stride
    elements = piece[skip::stride].astype(np.float64)
    first = (start + skip) // stride
    return slice(first, first + elements.size), elements


class Unsent:
    """Measures whether the fleet goes where a member's unsent part points, and decides from that.

    If it does (equal data), the part stays in the parameters: gradients are taken where the
    optimizer believes to be. If it does not (unequal data), the part is mostly the drift of one
    member, many rounds of it, and waits in a vector of its own, `beside`.

    The measure is the agreement ::

        <unsent, reply> / (|unsent| |reply|)

    over the elements of a reply that this member left out of its own contribution to that round:
    there the reply is the others' alone. Old evidence fades. A sample of the unsent part is kept
    for each round in flight. A codec that leaves no element out entirely gives no evidence: then
    the part stays where it is, at first in the parameters.

    Nothing of this is in the base, or sent: members may decide differently.
    """

    def __init__(self, elements: int) -> None:
        self.beside: Vector | None = None
        """The unsent part, float32 [elements]; None: it is in the parameters."""
        self.stride = stride_of(elements)
        """One in this many elements is compared."""
        self._evidence = np.zeros(4)
        """<unsent, reply>, <unsent, unsent>, <reply, reply>, elements compared."""

    def belongs_beside(self) -> bool:
        """Whether the unsent part has to wait outside the parameters from now on."""
        product, unsent, reply, count = self._evidence
        if count < EVIDENCE or unsent <= 0 or reply <= 0:
            return self.beside is not None
        return bool(
            product < (LEAVE if self.beside is None else RETURN) * math.sqrt(unsent * reply)
        )

    def sample(self, whole: Vector, sent: Vector) -> Vector:
        """The sample to compare the reply with: what is not in `sent` of what should be.

        `whole`: what should be sent, of every `stride`-th element; `sent`: of all elements.
        """
        return np.where(sent[:: self.stride] == 0, whole, np.float32(0))

    def sent_share(self, sent: Vector | None, left_out: Vector | None) -> float:
        """The share of a contribution, of its squared length, that was `sent`; `left_out` is a
        `sample`. 1: nothing was left out, or it is not known."""
        if sent is None or left_out is None:
            return 1.0
        got, lost = (
            float(np.sum(v.astype(np.float64) ** 2)) for v in (sent[:: self.stride], left_out)
        )
        return got / (got + lost) if got + lost > 0 else 1.0

    def learn(self, reply: Iterable[Vector], sample: Vector) -> None:
        """Compare a reply, in consecutive pieces, with the sample of its round."""
        measured, start = np.zeros(4), 0
        for piece in reply:
            place, replied = sampled(piece, start, self.stride)
            unsent = sample[place].astype(np.float64)
            both = (replied != 0) & (unsent != 0)
            unsent, replied = unsent[both], replied[both]
            # Not np.dot: its rounding depends on how many threads BLAS has.
            sums = (unsent * replied).sum(), (unsent * unsent).sum(), (replied * replied).sum()
            measured += [*sums, unsent.size]
            start += piece.size
        self._evidence = FORGET * self._evidence + measured

    def state(self) -> dict[str, NDArray[Any]]:
        """State that a restarted member needs so as not to learn it again."""
        return {"agreement": self._evidence} if self._evidence[3] else {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from what `state` returned. BadMessage for what it cannot have returned."""
        evidence = state.get("agreement")
        if evidence is None:
            return
        if evidence.shape != (4,) or not (
            np.isfinite(evidence).all() and (evidence[1:] >= 0).all()
        ):
            raise BadMessage(f"the checkpoint's agreement is {evidence.tolist()}")
        self._evidence = evidence.astype(np.float64)
