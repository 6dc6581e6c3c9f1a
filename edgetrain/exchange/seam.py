"""What a member exchanges through: the seam between a member's driver and its link to a hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.vectors.vector import Vector


@dataclass(frozen=True)
class Request:
    """What a member says about itself when it joins."""

    model: str
    """Digest of the names, shapes and dtypes of its trained parameters."""
    name: str = ""
    """The name it asks for; "" lets the hub choose."""
    weight: float = 1.0
    """Samples it holds."""
    job: str = ""
    """Digest of the job, or "" for a member with its own training loop."""
    layout: bytes = b""
    """The description whose digest is `model`. Codecs that look at tensors need it."""
    secure: bool | MaskTerms = False
    """Contribute only with masks: on these terms, or (True) on any terms whose threshold is more
    than half of the members. False: as the hub says."""


@dataclass(frozen=True)
class Past:
    """Where a member stood that has been started again from its checkpoint."""

    session: int
    name: str
    round: int
    """The next round it would have contributed to."""
    applied: int
    """Replies it had applied."""
    checksum: int
    """Of its base after them."""
    has_base: bool
    """Whether it still has that base; otherwise it takes the hub's."""


@dataclass(frozen=True)
class RoundReply:
    """The reply to one round, whole and decoded, and what the hub says with it."""

    round: int
    members: int
    """Contributions merged."""
    delay: int
    """The delay in force once this reply is applied, in local steps."""
    checksum: int
    """Of the base after this reply; 0: not known, for gradient strategies."""
    arrived: float
    """When its last part arrived, by the clock of the member's exchange."""
    pieces: Sequence[Vector]
    """The vector in consecutive pieces, float32, together [elements]."""


@dataclass(frozen=True)
class CatchUp:
    """The fleet went on without this member: it takes part again from `round` on."""

    round: int
    delay: int
    """The delay in force, in local steps."""
    applied: int
    checksum: int
    """Of the base after `applied` replies."""
    base: Vector | None
    """That base, float32 [elements], where replies that this member missed are gone. None: they
    will still come."""
