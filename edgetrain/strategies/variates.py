"""Control variates on gradients, before the optimizer: members' mean gradients travel as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import BadMessage
from edgetrain.strategies.displacement import Displacement
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import TILE, Vector, tiles, zeros

EASE = np.float32(0.5)
"""Share of the way to its newest value that a correction goes with a reply, where there is a delay:
a correction that is D steps old swings if it is taken whole (docs/decisions/037)."""


class Variates(Displacement):
    """Displacements whose local steps have their members' label skew taken out of the gradient.

    SCAFFOLD's correction (Karimireddy et al., ICML 2020, algorithm 1) with a delay and any
    optimizer. With g_i the mean of the gradients that member i computed in its last round, and c
    the mean of all members'::

        a step          the optimizer steps on g + v_i
        a round's end   contribute (y_i - x, g_i - the g_i before)
        a reply         x and c move by it;  v_i <- v_i + e ((c - c_i) - v_i)

    c_i is g_i as the others read it, of the round that the reply answers, and e = 1 where there has
    been no delay, EASE otherwise. With plain SGD, one rate and no delay it is the paper's, option
    II. Unlike a correction of the step, it reaches an optimizer's moments, which otherwise are of
    the labels that a member has: AdamW takes steps as long for those that it hardly has.

    The contribution has two halves, of the parameters and of the gradient, so `params` is float32
    [2 elements] and c is the second half of `base`: a member that joins, or comes back, finds it
    there. Where a round lacks members, c moves by as much less as they weigh, as in the paper: the
    hub sees to it (`Merger.close_round`). `gradient`, float32 [elements], is shared with the caller
    and mutated by `before_step`. Four vectors of memory, float32 [elements].
    """

    adjusts_gradient = True

    def __init__(
        self,
        params: Vector,
        gradient: Vector,
        local_steps: int = 1,
        delay: int = 0,
        memory: VectorPool | None = None,
    ) -> None:
        self._knows = False
        self.variates: Vector = zeros(gradient.size)
        """v_i"""
        self._own: Vector = zeros(gradient.size)
        """c_i"""
        self._last: Vector = zeros(gradient.size)
        """g_i of the last round that was submitted."""
        self._sum: Vector = zeros(gradient.size)
        """Sum of this round's gradients."""
        self._count = 0
        self._saved: tuple[int, Vector] = 0, self._sum
        """How many gradients a checkpoint had of the round that it was written in; their sum."""
        self._counted = -1
        """The step whose gradient was added last."""
        self._eases = delay > 0
        self._sent: dict[int, Vector] = {}
        """The gradient's half of contributions that no reply has answered, by round."""
        self.gradient = gradient
        super().__init__(params, local_steps, delay, memory)

    @property
    def _half(self) -> slice:
        return slice(self.gradient.size, 2 * self.gradient.size)

    def start(self, applied: int, round: int) -> None:
        """As Displacement; a newcomer's gradient is taken for the fleet's until it has one."""
        super().start(applied, round)
        if not self._knows:
            self._own[:] = self._last[:] = self.base[self._half]

    def before_step(self) -> None:
        """Note the gradient, and add the correction to it."""
        self._sum += self.gradient
        self._count += self._counted != self._steps  # several optimizers share a step
        self._counted = self._steps
        self.gradient += self.variates

    def quiet_steps(self) -> int:
        """None: every step has its gradient adjusted."""
        return 0

    def _submit(self) -> Vector:
        if self._count:  # a round without gradients says nothing new
            self._sum /= np.float32(self._count)
            second = self.params[self._half]
            second += self._sum
            second -= self._last
            self._last, self._sum = self._sum, self._last
            self._sum[:] = 0
        self._count, self._knows = 0, True
        own = super()._submit()
        self._sent[self.round - 1] = own[self._half]
        return own

    def sent(self, vector: Vector) -> None:
        """See MemberHalf: c_i is what others read."""
        super().sent(vector)
        self._sent[self.round - 1] = vector[self._half].copy()

    def apply(self, reply: Iterable[Vector]) -> None:
        """As Displacement, and move the correction."""
        super().apply(reply)
        self._move()

    def rebase(self, base: Vector, applied: int) -> None:
        """See MemberHalf. The base has c."""
        super().rebase(base, applied)
        self._move()

    def _move(self) -> None:
        """After replies to the rounds before `applied`: the correction of the base as it is now."""
        for round in [r for r in self._sent if r < self.applied]:
            self._own += self._sent.pop(round)
        self._eases = self._eases or self.delay > 0
        fleet, scratch = self.base[self._half], np.empty(min(TILE, self._own.size), np.float32)
        for here in tiles(self._own.size):
            moved = scratch[: here.stop - here.start]
            np.subtract(fleet[here], self._own[here], out=moved)
            moved -= self.variates[here]
            if self._eases:
                moved *= EASE
            self.variates[here] += moved

    def restore_rest(self, rest: Vector, steps_taken: int = 0) -> None:
        """See MemberHalf: this round's gradients are in it, too."""
        super().restore_rest(rest, steps_taken)
        if steps_taken:
            self._count, self._sum = self._saved

    def learned(self) -> dict[str, NDArray[Any]]:
        if not self._knows:
            return super().learned()
        own = self._own.copy()
        for part in self._sent.values():  # answered by the base that it comes back to
            own += part
        vectors = {"variates": self.variates, "own": own, "last": self._last, "sum": self._sum}
        return super().learned() | vectors | {"counts": np.array([self._count, self._eases])}

    def restore_learned(self, state: Mapping[str, NDArray[Any]]) -> None:
        super().restore_learned(state)
        if "variates" not in state:
            return
        names, counts = ("variates", "own", "last", "sum"), state.get("counts")
        vectors = [state[name] for name in names if name in state]
        if not (
            len(vectors) == len(names)
            and all(v.shape == self._own.shape and np.isfinite(v).all() for v in vectors)
            and counts is not None and counts.shape == (2,) and (counts >= 0).all()
        ):  # fmt: skip
            raise BadMessage(f"the checkpoint's variates are not {self._own.size} elements")
        for mine, saved in zip((self.variates, self._own, self._last), vectors, strict=False):
            mine[:] = saved
        self._saved = int(counts[0]), state["sum"].astype(np.float32)
        self._eases, self._knows = bool(counts[1]), True
