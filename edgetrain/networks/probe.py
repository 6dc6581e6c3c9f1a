"""Which backend this machine can run, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgetrain.networks.profile import Profile


@dataclass(frozen=True, slots=True)
class Choice:
    backend: str
    reason: str


def choose(backend: str, profiles: Sequence[Profile], needs_packets: bool = False) -> Choice:
    """The backend to use: what was asked for, else the best that works here."""
    if backend != "auto":
        return Choice(backend, "asked for")
    if all(p.up.is_plain and p.down.is_plain for p in profiles) and not needs_packets:
        return Choice("none", "no member's network changes anything")
    return Choice("stream", "a TCP proxy works everywhere")
