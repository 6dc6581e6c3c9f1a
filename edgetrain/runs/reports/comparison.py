"""Compare several runs of one job: figures of each, and against the first, as data.

Pure functions of summaries (as `runs.folder.read_summary` returns them); no file, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from edgetrain.runs.reports import units

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One run of a comparison, in seconds, bytes and joules; None: not known.

    label: tells it from the other runs, usually its strategy. final: the task's metric at the end.
    speedup: how many times sooner than the first run it reached the target; if the first run never
    reached it, only speedup_at_least is known. wait_share: the part of a step spent waiting, 0 to
    1.
    """

    label: str
    name: str
    strategy: str | None
    status: str
    final: float | None
    target_seconds: float | None
    target_steps: int | None
    speedup: float | None
    speedup_at_least: float | None
    steps: int
    seconds: float
    seconds_per_step: float | None
    compute_s: float | None
    wait_s: float | None
    overhead_s: float | None
    eval_s: float
    end_s: float
    wait_share: float | None
    sent_bytes: int
    received_bytes: int
    joules: float | None
    joules_source: str | None
    timing_ok: bool | None
    members_lost: tuple[str, ...]
    local_steps: int | None = None
    """Steps in a round, at the end."""
    delay: int | None = None
    """Steps that a reply might take, at the end."""
    codec: str | None = None
    final_seconds: float | None = None
    """When the model was as good as `final` says: a figure may be older than the run."""
    wan_bytes: int | None = None
    """Bytes between sites and the hub above, both ways, with gateways."""
    lan_bytes: int | None = None
    """Then: between gateways and the members of their sites, both ways."""
    own_mean: float | None = None
    """The metric on data that members hold out of their own: over all of it."""
    own_worst_tenth: float | None = None
    """Then: the mean of the worst tenth of members."""
    comparable: bool = True
    """Whether nothing but the strategy tells it from the first run: otherwise times say nothing of
    strategies, and there is no speed-up."""


@dataclass(frozen=True)
class Comparison:
    """Runs of one job, in the order given; the others are compared with the first."""

    metric: str
    better: str
    target: float | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    of: str = "strategy"
    """The names of the rows."""

    def as_json(self, picture: Path | None = None) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "better": self.better,
            "target": self.target,
            "runs": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
            "picture": None if picture is None else str(picture),
        }


def compare(
    summaries: Sequence[Summary],
    labels: Sequence[str] | None = None,
    jobs: Sequence[Mapping[str, Any]] = (),
) -> Comparison:
    """Compare runs with the first of them, whose metric and target apply to all. Without `jobs`
    (as `runs.folder.read_job` returns them) only what summaries have tells runs apart.

    Labels are `labels`, or else the strategies, the names or numbers: the first that all differ.
    """
    if not summaries:
        return Comparison("accuracy", "higher", None, (), ())
    summaries = [complete(summary) for summary in summaries]
    first, labels = summaries[0], labels or _labels(summaries)
    settings = [*map(_settings, summaries, jobs or [{}] * len(summaries))]
    alike = [each == settings[0] for each in settings]
    labelled = list(zip(labels, summaries, strict=True))
    return Comparison(
        metric=first["metric"],
        better=first["better"],
        # A hub may be told no figure: whether its members reached a target is not known then.
        target=first["target"] if any(summary["final"] for summary in summaries) else None,
        rows=tuple(
            _row(label, summary, first, comparable)
            for (label, summary), comparable in zip(labelled, alike, strict=True)
        ),
        notes=(
            *(note for label, summary in labelled for note in _notes(label, summary)),
            *_about_all(summaries),
            *(_waiting(labels[0], summaries[0]) if len(summaries) == 1 else ()),
        ),
    )


def complete(summary: Summary) -> Summary:
    """A summary with every key that runs have: one that others wrote may lack some."""
    return _EMPTY | {key: value for key, value in summary.items() if value is not None}


_EMPTY: dict[str, Any] = dict.fromkeys((
    "strategy", "task", "members", "network", "device", "target", "target_seconds", "target_steps",
    "seconds_per_step", "compute_s", "wait_s", "overhead_s", "joules", "joules_source",
    "local_steps", "delay", "least_waiting", "least_busy_s", "least_wait_s",
)) | {
    "name": "run", "status": "unknown", "metric": "accuracy", "better": "higher", "final": {},
    "steps": 0, "seconds": 0.0, "sent_bytes": 0, "received_bytes": 0, "members_lost": [],
}  # fmt: skip


def _labels(summaries: Sequence[Summary]) -> list[str]:
    strategies = [str(summary["strategy"] or summary["name"]) for summary in summaries]
    names = [str(summary["name"]) for summary in summaries]
    for labels in (strategies, names):
        if len(set(labels)) == len(labels):
            return labels
    return [f"{strategy} {number}" for number, strategy in enumerate(strategies, 1)]


def _settings(summary: Summary, job: Mapping[str, Any]) -> Mapping[str, Any]:
    """All that a run was, but for its strategy and its names."""
    known = {key: summary.get(key) for key in ("task", "members", "device", "network", "target")}
    return known | {key: job[key] for key in job if key not in ("strategy", "name")}


def _row(label: str, summary: Summary, first: Summary, comparable: bool) -> Row:
    speedup, at_least = _speedup(summary, first) if comparable else (None, None)
    # Figures that a row and a summary call by one name are the same.
    found: dict[str, Any] = {each.name: summary.get(each.name) for each in fields(Row)}
    found |= {
        "label": label,
        "final": summary["final"].get(first["metric"]),
        "speedup": speedup,
        "speedup_at_least": at_least,
        "seconds_per_step": seconds_per_step(summary),
        "eval_s": summary.get("eval_s") or 0.0,
        "end_s": summary.get("end_s") or 0.0,
        "wait_share": wait_share(summary),
        "timing_ok": _timing_ok(summary),
        "members_lost": tuple(summary["members_lost"]),
        "local_steps": _count(summary.get("local_steps")),
        "delay": _count(summary.get("delay")),
        **_own_data(summary, first["metric"]),
        "comparable": comparable,
    }
    return Row(**found | _by_network(summary))


def _own_data(summary: Summary, metric: str) -> dict[str, float | None]:
    """The metric on data that members hold out of their own."""
    found = ((summary.get("own_data") or {}).get("figures") or {}).get(metric) or {}
    return {"own_mean": found.get("mean"), "own_worst_tenth": found.get("worst_tenth")}


def _by_network(summary: Summary) -> dict[str, int]:
    """Bytes between sites and within them: of a gateway's own folder, or of a run that has some."""
    hub, gateways = summary.get("hub") or {}, summary.get("gateways")
    if gateways:
        return {"wan_bytes": _both_ways(hub), "lan_bytes": _both_ways(gateways)}
    if "above_sent_bytes" in hub:
        return {"wan_bytes": _both_ways(hub, "above_"), "lan_bytes": _both_ways(hub)}
    return {}


def _both_ways(carried: Summary, which: str = "") -> int:
    return sum(int(carried.get(f"{which}{way}_bytes", 0)) for way in ("sent", "received"))


def _count(value: Any) -> int | None:
    """A number of steps; None for a word ("auto") or nothing."""
    return value if isinstance(value, int) else None


def seconds_per_step(summary: Summary) -> float | None:
    """A member's, by the clock, evaluations and the wait for the last replies included. Older
    summaries have the steps of a second only."""
    rate = summary.get("steps_per_second")
    seconds: float | None = summary.get("seconds_per_step") or (1 / rate if rate else None)
    return seconds


def _speedup(summary: Summary, first: Summary) -> tuple[float | None, float | None]:
    mine, yardstick = summary["target_seconds"], first["target_seconds"]
    if not mine:
        return None, None
    if yardstick is not None:
        return yardstick / mine, None
    # The first run ended before it reached the target. If it ended first, nothing is known.
    return None, first["seconds"] / mine if first["seconds"] > mine else None


def wait_share(summary: Summary) -> float | None:
    """The part of a step spent waiting, 0 to 1; None: not known."""
    parts = [summary[key] for key in ("compute_s", "wait_s", "overhead_s")]
    if None in parts:
        return None
    whole = sum(parts) + (summary.get("eval_s") or 0.0) + (summary.get("end_s") or 0.0)
    return float(summary["wait_s"] / whole) if whole > 0 else None


def _waiting(name: str, summary: Summary) -> Iterable[str]:
    """The reason why members of a run waited, if that took most of its time.

    A contribution is handed over before the member waits for an older reply: a reply takes the
    steps of the delay, and the waits of all rounds in flight.
    """
    share, delay = wait_share(summary), _count(summary["delay"])
    local_steps = _count(summary["local_steps"])
    busy_s, wait_s = summary["least_busy_s"], summary["least_wait_s"]
    if not busy_s or wait_s is None or delay is None or not local_steps or (share or 0.0) < _MUCH:
        return
    waits = f"{name}: members wait {units.share(share)} of the time"
    reply_s = delay * busy_s + (delay // local_steps + 1) * local_steps * wait_s
    if summary.get("pipeline"):
        yield (
            f"{waits}: a step's trips through all stages and back take {units.duration(wait_s)} "
            "(fewer stages, a nearer hub; activations of fewer bits where links are slow)"
        )
    elif wait_s >= summary["wait_s"] / 2:
        yield (
            f"{waits}: a round trip ({units.duration(reply_s)}) is {reply_s / busy_s:,.0f} steps "
            f"long, and {delay or 'none'} of them overlap with training (try longer rounds, a "
            "delay or a closer hub; a smaller codec where links are slow)"
        )
    elif busy_s >= _MUCH_SLOWER * (summary["compute_s"] + summary["overhead_s"]):
        yield (
            f"{waits}: {summary['least_waiting']} has the longest steps, "
            f"{units.duration(busy_s)} each, and the others wait for it"
        )


_MUCH, _MUCH_SLOWER = 0.5, 1.5
"""A part of the time that is worth a remark; a step beside the mean one."""


def _timing_ok(summary: Summary) -> bool | None:
    emulation = summary.get("emulation") or {}
    return emulation.get("timing_ok")


def _notes(name: str, summary: Summary) -> Iterable[str]:
    status = summary["status"]
    if status != "finished":
        errors = summary.get("errors") or []
        yield f"{name} {_STATUS.get(status, status)}" + (f": {errors[0]}" if errors else "")
    if summary["members_lost"]:
        yield f"{name} lost {_names(summary['members_lost'])}"
    if removed := summary.get("members_removed"):
        yield f"{name}: people removed {_names(removed)}"
    if cut := summary.get("contributions_cut"):
        most = sorted(cut, key=lambda member: (-cut[member], member))
        yield f"{name} cut " + _names([f"{member} ({cut[member]:.3g} rounds)" for member in most])
    if summary.get("buffers") in _BUFFERS:
        yield f"{name}: {_BUFFERS[summary['buffers']]}"
    if overrun := summary.get("overrun"):
        yield f"{name} {overrun}: this machine is too slow or busy for it, and its times are long"
    if _timing_ok(summary) is False:
        yield f"{name}: {untrusted(summary['emulation'])}"


def _about_all(summaries: Sequence[Summary]) -> Iterable[str]:
    backends = {(summary.get("emulation") or {}).get("backend") for summary in summaries}
    if backends == {"simulated"}:
        yield "simulated: seconds are virtual, as the device and network profiles have them"


_BUFFERS = {
    "mean": "normalisation statistics are the members' mean",
    "local": "normalisation statistics are each member's own; figures are with the first member's",
}
_STATUS = {
    "failed": "was ended by an error",
    "interrupted": "was interrupted",
    "incomplete": "is incomplete",
}


def untrusted(emulation: Mapping[str, Any]) -> str:
    """Why the times of a run cannot be trusted, in a sentence."""
    late, limit = emulation.get("late_ms_p99"), emulation.get("late_limit_ms")
    if dropped := emulation.get("ring_dropped"):
        return (
            f"the emulated network was too slow for this machine's own traffic and dropped "
            f"{dropped:,} packets, so its times are not to be trusted"
        )
    if late is None or limit is None:
        return "the network emulation does not vouch for its own timing"
    return (
        f"the emulated network was itself late ({late:.3g} ms at the 99th percentile, "
        f"{limit:.3g} ms allowed), so its times are not to be trusted"
    )


def _names(names: Sequence[str], most: int = 4) -> str:
    listed = ", ".join(names[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"
