"""`edgetrain watch`: show a run that is under way, from its folder."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from edgetrain.cli import common

_EXAMPLES = """\
examples:
  edgetrain watch                       the newest run in runs/
  edgetrain watch runs/20260131-142501-digits
  ssh lab edgetrain watch --runs /data/runs

Ends when the run is over, or with Ctrl-C; the run does not notice.
"""

_POLL_S = 0.2


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = common.verb(
        subparsers,
        "watch",
        "show a run that is under way, live, from its folder",
        "Show a run while it trains. It reads the run folder and asks no process.",
        _EXAMPLES,
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="RUN", help="default: the newest run"
    )
    common.add_output(parser, json=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the folder's runs until they are over, then the closing table."""
    from edgetrain.runs.folder import newest, read_summary, runs_in
    from edgetrain.runs.reports.comparison import compare
    from edgetrain.runs.reports.comparison_table import text
    from edgetrain.runs.reports.live.view import LiveView

    folder = arguments.folder or newest(arguments.runs)
    folders = runs_in(folder)
    try:
        with LiveView(folders, clock=time.monotonic, heading=str(folder)) as view:
            while left := [each for each in folders if read_summary(each) is None]:
                view.refresh()
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        left = [each for each in folders if read_summary(each) is None]
    summaries = [found for each in folders if (found := read_summary(each)) is not None]
    if summaries and not left:
        common.say(text(compare(summaries)))
    return 0
