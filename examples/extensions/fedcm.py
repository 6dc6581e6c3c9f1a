"""FedCM: the fleet's last direction is in every local gradient, as a momentum that all share.

Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021, algorithm 2: each step is
along alpha gradient + (1 - alpha) direction, where direction is how far the base moved in the last
round, divided by the rates of the round's steps.

    [strategy]
    name = "fedcm:fedcm(0.1)"
"""

import numpy as np

from edgetrain.strategies import Parameter, Strategy
from edgetrain.strategies.displacement import Displacement


class FedCM(Displacement):
    adjusts_gradient = True

    def __init__(self, setting, alpha):
        super().__init__(setting.params, setting.local_steps, 0, setting.memory)
        self.gradient, self.alpha = setting.gradient, alpha
        self.direction = np.zeros_like(setting.params)
        self.rates = 0.0

    def before_step(self):
        self.gradient *= self.alpha
        self.gradient += (1 - self.alpha) * self.direction

    def quiet_steps(self):
        return 0

    def note_rate(self, rate):
        super().note_rate(rate)
        self.rates += rate

    def apply(self, reply):
        before = self.base.copy()
        super().apply(reply)
        if self.rates:
            self.direction = (before - self.base) / np.float32(self.rates)
        self.rates = 0.0

    def learned(self):
        return super().learned() | {"direction": self.direction}

    def restore_learned(self, state):
        state = dict(state)
        self.direction = state.pop("direction").copy()
        super().restore_learned(state)


fedcm = Strategy(
    name="fedcm", summary="fedavg with a momentum that members share", source="Xu et al., 2021",
    build=FedCM, parameters=(Parameter("alpha", 1e-3, 1.001),), adjusts_gradient=True,
)  # fmt: skip
