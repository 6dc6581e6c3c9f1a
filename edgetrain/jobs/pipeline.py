"""Jobs whose members are the stages of one pipeline: what they ask for, and what is planned.

Loads no torch. What such a job cannot have stands in `rules`; `training.pipelined` cuts the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job

if TYPE_CHECKING:
    from edgetrain.jobs.placement.words import Placement

ACTIVATIONS = {"float32": 4, "bf16": 2, "int8": 1}
"""How stages pass numbers on, and bytes of each."""
_WORDS = {"pipeline", "microbatches", "cuts", "schedule"}
SNAPSHOTS = 10
"""States that stages send the hub in a run unless the job says how often."""


@dataclass(frozen=True)
class StagePlan:
    """A pipeline over members as it is run; plain values, for every process of the job."""

    placement: Placement
    """With its cuts and its micro-batches."""
    windows: tuple[int, ...]
    """Micro-batches that each stage has out at once."""
    shapes: tuple[tuple[int, ...], ...]
    """Of what goes over each cut, for one micro-batch."""
    seconds: float
    """Of a step, as planned, without TCP's windows."""
    paces: tuple[tuple[float, float], ...]
    """Seconds of a micro-batch forward and backward on each stage's device; 0: as they come."""
    bytes: tuple[tuple[float, float], ...]
    """What each stage needs of its device's memory at most, and what it may have."""
    names: tuple[str, ...]
    """Each stage's layers, for people."""
    elements: int
    """Parameters of the model."""
    cut_bytes: tuple[int, ...]
    """About what goes over each cut for one micro-batch, as it is passed on."""
    save_every: int


def pipeline_of(job: Job) -> Placement | None:
    """The pipeline that the job's members are; None: they each hold the whole model.

    ConfigError for words that members cannot be placed by.
    """
    words = job.fleet.placement
    if not words:
        return None
    what = f"fleet.placement = '{words}'"
    for word in words.split():
        if (name := word.partition("=")[0]) not in _WORDS:
            raise ConfigError(
                f"{what}: members of a fleet have no '{name}'",
                "as in 'pipeline=4', 'pipeline=4 microbatches=16' or with cuts=1,2,3; groups on "
                "servers have more ([servers] placement)",
            )
    from edgetrain.jobs.placement.words import parse

    placement = parse(words)
    if placement.schedule != "1f1b":
        raise ConfigError(f"{what}: schedule={placement.schedule}", "1f1b, the only one yet")
    if placement.pipeline < 2:
        raise ConfigError(what, f"pipeline={max(2, job.fleet.members)}, a stage for each member")
    if placement.pipeline != job.fleet.members:
        raise ConfigError(
            f"{what} of a fleet of {job.fleet.members} members: each is one stage",
            f"pipeline={job.fleet.members}, or fleet.members={placement.pipeline}",
        )
    return placement


def save_every(job: Job) -> int:
    """Steps between two states that stages send to the hub."""
    return job.hub.snapshot_every or max(1, job.train.steps // SNAPSHOTS)


def refuse_pipeline(job: Job, what: str) -> None:
    """ConfigError for members that are stages of a pipeline, where `what` cannot have them."""
    if job.fleet.placement:
        raise ConfigError(
            f"fleet.placement = '{job.fleet.placement}': {what} a pipeline over members",
            "leave one of both out",
        )
