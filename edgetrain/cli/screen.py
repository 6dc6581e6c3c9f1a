"""What a hub or a member shows while it works: the live table on a terminal, plain lines elsewhere.

All of it is printed by a thread of its own, from the run folder: a terminal that does not read (a
laptop that sleeps, Ctrl-S) stops the thread and nothing else. Lines that are said meanwhile wait
for it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

from edgetrain.runs.reports import units
from edgetrain.runs.reports.live.plain import member_lines, plain_line
from edgetrain.runs.reports.live.watch import FolderWatch

if TYPE_CHECKING:
    from edgetrain.runs.reports.live.view import LiveView

_LOOK_S = 0.25
_MOST_LINES = 1000
"""Lines that wait for a terminal; the oldest ones are dropped."""
_PATIENCE_S = 2.0
"""For the last frame, at the end."""
_PLAIN_S, _PLAIN_SHARE = 5.0, 0.02
"""Seconds between plain lines, and as a part of the time so far: a hub runs for days."""


class Screen:
    """Prints lines, and what a run folder says, until the block ends; then its closing table, if it
    has a summary by then.

    Until `follow` is called, and after the block, `say` prints at once.
    """

    def __init__(self, heading: str, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self.is_terminal = self._out.isatty()
        self._heading = heading
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._folder: Path | None = None

    def say(self, line: str) -> None:
        """Print a line; waits for nothing while a run is followed."""
        if self._thread is None:
            self._print(line)
        else:
            self._lines.append(line)

    def follow(self, folder: Path, metric: str = "accuracy") -> None:
        """Show this run folder from now on; `metric` is the figure of its task."""
        self._folder = folder
        self._thread = threading.Thread(target=self._run, args=(folder, metric), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)
            if not self._thread.is_alive():
                self._thread = None
        if self._folder is not None and (table := closing_table(self._folder)) is not None:
            self._print(table)

    # -- in the thread ------------------------------------------------------------------------

    def _run(self, folder: Path, metric: str) -> None:
        if self.is_terminal:
            from edgetrain.runs.reports.live.view import LiveView

            with LiveView(
                [folder], clock=time.monotonic, heading=self._heading, metric=metric
            ) as view:
                while not self._over.wait(_LOOK_S):
                    self._print_waiting(view)
                    view.refresh()
                self._print_waiting(view)
        else:
            watch = FolderWatch(folder, metric)
            began, printed, last = time.monotonic(), 0.0, ""
            over = False
            while not over:
                over = self._over.wait(_LOOK_S)
                self._print_waiting()
                if not watch.read() and not over:
                    continue
                now = time.monotonic()
                pause_s = max(_PLAIN_S, (now - began) * _PLAIN_SHARE)
                state = watch.state()
                if state.step and (over or now - printed >= pause_s):
                    said = "\n".join([plain_line(state), *member_lines(state)])
                    printed = now
                    if said != last:
                        self._print(said)
                    last = said
        self._print_waiting()

    def _print_waiting(self, view: LiveView | None = None) -> None:
        while self._lines:
            line = self._lines.popleft()
            if view is None:
                self._print(line)
            else:
                view.say_above(line)

    def _print(self, line: str) -> None:
        print(units.printable_lines(line), file=self._out, flush=True)


class ScreenHandler(logging.Handler):
    """Log lines as lines of a screen, so that they do not write into its table."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.say(self.format(record))


def closing_table(folder: Path) -> str | None:
    """The table of the run in a folder; None if it has no summary, or nothing was trained."""
    from edgetrain.errors import ConfigError
    from edgetrain.runs.folder import read_summary
    from edgetrain.runs.reports.comparison import compare
    from edgetrain.runs.reports.comparison_table import text

    try:
        summary = read_summary(folder)
    except ConfigError:
        return None
    return text(compare([summary])).rstrip("\n") if summary and summary["steps"] else None
