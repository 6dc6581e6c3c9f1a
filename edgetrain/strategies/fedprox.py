"""The member's half of FedProx: local SGD that is held near the round's start."""

from __future__ import annotations

import numpy as np

from edgetrain.strategies.displacement import Displacement
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import TILE, Vector, tiles


class FedProx(Displacement):
    """FedAvg whose local steps minimise loss + mu/2 ||w - base||^2.

    FedProx (Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, equation 2 and
    algorithm 2), for members whose data differ: `before_step` adds the gradient of the proximal
    term, mu (w - base), to the flat gradient, and any optimizer steps on the sum. Differences from
    the paper: all members take part in a round, each takes `local_steps` (the paper lets devices
    stop at different inexactness), and the mean is weighted as FedAvg's.

    `gradient` (float32 [elements]) is shared with the caller and mutated in place by `before_step`.
    `base` is the global model that the round began from: there is no delay.
    """

    adjusts_gradient = True

    def __init__(
        self,
        params: Vector,
        gradient: Vector,
        mu: float,
        local_steps: int = 1,
        memory: VectorPool | None = None,
    ) -> None:
        super().__init__(params, local_steps, 0, memory)
        self.gradient = gradient
        self.mu = mu
        self._tile: Vector = np.empty(min(TILE, params.size), np.float32)

    def before_step(self) -> None:
        for here in tiles(self.params.size):
            pull = self._tile[: here.stop - here.start]
            np.subtract(self.params[here], self.base[here], out=pull)
            pull *= self.mu
            self.gradient[here] += pull

    def quiet_steps(self) -> int:
        """None: every step has its gradient adjusted."""
        return 0
