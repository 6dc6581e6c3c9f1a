"""The work of a member whose hub hands out slices, at the pace of its device."""

from __future__ import annotations

from collections.abc import Callable

from edgetrain.tasks.slices import Slices
from edgetrain.tasks.work import Local
from edgetrain.training.member.member import Member
from edgetrain.training.member.pacing import Pace

LOSS_ALONE = 1 / 3
"""Share of a step that its loss takes without the gradient: of a network's layers, backward takes
two products of matrices for each one of forward."""


def work_at_pace(
    member: Member, local: Local, pace: Pace, batch: int, clock: Callable[[], float]
) -> Pace:
    """Let a member answer its hub's work with `local`, each slice at the `pace` of steps of `batch`
    samples. Returns the pace of its steps: none, where it has such work."""
    if not isinstance(local, Slices):
        return pace

    def compute(number: int, of: int, gradient: bool) -> tuple[float, int]:
        began = clock()
        loss, samples = local.compute(number, of, gradient)
        pace.hold_share(began, samples / batch * (1.0 if gradient else LOSS_ALONE))
        return loss, samples

    member.work_with(compute)
    return Pace(lambda step: 0.0)
