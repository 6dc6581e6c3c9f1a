"""What a job may say of a sample of the members in each round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError, refuse_first
from edgetrain.jobs import on_member
from edgetrain.strategies.cohort import AVAILABLE, PURE

if TYPE_CHECKING:
    from edgetrain.jobs.job import Job
    from edgetrain.jobs.resolved import Resolved


def check_cohort(found: Resolved) -> None:
    """ConfigError for a cohort that cannot be."""
    job, table = found.job, found.job.strategy
    members, size, extra = job.fleet.members, table.cohort, table.cohort_extra
    spelled, drawn = f"strategy.cohort = {size:g}", job.cohort
    refuse_first(
        (size > members, f"{spelled}: the job has only {members} members",
         f"allowed are 1 to {members}, a share below 1, and 0, which is all"),
        (size > 1 and size % 1, f"{spelled} is neither a number of members nor a share of them",
         f"say {round(size)}, or a share between 0 and 1"),
        *((not drawn and value, f"strategy.{key} = {value!r} without a cohort: all members have a "
           "part in all rounds", "say strategy.cohort, or leave it out")
          for key, value in (("cohort_extra", extra),
                             ("sampling", table.sampling != "uniform" and table.sampling))),
    )  # fmt: skip
    if drawn is None:
        return
    if table.sampling not in (*PURE, AVAILABLE):
        from edgetrain import testing  # whoever has a function of one's own

        testing.check_sampling(table.sampling, drawn)
    refuse_first(
        (drawn.size + extra > members, f"{spelled} and strategy.cohort_extra = {extra}: the job "
         f"has only {members} members", f"say cohort_extra={members - drawn.size} or less"),
        (extra and drawn.sampling == "poisson", f"strategy.cohort_extra = {extra} and sampling = "
         "'poisson': how many are drawn is left to chance", "leave cohort_extra out"),
        (drawn.sampling == "weighted" and not found.strategy.weighted,
         f"strategy.sampling = 'weighted' and {found.strategy.spelled}: members count alike",
         "say weighting = 'samples', or sampling = 'uniform'"),
        (job.hub.quorum > drawn.size, f"hub.quorum = {job.hub.quorum}: a round has only "
         f"{drawn.size} members", f"say hub.quorum={drawn.size} or less"),
    )  # fmt: skip


def refuse_checkpoint(job: Job) -> None:
    """ConfigError for a member that would keep a checkpoint where it cannot."""
    on_member.refuse_checkpoint(job.privacy.unit)
    if job.cohort is not None:
        raise ConfigError(
            f"strategy.cohort = {job.strategy.cohort:g} and a checkpoint: a member begins each "
            "round that it is drawn for from the hub's base, and going on from its own is not "
            "built",
            "leave out the checkpoint: a member that was killed joins anew",
        )
