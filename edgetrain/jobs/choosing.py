"""`strategy = "auto"`: the row of docs/how-to/choosing.md for a job's network, data and optimizer.

Pure. The table is what `benchmarks/frontier.py` measured; a job that it has no row for is refused.
Only a job file may say "auto": what runs, and what a run folder keeps, has the name that was taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgetrain.errors import ConfigError
from edgetrain.fleet.assignment import devices_of, networks_of
from edgetrain.fleet.networks.profile import load
from edgetrain.jobs.job import AUTO, Job


@dataclass(frozen=True)
class Advice:
    """A row: where it holds, what to take there, and what that was measured to be worth."""

    when: str
    strategy: str
    because: str


_FEW = 10
"""Steps of a round trip up to which plain SGD bears a delay on unequal data."""

NO_TRIP = Advice(
    "a round trip of less than a step",
    "fedavg",
    "there is nothing to hide, and nothing ends higher",
)
TEXT = Advice(
    "text, with momentum or AdamW",
    "dga",
    "it ends 0.07 (momentum) and 0.12 (AdamW) above the loss of sync-sgd in 0.23 of its time",
)
EQUAL = Advice(
    "equal data",
    "dga",
    "it ends within 0.3 points of fedavg in 0.39 to 0.42 of its time at 200 ms, 0.26 to 0.32 at "
    "500",
)
UNEQUAL = Advice(
    "unequal data, momentum",
    "dga",
    "it ends 0.5 to 1.9 points below fedavg in 0.42 to 0.32 of its time",
)
PLAIN = Advice(
    f"unequal data, SGD without momentum, a round trip of up to {_FEW} steps",
    "dga",
    "it ends 0.7 to 2.2 points below fedavg in 0.42 of its time; with a momentum both end higher",
)
PLAIN_FAR = Advice(
    "unequal data, SGD without momentum, a longer round trip",
    "fedavg",
    "dga ends 4.6 points below it; with a momentum of 0.9 it is 1.9, in 0.32 of its time",
)
ADAPTIVE = Advice(
    "unequal data, with AdamW or its like",
    "sync-sgd",
    "in dga's time it ends at 98.1 (200 ms) where dga ends at 85.2 and fedavg at 73.8, and at 99.0 "
    "in the end; of those with local steps dga(variates) ended at 97.2 there",
)
DOUBT = Advice(
    "data of which the job says nothing", "dga", "its members find out whether they differ"
)
TABLE = (NO_TRIP, TEXT, EQUAL, UNEQUAL, PLAIN, PLAIN_FAR, ADAPTIVE, DOUBT)

_TEXT, _PICTURES = "edgetrain.tasks:char_lm", "edgetrain.tasks:digits"


def advise(job: Job) -> Advice:
    """The row for a job. ConfigError where the job does not say enough, or there is no row."""
    fleet = job.fleet
    if len(set(devices_of(fleet.device))) > 1:
        raise _unknown(
            f"fleet.device = {fleet.device!r}", "devices differ in speed, and it does not know how "
            "much", "choose fedbuff(M, 0.5) for equal data, dga for unequal data",
        )  # fmt: skip
    networks = set(networks_of(fleet.network))
    if networks == {"none"} or not fleet.pace_s:
        raise _unknown(
            f"fleet.network = {fleet.network!r} and fleet.pace_s = {fleet.pace_s:g}",
            "it needs the round trip, and the seconds of a step",
            "say both, or choose dga, which measures them",
        )
    trip_s = max(sum(way.delay_ms for way in (p.up, p.down)) for p in map(load, networks)) / 1000
    if trip_s < fleet.pace_s:
        return NO_TRIP
    partition = str(job.data.get("partition", ""))
    is_sgd = str(job.train.optimizer.get("name", "sgd")).lower() == "sgd"
    is_plain = is_sgd and not job.train.optimizer.get("momentum")
    if job.task == _TEXT:
        if is_plain:
            raise _unknown(
                f"task = {job.task!r}", "text was not measured with plain SGD",
                "choose a momentum, AdamW, or a strategy",
            )  # fmt: skip
        return TEXT
    if partition.startswith(("iid", "shared")) or (not partition and job.task == _PICTURES):
        return EQUAL
    if not partition:
        return DOUBT
    if not is_sgd:
        return ADAPTIVE
    if is_plain:
        return PLAIN if trip_s <= _FEW * fleet.pace_s else PLAIN_FAR
    return UNEQUAL


def _unknown(what: str, why: str, instead: str) -> ConfigError:
    return ConfigError(f"strategy.name = 'auto' with {what}: {why}", instead)


def named(job: Job) -> tuple[Job, str]:
    """The job with the strategy that its "auto" takes, and a line that says which and why; "" where
    it names one. ConfigError as `advise`."""
    if job.strategy.name.strip() != AUTO:
        return job, ""
    row = advise(job)
    why = f"strategy auto: {row.strategy}, for {row.when}: {row.because} (docs/how-to/choosing.md)"
    return replace(job, strategy=replace(job.strategy, name=row.strategy)), why
