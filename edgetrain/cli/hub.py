"""`edgetrain hub`: the process that members of a job on several machines join."""

from __future__ import annotations

import argparse
import signal
import time
from types import FrameType
from typing import Any

from edgetrain.cli import common
from edgetrain.errors import ConfigError

_EXAMPLES = """\
examples:
  edgetrain hub job.toml                                      this machine only
  edgetrain hub job.toml --bind tcp://eth0:5555 --insecure    members on other machines
  edgetrain hub members=4 strategy=dga --any-job              for loops of your own (edgetrain.join)

The hub needs neither torch nor the task. It prints the address that members are to be given.
"""


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = common.verb(
        subparsers,
        "hub",
        "merge what the members of a job learn",
        "Run a job's hub: wait for its members, start them together, merge their rounds.",
        _EXAMPLES,
    )
    common.add_job(parser)
    parser.add_argument(
        "--bind",
        default="tcp://localhost:5555",
        metavar="ADDRESS",
        help="tcp://HOST:PORT; HOST is an address, a name, an interface such as eth0, or * for "
        "all; port 0: any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="let other machines in although nothing is encrypted or authenticated yet",
    )
    parser.add_argument(
        "--any-job",
        action="store_true",
        help="take members whatever job they run, if their models are equal",
    )
    common.add_output(parser, json=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Listen, say where, serve until the job is over."""
    job, _ = common.job_of(arguments)
    from edgetrain import interfaces, runs
    from edgetrain.plans import hub_of
    from edgetrain.recorder import HubRecorder
    from edgetrain.serve import serve
    from edgetrain.sockets import HubSocket, split_address

    host, port = split_address(arguments.bind)
    listening = interfaces.listen_on(host, port)
    if not listening.local and not arguments.insecure:
        raise ConfigError(
            f"{arguments.bind} lets other machines in, and this version encrypts nothing",
            "inside a network you trust add --insecure; else use an SSH tunnel or a VPN",
        )
    hub = hub_of(job, any_job=arguments.any_job)
    socket = HubSocket(listening.bind)
    folder = runs.create(arguments.runs, job.name or "hub")
    runs.write_job(folder, job.to_dict())
    runs.write_environment(folder)
    for interface in listening.reachable:
        shown = f"[{interface.address}]" if ":" in interface.address else interface.address
        common.say(f"listening on {interface.name}: members join tcp://{shown}:{socket.port}")
    common.say(f"waiting for {job.fleet.members} members; run folder: {folder}")
    signal.signal(signal.SIGTERM, _interrupt)
    recorder = HubRecorder(folder, time.monotonic, socket.traffic, say=common.say)
    try:
        serve(hub, socket, time.monotonic, recorder)
    finally:
        recorder.close()
        socket.close()
        runs.write_summary(folder, runs.summarise(folder, {"rounds": hub.round}))
    common.say(f"done: {hub.round} rounds")
    return 0


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
