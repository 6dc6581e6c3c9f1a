"""A member's half of a strategy: the seam to the driver that calls it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgetrain.vectors.vector import Vector


Contributes = Literal["gradient", "displacement"]


class MemberHalf(Protocol):
    """A member's half of a strategy. The driver calls, for each training step::

        exchange(half.before_step()); optimizer.step(); exchange(half.after_step())

    where `exchange` submits the vector if there is one, then applies the reply of every round
    that is `due`, and after each submits what may `follow_up`. Nothing else may wait. If
    `before_step` returns None, nothing is applied before the step.

    `before_step` is called for every strategy, whatever it contributes and when. Only while
    `quiet_steps()` is greater than 0 may a driver leave out calls of `before_step` and `after_step`
    (a simulator that takes several steps at once does), and then make up for `after_step`.
    """

    local_steps: int
    delay: int
    applied: int
    round: int
    checksum: int
    adjusts_gradient: bool
    """Whether `before_step` reads or changes the gradient. Then it is never left out
    (`quiet_steps()` is 0), and the driver pulls the gradient before the exchange and pushes it
    afterwards. Otherwise the driver need not bring the gradient up to date at all."""
    moves_within: bool
    """Whether `after_step` changes the parameters within a round, too: the driver then pushes them
    after each step that is not quiet."""
    moves_params: bool
    """Whether a reply moves the parameters; the driver then pushes them after `apply`. Otherwise it
    replaces the gradient, and the step that contributed waits for it."""
    tile_sums: Sequence[int]
    """Sums of the tiles of `base` after the last reply; (): not known."""
    keeps_rest: bool
    """Whether what a lossy codec leaves out of a contribution stays in the parameters, and so is
    in the next contribution: the driver reports with `sent` what got through. Otherwise the driver
    sends the rest later."""

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
        """Steps from now on that neither submit nor wait."""

    def finish(self, rest: bool = True) -> Vector | None:
        """After the last step: what was not submitted yet. From now on every round is due.

        Without `rest`, what lossy contributions have left out is given up, unless there are steps
        to submit as well."""

    def sent(self, vector: Vector) -> None:
        """Report what others will read of the contribution just submitted."""

    def rebase(self, base: Vector, applied: int) -> None:
        """Take `base`, the result of all replies up to `applied`, in place of lost replies."""

    def skip_to(self, round: int) -> None:
        """The next contribution is to `round`: the fleet has gone on without this member."""

    def note_merged(self, merged: int, complete: int) -> None:
        """Out of step, before `apply` or `rebase`: with it this member's contributions with numbers
        below `merged` are in the base, and those of all members below `complete`. Ignored in
        step, where a reply answers the contribution with its number."""

    def due(self, ready: int = 0) -> int | None:
        """The number of the reply that has to be applied now, or None. Replies before `ready` are
        there already; in step that does not matter."""

    def apply(self, reply: Iterable[Vector]) -> None:
        """Apply the reply of round `applied`, given in consecutive pieces."""

    def follow_up(self) -> Vector | None:
        """A contribution that could not be made before the reply that was just applied, or None."""

    @property
    def steps_taken(self) -> int:
        """Steps of the round that has begun; 0 between two rounds, the moment for a checkpoint."""

    @property
    def has_steps(self) -> bool:
        """Whether the next contribution has steps in it that the optimizer took."""

    def rest(self) -> Vector | None:
        """The part of the parameters that no contribution contains, for a checkpoint."""

    def restore_rest(self, rest: Vector, steps_taken: int = 0) -> None:
        """After `start`: add to the parameters what `rest` returned, of which `steps_taken` steps
        belong to the next round. It is in the next contribution."""

    def learned(self) -> dict[str, NDArray[Any]]:
        """State that the half has learned of the fleet, for a checkpoint; {}: none. The
        arrays are its own: read them at once."""

    def restore_learned(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from what `learned` returned, before `start` or right after it. BadMessage for
        what it cannot have returned."""

    def take_note(self) -> str:
        """What the half has decided by itself since this was last asked, and why; "": nothing."""
