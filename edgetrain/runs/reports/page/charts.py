"""The charts of a page: figure and loss, where each second went, the timeline of rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgetrain.runs import shapes
from edgetrain.runs.data import mean_parts
from edgetrain.runs.kept import MemberLines
from edgetrain.runs.reports import units
from edgetrain.runs.reports.happenings import placed
from edgetrain.runs.reports.page.story import Story
from edgetrain.runs.reports.page.svg import Line, Mark, Scale, figure, lines, rect, ruler, text

Points = tuple[tuple[float, float], ...]

MOST_BARS, MOST_LANES = 24, 8
"""Members with a bar of their own, and members in a timeline."""
_ROUNDS_SHOWN = 9
_MOST_STACKED = 12
"""Exchanges in flight above a member, at most; more are drawn in the uppermost row."""


@dataclass(frozen=True)
class View:
    """The x axis of a chart: its name, its label and its format of a value."""

    name: str
    label: str
    say: Callable[[float], str]
    of: Callable[[Story, NDArray[Any], NDArray[Any]], NDArray[Any]]
    """The places of moments: (story, seconds, steps)."""


VIEWS = (
    View("time", "time since training began", units.duration, lambda story, t, step: t),
    View("steps", "steps of a member", lambda x: f"{x:,.0f}", lambda story, t, step: step),
    View("bytes", "sent and received by all members", units.size, lambda s, t, step: s.bytes_at(t)),
)


def figure_chart(stories: Sequence[Story], view: View) -> str:
    """The task's figure of every run along `view`, with the target."""
    metric = stories[0].summary.get("metric") or "accuracy"
    target = stories[0].summary.get("target")
    every = [tuple(figures_of(story, metric, view)) for story in stories]
    say = words_of(metric)
    mark = float(target) if isinstance(target, int | float) else None
    low, high = value_range(
        [y for points in every for _, y in points], mark, units.is_fraction(metric)
    )
    axis = Scale(low, high, metric, say)
    signs = signs_of(stories, every, axis) if view is VIEWS[0] else []
    return _chart(every, stories, view, axis, mark, f"{metric} ({view.name})", signs)


def figures_of(story: Story, metric: str, view: View | None = None) -> list[tuple[float, float]]:
    """The task's figures along `view` (None: time)."""
    found = [record for record in story.evaluations if _known(record.get(metric))]
    t, step = (np.array([each.get(key) or 0.0 for each in found]) for key in ("t", "step"))
    places = (view or VIEWS[0]).of(story, t, step)
    return [*zip(map(float, places), (float(each[metric]) for each in found), strict=True)]


def end_of_figures(stories: Sequence[Story]) -> float:
    """When the last figure was taken, in seconds: charts against time end there."""
    return max((record["t"] for story in stories for record in story.evaluations), default=0.0)


def signs_of(stories: Sequence[Story], every: Sequence[Points], y: Scale) -> list[Mark]:
    """Signs on the lines of figures against time, where something happened."""
    end, signs = end_of_figures(stories), []
    for place, (story, points) in enumerate(zip(stories, every, strict=True)):
        for each, height in placed(story.happened, points, (y.low, y.high), end):
            said = f"{story.label}: {each.said}, {units.duration(each.t)}"
            signs.append(Mark(each.kind, each.t, height, place, said))
    return signs


def loss_chart(stories: Sequence[Story], view: View) -> str:
    """The training loss of every run along `view`: the median of its members, smoothed."""
    every = [losses_of(story, view) for story in stories]
    band = every[0] if len(stories) == 1 and len(stories[0].members) > 1 else []
    values = [y for points in every for _, y, *_ in points]
    low, high = value_range([*values, *(y for _, _, *ends in band for y in ends)], None, False)
    axis = Scale(low, high, LOSS + ", shaded: their range" * bool(band), _plain)
    medians = [tuple((x, y) for x, y, *_ in points) for points in every]
    shaded = [(x, *(min(max(y, low), high) for y in ends)) for x, _, *ends in band]
    return _chart(medians, stories, view, axis, None, f"{LOSS} ({view.name})", band=shaded)


def traffic_chart(story: Story) -> str:
    """Bytes of all members of a run against time; "": not known."""
    steps, view = story.steps, VIEWS[0]
    if not len(steps):
        return ""
    drawn, most = [], 1.0
    for place, way in enumerate(("sent", "received")):
        carried = steps[f"{way}_bytes"]
        drawn.append(Line(way, tuple(zip(steps["t"], carried, strict=True)), place))
        most = max(most, float(carried.max(initial=0.0)))
    label = "sent, and received (dashed), by all members"
    axis = Scale(0.0, 1.04 * most, label, units.size)
    return lines(drawn, Scale(0.0, story.seconds or 1.0, view.label, view.say), axis, label)


def _chart(
    every: Sequence[Points],
    stories: Sequence[Story],
    view: View,
    y: Scale,
    mark: float | None,
    title: str,
    signs: Sequence[Mark] = (),
    band: Sequence[tuple[float, ...]] = (),
) -> str:
    most = max((x for points in every for x, _ in points), default=1.0) or 1.0
    drawn = [
        Line(story.label, tuple((x, min(max(at, y.low), y.high)) for x, at in points), place)
        for place, (story, points) in enumerate(zip(stories, every, strict=True))
    ]
    said = "" if mark is None else f"target {y.say(mark)}"
    return lines(drawn, Scale(0.0, most, view.label, view.say), y, title, mark, said, signs, band)


LOSS = "training loss (median of members)"


def losses_of(story: Story, view: View | None = None) -> list[tuple[float, ...]]:
    """Losses along `view` (None: time): median, least and greatest of members, in 150 stretches of
    the run."""
    steps = story.steps[~np.isnan(story.steps["loss"])]
    if not len(steps):
        return []
    size = max(len(steps) // 150, 1)
    some = [steps[first : first + size] for first in range(0, len(steps), size)]
    last = np.array([each[-1] for each in some])
    places = (view or VIEWS[0]).of(story, last["t"], last["step"])
    ends = ((np.median(each), each.min(), each.max()) for each in (s["loss"] for s in some))
    return [(float(x), *map(float, losses)) for x, losses in zip(places, ends, strict=True)]


def value_range(values: Sequence[float], mark: float | None, fraction: bool) -> tuple[float, float]:
    """The range of an axis: all values, but not the few far beyond the rest."""
    finite = sorted([value for value in values if math.isfinite(value)])
    if not finite:
        return 0.0, 1.0
    low, high = finite[0], finite[-1]
    if not fraction and high > 20 * (abs(statistics.median(finite)) + 1e-9):
        high = 4 * finite[int(0.75 * (len(finite) - 1))] or high
    if mark is not None:
        low, high = min(low, mark), max(high, mark)
    room = 0.04 * (high - low) or 0.05 * (abs(high) or 1.0)
    high = min(high + room, 1.0) if fraction and high <= 1 else high + room
    return (max(low - room, 0.0) if low >= 0 else low - room), high


def _known(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def words_of(metric: str) -> Callable[[float], str]:
    """How values of a figure are said."""
    return _percent if units.is_fraction(metric) else _plain


def _percent(value: float) -> str:
    return f"{value * 100:.4g} %"


def _plain(value: float) -> str:
    return f"{value:.4g}"


# -- where each second went --------------------------------------------------------------------

PARTS = (
    ("compute", "compute"),
    ("wait", "waiting for replies"),
    ("overhead", "overhead"),
    ("eval", "evaluation"),
    ("end", "waiting at the end"),
)
_IN_TIME = ("eval", "compute", "overhead", "wait", "end")
"""Parts of a step in the order in which they are drawn. Waiting comes late: that is where a
synchronous step stands still."""


def in_time(step: Any) -> list[tuple[str, float]]:
    """The parts of a step, a row of `MemberLines.steps`, by kind, in the order of time; seconds."""
    return [(kind, float(step[f"{kind}_s"])) for kind in _IN_TIME]


def begin_of(steps: Any) -> Any:
    """When steps began, the end of each less its parts."""
    return steps["t"] - sum(steps[part] for part in shapes.PARTS)


def bars(stories: Sequence[Story]) -> str:
    """A bar for every member (one for each run, where there are several): the parts of a step."""
    rows = _rows(stories)
    if not rows:
        return ""
    most = max(sum(parts) for _, parts in rows) or 1.0
    left, width, pitch = 150.0, 944.0, 26.0
    axis = Scale(0.0, most, "", units.duration)
    bottom = pitch * len(rows) + 6
    drawn = ruler(axis, (left, width - 70), 0.0, bottom, 5)
    for number, (name, parts) in enumerate(rows):
        y, at = 4 + pitch * number, left
        drawn.append(text(left - 8, y + 13, name, "end", "tick"))
        for kind, said, seconds in _busy_first(parts):
            wide = axis.place(seconds, 0.0, width - 70 - left)
            share = units.share(seconds / sum(parts)) if sum(parts) else "-"
            drawn.append(
                rect(at, y, wide, 17, kind, f"{name}: {said} {units.duration(seconds)}, {share}")
            )
            at += wide
        drawn.append(text(at + 6, y + 13, units.duration(sum(parts)), "start", "tick"))
    return figure(drawn, width, bottom + 20, "where the time of a step goes")


def _rows(stories: Sequence[Story]) -> list[tuple[str, tuple[float, ...]]]:
    if len(stories) > 1:
        return [(story.label, mean_parts(story.members.values())) for story in stories]
    members = sorted(stories[0].members.values(), key=_busiest)
    shown = members[:MOST_BARS]
    rows = [(called(member), member.parts) for member in shown]
    if len(members) > len(shown):
        rest = members[len(shown) :]
        rows.append((f"{len(rest)} more, mean", mean_parts(rest)))
    return rows


def _busy_first(parts: tuple[float, ...]) -> list[tuple[str, str, float]]:
    """Kind, name and seconds of the parts: what the member does, then what it waits for. So bars
    sorted by how busy a member is show their order."""
    seconds = {kind: (said, value) for (kind, said), value in zip(PARTS, parts, strict=True)}
    return [(kind, *seconds[kind]) for kind in ("compute", "overhead", "eval", "wait", "end")]


def _busiest(member: MemberLines) -> tuple[float, int, str]:
    compute, _, overhead, evaluation, _ = member.parts
    # To a microsecond: what is noise must not decide the order.
    return -round(compute + overhead + evaluation, 6), *units.natural(member.name)


def called(member: MemberLines) -> str:
    """Its name, and that of its machine beside it, cut to 20 characters."""
    return member.called if len(member.called) <= 20 else member.called[:19] + "…"


# -- the timeline of rounds --------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A stretch of a run worth a timeline; seconds."""

    name: str
    begin: float
    end: float


def windows(story: Story) -> list[Interval]:
    """The beginning and the middle of a run, some rounds of each; [] if nothing was exchanged."""
    end, length = story.seconds, length_of(story)
    if length <= 0:
        return []
    if 2.5 * length > end:
        return [Interval("the whole run", 0.0, end)]
    return [Interval("the beginning", 0.0, length), middle_of(story, length)]


def middle_of(story: Story, length: float) -> Interval:
    """So many seconds in the middle of a run, or all of it."""
    length = min(length, story.seconds)
    begin = (story.seconds - length) / 2
    return Interval("the middle", begin, begin + length)


def length_of(story: Story) -> float:
    """Seconds in which some rounds of a run can be seen; 0 if nothing was exchanged."""
    every = [member.exchanges for member in story.members.values()]
    lengths = np.concatenate([each["t"] - each["submitted_t"] for each in every] or [[]])
    if not len(lengths):
        return 0.0
    gaps = np.concatenate([np.diff(each["submitted_t"]) for each in every])
    gap = float(np.median(gaps)) if len(gaps) else story.seconds
    return min(max(_ROUNDS_SHOWN * gap, 2.2 * float(np.median(lengths))), story.seconds)


def lanes_in_words(story: Story, most: int = MOST_LANES) -> str:
    """The members that a timeline shows, where these are not all: ", the first 3 of 8 members"."""
    count = sum(bool(len(member.steps)) for member in story.members.values())
    return f", the first {most} of {count:,} members" if count > most else ""


def shares_of_members(story: Story) -> list[tuple[str, list[float]]]:
    """Differences between members: for each part of a step, its seconds at the member that has
    the least of it, at a tenth, a half and nine tenths of members, and at that with the most."""
    every = [member.parts for member in story.members.values() if len(member.steps)]
    shares = []
    for place, (_, said) in enumerate(PARTS):
        values = sorted(parts[place] for parts in every)
        last = len(values) - 1
        if values and values[-1] > 0:
            shares.append((said, [values[round(share * last)] for share in (0, 0.1, 0.5, 0.9, 1)]))
    return shares


def timeline(story: Story, window: Interval, most: int = MOST_LANES) -> str:
    """The first members in a window: what each does, and above it its exchanges in flight."""
    begin, end = window.begin, window.end
    members = [m for m in story.in_order() if len(m.steps)][:most]
    axis = Scale(begin, end, "", units.duration)
    widest = max((len(called(member)) for member in members), default=0)
    left, right, y = max(64.0, 16 + 7.0 * widest), 944.0, 8.0
    lanes: list[str] = []
    for member in members:
        rows = stacked(seen_between(member, begin, end))
        high = 7.0 * max(len(rows), 1)
        for number, row in enumerate(rows):
            for exchange in row:
                lanes.append(_flight(exchange, axis, left, right, y + high - 7.0 * (number + 1)))
        y += high + 1
        lanes.append(text(left - 8, y + 12, called(member), "end", "tick"))
        lanes.append(rect(left, y, right - left, 15, "lane"))
        for step in steps_between(member, begin, end):
            lanes += _activity(step, axis, left, right, y)
        y += 15 + 9
    lanes = ruler(axis, (left, right), 4.0, y, 8) + lanes
    title = f"what {len(members)} members did from {begin:.3g} to {end:.3g} seconds"
    return figure(lanes, right + 16, y + 20, title)


def steps_between(member: MemberLines, begin: float, end: float) -> NDArray[Any]:
    steps = member.steps
    shown: NDArray[Any] = steps[(steps["t"] > begin) & (begin_of(steps) < end)]
    return shown


def seen_between(member: MemberLines, begin: float, end: float) -> NDArray[Any]:
    """Exchanges in flight, or waiting to be applied."""
    every = member.exchanges
    return every[(every["t"] > begin) & (every["submitted_t"] < end)]


def _activity(step: Any, axis: Scale, left: float, right: float, y: float) -> Iterable[str]:
    at, words = float(begin_of(step)), dict(PARTS)
    for kind, seconds in in_time(step):
        said = words[kind]
        start, stop = max(at, axis.low), min(at + seconds, axis.high)
        if stop > start:
            x = axis.place(start, left, right)
            wide = axis.place(stop, left, right) - x
            title = f"step {step['step']:.0f}: {said} {units.duration(seconds)}"
            # A hairline of the background tells steps apart where there is room for one.
            yield rect(x, y, wide - (0.6 if wide > 3 else 0.0), 15, kind, title)
        at += seconds


def _flight(exchange: Any, axis: Scale, left: float, right: float, y: float) -> str:
    applied, submitted, arrived = (float(exchange[k]) for k in ("t", "submitted_t", "arrived_t"))
    start, stop = max(submitted, axis.low), min(arrived, axis.high)
    x = axis.place(start, left, right)
    wide = max(axis.place(stop, left, right) - x, 0.8)
    until = min(applied, axis.high)
    rest = axis.place(until, left, right) - x - wide
    took = units.duration(arrived - submitted)
    title = f"round {exchange['round']:.0f}: answered after {took}"
    kept = rect(x + wide, y + 2, rest, 1.6, "kept", title) if rest > 0.5 else ""
    return rect(x, y, wide, 5, "flight", title) + kept


def stacked(exchanges: NDArray[Any]) -> list[list[Any]]:
    """Rows in which no two exchanges overlap."""
    rows: list[list[Any]] = []
    for exchange in exchanges[np.argsort(exchanges["submitted_t"], kind="stable")]:
        free = next((row for row in rows if row[-1]["t"] <= exchange["submitted_t"]), None)
        if free is not None:
            free.append(exchange)
        elif len(rows) < _MOST_STACKED:
            rows.append([exchange])
        else:
            rows[-1].append(exchange)
    return rows
