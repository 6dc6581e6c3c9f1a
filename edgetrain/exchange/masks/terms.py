"""Secure aggregation: the hub learns the sum of a round's contributions, and none of them.

After Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning (CCS
2017): pairwise masks, a mask of each member's own, Shamir shares of what they are made of. Pure: no
socket and no clock; where randomness comes from is passed in. `member` is a member's side, `hub`
the hub's; `primitives` alone imports cryptographic packages, and what is here imports nothing.
docs/secure-aggregation.md says what it is good for, docs/decisions/020 why it keeps what it says.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from edgetrain.errors import ConfigError

MOST_MEMBERS = 64
"""The hub puts one secret a member together from shares in each round: work that grows with the
cube of the members. More than these would wait for seconds."""

PACKAGES = ("cryptography", "Crypto")


@dataclass(frozen=True)
class MaskTerms:
    """What the members of a job and its hub agree on."""

    members: int
    """So many may be in; the fixed point numbers of as many can be added without overflow."""
    threshold: int
    """Without so many members no round is unmasked; and fewer of them learn nothing together."""
    span: float
    """Elements of weighted contributions are sent within [-span, span]; larger ones are cut."""


def default_threshold(members: int) -> int:
    """More than two thirds, as the paper recommends where the hub may not be honest."""
    return 2 * members // 3 + 1


def why_not(members: int, threshold: int) -> str:
    """What speaks against so many members and such a threshold, or ""."""
    if not 2 <= members <= MOST_MEMBERS:
        return (
            f"{members} members: allowed are 2 to {MOST_MEMBERS}, because each round's work at the "
            "hub grows with the cube of them: take fewer, or put gateways in between"
        )
    least = members // 2 + 1
    if not least <= threshold <= members:
        return (
            f"strategy.threshold = {threshold}: allowed are {least} to {members}, more than half "
            "of the members (0: more than two thirds)"
        )
    return ""


def require() -> None:
    """ConfigError unless the packages are there that all of it rests on."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "strategy.secure = true needs the packages cryptography and pycryptodome",
            "pip install 'edgetrain[private]' on the hub and on every member",
        )
