"""`edgetrain watch`: show a run that is under way, from its folder."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from edgetrain.cli import common
from edgetrain.errors import ConfigError

HELP = "show a run that is under way, live, from its folder"
ABOUT = "Show a run while it trains. It reads the run folder and asks no process."
EXAMPLES = """\
examples:
  edgetrain watch                       the newest run in runs/
  edgetrain watch runs/20260131-142501-digits
  ssh lab edgetrain watch --runs /data/runs

Ends when the run is over, or with Ctrl-C; the run does not notice.
"""

_POLL_S = 0.2
_QUIET_S = 60.0
"""Seconds without a new line after which a run may have been killed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_run(parser)
    common.add_output(parser, json=False)


def run(arguments: argparse.Namespace) -> int:
    from edgetrain.runs.folder import JOB, newest_whole, read_summary, runs_in
    from edgetrain.runs.reports.comparison import compare
    from edgetrain.runs.reports.comparison_table import text

    folder = arguments.folder or newest_whole(arguments.runs)
    if not (folder / JOB).exists() or read_summary(folder) is not None:
        runs_in(folder)  # refuses what is no run folder
    with contextlib.suppress(KeyboardInterrupt):
        _follow(folder)
    over = [found for each in runs_begun(folder) if (found := read_summary(each)) is not None]
    if over:
        common.say(text(compare(over)))
    return 0


def _follow(folder: Path) -> None:
    """Show the runs in a folder that are under way, until the folder has a summary."""
    from edgetrain.runs.folder import read_summary
    from edgetrain.runs.reports.live.view import LiveView

    told = ""
    while read_summary(folder) is None:
        active = _active(folder)
        said = (
            "" if active else f"{folder}: nothing has begun yet, or all that had is over; waiting"
        )
        told = _tell(said, told)
        if active:
            with LiveView(active, clock=time.monotonic, heading=str(folder)) as view:
                while _active(folder) == active:
                    view.refresh()
                    told = _tell(_quiet(active), told)
                    time.sleep(_POLL_S)
        else:
            time.sleep(_POLL_S)


def _tell(said: str, told: str) -> str:
    """Say something, unless it was said just before. Returns what is said now."""
    if said and said != told:
        common.warn(said)
    return said


def _quiet(active: Sequence[Path]) -> str:
    from edgetrain.runs.folder import metrics_path

    newest = max(metrics_path(each).stat().st_mtime for each in active)
    if time.time() - newest < _QUIET_S:
        return ""
    return f"nothing new for {_QUIET_S:.0f} s: it may have been killed (Ctrl-C ends the looking)"


def runs_begun(folder: Path) -> list[Path]:
    from edgetrain.runs.folder import runs_in

    try:
        return runs_in(folder)
    except ConfigError:
        return []


def _active(folder: Path) -> list[Path]:
    from edgetrain.runs.folder import read_summary

    return [each for each in runs_begun(folder) if read_summary(each) is None]
