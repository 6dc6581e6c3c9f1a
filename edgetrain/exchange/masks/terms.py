"""Secure aggregation: the hub learns the sum of a round's contributions, and no single one.

After Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning (CCS
2017): pairwise masks, a mask of each member's own, Shamir shares of the seeds of both. `masker` is
the member's side, `aggregator` the hub's; neither has a socket or a clock. Only `primitives`
imports cryptographic packages; this module imports nothing heavy. docs/how-to/secure-aggregation.md
says what it is for, docs/decisions/020 why it keeps its promise.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_MEMBERS = 64
"""In each round the hub restores one secret of every member from shares: work that grows with the
square of the members. With more members a round would take seconds."""


@dataclass(frozen=True)
class MaskTerms:
    """The agreement of a job's members and hub before contributions are masked."""

    members: int
    """Members at most; fixed point numbers of this many can be added without overflow."""
    threshold: int
    """Members needed to unmask a round. Fewer of them learn nothing together without the hub; with
    it, see `colluders`."""
    clip_range: float
    """Elements of weighted contributions are cut to [-clip_range, clip_range] and sent."""


def default_threshold(members: int) -> int:
    """More than two thirds, as the paper recommends for hubs that may be dishonest."""
    return 2 * members // 3 + 1


def colluders(members: int, threshold: int) -> int:
    """The fewest members that have to work together with the hub to read a single contribution.

    A hub that lies tells some members that one contributed, and the others that it dropped out;
    each gives one kind of share. Both kinds take `threshold` members, and only those who work with
    the hub give both: 2 * threshold - members. Or it counts `threshold` members of whom all but one
    work with it, and takes their contributions off the sum.
    """
    return min(2 * threshold - members, threshold - 1)


def why_not(members: int, threshold: int, honest_hub: bool = False) -> str:
    """Why masks cannot have this many members, or this threshold; or "". With `honest_hub` the hub
    is trusted to tell the truth about who dropped out."""
    if not 2 <= members <= MOST_MEMBERS:
        return (
            f"{members} members: allowed are 2 to {MOST_MEMBERS}, because each round's work at the "
            "hub grows with the square of them: use fewer members, or put gateways in between"
        )
    least, usual = members // 2 + 1, default_threshold(members)
    if honest_hub and not least <= threshold <= members:
        return (
            f"strategy.threshold = {threshold}: allowed are {least} to {members}, more than half "
            "of the members (0: more than two thirds)"
        )
    if least <= threshold < usual and not honest_hub:
        few, more = colluders(members, threshold), colluders(members, usual)
        return (
            f"strategy.threshold = {threshold}: allowed are {usual} to {members}, more than two "
            f"thirds of the members: a hub that lies about who dropped out reads single "
            f"contributions with the help of {few} of them, and of {more} with {usual}. If nobody "
            f"could make it lie, strategy.honest_hub=true allows {least} and more"
        )
    if not usual <= threshold <= members and not honest_hub:
        return (
            f"strategy.threshold = {threshold}: allowed are {usual} to {members}, more than two "
            "thirds of the members (strategy.honest_hub=true: more than half)"
        )
    return ""
