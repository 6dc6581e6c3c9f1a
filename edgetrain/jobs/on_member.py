"""What a member has to refuse by itself, whatever its hub says: contributions that would not be
masked, or not be private, as the job says. `rules` asks for it, too.

A member of a job that has neither loads nothing of masks and of accounting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError, did_you_mean, refuse_first

if TYPE_CHECKING:
    from edgetrain.jobs.job import Privacy
    from edgetrain.jobs.resolved import Resolved

UNITS = ("none", "example", "member")
PLACES = ("member", "hub", "sum")
SAMPLINGS = ("poisson", "shuffle")

Refusal = tuple[str, str]
"""A refused combination, and the way out."""


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key} = '{value}'", did_you_mean(value, allowed))


def settle(found: Resolved, samples: Sequence[int]) -> Resolved:
    """The job with the noise that its epsilon asks for. ConfigError for what a member has to refuse
    by itself, whatever its hub says: contributions that would not be masked, or not be private, as
    the job says. `samples`: see `privacy.promise`."""
    check_on_member(found)
    if found.job.privacy.unit == "none":
        return found
    from edgetrain.jobs.privacy.promise import fix_noise

    fixed = fix_noise(found, samples)
    if fixed is not found:
        check_on_member(fixed)
    return fixed


def check_on_member(found: Resolved) -> None:
    check_mask_terms(found)
    check_privacy(found.job.privacy)
    if found.job.privacy.unit == "none":
        return
    table, strategy, merge = found.job.privacy, found.strategy, found.job.strategy.merge
    secure, unit, at = found.job.strategy.secure, table.unit == "member", table.where
    where = f"privacy.where = '{at}'"
    refuse_first(
        (unit and strategy.learns_from_replies, f"{strategy.spelled} and privacy.unit = 'member': "
         "the noise in a reply is larger than the drift that members would learn from it",
         "say correction = 'paper'" if "paper" in strategy.corrections
         else "take local-sgd or dga"),
        # Every strategy, codec and merge rule may follow the noised gradient of examples.
        (not unit and at != "member", f"{where}: examples are seen by their member only",
         "leave it out, or protect members: unit = 'member'"),
        (unit and strategy.weighted, f"privacy with {strategy.name}: weights are what members "
         "hold, which is private, and one of a large weight moves the sum further than clip",
         "take local-sgd or dga, which count all members the same"),
        (unit and found.codec.two_trips, f"strategy.codec = '{found.job.strategy.codec}': its "
         "second trip depends on the gradient that was to be noised",
         "take low-rank, or a codec of one trip"),
        (secure and at != "member", f"strategy.secure with {where}: the hub sees no contribution, "
         "and cannot clip any", "where = 'member'"),
        (at != "member" and not found.merge.sum_only, f"strategy.merge = '{merge}' with {where}: "
         "it is not known how far one member can move that rule's result",
         "merge = 'mean', or noise what members send: where = 'member'"),
        (at == "hub" and not found.reply_codec.lossless, f"replies as '{found.reply_codec.name}' "
         f"with {where}: a hub that is restored merges again, with other noise, and both would "
         "get out", "say reply_codec = 'fp32'"),
        (at == "sum", f"{where}: shares of noise that only add up under masks would have to be "
         "discrete noise, which is not built",
         "where = 'member' (all of the noise in each), or 'hub' (a hub that is trusted)"),
    )  # fmt: skip
    if unit and secure:
        _check_span(found)


def _check_span(found: Resolved) -> None:
    """Masked elements beyond the range are cut. That spares the promise, and not the learning."""
    from edgetrain.jobs.privacy.promise import ROOM

    table, clip_range = found.job.privacy, found.job.strategy.clip_range
    deviation = table.noise * table.clip
    needed = table.clip + ROOM * deviation
    if table.noise and clip_range < needed:
        raise ConfigError(
            f"strategy.clip_range = {clip_range:g} with noise of deviation {deviation:g}: masked "
            f"elements are cut to the range, and these reach {needed:g}",
            f"clip_range = {needed:g}, or less noise, or a smaller clip",
        )


def refuse_checkpoint(unit: str) -> None:
    """ConfigError for a private member that would keep a checkpoint."""
    if unit != "none":
        raise ConfigError(
            "a private member keeps no checkpoint: going on from one it would release steps again, "
            "and epsilon does not count them twice",
            "leave out the checkpoint, or privacy",
        )


def check_mask_terms(found: Resolved) -> None:
    table, terms = found.job.strategy, found.mask_terms
    if terms is None:
        way_out = "say strategy.secure=true, or leave it out"
        refuse_first(
            (table.honest_hub, "strategy.honest_hub = true is for masked contributions", way_out),
            (table.threshold, f"strategy.threshold = {table.threshold} is for masked contributions",
             way_out),
        )  # fmt: skip
        return
    from edgetrain.exchange.masks.terms import why_not  # of a secure job

    if refused := why_not(terms.members, terms.threshold, table.honest_hub):
        raise ConfigError(f"strategy.secure = true: {refused}")


def check_privacy(table: Privacy) -> None:
    one_of("privacy.unit", table.unit, UNITS)
    one_of("privacy.where", table.where, PLACES)
    one_of("privacy.sampling", table.sampling, SAMPLINGS)
    refuse_first(
        *((table.unit == "none" and value, f"privacy.{key} = {value:g} without a privacy.unit "
           "protects nothing", "say unit = 'example' or unit = 'member'")
          for key, value in (("noise", table.noise), ("epsilon", table.epsilon))),
        (table.noise and table.epsilon, f"privacy.noise = {table.noise:g} and privacy.epsilon = "
         f"{table.epsilon:g}: one follows from the other", "leave one of them out"),
    )  # fmt: skip
