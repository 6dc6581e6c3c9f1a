"""`edgetrain gateway`: the hub of a site, and one member of the hub above for all of it."""

from __future__ import annotations

import argparse
import functools
import platform
import time
from pathlib import Path

from edgetrain.cli import common, hub
from edgetrain.errors import NetworkError, refuse_first
from edgetrain.jobs.job import Job
from edgetrain.training.member.service import told_why
from edgetrain.training.stopping import Stop

HELP = "merge what a site's members learn before it goes to the hub"
ABOUT = "Run the gateway of a site: a hub for its members, one member for the hub above."
EXAMPLES = """\
examples:
  edgetrain gateway job.toml --above tcp://192.168.1.5:5555 --members 8 --bind tcp://eth0:5555
  edgetrain gateway --resume runs/20260101-120000-digits --above tcp://192.168.1.5:5555 --members 8
                                                  go on after the gateway has died

The members of the site run the same job file, and join the gateway as they would the hub, with
`edgetrain member job.toml --hub tcp://GATEWAY:5555 --index N`. The job says fleet.gateways = true;
fleet.members is how many train at all sites together, --members how many of them join here.

Each round of the site goes up as one contribution, in full precision, and the reply comes down as
it is. A gateway needs neither torch nor the task. While the hub above is away the site waits.

exit status: 0 done; 1 no member has contributed anything; 2 it will not get better by itself; 75
try again later.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job(parser)
    parser.add_argument(
        "--above", required=True, action="append", metavar="tcp://HOST:PORT",
        help="the hub that this site is a member of; several times for its other addresses",
    )  # fmt: skip
    parser.add_argument(
        "--members", required=True, type=int, metavar="N", help="members of the job at this site"
    )
    parser.add_argument(
        "--name", default=platform.node()[:64], help="of the site (default: of this machine)"
    )
    parser.add_argument(
        "--bind", default="tcp://localhost:5555", metavar="ADDRESS",
        help="where members of the site join, as for `edgetrain hub` (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--above-key", metavar="KEY",
        help="the public key of the hub above, or a file with it (default: known from enrolment)",
    )  # fmt: skip
    parser.add_argument(
        "--insecure", action="store_true", help="encrypt nothing, above or at the site"
    )
    common.add_keys(parser)
    hub.add_resume(parser)
    common.add_output(parser, json=False)
    common.try_again(parser)


ROUTE_S = 10.0
"""Seconds for one attempt to reach the machine of the hub above."""


def run(arguments: argparse.Namespace) -> int:
    with told_why() as service, Stop().installed() as stop:
        job = _job_of(arguments)
        from edgetrain.exchange.addresses import rotated, wait_for_route
        from edgetrain.exchange.keys.credentials import credentials
        from edgetrain.training.gateway import Uplink, check_above
        from edgetrain.training.hub import HubRequest, serve_job

        keys = None if arguments.keys is None else Path(arguments.keys)
        check_above(arguments.above, arguments.bind)
        service.status(f"looking for the hub above at {', '.join(arguments.above)}")
        wait_s = job.hub.hub_timeout_s if arguments.resume else 0.0
        try:
            above, via = wait_for_route(arguments.above, ROUTE_S, wait_s, say=common.say)
        except NetworkError as error:
            error.message = f"looking for the hub above: {error.message}"
            raise
        own = credentials(arguments.above, arguments.above_key, keys, insecure=arguments.insecure)
        common.say(f"the hub above: {above} over {via}" + (", encrypted" if own else ""))
        uplink = Uplink(
            rotated(arguments.above, above), arguments.name, arguments.members, time.monotonic, own,
            job.hub.hub_timeout_s,
        )  # fmt: skip
        request = HubRequest(
            job, arguments.bind, arguments.insecure, keys, resume=arguments.resume,
            runs=arguments.runs, uplink=uplink,
        )  # fmt: skip
        heading = f"gateway of {arguments.members} members, {job.strategy.name}"
        return hub.shown(arguments, heading, service, functools.partial(serve_job, request, stop))


def _job_of(arguments: argparse.Namespace) -> Job:
    job, _ = hub.job_of(arguments)
    refuse_first(
        (not job.fleet.gateways, "fleet.gateways = false: the hub of this job lets no gateway in",
         "say gateways = true in [fleet], in the job file of all machines"),
        (not 1 <= arguments.members <= job.fleet.members,
         f"--members {arguments.members}: allowed are 1 to {job.fleet.members}",
         "how many of the job's fleet.members join at this site"),
    )  # fmt: skip
    from edgetrain.jobs.rules import resolve

    resolve(job)
    return job
