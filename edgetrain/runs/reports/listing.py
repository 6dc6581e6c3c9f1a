"""Run folders as a list: when each began, what it trained, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.files.reading import open_regular
from edgetrain.runs.folder import metrics_path, read_job, read_summary, runs_in
from edgetrain.runs.reports import units
from edgetrain.runs.reports.columns import as_text, column


@dataclass(frozen=True)
class RunEntry:
    """One run: figures are None where they are not known."""

    folder: str
    began: str
    """YYYY-MM-DD HH:MM:SS, local time."""
    task: str
    strategy: str
    members: int | None
    network: str
    status: str
    """Status in the summary; "no summary": under way, or killed; "damaged"."""
    metric: str
    final: float | None
    target_seconds: float | None
    seconds: float | None
    """Time of the training: virtual, where it is simulated."""
    wall_seconds: float | None
    """Time of the machine that ran it, its start included."""
    kind: str
    """"simulated", or "real": processes, whatever their links; ABSENT: not known."""
    why: str = ""
    """Reason why the folder counts as damaged; "": it does not."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def listed(folder: Path) -> list[RunEntry]:
    """The runs of a folder; one that is damaged has an entry that says why."""
    name = folder.name
    match = re.match(r"(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)", name)
    began = "{}-{}-{} {}:{}:{}".format(*match.groups()) if match else units.ABSENT
    try:
        runs = runs_in(folder)
    except (ConfigError, OSError) as error:
        return [_damaged(folder, began, error)]
    return [_entry(run, began) for run in runs]


def _entry(run: Path, began: str) -> RunEntry:
    try:
        with open_regular(metrics_path(run)):
            job, summary = read_job(run), read_summary(run)
    except (ConfigError, OSError) as error:
        return _damaged(run, began, error)
    known, fleet = summary or {}, job.get("fleet", {})
    metric = known.get("metric") or "accuracy"
    network = known.get("network", fleet.get("network"))
    return RunEntry(
        folder=str(run),
        began=began,
        task=(known.get("task") or job.get("task") or units.ABSENT).rpartition(":")[2],
        strategy=known.get("strategy") or job.get("strategy", {}).get("name") or units.ABSENT,
        members=known.get("members", fleet.get("members")),
        network="several" if isinstance(network, list) else network or units.ABSENT,
        status="no summary" if summary is None else known.get("status") or units.ABSENT,
        metric=metric,
        final=(known.get("final") or {}).get(metric),
        target_seconds=known.get("target_seconds"),
        seconds=known.get("seconds"),
        wall_seconds=known.get("wall_seconds"),
        kind=units.ABSENT if summary is None else _kind(known),
    )


def _kind(summary: Mapping[str, Any]) -> str:
    backend = (summary.get("emulation") or {}).get("backend")
    return "simulated" if backend == "simulated" else "real"


def _damaged(folder: Path, began: str, error: ConfigError | OSError) -> RunEntry:
    why = error.message if isinstance(error, ConfigError) else str(error.strerror)
    unknown = units.ABSENT
    return RunEntry(
        str(folder), began, unknown, unknown, None, unknown, "damaged", "accuracy", None, None,
        None, None, unknown, why,
    )  # fmt: skip


def text(entries: Sequence[RunEntry]) -> str:
    columns = [
        column("folder", (units.printable(e.folder) for e in entries)),
        column("task", (units.printable(e.task) for e in entries)),
        column("strategy", (units.printable(e.strategy) for e in entries)),
        column("members", (units.ABSENT if e.members is None else str(e.members) for e in entries)),
        column("network", (units.printable(e.network) for e in entries)),
        column("kind", (units.printable(e.kind) for e in entries)),
        column("status", (units.printable(e.status) for e in entries)),
        column("final", (units.figure(e.metric, e.final) for e in entries)),
        column("to target", (units.duration(e.target_seconds) for e in entries)),
        column("took", (units.duration(e.seconds) for e in entries)),
        column("wall clock", (units.duration(e.wall_seconds) for e in entries)),
    ]
    lines = as_text(columns)
    whys = ["", *(units.printable(entry.why) for entry in entries)]
    return "\n".join(f"{line}  {why}".rstrip() for line, why in zip(lines, whys, strict=True))
