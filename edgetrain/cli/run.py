"""`edgetrain run`: one job on this machine, its network and devices emulated."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from edgetrain.cli import common

_EXAMPLES = """\
examples:
  edgetrain run job.toml
  edgetrain run job.toml network=wan-500ms strategy=dga delay=20
  edgetrain run steps=100 members=4 device=raspberry-pi-4b

A member may be killed while it runs; Ctrl-C ends everything and leaves a readable run folder.
"""


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = common.verb(
        subparsers,
        "run",
        "train a job on this machine, on emulated devices and links",
        "Train one job: a hub and its members as processes of this machine.",
        _EXAMPLES,
    )
    common.add_job(parser)
    common.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan, run, watch, sum up."""
    job, beside = common.job_of(arguments)
    from edgetrain import comparison, emulate, plans, plot, runs
    from edgetrain.live import LiveView

    emulate.warm_up()
    planned = plans.plan(job, beside)
    folder = runs.create(arguments.runs, planned.job.name)
    out = sys.stderr if arguments.json else sys.stdout
    with LiveView(
        [folder], clock=time.monotonic, heading=_heading(planned), metric=planned.metric, out=out
    ) as view:
        summary = emulate.run(planned, folder, view.refresh)
    picture = common_picture(plot.run_figure, folder, folder / "run.png")
    compared = comparison.compare([summary])
    if arguments.json:
        common.say(json.dumps(summary | {"folder": str(folder)}))
    else:
        common.say(comparison.text(compared, picture))
        common.say(f"run folder: {folder}")
    return 0


def common_picture(draw: Any, what: Any, path: Any) -> Any:
    """Draw if matplotlib is there; its absence is told, and is no error."""
    try:
        return draw(what, path)
    except ImportError:
        common.warn("no picture: matplotlib is not installed (pip install 'edgetrain[lab]')")
        return None


def _heading(planned: Any) -> str:
    job = planned.job
    return (
        f"{planned.name}: {job.fleet.members} members, {job.fleet.device}, "
        f"network {job.fleet.network}, {job.train.steps} steps"
    )
