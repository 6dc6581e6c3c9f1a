"""An ablation, not a way to train: delayed averaging without DGA's correction term."""

from __future__ import annotations

import numpy as np

from edgetrain.errors import Diverged
from edgetrain.strategies.displacement import Displacement
from edgetrain.strategies.expected import Flight
from edgetrain.vectors.vector import Vector, all_finite


class Uncorrected(Displacement):
    """DGA without its correction: the stale mean alone moves the parameters.

    DGA's w <- w + mean_r - own_r lets a member keep own_r until mean_r takes its place (Zhu et al.,
    NeurIPS 2021, algorithm 1). Here a member gives own_r away when it submits it and goes on from
    base, which knows the means that have arrived and nothing newer::

        at a round's end     own = params - base;  params = base
        D steps later        base += mean;  params = base + local progress of this round

    so that a gradient is taken at parameters that lack the last D steps, its own among them:
    stochastic gradient descent with a delay. With `delay = 0` both are FedAvg. `base` is equal on
    all members, bit for bit, as with DGA. There is to show what the correction is worth
    (examples/paper/correction.toml).
    """

    keeps_rest = False

    def sent(self, vector: Vector) -> None:
        """Nothing of a contribution stays in `params`, whatever was sent of it."""

    def _submit(self) -> Vector:
        own = self._memory.borrow_vector()
        np.subtract(self.params, self.base, out=own)
        if not all_finite(own):
            raise Diverged(
                f"parameters are not finite after step {self._steps}",
                "training diverged on this member: lower the learning rate, or take dga",
            )
        at_once = self.delay == 0 and not self.expected.flights
        if not at_once:
            self.params[:] = self.base
        self.expected.flights.append(Flight(self.round, self._steps, None, at_once))
        self.round += 1
        self._steps_taken = 0
        return own
