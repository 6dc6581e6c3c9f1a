"""Show runs while they run: a table on a terminal, plain lines anywhere else.

Everything is read from the run folders, so that no process is asked or slowed down. `watch` reads
the state of a folder, `frame` and `plain` turn states into a table or lines, and `LiveView` decides
when to look and what to show. The clock is passed in. rich is imported only for a terminal.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO, cast

from edgetrain.runs.metrics.lines import Record
from edgetrain.runs.reports import units
from edgetrain.runs.reports.live.frame import Frame
from edgetrain.runs.reports.live.plain import news, plain_line
from edgetrain.runs.reports.live.watch import FolderWatch, RunState

if TYPE_CHECKING:
    from rich.console import (
        Console,
        ConsoleDimensions,
        ConsoleRenderable,
        RenderableType,
        RenderHook,
    )
    from rich.live import Live

_REFRESH_S = 0.25
_SHARE_OF_A_CORE = 0.02
"""Most of one core that drawing may take, also on a slow board."""

_LONGEST_PAUSE_S = 2.0
"""Seconds between two looks, at most: a table that stands still looks like a run that does."""

_PLAIN_LINE_S = 2.0
_PLAIN_LINE_SHARE = 0.02
"""Seconds between plain lines, as a part of the time since the view began: a run of hours leaves a
log that people can still read."""

_STILL_S = 1.0
"""Seconds after which a table is drawn again though nothing is new: its clock shows that the view
is alive, and how long nothing came."""

_QUIET_S = 3.0
"""Seconds without a new line after which the table reports it."""

_UNDER_WAY = ("waiting", "starting", "running", "paused")

_NEWS_KEPT = 3
"""Lines of news below the tables."""


def cuts_rows(environ: Mapping[str, str]) -> bool:
    """Whether a narrowed terminal cuts its rows, as far as its environment says."""
    return "STY" in environ or ("XTERM_VERSION" in environ and "TMUX" not in environ)


class Narrowing:
    """A rich.console.RenderHook: erases what a narrowed terminal makes of a frame of `live`.

    Most terminals break rows that have become too long. rich goes up as many rows as it has drawn,
    so that the upper rows of the older frame would stay above the next one. xterm and GNU screen
    cut rows: there nothing more is erased, because that would be the rows above the frame.

    Push it before `live` starts: hooks pushed later put their part in front, and `live` has to go
    up its own rows first.
    """

    def __init__(self, live: Live, *, cuts_rows: bool = False) -> None:
        self._live, self._cuts_rows = live, cuts_rows
        self._drawn: tuple[RenderableType, ConsoleDimensions] | None = None
        """The frame on the terminal, and the terminal's size as it was drawn."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        from rich.control import Control
        from rich.segment import ControlType

        console = self._live.console
        more = self._more_rows(console)
        self._drawn = self._live.renderable, console.size
        up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2))
        return [Control(*up * more), *renderables] if more else renderables

    def _more_rows(self, console: Console) -> int:
        """Rows that the last frame takes now beyond those that it was drawn in."""
        if self._drawn is None or self._cuts_rows:
            return 0
        from rich.segment import Segment

        frame, size = self._drawn
        width = console.width
        if width >= size.width:
            return 0
        segments = console.render(frame, console.options.update_dimensions(*size))
        cells = [Segment.get_line_length(line) for line in Segment.split_lines(segments)]
        return sum((min(each, size.width) - 1) // width for each in cells[: size.height] if each)


class Speed:
    """Virtual seconds that a simulation covers in a real second."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None
        self.times = 0.0
        """0 until it is known."""

    def add_point(self, virtual: float, now: float) -> None:
        """Take in that the simulation was at `virtual` seconds at `now`."""
        self._first = self._first or (virtual, now)
        if now > self._first[1] and virtual > self._first[0]:
            self.times = (virtual - self._first[0]) / (now - self._first[1])

    def __str__(self) -> str:
        return f"{self.times:.3g} times as fast as real time"


class LiveView:
    """Shows runs while they run.

    Call `refresh()` as often as you like: it looks at the folders a few times a second and draws
    only if there is something new.

        with LiveView(folders, clock=time.monotonic) as view:
            while training():
                view.refresh()
                ...

    On a terminal the table is redrawn in place; elsewhere it prints a line for each run every two
    seconds (less often in a run of hours) and one for each event that is worth a warning. It starts
    no thread.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        clock: Callable[[], float],
        cpu: Callable[[], float] = time.thread_time,
        heading: str = "",
        metric: str = "accuracy",
        out: TextIO | None = None,
        console: Console | None = None,
        simulated: bool = False,
    ) -> None:
        self.watches = [FolderWatch(folder, metric) for folder in folders]
        self._speeds = {watch.name: Speed() for watch in self.watches} if simulated else {}
        self._clock, self._cpu, self._heading = clock, cpu, units.printable(heading)
        self._out = out or sys.stdout
        self._console = console or _terminal(self._out)
        self.verbose = False
        """Whether routine events are shown, too."""
        self._live: Live | None = None
        self._news: list[str] = []
        self._next = clock()
        self._began = self._heard = self._drawn = clock()
        self._printed_at: dict[str, float] = {}
        self._said: dict[str, str] = {}
        self._overran: set[str] = set()

    def __enter__(self) -> Self:
        if self._console is not None:
            from rich.live import Live

            # Without a refresh thread: it would draw while a process is being forked.
            self._live = Live(self._frame(), console=self._console, auto_refresh=False)
            narrowing = Narrowing(self._live, cuts_rows=cuts_rows(os.environ))
            self._console.push_render_hook(cast("RenderHook", narrowing))
            self._live.start()
        elif self._heading:
            self._say(self._heading)
        return self

    def __exit__(self, *error: object) -> None:
        self.refresh(at_once=True)
        if self._live is not None:
            self._live.update(self._frame(with_members=False), refresh=True)
            self._live.stop()
            self._live.console.pop_render_hook()
            self._live = None
        else:
            for watch in self.watches:
                if watch.data.members:
                    self._say_state(watch.name, plain_line(watch.state()))

    def refresh(self, *, at_once: bool = False) -> None:
        """Read what is new and show it; does nothing if it is too soon, unless `at_once`."""
        now, began = self._clock(), self._cpu()
        if now < self._next and not at_once:
            return
        fresh = {watch.name: self._told_once(watch.name, watch.read()) for watch in self.watches}
        for watch in self.watches:
            if watch.name in self._speeds and watch.data.members:
                self._speeds[watch.name].add_point(watch.data.t, now)
        if any(fresh.values()):
            self._heard = now
        if self._live is not None:
            self._redraw(fresh, now)
        else:
            self._print(fresh, now)
        # Not by the clock: on a busy machine a look of a millisecond may take seconds of it.
        pause = max(_REFRESH_S, (self._cpu() - began) / _SHARE_OF_A_CORE)
        self._next = now + min(pause, _LONGEST_PAUSE_S)

    def _told_once(self, name: str, records: list[Record]) -> list[Record]:
        """The records without overruns but the first of the run: each member reports its own."""
        once = []
        for record in records:
            if record["kind"] == "event" and record.get("event") == "overrun":
                if name in self._overran:
                    continue
                self._overran.add(name)
            once.append(record)
        return once

    def say_above(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._say(line)

    def _redraw(self, fresh: dict[str, list[Record]], now: float) -> None:
        still = not any(fresh.values()) and now - self._drawn < _STILL_S
        if still or self._live is None:
            return
        self._drawn = now
        for name, records in fresh.items():
            self._news += news(name, records, routine=self.verbose)
        del self._news[:-_NEWS_KEPT]
        self._live.update(self._frame(), refresh=True)

    def _frame(self, *, with_members: bool = True) -> Frame:
        states = tuple(map(self._state, self.watches))
        clock = self._virtual() or self._clock_in_words(states)
        return Frame(self._heading, states, tuple(self._news), with_members, clock)

    def _clock_in_words(self, states: Sequence[RunState]) -> str:
        """Time since the view began, and since the last line; "" when all is over."""
        now = self._clock()
        if not self._heading or all(state.phase not in _UNDER_WAY for state in states):
            return ""
        quiet = now - self._heard
        still = f"; nothing new for {quiet:.0f} s" if quiet >= _QUIET_S else ""
        return f" ({now - self._began:.0f} s{still})"

    def _state(self, watch: FolderWatch) -> RunState:
        """A run as people see it: the time left of a simulation is in real seconds."""
        state, speed = watch.state(), self._speeds.get(watch.name)
        if speed is None or state.left_s is None:
            return state
        return replace(state, left_s=state.left_s / speed.times if speed.times else None)

    def _virtual(self) -> str:
        """The virtual time and speed of the run under way, if it is simulated."""
        for watch in self.watches:
            speed = self._speeds.get(watch.name)
            if speed is not None and speed.times and watch.state().phase == "running":
                return f" ({units.duration(watch.data.t)} simulated, {speed})"
        return ""

    def _print(self, fresh: dict[str, list[Record]], now: float) -> None:
        every = max(_PLAIN_LINE_S, (now - self._began) * _PLAIN_LINE_SHARE)
        for watch in self.watches:
            for line in news(watch.name, fresh[watch.name], routine=self.verbose):
                self._say(line)
            moved = any(record["kind"] != "event" for record in fresh[watch.name])
            if moved and now - self._printed_at.get(watch.name, -every) >= every:
                self._printed_at[watch.name] = now
                self._say_state(watch.name, plain_line(self._state(watch)), self._virtual())

    def _say_state(self, name: str, line: str, more: str = "") -> None:
        """Print the line of a run, unless it is the last one that was printed of it."""
        if self._said.get(name) != line:
            self._said[name] = line
            self._say(line + more)

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)


def _terminal(out: TextIO) -> Console | None:
    """A console if `out` is a terminal that can move its cursor, and rich is there, else None."""
    if not out.isatty() or find_spec("rich") is None:
        return None
    from rich.console import Console

    console = Console(file=out)
    return None if console.is_dumb_terminal else console
