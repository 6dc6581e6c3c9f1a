"""`edgetrain hub`: the process that members of a job on several machines join."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common
from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.jobs import reading as config
from edgetrain.jobs.job import Job
from edgetrain.training.stopping import Stop

if TYPE_CHECKING:
    from edgetrain.exchange.hub.journal import Journal
    from edgetrain.exchange.hub.protocol import Hub

_EXAMPLES = """\
examples:
  edgetrain hub job.toml                                      this machine only
  edgetrain keys init && edgetrain hub job.toml --bind tcp://eth0:5555
                                                              members on other machines, encrypted
  edgetrain hub job.toml --bind tcp://eth0:5555 --insecure    whoever reaches the port
  edgetrain hub members=4 strategy=dga --any-job              for loops of your own (edgetrain.join)
  edgetrain hub --resume runs/20260101-120000-digits          go on after the hub has died

The hub needs neither torch nor the task. It prints the address that members are to be given.
SIGTERM and Ctrl-C end it behind a last snapshot (exit status 143, or 130): members wait for it, and
--resume goes on. A second one ends it at once.
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
        help="encrypt nothing and let in whoever reaches the port",
    )
    common.add_keys(parser)
    parser.add_argument(
        "--any-job",
        action="store_true",
        help="take members whatever job they run, if their models are equal",
    )
    parser.add_argument(
        "--journal",
        type=Path,
        metavar="FOLDER",
        help="where every round is written before it is answered (default: in the run folder)",
    )
    parser.add_argument(
        "--no-journal", action="store_true", help="write none: a hub that dies cannot be resumed"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="go on with the job in this run folder, from its journal; give the same --bind",
    )
    common.add_output(parser, json=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, clock: Callable[[], float] = time.monotonic) -> int:
    """Listen, say where, serve until the job is over."""
    with Stop().installed() as stop:
        return _run(arguments, stop, clock)


def _run(arguments: argparse.Namespace, stop: Stop, clock: Callable[[], float]) -> int:
    job = _job_of(arguments)
    from edgetrain.exchange import addresses as interfaces
    from edgetrain.exchange.addresses import split_address
    from edgetrain.exchange.hub.effects import Note
    from edgetrain.exchange.hub.journal import Journal
    from edgetrain.exchange.hub.serve import serve
    from edgetrain.exchange.hub.terms import ANY_JOB
    from edgetrain.exchange.keys.gate import Gate
    from edgetrain.exchange.keys.keyring import Keyring
    from edgetrain.exchange.keys.keyring import folder as key_folder
    from edgetrain.exchange.keys.pairs import spell
    from edgetrain.exchange.zeromq.hub_socket import HubSocket
    from edgetrain.jobs.building import hub_of, journal_settings, message_limit
    from edgetrain.runs import folder as runs
    from edgetrain.runs.summary import summarise
    from edgetrain.training.recorder import HubRecorder

    host, port = split_address(arguments.bind)
    listening = interfaces.listen_on(host, port)
    ring = Keyring(key_folder(arguments.keys))
    closed = not arguments.insecure and (not listening.local or arguments.keys is not None)
    if closed and not ring.exists:
        raise ConfigError(
            f"{arguments.bind} lets other machines in, and this machine has no keys",
            "make them with `edgetrain keys init`; inside a network you trust --insecure will do",
        )
    hub = hub_of(job, any_job=arguments.any_job)
    gate = Gate(ring) if closed else None
    socket = HubSocket(listening.bind, message_limit(job), gate)
    folder, earlier_s = arguments.resume, 0.0
    if folder is None:
        folder = runs.create(arguments.runs, job.name or "hub")
        runs.write_job(folder, job.to_dict())
        runs.write_environment(folder)
    else:
        earlier_s = max((line["t"] for line in runs.read_metrics(folder)), default=0.0)
    journal = None
    if not arguments.no_journal:
        where = arguments.journal or folder / "journal"
        journal = Journal(where, journal_settings(job), common.warn)
        for line in journal.mended:
            common.say(f"journal: {line}")
        if journal.state is not None and journal.state.agreed.endswith(ANY_JOB):
            hub = hub_of(job, any_job=True)
        _restore(hub, journal, arguments.resume is not None, clock())
    for interface in listening.reachable:
        shown = f"[{interface.address}]" if ":" in interface.address else interface.address
        common.say(f"listening on {interface.name}: members join tcp://{shown}:{socket.port}")
    if gate is not None:
        common.say(f"encrypted; its public key is {spell(gate.pair.public)}")
    common.say(f"waiting for {job.fleet.members} members; run folder: {folder}")
    recorder = HubRecorder(folder, clock, socket.traffic, say=common.say, earlier_s=earlier_s)
    socket.refusals.tell = lambda line: recorder(Note("refused", "?", line))
    try:
        stop.defer()
        serve(hub, socket, clock, recorder, lambda: bool(stop.asked), journal)
        if not hub.finished and hub.started and journal is not None:
            _rest(hub, journal, folder)
    finally:
        recorder.close()
        socket.close()
        if journal is not None:
            journal.close()
        runs.write_summary(folder, summarise(folder, {"rounds": hub.round}))
    if not hub.finished:
        stop.check()
    common.say(f"done: {hub.round} rounds")
    return 0


def _rest(hub: Hub, journal: Journal, folder: Path) -> None:
    """A last snapshot, so that nothing has to be merged again; the journal holds all without it."""
    with contextlib.suppress(EdgetrainError):
        journal.save(hub.state(), hub.needed)
    common.say(f"stopped after {hub.round} rounds; go on with: edgetrain hub --resume {folder}")


def _job_of(arguments: argparse.Namespace) -> Job:
    if arguments.resume is None:
        return common.job_of(arguments)[0]
    if arguments.no_journal:
        raise ConfigError("--resume goes on from a journal, and --no-journal says there is none")
    if not (arguments.resume / "job.toml").is_file():
        raise ConfigError(f"{arguments.resume} is no run folder", "it has no job.toml")
    return config.load(arguments.resume / "job.toml", arguments.job)


def _restore(hub: Hub, journal: Journal, resuming: bool, now: float) -> None:
    if journal.state is not None:
        if not resuming:
            raise ConfigError(
                f"the journal {journal.folder} is of a job that has begun",
                "go on with --resume RUN, or name another folder",
            )
        hub.restore(journal.state, journal.records(), now)
        common.say(f"goes on after {hub.round} rounds with {', '.join(hub.present) or 'nobody'}")
    elif resuming:
        common.say("the journal is empty: training had not begun")
