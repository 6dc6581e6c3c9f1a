"""Run folders as a list: when each began, what it trained, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.runs.folder import METRICS, read_job, read_summary, runs_in
from edgetrain.runs.reports import units
from edgetrain.runs.reports.columns import as_text, column


@dataclass(frozen=True)
class Entry:
    """One run: figures are None where they are not known."""

    folder: str
    began: str
    """YYYY-MM-DD HH:MM:SS, local time."""
    task: str
    strategy: str
    members: int | None
    network: str
    status: str
    """That of the summary; "no summary": under way, or killed; "damaged"."""
    metric: str
    final: float | None
    target_seconds: float | None
    seconds: float | None

    def as_json(self) -> dict[str, Any]:
        """Plain data for --json."""
        return asdict(self)


def listed(folder: Path) -> list[Entry]:
    """The runs of a folder; a folder of runs has several, and none if it holds no run."""
    try:
        runs = runs_in(folder)
    except ConfigError:
        return []
    return [_entry(run, _began(folder.name)) for run in runs if (run / METRICS).exists()]


def _entry(run: Path, began: str) -> Entry:
    try:
        job, summary = read_job(run), read_summary(run)
        status = "no summary" if summary is None else str(summary.get("status"))
    except ConfigError:
        job, summary, status = {}, None, "damaged"
    known, fleet = summary or {}, job.get("fleet", {})
    metric = str(known.get("metric") or "accuracy")
    network = known.get("network", fleet.get("network"))
    return Entry(
        folder=str(run),
        began=began,
        task=str(known.get("task") or job.get("task") or units.ABSENT).rpartition(":")[2],
        strategy=str(known.get("strategy") or job.get("strategy", {}).get("name") or units.ABSENT),
        members=known.get("members", fleet.get("members")),
        network="several" if isinstance(network, list) else str(network or units.ABSENT),
        status=status,
        metric=metric,
        final=(known.get("final") or {}).get(metric),
        target_seconds=known.get("target_seconds"),
        seconds=known.get("seconds"),
    )


def _began(name: str) -> str:
    match = re.match(r"(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)", name)
    return "{}-{}-{} {}:{}:{}".format(*match.groups()) if match else units.ABSENT


def text(entries: Sequence[Entry]) -> str:
    """The list as plain text."""
    columns = [
        column("folder", (units.printable(e.folder) for e in entries)),
        column("task", (units.printable(e.task) for e in entries)),
        column("strategy", (units.printable(e.strategy) for e in entries)),
        column("members", (units.ABSENT if e.members is None else str(e.members) for e in entries)),
        column("network", (units.printable(e.network) for e in entries)),
        column("status", (e.status for e in entries)),
        column("final", (units.figure(e.metric, e.final) for e in entries)),
        column("to target", (units.duration(e.target_seconds) for e in entries)),
        column("took", (units.duration(e.seconds) for e in entries)),
    ]
    return "\n".join(as_text(columns))
