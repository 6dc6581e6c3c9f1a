"""`edgetrain report`: run folders as one HTML page that opens anywhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from edgetrain.cli import common
from edgetrain.errors import ConfigError

_EXAMPLES = """\
examples:
  edgetrain report                                   the newest run in runs/
  edgetrain report runs/20260131-143007-digits -o dga.html
  edgetrain report runs/first runs/second            two runs side by side
  edgetrain report hub-folder pi-0-folder pi-1-folder    a hub and its members are one run

The page needs no network and no script: figure and loss against time, steps and bytes, where the
time of each step went, the timeline of rounds, events, the job. Nothing that trains is asked.
"""


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = common.verb(
        subparsers,
        "report",
        "run folders as one HTML page: curves, where time went, the timeline of rounds",
        "Make one HTML page of run folders. It opens without a network.",
        _EXAMPLES,
    )
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="RUN", help="run folders; default: the newest run"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE",
        help="the page (default: report.html in the first folder)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    common.add_output(parser, json=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read the folders, write the page, say where it is."""
    from edgetrain.runs.files import write_text
    from edgetrain.runs.folder import newest
    from edgetrain.runs.reports.page.document import document
    from edgetrain.runs.reports.page.story import report_of

    folders = arguments.folders or [newest(arguments.runs)]
    output = arguments.output or folders[0] / "report.html"
    if arguments.output is not None and output.exists() and not arguments.force:
        raise ConfigError(f"{output} is there already", "choose another name, or say --force")
    page = document(report_of(folders))
    try:
        write_text(output, page)
    except OSError as error:
        raise ConfigError(
            f"cannot write {output}: {error.strerror}", "choose another place with -o"
        ) from None
    common.say(f"report: {output}")
    return 0
