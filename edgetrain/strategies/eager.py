"""The stand-in of eager updates: the fleet's last round, with this member's part of it made new."""

from __future__ import annotations

import numpy as np

from edgetrain.strategies.drift import Drift, Shares
from edgetrain.vectors.vector import Vector


class Eager(Drift):
    """With N members, each round in flight is taken for ::

        stand_in(own) = own / N + (last reply - last own / N)

    Kale, Douillard and Donchev, Eager Updates for Overlapped Communication and Computation in
    DiLoCo, 2025. Differences from the paper: there each member hands this to its own outer
    optimizer until the mean is known; here the outer rule is the hub's, so its step is in the last
    reply and not in own / N, and the base never sees a stand-in. Members that hold more samples
    count as one of N here. Until the first reply own progress stands for a round, as in DGA.

    `gap`, the part in parentheses, is learned whole from each reply; nothing is measured.
    """

    def __init__(self, elements: int, members: int) -> None:
        super().__init__(elements)
        self._share = np.float32(1 / members)

    def predicted(self) -> Vector | None:
        """See Drift: no prediction is judged."""
        return None

    def begin_reply(
        self, local_steps: int, delay: int, whole: bool = False, sent: float = 1.0
    ) -> Shares:
        self._replies += 1
        self._learns = not whole
        one, nothing = np.float32(1), np.float32(0)
        self._coming = (one, nothing) if whole else (self._share, one)
        return self._coming

    def learn_tile(self, here: slice, reply: Vector, own: Vector, predicted: Vector | None) -> None:
        if self._learns:
            gap = np.multiply(own[here], self._share, out=self.gap[here])
            np.subtract(reply, gap, out=gap)
