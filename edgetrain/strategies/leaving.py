"""The stand-in that lets a member come back to the mean gradually."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import BadMessage
from edgetrain.strategies.choice import SENT
from edgetrain.strategies.drift import Drift, Shares
from edgetrain.vectors.vector import Vector

SHARE = 0.7
"""Of what a reply would take out of the parameters, where the optimizer has momentum: of 0.5 to 0.9
it cost a language model least with momentum and with AdamW (docs/decisions/026)."""


def share_of(local_steps: int, delay: int) -> float:
    """Share that stays for plain SGD: half of a deviation leaves in the K + D steps that a member
    is apart."""
    return 1 - local_steps / (2 * (local_steps + delay))


FIRST = 3
"""First rounds of plain SGD that are taken without a delay, see Leaving."""


class Leaving(Drift):
    """Own progress stands for each round in flight, and a share of what a reply takes out stays::

        params = base + own_1 + ... + own_n + stayed + local
        stayed <- share (stayed + own - reply)

    A reply takes all of own - reply out, D steps after the loss has begun to pull it back. With
    this a member returns in several rounds. What stayed is never contributed, and over all members
    it adds up to 0, so the mean of all is what it is without. Of our own; with one member, or equal
    contributions, it is DGA.

    Why it has to: let u be a member's distance from the mean of all in one direction, where the
    rate times the curvature is a, and D a multiple of K. Then u <- (1 - a) u in each step, and all
    that u lost in steps that a reply answers is given back with it: u is -a times the sum of u over
    the last D + K steps or fewer. For K = 1 that is

        z^D + a (z^(D-1) + ... + z + 1) = 0,

    whose roots have the product a: for any delay at all DGA swings up from a = 1 on, and FedAvg
    from 2 on. The mean does not show it, but gradients are taken at the members. Giving back
    gradually damps exactly the fast swings that diverge: with a share R the limit is 1 + R for
    K = 1 and an odd D, and nowhere lower.

    That is so near a minimum. At the start gradients are long and the loss is sharp, and members
    that take K + D steps alone may explode where those that take K do not; nothing that is done
    later helps. So plain SGD, whose steps are as long as its gradients, waits for the replies to
    its FIRST rounds.

    With a `choice` it is made as by Drift; what follows begins with nothing of this.

    Nothing stays without a delay, or of a contribution of which a codec's rest waits beside the
    parameters. `gap`, float32 [elements], is what stayed.
    """

    name, first = "decay", FIRST

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

    def begin_reply(
        self, local_steps: int, delay: int, whole: bool = False, sent: float = 1.0
    ) -> Shares:
        self._learns = bool(delay) and not whole
        self._is_evidence = not whole and sent >= SENT
        self._share = np.float32(SHARE if self._momentum else share_of(local_steps, delay))
        return self.shares

    def learn_tile(self, here: slice, reply: Vector, own: Vector, predicted: Vector | None) -> None:
        if self.choice is not None and self._is_evidence:
            self.choice.add_tile(here, own, reply)
        stayed = self.gap[here]
        if not self._learns:
            stayed[:] = 0
            return
        stayed += own[here]
        stayed -= reply
        stayed *= self._share

    def _learned(self) -> dict[str, NDArray[Any]]:
        return {"stayed": self.gap}

    def _restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        stayed = state.get("stayed")
        if stayed is None or stayed.shape != self.gap.shape or not np.isfinite(stayed).all():
            raise BadMessage(f"the checkpoint has not what stayed of {self.gap.size} elements")
        self.gap[:] = stayed
