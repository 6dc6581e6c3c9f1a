"""What runs on a member: the seam between a strategy and whatever drives it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgetrain.vectors.vector import Vector


Contributes = Literal["gradient", "displacement"]


class MemberHalf(Protocol):
    """What runs on a member. The driver calls, for each training step::

        exchange(half.before_step()); optimizer.step(); exchange(half.after_step())

    where `exchange` submits the vector if there is one, then applies the reply of every round
    that is `due`, and after each submits what may `follow_up`. Nothing else may wait. If
    `before_step` returns None, nothing is applied before the step.

    `before_step` is called for every strategy, whatever it contributes and when. Only while
    `quiet_steps()` is greater than 0 may a driver leave out calls of `before_step` and `after_step`
    (a simulator that takes several steps at once does), and then make up for `after_step`.
    """

    every: int
    delay: int
    applied: int
    round: int
    checksum: int
    adjusts_gradient: bool
    """`before_step` reads or changes the gradient, so it is never left out: such a half reports
    `quiet_steps() == 0`. The driver pulls the gradient before the exchange at `before_step`, and
    pushes it afterwards. Otherwise the driver need not bring the gradient up to date at all."""
    moves_params: bool
    """A reply moves the parameters, and the driver pushes them after `apply`. Otherwise it takes
    the gradient's place, and the step that contributed is not taken before the reply is there."""
    keeps_rest: bool
    """What a lossy codec leaves out of a contribution stays in the parameters, and so is in the
    next contribution by itself: the driver says with `sent` what got through. Otherwise what is
    left out is the driver's to send later."""

    @property
    def base(self) -> Vector:
        """float32 [elements]: the parameters that all replies so far lead to."""

    def start(self, applied: int, round: int) -> None:
        """Take the parameters as they are for the base after `applied` replies."""

    def before_step(self) -> Vector | None:
        """After backward, before the optimizer's step: a gradient contribution, or None."""

    def note_rate(self, rate: float) -> None:
        """The step just taken, which `after_step` comes next for, had this learning rate."""

    def after_step(self) -> Vector | None:
        """After the optimizer's step: a displacement at the end of a round, or None."""

    def quiet_steps(self) -> int:
        """How many steps from now on neither submit nor wait."""

    def finish(self, rest: bool = True) -> Vector | None:
        """After the last step: what was not submitted yet. From now on every round is due.

        Without `rest`, what lossy contributions have left out is no reason for one more: it is
        given up, unless there are steps to submit as well."""

    def sent(self, vector: Vector) -> None:
        """Of the contribution that was just submitted, this is what others will read."""

    def rebase(self, base: Vector, applied: int) -> None:
        """Replies were missed for good: `base` is what all up to `applied` led to."""

    def skip_to(self, round: int) -> None:
        """The next contribution is to `round`: the fleet has gone on without this member."""

    def due(self) -> int | None:
        """The round whose reply has to be applied now, or None."""

    def apply(self, reply: Iterable[Vector]) -> None:
        """Apply the reply of round `applied`, given in consecutive pieces."""

    def follow_up(self) -> Vector | None:
        """A contribution that could not be made before the reply that was just applied, or None."""

    @property
    def local_steps(self) -> int:
        """Steps that are in no contribution yet. Between two rounds there are none: the moment for
        a checkpoint."""

    def rest(self) -> Vector | None:
        """What of the parameters has been sent to nobody, for a checkpoint."""

    def restore_rest(self, rest: Vector, local_steps: int = 0) -> None:
        """After `start`: add to the parameters what `rest` returned, of which `local_steps` steps
        belong to the next round. It is in the next contribution."""

    def learned(self) -> dict[str, NDArray[Any]]:
        """What the half has learned of the fleet, for a checkpoint; {}: it learns nothing. The
        arrays are its own: read them at once."""

    def restore_learned(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Before `start` or right after it: know again what `learned` returned. BadMessage for what
        it cannot have returned."""
