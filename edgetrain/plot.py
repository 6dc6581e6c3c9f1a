"""The pictures: several runs against each other, one run, steps per second against round trip.

They are drawn from run folders (or rows) alone and written whole. matplotlib is imported inside,
and only its Figure: no window, no global state. Colours are those of Okabe and Ito, told apart by
the colour-blind, and each line has its own dash pattern too.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain import comparison, metrics, runs, sweep, units
from edgetrain.calibration import GOOD, Pair
from edgetrain.comparison import Comparison, Row
from edgetrain.errors import ConfigError
from edgetrain.sweep import Axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES, _DPI = (12.0, 8.0), 150
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":")
_TARGET = "#555555"
# Greys for the parts of a step: colours stay with the strategies.
_PARTS = (
    ("compute", "#4A4A4A", ""),
    ("wait", "#D9D9D9", "///"),
    ("overhead", "#000000", ""),
)
_STYLE: dict[str, Any] = {
    "font.size": 13,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "lines.linewidth": 2.4,
    "legend.frameon": True,
    "legend.framealpha": 0.9,
    "legend.edgecolor": "none",
    "hatch.color": "#8C8C8C",
}
# A time axis is logarithmic when the fastest run would else be squeezed into this part of it.
_SQUEEZED = 0.04


@dataclass(frozen=True)
class Curve:
    """One run in a picture: its row, its evaluations, and how its line looks."""

    row: Row
    t: tuple[float, ...]
    steps: tuple[int, ...]
    values: tuple[float, ...]
    colour: str
    dashes: str

    @property
    def name(self) -> str:
        """As it stands beside bars; a note explains the mark."""
        return _label(self.row.label) + (" *" if self.row.trusted is False else "")


def comparison_figure(folders: Sequence[Path], path: Path) -> Path:
    """compare.png: runs of one job, the first being the yardstick. Returns `path`.

    Raises ConfigError if there is no matplotlib, no run, or the file cannot be written.
    """
    return _save(lambda: draw_comparison(folders), path)


def run_figure(folder: Path, path: Path) -> Path:
    """run.png: one run's quality, loss, its members' steps and its traffic. Returns `path`.

    Raises ConfigError if there is no matplotlib or the file cannot be written.
    """
    return _save(lambda: draw_run(folder), path)


def latency_figure(rows: Iterable[Mapping[str, Any]], path: Path, title: str = "") -> Path:
    """Steps per second against round trip, relative to the same strategy's at 0 ms.

    Each row has `strategy`, `rtt_ms` and `steps_per_second`; of several with the same strategy and
    round trip the median counts. Raises ConfigError if there is no row, a strategy has none at
    0 ms, or the file cannot be written. Returns `path`.
    """
    return _save(lambda: draw_latency(rows, title), path)


def calibration_figure(pairs: Sequence[Pair], path: Path) -> Path:
    """How much longer a step is simulated than emulated, a bar for each job. Returns `path`."""
    return _save(lambda: draw_calibration(pairs), path)


def draw_calibration(pairs: Sequence[Pair]) -> Figure:
    """The figure of `calibration_figure`."""
    with _styled():
        figure = _figure((9.6, 1.6 + 0.5 * len(pairs)))
        _write_heading(figure, "Seconds per step, simulated against emulated")
        axes = figure.add_subplot()
        errors = [100 * pair.time_error for pair in pairs]
        names = [_label(pair.name) for pair in pairs]
        axes.axvspan(-100 * GOOD, 100 * GOOD, color="#EAF3EC", zorder=0)
        axes.axvline(0, color=_TARGET, lw=1.2, zorder=1)
        axes.barh(range(len(pairs)), errors, color=_COLOURS[1], height=0.55, zorder=2)
        axes.set_yticks(range(len(pairs)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        most = max(2 * 100 * GOOD, *(1.25 * abs(error) for error in errors))
        axes.set_xlim(-most, most)
        axes.set_xlabel("error of the simulation (per cent); within the band it is called good")
        for place, error in enumerate(errors):
            side, shift = ("left", 4) if error >= 0 else ("right", -4)
            axes.annotate(
                f"{error:+.1f} %", (error, place), xytext=(shift, 0), textcoords="offset points",
                ha=side, va="center", fontsize=11,
            )  # fmt: skip
        return figure


def capacity_figure(rows: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> Path:
    """capacity.png: throughput and the time of a step against the number of members.

    Each row has `members`, `speed_up`, `compute_s`, `wait_s` and `bottleneck`. Raises ConfigError
    if there is no row, no matplotlib, or the file cannot be written. Returns `path`.
    """
    return _save(lambda: draw_capacity(rows, title), path)


def sweep_figure(
    axis: Axis,
    names: Sequence[str],
    points: Sequence[Mapping[str, Any]],
    metric: str,
    path: Path,
    title: str = "",
) -> Path:
    """One axis of a sweep: speed, final metric, time to the target and bytes along its values.

    `points` are those of `sweep.points` for axes of these names. Raises ConfigError if there is no
    matplotlib or the file cannot be written. Returns `path`.
    """
    return _save(lambda: draw_sweep(axis, names, points, metric, title), path)


# --- several runs ---


def draw_comparison(folders: Sequence[Path]) -> Figure:
    """The figure of compare.png, for who wants it elsewhere than in a file."""
    if not folders:
        raise ConfigError("there is no run to draw")
    summaries = [runs.read_summary(folder) or runs.summarise(folder) for folder in folders]
    compared = comparison.compare(summaries)
    curves = [
        _curve(folder, row, compared.metric, place)
        for place, (folder, row) in enumerate(zip(folders, compared.rows, strict=True))
    ]
    with _styled():
        return _comparison(compared, curves, summaries[0])


def _comparison(
    compared: Comparison, curves: Sequence[Curve], summary: Mapping[str, Any]
) -> Figure:
    crowd = max(0, len(curves) - 4)
    figure = _figure((_INCHES[0], _INCHES[1] + 0.35 * max(0, crowd - 2)))
    ratios = [1.6, 1 + 0.12 * crowd]
    grid = figure.add_gridspec(2, 2, width_ratios=[1.2, 1], height_ratios=ratios)
    against_time = figure.add_subplot(grid[0, 0])
    against_steps = figure.add_subplot(grid[0, 1], sharey=against_time)
    _draw_against_time(against_time, curves, compared, _end_of_time(curves))
    _draw_against_steps(against_steps, curves, compared)
    _draw_split(figure.add_subplot(grid[1, 0]), curves)
    _draw_bytes(figure.add_subplot(grid[1, 1]), curves)
    _draw_header(figure, against_time, compared, summary, _heading(summary))
    _draw_notes(figure, compared)
    return figure


# --- quality ---


def _draw_against_time(
    axes: Axes, curves: Sequence[Curve], compared: Comparison, end: float
) -> None:
    unit, seconds = _time_unit(end)
    for curve in curves:
        t = [value / seconds for value in curve.t]
        label = _with_target_time(curve, compared)
        axes.plot(t, curve.values, curve.dashes, color=curve.colour, label=label)
    _draw_target(axes, compared)
    for curve in curves:
        if compared.target is not None and curve.row.target_seconds is not None:
            at = curve.row.target_seconds / seconds
            axes.plot([at], [compared.target], "o", color=curve.colour, ms=9, zorder=5)
    axes.set_title(f"{compared.metric} against time")
    axes.set_xlabel(f"time since training began ({unit})")
    lowest = _scale_metric(axes, curves, compared)
    axes.set_xlim(0, end / seconds)
    if _needs_log(curves, end):
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_xscale("log")
        axes.set_xlim(0.8 * _comes_into_sight(curves, lowest) / seconds, end / seconds)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())


def _comes_into_sight(curves: Sequence[Curve], lowest: float) -> float:
    """Seconds until the first curve rises above the lower edge of the picture."""
    seen = (
        next((t for t, value in zip(curve.t, curve.values, strict=True) if value >= lowest), None)
        for curve in curves
    )
    return min((t for t in seen if t), default=1.0)


def _draw_against_steps(axes: Axes, curves: Sequence[Curve], compared: Comparison) -> None:
    for curve in curves:
        axes.plot(curve.steps, curve.values, curve.dashes, color=curve.colour)
    _draw_target(axes, compared)
    last = max((curve.steps[-1] for curve in curves if curve.steps), default=1)
    if compared.target is not None:
        # In the margin: within the panel there is always some curve near the target.
        goal = units.goal(compared.metric, compared.target)
        axes.annotate(
            f"target\n{goal}",
            (last, compared.target),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=_TARGET,
            fontsize=12,
            annotation_clip=False,
        )
    axes.set_title(f"{compared.metric} against steps")
    axes.set_xlabel("steps of each member")
    axes.set_xlim(0, last)
    axes.tick_params(labelleft=False)


def _with_target_time(curve: Curve, compared: Comparison) -> str:
    row = curve.row
    name = _label(row.label) + (" (untrusted)" if row.trusted is False else "")
    if compared.target is None:
        return name
    goal = units.goal(compared.metric, compared.target)
    if row.target_seconds is None:
        return f"{name}: {goal} never reached"
    text = f"{name}: {goal} at {units.duration(row.target_seconds)}"
    if row.speedup_at_least is not None:
        return f"{text}, over {units.times(row.speedup_at_least)} sooner"
    if row.speedup is None or row is compared.rows[0]:
        return text
    if row.speedup >= 1:
        return f"{text}, {units.times(row.speedup)} sooner"
    return f"{text}, {units.times(1 / row.speedup)} later"


def _draw_target(axes: Axes, compared: Comparison) -> None:
    if compared.target is not None:
        axes.axhline(compared.target, color=_TARGET, lw=1.2, ls=(0, (4, 3)), zorder=1)


def _scale_metric(axes: Axes, curves: Sequence[Curve], compared: Comparison) -> float:
    """Sets the vertical range and returns its lower edge."""
    values = [value for curve in curves for value in curve.values]
    if units.is_fraction(compared.metric):
        # The way up from guessing is the same for all; what differs happens near the target.
        near = (compared.target or max(values, default=1.0)) - 0.45
        axes.set_ylim(max(0.0, min(values, default=0.0), near), 1.0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.0f} %")
    else:
        axes.set_ylabel(compared.metric)
        if min(values, default=0.0) >= 0:
            axes.set_ylim(bottom=0)
    if not values:
        where = axes.transAxes
        axes.text(0.5, 0.5, "not evaluated yet", transform=where, ha="center", color=_TARGET)
    return float(axes.get_ylim()[0])


def _end_of_time(curves: Sequence[Curve]) -> float:
    """Seconds to show: a third more than the slowest needed for the target, else all there is."""
    everything = max([curve.t[-1] for curve in curves if curve.t] or [1.0]) or 1.0
    reached = [curve.row.target_seconds for curve in curves]
    if any(seconds is None for seconds in reached):
        return everything
    return min(everything, 1.33 * max(seconds for seconds in reached if seconds is not None))


def _needs_log(curves: Sequence[Curve], end: float) -> bool:
    fastest = [curve.row.target_seconds for curve in curves if curve.row.target_seconds]
    return bool(fastest) and min(fastest) < _SQUEEZED * end


def _time_unit(end: float) -> tuple[str, float]:
    if end < 600:
        return "seconds", 1.0
    return ("minutes", 60.0) if end < 3 * 3600 else ("hours", 3600.0)


# --- cost ---


def _draw_split(axes: Axes, curves: Sequence[Curve]) -> None:
    parts = [
        (curve.row.compute_s or 0.0, curve.row.wait_s or 0.0, curve.row.overhead_s or 0.0)
        for curve in curves
    ]
    colours = [curve.colour for curve in curves]
    _draw_stacked(axes, [curve.name for curve in curves], parts, colours)


def _draw_stacked(
    axes: Axes,
    names: Sequence[str],
    parts: Sequence[tuple[float, float, float]],
    colours: Sequence[str],
) -> None:
    """Horizontal bars of (compute, wait, overhead) in seconds, one a name, the first on top."""
    places = range(len(names))
    longest = max(map(sum, parts), default=0.0) or 1.0
    unit, seconds = ("milliseconds", 1e-3) if longest < 1 else ("seconds", 1.0)
    left = [0.0] * len(names)
    for part, (name, colour, hatch) in enumerate(_PARTS):
        widths = [split[part] / seconds for split in parts]
        axes.barh(places, widths, 0.62, left, color=colour, hatch=hatch, label=name, lw=0)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, split in enumerate(parts):
        _write_beside(axes, sum(split) / seconds, place, units.duration(sum(split)))
    _name_bars(axes, names, colours)
    axes.set_xlim(0, 1.2 * longest / seconds)
    axes.set_title(f"{unit} per step")
    # Below the axis: at the side there is always some bar that is long.
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0.0, 0.0),
        ncols=3,
        borderpad=0,
        borderaxespad=1.9,
        handlelength=1.4,
        columnspacing=1.4,
    )


def _draw_bytes(axes: Axes, curves: Sequence[Curve]) -> None:
    rows = [curve.row for curve in curves]
    most = max([max(row.sent_bytes, row.received_bytes) for row in rows], default=0)
    unit, size = _byte_unit(most)
    for place, (row, curve) in enumerate(zip(rows, curves, strict=True)):
        sent, received = row.sent_bytes / size, row.received_bytes / size
        axes.barh(place - 0.16, sent, 0.3, color=curve.colour, lw=0)
        axes.barh(place + 0.16, received, 0.3, color=curve.colour, alpha=0.45, hatch="///", lw=0)
        both = f"{units.size(row.sent_bytes)}, {units.size(row.received_bytes)}"
        _write_beside(axes, max(sent, received), place, both)
    _name_bars(axes, [curve.name for curve in curves], [curve.colour for curve in curves])
    axes.set_xlim(0, 1.75 * (most / size or 1.0))
    axes.locator_params(axis="x", nbins=5)
    axes.set_title(f"{unit} of all members")
    axes.set_xlabel("at the socket: sent, received (hatched)")


def _write_beside(axes: Axes, end: float, place: float, text: str) -> None:
    """Text just right of where a bar ends."""
    axes.annotate(text, (end, place), xytext=(5, 0), textcoords="offset points", va="center")


def _byte_unit(most: float) -> tuple[str, float]:
    for unit, size in (("bytes", 1.0), ("kilobytes", 1e3), ("megabytes", 1e6)):
        if most < 1000 * size:
            return unit, size
    return "gigabytes", 1e9


def _name_bars(axes: Axes, names: Sequence[str], colours: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    for tick, colour in zip(axes.get_yticklabels(), colours, strict=True):
        tick.set_color(colour)
        tick.set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


# --- one run ---


def draw_run(folder: Path) -> Figure:
    """The figure of run.png."""
    summary = runs.read_summary(folder) or runs.summarise(folder)
    compared = comparison.compare([summary])
    curve = replace(_curve(folder, compared.rows[0], compared.metric, 1), dashes="-")
    history = History(max(1, summary["steps"]))
    for record in runs.read_metrics(folder):
        history.add(record)
    with _styled():
        figure = _figure()
        grid = figure.add_gridspec(2, 2)
        quality = figure.add_subplot(grid[0, 0])
        _draw_against_time(quality, [curve], compared, curve.t[-1] if curve.t else 1.0)
        _draw_loss(figure.add_subplot(grid[0, 1]), history)
        _draw_members(figure.add_subplot(grid[1, 0]), history.tally)
        _draw_traffic(figure.add_subplot(grid[1, 1]), history)
        heading = _heading(summary, summary["strategy"])
        _draw_header(figure, quality, compared, summary, heading)
        _draw_notes(figure, compared)
        return figure


class History:
    """The course of a run, in at most 400 intervals of equally many steps however long it was."""

    _INTERVALS = 400

    def __init__(self, steps: int) -> None:
        self.tally = metrics.Tally()
        self._each = -(-steps // self._INTERVALS)
        self._losses: dict[int, list[float]] = {}
        self._traffic: dict[int, tuple[float, float, float]] = {}

    def add(self, record: metrics.Record) -> None:
        """Takes in one record, in file order."""
        self.tally.add(record)
        if record["kind"] != "step":
            return
        interval = (int(record.get("step") or 1) - 1) // self._each
        if isinstance(record.get("loss"), int | float):
            self._losses.setdefault(interval, []).append(record["loss"])
        members = self.tally.members.values()
        self._traffic[interval] = (
            self.tally.t,
            sum(member.sent_bytes.total for member in members),
            sum(member.received_bytes.total for member in members),
        )

    def losses(self) -> list[tuple[float, float, float, float]]:
        """(step, mean, least, greatest) training loss of the members, an interval each."""
        middle = (self._each + 1) / 2
        return [
            (interval * self._each + middle, statistics.fmean(found), min(found), max(found))
            for interval, found in sorted(self._losses.items())
        ]

    def traffic(self) -> list[tuple[float, float, float]]:
        """(seconds, bytes sent, bytes received) summed over members, an interval each."""
        return [self._traffic[interval] for interval in sorted(self._traffic)]


def _draw_loss(axes: Axes, history: History) -> None:
    losses = history.losses()
    axes.set_ylim(bottom=min([0.0, *(least for _, _, least, _ in losses)]))
    if losses:
        step, mean, least, greatest = zip(*losses, strict=True)
        axes.fill_between(step, least, greatest, color=_COLOURS[1], alpha=0.2, lw=0)
        axes.plot(step, mean, color=_COLOURS[1], lw=1.8)
    axes.set_title("training loss: mean and range of members")
    axes.set_xlabel("steps of each member")
    axes.set_xlim(left=0)
    axes.set_ylim(top=max([0.1, *(1.05 * greatest for *_, greatest in losses)]))


def _draw_members(axes: Axes, tally: metrics.Tally, most: int = 10) -> None:
    """The members that need longest for a step themselves."""
    found = [(name, member) for name, member in tally.members.items() if member.lines]
    found.sort(key=lambda item: -(item[1].compute_s + item[1].overhead_s) / item[1].lines)
    shown = found[:most]
    parts = [
        (
            member.compute_s / member.lines,
            member.wait_s / member.lines,
            member.overhead_s / member.lines,
        )
        for _, member in shown
    ]
    _draw_stacked(axes, [_label(name) for name, _ in shown], parts, ["#000000"] * len(shown))
    if len(found) > len(shown):
        unit = axes.get_title(loc="left").split()[0]
        axes.set_title(f"{unit} per step: {most} slowest of {len(found)}")


def _draw_traffic(axes: Axes, history: History) -> None:
    traffic = history.traffic()
    t, sent, received = zip(*traffic, strict=True) if traffic else ((0.0,), (0.0,), (0.0,))
    time_unit, seconds = _time_unit(t[-1])
    unit, size = _byte_unit(max(sent[-1], received[-1]))
    for way, values, dashes, colour in (
        ("sent", sent, "-", _COLOURS[0]),
        ("received", received, "--", _COLOURS[2]),
    ):
        x, y = [value / seconds for value in t], [value / size for value in values]
        axes.plot(x, y, dashes, color=colour, label=f"{way}, {units.size(values[-1])}")
    axes.legend(loc="upper left")
    axes.set_title(f"{unit} of all members, at the socket")
    axes.set_xlabel(f"time since training began ({time_unit})")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.1 * (max(sent[-1], received[-1]) / size or 1.0))


# --- latency ---


def draw_latency(rows: Iterable[Mapping[str, Any]], title: str = "") -> Figure:
    """The figure of `latency_figure`. Points not to be trusted are hollow, and explained."""
    rows = list(rows)
    relative = relative_speed(rows)
    with _styled():
        figure = _figure((9.6, 5.6))
        _write_heading(figure, _label(title) or "Steps per second against latency")
        axes = figure.add_subplot()
        for place, points in enumerate(relative.values()):
            colour, dashes = _look(place)
            rtt_ms, speed = zip(*points, strict=True)
            axes.plot(rtt_ms, speed, f"o{dashes}", color=colour, ms=7, clip_on=False, zorder=3)
        _draw_doubt(figure, axes, relative, rows)
        axes.axhline(1.0, color=_TARGET, lw=1.2, ls=(0, (4, 3)), zorder=1)
        axes.set_xlabel("round trip (milliseconds)")
        axes.set_ylabel("steps per second, relative to 0 ms")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.0f} %")
        axes.set_ylim(0, max(1.1, 1.05 * max(s for points in relative.values() for _, s in points)))
        axes.set_xlim(0, max(points[-1][0] for points in relative.values()) or 1.0)
        _label_ends(axes, relative)
        return figure


def _draw_doubt(
    figure: Figure,
    axes: Axes,
    relative: Mapping[str, list[tuple[float, float]]],
    rows: Iterable[Mapping[str, Any]],
) -> None:
    """Hollow points where a run was not trusted, or a step took longer than its pace."""
    doubtful = {
        (row["strategy"], float(row["rtt_ms"]))
        for row in rows
        if row.get("trusted") is False or row.get("overrun")
    }
    for place, (strategy, points) in enumerate(relative.items()):
        for rtt_ms, speed in points:
            if (strategy, rtt_ms) in doubtful:
                axes.plot([rtt_ms], [speed], "o", color=_look(place)[0], mfc="white",
                          mew=2, ms=9, clip_on=False, zorder=4)  # fmt: skip
    if doubtful:
        text = "hollow: the emulation was late, or members did not keep their pace"
        figure.supxlabel(text, x=0.012, ha="left", fontsize=11.5, color="#B00020")


def relative_speed(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """For each strategy its (rtt_ms, steps per second relative to 0 ms), by rising round trip."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        at = found.setdefault(row["strategy"], {}).setdefault(float(row["rtt_ms"]), [])
        at.append(float(row["steps_per_second"]))
    relative = {}
    for strategy, by_rtt in found.items():
        if not by_rtt.get(0.0):
            raise ConfigError(
                f"'{strategy}' was not measured at a round trip of 0 ms",
                "measure it there too: all else is shown relative to it",
            )
        base = statistics.median(by_rtt[0.0])
        relative[strategy] = [
            (rtt_ms, statistics.median(speeds) / base) for rtt_ms, speeds in sorted(by_rtt.items())
        ]
    if not relative:
        raise ConfigError("there is no measurement to draw")
    return relative


def _label_ends(axes: Axes, relative: Mapping[str, list[tuple[float, float]]]) -> None:
    """Names and last values at the ends of the lines, moved apart where they would overlap."""
    least = 0.055 * (axes.get_ylim()[1] - axes.get_ylim()[0])
    lowest = -1.0
    for _, strategy in sorted((points[-1][1], name) for name, points in relative.items()):
        (rtt_ms, speed), place = relative[strategy][-1], list(relative).index(strategy)
        lowest = max(speed, lowest + least)
        axes.annotate(
            f"{_label(strategy)}, {speed * 100:.0f} %",
            (rtt_ms, lowest),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            color=_look(place)[0],
            fontweight="bold",
            annotation_clip=False,
        )


# --- capacity ---


def draw_capacity(rows: Sequence[Mapping[str, Any]], title: str = "") -> Figure:
    """The figure of `capacity_figure`."""
    if not rows:
        raise ConfigError("there is no fleet to draw")
    with _styled():
        figure = _figure((12.0, 5.4))
        _write_heading(figure, _label(title.partition(";")[0]) or "Capacity")
        grid = figure.add_gridspec(1, 2, width_ratios=[1, 1.25])
        _draw_growth(figure.add_subplot(grid[0, 0]), rows)
        _draw_sizes(figure.add_subplot(grid[0, 1]), rows)
        return figure


def _draw_growth(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    members = [row["members"] for row in rows]
    axes.plot(members, members, color=_TARGET, lw=1.2, ls=(0, (4, 3)), label="nobody ever waits")
    found = [row["speed_up"] for row in rows]
    axes.plot(members, found, "o-", color=_COLOURS[1], label="this fleet")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title("throughput of one member, times")
    axes.set_xlabel("members")
    axes.legend(loc="upper left")


def _draw_sizes(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """A bar for each size of the fleet; beside it what it waits for."""
    parts = [(row["compute_s"], row["wait_s"], 0.0) for row in rows]
    names = [f"{row['members']:,}" for row in rows]
    _draw_stacked(axes, names, parts, ["#000000"] * len(rows))
    axes.set_ylabel("members")
    for place, row in enumerate(rows):
        text = _label(str(row["bottleneck"]))
        axes.annotate(text, (0, place + 0.45), xytext=(3, 0), textcoords="offset points",
                      va="center", fontsize=9, color=_TARGET)  # fmt: skip


# --- sweeps ---


def draw_sweep(
    axis: Axis,
    names: Sequence[str],
    points: Sequence[Mapping[str, Any]],
    metric: str,
    title: str = "",
) -> Figure:
    """The figure of `sweep_figure`."""
    lines = sweep.series(axis.name, names, [dict(point) for point in points])
    with _styled():
        figure = _figure((12.0, 8.4))
        grid = figure.add_gridspec(2, 2)
        speed, final, target, size = (
            figure.add_subplot(grid[place // 2, place % 2]) for place in range(4)
        )
        first = axis.values[0].label
        _draw_along(speed, axis, {
            label: dict(sweep.relative(line)) for label, line in lines.items()
        })  # fmt: skip
        speed.set_title(f"steps a second of the fleet, {_label(axis.name)} {_label(first)} = 1")
        _from_zero(speed)
        _draw_along(final, axis, _values(lines, "final"), _ranges(lines))
        final.set_title(f"final {_label(metric)}")
        if units.is_fraction(metric):
            final.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.4g} %")
        reached = _values(lines, "target_seconds")
        if any(reached.values()):
            _draw_along(target, axis, reached)
            target.set_title("seconds until the target")
        else:
            _draw_along(target, axis, _values(lines, "wait_s", 1000.0))
            target.set_title("milliseconds of waiting per step")
        _from_zero(target)
        _draw_along(size, axis, _values(lines, "sent_bytes", 1e-6))
        size.set_title("megabytes that members sent")
        _from_zero(size)
        _name_lines(figure, speed, _label(title) or f"along {_label(axis.name)}")
        return figure


def _from_zero(axes: Axes) -> None:
    """The vertical axis from 0 to a little above the highest mark."""
    axes.set_ylim(0, 1.06 * (axes.dataLim.y1 if axes.dataLim.y1 > 0 else 1.0))


Along = dict[str, dict[str, float]]
"""Of each line: value of the axis -> figure."""


def _values(lines: Mapping[str, Mapping[str, Any]], key: str, unit: float = 1.0) -> Along:
    return {
        label: {value: point[key] * unit for value, point in line.items() if point[key] is not None}
        for label, line in lines.items()
    }


def _ranges(lines: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Lowest and highest of the seeds, where there are several."""
    return {
        label: {v: (p["low"], p["high"]) for v, p in line.items() if p["runs"] > 1}
        for label, line in lines.items()
    }


def _draw_along(
    axes: Axes,
    axis: Axis,
    lines: Along,
    ranges: Mapping[str, Mapping[str, tuple[float, float]]] | None = None,
) -> None:
    """Lines over an axis of numbers, marks over one of names."""
    numbers = axis.numbers
    places = numbers if numbers is not None else [float(i) for i in range(len(axis.values))]
    at = dict(zip((value.label for value in axis.values), places, strict=True))
    for place, (label, line) in enumerate(lines.items()):
        colour, dashes = _look(place)
        x, y = [at[value] for value in line], list(line.values())
        style = f"o{dashes}" if numbers is not None else "o"
        axes.plot(x, y, style, color=colour, label=_label(label) or "all", ms=6)
        for value, (low, high) in ((ranges or {}).get(label) or {}).items():
            axes.plot([at[value]] * 2, [low, high], color=colour, lw=1.2, alpha=0.6)
    axes.set_xlabel(_label(_AXIS.get(axis.name, axis.name)))
    if numbers is None:
        axes.set_xticks(places, [_label(value.label) for value in axis.values])
        axes.set_xlim(-0.5, len(places) - 0.5)
    elif len(places) <= 7 and min(places) > 0 and max(places) / min(places) >= 8:
        axes.set_xscale("log")
        axes.set_xticks(places, [value.label for value in axis.values])
        axes.minorticks_off()
    else:
        span = (max(places) - min(places)) or 1.0
        kept = [0]  # of values that lie close together, only some are written
        for place in range(1, len(places)):
            if abs(places[place] - places[kept[-1]]) >= 0.06 * span:
                kept.append(place)
        axes.set_xticks([places[i] for i in kept], [axis.values[i].label for i in kept])


_AXIS = {"rtt": "round trip (milliseconds)", "delay": "delay (steps)", "every": "every (steps)"}


def _name_lines(figure: Figure, axes: Axes, heading: str) -> None:
    """The heading, and below it the names of the lines in as many columns as there is room for."""
    handles, labels = axes.get_legend_handles_labels()
    widest = max(map(len, labels), default=0)
    ncols = max(1, min(len(labels), 126 // (widest + 6)))
    legend = figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.012, _below_top(figure, _HEADING_POINTS)),
        ncols=ncols,
        borderpad=0,
        borderaxespad=0,
        handlelength=2.4,
    )
    legend.set_in_layout(False)
    _write_heading(figure, heading, _HEADING_POINTS + 20 * -(-len(labels) // ncols))


# --- common ---


def _curve(folder: Path, row: Row, metric: str, place: int) -> Curve:
    evaluations = sorted(runs.read_metrics(folder, "eval"), key=lambda record: record["t"])
    points = [
        (record["t"], record["step"], record[metric])
        for record in evaluations
        if isinstance(record.get(metric), int | float)
    ]
    t, steps, values = zip(*points, strict=True) if points else ((), (), ())
    return Curve(row, t, steps, values, *_look(place))


def _look(place: int) -> tuple[str, str]:
    """Colour and dashes of the n-th line; 28 differ."""
    turn, colour = divmod(place, len(_COLOURS))
    dashes = (colour + turn) % len(_DASHES)
    return _COLOURS[colour], _DASHES[dashes]


def _heading(summary: Mapping[str, Any], *more: str | None) -> str:
    """Task, members, device and network, as far as they are known."""
    task = str(summary["task"] or "").rpartition(":")[2]
    members, device = summary["members"], summary["device"] or "host"
    mixed = not isinstance(device, str) or ":" in device or "," in device
    fleet = f"{members} members ({_listed(device)})" if mixed else f"{members} x {device}"
    network = _listed(summary["network"] or "none")
    network = "no network emulated" if network == "none" else network
    return ", ".join(_label(str(part)) for part in (task, *more, fleet, network) if part)


def _listed(names: Any) -> str:
    return names if isinstance(names, str) else ", ".join(dict.fromkeys(map(str, names)))


def _draw_header(
    figure: Figure, axes: Axes, compared: Comparison, summary: Mapping[str, Any], heading: str
) -> None:
    """The heading, and the legend of `axes` in as many columns as there is room for.

    matplotlib's layout lets a title and a legend above the panels overlap: the room is taken here.
    """
    handles, labels = axes.get_legend_handles_labels()
    widest = max(map(len, labels), default=0)
    ncols = max(1, min(len(labels), 126 // (widest + 6)))
    remark = _remark(compared, summary)
    legend = figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.012, _below_top(figure, _HEADING_POINTS)),
        ncols=ncols,
        title=remark or None,
        title_fontsize=12,
        alignment="left",
        borderpad=0,
        borderaxespad=0,
        columnspacing=1.6,
        handlelength=2.4,
    )
    legend.set_in_layout(False)
    legend.get_title().set_color(_TARGET)
    rows = -(-len(labels) // ncols) + bool(remark)
    _write_heading(figure, heading, _HEADING_POINTS + 20 * rows)


_HEADING_POINTS = 34.0


def _write_heading(figure: Figure, heading: str, room_points: float = _HEADING_POINTS) -> None:
    """The heading at the top, and that much room for it and what follows it."""
    # Long mixes of devices and networks get smaller letters, down to what a phone can show.
    size = 18 * min(1.0, max(0.6, 6.2 * figure.get_figwidth() / max(1, len(heading))))
    place = {"x": 0.012, "y": _below_top(figure, 8), "ha": "left", "va": "top"}
    title = figure.suptitle(heading, fontsize=size, fontweight="bold", **place)
    title.set_in_layout(False)
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0, 0, 1, _below_top(figure, room_points)))


def _below_top(figure: Figure, points: float) -> float:
    return 1 - points / 72 / float(figure.get_figheight())


def _remark(compared: Comparison, summary: Mapping[str, Any]) -> str:
    backend = (summary.get("emulation") or {}).get("backend")
    parts = [
        f"network emulated by '{_label(str(backend))}'" if backend not in (None, "none") else ""
    ]
    if compared.target is not None and len(compared.rows) > 1:
        parts.append(f"speed-up against {_label(compared.rows[0].label)}")
    return "; ".join(part for part in parts if part)


def _label(text: str) -> str:
    """Text as it is: matplotlib would take what stands between dollars for a formula."""
    return units.printable(text).replace("$", r"\$")


def _figure(inches: tuple[float, float] = _INCHES) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.09, hspace=0.03, wspace=0.03)
    return Figure(figsize=inches, dpi=_DPI, layout=layout)


def _draw_notes(figure: Figure, compared: Comparison) -> None:
    """Warnings at the bottom; as supxlabel, for which the layout keeps room."""
    untrusted = tuple(f"{row.label}:" for row in compared.rows if row.trusted is False)
    lines = [
        ("* " if note.startswith(untrusted) else "") + _label(note) for note in compared.notes[:4]
    ]
    if lines:
        text = "\n".join(lines)
        figure.supxlabel(text, x=0.012, ha="left", fontsize=11.5, color="#B00020")


def _styled() -> Any:
    import matplotlib as mpl

    settings: Any = mpl.rcParamsDefault | _STYLE
    return mpl.rc_context(settings)


def _save(draw: Callable[[], Figure], path: Path) -> Path:
    """All of the file or none of it."""
    if find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib", "pip install 'edgetrain[lab]'")
    figure = draw()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with _styled():
                figure.savefig(draft, format="png")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return path
