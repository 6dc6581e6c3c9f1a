"""The hub of a pipeline over members. Loads no torch and knows no task: members cut the model, and
the first one puts it together again."""

from __future__ import annotations

from edgetrain.exchange.messages import MAX_ELEMENTS
from edgetrain.exchange.pipeline.relay import STATE_BYTES, Relay, RelayTerms
from edgetrain.jobs.job import Job
from edgetrain.jobs.pipeline import save_every

MOST_BYTES = 1 << 30
"""Largest size of an activation. A connection announcing more is closed before it takes memory."""


def terms_of(
    job: Job, most_elements: int = MAX_ELEMENTS, most_bytes: int = MOST_BYTES
) -> RelayTerms:
    """Terms of the hub of a job with stages as members."""
    hub, train = job.hub, job.train
    return RelayTerms(
        job.digest(), job.fleet.members, train.steps, save_every(job), most_bytes, most_elements,
        train.evaluate_every, hub.heartbeat_s, hub.rejoin_s,
    )  # fmt: skip


def relay_of(job: Job, memory: int) -> tuple[Relay, int]:
    """A fresh relay that may take so many bytes of memory, and the bytes of its largest message."""
    most_bytes = min(MOST_BYTES, memory)
    return Relay(terms_of(job, max(1, memory // STATE_BYTES), most_bytes)), most_bytes
