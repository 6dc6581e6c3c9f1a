"""Which members have a part in a round, where a round has a sample of them: McMahan's C.

Pure: who is drawn follows from the job's seed, the round, how many members there are and, where
members are drawn by their samples, from these. So a hub that was killed, a simulation and whoever
else wants to know draw the same, and no roster travels. Where it follows from who is there as well
(`at_hub`), the hub alone knows. The draws are those of Python's `random.Random.random`, which are
the same in all its versions.
"""

from __future__ import annotations

import heapq
import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from edgetrain import extensions
from edgetrain.errors import ConfigError
from edgetrain.strategies.spelling import check_count, split

PURE = ("uniform", "weighted", "poisson")
"""Samplings that need not know who is there."""

AVAILABLE = "available"

Draw = Callable[[], float]
"""A number from 0 to below 1."""


class Wanted(Protocol):
    """The keys of a job about cohorts."""

    @property
    def cohort(self) -> float:
        """Members, or below 1 a share of them."""

    @property
    def sampling(self) -> str:
        """One of PURE, AVAILABLE, or a function of a user's own."""

    @property
    def cohort_extra(self) -> int:
        """Members that are drawn besides."""


@dataclass(frozen=True)
class Cohort:
    """`size` of `members` have a part in each round, or as many on average: see `drawn`."""

    seed: int
    members: int
    size: int
    sampling: str = "uniform"
    """One of PURE, AVAILABLE, or a function of a user's own."""
    extra: int = 0
    """Members that are drawn besides: the first `size` contributions of all these count."""
    is_secret: bool = False
    """Whether the hub draws what nobody else may know: see `privacy.promise`."""

    @classmethod
    def of(cls, seed: int, members: int, table: Wanted, private: bool) -> Cohort | None:
        """None: all members have a part in all rounds. `private`: a hub that is trusted adds noise
        for members."""
        size = int(table.cohort) or max(1, round(table.cohort * members))
        if size >= members:
            return None
        secret = private and table.sampling == "poisson"
        return cls(seed, members, size, table.sampling, table.cohort_extra, secret)

    @property
    def wanted(self) -> int:
        """Members that are drawn for a round."""
        return min(self.size + self.extra, self.members)

    @property
    def at_hub(self) -> bool:
        """Whether rosters follow from more, so that the hub alone knows them: see `drawn_of`."""
        return self.is_secret or self.sampling not in PURE

    @property
    def share(self) -> float:
        """The chance of each member to be drawn for a round, where that is the same for all."""
        return self.size / self.members

    def drawn_of(
        self,
        round: int,
        there: Sequence[int],
        weights: Sequence[float],
        own: Callable[..., Iterable[int]] | None = None,
    ) -> tuple[int, ...]:
        """The numbers of the members of a round, of those that are `there` and have such `weights`.

        available: each set of `wanted` of them is as likely; all, if they are fewer. A user's own
        function (None: the job's) may draw any member, and any number of them. ConfigError for a
        roster that cannot be.
        """
        if self.sampling == AVAILABLE and own is None:
            some = replace(self, members=len(there), sampling="uniform")
            return tuple(there[at] for at in some.drawn(round))
        given = round, tuple(there), tuple(weights), self.wanted, self.seed
        drawn = _own(self.sampling, given) if own is None else own(*given)
        return tuple(sorted(self._checked(drawn, f"sampling '{self.sampling}', round {round}")))

    def _checked(self, drawn: Iterable[int], what: str) -> set[int]:
        found: set[int] = set()
        for each in drawn:
            try:
                number = operator.index(each)
            except TypeError:
                raise ConfigError(f"{what}: {each!r} is no member's number") from None
            if number not in range(self.members):
                raise ConfigError(
                    f"{what}: member {number}", f"allowed are 0 to {self.members - 1}"
                )
            if number in found:
                raise ConfigError(f"{what}: member {number} twice", "once is enough")
            found.add(number)
        return found

    def drawn(self, round: int, samples: Sequence[float] = ()) -> tuple[int, ...]:
        """The numbers of the members of a round, in order, from 0.

        uniform: each set of `size` is as likely. weighted: one after the other, those left by their
        `samples`, of each member (): all have as many. poisson: each member by itself, with the
        chance size / members; so a round may have none.
        """
        draw = random.Random(f"{self.seed} {round} cohort").random
        wanted = self.wanted
        if self.sampling == "poisson":
            return tuple(_by_chance(draw, self.share, self.members))
        if self.sampling == "weighted" and sum(each > 0 for each in samples) > wanted:
            return tuple(sorted(_by_weight(draw, wanted, samples)))
        found: set[int] = set()
        for last in range(self.members - wanted, self.members):  # Floyd's algorithm
            one = int(draw() * (last + 1))
            found.add(last if one in found else one)
        return tuple(sorted(found))


def _own(sampling: str, given: tuple[Any, ...]) -> Iterable[int]:
    """What a user's own function draws. ConfigError."""
    name, words = split(sampling)
    known = dict.fromkeys((*PURE, AVAILABLE))
    if name in known:
        check_count(name, name, words, 0, 0)
    made: Any = extensions.find("sampling", name, known)
    return extensions.build("sampling", name, words, lambda *more: list(made(*given, *more)))


def _by_chance(draw: Draw, share: float, members: int) -> Iterator[int]:
    """Each of the numbers with this chance. As many draws as are found: gaps are geometric."""
    if share >= 1:
        yield from range(members)
        return
    each = math.log1p(-share)
    at = int(math.log1p(-draw()) / each)
    while at < members:
        yield at
        at += 1 + int(math.log1p(-draw()) / each)


def _by_weight(draw: Draw, wanted: int, weights: Sequence[float]) -> list[int]:
    """So many different numbers, one after the other, each by the weight of those left: the first
    of as many exponential clocks (Efraimidis and Spirakis, 2006). Members say their weights, so one
    that outweighs all others must not take longer."""
    clocks = [(-math.log1p(-draw()) / each, at) for at, each in enumerate(weights) if each > 0]
    return [at for _, at in heapq.nsmallest(wanted, clocks)]
