"""Looking at runs while they run: a table on a terminal, plain lines anywhere else.

Everything is read from the run folders; no process is asked and none is slowed down. `Watch` is
what a folder says up to now, without a clock and without a terminal; `LiveView` decides when to
look and how to show it. The clock is passed in. rich is imported only for a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TextIO

from edgetrain.runs.metrics.lines import Record
from edgetrain.runs.reports import units
from edgetrain.runs.reports.columns import Column, as_rich, column, fit, total_width
from edgetrain.runs.reports.live.watch import (
    _FEWEST_MEMBERS,
    _NEWS_KEPT,
    MemberState,
    RunState,
    Watch,
    _is_routine,
    news,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.live import Live
    from rich.text import Text

_REFRESH_S = 0.25
# A frame may cost no more than this part of one core, however slow the board is that draws it.
_SHARE_OF_A_CORE = 0.02
_PLAIN_LINE_S = 2.0
# A run of hours leaves a log that people can still read: lines come more rarely.
_PLAIN_LINE_SHARE = 0.02


# --- news: events that people should see ---


# --- plain ---


def plain_line(state: RunState) -> str:
    """A run in one line of ASCII."""
    if not state.step:
        return f"{state.name}: {state.phase}"
    steps = f"/{state.steps}" if state.steps else ""
    parts = [
        f"step {state.step:.0f}{steps}",
        f"loss {units.figure('loss', state.loss)}",
        f"held-out {state.metric} {units.figure(state.metric, state.figure)}",
        f"{units.duration(state.step_s)}/step ({_split_in_words(state)})",
        f"sent {units.size(state.sent_bytes)} received {units.size(state.received_bytes)}",
    ]
    if state.late:
        parts.append(f"{state.late} times late")
    if state.left_s is not None:
        parts.append(f"{units.duration(state.left_s)} left")
    if state.trusted is False:
        parts.append("untrusted: the emulated network was late")
    return f"{state.name}: " + ", ".join(parts)


def _split_in_words(state: RunState) -> str:
    parts = ("compute", state.compute_s), ("wait", state.wait_s), ("overhead", state.overhead_s)
    return ", ".join(f"{name} {units.duration(seconds)}" for name, seconds in parts)


# --- a terminal ---


@dataclass(frozen=True)
class Frame:
    """Everything a terminal shows at one moment; fits whatever size the terminal has."""

    heading: str
    runs: tuple[RunState, ...]
    news: tuple[str, ...]
    with_members: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        height = options.height or console.height
        if self.heading:
            yield Text(self.heading, style="bold", no_wrap=True, overflow="ellipsis")
        yield run_table(self.runs, options.max_width, ascii_only=options.ascii_only)
        # Two headings, a blank line, and the line on which the cursor rests.
        room = height - len(self.runs) - len(self.news) - bool(self.heading) - 4
        active = next((run for run in self.runs if run.phase in ("running", "starting")), None)
        if self.with_members and active is not None and room >= _FEWEST_MEMBERS:
            yield ""
            yield member_table(active, options.max_width, room)
        for line in self.news:
            yield Text(line, style="yellow", no_wrap=True, overflow="ellipsis")


def run_table(states: Sequence[RunState], width: int, *, ascii_only: bool = False) -> Text:
    """One row a run; the bar takes the room that is left, and the least important columns go."""
    metric = states[0].metric if states else "accuracy"
    steps = (f"{state.step:.0f}" + (f"/{state.steps}" if state.steps else "") for state in states)
    shown = [
        column("run", (state.name for state in states), styles=["bold"] * len(states)),
        column("step", steps),
        column("loss", (units.figure("loss", state.loss) for state in states), rank=1),
        column(metric, (units.figure(state.metric, state.figure) for state in states)),
        column("per step", (units.duration(state.step_s) for state in states)),
        *_split(states),
        *_traffic(states),
        column("left", map(_left, states), styles=map(_phase_style, states)),
    ]
    gap = 2 if total_width(shown, 2) + 8 <= width else 1
    shown = fit(shown, width, gap)
    room = min(_WIDEST_BAR, width - total_width(shown, gap) - gap)
    if room >= _NARROWEST_BAR:
        bars = (bar(state.done, room, ascii_only=ascii_only) for state in states)
        shown.insert(1, column("", bars, styles=["green"] * len(states)))
    return as_rich(shown, gap, "dim")


_NARROWEST_BAR, _WIDEST_BAR = 5, 20


def bar(done: float, width: int, *, ascii_only: bool = False) -> str:
    """A progress bar; full only when all is done."""
    full = min(int(done * width), width)
    return (
        ("#" * full).ljust(width, ".") if ascii_only else ("\u2501" * full).ljust(width, "\u2500")
    )


def member_table(state: RunState, width: int, rows: int) -> RenderableType:
    """The members of a run, those that hold it up first, in at most `rows` rows plus a heading."""
    from rich.console import Group
    from rich.text import Text

    ranked = sorted(state.members, key=_trouble)
    members = ranked if len(ranked) <= rows else ranked[: max(0, rows - 1)]
    rest = ranked[len(members) :]
    shown = [
        column("member", (member.name for member in members)),
        column("step", (str(member.step) for member in members)),
        column("loss", (units.figure("loss", member.loss) for member in members)),
        *_split(members),
        *_traffic(members),
        column("memory", (units.size(member.peak_bytes) for member in members), rank=4),
        *_cut(members),
        column("", map(_standing, members), styles=map(_standing_style, members)),
    ]
    grid = as_rich(fit(shown, width, 2), 2, "dim")
    return Group(grid, Text(_summed_up(rest), style="dim")) if rest else grid


def _cut(members: Sequence[MemberState]) -> list[Column]:
    """Contributions left out; a column only where a merge rule does that."""
    if not any(member.cut for member in members):
        return []
    return [column("cut", (f"{member.cut:.4g}" for member in members), rank=1)]


def _trouble(member: MemberState) -> tuple[bool, int, float]:
    """Sorts the lost first, then whoever is behind, then whoever needs longest for a step."""
    return member.standing not in _TROUBLED, member.step, -member.busy_s


_TROUBLED = ("gone", "late")


def _summed_up(members: Sequence[MemberState]) -> str:
    steps = sorted(member.step for member in members)
    busy = sorted(member.busy_s for member in members)
    span = str(steps[0]) if steps[0] == steps[-1] else f"{steps[0]} to {steps[-1]}"
    return (
        f"and {len(members)} more at step {span}, "
        f"busy {units.duration(busy[0])} to {units.duration(busy[-1])} a step"
    )


def _standing(member: MemberState) -> str:
    return "" if member.standing in ("joined", "started") else member.standing


def _standing_style(member: MemberState) -> str:
    return {"gone": "bold red", "late": "yellow"}.get(member.standing, "dim")


def _split(states: Sequence[RunState | MemberState]) -> list[Column]:
    waiting = ("red" if state.wait_s > state.compute_s else "" for state in states)

    def cells(key: Literal["compute_s", "wait_s", "overhead_s"]) -> Iterable[str]:
        return (units.duration(getattr(state, key) if state.step else None) for state in states)

    return [
        column("compute", cells("compute_s")),
        column("wait", cells("wait_s"), styles=waiting),
        column("overhead", cells("overhead_s"), rank=2),
    ]


def _traffic(states: Sequence[RunState | MemberState]) -> list[Column]:
    return [
        column("up", (units.size(state.sent_bytes) for state in states), rank=2),
        column("down", (units.size(state.received_bytes) for state in states), rank=3),
    ]


def _left(state: RunState) -> str:
    if state.trusted is False:
        return "untrusted"
    return units.duration(state.left_s) if state.phase == "running" else state.phase


def _phase_style(state: RunState) -> str:
    if state.trusted is False:
        return "bold red"
    return {"finished": "green", "running": "", "lost": "bold red"}.get(state.phase, "dim")


class Speed:
    """How many seconds a simulation covers in one of ours."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None
        self.times = 0.0
        """0 while it is not known."""

    def saw(self, virtual: float, now: float) -> None:
        """The simulation was at `virtual` seconds at `now`."""
        self._first = self._first or (virtual, now)
        if now > self._first[1] and virtual > self._first[0]:
            self.times = (virtual - self._first[0]) / (now - self._first[1])

    def __str__(self) -> str:
        return f"{self.times:.3g} times as fast as real time"


class LiveView:
    """Shows runs while they run. Call `refresh()` as often as you like: it looks at the folders a
    few times a second and draws only when there is something new.

        with LiveView(folders, clock=time.monotonic) as view:
            while training():
                view.refresh()
                ...

    On a terminal the table is redrawn in place; elsewhere there is a line for each run every two
    seconds (more rarely in a run of hours) and one for each event. It starts no thread.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        clock: Callable[[], float],
        heading: str = "",
        metric: str = "accuracy",
        out: TextIO | None = None,
        console: Console | None = None,
        simulated: bool = False,
    ) -> None:
        self.watches = [Watch(folder, metric) for folder in folders]
        self._speeds = {watch.name: Speed() for watch in self.watches} if simulated else {}
        self._clock, self._heading = clock, units.printable(heading)
        self._out = out or sys.stdout
        self._console = console or _terminal(self._out)
        self._live: Live | None = None
        self._news: list[str] = []
        self._next = clock()
        self._began = clock()
        self._told_at: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._console is not None:
            from rich.live import Live

            # No thread of its own: a thread would draw while a process is being forked.
            self._live = Live(self._frame(), console=self._console, auto_refresh=False)
            self._live.start()
        elif self._heading:
            self._say(self._heading)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.refresh(at_once=True)
        if self._live is not None:
            self._live.update(self._frame(with_members=False), refresh=True)
            self._live.stop()
            self._live = None
        else:
            for watch in self.watches:
                if watch.tally.members:
                    self._say(plain_line(watch.state()))

    def refresh(self, *, at_once: bool = False) -> None:
        """Reads what is new and shows it, unless it is too soon and not `at_once`."""
        now = self._clock()
        if now < self._next and not at_once:
            return
        fresh = {watch.name: watch.read() for watch in self.watches}
        for watch in self.watches:
            if watch.name in self._speeds and watch.tally.members:
                self._speeds[watch.name].saw(watch.tally.t, now)
        if self._live is not None:
            self._redraw(fresh)
        else:
            self._tell(fresh, now)
        cost = self._clock() - now
        self._next = now + max(_REFRESH_S, cost / _SHARE_OF_A_CORE)

    def _redraw(self, fresh: dict[str, list[Record]]) -> None:
        if not any(fresh.values()) or self._live is None:
            return
        lines = (line for name, records in fresh.items() for line in news(name, records))
        self._news += [line for line in lines if not _is_routine(line)]
        del self._news[:-_NEWS_KEPT]
        self._live.update(self._frame(), refresh=True)

    def _frame(self, *, with_members: bool = True) -> Frame:
        states = tuple(map(self._state, self.watches))
        return Frame(self._heading + self._virtual(), states, tuple(self._news), with_members)

    def _state(self, watch: Watch) -> RunState:
        """A run as people see it: what is left of a simulation is left on their own clock."""
        state, speed = watch.state(), self._speeds.get(watch.name)
        if speed is None or state.left_s is None:
            return state
        return replace(state, left_s=state.left_s / speed.times if speed.times else None)

    def _virtual(self) -> str:
        """The time of a simulation, beside the run that is under way."""
        for watch in self.watches:
            speed = self._speeds.get(watch.name)
            if speed is not None and speed.times and watch.state().phase == "running":
                return f" ({units.duration(watch.tally.t)} simulated, {speed})"
        return ""

    def _tell(self, fresh: dict[str, list[Record]], now: float) -> None:
        every = max(_PLAIN_LINE_S, (now - self._began) * _PLAIN_LINE_SHARE)
        for watch in self.watches:
            for line in news(watch.name, fresh[watch.name]):
                self._say(line)
            moved = any(record["kind"] != "event" for record in fresh[watch.name])
            if moved and now - self._told_at.get(watch.name, -every) >= every:
                self._told_at[watch.name] = now
                self._say(plain_line(self._state(watch)) + self._virtual())

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)


def _terminal(out: TextIO) -> Console | None:
    """A console if `out` is a terminal that can move its cursor, else None."""
    if not out.isatty():
        return None
    from rich.console import Console

    console = Console(file=out)
    return None if console.is_dumb_terminal else console
