"""Differential privacy of a job: whose data is protected, from whom, and what cannot go with it.

What the [privacy] table means, and nothing that is heavy: the accountant is in `accounting`,
vectors are clipped and noised in `gaussian`, gradients of examples are taken in `examples`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgetrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from edgetrain.jobs.reading import Job, Privacy

UNITS = ("none", "example", "member")
PLACES = ("member", "hub", "sum")
SAMPLINGS = ("poisson", "shuffle")

LITTLE = 20.0
"""An epsilon above which the promise is next to nothing: odds may change e^20-fold."""

ROOM = 5.0
"""Deviations of noise that masked contributions must have room for: one element in 1.7 million is
further out."""


@dataclass(frozen=True)
class Releases:
    """What a job says about one unit (a member, or an example of one), as far as an accountant is
    concerned: `count` Gaussian mechanisms of sensitivity 1 and standard deviation `noise`, each on
    a unit that takes part with probability `rate`."""

    noise: float
    count: int
    rate: float = 1.0


@dataclass(frozen=True)
class Promise:
    """(epsilon, delta)-differential privacy, and what it is about."""

    unit: str
    """member or example."""
    where: str
    """Where the noise is added: what leaves that place is protected."""
    clip: float
    noise: float
    delta: float
    count: int
    """Releases: rounds for a member; steps, or passes over its shard, for an example."""
    rate: float
    """The probability that an example is in a step; 1: no gain by sampling."""
    epsilon: float | None
    """None: there is no noise, or none worth the name, and no promise."""
    accountant: str
    noise_source: str = "the operating system's generator"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a summary."""
        return dataclasses.asdict(self)


def said(promise: dict[str, Any]) -> str:
    """A promise (as plain values) in one line for people."""
    whom = {"example": "one example of one member", "member": "one member's whole data"}
    behind = {"hub": "the hub is trusted", "sum": "only sums are protected"}
    epsilon = promise["epsilon"]
    if epsilon is None:
        return "privacy: none (noise is 0; contributions are only clipped)"
    about = whom.get(promise["unit"], promise["unit"])
    more = [behind[promise["where"]]] if promise["where"] in behind else []
    if epsilon > LITTLE:
        more.append("next to no promise")
    if promise["noise_source"].startswith("seeded"):
        more.append("noise is seeded: a simulation, which protects nobody")
    told = f"privacy: epsilon {epsilon:.4g} at delta {promise['delta']:g} for {about}"
    return told + (f" ({'; '.join(more)})" if more else "")


def check(job: Job) -> None:
    """ConfigError for a [privacy] table that cannot be, or cannot be in this job."""
    table = job.privacy
    _one_of("unit", table.unit, UNITS)
    _one_of("where", table.where, PLACES)
    _one_of("sampling", table.sampling, SAMPLINGS)
    if table.unit == "none":
        _refuse_idle(table)
        return
    if table.noise and table.epsilon:
        raise ConfigError(
            f"privacy.noise = {table.noise:g} and privacy.epsilon = {table.epsilon:g}: one follows "
            "from the other",
            "leave one of them out",
        )
    refused = _why_not_example(job) if table.unit == "example" else _why_not_member(job)
    if refused:
        raise ConfigError(*refused)


def _one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"privacy.{key} = '{value}'", did_you_mean(value, allowed))


def _refuse_idle(table: Privacy) -> None:
    for key in ("noise", "epsilon"):
        if getattr(table, key):
            raise ConfigError(
                f"privacy.{key} = {getattr(table, key):g} without a privacy.unit protects nothing",
                "say unit = 'example' or unit = 'member'",
            )


def refuse_checkpoint(unit: str) -> None:
    """ConfigError for a private member that would keep a checkpoint."""
    if unit != "none":
        raise ConfigError(
            "a private member keeps no checkpoint: going on from one it would release steps again, "
            "and epsilon does not count them twice",
            "leave out the checkpoint, or privacy",
        )


Refusal = tuple[str, str]
"""What does not go together, and the way out."""


def _why_not_example(job: Job) -> Refusal | None:
    """Everything after the noised gradient only works on it; so all strategies, codecs and merge
    rules may follow."""
    if job.privacy.where != "member":
        return (
            f"privacy.where = '{job.privacy.where}': examples are seen by their member only",
            "leave it out, or protect members: unit = 'member'",
        )
    return None


def _why_not_member(job: Job) -> Refusal | None:
    from edgetrain import strategies

    table = job.privacy
    strategy = strategies.find(job.strategy.name)
    if strategy.weighted:
        return (
            f"privacy with {strategy.name}: weights are what members hold, which is private, and "
            "one of a large weight moves the sum further than clip",
            "take local-sgd or dga, which count all members the same",
        )
    if "powersgd" in job.strategy.codec:
        return (
            f"strategy.codec = '{job.strategy.codec}': its second trip depends on the gradient "
            "that was to be noised",
            "take low-rank, or a codec of one trip",
        )
    if table.where == "member":
        return _why_not_masked(job) if job.strategy.secure else None
    if job.strategy.secure:
        return (
            f"strategy.secure with privacy.where = '{table.where}': the hub sees no contribution, "
            "and cannot clip any",
            "where = 'member'",
        )
    if job.strategy.merge.strip() != "mean":
        return (
            f"strategy.merge = '{job.strategy.merge}' with privacy.where = '{table.where}': nobody "
            "knows how far one member can move that rule's result",
            "merge = 'mean', or noise what members send: where = 'member'",
        )
    return _why_not_hub(job) if table.where == "hub" else _why_not_sum(job)


def _why_not_masked(job: Job) -> Refusal | None:
    """Masked elements beyond the span are cut. That spares the promise, and not the learning."""
    table, span = job.privacy, job.strategy.span
    deviation = table.noise * table.clip
    needed = table.clip + ROOM * deviation
    if not table.noise or span >= needed:
        return None
    return (
        f"strategy.span = {span:g} with noise of deviation {deviation:g}: masked elements are cut "
        f"to the span, and these reach {needed:g}",
        f"span = {needed:g}, or less noise, or a smaller clip",
    )


def _why_not_hub(job: Job) -> Refusal | None:
    from edgetrain import codecs

    spelled = job.strategy.reply_codec or job.strategy.codec
    if not codecs.parse(spelled).lossless:
        return (
            f"replies as '{spelled}' with privacy.where = 'hub': a hub that is restored merges "
            "again, with other noise, and both would get out",
            "say reply_codec = 'fp32'",
        )
    return None


def _why_not_sum(job: Job) -> Refusal | None:
    return (
        "privacy.where = 'sum': shares of noise that only add up under masks would have to be "
        "discrete noise, which is not built",
        "where = 'member' (all of the noise in each), or 'hub' (a hub that is trusted)",
    )


def rounds_of(job: Job) -> int:
    """Contributions that a member of this job makes, at most."""
    from edgetrain import strategies

    every = job.strategy.every or strategies.find(job.strategy.name).every
    return -(-job.train.steps // every)
