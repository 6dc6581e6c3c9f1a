"""Looking at runs while they run: a table on a terminal, plain lines anywhere else.

Everything is read from the run folders; no process is asked and none is slowed down. `Watch` is
what a folder says up to now, without a clock and without a terminal; `LiveView` decides when to
look and how to show it. The clock is passed in. rich is imported only for a terminal.
"""

from __future__ import annotations

import re
import sys
from collections import Counter as Count
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

from edgetrain.runs import folder as runs
from edgetrain.runs.reports import units
from edgetrain.runs.reports.columns import Column, as_rich, column, fit, total_width
from edgetrain.errors import ConfigError
from edgetrain.runs.metrics.log import HUB, Follower, MemberTally, Record, Tally

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
_WINDOW_S = 10.0
_NEWS_KEPT = 3
_FEWEST_MEMBERS = 3
# These happen to every member of a healthy run: counted together, not told one by one.
_ROUTINE = ("joined", "started", "finished", "left")


@dataclass(frozen=True)
class MemberState:
    """One member in a frame. Seconds are means per step."""

    name: str
    standing: str
    step: int
    loss: float | None
    compute_s: float
    wait_s: float
    overhead_s: float
    sent_bytes: float
    received_bytes: float
    peak_bytes: int
    cut: float = 0.0
    """Contributions that a merge rule left out."""

    @property
    def busy_s(self) -> float:
        """What the member itself needs for a step; waiting is others' doing."""
        return self.compute_s + self.overhead_s


@dataclass(frozen=True)
class RunState:
    """One run in a frame. Seconds are means per step over members; step is the members' mean."""

    name: str
    metric: str
    phase: str
    step: float
    steps: int | None
    loss: float | None
    figure: float | None
    step_s: float | None
    compute_s: float
    wait_s: float
    overhead_s: float
    sent_bytes: float
    received_bytes: float
    late: int
    left_s: float | None
    members: tuple[MemberState, ...]
    trusted: bool | None = None
    """Whether the emulated network kept its time; None as long as nobody knows."""

    @property
    def done(self) -> float:
        """The part of the run that is behind it, 0 to 1; 0 where the end is not known."""
        if not self.steps:
            return 0.0
        return 1.0 if self.phase == "finished" else min(1.0, self.step / self.steps)


class Watch:
    """Follows one run folder. The folder, its job and its metrics need not exist yet."""

    def __init__(self, folder: Path, metric: str = "accuracy") -> None:
        self.folder = folder
        # A run of its own is called by its time and name; here the name says enough.
        self.name = units.printable(re.sub(r"^\d{8}-\d{6}-(?=.)", "", folder.name))
        self._metric = metric
        self.tally = Tally()
        self._follower = Follower(runs.metrics_path(folder))
        self._job: dict[str, Any] = {}
        self._verdict: bool | None = None
        # (seconds since training began, mean step), for the pace of the last few seconds
        self._pace: list[tuple[float, float]] = []

    def read(self) -> list[Record]:
        """Takes in what is new and returns it."""
        records = self._follower.read()
        if records:
            self.tally.add_all(records)
            self._keep_pace()
        if not self._job:
            self._job = self._read_job()
        return records

    def state(self) -> RunState:
        """What is known by now."""
        present = self._present()
        members = tuple(_member(name, member) for name, member in self.tally.members.items())
        lines = sum(member.lines for member in present) or 1
        last = self.tally.evaluations[-1] if self.tally.evaluations else {}
        losses = [member.loss for member in present if member.loss is not None]
        return RunState(
            name=self.name,
            metric=self._metric,
            phase=self._phase(),
            step=self._step(),
            steps=self._steps(),
            loss=sum(losses) / len(losses) if losses else None,
            figure=last.get(self._metric),
            step_s=self._step_s(),
            compute_s=sum(member.compute_s for member in present) / lines,
            wait_s=sum(member.wait_s for member in present) / lines,
            overhead_s=sum(member.overhead_s for member in present) / lines,
            sent_bytes=sum(member.sent_bytes.total for member in self.tally.members.values()),
            received_bytes=sum(
                member.received_bytes.total for member in self.tally.members.values()
            ),
            late=sum(member.late for member in self.tally.members.values()),
            left_s=self._left_s(),
            members=members,
            trusted=self._trusted(),
        )

    def _trusted(self) -> bool | None:
        """The emulator's own word, which is in the summary: read when the run is over."""
        if self._verdict is None and self._phase() in ("finished", "lost"):
            try:
                summary = runs.read_summary(self.folder) or {}
            except ConfigError:
                return None
            self._verdict = (summary.get("emulation") or {}).get("trusted")
        return self._verdict

    def _read_job(self) -> dict[str, Any]:
        try:
            return runs.read_job(self.folder)
        except ConfigError:  # somebody else's damage; the numbers can be shown all the same
            return {}

    def _present(self) -> list[MemberTally]:
        lost = self.tally.lost()
        return [m for name, m in self.tally.members.items() if m.step and name not in lost]

    def _step(self) -> float:
        present = self._present()
        return sum(member.step for member in present) / len(present) if present else 0.0

    def _steps(self) -> int | None:
        steps = self._job.get("train", {}).get("steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    def _phase(self) -> str:
        members = self.tally.members
        if not members:
            return "waiting"
        lost = self.tally.lost()
        others = [name for name in members if name not in lost]
        if not set(others) & set(self.tally.unfinished()):
            return "finished" if others else "lost"
        return "running" if any(member.step for member in members.values()) else "starting"

    def _keep_pace(self) -> None:
        self._pace.append((self.tally.t, self._step()))
        while len(self._pace) > 2 and self._pace[1][0] < self.tally.t - _WINDOW_S:
            del self._pace[0]

    def _step_s(self) -> float | None:
        if not self._pace:
            return None
        (t0, step0), (t1, step1) = self._pace[0], self._pace[-1]
        if step1 > step0 and t1 > t0:
            return (t1 - t0) / (step1 - step0)
        return t1 / step1 if step1 else None

    def _left_s(self) -> float | None:
        steps, step_s = self._steps(), self._step_s()
        if steps is None or step_s is None or self._phase() != "running":
            return None
        return max(0.0, steps - self._step()) * step_s


def _member(name: str, tally: MemberTally) -> MemberState:
    lines = tally.lines or 1
    return MemberState(
        name=units.printable(name),
        standing=tally.standing,
        step=tally.step,
        loss=tally.loss,
        compute_s=tally.compute_s / lines,
        wait_s=tally.wait_s / lines,
        overhead_s=tally.overhead_s / lines,
        sent_bytes=tally.sent_bytes.total,
        received_bytes=tally.received_bytes.total,
        peak_bytes=tally.peak_bytes,
        cut=tally.cut,
    )


# --- news: events that people should see ---


def news(name: str, records: Iterable[Record]) -> list[str]:
    """A line for each event that people should know of.

    What happens to every member of a healthy run is counted together. Being late is not told here:
    a slow member is late in every round. States and plain lines hold the count.
    """
    lines, routine = [], Count[str]()
    for record in records:
        if record["kind"] != "event" or record.get("event") == "late":
            continue
        event = units.printable(str(record.get("event")))
        about = units.printable(str(record.get("about") or record["member"]))
        if event in _ROUTINE and about != HUB:
            routine[event] += 1
        else:
            reason = units.printable(str(record.get("reason") or ""))
            when = units.duration(max(0.0, record["t"]))
            lines.append(f"{name}: {about} {event} at {when}" + (f": {reason}" if reason else ""))
    counted = [
        f"{name}: {count} member{'s' if count > 1 else ''} {event}"
        for event, count in routine.items()
    ]
    return counted + lines


def _is_routine(line: str) -> bool:
    return line.endswith(tuple(f" {event}" for event in _ROUTINE))


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
