"""Charts of what members found on data of their own: the course, and all of them at the end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgetrain.runs.over_members import OwnData
from edgetrain.runs.reports import units
from edgetrain.runs.reports.page import charts
from edgetrain.runs.reports.page.story import Story
from edgetrain.runs.reports.page.svg import Line, Scale, lines

BARS = 20


def own_charts(stories: Sequence[Story]) -> str:
    """Both charts; "": members of no run evaluated on their own data."""
    metric = stories[0].summary.get("metric") or "accuracy"
    owns = [story.data.own_data or OwnData() for story in stories]
    courses = [own.course(metric) for own in owns]
    at_the_end = [own.values_at_the_end(metric) for own in owns]
    if not any(at_the_end):
        return ""
    say, fraction = charts.words_of(metric), units.is_fraction(metric)
    band = courses[0] if len(stories) == 1 else []
    shown = [y for course in courses for _, y, *_ in course]
    low, high = charts.value_range(
        [*shown, *(y for _, _, *ends in band for y in ends)], None, fraction
    )
    y = Scale(low, high, f"{metric}, mean" + ", shaded: four fifths of members" * bool(band), say)
    most = max((x for course in courses for x, *_ in course), default=1.0) or 1.0
    x = Scale(0.0, most, "steps of a member", lambda x: f"{x:,.0f}")
    means = [
        Line(story.label, tuple((at, mean) for at, mean, *_ in course), place)
        for place, (story, course) in enumerate(zip(stories, courses, strict=True))
    ]
    course = lines(means, x, y, f"{metric} on members' own data", band=band_of(band, low, high))
    low, high = charts.value_range([v for values in at_the_end for v in values], None, fraction)
    bars = [stairs(values, low, high) for values in at_the_end]
    highest = max((y for steps in bars for _, y in steps), default=1.0)
    drawn = [
        Line(story.label, steps, place)
        for place, (story, steps) in enumerate(zip(stories, bars, strict=True))
    ]
    across = Scale(low, high, f"{metric} at the end", say)
    up = Scale(0.0, 1.06 * highest, "members", lambda y: f"{y:,.0f}")
    return course + lines(drawn, across, up, f"members by their {metric} at the end")


def band_of(
    course: Sequence[tuple[float, float, float, float]], low: float, high: float
) -> list[tuple[float, ...]]:
    return [(x, *(min(max(end, low), high) for end in ends)) for x, _, *ends in course]


def stairs(values: Sequence[float], low: float, high: float) -> tuple[tuple[float, float], ...]:
    """The outline of a histogram."""
    counts, edges = np.histogram(values, BARS, (low, high))
    inner = zip(edges[:-1], edges[1:], counts, strict=True)
    tops = [(float(at), float(count)) for a, b, count in inner for at in (a, b)]
    return ((low, 0.0), *tops, (high, 0.0)) if len(values) else ()
