"""`edgetrain member`: one member of a job, on this machine."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common
from edgetrain.errors import ConfigError, Refused, refuse_first
from edgetrain.jobs.job import Job
from edgetrain.training.member.service import Service, told_why
from edgetrain.training.stopping import Stop

if TYPE_CHECKING:
    from edgetrain.cli.screen import Screen
    from edgetrain.jobs.resolved import Resolved
    from edgetrain.runs.metrics.log import MetricsLog
    from edgetrain.tasks.protocol import Task

HELP = "train as one member of a job"
ABOUT = "Join a hub and train this machine's share of a job."
EXAMPLES = """\
examples:
  edgetrain member job.toml --hub tcp://192.168.1.5:5555 --index 0
  edgetrain member job.toml --hub tcp://hub.local:5555 --index 3 data.folder=/data
  edgetrain member job.toml --hub tcp://hub.local:5555 --index 0 --checkpoint /var/lib/edgetrain

Every member has the same job file and its own --index, which chooses its share of the data.

With --checkpoint a member that lost power takes up its optimizer, its place in the data and what it
had not sent, when the same command is started again: let a service manager do that. How often one
is written: checkpoint.every_s, checkpoint.share, checkpoint.mb_an_hour.

After a power cut of everything the hub may be up last: a member with a checkpoint of this job tries
for hub.hub_timeout_s, as it does during training. --wait does the same for one that has none yet.

SIGTERM (systemd, docker stop, a shutdown) and Ctrl-C let it finish its step: with --checkpoint it
writes one, and comes back when it is started again; without, it leaves for good. A second one ends
it at once. The exit status is 143, or 130.

exit status:
  0   done; also: the job is over
  2   it will not get better by itself: a wrong file or argument, another job or model, a name that
      belongs to another key, a key that is not on the hub's list, training that diverged
  75  try again later: nobody answers, the hub fell silent, the name cannot be resolved, no route,
      an interface is down; all places are taken, the job has started without this member, a member
      of this name is there still
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job(parser)
    parser.add_argument(
        "--hub", action="append", default=[], metavar="tcp://HOST:PORT",
        help="as the hub says; several times for its other addresses: the first that answers is "
        "used, the others if it is away later; its key is the same at all of them. Not where "
        "hub.hubs in the job names several hubs: a member joins all of these",
    )  # fmt: skip
    parser.add_argument(
        "--hub-key", metavar="KEY",
        help="the hub's public key, or a file with it (default: the one known from enrolment)",
    )  # fmt: skip
    parser.add_argument(
        "--insecure", action="store_true", help="join a hub on another machine without encryption"
    )
    common.add_keys(parser)
    parser.add_argument(
        "--index", required=True, type=int, metavar="N", help="which share of the data, from 0"
    )
    parser.add_argument(
        "--listen", metavar="tcp://HOST:PORT",
        help="if members average among themselves: where others connect to this one; 'no': they "
        "cannot (default: this machine's address on the way to the hub, any free port)",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER",
        help="keep a checkpoint there, and go on from it if there is one (default: none is kept)",
    )  # fmt: skip
    parser.add_argument(
        "--wait", action="store_true",
        help="try for hub.hub_timeout_s if the hub is not up yet; a member with a checkpoint of "
        "this job does so without being told",
    )  # fmt: skip
    parser.add_argument(
        "--metrics-mb", type=float, default=0.0, metavar="N",
        help="keep this run's metrics below N megabytes: steps share a line, exchanges have none, "
        "events and evaluations are kept (default: 0, a line a step)",
    )  # fmt: skip
    parser.add_argument(
        "--max-celsius", type=float, default=0.0, metavar="C",
        help="lengthen steps so that this machine stays below this temperature (default: it does "
        "not)",
    )  # fmt: skip
    common.add_output(parser, json=False)
    common.add_track(parser)
    common.try_again(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check that the hub can be reached, then train; a service manager is told how it goes."""
    with told_why() as service, Stop().installed() as stop:
        service.status(f"looking for the hub at {', '.join(arguments.hub) or 'its addresses'}")
        status = _run(arguments, stop, service)
        service.stopping("done")
    return status


ROUTE_S = 10.0
"""Seconds for one attempt to reach the hub's machine."""


class _Record:
    """The run folder of a member: made when it has been let in, so that a refusal leaves none."""

    def __init__(self, arguments: argparse.Namespace, job: Job, screen: Screen) -> None:
        self._arguments, self._job, self._screen = arguments, job, screen
        self._name = f"{job.name or 'member'}-m{arguments.index}"
        self._looking = contextlib.ExitStack()
        self.folder: Path | None = None
        self._began = ""
        self._figures: dict[str, Any] = {}
        self.task: Task | None = None

    def take_task(self, task: Task) -> None:
        """Keep the task and its figures. ConfigError for a target that cannot be."""
        from edgetrain.jobs.lookup import target_of

        target, self.task = target_of(self._job, task), task
        self._figures = {"metric": task.metric, "better": task.better, "target": target}

    def open_log(self, name: str, began: float) -> MetricsLog:
        """Make the folder; the log in it, whose times count from `began`. ConfigError."""
        from edgetrain.runs import folder as run_folders
        from edgetrain.runs.environment import utc
        from edgetrain.runs.metrics.log import MetricsLog

        self._began = utc(time.monotonic() - began)
        if self.folder is not None:  # of a group that began again
            return MetricsLog(run_folders.metrics_path(self.folder), name, time.monotonic, began)
        self.folder = folder = run_folders.create(self._arguments.runs, self._name)
        run_folders.write_job(folder, self._job.to_dict())
        run_folders.write_environment(folder)
        self._screen.say(f"training as {name}; run folder: {folder}")
        self._screen.follow(folder, self._figures.get("metric", "accuracy"))
        beside = common.beside(self._arguments, folder, self._screen.say)
        self._looking.enter_context(beside)
        return MetricsLog(run_folders.metrics_path(folder), name, time.monotonic, began)

    def close(self, more: Callable[[], dict[str, Any]]) -> None:
        """Write the summary, with `more` in it, if there is a folder. A full disk is a warning."""
        from edgetrain.cli.screen import closing_table
        from edgetrain.runs.folder import write_summary
        from edgetrain.runs.summary import summarise

        if self.folder is None:
            return
        try:
            known = {"began": self._began, **self._figures, **more()}
            write_summary(self.folder, summarise(self.folder, known))
        except ConfigError as error:
            common.warn(f"the run has no summary: {error}")
        if (table := closing_table(self.folder)) is not None:
            common.say(table)
        self._looking.close()


def _run(arguments: argparse.Namespace, stop: Stop, service: Service) -> int:
    job, beside = common.job_of(arguments)
    from edgetrain.jobs.resolved import look_up, with_all_members

    job = with_all_members(job)
    from edgetrain.cli.screen import Screen, ScreenHandler
    from edgetrain.exchange.addresses import any_port_of, rotated, wait_for_route
    from edgetrain.runs.folder import check_room

    _check(arguments, job)
    arguments.hub = arguments.hub or job.hub.hubs[:1]
    screen = Screen(f"member {arguments.index} of {job.fleet.members}, {job.train.steps} steps")
    handlers = [ScreenHandler(screen)] if screen.is_terminal else None
    logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=handlers)
    check_room(arguments.runs)
    # Seconds to try a hub that is not up: more with --wait, or after training here before
    folder, name, trained = arguments.checkpoint, f"m{arguments.index}", False
    if folder is not None:
        from edgetrain.exchange.member.checkpoint import has_checkpoint

        trained = has_checkpoint(folder, name, job.digest())
    wait_s = job.hub.hub_timeout_s if arguments.wait or trained else 0.0
    pause = functools.partial(_pause, service)
    hub, via = wait_for_route(arguments.hub, ROUTE_S, wait_s, pause, say=common.say)
    for other in job.hub.hubs[1:]:
        wait_for_route([other], ROUTE_S, wait_s, pause, say=common.say)
    from edgetrain.exchange.keys.credentials import credentials as credentials_for

    places = [[hub] for hub in job.hub.hubs] if len(job.hub.hubs) > 1 else [arguments.hub]
    credentials = [
        credentials_for(each, arguments.hub_key, arguments.keys, insecure=arguments.insecure)
        for each in places
    ]
    common.say(f"joining {hub} over {via}" + (", encrypted" if any(credentials) else ""))
    service.status(f"joining {hub}")
    from edgetrain.exchange.member.link import PATIENCE_S
    from edgetrain.training.member.train import Place

    found = look_up(job)
    record = _Record(arguments, job, screen)
    device = _device_of(arguments, job)
    own_keys = Path(arguments.keys) if arguments.keys else None
    listen = arguments.listen or any_port_of(via)
    listen = "" if listen == "no" else listen
    place = Place(arguments.index, device, beside, own_keys, listen, arguments.max_celsius)
    try:
        with screen:
            _trainer(job, device, arguments.checkpoint)(
                found,
                place,
                job.hub.hubs if len(job.hub.hubs) > 1 else rotated(arguments.hub, hub),
                record.open_log,
                credentials=credentials,
                stop=stop,
                metrics_bytes=int(1e6 * arguments.metrics_mb),
                service=service,
                patience_s=max(PATIENCE_S, wait_s),
                on_task=record.take_task,
            )
    except Refused as refused:
        if refused.code != "ended":
            raise
        common.say(refused.message)
        return 0
    finally:
        record.close(lambda: _promise(found, record.task))
    common.say("done")
    return 0


def _trainer(job: Job, device: str, checkpoint: Path | None) -> Callable[..., None]:
    """What trains: a group keeps snapshots where others keep checkpoints, and a stage's state is at
    its hub."""
    from edgetrain.fleet.devices import SERVERS

    if job.fleet.placement:
        from edgetrain.training.pipelined.member import join_pipeline

        return join_pipeline
    if device == SERVERS:
        from edgetrain.training.servers.leading import train_joined

        return functools.partial(train_joined, folder=checkpoint, keeps_model=True)
    from edgetrain.training.member.train import train

    return functools.partial(train, checkpoint=checkpoint, keeps_model=True)


def _pause(service: Service, seconds: float) -> None:
    service.alive()
    time.sleep(seconds)


def _check(arguments: argparse.Namespace, job: Job) -> None:
    """ConfigError for numbers that are out of their range, and hubs that are said twice or not."""
    from edgetrain.fleet.devices import SERVERS
    from edgetrain.fleet.devices.health import HEAT_CAPS, LEAST_CAP

    common.check_track(arguments)
    hubs, index, cap = len(job.hub.hubs), arguments.index, arguments.max_celsius
    hub, several, megabytes = [*arguments.hub, ""][0], hubs > 1, arguments.metrics_mb
    refuse_first(
        (hub and several, f"--hub {hub}, and hub.hubs names {hubs} hubs",
         "a member joins all of these: leave --hub out"),
        (not hub and not several, "there is no hub to join",
         "say --hub tcp://HOST:PORT, as the hub says"),
        (several and arguments.hub_key, "--hub-key is one hub's, and hub.hubs names several",
         "enrol at each of them, which pins its key"),
        (not 0 <= index < job.fleet.members,
         f"--index {index}: allowed are 0 to {job.fleet.members - 1}",
         "the job's fleet.members says how many there are"),
        (cap and not LEAST_CAP <= cap <= HEAT_CAPS[1], f"--max-celsius {cap:g}: allowed are "
         f"{LEAST_CAP:g} to {HEAT_CAPS[1]:g}, or 0 for none", ""),
    )  # fmt: skip
    refuse_first(
        (cap and _device_of(arguments, job) == SERVERS,
         "--max-celsius is for a member of one process", "leave it out"),
        (not (megabytes == 0 or 0.01 <= megabytes <= 1e6),
         f"--metrics-mb {megabytes:g}: allowed are 0.01 to 1e6",
         "or 0, for a line a step however many there are"),
    )  # fmt: skip


def _device_of(arguments: argparse.Namespace, job: Job) -> str:
    from edgetrain.fleet.assignment import devices_of

    named = devices_of(job.fleet.device)
    return named[arguments.index] if len(named) > 1 else named[0]


def _promise(found: Resolved, task: Task | None) -> dict[str, Any]:
    """The privacy of the job, for the summary; {}: it has none, or (a warning) no accountant."""
    if found.job.privacy.unit == "none" or task is None:
        return {}
    from edgetrain.jobs.lookup import samples_of
    from edgetrain.jobs.on_member import settle
    from edgetrain.jobs.privacy.promise import promise

    try:
        samples = samples_of(found.job, task)
        kept = promise(settle(found, samples), samples)
    except ConfigError as error:
        common.warn(f"epsilon is not in the summary: {error}")
        return {}
    return {"privacy": kept.to_dict() if kept else None}
