"""Secure aggregation: the hub learns the sum of a round's contributions, and no single one.

After Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning (CCS
2017): pairwise masks, a mask of each member's own, Shamir shares of the seeds of both. `masker` is
the member's side, `aggregator` the hub's; neither has a socket or a clock. Only `primitives`
imports cryptographic packages; this module imports nothing heavy. docs/secure-aggregation.md says
what it is for, docs/decisions/020 why it keeps its promise.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from edgetrain.errors import ConfigError

MOST_MEMBERS = 64
"""In each round the hub restores one secret of every member from shares: work that grows with the
cube of the members. With more members a round would take seconds."""

PACKAGES = ("cryptography", "Crypto")


@dataclass(frozen=True)
class MaskTerms:
    """What the members of a job and its hub must agree on before contributions are masked."""

    members: int
    """Members at most; fixed point numbers of this many can be added without overflow."""
    threshold: int
    """Members needed to unmask a round. Fewer of them learn nothing together."""
    span: float
    """Elements of weighted contributions are sent within [-span, span]; larger ones are cut."""


def default_threshold(members: int) -> int:
    """More than two thirds, as the paper recommends for hubs that may be dishonest."""
    return 2 * members // 3 + 1


def why_not(members: int, threshold: int) -> str:
    """Why masks cannot have this many members, or this threshold; or ""."""
    if not 2 <= members <= MOST_MEMBERS:
        return (
            f"{members} members: allowed are 2 to {MOST_MEMBERS}, because each round's work at the "
            "hub grows with the cube of them: use fewer members, or put gateways in between"
        )
    least = members // 2 + 1
    if not least <= threshold <= members:
        return (
            f"strategy.threshold = {threshold}: allowed are {least} to {members}, more than half "
            "of the members (0: more than two thirds)"
        )
    return ""


def require() -> None:
    """Raise ConfigError unless the cryptographic packages are installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "strategy.secure = true needs the packages cryptography and pycryptodome",
            "pip install 'edgetrain[private]' on the hub and on every member",
        )
