"""Differential privacy of a job: whose data is protected, from whom, and what cannot go with it.

What the [privacy] table means, and nothing that is heavy: the accountant is in `accounting`,
vectors are clipped and noised in `gaussian`, gradients of examples are taken in `examples`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from edgetrain.jobs.job import Job
from edgetrain.jobs.privacy import promise as privacy

if TYPE_CHECKING:
    from edgetrain.jobs.job import Job
from edgetrain.jobs.privacy.accounting import Releases, epsilon, noise_for

if TYPE_CHECKING:
    from edgetrain.jobs.job import Job

UNITS = ("none", "example", "member")
PLACES = ("member", "hub", "sum")
SAMPLINGS = ("poisson", "shuffle")

LITTLE = 20.0
"""An epsilon above which the promise is next to nothing: odds may change e^20-fold."""

ROOM = 5.0
"""Deviations of noise that masked contributions must have room for: one element in 1.7 million is
further out."""


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


def rounds_of(job: Job) -> int:
    """Contributions that a member of this job makes, at most."""
    from edgetrain import strategies

    every = job.strategy.every or strategies.find(job.strategy.name).every
    return -(-job.train.steps // every)


def releases_of(
    job: Job, samples: Sequence[int], steps: int | None = None, rounds: int | None = None
) -> Releases:
    """What the job releases about one unit: of all members' units the one that is released most.

    `samples`: how many each member's shard holds. `steps` and `rounds` are those of a run that has
    ended; None: the job's. `noise` is the job's own, 0 if it has to be found yet.
    """
    table = job.privacy
    steps = job.train.steps if steps is None else steps
    if table.unit == "member":
        return Releases(table.noise, privacy.rounds_of(job) if rounds is None else rounds)
    fewest = min(samples)
    batch = job.train.batch
    if table.sampling == "poisson":
        return Releases(table.noise, steps, min(1.0, batch / fewest))
    passes = -(-steps * batch // fewest)
    # A batch that spans two passes may hold an example twice: then two releases of sensitivity 1
    # become one of 2, which costs as much as four.
    spanning = fewest % batch != 0
    return Releases(table.noise / math.sqrt(2) if spanning else table.noise, passes)


def settle(job: Job, samples: Sequence[int] = ()) -> Job:
    """The job with the noise that its target epsilon asks for; as it is where it has none.

    Deterministic: hub and members find the same. Raises ConfigError.
    """
    table = job.privacy
    if table.unit == "none" or not table.epsilon:
        return job
    wanted = releases_of(replace(job, privacy=replace(table, noise=1.0)), samples)
    found = noise_for(table.epsilon, wanted.count, table.delta, wanted.rate) / wanted.noise
    return replace(job, privacy=replace(table, noise=found, epsilon=0.0))


def promise(
    job: Job,
    samples: Sequence[int] = (),
    steps: int | None = None,
    rounds: int | None = None,
    *,
    seeded: bool = False,
) -> Promise | None:
    """What a job (or so much of it) promises; None where it has no privacy. See `releases_of`."""
    table = job.privacy
    if table.unit == "none":
        return None
    found = releases_of(job, samples, steps, rounds)
    source = "seeded, as all of a simulation" if seeded else "the operating system's generator"
    return Promise(
        table.unit, table.where, table.clip, table.noise, table.delta, found.count, found.rate,
        epsilon(found, table.delta), "pld", source,
    )  # fmt: skip
