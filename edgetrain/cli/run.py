"""`edgetrain run`: one job on this machine, its network and devices emulated or simulated."""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from edgetrain.cli import common

SIMULATED = ("device=raspberry-pi-4b", "network=wan-200ms")
"""Defaults of a simulation without a job file: this machine's own speed means nothing in it."""

_EXAMPLES = """\
examples:
  edgetrain run job.toml
  edgetrain run job.toml network=wan-500ms strategy=dga delay=20
  edgetrain run steps=100 members=4 device=raspberry-pi-4b
  edgetrain run --simulate members=1000 device=raspberry-pi-4b network=4g-good

A member may be killed while it runs. Ctrl-C ends everything; the table, the picture and the folder
are those of what was trained (exit status 130). If members fail, they are named below the table and
the run is "incomplete" (exit status 1).
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
    common.add_simulate(parser)
    common.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan the job, run it under a live view, print the result.

    After Ctrl-C the result is that of what was trained; the interrupt is raised again.
    """
    job, beside = common.job_of(arguments, SIMULATED if arguments.simulate else ())
    from edgetrain.jobs.plan import plan
    from edgetrain.runs.folder import create
    from edgetrain.runs.reports.live.view import LiveView
    from edgetrain.training import emulated

    run_planned = common.runner(arguments)
    if not arguments.simulate:
        emulated.warm_up()
    planned = plan(job, beside)
    folder = create(arguments.runs, planned.job.name)
    view = LiveView(
        [folder],
        clock=time.monotonic,
        heading=_heading(planned),
        metric=planned.metric,
        out=sys.stderr if arguments.json else sys.stdout,
        simulated=arguments.simulate,
    )
    try:
        with view:
            summary = run_planned(planned, folder, view.refresh)
    except KeyboardInterrupt:
        _report(arguments, common.interrupted(folder), folder)
        raise
    _report(arguments, summary, folder)
    return common.status_of([summary])


def _report(arguments: argparse.Namespace, summary: dict[str, Any], folder: Path) -> None:
    """Say what the run came to, then draw it."""
    from edgetrain.jobs.privacy.promise import said
    from edgetrain.runs.reports.comparison import compare
    from edgetrain.runs.reports.comparison_table import text
    from edgetrain.runs.reports.plot import run_figure

    if arguments.json:
        common.say(json.dumps(summary | {"folder": str(folder)}))
    else:
        common.say(text(compare([summary])))
        if summary.get("privacy"):
            common.say(said(summary["privacy"]))
        common.say(f"run folder: {folder}")
    picture = common.picture(partial(run_figure, folder, folder / "run.png"))
    if not arguments.json:
        common.say_pictures([picture])


def _heading(planned: Any) -> str:
    job = planned.job
    text = (
        f"{planned.name}: {job.fleet.members} members, {job.fleet.device}, "
        f"network {job.fleet.network}, {job.train.steps} steps"
    )
    if planned.promise and planned.promise.epsilon is not None:
        promise = planned.promise
        text += f", epsilon {promise.epsilon:.3g} for each {promise.unit}"
    return text
