"""Differential privacy of a job: whose data is protected, from whom, and how well.

What the [privacy] table means, without anything heavy: the accountant is in `accounting`, vectors
are clipped and noised in `vectors.noise`, gradients of examples are taken in `tasks.private_work`.
What privacy does not go together with is in `jobs.rules`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgetrain.jobs.privacy.accounting import Promise, Releases, epsilon, noise_for

if TYPE_CHECKING:
    from edgetrain.jobs.resolved import Resolved
    from edgetrain.strategies.cohort import Cohort

LITTLE = 20.0
"""An epsilon above which the promise is next to nothing: odds may change e^20-fold."""

ROOM = 5.0
"""Deviations of noise that masked contributions must have room for: one element in 1.7 million is
further out."""


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
        more.append(f"very weak guarantee: epsilon > {LITTLE:g}")
    if promise["noise_source"].startswith("seeded"):
        more.append("noise is seeded: a simulation, which protects nobody")
    told = f"privacy: epsilon {epsilon:.4g} at delta {promise['delta']:g} for {about}"
    return told + (f" ({'; '.join(more)})" if more else "")


def releases_of(
    found: Resolved, samples: Sequence[int], steps: int | None = None, rounds: int | None = None
) -> Releases:
    """What the job releases about one unit: of all members' units the one that is released most.

    `samples`: how many each member's shard holds. `steps` and `rounds` are those of a run that has
    ended; None: the job's. `noise` is the job's own, 0 if it has to be found yet.
    """
    job = found.job
    table = job.privacy
    steps = job.train.steps if steps is None else steps
    if table.unit == "member":
        return _of_member(found, found.rounds if rounds is None else rounds)
    fewest = min(samples)
    batch = job.train.batch
    if table.sampling == "poisson":
        return Releases(table.noise, steps, min(1.0, batch / fewest))
    passes = -(-steps * batch // fewest)
    # A batch that spans two passes may hold an example twice: then two releases of sensitivity 1
    # become one of 2, which costs as much as four.
    spanning = fewest % batch != 0
    return Releases(table.noise / math.sqrt(2) if spanning else table.noise, passes)


def _of_member(found: Resolved, rounds: int) -> Releases:
    """In all rounds; of a cohort, the fewest that are known to be no fewer than any member's. Where
    nobody but a trusted hub knows who is drawn, and each member is by itself: with that chance."""
    noise, cohort = found.job.privacy.noise, found.job.cohort
    if cohort is None or (cohort.at_hub and not cohort.is_secret):
        return Releases(noise, rounds)
    if cohort.is_secret:
        return Releases(noise, rounds, cohort.share)
    return Releases(noise, _most_drawn(cohort, rounds))


@functools.lru_cache(4)
def _most_drawn(cohort: Cohort, rounds: int) -> int:
    """Rounds of the member that is drawn most often, of so many."""
    drawn = Counter(member for round in range(rounds) for member in cohort.drawn(round))
    return max(drawn.values(), default=0)


def fix_noise(found: Resolved, samples: Sequence[int] = ()) -> Resolved:
    """The job with the noise that its target epsilon asks for. Deterministic. ConfigError."""
    table = found.job.privacy
    if table.unit == "none" or not table.epsilon:
        return found
    wanted = releases_of(_with_noise(found, 1.0), samples)
    noise = noise_for(table.epsilon, wanted.count, table.delta, wanted.rate) / wanted.noise
    return _with_noise(found, noise)


def _with_noise(found: Resolved, noise: float) -> Resolved:
    table = replace(found.job.privacy, noise=noise, epsilon=0.0)
    return replace(found, job=replace(found.job, privacy=table))


def promise(
    found: Resolved,
    samples: Sequence[int] = (),
    steps: int | None = None,
    rounds: int | None = None,
    *,
    seeded: bool = False,
) -> Promise | None:
    """What a job promises, or `steps` and `rounds` of it, if anything. See `releases_of`."""
    table = found.job.privacy
    if table.unit == "none":
        return None
    releases = releases_of(found, samples, steps, rounds)
    source = "seeded, as all of a simulation" if seeded else "the operating system's generator"
    return Promise(
        table.unit, table.where, table.clip, table.noise, table.delta, releases.count,
        releases.rate, epsilon(releases, table.delta), "pld", source,
    )  # fmt: skip
