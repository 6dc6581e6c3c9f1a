"""FedDyn: local steps that lead to the optimum of all, however unequal the data are.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, algorithm 1: a member's
loss has - <h, w> + alpha/2 |w - base|^2 more, where h is less by alpha (w - base) after each round;
the hub adds the mean of all rounds so far to the round's mean.

    [strategy]
    name = "feddyn:feddyn(0.1)"
"""

import numpy as np

from edgetrain.strategies import Parameter, Strategy
from edgetrain.strategies.displacement import Displacement
from edgetrain.strategies.outer_rules import OuterRule


class FedDyn(Displacement):
    adjusts_gradient = True

    def __init__(self, setting, alpha):
        super().__init__(setting.params, setting.local_steps, 0, setting.memory)
        self.gradient, self.alpha = setting.gradient, alpha
        self.h = np.zeros_like(setting.params)

    def before_step(self):
        self.gradient += self.alpha * (self.params - self.base) - self.h

    def quiet_steps(self):
        return 0

    def after_step(self):
        own = super().after_step()
        if own is not None:  # how far the round's steps have led
            self.h -= self.alpha * own
        return own

    def learned(self):
        return super().learned() | {"h": self.h}

    def restore_learned(self, state):
        state = dict(state)
        self.h = state.pop("h").copy()
        super().restore_learned(state)


class Total(OuterRule):
    def __init__(self):
        super().__init__()
        self.begins = {"total": 0.0}

    def _step_tile(self, merged, total):
        total += merged
        merged += total


feddyn = Strategy(
    name="feddyn", summary="fedavg that corrects members' drift", source="Acar et al., ICLR 2021",
    build=FedDyn, parameters=(Parameter("alpha", 1e-6, 1000.0),), adjusts_gradient=True,
    outer="feddyn:Total")  # fmt: skip
