"""`edgetrain track`: hand a run to TensorBoard, MLflow or Weights & Biases, from its folder."""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.cli import common
from edgetrain.cli.watch import runs_begun
from edgetrain.errors import ConfigError

if TYPE_CHECKING:
    from edgetrain.runs.tracking.trackers import HandedRun

HELP = "hand a run to TensorBoard, MLflow or Weights & Biases"
ABOUT = "Hand the curves of a run to a tracker, from its folder."
EXAMPLES = """\
examples:
  edgetrain track --to tensorboard                        the newest run, into its own folder
  edgetrain track runs/20260131-142501-digits --to tensorboard --follow
  edgetrain track runs/sweep --to mlflow --into sqlite:///mlflow.db --project digits
  edgetrain track --to wandb --offline                    `wandb sync` sends it later

The run folder is read, and no process asked: whatever becomes of the tracker, a run goes on.
docs/how-to/looking.md has the table of what goes where.
"""

_POLL_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_run(parser)
    parser.add_argument(
        "--to", required=True, metavar="TRACKER",
        help="tensorboard, mlflow, wandb, or what an installed package adds",
    )  # fmt: skip
    parser.add_argument(
        "--follow", action="store_true", help="go on until the run is over, or until Ctrl-C"
    )
    parser.add_argument(
        "--into", default="", metavar="PLACE",
        help="tensorboard: a folder (default: the run's own); mlflow: a tracking URI (default: "
        "MLflow's); wandb: the folder for its files",
    )  # fmt: skip
    parser.add_argument(
        "--project", default="", metavar="NAME",
        help="experiment or project (default: the job's name)",
    )  # fmt: skip
    parser.add_argument("--offline", action="store_true", help="wandb: send nothing")
    parser.add_argument(
        "--members", type=int, default=32, metavar="N",
        help="members that get curves of their own (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Hand over what is there, and what comes."""
    from edgetrain.runs.folder import newest_whole, read_summary, runs_in
    from edgetrain.runs.looking import NICE, when_stdin_ends
    from edgetrain.runs.tracking.trackers import HandedRun

    if arguments.members < 0:
        raise ConfigError(f"--members {arguments.members}", "0 or more")
    folder = arguments.folder or newest_whole(arguments.runs)
    tracked: dict[Path, HandedRun] = {}
    ended = threading.Event()
    if arguments.until_stdin_ends:
        os.nice(NICE)
        when_stdin_ends(ended.set)
    with contextlib.ExitStack() as open_trackers, contextlib.suppress(KeyboardInterrupt):
        while True:
            is_over = read_summary(folder) is not None or not arguments.follow or ended.is_set()
            for each in runs_begun(folder) if arguments.follow else runs_in(folder):
                if each not in tracked:
                    handed = HandedRun(
                        each, arguments.to, into=arguments.into, project=arguments.project,
                        offline=arguments.offline, members=arguments.members,
                    )  # fmt: skip
                    tracked[each] = open_trackers.enter_context(handed)
                tracked[each].hand_over(is_over)
            if is_over:
                break
            ended.wait(_POLL_S)
    left_out = max((len(each.curves.left_out) for each in tracked.values()), default=0)
    if left_out:
        common.warn(
            f"{left_out} members beyond the first {arguments.members} have no curves of their own "
            "(--members)"
        )
    points = {str(each): run.points for each, run in tracked.items()}
    lines = [f"{each}: {count:,} points to {arguments.to}" for each, count in points.items()]
    return common.answer(arguments, points, "\n".join(lines))
