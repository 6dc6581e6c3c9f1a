"""Draw steps per second against round trip, from rows of a measurement."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.errors import ConfigError
from edgetrain.runs.reports.plot.ends import LineEnd, label_ends
from edgetrain.runs.reports.plot.style import (
    TARGET,
    as_text,
    look_of,
    new_figure,
    save,
    styled,
    write_heading,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NAMES = 4
"""Strategies that the heading names."""


def latency_figure(rows: Iterable[Mapping[str, Any]], path: Path, title: str = "") -> Path:
    """Draw steps per second against round trip, relative to the same strategy's at 0 ms.

    Each row has `strategy`, `rtt_ms` and `steps_per_second`; rows with the same strategy and round
    trip count as their median. Raises ConfigError if there is no row, if a strategy has none at
    0 ms, or if the file cannot be written. Returns `path`.
    """
    return save(lambda: draw_latency(rows, title), path)


def draw_latency(rows: Iterable[Mapping[str, Any]], title: str = "") -> Figure:
    """The figure of `latency_figure`. Untrusted points are hollow, with an explanation."""
    rows = list(rows)
    relative = relative_speed(rows)
    with styled():
        figure = new_figure((9.6, 5.6))
        doubtful = _doubtful(rows)
        write_heading(figure, as_text(latency_message(relative, bool(doubtful))), [as_text(title)])
        axes = figure.add_subplot()
        for place, points in enumerate(relative.values()):
            colour, dashes = look_of(place)
            rtt_ms, speed = zip(*points, strict=True)
            axes.plot(rtt_ms, speed, f"o{dashes}", color=colour, ms=7, clip_on=False, zorder=3)
        _draw_doubt(figure, axes, relative, doubtful)
        axes.axhline(1.0, color=TARGET, lw=1.2, ls=(0, (4, 3)), zorder=1)
        axes.set_xlabel("round trip (milliseconds)")
        axes.set_ylabel("steps per second, relative to 0 ms")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.0f} %")
        axes.set_ylim(0, max(1.1, 1.05 * max(s for points in relative.values() for _, s in points)))
        axes.set_xlim(0, max(points[-1][0] for points in relative.values()) or 1.0)
        label_ends(figure, {axes: list(_ends(relative))})
        return figure


def latency_message(relative: Mapping[str, Sequence[tuple[float, float]]], doubtful: bool) -> str:
    """Steps a second at the longest round trip, relative to 0 ms. `relative`: for each
    strategy (round trip in ms, relative speed), as `relative_speed` has them."""
    longest = max(points[-1][0] for points in relative.values())
    speeds = {name: points[-1][1] for name, points in relative.items() if points[-1][0] == longest}
    ranked = sorted(speeds, key=lambda name: -speeds[name])[:MOST_NAMES]
    kept, *others = (f"{name} keeps {speeds[name] * 100:.0f} %" for name in ranked)
    rest = "".join(", " + other.replace(" keeps", "") for other in others)
    doubt = " (not all of it to be trusted)" if doubtful else ""
    return f"At a round trip of {longest:,.0f} ms {kept} of its speed{rest}{doubt}"


def _ends(relative: Mapping[str, list[tuple[float, float]]]) -> Iterable[LineEnd]:
    for place, (strategy, points) in enumerate(relative.items()):
        rtt_ms, speed = points[-1]
        yield LineEnd(rtt_ms, speed, f"{strategy}, {speed * 100:.0f} %", look_of(place)[0])


def _doubtful(rows: Iterable[Mapping[str, Any]]) -> set[tuple[str, float]]:
    """Strategy and round trip of runs that are untrusted or did not keep their pace."""
    return {
        (row["strategy"], float(row["rtt_ms"]))
        for row in rows
        if row.get("trusted") is False or row.get("overrun")
    }


def _draw_doubt(
    figure: Figure,
    axes: Axes,
    relative: Mapping[str, list[tuple[float, float]]],
    doubtful: set[tuple[str, float]],
) -> None:
    """Draw hollow points for runs that are untrusted or did not keep their pace."""
    for place, (strategy, points) in enumerate(relative.items()):
        for rtt_ms, speed in points:
            if (strategy, rtt_ms) in doubtful:
                axes.plot([rtt_ms], [speed], "o", color=look_of(place)[0], mfc="white",
                          mew=2, ms=9, clip_on=False, zorder=4)  # fmt: skip
    if doubtful:
        text = "hollow: the emulation was late, or members did not keep their pace"
        figure.supxlabel(text, x=0.012, ha="left", fontsize=11.5, color="#B00020")


def relative_speed(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """For each strategy (rtt_ms, steps per second relative to 0 ms), in order of round trip."""
    curves: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        at = curves.setdefault(row["strategy"], {}).setdefault(float(row["rtt_ms"]), [])
        at.append(float(row["steps_per_second"]))
    relative = {}
    for strategy, by_rtt in curves.items():
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
