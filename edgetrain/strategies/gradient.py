"""The member's half of synchronous SGD: contribute the gradient, wait, step with the mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from edgetrain.errors import Diverged, EdgetrainError
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import Vector, all_finite, checksum


class Gradient:
    """DistributedDataParallel's rule: exact for every optimizer, and a full round trip a step.

    All members start from equal parameters and step with equal gradients, so the parameters are the
    base. `params` is only read; `gradient` is overwritten by `apply` with the merged gradient.
    Members cannot join a running job: the optimizer's state is nowhere but in the members.
    """

    adjusts_gradient = True
    moves_params = moves_within = False
    keeps_rest = False
    tile_sums: Sequence[int] = ()
    local_steps = 1
    steps_taken = 0
    has_steps = False

    def __init__(self, params: Vector, gradient: Vector, memory: VectorPool | None = None) -> None:
        self.params = params
        self.gradient = gradient
        self._memory = memory or VectorPool(gradient.size)
        self.delay = 0
        self.applied = 0
        self.round = 0
        self.checksum = checksum(params)

    @property
    def base(self) -> Vector:
        return self.params

    def start(self, applied: int, round: int) -> None:
        """Begin from `params` as they are."""
        self.applied, self.round = applied, round
        self.checksum = checksum(self.params)

    def before_step(self) -> Vector | None:
        """The gradient of this step, copied: a slow link may still read it after the reply."""
        self._check()
        self.round += 1
        own = self._memory.borrow_vector()
        own[:] = self.gradient
        return own

    def _check(self) -> None:
        if not all_finite(self.gradient):
            raise Diverged(
                f"the gradient of step {self.round} is not finite",
                "training diverged on this member: lower the learning rate, or clip gradients",
            )
        self.checksum = checksum(self.params)

    def follow_up(self) -> Vector | None:
        """One round a step is enough."""
        return None

    def note_rate(self, rate: float) -> None:
        """All members take the same steps."""

    def after_step(self) -> Vector | None:
        """Nothing is left to send once the optimizer has stepped."""
        return None

    def quiet_steps(self) -> int:
        """None: every step submits."""
        return 0

    def finish(self, rest: bool = True) -> Vector | None:
        """Nothing is left to send at the end either."""
        self.checksum = checksum(self.params)
        return None

    def sent(self, vector: Vector) -> None:
        """The reply replaces the gradient, whatever of it got through."""

    def rebase(self, base: Vector, applied: int) -> None:
        """Not possible: the optimizer has to see every gradient."""
        raise EdgetrainError("synchronous SGD cannot go on from parameters alone")

    def skip_to(self, round: int) -> None:
        """Not possible either."""
        if round != self.round:
            raise EdgetrainError(f"synchronous SGD cannot leave out steps, as to round {round}")

    def rest(self) -> Vector | None:
        return None

    def restore_rest(self, rest: Vector, steps_taken: int = 0) -> None:
        raise EdgetrainError("synchronous SGD has no local progress to restore")

    def learned(self) -> dict[str, NDArray[Any]]:
        return {}

    def restore_learned(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Nothing to do."""

    def take_note(self) -> str:
        """See MemberHalf: it decides nothing."""
        return ""

    def note_merged(self, merged: int, complete: int) -> None:
        """A reply answers the gradient of its own step."""

    def due(self, ready: int = 0) -> int | None:
        """The round just submitted: synchronous SGD always waits."""
        return self.applied if self.applied < self.round else None

    def apply(self, reply: Iterable[Vector]) -> None:
        """Put the merged gradient in place of this member's own, for the optimizer to step with."""
        start = 0
        for piece in reply:
            self.gradient[start : start + piece.size] = piece
            start += piece.size
        self.applied += 1
