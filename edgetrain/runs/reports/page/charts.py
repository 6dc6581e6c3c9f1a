"""The charts of a page: figure and loss, where each second went, the timeline of rounds."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edgetrain.runs.reports import units
from edgetrain.runs.reports.happenings import KINDS, height_at, marked
from edgetrain.runs.reports.page.story import ExchangeTimes, MemberStory, Parts, Step, Story
from edgetrain.runs.reports.page.svg import Line, Mark, Scale, figure, lines, rect, text

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
    of: Callable[[Story, float, int], float]
    """The place of a moment: (story, seconds, step)."""


VIEWS = (
    View("time", "time since training began", units.duration, lambda story, t, step: t),
    View("steps", "steps of a member", lambda x: f"{x:,.0f}", lambda story, t, step: step),
    View("bytes", "sent and received by all members", units.size, lambda s, t, step: s.bytes_at(t)),
)


def figure_chart(stories: Sequence[Story], view: View) -> str:
    """The task's figure of every run along `view`, with the target."""
    metric = stories[0].summary.get("metric") or "accuracy"
    target = stories[0].summary.get("target")
    every = [
        tuple(
            (view.of(story, record["t"], int(record.get("step") or 0)), float(record[metric]))
            for record in story.evaluations
            if _known(record.get(metric))
        )
        for story in stories
    ]
    say = _percent if units.is_fraction(metric) else _plain
    mark = float(target) if isinstance(target, int | float) else None
    low, high = value_range(
        [y for points in every for _, y in points], mark, units.is_fraction(metric)
    )
    axis = Scale(low, high, metric, say)
    signs = signs_of(stories, every, axis) if view is VIEWS[0] else []
    return _chart(every, stories, view, axis, mark, f"{metric} ({view.name})", signs)


def end_of_figures(stories: Sequence[Story]) -> float:
    """When the last figure was taken, in seconds: charts against time end there."""
    return max((record["t"] for story in stories for record in story.evaluations), default=0.0)


def signs_of(stories: Sequence[Story], every: Sequence[Points], y: Scale) -> list[Mark]:
    """Signs on the lines of figures against time, where something happened."""
    end, signs = end_of_figures(stories), []
    for place, (story, points) in enumerate(zip(stories, every, strict=True)):
        for kind in KINDS:
            for each in marked(story.happened, kind, end):
                height = min(max(height_at(points, each.t, y.low), y.low), y.high)
                said = f"{story.label}: {each.said}, {units.duration(each.t)}"
                signs.append(Mark(kind, each.t, height, place, said))
    return signs


def loss_chart(stories: Sequence[Story], view: View) -> str:
    """The training loss of every run along `view`: the median of its members, smoothed."""
    every = [tuple(losses_of(story, view)) for story in stories]
    values = [y for points in every for _, y in points]
    low, high = value_range(values, None, False)
    axis = Scale(low, high, LOSS, _plain)
    return _chart(every, stories, view, axis, None, f"{LOSS} ({view.name})")


def _chart(
    every: Sequence[Points],
    stories: Sequence[Story],
    view: View,
    y: Scale,
    mark: float | None,
    title: str,
    signs: Sequence[Mark] = (),
) -> str:
    most = max((x for points in every for x, _ in points), default=1.0) or 1.0
    drawn = [
        Line(story.label, _within(points, y), place)
        for place, (story, points) in enumerate(zip(stories, every, strict=True))
    ]
    said = "" if mark is None else f"target {y.say(mark)}"
    return lines(drawn, Scale(0.0, most, view.label, view.say), y, title, mark, said, signs)


def _within(points: Points, y: Scale) -> Points:
    return tuple((x, min(max(value, y.low), y.high)) for x, value in points)


LOSS = "training loss (median of members)"


def losses_of(story: Story, view: View | None = None) -> list[tuple[float, float]]:
    """Losses along `view` (None: time): medians of members in 150 stretches of the run."""
    steps = [
        step for member in story.members.values() for step in member.steps if step.loss is not None
    ]
    if not steps:
        return []
    steps.sort(key=lambda step: step.t)
    view, points = view or VIEWS[0], []
    size = max(len(steps) // 150, 1)
    for first in range(0, len(steps), size):
        some = steps[first : first + size]
        last = some[-1]
        loss = statistics.median(step.loss for step in some if step.loss is not None)
        if math.isfinite(loss):
            points.append((view.of(story, last.t, last.step), loss))
    return points


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


def in_time(step: Step) -> list[tuple[str, float]]:
    """The parts of a step, by kind, in the order of time; seconds."""
    seconds = dict(zip((kind for kind, _ in PARTS), step.parts, strict=True))
    return [(kind, seconds[kind]) for kind in _IN_TIME]


def bars(stories: Sequence[Story]) -> str:
    """A bar for every member (one for each run, where there are several): the parts of a step."""
    rows = _rows(stories)
    if not rows:
        return ""
    most = max(sum(parts) for _, parts in rows) or 1.0
    left, width, pitch = 150.0, 640.0, 26.0
    axis = Scale(0.0, most, "", units.duration)
    drawn = []
    bottom = pitch * len(rows) + 6
    for tick in axis.ticks(5):
        at = axis.place(tick, left, width - 70)
        drawn.append(f'<path class="grid" d="M{at:.1f} 0V{bottom:.1f}"/>')
        drawn.append(text(at, bottom + 14, units.duration(tick), "middle", "tick"))
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


def _rows(stories: Sequence[Story]) -> list[tuple[str, Parts]]:
    if len(stories) > 1:
        return [(story.label, mean_parts(story.members.values())) for story in stories]
    members = sorted(stories[0].members.values(), key=_busiest)
    shown = members[:MOST_BARS]
    rows = [(member.called, mean_parts([member])) for member in shown]
    if len(members) > len(shown):
        rest = members[len(shown) :]
        rows.append((f"{len(rest)} more, mean", mean_parts(rest)))
    return rows


def _busy_first(parts: Parts) -> list[tuple[str, str, float]]:
    """Kind, name and seconds of the parts: what the member does, then what it waits for. So bars
    sorted by how busy a member is show their order."""
    seconds = {kind: (said, value) for (kind, said), value in zip(PARTS, parts, strict=True)}
    return [(kind, *seconds[kind]) for kind in ("compute", "overhead", "eval", "wait", "end")]


def _busiest(member: MemberStory) -> tuple[float, int, str]:
    compute, _, overhead, evaluation, _ = mean_parts([member])
    # To a microsecond: what is noise must not decide the order.
    return -round(compute + overhead + evaluation, 6), *units.natural(member.name)


def mean_parts(members: Iterable[MemberStory]) -> Parts:
    listed = list(members)
    count = sum(member.count for member in listed) or 1
    sums = [sum(parts) / count for parts in zip(*(m.seconds for m in listed), strict=True)]
    compute, wait, overhead, evaluation, end = sums or (0.0,) * 5
    return compute, wait, overhead, evaluation, end


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
    lengths = [e.applied - e.submitted for m in story.members.values() for e in m.exchanges]
    if not lengths:
        return 0.0
    gaps = [
        later.submitted - earlier.submitted
        for member in story.members.values()
        for earlier, later in itertools.pairwise(member.exchanges)
    ]
    gap = statistics.median(gaps) if gaps else story.seconds
    return min(max(_ROUNDS_SHOWN * gap, 2.2 * statistics.median(lengths)), story.seconds)


def lanes_in_words(story: Story, most: int = MOST_LANES) -> str:
    """The members that a timeline shows, where these are not all: ", the first 3 of 8 members"."""
    count = sum(bool(member.steps) for member in story.members.values())
    return f", the first {most} of {count:,} members" if count > most else ""


def shares_of_members(story: Story) -> list[tuple[str, list[float]]]:
    """Differences between members: for each part of a step, its seconds at the member that has
    the least of it, at a tenth, a half and nine tenths of members, and at that with the most."""
    every = [mean_parts([member]) for member in story.members.values() if member.steps]
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
    members = [m for m in story.in_order() if m.steps][:most]
    axis = Scale(begin, end, "", units.duration)
    widest = max((len(member.called) for member in members), default=0)
    left, right, y = max(64.0, 16 + 7.0 * widest), 944.0, 8.0
    lanes: list[str] = []
    for member in members:
        seen = [e for e in member.exchanges if e.applied > begin and e.submitted < end]
        rows = stacked(seen)
        high = 7.0 * max(len(rows), 1)
        for number, row in enumerate(rows):
            for exchange in row:
                lanes.append(_flight(exchange, axis, left, right, y + high - 7.0 * (number + 1)))
        y += high + 1
        lanes.append(text(left - 8, y + 12, member.called, "end", "tick"))
        lanes.append(rect(left, y, right - left, 15, "lane"))
        for step in member.steps:
            if step.t > begin and step.began < end:
                lanes += _activity(step, axis, left, right, y)
        y += 15 + 9
    for tick in axis.ticks(8):
        at = axis.place(tick, left, right)
        lanes.insert(0, f'<path class="grid" d="M{at:.1f} 4V{y:.1f}"/>')
        lanes.append(text(at, y + 12, units.duration(tick) if tick else "0", "middle", "tick"))
    title = f"what {len(members)} members did from {begin:.3g} to {end:.3g} seconds"
    return figure(lanes, right + 16, y + 20, title)


def _activity(step: Step, axis: Scale, left: float, right: float, y: float) -> Iterable[str]:
    at, words = step.began, dict(PARTS)
    for kind, seconds in in_time(step):
        said = words[kind]
        start, stop = max(at, axis.low), min(at + seconds, axis.high)
        if stop > start:
            x = axis.place(start, left, right)
            wide = axis.place(stop, left, right) - x
            title = f"step {step.step}: {said} {units.duration(seconds)}"
            # A hairline of the background tells steps apart where there is room for one.
            yield rect(x, y, wide - (0.6 if wide > 3 else 0.0), 15, kind, title)
        at += seconds


def _flight(exchange: ExchangeTimes, axis: Scale, left: float, right: float, y: float) -> str:
    start, stop = max(exchange.submitted, axis.low), min(exchange.arrived, axis.high)
    x = axis.place(start, left, right)
    wide = max(axis.place(stop, left, right) - x, 0.8)
    until = min(exchange.applied, axis.high)
    rest = axis.place(until, left, right) - x - wide
    took = units.duration(exchange.arrived - exchange.submitted)
    title = f"round {exchange.round}: answered after {took}"
    kept = rect(x + wide, y + 2, rest, 1.6, "kept", title) if rest > 0.5 else ""
    return rect(x, y, wide, 5, "flight", title) + kept


def stacked(exchanges: Sequence[ExchangeTimes]) -> list[list[ExchangeTimes]]:
    """Rows in which no two exchanges overlap."""
    rows: list[list[ExchangeTimes]] = []
    for exchange in sorted(exchanges, key=lambda e: e.submitted):
        free = next((row for row in rows if row[-1].applied <= exchange.submitted), None)
        if free is not None:
            free.append(exchange)
        elif len(rows) < _MOST_STACKED:
            rows.append([exchange])
        else:
            rows[-1].append(exchange)
    return rows
