"""A member that trains next to nothing: a small vector, no torch. For what is about the exchange.

It speaks the real protocol through the real link and the real half of a strategy.
"""

from __future__ import annotations

import numpy as np

from edgetrain import strategies
from edgetrain.errors import Diverged
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import CatchUp, Request
from edgetrain.strategies.half import MemberHalf
from edgetrain.vectors.vector import Vector, checksum

MODEL = "model"
"""What its parameters prove: nothing. The hub is started with --any-job."""


class StandIn:
    """A contraction towards a point of its own, plus noise drawn from (member, step).

    `params`, float32 [elements], begin at zero; `steps` are those of its own.
    """

    def __init__(self, index: int, elements: int) -> None:
        self.index = index
        self.params: Vector = np.zeros(elements, np.float32)
        self.steps = 0

    @property
    def name(self) -> str:
        """As the hub calls it."""
        return f"m{self.index}"

    def enter(self, link: Link) -> MemberHalf:
        """Join; the half of the strategy that the hub runs, which must exchange displacements."""
        request = Request(MODEL, self.name)
        welcome, start = link.join(request, self.params, checksum(self.params))
        half = strategies.find(welcome.strategy).member_half(
            self.params, np.zeros_like(self.params), welcome.every, start.delay, link.memory, None
        )
        half.start(start.applied, start.round)
        return half

    def step(self) -> None:
        """One step of what stands for an optimizer."""
        noise = np.random.default_rng([self.index, self.steps]).standard_normal(
            self.params.size, np.float32
        )
        self.params -= np.float32(0.1) * (self.params - self.index) + np.float32(0.05) * noise
        self.steps += 1

    def exchange(self, link: Link, half: MemberHalf, own: Vector | None) -> None:
        """Submit `own`, if there is something, and apply every reply that is due."""
        if own is not None:
            self.submitting(half.round - 1)
            read = link.submit(
                half.round - 1, own, weight=1.0, applied=half.applied, checksum=half.checksum,
                wanted_delay=0, rest_later=not half.keeps_rest,
            )  # fmt: skip
            if read is not None:
                half.sent(read)
        while (due := half.due()) is not None:
            found = link.wait(due)
            if isinstance(found, CatchUp):
                self.catch_up(half, found)
                continue
            half.apply(found.pieces)
            if found.checksum != half.checksum:
                raise Diverged(f"the base after round {due} is another than the hub's")
            self.answered(due)

    def catch_up(self, half: MemberHalf, found: CatchUp) -> None:
        """The fleet went on without this member."""
        if found.base is not None:
            half.rebase(found.base, found.applied)
        half.skip_to(found.round)

    def submitting(self, round: int) -> None:
        """A contribution to this round is about to be handed over."""

    def answered(self, round: int) -> None:
        """This round's reply has been applied."""
