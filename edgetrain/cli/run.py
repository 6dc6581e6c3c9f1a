"""`edgetrain run`: one job as processes of this machine, its network and devices emulated."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common, running
from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job
from edgetrain.jobs.reading import load

if TYPE_CHECKING:
    from edgetrain.jobs.placement.decision import Question
    from edgetrain.jobs.placement.search import Found
    from edgetrain.jobs.resolved import Resolved

HELP = "train a job on this machine, on emulated devices and links"
ABOUT = "Train one job: a hub and its members as processes of this machine."
EXAMPLES = """\
examples:
  edgetrain run job.toml
  edgetrain run job.toml network=wan-500ms strategy=dga delay=20
  edgetrain run steps=100 members=4 device=raspberry-pi-4b
  edgetrain run job.toml servers.placement="data=2 pipeline=2 microbatches=4"
  edgetrain run --resume runs/20260131-142501-digits
  edgetrain run job.toml --cluster cluster.toml            on real devices

A member may be killed while it runs. Ctrl-C ends everything; the table, the picture and the folder
are those of what was trained (exit status 130). If members fail, they are named below the table and
the run is "incomplete" (exit status 1). `edgetrain simulate` does the same in virtual time.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job(parser)
    common.add_output(parser)
    running.add_verbose(parser)
    common.add_dashboard(parser)
    common.add_track(parser)
    parser.add_argument(
        "--print-commands", action="store_true",
        help="of a job on several servers: print the torchrun command for each, and start nothing",
    )  # fmt: skip
    parser.add_argument(
        "--resume", type=Path, metavar="RUN",
        help="continue a run of a group from the last snapshot in its folder",
    )  # fmt: skip
    parser.add_argument(
        "--cluster", metavar="FILE",
        help="train on the devices of this cluster file, which run already: the job is sent to "
        "them, and its hub runs here (docs/how-to/devices-at-work.md)",
    )  # fmt: skip
    common.add_keys(parser)
    parser.set_defaults(simulate=False)


def run(arguments: argparse.Namespace) -> int:
    """Run and report. After Ctrl-C report what was trained; the interrupt is raised again."""
    if arguments.keys is not None and arguments.cluster is None:
        raise ConfigError("--keys without --cluster: members on this machine need none")
    if arguments.cluster is not None:
        from edgetrain.cli import desk

        return desk.run_on_cluster(arguments)
    job, beside = _job(arguments)
    (found,) = running.check_before_torch(arguments, [job])
    from edgetrain.jobs.plan import with_task
    from edgetrain.runs.folder import create
    from edgetrain.training import emulated

    run_planned = running.runner(arguments)
    emulated.warm_up()
    planned = with_task(found, beside)
    asked = _group(arguments, planned)
    if arguments.print_commands:
        assert asked is not None
        return _print_commands(arguments, planned, *asked)
    folder = arguments.resume or create(arguments.runs, planned.job.name)
    about, count, what = heading(planned), planned.job.fleet.members, "members"
    if asked is not None:
        placement = asked[0].placement
        about = (
            f"{planned.name}: {placement.ranks} ranks, {placement}, {planned.job.train.steps} steps"
        )
        count, what, run_planned = placement.ranks, "ranks", partial(_run_group, *asked)
    running.say_choices(arguments, [planned])
    running.say_start(arguments, count, what)
    return train(arguments, planned, folder, run_planned, about)


def train(
    arguments: argparse.Namespace,
    planned: Resolved,
    folder: Path,
    run: Callable[..., dict[str, Any]],
    about: str,
) -> int:
    """Run a planned job below the line `about` and report; the exit status."""
    from edgetrain.api import run_one
    from edgetrain.runs.summary import interrupted

    view = running.view(arguments, about, planned.metric)
    try:
        resumed = getattr(arguments, "resume", None) is not None
        summary = run_one(planned, folder, run, view, keep=resumed)
    except KeyboardInterrupt:
        if folder.exists():
            _report(arguments, interrupted(folder), folder)
        raise
    _report(arguments, summary, folder)
    return running.status_of([summary])


def _job(arguments: argparse.Namespace) -> tuple[Job, Path | None]:
    """The job; with --resume that of the run, with overrides."""
    if arguments.resume is None:
        return common.job_of(arguments)
    overrides = [word for word in arguments.job if "=" in word]
    if len(overrides) < len(arguments.job):
        raise ConfigError(
            "--resume continues the job of a run", "edgetrain run --resume runs/… [KEY=VALUE]"
        )
    from edgetrain.jobs.resolved import look_beside

    job = load(arguments.resume / "job.toml", overrides)
    look_beside(Path.cwd())
    return job, Path.cwd()


def _group(arguments: argparse.Namespace, planned: Resolved) -> tuple[Found, Question] | None:
    """The placement of the group that the job runs on, and its question; None: it runs on devices.
    ConfigError for a job that fits nowhere."""
    from edgetrain.jobs.placement.decision import decide
    from edgetrain.jobs.placement.question import may_not_fit, question_of, wants_group
    from edgetrain.jobs.shares import has_group
    from edgetrain.training.servers.rehearsing import rehearsal

    job = planned.job
    found = question = None
    if not (has_group(job) or job.fleet.placement) and (wants_group(job) or may_not_fit(planned)):
        question = question_of(planned, planned.beside)
        decision = decide(question, rehearsal(job, planned.beside))
        if not decision.chosen:
            raise ConfigError(f"the job fits nowhere: {decision.why}", "see `edgetrain plan`")
        found = decision.found[0] if decision.placement is not None else None
    if found is not None and not arguments.json:
        common.say(f"on servers ({found.placement}), because {decision.why}")
    if found is None and (arguments.resume or arguments.print_commands):
        raise ConfigError(
            "the job runs on its devices, not on a group of processes on servers",
            "[servers] placement or fallback says when it does; see `edgetrain plan`",
        )
    if arguments.resume:
        from edgetrain.training.servers.snapshots import latest

        if latest(arguments.resume) is None:
            raise ConfigError(f"{arguments.resume} has no snapshot to resume from")
    return None if found is None or question is None else (found, question)


def _run_group(
    group: Found, question: Question, planned: Resolved, folder: Path, watch: Callable[[], None]
) -> dict[str, Any]:
    from edgetrain.jobs.placement.question import check_trust, cluster_of
    from edgetrain.training.servers.group import run

    cluster = cluster_of(planned.job, planned.beside)
    if cluster is not None:
        assert question.servers is not None
        check_trust(group, cluster, question.servers)
    return run(planned, group, folder, watch, question=question, cluster=cluster)


def _print_commands(
    arguments: argparse.Namespace, planned: Resolved, group: Found, question: Question
) -> int:
    from edgetrain.jobs.placement.question import cluster_of
    from edgetrain.training.servers.commands import commands

    cluster = cluster_of(planned.job, planned.beside)
    if cluster is None:
        raise ConfigError(
            "--print-commands is for the servers of a cluster.toml", "servers.cluster"
        )
    assert question.servers is not None
    runs = str(Path(arguments.runs) / (planned.job.name or "group"))
    common.say("\n".join(commands(group, question.servers, cluster, arguments.job, runs)))
    return 0


def _report(arguments: argparse.Namespace, summary: dict[str, Any], folder: Path) -> None:
    from edgetrain.jobs.privacy.promise import said
    from edgetrain.runs.loaded import Run
    from edgetrain.runs.reports.comparison import compare
    from edgetrain.runs.reports.comparison_table import text
    from edgetrain.runs.reports.message import message

    if arguments.json:
        common.say(json.dumps(summary | {"folder": str(folder)}))
    else:
        compared = compare([summary])
        common.say(f"{text(compared)}result: {message(compared)}\n")
        if summary.get("privacy"):
            common.say(said(summary["privacy"]))
        common.say(f"run folder: {folder}")
    if running.saved(lambda: Run(folder).report()) and not arguments.json:
        common.say(f"page: {folder / 'report.html'}")


def heading(planned: Resolved) -> str:
    job = planned.job
    text = (
        f"{planned.name}: {job.fleet.members} members, {job.fleet.device}, "
        f"network {job.fleet.network}, {job.train.steps} steps"
    )
    if planned.promise and planned.promise.epsilon is not None:
        promise = planned.promise
        text += f", epsilon {promise.epsilon:.3g} for each {promise.unit}"
    return text
