"""Backend `tc`: the kernel's own netem."""

from __future__ import annotations

from edgetrain.errors import NetworkError
from edgetrain.networks.emulation import Emulation, Link, Plan


class Shaped(Emulation):
    """Not yet here."""

    backend = "tc"

    def __init__(self, plan: Plan, reason: str) -> None:
        raise NetworkError("backend 'tc' is not here yet", "use stream")

    @property
    def hub_address(self) -> str:
        raise NotImplementedError

    def link(self, member: int) -> Link:
        raise NotImplementedError
