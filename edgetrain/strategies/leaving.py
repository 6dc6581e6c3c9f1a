"""The stand-in that lets a member come back to the mean gradually."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import BadMessage
from edgetrain.strategies.drift import Drift, Shares
from edgetrain.vectors.vector import Vector

SHARE = np.float32(0.7)
"""Of what a reply would take out of the parameters: of 0.5 to 0.9 it cost a language model least
with momentum and with AdamW (docs/decisions/026)."""


class Leaving(Drift):
    """Own progress stands for each round in flight, and a share of what a reply takes out stays::

        params = base + own_1 + ... + own_n + stayed + local
        stayed <- SHARE (stayed + own - reply)

    A reply takes all of own - reply out, D steps after the loss has begun to pull it back. With
    momentum that takes out more than is left, and members swing around their mean: it cannot be
    seen in the mean, and gradients are taken at the members. With this a member returns in several
    rounds. What stayed is never contributed, and over all members it adds up to 0, so the mean of
    all is what it is without. Of our own; with one member, or equal contributions, it is DGA.

    Nothing stays without a delay, or of a contribution of which a codec's rest waits beside the
    parameters. `gap`, float32 [elements], is what stayed.
    """

    @property
    def stayed(self) -> Vector | None:
        return self.gap

    def add_stand_ins(
        self, expected: Vector, here: slice, owns: Sequence[Vector], shares: Shares
    ) -> None:
        for own in owns:
            expected += own[here]
        expected += self.gap[here]

    def stand_in(self, out: Vector, here: slice, own: Vector) -> Vector:
        out[:] = own[here]
        return out

    def predicted(self) -> Vector | None:
        """See Drift: no prediction is judged."""
        return None

    def begin_reply(self, every: int, delay: int, whole: bool = False, sent: float = 1.0) -> Shares:
        self._learns = bool(delay) and not whole
        return self.shares

    def learn_tile(self, here: slice, reply: Vector, own: Vector, predicted: Vector | None) -> None:
        stayed = self.gap[here]
        if not self._learns:
            stayed[:] = 0
            return
        stayed += own[here]
        stayed -= reply
        stayed *= SHARE

    def end_reply(self) -> tuple[Drift, str]:
        """See Drift: it chooses nothing."""
        return self, ""

    def state(self) -> dict[str, NDArray[Any]]:
        return {"stayed": self.gap}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> Drift:
        stayed = state.get("stayed")
        if stayed is None or stayed.shape != self.gap.shape or not np.isfinite(stayed).all():
            raise BadMessage(f"the checkpoint has not what stayed of {self.gap.size} elements")
        self.gap[:] = stayed
        return self
