"""A page about runs: one HTML document without scripts, pictures in it, nothing to load."""

from __future__ import annotations

import html
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from edgetrain.files.toml import to_toml
from edgetrain.runs.over_members import OwnData
from edgetrain.runs.reports import units
from edgetrain.runs.reports.columns import Column, column, optional
from edgetrain.runs.reports.comparison import Comparison, compare
from edgetrain.runs.reports.comparison_table import columns_of
from edgetrain.runs.reports.happenings import KINDS, event_in_words
from edgetrain.runs.reports.message import message
from edgetrain.runs.reports.page import charts
from edgetrain.runs.reports.page.story import Story
from edgetrain.runs.reports.page.svg import Line, Scale, key, lines, part_key, sign_key

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


_MOST_TIMELINES = 6
"""Runs with a timeline."""
_LANES_OF_EACH = 3
"""Members in the timeline of each of several runs."""

PATTERNS = (
    '<svg width="0" height="0" class="defs" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" class="back"/>'
    '<rect width="2" height="6" class="stroke"/></pattern>'
    '<pattern id="dots" width="5" height="5" patternUnits="userSpaceOnUse"><rect width="5" '
    'height="5" class="lane"/><rect x="1" y="1" width="2.6" height="2.6" class="flight"/></pattern>'
    '<pattern id="rungs" width="4" height="4" patternUnits="userSpaceOnUse"><rect width="4" '
    'height="4" class="lane"/><rect width="1.6" height="4" class="back"/></pattern>'
    '<pattern id="bars" width="4" height="4" patternUnits="userSpaceOnUse"><rect width="4" '
    'height="4" class="lane"/><rect width="4" height="2.6" class="bar"/></pattern></defs></svg>'
)
"""Hatchings of the parts of a step other than computing: colour alone carries no meaning."""


def document(stories: Sequence[Story]) -> str:
    """The page of these runs, one at least."""
    comparison = compare(
        [s.summary for s in stories], [s.label for s in stories], [s.job for s in stories]
    )
    title = message(comparison)
    style = files(__package__).joinpath("page.css").read_text("utf-8")
    body = [
        "<h1>" + re.sub(r"(?<=\d) (?=%|m?s\b)", "&nbsp;", _text(title)) + "</h1>",
        f'<p class="about">{_text(_about(stories))}</p>',
        _notes(comparison, stories),
        _table(columns_of(comparison)),
        _curves(stories),
        _own_data(stories),
        _seconds(stories),
        _timelines(stories),
        _exchanges(stories),
        _reducers(stories),
        _rounds(stories),
        _events(stories),
        _appendix(stories),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{style}</style></head>\n"
        f"<body>{PATTERNS}<main>{''.join(body)}</main></body></html>\n"
    )


def _about(stories: Sequence[Story]) -> str:
    first = stories[0].summary
    keys = ("task", "members", "device", "network", "steps")
    # What differs between runs tells them apart, and is in their names.
    same = [key for key in keys if all(s.summary.get(key) == first.get(key) for s in stories)]
    said = {key: _listed(first[key]) for key in same if first.get(key) is not None}
    words = {
        "task": "{}", "members": "{} members", "device": "device {}", "network": "network {}",
        "steps": "{} steps",
    }  # fmt: skip
    parts = [words[key].format(value) for key, value in said.items()]
    began = stories[0].environment.get("started")
    return ", ".join(parts) + (f"; began {began}" if began else "")


def _listed(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(dict.fromkeys(map(str, value)))
    return str(value)


def _notes(comparison: Comparison, stories: Sequence[Story]) -> str:
    """The message to read first; set apart only where a run failed or is not to be trusted."""
    wrong = tuple(
        row.label for row in comparison.rows if row.status != "finished" or row.timing_ok is False
    )
    notes = [("note" if wrong and n.startswith(wrong) else "remark", n) for n in comparison.notes]
    notes += [
        ("note", f"{story.label}: {story.damaged} lines of metrics could not be read")
        for story in stories
        if story.damaged
    ]
    return "".join(f'<p class="{kind}">{_text(note)}</p>' for kind, note in notes)


def _table(columns: Sequence[Column], kind: str = "") -> str:
    head = "".join(
        f"<th>{_text(c.heading)}{'<br>' + _text(c.heading_below) if c.heading_below else ''}</th>"
        for c in columns
    )
    rows = zip(*(c.cells for c in columns), strict=True)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'


def _curves(stories: Sequence[Story]) -> str:
    names = key([story.label for story in stories]) if len(stories) > 1 else ""
    tabs, panes = [], []
    for number, view in enumerate(charts.VIEWS):
        checked = " checked" if not number else ""
        tabs.append(
            f'<input type="radio" name="x" id="x{number}"{checked}>'
            f'<label for="x{number}">{view.name}</label>'
        )
        panes.append(
            f'<div class="pane p{number}">{charts.figure_chart(stories, view)}'
            f"{charts.loss_chart(stories, view)}"
            f"{'' if number or len(stories) > 1 else charts.traffic_chart(stories[0])}</div>"
        )
    drawn = charts.end_of_figures(stories)
    happened = Counter(e.kind for story in stories for e in story.happened if e.t <= drawn)
    kinds = [(kind, f"{said}: {happened[kind]}") for kind, said in KINDS.items() if happened[kind]]
    return (
        f'<section class="tabs"><h2>Figure and loss</h2>{names}{sign_key(kinds)}{"".join(tabs)}'
        f"{''.join(panes)}</section>"
    )


def _own_data(stories: Sequence[Story]) -> str:
    drawn = own_charts(stories)
    if not drawn:
        return ""
    names = key([story.label for story in stories]) if len(stories) > 1 else ""
    rows = [
        (story.label, name, found)
        for story in stories
        for name, found in ((story.summary.get("own_data") or {}).get("figures") or {}).items()
    ][:_MOST_FIGURES]
    columns = [
        *([column("run", (label for label, _, _ in rows))] if len(stories) > 1 else []),
        column("figure", (name for _, name, _ in rows)),
        *(
            column(said, (units.figure(name, found.get(each)) for _, name, found in rows))
            for each, said in _OF_MEMBERS.items()
        ),
        *(
            column(said, (f"{found.get(each) or 0:,.0f}" for _, _, found in rows))
            for each, said in (("members", "members"), ("count", "samples"))
        ),
    ]
    return (
        f"<section><h2>On data that members hold out of their own</h2>{names}"
        f'<div class="pair">{drawn}</div>{_table(columns)}</section>'
    )


_MOST_FIGURES = 100
_OF_MEMBERS = {
    "mean": "mean", "median": "median", "worst_tenth": "worst tenth", "deviation": "deviation",
}  # fmt: skip


def _seconds(stories: Sequence[Story]) -> str:
    drawn = charts.bars(stories)
    if not drawn:
        return ""
    whose = "run" if len(stories) > 1 else "member, the busiest first"
    return (
        f"<section><h2>Where the time of a step goes, by {whose}</h2>"
        f'{part_key(charts.PARTS)}<div class="wide">{drawn}</div></section>'
    )


def _timelines(stories: Sequence[Story]) -> str:
    parts = []
    if len(stories) == 1:
        for window in charts.windows(stories[0]):
            drawn = charts.timeline(stories[0], window)
            named = f"{window.name}{charts.lanes_in_words(stories[0])}"
            parts.append(f'<h3>{named}</h3><div class="wide">{drawn}</div>')
    else:  # the same seconds of every run, so that lengths can be compared
        shown = [s for s in stories if charts.length_of(s)][:_MOST_TIMELINES]
        length = statistics.median(map(charts.length_of, shown)) if shown else 0.0
        for story in shown:
            drawn = charts.timeline(story, charts.middle_of(story, length), _LANES_OF_EACH)
            named = f"{story.label}{charts.lanes_in_words(story, _LANES_OF_EACH)}"
            parts.append(f'<h3>{_text(named)}</h3><div class="wide">{drawn}</div>')
    if not parts:
        return (
            "<section><h2>Timeline of rounds</h2><p>These runs recorded no exchanges: fleets of "
            "more than 64 simulated members do not, nor do runs of older versions.</p>"
            f"{''.join(map(_distribution, stories))}</section>"
        )
    if len(stories) > _MOST_TIMELINES:
        parts.append(f"<p>Of the first {_MOST_TIMELINES} runs.</p>")
    kinds = (*charts.PARTS, ("flight", "exchange in flight"), ("kept", "answered, not yet applied"))
    return (
        "<section><h2>Timeline of rounds</h2><p>Below: what each member does. Above it: its "
        "contributions, from handing over to the reply. A member that computes under its exchanges "
        f"hides the network; one that waits under them does not.</p>{part_key(kinds)}"
        f"{''.join(parts)}</section>"
    )


def _distribution(story: Story) -> str:
    rows = charts.shares_of_members(story)
    if not rows:
        return ""
    heads = ("least", "a tenth", "half", "nine tenths", "most")
    columns = [
        column("of a step", [said for said, _ in rows]),
        *(
            column(head, [units.duration(values[place]) for _, values in rows])
            for place, head in enumerate(heads)
        ),
    ]
    count = sum(bool(len(member.steps)) for member in story.members.values())
    named = f"{story.label}: {count:,} members, how many of them have at most this"
    return f"<h3>{_text(named)}</h3>{_table(columns)}"


def _exchanges(stories: Sequence[Story]) -> str:
    if len(stories) > 1:
        groups = [(s.label, [m.exchanges for m in s.members.values()]) for s in stories]
    else:
        members = stories[0].in_order()[: charts.MOST_BARS]
        groups = [(charts.called(member), [member.exchanges]) for member in members]
    tables = [(name, np.concatenate(some)) for name, some in groups if sum(map(len, some))]
    if not tables:
        return ""

    def seconds(key: str) -> list[str]:
        return [units.duration(float(np.median(each[key])) or None) for _, each in tables]

    def sizes(key: str) -> list[str]:
        known = [each[key][~np.isnan(each[key])] for _, each in tables]
        return [units.size(float(np.median(each)) if len(each) else None) for each in known]

    flights = [float(np.median(each["arrived_t"] - each["submitted_t"])) for _, each in tables]
    columns = [
        column("run" if len(stories) > 1 else "member", [name for name, _ in tables]),
        column("exchanges", [f"{len(each):,}" for _, each in tables]),
        column("in flight", map(units.duration, flights)),
        column("encode", seconds("submit_s"), below="hand over"),
        column("decode", seconds("decode_s")),
        column("apply", seconds("apply_s")),
        column("up", sizes("sent_bytes")),
        column("down", sizes("received_bytes")),
    ]
    return f"<section><h2>An exchange: medians</h2>{_table(columns)}</section>"


def _reducers(stories: Sequence[Story]) -> str:
    """Who adds up what, where that is not one hub for everything."""
    rows = [
        (_named(story, stories), *part.partition(": "))
        for story in stories
        for part in filter(None, story.data.reducers.split("; "))
    ]
    if not rows:
        return ""
    run, reducer, _, sums = zip(*rows, strict=True)
    columns = [*optional("run", run), column("reducer", reducer), column("adds up", sums)]
    return f"<section><h2>Who adds up what</h2>{_table(columns)}</section>"


def _rounds(stories: Sequence[Story]) -> str:
    """The delay in force, where it changed, the final sync, and ages of contributions."""
    said = []
    for story in stories:
        changes: list[tuple[float, int]] = []
        for record in story.rounds:
            delay = record.get("delay")
            if isinstance(delay, int) and (not changes or changes[-1][1] != delay):
                changes.append((record["t"], delay))
        if len(changes) > 1:
            steps = ", ".join(f"{delay} from {units.duration(t)}" for t, delay in changes[:40])
            said.append(f"{story.label}: delay {steps}")
        synced = [record for record in story.rounds if record.get("final_sync") is True]
        if synced:
            first, last = synced[0], synced[-1]
            said.append(
                f"{story.label}: final sync from {units.duration(first['t'])} to "
                f"{units.duration(last['t'])}: {len(synced)} rounds of {last['local_steps']} steps"
            )
    table = _ages(stories)
    if not said and not table:
        return ""
    told = "".join(f"<p>{_text(each)}</p>" for each in said)
    return f"<section><h2>Rounds: delay, final sync, ages</h2>{told}{table}</section>"


def _ages(stories: Sequence[Story]) -> str:
    """A table of the ages of contributions, in replies, of the runs whose members are out of step:
    the median of rounds' medians and of their highest, and the highest of all."""
    ages = {
        s.label: each for s in stories if (each := [r["ages"] for r in s.rounds if "ages" in r])
    }
    if not ages:
        return ""
    middles = [statistics.median_low([middle for middle, _ in each]) for each in ages.values()]
    mosts = [[most for _, most in each] for each in ages.values()]
    columns = [
        column("age of contributions, in replies", ages),
        column("rounds", [f"{len(each):,}" for each in ages.values()]),
        column("median", map(str, middles)),
        column(
            "most of a round", [str(statistics.median_low(each)) for each in mosts], below="median"
        ),
        column("most", [str(max(each)) for each in mosts]),
    ]
    return _table(columns)


def _events(stories: Sequence[Story]) -> str:
    rows = [
        (_named(story, stories), units.duration(max(record["t"], 0.0)), *event_in_words(record))
        for story in stories
        for record in story.data.events
    ]
    if not rows:
        return ""
    run, at, who, event, why = zip(*rows, strict=True)
    columns = [*optional("run", run), column("at", at), column("who", who), column("event", event)]
    columns.append(column("", why))
    left_out = sum(story.data.events_left_out for story in stories)
    more = f"<p>and {left_out:,} more</p>" if left_out else ""
    return f"<section><h2>Events</h2>{_table(columns, 'events')}{more}</section>"


def _named(story: Story, stories: Sequence[Story]) -> str:
    """Its label, where there are several."""
    return story.label if len(stories) > 1 else ""


def _appendix(stories: Sequence[Story]) -> str:
    parts = []
    for story in stories:
        command = story.environment.get("command")
        again = command if isinstance(command, str) else shlex.join(map(str, command or []))
        same = f"edgetrain run {shlex.quote(str(story.folder / 'job.toml'))}"
        machine = ", ".join(
            f"{name} {_listed(story.environment[name])}"
            for name in ("edgetrain", "python", "hostname", "board", "cpu", "cores", "kernel")
            if story.environment.get(name)
        )
        job = to_toml(story.job) if story.job else "no job.toml"
        parts.append(
            f"<details><summary>{_text(story.label)}: job and machine</summary>"
            f"<p>{_text(machine)}</p><p>Made by <code>{_text(again)}</code>; the same again: "
            f"<code>{_text(same)}</code></p><pre>{_text(job)}</pre></details>"
        )
    return f"<section><h2>Job and machine</h2>{''.join(parts)}</section>"


def _text(value: str) -> str:
    return html.escape(value)
