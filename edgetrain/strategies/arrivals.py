"""Closing rules of strategies whose members are out of step: which contributions make a reply, and
how much each of them counts.

Pure: no socket, no clock (the time is an argument), no thread. Each contribution joins the oldest
open round, whatever its member's own number for it is, so a round may have several of one member
and none of another. The hub asks about that round after each contribution, each change of the
members and several times per beat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from edgetrain.strategies.closing import ClosingRule, RoundView


@dataclass(frozen=True)
class ArrivalTerms:
    """Arguments of a rule besides the strategy's."""

    members: int
    local_steps: int
    """Local steps in a round."""
    deadline_s: float


@runtime_checkable
class ArrivalRule(ClosingRule, Protocol):
    """When a round closes, which may be empty, and what a contribution counts in it. Missing in a
    round are members that train, have steps left, and have no contribution in it."""

    @property
    def size(self) -> int:
        """Contributions with which a round closes, as a rule."""

    def weight(self, age: int, contributions: int, present: int) -> float:
        """The factor in the round's sum of a contribution that lacks `age` replies, among as many
        `contributions`, with as many members `present` as contribute."""


@dataclass(frozen=True)
class Buffered:
    """Every `size` arrivals make a reply: their mean, in which older ones count less.

    FedBuff (Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022,
    algorithm 1): with M = `size`, a = `exponent` and tau the age of contribution x_i, ::

        reply = 1/M sum_i (1 + tau_i)^-a x_i

    The sum is divided by the number of contributions, as in the paper's algorithm, not by the sum
    of their factors: a buffer of old contributions moves the model less. With `a` = 0 it is the
    plain mean. Differences: where fewer members are left than M, the round closes once each has
    contributed, and in any case `deadline_s` seconds after its first contribution.
    """

    size: int
    exponent: float
    deadline_s: float

    def due(self, round: RoundView, now: float) -> bool:
        if not round.contributions:
            return False
        enough = round.contributions >= self.size or now - round.opened >= self.deadline_s
        return enough or round.lacks_nobody

    def weight(self, age: int, contributions: int, present: int) -> float:
        return float((1.0 + age) ** -self.exponent) / contributions


@dataclass(frozen=True)
class Summed(Buffered):
    """Every `size` arrivals make a reply: their sum, each in full.

    Downpour SGD (Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.1): the
    parameter server adds each displacement when it comes. Here it adds those that come between two
    fetches together, so that a member is not sent a reply for each contribution of the others.
    """

    exponent: float = 0.0
    deadline_s: float = 60.0

    def weight(self, age: int, contributions: int, present: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Bounded:
    """Contributions are merged as they arrive, or all together if `lead` is 0; each counts 1/N of
    the N members present, so that one contribution of each is their mean.

    Stale synchronous parallel (Ho et al., NeurIPS 2013, section 3): a member may be `lead` rounds
    ahead of the slowest. It is the member that waits (`out_of_step.OutOfStep`); the hub says in
    each reply below which number all contributions are merged, and closes an empty round if that
    number rises because a member has left. There is no deadline: a member that is in is waited for.
    """

    lead: float
    members: int
    """With which the job starts."""

    @property
    def size(self) -> int:
        return 1 if self.lead > 0 else self.members

    def due(self, round: RoundView, now: float) -> bool:
        if round.contributions > 0 and (self.lead > 0 or round.lacks_nobody):
            return True
        return round.advances

    def weight(self, age: int, contributions: int, present: int) -> float:
        return 1.0 / present
