"""One run as a browser is told of it: sections of JSON, each with a version.

What is known is what `edgetrain watch` and `edgetrain report` know: RunData, news. Pure
but for reading the folder; no clock of its own, no sockets. Memory grows with members and
evaluations, not with steps.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.runs.data import MemberData
from edgetrain.runs.folder import ORDERS, metrics_path, read_summary
from edgetrain.runs.kept import RunLines
from edgetrain.runs.metrics.lines import Follower, Record
from edgetrain.runs.reports import units
from edgetrain.runs.reports.live.plain import news
from edgetrain.runs.reports.live.watch import FolderWatch, RunState
from edgetrain.runs.reports.page import charts
from edgetrain.runs.reports.page.story import Story
from edgetrain.runs.reports.page.svg import Scale, figure, part_key, rect, ruler, text

CHUNK_BYTES = 1 << 20
"""Bytes of metrics.jsonl that are read at a time."""

MOST_POINTS = 300
"""Points of a curve; of more, two become one."""

MOST_NEWS = 100
KEPT_LINES = 600
"""Steps and exchanges of a member that are kept for the timeline."""
_LANES = 4
QUIET_S = 60.0
"""Seconds without a new line after which a run may have been killed."""

_DRAWN_EVERY_S = 4.0
"""Seconds between two timelines: a picture of hundreds of steps."""

COLUMNS = (
    "name", "enrolled", "standing", "step", "pace_s", "wait_share", "round_trip_s", "sent_bytes",
    "received_bytes", "celsius", "throttled", "loss", "peak_bytes", "cut",
    "disk_free_bytes", "swap_bytes", "mhz", "under_voltage", "wifi_dbm", "clock_s",
)  # fmt: skip
"""Columns of the fleet, attributes of MemberData."""

_ROUNDED = ("pace_s", "wait_share", "round_trip_s", "celsius", "loss", "cut", "clock_s")


class BoundedCurve:
    """Points (t, value), at most MOST_POINTS: medians of stretches of lines. Where there are more,
    stretches become twice as long."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._stretch: list[float] = []
        self._lines = 1
        """Lines in a stretch."""

    def add(self, t: float, value: float, least: int = 1) -> None:
        """Add the value of a line; a stretch has at least `least` lines."""
        self._stretch.append(value)
        if len(self._stretch) < max(self._lines, least):
            return
        self.points.append((t, statistics.median(self._stretch)))
        self._stretch = []
        if len(self.points) > MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [(later[0], (early[1] + later[1]) / 2) for early, later in pairs]
            self._lines = 2 * max(self._lines, least)

    def columns(self) -> list[list[float]]:
        """[t …] and [value …], sorted by t: the lines of members come a little out of order."""
        points = sorted(self.points)
        return [[round(t, 3) for t, _ in points], [float(f"{y:.5g}") for _, y in points]]


class Following:
    """Follows one run folder for any number of readers. One thread uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        follower = Follower(metrics_path(folder), CHUNK_BYTES)
        data = RunLines(most=KEPT_LINES)
        self._follower, self._watch = follower, FolderWatch(folder, follower=follower, data=data)
        self.story = Story(folder.name, folder, {}, {}, {}, data)
        self._loss, self._waiting = BoundedCurve(), BoundedCurve()
        self._news: list[str] = []
        self._refused: list[str] = []
        self._refusals = 0
        self._drawn = float("-inf")
        self._texts: dict[str, tuple[int, bytes]] = {}
        self._version = 0
        self.trouble = ""
        """Why the folder could not be read at the last look."""

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read at once."""
        return self._follower.is_behind

    def tick(self, now: float) -> None:
        """Read what is new. `now`: seconds since the epoch, as the file's own time is."""
        self.trouble = ""
        try:
            records = self._watch.read()
            summary = read_summary(self.folder)
            quiet = summary is None and now - metrics_path(self.folder).stat().st_mtime > QUIET_S
        except FileNotFoundError:
            records, summary, quiet = [], None, False
        except (ConfigError, OSError) as error:
            self.trouble = units.printable(str(error))
            self._put("trouble", self.trouble)
            return
        for record in records:
            kind, t = record["kind"], record["t"]
            if kind in ("step", "status"):
                loss, wait = record.get("loss"), record.get("wait_s") or 0.0
                fleet_size = len(self._watch.data.members)  # a point is one of the whole fleet
                if loss is not None:
                    self._loss.add(t, loss, fleet_size)
                busy = (record.get("compute_s") or 0.0) + (record.get("overhead_s") or 0.0)
                whole = wait + busy + (record.get("eval_s") or 0.0) + (record.get("end_s") or 0.0)
                if whole > 0:
                    self._waiting.add(t, wait / whole, fleet_size)
        self._news += news(self._watch.name, records)
        del self._news[:-MOST_NEWS]
        refused = [r for r in records if r["kind"] == "event" and r.get("event") == "refused"]
        self._refusals += len(refused)
        self._refused += news(self._watch.name, refused)
        del self._refused[:-MOST_NEWS]
        state = self._watch.state()
        self._put("run", self._run(state, summary, quiet))
        self._put("fleet", fleet(state.members))
        self._put("curves", self._curves(state))
        self._put("news", self._news)
        self._put("refusals", {"count": self._refusals, "lines": self._refused})
        if not self.is_behind and (now - self._drawn >= _DRAWN_EVERY_S or summary is not None):
            self._drawn = now
            # The last rounds at the hub, and what the first members did meanwhile: HTML, every name
            # in it escaped
            parts = [rounds_chart(self.story.rounds)]
            if length := charts.length_of(self.story) / 2:
                end = self.story.seconds
                window = charts.Interval("the last rounds", max(0.0, end - length), end)
                kinds = *charts.PARTS, ("flight", "exchange in flight"), ("kept", "answered")
                parts += [part_key(kinds), charts.timeline(self.story, window, _LANES)]
            self._put("timeline", "".join(parts))

    def state(self) -> RunState | str:
        """The run as it was found; a sentence that says why not."""
        return self.trouble or ("it is being read" if self.is_behind else self._watch.state())

    def since(self, seen: dict[str, int]) -> bytes:
        """A JSON object of the sections that are newer than those `seen`, which is brought up to
        date; b"" if none are."""
        fresh = []
        for name, (version, content) in self._texts.items():
            if seen.get(name) != version:
                seen[name] = version
                fresh.append(b'"%s":%s' % (name.encode(), content))
        return b"{" + b",".join(fresh) + b"}" if fresh else b""

    def _put(self, name: str, value: Any) -> None:
        content = json.dumps(value, separators=(",", ":")).encode()
        if name not in self._texts or self._texts[name][1] != content:
            self._version += 1
            self._texts[name] = self._version, content

    def _run(
        self, state: RunState, summary: Mapping[str, Any] | None, quiet: bool
    ) -> dict[str, Any]:
        job, strategy = self._watch.job, self._watch.job.get("strategy", {})
        plain = {key: value for key, value in vars(state).items() if key != "data"}
        status = (summary or {}).get("status")
        return plain | {
            "done": round(state.done, 4),
            "members": len(state.members),
            "late": state.late,
            "final_sync": state.data.final_sync,
            "reducers": state.data.reducers,
            "behind": self.is_behind,
            "status": status or ("quiet" if quiet and state.phase != "paused" else state.phase),
            "hears": status is None and (self.folder / ORDERS).exists(),
            "task": units.printable(str(job.get("task", "")).rpartition(":")[2]),
            "strategy": units.printable(str(strategy.get("name", ""))),
            "said": {
                "per step": units.duration(state.seconds_per_step),
                "left": units.duration(state.left_s),
                state.metric: units.figure(state.metric, state.figure),
                "loss": units.figure("loss", state.loss),
                "compute": units.duration(state.compute_s or None),
                "wait": units.duration(state.wait_s or None),
                "up": units.size(state.sent_bytes or None),
                "down": units.size(state.received_bytes or None),
                "steps, delay": units.pace(state.data.local_steps, state.data.delay),
                **_own_data(state),
            },
        }

    def _curves(self, state: RunState) -> dict[str, Any]:
        curve = BoundedCurve()
        for record in self._watch.data.evaluations:
            value = record.get(state.metric)
            if isinstance(value, int | float):
                curve.add(record["t"], value)
        target = self._watch.job.get("train", {}).get("target")
        return {
            "figure": curve.columns(),
            "metric": state.metric,
            "percent": units.is_fraction(state.metric),
            "target": target or None,  # 0 is none
            "loss": self._loss.columns(),
            "waiting": self._waiting.columns(),
        }


def _own_data(state: RunState) -> dict[str, str]:
    """What members found on data that they hold out of their own; {}: they hold nothing out."""
    own, metric = state.data.own_data, state.metric
    if own is None or (found := own.newest(metric)) is None:
        return {}
    return {
        "own data": units.figure(metric, found.mean),
        "worst tenth": units.figure(metric, found.worst_tenth),
    }


def fleet(members: Iterable[MemberData]) -> dict[str, list[Any]]:
    """The members as columns: a fleet of a thousand is half as long so, and as quick to sort."""
    rows = list(members)
    columns = {key: list(map(attrgetter(key), rows)) for key in COLUMNS}
    for key in _ROUNDED:
        columns[key] = [value and round(value, 6) for value in columns[key]]
    return columns


def rounds_chart(rounds: Iterable[Record]) -> str:
    """A bar for each of the last rounds, from its first contribution to the reply; "": none."""
    shown = [each for each in rounds if isinstance(each.get("close_s"), int | float)]
    if not shown:
        return ""
    begins = [each["t"] - each["close_s"] for each in shown]
    axis = Scale(min(begins), max(each["t"] for each in shown), "", units.duration)
    left, right, pitch = 64.0, 700.0, 18.0
    bottom = pitch * len(shown) + 6
    drawn = ruler(axis, (left, right), 0.0, bottom, 6)
    for place, (each, begin) in enumerate(zip(shown, begins, strict=True)):
        y, x = 4 + pitch * place, axis.place(begin, left, right)
        merged, missing = _count(each, "members"), _count(each, "missing")
        said = f"{merged:,} merged" + (f", {missing:,} missing" if missing else "")
        drawn.append(text(left - 8, y + 11, str(each.get("round", "")), "end", "tick"))
        wide = max(axis.place(each["t"], left, right) - x, 1.0)
        took = f"round {each.get('round')}: {said}, {units.duration(each['close_s'])}"
        drawn.append(rect(x, y, wide, 12, "wait" if missing else "flight", took))
        drawn.append(text(right + 10, y + 11, said, "start", "tick"))
    return figure(drawn, 944.0, bottom + 18, f"the last {len(shown)} rounds")


def _count(record: Record, key: str) -> int:
    """Names in a list of a line, with those that were cut off it."""
    cut = record.get("cut")
    more = cut.get(key) if isinstance(cut, dict) else 0
    return len(record.get(key) or []) + (more if isinstance(more, int) else 0)
