"""A terminal's view of runs under way: a table of runs, one of members, news."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edgetrain.runs.data import MemberData
from edgetrain.runs.reports import units
from edgetrain.runs.reports.columns import Column, as_rich, column, fit, optional, total_width
from edgetrain.runs.reports.live.plain import machine_in_words
from edgetrain.runs.reports.live.watch import RunState

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

_FEWEST_MEMBERS = 3
"""Rows for members without which their table is left out."""

_NARROWEST_BAR, _WIDEST_BAR = 5, 20
"""Characters of a progress bar; without room for the narrowest there is none."""

UNTOLD = "members do not tell the hub how they are doing: hub.status_s = 0"
"""Below a table of members whose columns stay empty."""

_ROOM_FOR_A_BAR = 72
"""Characters of a terminal in which columns make room for a bar."""

_NEWS_ROWS = 2
"""Rows that one line of news may take: what happened, and why."""

_TROUBLED = ("failed", "gone", "late")


@dataclass(frozen=True)
class Frame:
    """Everything a terminal shows at one moment; it fits a terminal of any size."""

    heading: str
    runs: tuple[RunState, ...]
    news: tuple[str, ...]
    with_members: bool = True
    clock: str = ""
    """Behind the heading, also where that is too long for the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        height = options.height or console.height
        if self.heading:
            shown = shortened(self.heading, options.max_width - len(self.clock)) + self.clock
            yield Text(shown, style="bold", no_wrap=True, overflow="ellipsis")
        yield run_table(self.runs, options.max_width, ascii_only=options.ascii_only)
        told = [line for run in self.runs for line in reducing(run, len(self.runs) > 1)]
        for line in told:
            yield Text(line, style="dim", no_wrap=True, overflow="ellipsis")
        news = [row for line in self.news for row in wrapped(line, options.max_width)]
        # Subtract two headings, a blank line, and the line that the cursor is on.
        room = height - len(self.runs) - len(told) - len(news) - bool(self.heading) - 4
        under_way = ("running", "paused", "starting")
        active = next((run for run in self.runs if run.phase in under_way), None)
        if self.with_members and active is not None and room >= _FEWEST_MEMBERS:
            yield ""
            yield member_table(active, options.max_width, room - active.untold)
            if active.untold:
                yield Text(UNTOLD, style="dim", no_wrap=True, overflow="ellipsis")
        for line in news:
            yield Text(line, style="yellow", no_wrap=True, overflow="ellipsis")


def reducing(state: RunState, named: bool) -> list[str]:
    """Who adds up what in a run, and what went over the way out of a site, where people have to
    know. With `named` lines begin with the run's name."""
    name = f"{state.name}: " if named else ""
    data = state.data
    lines = [f"{name}{data.reducers}"] if data.reducers else []
    if data.hub.above_sent_bytes is not None:
        sent = units.size(data.hub.above_sent_bytes)
        received = units.size(data.hub.above_received_bytes)
        lines.append(
            f"{name}WAN: {sent} to the hub above, {received} from it; the table has the LAN"
        )
    return lines


def shortened(text: str, width: int) -> str:
    """At most `width` characters of a text, the last one a mark if some are left out."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def wrapped(line: str, width: int) -> list[str]:
    """A line in rows of `width` characters, cut to _NEWS_ROWS."""
    rows = textwrap.wrap(line, max(width, 20), subsequent_indent="  ") or [""]
    if len(rows) > _NEWS_ROWS:
        rows = [*rows[: _NEWS_ROWS - 1], shortened(rows[_NEWS_ROWS - 1] + " …", width)]
    return rows


def _own_data(state: RunState) -> str:
    """The figure on data that members hold out of their own."""
    own = state.data.own_data
    found = None if own is None else own.newest(state.metric)
    return "" if found is None else units.figure(state.metric, found.mean)


def run_table(states: Sequence[RunState], width: int, *, ascii_only: bool = False) -> Text:
    metric = states[0].metric if states else "accuracy"
    steps = (f"{state.step:.0f}" + (f"/{state.steps}" if state.steps else "") for state in states)
    shown = [
        column("run", (state.name for state in states), styles=["bold"] * len(states)),
        column("step", steps),
        column("loss", (units.figure("loss", state.loss) for state in states), rank=1),
        column(metric, (units.figure(state.metric, state.figure) for state in states)),
        *optional("own data", map(_own_data, states), rank=1),
        column("per step", (units.duration(state.seconds_per_step) for state in states)),
        *_split(states),
        *_traffic(states),
        column("steps, delay", map(_pace, states), rank=2),
        *optional("age, most", map(_ages, states), rank=2),
        *optional("slices, copies, waste", map(_dealt, states), rank=1),
        *optional("step length", (f"{state.data.step_length:.3g}" for state in states), rank=2),
        *optional("codec", (units.printable(state.data.codec) for state in states), rank=2),
        column("left", map(_left, states), styles=map(_phase_style, states)),
    ]
    gap = 2 if total_width(shown, 2) + 8 <= width else 1
    kept = _NARROWEST_BAR + gap if width >= _ROOM_FOR_A_BAR else 0
    shown = fit(shown, width - kept, gap)
    room = min(_WIDEST_BAR, width - total_width(shown, gap) - gap)
    if room >= _NARROWEST_BAR:
        bars = (bar(state.done, room, ascii_only=ascii_only) for state in states)
        shown.insert(1, column("", bars, styles=["green"] * len(states)))
    return as_rich(shown, gap, "dim")


def bar(done: float, width: int, *, ascii_only: bool = False) -> str:
    """A progress bar for `done` of 0 to 1; full only at 1."""
    full = min(int(done * width), width)
    return (
        ("#" * full).ljust(width, ".") if ascii_only else ("\u2501" * full).ljust(width, "\u2500")
    )


def member_table(state: RunState, width: int, rows: int) -> RenderableType:
    """At most `rows` members: of a large fleet those in trouble and the slowest."""
    from rich.console import Group
    from rich.text import Text

    ranked = sorted(state.members, key=_trouble)
    shown = ranked if len(ranked) <= rows else ranked[: max(0, rows - 1)]
    members, rest = (
        sorted(shown, key=lambda member: units.natural(member.name)),
        ranked[len(shown) :],
    )
    grid = as_rich(fit(member_columns(members), width, 2), 2, "dim")
    return Group(grid, Text(_summed_up(rest), style="dim")) if rest else grid


def member_columns(members: Sequence[MemberData]) -> list[Column]:
    """The table of members; the column `cut` is there if a merge rule left contributions out."""
    reported = any(member.pace_s is not None for member in members)
    return [
        column("member", (member.called for member in members)),
        column("step", (str(member.step) for member in members)),
        *_loss(members),
        *(_reported(members) if reported else []),
        *_split(members),
        *_traffic(members),
        column("memory", (units.size(member.peak_bytes or None) for member in members), rank=4),
        *optional("cut", (f"{member.cut:.4g}" for member in members), rank=1),
        column("", map(_standing, members), styles=map(_standing_style, members)),
    ]


def _loss(members: Sequence[MemberData]) -> list[Column]:
    """The column of losses, where members report theirs: to a hub they do not."""
    if members and all(member.loss is None and member.pace_s is not None for member in members):
        return []
    return [column("loss", (units.figure("loss", member.loss) for member in members))]


def _reported(members: Sequence[MemberData]) -> list[Column]:
    """Reports of members: pace, part of the time waiting, round trip, heat."""
    hot = ["red" if member.throttled else "" for member in members]
    weak = ["red" if member.under_voltage else "" for member in members]
    machines = (", ".join(machine_in_words(member)) for member in members)
    return [
        column("pace", (units.duration(member.pace_s) for member in members)),
        column("waiting", (units.share(member.wait_share) for member in members)),
        column("round trip", (units.duration(member.round_trip_s) for member in members), rank=1),
        *optional("heat", map(_heat, members), styles=hot, rank=1),
        *optional("machine", machines, styles=weak, rank=2),
    ]


def _heat(member: MemberData) -> str:
    if member.celsius is None:
        return units.ABSENT
    return f"{member.celsius:.0f} C" + ("!" if member.throttled else "")


def _trouble(member: MemberData) -> tuple[bool, int, float]:
    """A sort key: first lost and late members, then those behind, then those with slow steps."""
    return member.standing not in _TROUBLED, member.step, -member.busy_s


def _summed_up(members: Sequence[MemberData]) -> str:
    steps = sorted(member.step for member in members)
    busy = sorted(member.busy_s for member in members)
    span = str(steps[0]) if steps[0] == steps[-1] else f"{steps[0]} to {steps[-1]}"
    return (
        f"and {len(members)} more at step {span}, "
        f"busy {units.duration(busy[0])} to {units.duration(busy[-1])} a step"
    )


def _standing(member: MemberData) -> str:
    return "" if member.standing in ("joined", "started") else member.standing


def _standing_style(member: MemberData) -> str:
    styles = {"failed": "bold red", "gone": "bold red", "late": "yellow"}
    return styles.get(member.standing, "dim")


def _split(states: Sequence[RunState | MemberData]) -> list[Column]:
    waiting = ("red" if state.wait_s > state.compute_s else "" for state in states)

    def cells(key: Literal["compute_s", "wait_s", "overhead_s"]) -> Iterable[str]:
        return (units.duration(getattr(state, key) if state.step else None) for state in states)

    return [
        column("compute", cells("compute_s")),
        column("wait", cells("wait_s"), styles=waiting),
        column("overhead", cells("overhead_s"), rank=2),
    ]


def _traffic(states: Sequence[RunState | MemberData]) -> list[Column]:
    return [
        column("up", (units.size(state.sent_bytes or None) for state in states), rank=2),
        column("down", (units.size(state.received_bytes or None) for state in states), rank=3),
    ]


def _pace(state: RunState) -> str:
    data = state.data
    return units.pace(data.local_steps, data.delay) + (", final sync" if data.final_sync else "")


def _ages(state: RunState) -> str:
    """Ages of contributions: the newest round's median, and the most of all."""
    return "{}, {}".format(*state.data.ages) if state.data.ages else units.ABSENT


def _dealt(state: RunState) -> str:
    """Where the hub hands out work: slices done, copies and waste in all rounds."""
    return "{}, {}, {}".format(*state.data.dealt) if state.data.dealt else units.ABSENT


def _left(state: RunState) -> str:
    if state.timing_ok is False:
        return "untrusted"
    return units.duration(state.left_s) if state.phase == "running" else state.phase


def _phase_style(state: RunState) -> str:
    if state.timing_ok is False:
        return "bold red"
    styles = {"finished": "green", "running": "", "lost": "bold red", "incomplete": "red"}
    return styles.get(state.phase, "dim")
