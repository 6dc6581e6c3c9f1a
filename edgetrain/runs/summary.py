"""Sum a run up from its job and its metrics: the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from statistics import median_low
from typing import Any

from edgetrain.runs.folder import FORMAT, read_job, read_metrics, read_summary
from edgetrain.runs.metrics.lines import Record, figures
from edgetrain.runs.metrics.tally import MemberTally, Tally
from edgetrain.runs.shapes import PARTS


def summarise(
    folder: Path, extra: Mapping[str, Any] | None = None, tally: Tally | None = None
) -> dict[str, Any]:
    """The summary of a run, from its job and its metrics; docs/run-folder.md explains each key.

    `extra` has what only the driver of the run knows (name, metric, better, target, delay,
    emulation, status, joules_source, …); its keys override those found here. `tally` has all
    lines of the metrics, if they have been read. Writes no file. Raises ConfigError if the job is
    damaged.
    """
    extra = dict(extra or {})
    summary = {"format": FORMAT, "began": None} | _from_job(folder, read_job(folder)) | extra
    tally = tally or Tally().add_all(read_metrics(folder))
    if tally.told_metric is not None and "metric" not in extra:
        summary |= dict(zip(("metric", "better"), tally.told_metric, strict=True))
    summary.setdefault("members", len(tally.members))
    summary |= _pace(tally) | _speed(tally) | _quality(tally, summary) | _cost(tally)
    summary |= _least_waiting(tally, summary["members"])
    return summary | _ending(tally, extra.get("status")) | extra


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
        "every": strategy.get("every"),
        "delay": strategy.get("delay"),
        "codec": strategy.get("codec"),
        "emulation": None,
        "joules_source": None,
        **({"pipeline": named[2]} if named[2] else {}),
    }
    return {key: value for key, value in known.items() if key != "members" or value is not None}


def _pace(tally: Tally) -> dict[str, Any]:
    """Rounds, delay and codec in force at the end, where the job has "auto"."""
    if not tally.every:
        return {}
    codec = {"codec": tally.codec} if tally.codec else {}
    return {"every": tally.every, "delay": tally.delay, **codec}


def _speed(tally: Tally) -> dict[str, Any]:
    if tally.is_told:
        return _reported_speed(tally)
    members = [member for member in tally.members.values() if member.step]
    lines = sum(member.lines for member in members)
    rates = [member.step / member.t for member in members if member.t > 0]
    return {
        "steps": max((member.step for member in members), default=0),
        "rounds": tally.rounds,
        "seconds": max((member.t for member in members), default=0.0),
        "seconds_per_step": sum(1 / rate for rate in rates) / len(rates) if rates else None,
        "steps_per_second": sum(rates) / len(rates) if rates else None,
        **{p: _mean(sum(getattr(member, p) for member in members), lines) for p in PARTS},
    }


def _least_waiting(tally: Tally, members: int) -> dict[str, Any]:
    """The member that waited least, and its step; None where not every member writes here."""
    parts = {name: member.parts for name, member in tally.members.items() if member.lines}
    if tally.is_told or not parts or len(tally.members) < members:
        return dict.fromkeys(("least_waiting", "least_busy_s", "least_wait_s"))
    name = min(parts, key=lambda each: parts[each][PARTS.index("wait_s")])
    compute_s, wait_s, overhead_s, *_ = parts[name]
    busy_s = compute_s + overhead_s
    return {"least_waiting": name, "least_busy_s": busy_s, "least_wait_s": wait_s}


def _reported_speed(tally: Tally) -> dict[str, Any]:
    """The speed from members' reports to the hub. Any one of them may be wrong, or lie: take the
    median of each figure, and no more steps than there were rounds for."""
    members = [member for member in tally.members.values() if member.step]
    steps, most = [member.step for member in members], tally.most_steps
    paces = [member.seconds_per_step for member in members if member.t > 0]
    pace = _median([each for each in paces if each])
    parts = [_median(each) for each in zip(*(m.parts for m in members if m.lines), strict=True)]
    return {
        "steps": min(max(steps, default=0), most) if most else median_low(steps or [0]),
        "rounds": tally.rounds,
        "seconds": max((member.t for member in members), default=0.0),
        "seconds_per_step": pace,
        "steps_per_second": len(paces) / pace if pace else None,
        **dict(zip(PARTS, parts or [None] * len(PARTS), strict=True)),
    }


def _quality(tally: Tally, summary: Mapping[str, Any]) -> dict[str, Any]:
    evaluations = sorted(tally.evaluations, key=lambda record: record["t"])
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
    }


def _final(evaluations: list[Record]) -> dict[str, float | None]:
    """The figures of the last evaluation, unknown if that was before the first step."""
    if not evaluations:
        return {}
    last = evaluations[-1]
    trained = last.get("step") or last.get("round")
    return figures(last) if trained else dict.fromkeys(figures(last))


def _cost(tally: Tally) -> dict[str, Any]:
    members = [member for member in tally.members.values() if member.step]
    joules = [member.joules.total for member in members if member.joules is not None]
    peaks = [member.peak_bytes for member in members] or [0]
    reported = tally.is_told
    sent, received = tally.traffic
    spent = len(joules) * median_low(joules or [0.0]) if reported else sum(joules)
    return {
        "sent_bytes": sent,
        "received_bytes": received,
        # A sum over some of the members would look as if energy had been saved.
        "joules": spent if members and len(joules) == len(members) else None,
        "cpu_s": sum(member.cpu_s.total for member in members),
        "peak_bytes": median_low(peaks) if reported else max(peaks),
        "hub": _hub(tally.hub),
    }


def _hub(hub: MemberTally) -> dict[str, Any]:
    above: dict[str, Any] = {}
    if hub.above is not None:
        sent, received = hub.above
        above = {"above_sent_bytes": int(sent.total), "above_received_bytes": int(received.total)}
    return above | {
        "sent_bytes": int(hub.sent_bytes.total),
        "received_bytes": int(hub.received_bytes.total),
        "cpu_s": hub.cpu_s.total,
        "peak_bytes": hub.peak_bytes,
    }


def _ending(tally: Tally, status: str | None) -> dict[str, Any]:
    lost, unfinished = tally.lost(), tally.unfinished()
    if status is None:
        over = set(unfinished) <= set(lost) and len(lost) < len(tally.members)
        done = "incomplete" if tally.failed() else "finished"
        status = done if over else "failed" if tally.errors else "interrupted"
    ended = status in ("finished", "incomplete")
    return {
        "status": status,
        # In a run that ended a member that did not finish is lost, even if the hub did not notice.
        "members_lost": unfinished if ended else lost,
        **({"members_removed": removed} if (removed := tally.removed()) else {}),
        "contributions_missed": tally.missed,
        "contributions_late": sum(member.late for member in tally.members.values()),
        "contributions_cut": {
            name: member.cut for name, member in sorted(tally.members.items()) if member.cut
        },
        "corrections": dict(
            sorted(Counter(m.correction for m in tally.members.values() if m.correction).items())
        ),
        **({"ages": list(tally.ages)} if tally.ages else {}),
        "errors": tally.errors[:10],
        "overrun": tally.overrun or None,
    }


def _median(values: Collection[float]) -> float | None:
    """The lower one of two in the middle: what one of two members says decides nothing."""
    return median_low(values) if values else None


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None
