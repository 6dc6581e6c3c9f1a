"""Figures for a paper: each panel of a report in a file of its own, one or two columns wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.errors import ConfigError, did_you_mean, explain_os_errors
from edgetrain.runs.data import mean_parts
from edgetrain.runs.reports import units
from edgetrain.runs.reports.page.charts import (
    PARTS,
    begin_of,
    figures_of,
    in_time,
    length_of,
    losses_of,
    middle_of,
    seen_between,
    stacked,
    steps_between,
)
from edgetrain.runs.reports.page.story import Story
from edgetrain.runs.reports.plot.bars import draw_stacked
from edgetrain.runs.reports.plot.style import COLOURS, as_text, look_of, new_figure, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
COLUMNS = {"one-column": 3.5, "two-columns": 7.16}
"""Widths in inches, as most journals of two columns have them."""

_LETTERS = {
    "font.size": 8, "axes.titlesize": 8, "lines.linewidth": 1.3, "pdf.fonttype": 42,
    "svg.fonttype": "none", "hatch.linewidth": 0.6,
}  # fmt: skip
_LANES, _ROW = 4, 0.16
_LOOKS = {
    "compute": ("#4A4A4A", ""),
    "wait": ("#F2F2F2", "//////"),
    "overhead": ("#000000", ""),
    "eval": ("#A8A8A8", "...."),
    "end": ("#F2F2F2", "||||"),
}


def formats_of(text: str) -> list[str]:
    """The formats in a comma-separated list. ConfigError for one that cannot be written."""
    formats = [each.strip() for each in text.split(",") if each.strip()]
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"--format {name}", did_you_mean(name, FORMATS))
    if not formats:
        raise ConfigError("--format names no format", f"known: {', '.join(FORMATS)}")
    return formats


def paper_figures(stories: Sequence[Story], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Draw figure, loss, seconds of a step and timeline of these runs into a folder, in both widths
    and each format. Returns the files. ConfigError if one cannot be written, or for no matplotlib.
    """
    panels: dict[str, Callable[[Axes], None]] = {
        "figure": partial(_draw_figure, stories),
        "loss": partial(_draw_loss, stories),
        "seconds": partial(_draw_seconds, stories),
    }
    for number, story in enumerate(stories, 1):
        if length_of(story):
            name = f"timeline-{number}" if len(stories) > 1 else "timeline"
            panels[name] = partial(_draw_timeline, story)
    with explain_os_errors(f"cannot make {folder}", "choose another one"):
        folder.mkdir(parents=True, exist_ok=True)
    return [
        save(partial(_drawn, draw, inches), folder / f"{name}-{columns}.{form}", _LETTERS)
        for name, draw in panels.items()
        for columns, inches in COLUMNS.items()
        for form in formats
    ]


def _drawn(draw: Callable[[Axes], None], inches: float) -> Figure:
    with styled(_LETTERS):
        figure = new_figure((inches, 2.3))
        draw(figure.add_subplot())
        return figure


def _draw_figure(stories: Sequence[Story], axes: Axes) -> None:
    metric = str(stories[0].summary.get("metric") or "accuracy")
    fraction = units.is_fraction(metric)
    factor = 100.0 if fraction else 1.0
    for place, story in enumerate(stories):
        _line(axes, story, place, [(t, factor * y) for t, y in figures_of(story, metric)])
    target = stories[0].summary.get("target")
    if isinstance(target, int | float):
        axes.axhline(factor * target, color="#555555", lw=0.8, ls=":")
    axes.set_ylabel(f"{metric} (%)" if fraction else metric)
    _finish(axes, stories)


def _draw_loss(stories: Sequence[Story], axes: Axes) -> None:
    for place, story in enumerate(stories):
        _line(axes, story, place, [(t, loss) for t, loss, *_ in losses_of(story)])
    axes.set_ylabel("training loss (median)")
    _finish(axes, stories)


def _line(axes: Axes, story: Story, place: int, points: Sequence[tuple[float, float]]) -> None:
    colour, dashes = look_of(place)
    t, values = zip(*points, strict=True) if points else ((), ())
    axes.plot(t, values, dashes, color=colour, label=as_text(story.label))


def _finish(axes: Axes, stories: Sequence[Story]) -> None:
    axes.set_xlabel("time since training began (s)")
    axes.set_xlim(left=0)
    if len(stories) > 1:
        axes.legend(loc="best")


def _draw_seconds(stories: Sequence[Story], axes: Axes) -> None:
    parts = [mean_parts(story.members.values()) for story in stories]
    names = [as_text(story.label) for story in stories]
    draw_stacked(axes, names, parts, [look_of(place)[0] for place in range(len(names))])
    axes.set_xlabel(axes.get_title(loc="left"))
    axes.set_title("")
    handles, _ = axes.get_legend_handles_labels()
    _legend_above(axes, handles)


def _draw_timeline(story: Story, axes: Axes) -> None:
    """A few members of a run: what each does, and above it its exchanges in flight."""
    window = middle_of(story, length_of(story))
    axes.set_xlim(window.begin, window.end)
    y, ticks = 0.0, {}
    for member in story.in_order()[:_LANES]:
        for row in stacked(seen_between(member, window.begin, window.end)):
            spans = [(e["submitted_t"], e["arrived_t"] - e["submitted_t"]) for e in row]
            axes.broken_barh(spans, (y, 0.7 * _ROW), color=COLOURS[1], lw=0)
            y += _ROW
        ticks[y + 0.25] = as_text(member.name)
        for step in steps_between(member, window.begin, window.end):
            at = float(begin_of(step))
            for kind, seconds in in_time(step):
                look = _look(kind)
                axes.broken_barh([(at, seconds)], (y, 0.5), linewidth=0, **look)
                at += seconds
        y += 0.5 + 2 * _ROW
    axes.set_ylim(y, -_ROW)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.grid(visible=False)
    axes.set_xlabel(f"{as_text(story.label)}: time since training began (s)")
    from matplotlib.patches import Patch

    words = dict(PARTS)
    handles: list[Any] = [Patch(facecolor=COLOURS[1], label="in flight")]
    handles += [
        Patch(label=words[kind], linewidth=0, **_look(kind))
        for kind in ("compute", "wait", "overhead")
    ]
    _legend_above(axes, handles)


def _look(kind: str) -> dict[str, Any]:
    colour, hatch = _LOOKS[kind]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": "#707070"}


def _legend_above(axes: Axes, handles: Sequence[Any]) -> None:
    """A legend above the panel, as wide as the picture allows."""
    narrow = float(axes.figure.get_window_extent().width) < 5 * axes.figure.dpi
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0,
        ncols=2 if narrow else len(handles), columnspacing=1.0, handlelength=1.2)  # fmt: skip
