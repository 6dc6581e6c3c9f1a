"""What a job may say of a sample of the members in each round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError, refuse_first
from edgetrain.strategies.cohort import AVAILABLE, PURE

if TYPE_CHECKING:
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
        (table.secure and drawn.sampling == "poisson", "strategy.secure and sampling = 'poisson': "
         "how many are drawn is left to chance, and masks hide a contribution among a number that "
         "members have agreed on", "say sampling = 'uniform', or leave secure out"),
        (table.secure and extra, f"strategy.secure and strategy.cohort_extra = {extra}: keys are "
         "made by all that are drawn", "leave cohort_extra out: a round waits hub.deadline_s"),
        (drawn.sampling == "weighted" and not found.strategy.weighted,
         f"strategy.sampling = 'weighted' and {found.strategy.spelled}: members count alike",
         "say weighting = 'samples', or sampling = 'uniform'"),
        (job.hub.quorum > drawn.size, f"hub.quorum = {job.hub.quorum}: a round has only "
         f"{drawn.size} members", f"say hub.quorum={drawn.size} or less"),
    )  # fmt: skip


def refuse_kept_variates(found: Resolved) -> None:
    """ConfigError for a member of a cohort that would keep what the fleet's must add up with."""
    if found.strategy.has_variates:
        raise ConfigError(
            f"{found.strategy.spelled} with a cohort and a checkpoint: a member's correction "
            "changes in each of its rounds, and an older one no longer adds up with the others'",
            "leave out the checkpoint: a member that was killed joins anew; or take fedavg",
        )
