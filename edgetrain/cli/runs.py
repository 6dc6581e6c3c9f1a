"""`edgetrain runs`: what run folders there are, and how each run ended."""

from __future__ import annotations

import argparse

from edgetrain.cli import common

HELP = "list run folders: job, strategy, simulated or real, status, figure, times"
ABOUT = "List the run folders, the newest last."
EXAMPLES = """\
examples:
  edgetrain runs
  edgetrain runs --runs /data/runs --last 5
  edgetrain runs --json                 for scripts

A run is real (processes of this machine, or devices) or simulated. `took` is the time of training,
virtual in a simulation; `wall clock` is the time that this machine took for it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--last", type=int, default=20, metavar="N", help="default: 20; 0: all")
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    from edgetrain.runs.folder import folders_in
    from edgetrain.runs.reports.listing import listed, text

    folders = folders_in(arguments.runs)
    shown = folders[-arguments.last :] if arguments.last > 0 else folders
    rows = [row for folder in shown for row in listed(folder)]
    said = text(rows) if rows else f"no runs in {arguments.runs}"
    return common.answer(arguments, [row.as_json() for row in rows], said)
