"""What a job came to: its summary, with the promise of its privacy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgetrain.fleet import devices
from edgetrain.jobs.plan import Plan
from edgetrain.jobs.privacy.promise import Promise, promise
from edgetrain.runs.folder import read_metrics


def summary_of(planned: Plan, folder: Path, report: dict[str, Any], status: str) -> dict[str, Any]:
    """What only the driver of a run knows of it; `report` is the network's."""
    delay = 0
    for record in read_metrics(folder, "round"):
        delay = record.get("delay", 0)
    kept = _promise_of(planned, folder, seeded=report.get("backend") == "simulated")
    sources = {devices.Energy(device).source for device in planned.device_profiles.values()}
    return {
        "name": planned.job.name,
        "task": planned.name,
        "metric": planned.metric,
        "better": planned.better,
        "target": planned.target,
        "every": planned.every,
        "emulation": report,
        "delay": delay,
        "privacy": kept.to_dict() if kept else None,
        "joules_source": sources.pop() if len(sources) == 1 else "mixed",
        "status": status,
    }


def _promise_of(planned: Plan, folder: Path, *, seeded: bool) -> Promise | None:
    """Of what has been trained: a run that was interrupted has released less than was planned."""
    if planned.promise is None:
        return None
    steps = max((record["step"] for record in read_metrics(folder, "step")), default=0)
    rounds = sum(1 for _ in read_metrics(folder, "round"))
    return promise(planned, planned.samples, steps, rounds, seeded=seeded)
