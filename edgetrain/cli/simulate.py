"""`edgetrain simulate`: one job in virtual time, its devices and links simulated."""

from __future__ import annotations

import argparse

from edgetrain.cli import common, running
from edgetrain.cli.run import heading, train
from edgetrain.jobs.defaults import SIMULATED

HELP = "train a job in virtual time: thousands of members on one machine, in seconds"
ABOUT = "Train one job in virtual time: the gradients are real, devices and links are simulated."
EXAMPLES = """\
examples:
  edgetrain simulate job.toml
  edgetrain simulate members=40 device=raspberry-pi-4b network=4g-good steps=60 batch=2
  edgetrain simulate members=1000 "data.partition=shared(64)" network=4g-good

The run folder, the table and the page are those of `edgetrain run`; their seconds are virtual.
Without a job file members are Raspberry Pis 4B, 200 ms from their hub.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job(parser)
    running.add_vmap(parser)
    common.add_output(parser)
    running.add_verbose(parser)
    common.add_dashboard(parser)
    common.add_track(parser)
    parser.set_defaults(simulate=True)


def run(arguments: argparse.Namespace) -> int:
    """Simulate and report. After Ctrl-C report what was trained; the interrupt is raised again."""
    job, beside = common.job_of(arguments, SIMULATED)
    (found,) = running.check_before_torch(arguments, [job])
    from edgetrain.jobs.plan import with_task
    from edgetrain.runs.folder import create

    run_planned = running.runner(arguments)
    planned = with_task(running.with_host_pace(arguments, found, beside), beside)
    folder = create(arguments.runs, planned.job.name)
    running.say_choices(arguments, [planned])
    return train(arguments, planned, folder, run_planned, heading(planned))
