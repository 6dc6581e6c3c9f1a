"""Jobs whose members are the stages of one pipeline: what they ask for, and what is planned.

Loads no torch. What else it cannot be with stands in `pairs`; `training.pipelined` cuts the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError, refuse_first
from edgetrain.jobs.job import Job, ServersTable

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
    """Shapes of the tensors over each cut, for one micro-batch."""
    seconds: float
    """Seconds of a planned step, without TCP's windows."""
    paces: tuple[tuple[float, float], ...]
    """Seconds of a micro-batch forward and backward on each stage's device; 0: as they come."""
    bytes: tuple[tuple[float, float], ...]
    """Largest bytes of each stage in its device's memory, and the available ones."""
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


def check_stages(job: Job) -> None:
    """ConfigError for what a job whose members are stages cannot have."""
    pipeline_of(job)
    table, train = job.strategy, job.train
    refused = (
        (table.codec != "fp32" or table.reply_codec not in ("", "fp32") or table.outer
         or table.correction or table.weighting or table.ranges > 1,
         "a codec or an outer rule: no contributions are exchanged"),
        (train.accumulate > 1, f"train.accumulate = {train.accumulate}: microbatches=… adds up"),
        (train.evaluate_every % save_every(job), f"train.evaluate_every = {train.evaluate_every}: "
         f"the whole model is at the hub every {save_every(job)} steps (hub.snapshot_every)"),
        (train.frozen != "equal",
         f"train.frozen = '{train.frozen}': no member has the whole model"),
        (train.accelerator == "cuda",
         "train.accelerator = 'cuda': pipeline stages run on CPUs only"),
        (job.hub.quorum > 1, "hub.quorum: every stage is needed"),
        (job.servers != ServersTable(), "[servers]: the job runs on its devices"),
    )  # fmt: skip
    what = f"fleet.placement = '{job.fleet.placement}', and"
    refuse_first(*((holds, f"{what} {why}", "leave one of both out") for holds, why in refused))
