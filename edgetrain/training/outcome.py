"""What a job came to: its run folder opened and closed, its summary, the promise of its privacy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.fleet.devices.energy import Energy
from edgetrain.jobs.privacy.accounting import Promise
from edgetrain.jobs.privacy.promise import promise
from edgetrain.jobs.resolved import Resolved
from edgetrain.runs.data import RunData
from edgetrain.runs.folder import (
    JOB,
    metrics_path,
    read_metrics,
    write_environment,
    write_job,
    write_summary,
)
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.runs.summary import summarise


@dataclass
class RunOutcome:
    """The outcome of a run. Its driver sets `status` and `network`; `summary` is set at the end."""

    status: str = "failed"
    """"finished", "incomplete" (members failed), "interrupted" or "failed"."""
    network: dict[str, Any] = field(default_factory=dict)
    """The report of the emulation, or of what the simulation has in its place."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further keys of the summary from its driver."""
    summary: dict[str, Any] = field(default_factory=dict)
    """As in summary.json."""


@contextlib.contextmanager
def recorded(planned: Resolved, folder: Path) -> Iterator[RunOutcome]:
    """Within: a run in `folder`, which exists and gets the environment, and the job unless it has
    one: a run that goes on with another job may yet be refused.

    At the end, however that comes about, the summary is written and set in what this yields.
    """
    if not (folder / JOB).exists():
        write_job(folder, planned.job.to_dict())
    write_environment(folder)
    outcome, began = RunOutcome(), time.monotonic()
    try:
        yield outcome
    except KeyboardInterrupt:
        outcome.status = "interrupted"
        raise
    finally:
        data = RunData().add_all(read_metrics(folder))
        known = _known(planned, data, outcome.network, outcome.status) | outcome.extra
        known["wall_seconds"] = time.monotonic() - began
        outcome.summary = summarise(folder, known, data)
        # Write the summary. If the disk is full, the run is incomplete, and what it came to is not
        # lost: people still get the table.
        summary = outcome.summary
        try:
            write_summary(folder, summary)
        except ConfigError as error:
            summary["errors"] = [str(error), *summary["errors"]]
            if summary["status"] == "finished":
                summary["status"] = "incomplete"


def write_errors(folder: Path, began: float, errors: Iterable[tuple[str, str, float]]) -> None:
    """Write an event for each (name of a process, error, when it failed) to the metrics in
    `folder`; `began`: when training began, by the same clock."""
    for name, error, at in errors:
        with MetricsLog(metrics_path(folder), "hub", partial(float, at), began) as log:
            log.event("error", error, about=name)


def at_gateways(carried: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Bytes sent and received by each gateway at its site, for the summary."""
    if not carried:
        return {}
    sent, received = (int(sum(way)) for way in zip(*carried, strict=True))
    return {"gateways": {"sent_bytes": sent, "received_bytes": received}}


def _known(planned: Resolved, data: RunData, report: dict[str, Any], status: str) -> dict[str, Any]:
    """The part of the summary that only the driver of a run knows; `report` is the network's."""
    kept = _promise_of(planned, data, seeded=report.get("backend") == "simulated")
    sources = {Energy(device).source for device in planned.device_profiles.values()}
    return {
        "name": planned.job.name,
        "task": planned.name,
        "metric": planned.metric,
        "better": planned.better,
        "target": planned.target,
        "local_steps": data.local_steps or planned.local_steps,
        "emulation": report,
        "delay": data.delay,
        "codec": data.codec or planned.job.strategy.codec,
        "buffers": planned.buffers,
        "privacy": kept.to_dict() if kept else None,
        "joules_source": sources.pop() if len(sources) == 1 else "mixed",
        "status": status,
    }


def _promise_of(planned: Resolved, data: RunData, *, seeded: bool) -> Promise | None:
    """The promise for what was trained: an interrupted run has released less than planned."""
    if planned.promise is None:
        return None
    own = (member.step for member in data.members.values() if member.has_own_lines)
    return promise(planned, planned.samples, max(own, default=0), data.rounds, seeded=seeded)
