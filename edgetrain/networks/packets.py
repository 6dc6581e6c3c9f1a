"""Backend `packet`: real TCP above emulated packets."""

from __future__ import annotations

from edgetrain.errors import NetworkError
from edgetrain.networks.emulation import Emulation, Link, Plan


class Packeted(Emulation):
    """Not yet here."""

    backend = "packet"

    def __init__(self, plan: Plan, reason: str) -> None:
        raise NetworkError("backend 'packet' is not here yet", "use stream")

    @property
    def hub_address(self) -> str:
        raise NotImplementedError

    def link(self, member: int) -> Link:
        raise NotImplementedError
