"""Sum a run up from its job and its metrics: the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from statistics import median_low
from typing import Any

from edgetrain.runs.data import MemberData, RunData, mean_parts
from edgetrain.runs.folder import FORMAT, read_job, read_metrics, read_summary
from edgetrain.runs.metrics.lines import Record, figures
from edgetrain.runs.shapes import PARTS


def summarise(
    folder: Path, extra: Mapping[str, Any] | None = None, data: RunData | None = None
) -> dict[str, Any]:
    """The summary of a run, from its job and its metrics (docs/reference/run-folder.md).

    `extra` has what only the driver of the run knows (name, metric, better, target, delay,
    emulation, status, joules_source, …); its keys override those found here. `data` has all
    lines of the metrics, if they have been read. Writes no file. Raises ConfigError if the job is
    damaged.
    """
    extra = dict(extra or {})
    job = read_job(folder)
    summary = {"format": FORMAT, "began": None} | _from_job(folder, job) | extra
    data = data or RunData().add_all(read_metrics(folder))
    if data.told_metric is not None and "metric" not in extra:
        summary |= dict(zip(("metric", "better"), data.told_metric, strict=True))
    summary.setdefault("members", len(data.members))
    summary |= (
        _pace(data) | _speed(data) | _turns(data, job) | _quality(data, summary) | _cost(data)
    )
    summary |= _least_waiting(data, summary["members"])
    return summary | _ending(data, extra.get("status")) | extra


def interrupted(folder: Path) -> dict[str, Any]:
    """The summary of a run that Ctrl-C has ended, also if its disk had no room for it."""
    return read_summary(folder) or summarise(folder, {"status": "interrupted"})


def reached(value: Any, target: float, better: str) -> bool:
    """Whether a figure is at the target or better; `better` is "higher" or "lower"."""
    if not isinstance(value, int | float):
        return False
    return value >= target if better == "higher" else value <= target


def _from_job(folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    fleet, strategy = job.get("fleet", {}), job.get("strategy", {})
    named = strategy.get("name"), strategy.get("outer"), fleet.get("placement")
    known = {
        "name": folder.name,
        "strategy": " | ".join(filter(None, named)) or None,
        "task": job.get("task"),
        "metric": "accuracy",
        "better": "higher",
        "target": job.get("train", {}).get("target") or None,
        "members": fleet.get("members"),
        "network": fleet.get("network"),
        "device": fleet.get("device", fleet.get("devices")),
        "local_steps": strategy.get("local_steps"),
        "delay": strategy.get("delay"),
        "codec": strategy.get("codec"),
        "emulation": None,
        "joules_source": None,
        **({"pipeline": named[2]} if named[2] else {}),
    }
    return {key: value for key, value in known.items() if key != "members" or value is not None}


def _pace(data: RunData) -> dict[str, Any]:
    """Rounds, delay and codec in force at the end, where the job has "auto"."""
    if not data.local_steps:
        return {}
    codec = {"codec": data.codec} if data.codec else {}
    return {"local_steps": data.local_steps, "delay": data.delay, **codec}


def _speed(data: RunData) -> dict[str, Any]:
    if data.is_told:
        return _reported_speed(data)
    members = [member for member in data.members.values() if member.step]
    lines = sum(member.lines for member in members)
    rates = [member.step / member.t for member in members if member.t > 0]
    return {
        "steps": max((member.step for member in members), default=0),
        "rounds": data.rounds,
        "seconds": max((member.t for member in members), default=0.0),
        "seconds_per_step": sum(1 / rate for rate in rates) / len(rates) if rates else None,
        "steps_per_second": sum(rates) / len(rates) if rates else None,
        **dict(zip(PARTS, mean_parts(members) if lines else [None] * len(PARTS), strict=True)),
    }


def _turns(data: RunData, job: Mapping[str, Any]) -> dict[str, Any]:
    """Where members take turns a step is the job's, and not that of a member."""
    steps, seconds = data.turns(job) or (0, 0.0)
    if not steps or not seconds:
        return {}
    return {
        "steps": steps,
        "seconds_per_step": seconds / steps,
        "steps_per_second": steps / seconds,
    }


def _least_waiting(data: RunData, members: int) -> dict[str, Any]:
    """The member that waited least, and its step; None where not every member writes here."""
    parts = {name: member.parts for name, member in data.members.items() if member.lines}
    if data.is_told or not parts or len(data.members) < members:
        return dict.fromkeys(("least_waiting", "least_busy_s", "least_wait_s"))
    name = min(parts, key=lambda each: parts[each][PARTS.index("wait_s")])
    compute_s, wait_s, overhead_s, *_ = parts[name]
    busy_s = compute_s + overhead_s
    return {"least_waiting": name, "least_busy_s": busy_s, "least_wait_s": wait_s}


def _reported_speed(data: RunData) -> dict[str, Any]:
    """The speed from members' reports to the hub. Any one of them may be wrong, or lie: take the
    median of each figure, and no more steps than there were rounds for."""
    members = [member for member in data.members.values() if member.step]
    steps, most = [member.step for member in members], data.most_steps
    paces = [member.seconds_per_step for member in members if member.t > 0]
    pace = _median([each for each in paces if each])
    parts = [_median(each) for each in zip(*(m.parts for m in members if m.lines), strict=True)]
    return {
        "steps": min(max(steps, default=0), most) if most else median_low(steps or [0]),
        "rounds": data.rounds,
        "seconds": max((member.t for member in members), default=0.0),
        "seconds_per_step": pace,
        "steps_per_second": len(paces) / pace if pace else None,
        **dict(zip(PARTS, parts or [None] * len(PARTS), strict=True)),
    }


def _quality(data: RunData, summary: Mapping[str, Any]) -> dict[str, Any]:
    evaluations = sorted(data.evaluations, key=lambda record: record["t"])
    metric, target, better = summary["metric"], summary["target"], summary["better"]
    first: Record = {}
    if target is not None:
        hits = (record for record in evaluations if reached(record.get(metric), target, better))
        first = next(hits, {})
    return {
        "target_seconds": first.get("t"),
        "target_steps": first.get("step"),
        "final": _final(evaluations),
        "final_seconds": evaluations[-1]["t"] if evaluations else None,
        **({"own_data": data.own_data.at_the_end(metric, better)} if data.own_data else {}),
    }


def _final(evaluations: list[Record]) -> dict[str, float | None]:
    """The figures of the last evaluation, unknown if that was before the first step."""
    if not evaluations:
        return {}
    last = evaluations[-1]
    trained = last.get("step") or last.get("round")
    return figures(last) if trained else dict.fromkeys(figures(last))


def _cost(data: RunData) -> dict[str, Any]:
    members = [member for member in data.members.values() if member.step]
    joules = [member.joules for member in members if member.joules is not None]
    peaks = [member.peak_bytes for member in members] or [0]
    reported = data.is_told
    sent, received = data.traffic
    spent = len(joules) * median_low(joules or [0.0]) if reported else sum(joules)
    return {
        "sent_bytes": sent,
        "received_bytes": received,
        # A sum over some of the members would look as if energy had been saved.
        "joules": spent if members and len(joules) == len(members) else None,
        "cpu_s": sum(member.cpu_s for member in members),
        "peak_bytes": median_low(peaks) if reported else max(peaks),
        "hub": _hub(data.hub),
    }


def _hub(hub: MemberData) -> dict[str, Any]:
    carried = {
        "above_sent_bytes": hub.above_sent_bytes,
        "above_received_bytes": hub.above_received_bytes,
        "sent_bytes": hub.sent_bytes,
        "received_bytes": hub.received_bytes,
    }
    counted = {key: int(value) for key, value in carried.items() if value is not None}
    return {**counted, "cpu_s": hub.cpu_s, "peak_bytes": hub.peak_bytes}


def _ending(data: RunData, status: str | None) -> dict[str, Any]:
    lost, unfinished = data.lost(), data.unfinished()
    if status is None:
        over = set(unfinished) <= set(lost) and len(lost) < len(data.members)
        done = "incomplete" if data.failed() else "finished"
        status = done if over else "failed" if data.errors else "interrupted"
    ended = status in ("finished", "incomplete")
    return {
        "status": status,
        # In a run that ended a member that did not finish is lost, even if the hub did not notice.
        "members_lost": unfinished if ended else lost,
        **({"members_removed": removed} if (removed := data.removed()) else {}),
        "contributions_missed": data.missed,
        "contributions_late": sum(member.late for member in data.members.values()),
        "contributions_cut": {
            name: member.cut for name, member in sorted(data.members.items()) if member.cut
        },
        "corrections": dict(
            sorted(Counter(m.correction for m in data.members.values() if m.correction).items())
        ),
        **({"ages": list(data.ages)} if data.ages else {}),
        "errors": data.errors[:10],
        "overrun": data.overrun or None,
    }


def _median(values: Collection[float]) -> float | None:
    """The lower one of two in the middle: what one of two members says decides nothing."""
    return median_low(values) if values else None
