"""A member that has a part in some rounds only, as its loop sees it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from edgetrain.exchange.member.driver import Driver, Stepper
from edgetrain.exchange.member.link import Link
from edgetrain.jobs.resolved import Resolved
from edgetrain.jobs.shares import shares_of
from edgetrain.strategies.cohort import Cohort
from edgetrain.tasks import Task
from edgetrain.tasks.work import Local, OwnDraws, begin_at
from edgetrain.training.member.member import Member, driver_of


@dataclass(frozen=True)
class InCohort:
    driver: Driver
    is_first: Callable[[int], bool]
    """Whether it is the first of those drawn for this round, who evaluates."""
    begin_at: Callable[[int], None]
    """Called with the number of its next step in the job, after rounds without it."""

    @property
    def progress(self) -> int:
        """Steps of the job that are over, those of rounds without it included."""
        return self.driver.progress

    @property
    def idle_s(self) -> float:
        """Seconds of its waits so far that passed in rounds without it."""
        return self.driver.idle_s


def in_cohort(
    member: Member, found: Resolved, task: Task, index: int, begin_at: Callable[[int], None]
) -> InCohort | None:
    """What the loop of the member with this index asks, if its job has a cohort; see InCohort."""
    if (cohort := found.job.cohort) is None:
        return None
    driver = driver_of(member)
    if cohort.is_secret:  # whoever is told to evaluate would learn of the others
        return InCohort(driver, lambda round: index == 0, begin_at)
    if cohort.at_hub:
        assert isinstance(driver.exchange, Link)
        return InCohort(driver, _first_if_told(driver.exchange), begin_at)
    of_each = range(cohort.members if cohort.sampling == "weighted" else 0)
    samples = tuple(float(shares_of(found.job, each).samples(task)) for each in of_each)

    def is_first(round: int) -> bool:
        return next(iter(_drawn(cohort, round, samples)), -1) == index

    return InCohort(driver, is_first, begin_at)


_drawn = functools.lru_cache(2)(Cohort.drawn)
"""Asked in each step of each simulated member, and drawn once a round."""


def _first_if_told(link: Link) -> Callable[[int], bool]:
    """Each time that the hub says so is for the round that the member is in then."""
    told = -1

    def is_first(round: int) -> bool:
        nonlocal told
        told, link.is_to_evaluate = round if link.is_to_evaluate else told, False
        return told == round

    return is_first


def follow_draws(
    member: Member, found: Resolved, task: Task, work: tuple[int, Local], optimizer: Stepper
) -> InCohort | None:
    """As `in_cohort`, of the member with this index and work in a process of its own."""
    index, local = work

    def begin(step: int) -> None:
        assert isinstance(optimizer, torch.optim.Optimizer)
        begin_at(optimizer, step)
        if isinstance(local, OwnDraws):
            local.step = step

    return in_cohort(member, found, task, index, begin)
