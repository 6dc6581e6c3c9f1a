"""`edgetrain member`: one member of a job, on this machine."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common
from edgetrain.jobs.job import Job
from edgetrain.training.stopping import Stop

if TYPE_CHECKING:
    from edgetrain.training.train import Place

_EXAMPLES = """\
examples:
  edgetrain member job.toml --hub tcp://192.168.1.5:5555 --index 0
  edgetrain member job.toml --hub tcp://hub.local:5555 --index 3 data.folder=/data
  edgetrain member job.toml --hub tcp://hub.local:5555 --index 0 --checkpoint /var/lib/edgetrain

Every member has the same job file and its own --index, which chooses its share of the data.

With --checkpoint a member that lost power takes up its optimizer, its place in the data and what it
had not sent, when the same command is started again: let a service manager do that. How often one
is written: checkpoint.every_s, checkpoint.share, checkpoint.mb_an_hour.

SIGTERM (systemd, docker stop, a shutdown) and Ctrl-C let it finish its step: with --checkpoint it
writes one, and comes back when it is started again; without, it leaves for good. A second one ends
it at once. The exit status is 143, or 130.
"""


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = common.verb(
        subparsers,
        "member",
        "train as one member of a job",
        "Join a hub and train this machine's share of a job.",
        _EXAMPLES,
    )
    common.add_job(parser)
    parser.add_argument("--hub", required=True, metavar="tcp://HOST:PORT", help="as the hub says")
    parser.add_argument(
        "--hub-key",
        metavar="KEY",
        help="the hub's public key, or a file with it (default: the one known from enrolment)",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="join a hub on another machine without encryption"
    )
    common.add_keys(parser)
    parser.add_argument(
        "--index", required=True, type=int, metavar="N", help="which share of the data, from 0"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="keep a checkpoint there, and go on from it if there is one (default: none is kept)",
    )
    common.add_output(parser, json=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check that the hub can be reached, then train."""
    with Stop().installed() as stop:
        return _run(arguments, stop)


def _run(arguments: argparse.Namespace, stop: Stop) -> int:
    job, beside = common.job_of(arguments)
    from edgetrain.errors import ConfigError
    from edgetrain.exchange.addresses import route
    from edgetrain.exchange.keys.credentials import credentials as credentials_for
    from edgetrain.fleet.assignment import devices_of
    from edgetrain.runs.folder import (
        create,
        metrics_path,
        write_environment,
        write_job,
        write_summary,
    )
    from edgetrain.runs.metrics.log import MetricsLog
    from edgetrain.runs.summary import summarise

    if not 0 <= arguments.index < job.fleet.members:
        raise ConfigError(
            f"--index {arguments.index}: allowed are 0 to {job.fleet.members - 1}",
            "the job's fleet.members says how many there are",
        )
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    via = route(arguments.hub, timeout_s=10.0)
    credentials = credentials_for(
        arguments.hub, arguments.hub_key, arguments.keys, insecure=arguments.insecure
    )
    common.say(f"joining {arguments.hub} over {via}" + (", encrypted" if credentials else ""))
    from edgetrain.tasks import weights
    from edgetrain.training.train import Place, train

    folder = create(arguments.runs, f"{job.name or 'member'}-m{arguments.index}")
    write_job(folder, job.to_dict())
    write_environment(folder)
    named = devices_of(job.fleet.device)
    device = named[arguments.index] if len(named) > 1 else named[0]

    def open_log(name: str) -> MetricsLog:
        common.say(f"training as {name}; run folder: {folder}")
        return MetricsLog(metrics_path(folder), name, time.monotonic, time.monotonic())

    own_keys = Path(arguments.keys) if arguments.keys else None
    place = Place(arguments.index, device, beside, own_keys)
    try:
        train(
            job,
            place,
            arguments.hub,
            open_log,
            credentials=credentials,
            checkpoint=arguments.checkpoint,
            stop=stop,
            model_file=folder / weights.FILE,
        )
    finally:
        write_summary(folder, summarise(folder, _promise(job, place)))
    common.say("done")
    return 0


def _promise(job: Job, place: Place) -> dict[str, Any]:
    """The privacy of the job, for the summary; {} if the job has none.

    A device that only trains need not have the accountant installed: a warning then takes its
    place.
    """
    if job.privacy.unit == "none":
        return {}
    from edgetrain.errors import ConfigError
    from edgetrain.jobs.lookup import samples_of, task_of
    from edgetrain.jobs.privacy.promise import fix_noise, promise
    from edgetrain.jobs.resolved import look_up

    try:
        samples = samples_of(job, task_of(job, place.beside, place.keys))
        found = promise(fix_noise(look_up(job), samples), samples)
    except ConfigError as error:
        common.warn(f"epsilon is not in the summary: {error}")
        return {}
    return {"privacy": found.to_dict() if found else None}
