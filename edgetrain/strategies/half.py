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

    `exchange` submits the vector, if there is one. Then it applies the reply of each round that is
    `due`, and after each one submits the result of `follow_up`. Nothing else may wait. If
    `before_step` returns None, no reply is applied before the step.

    The driver calls `before_step` for every strategy and every step. Only while `quiet_steps()` is
    above 0 may a driver leave out calls of `before_step` and `after_step` (a simulator taking
    several steps at once), and then make up for `after_step`.
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
    """Whether the remainder of a lossy codec stays in the parameters, and so in the next
    contribution: the driver reports the sent part with `sent`. Otherwise the driver sends the
    remainder later."""

    @property
    def base(self) -> Vector:
        """float32 [elements]: the parameters after all replies so far."""

    def start(self, applied: int, round: int) -> None:
        """Take the current parameters as the base after `applied` replies."""

    def before_step(self) -> Vector | None:
        """After backward, before the optimizer's step: a gradient contribution, or None."""

    def note_rate(self, rate: float) -> None:
        """Learning rate of the step just taken; `after_step` follows."""

    def after_step(self) -> Vector | None:
        """After the optimizer's step: a displacement at the end of a round, or None."""

    def quiet_steps(self) -> int:
        """Steps from now on that neither submit nor wait."""

    def finish(self, rest: bool = True) -> Vector | None:
        """After the last step: the last contribution, or None. From now on every round is due.

        Without `rest`, the remainder of lossy contributions is given up, unless there are steps to
        submit as well."""

    def sent(self, vector: Vector) -> None:
        """Report the decoded form of the contribution just submitted."""

    def rebase(self, base: Vector, applied: int) -> None:
        """Take `base`, the result of all replies up to `applied`, in place of lost replies."""

    def skip_to(self, round: int) -> None:
        """The next contribution is to `round`: the fleet has gone on without this member."""

    def note_merged(self, merged: int, complete: int) -> None:
        """Asynchronous strategies, before `apply` or `rebase`: the base then has this member's
        contributions with numbers below `merged`, and all members' below `complete`. Synchronous
        ones ignore it: their replies answer the contribution with the same number."""

    def due(self, ready: int = 0) -> int | None:
        """Number of the reply to be applied now, or None. Replies before `ready` have arrived;
        synchronous strategies ignore it."""

    def apply(self, reply: Iterable[Vector]) -> None:
        """Apply the reply of round `applied`, given in consecutive pieces."""

    def follow_up(self) -> Vector | None:
        """A contribution that depends on the reply just applied, or None."""

    @property
    def steps_taken(self) -> int:
        """Steps in the current round; 0 between two rounds, the moment for a checkpoint."""

    @property
    def has_steps(self) -> bool:
        """Whether the next contribution has steps of the optimizer in it."""

    def rest(self) -> Vector | None:
        """The part of the parameters that no contribution contains, for a checkpoint."""

    def restore_rest(self, rest: Vector, steps_taken: int = 0) -> None:
        """After `start`: add the result of `rest` to the parameters; `steps_taken` of its steps
        belong to the next round. It is in the next contribution."""

    def learned(self) -> dict[str, NDArray[Any]]:
        """State learned from the fleet, for a checkpoint; {}: none. The arrays belong to the
        half: read them at once."""

    def restore_learned(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from the result of `learned`, before `start` or right after it. Raises
        BadMessage for invalid state."""

    def take_note(self) -> str:
        """Decisions of the half since the last call, with reasons; "": none."""
