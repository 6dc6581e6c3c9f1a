"""`edgetrain export`: the trained model of a run as files to carry away."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgetrain.cli import common, running

HELP = "the trained model of a run as files: ONNX, int8, torch"
ABOUT = "Write the trained model of a run as files that run without edgetrain, and evaluate them."
EXAMPLES = """\
examples:
  edgetrain export                                     the newest run, in every format
  edgetrain export runs/20260131-142501-digits --onnx --int8 -o for-the-pi
  edgetrain export runs/20260131-142501-digits --torch              weights, for torch

Every file is evaluated by the task, ONNX files by onnxruntime, and its figure is printed and kept
in export.json. One that is worse than the trained model by more than 0.5 points of accuracy, or 1 %
of another figure, is kept and called so; the exit status is 1. docs/how-to/export.md: the files on
a Pi without torch.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_run(parser)
    for name, help in (
        ("onnx", "model.onnx, float32, for onnxruntime"),
        ("int8", "model.int8.onnx, a third of the size"),
        ("torch", "model.pt, a state_dict for torch.load(…, weights_only=True)"),
    ):
        parser.add_argument(
            f"--{name}", dest="formats", action="append_const", const=name, help=help
        )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="a new folder (default: RUN/export)"
    )
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    from edgetrain.runs.folder import newest
    from edgetrain.runs.reports.tables import export_text
    from edgetrain.training.export import FILES, export

    folder = arguments.folder or newest(arguments.runs)
    running.say_loading(arguments)
    said = export(folder, arguments.formats or tuple(FILES), arguments.output)
    below = [row["file"] for row in said["files"] if not row["holds"]]
    common.answer(
        arguments,
        said,
        f"{export_text(said)}\n\nexported to: {arguments.output or folder / 'export'}",
    )
    if below:
        common.warn(f"below the bar, kept all the same: {', '.join(below)}")
    return int(bool(below))
