"""`edgetrain hub`: the process that members of a job on several machines join."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

from edgetrain.cli import common
from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job
from edgetrain.training.member.service import Service, told_why
from edgetrain.training.stopping import Stop

HELP = "merge what the members of a job learn"
ABOUT = "Run a job's hub: wait for its members, start them together, merge their rounds."
EXAMPLES = """\
examples:
  edgetrain hub job.toml                                      this machine only
  edgetrain keys init && edgetrain hub job.toml --bind tcp://eth0:5555
                                                              members on other machines, encrypted
  edgetrain hub job.toml --bind tcp://eth0:5555 --insecure    whoever reaches the port
  edgetrain hub members=4 strategy=dga --any-job              for loops of your own (edgetrain.join)
  edgetrain hub job.toml --number 2 --bind tcp://eth0:5555    the second of the hubs in hub.hubs
  edgetrain hub job.toml --spare --bind tcp://eth0:5555       for `control RUN add-hub`, later
  edgetrain hub --resume runs/20260101-120000-digits          go on after the hub has died
  edgetrain hub job.toml --bind tcp://eth0:5555 --replica-of tcp://b:5555
                                                              take over if the hub at b is gone

The hub needs neither torch nor the task. It prints the address that members are to be given.
SIGTERM and Ctrl-C end it behind a last snapshot (exit status 143, or 130): members wait for it, and
--resume goes on. A second one ends it at once.

exit status: 0 done; 1 no member has contributed anything, or one was refused as its replica
differed; 2 it will not get better by itself; 75 try again later (the interface is down or has no
address yet, a name cannot be resolved).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job(parser)
    parser.add_argument(
        "--bind", default="tcp://localhost:5555", metavar="ADDRESS",
        help="tcp://HOST:PORT; HOST is an address, a name, an interface such as eth0, or * for "
        "all; port 0: any free one (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--insecure", action="store_true",
        help="encrypt nothing and let in whoever reaches the port",
    )  # fmt: skip
    common.add_keys(parser)
    parser.add_argument(
        "--number", type=int, default=1, metavar="N",
        help="of several hubs (hub.hubs in the job): which one this is, from 1; the first leads",
    )  # fmt: skip
    parser.add_argument(
        "--spare", action="store_true",
        help="a hub without ranges yet, for `edgetrain control RUN add-hub` while the job trains",
    )  # fmt: skip
    parser.add_argument(
        "--any-job", action="store_true",
        help="take members whatever job they run, if their models are equal",
    )  # fmt: skip
    parser.add_argument(
        "--journal", type=Path, metavar="FOLDER",
        help="where every round is written before it is answered (default: in the run folder)",
    )  # fmt: skip
    parser.add_argument(
        "--no-journal", action="store_true", help="write none: a hub that dies cannot be resumed"
    )
    add_resume(parser)
    parser.add_argument(
        "--replica-of", metavar="HUB",
        help="be the replica of the hub at this address, and take over if it is gone: --bind is "
        "the job's hub.replica (docs/how-to/recovery.md)",
    )  # fmt: skip
    common.add_output(parser, json=False)
    common.add_dashboard(parser)
    common.add_track(parser)
    common.try_again(parser)


def add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume", type=Path, metavar="RUN",
        help="go on with the job in this run folder, from its journal; give the same --bind",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    common.check_track(arguments)
    with told_why() as service, Stop().installed() as stop:
        if arguments.resume and arguments.no_journal:
            why = "--resume goes on from a journal, and --no-journal says there is none"
            raise ConfigError(why)
        from edgetrain.jobs.resolved import with_all_members

        job, beside_job = job_of(arguments)
        job = with_all_members(job)
        from edgetrain.training.hub import HubRequest, serve_job, serve_pipeline

        request = HubRequest(
            job,
            arguments.bind,
            arguments.insecure,
            None if arguments.keys is None else Path(arguments.keys),
            arguments.any_job,
            False if arguments.no_journal else arguments.journal or True,
            arguments.resume,
            arguments.runs,
            number=arguments.number,
            spare=arguments.spare,
            beside=beside_job,
        )
        heading = f"hub of {job.fleet.members} members, {job.strategy.name}"
        if not arguments.any_job:
            heading += f", {job.train.steps} steps"
        if arguments.replica_of is None:
            serve = serve_pipeline if job.fleet.placement else serve_job
            return shown(arguments, heading, service, functools.partial(serve, request, stop))
        for flag in ("resume", "journal", "no_journal", "any_job"):
            if getattr(arguments, flag):
                raise ConfigError(
                    f"--replica-of and --{flag.replace('_', '-')}: a replica has a copy of its "
                    "hub's journal, in a run folder of its own",
                    "leave one of them out",
                )
        from edgetrain.training.replica import serve_replica

        serve = functools.partial(serve_replica, request, arguments.replica_of, stop)
        return shown(arguments, heading, service, serve)


def shown(
    arguments: argparse.Namespace, heading: str, service: Service, serve: Callable[..., int]
) -> int:
    """Let a hub serve, show its run, and tell the service manager; its exit status."""
    from edgetrain.cli.screen import Screen

    def say(line: str) -> None:
        screen.say(line)
        service.status(line)

    def follow(folder: Path) -> None:
        service.ready()
        screen.follow(folder)
        beside.enter_context(common.beside(arguments, folder, screen.say))

    with Screen(heading) as screen, contextlib.ExitStack() as beside:
        return 0 if serve(say, common.warn, follow=follow) else 1


def job_of(arguments: argparse.Namespace) -> tuple[Job, Path]:
    """The job that is begun or resumed, and the folder beside it. Raises ConfigError."""
    if arguments.resume is None:
        return common.job_of(arguments)
    from edgetrain.training.hub import job_to_resume

    return job_to_resume(arguments.resume, arguments.job), Path.cwd()
