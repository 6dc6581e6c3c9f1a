"""`edgetrain report`: run folders as one HTML page that opens anywhere."""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path

from edgetrain.cli import common
from edgetrain.errors import ConfigError, explain_os_errors, require

HELP = "run folders as one HTML page: curves, where time went, the timeline of rounds"
ABOUT = "Make one HTML page of run folders. It opens without a network."
EXAMPLES = """\
examples:
  edgetrain report                                   the newest run in runs/
  edgetrain report runs/20260131-143007-digits -o dga.html
  edgetrain report runs/first runs/second            two runs side by side
  edgetrain report runs/first --figures figures --format pdf
  edgetrain report runs/first --trace trace.json     for ui.perfetto.dev
  edgetrain report hub-folder pi-0-folder pi-1-folder    a hub and its members are one run

The page needs no network and no script: figure and loss against time, steps and bytes, where the
time of each step went, the timeline of rounds, events, the job. Nothing that trains is asked.
--figures, --trace and --csv write the same for papers, for Perfetto and for spreadsheets.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="RUN", help="run folders; default: the newest run"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE",
        help="the page (default: report.html in the first folder)",
    )  # fmt: skip
    parser.add_argument(
        "--figures", type=Path, metavar="FOLDER",
        help="draw each chart as a file, one and two columns wide (needs matplotlib)",
    )  # fmt: skip
    parser.add_argument(
        "--format", metavar="F,F", help="of --figures: png, svg, pdf (default: pdf)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="the timeline as Chrome's JSON, for Perfetto"
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="a row for each step of each member"
    )
    parser.add_argument("--force", action="store_true", help="replace a FILE that is there")
    common.add_output(parser, json=False)


def run(arguments: argparse.Namespace) -> int:
    """Read the folders, write the page and what else is asked for, say where it is."""
    from edgetrain.runs.folder import newest
    from edgetrain.runs.reports.page.document import document
    from edgetrain.runs.reports.page.story import report_of

    named = (arguments.output, arguments.trace, arguments.csv)
    for path in filter(None, named):
        if path.exists() and not arguments.force:
            raise ConfigError(f"{path} is there already", "choose another name, or say --force")
    formats = _formats(arguments)
    folders = arguments.folders or [newest(arguments.runs)]
    stories = report_of(folders)
    _write(arguments.output or folders[0] / "report.html", document(stories), "report")
    if arguments.trace is not None:
        from edgetrain.runs.reports.trace import trace

        _write(arguments.trace, trace(stories), "trace (open it at ui.perfetto.dev)")
    if arguments.csv is not None:
        from edgetrain.runs.reports.trace import table

        rows = table(stories)
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(rows)
        _write(arguments.csv, file.getvalue(), "rows")
    if formats:
        from edgetrain.runs.reports.plot import paper_figures

        for path in paper_figures(stories, arguments.figures, formats):
            common.say(f"figure: {path}")
    return 0


def _formats(arguments: argparse.Namespace) -> list[str]:
    """The formats of figures that are asked for; ConfigError where they cannot be drawn."""
    if arguments.figures is None:
        if arguments.format is not None:
            raise ConfigError("--format is for --figures FOLDER", "say both, or none")
        return []
    from edgetrain.runs.reports.plot import formats_of

    require("--figures", "lab", "matplotlib")
    return formats_of(arguments.format or "pdf")


def _write(path: Path, text: str, what: str) -> None:
    from edgetrain.files.writing import write_text

    with explain_os_errors(f"cannot write {path}", "choose another place"):
        write_text(path, text)
    common.say(f"{what}: {path}")
