"""A job's hub: assembled from plain values, and served until the job is over.

A hub is a protocol (`exchange.hub`) on a socket, with a journal that it can be resumed from and a
run folder that it is recorded in. `edgetrain hub` and the hub process of tests/chaos both run it.
Nothing here prints: the caller passes functions for the lines that people read.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.exchange.addresses import (
    Interface,
    Listening,
    join_address,
    split_address,
    wait_to_listen,
)
from edgetrain.exchange.delay import FIRST_WINDOW_BYTES
from edgetrain.exchange.descriptors import RESERVED, raise_limit
from edgetrain.exchange.hub.effects import Note
from edgetrain.exchange.hub.journal import LOCK, Journal
from edgetrain.exchange.hub.protocol import Hub, HubPart
from edgetrain.exchange.hub.serve import Observer, serve
from edgetrain.exchange.hub.terms import ANY_JOB
from edgetrain.exchange.keys.pairs import spell
from edgetrain.exchange.transport import Traffic, owner_of
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.tcp_counters import restarts_after_idle
from edgetrain.jobs.building import hub_of, message_limit
from edgetrain.jobs.doubts import doubts_of
from edgetrain.jobs.fallback import NAME, steps_in
from edgetrain.jobs.job import AUTO, COLLECTIVES, DIRECT, Job
from edgetrain.jobs.reading import load
from edgetrain.jobs.resolved import Resolved, journal_settings
from edgetrain.jobs.rules import refuse_fallback, resolve
from edgetrain.runs import folder as run_folders
from edgetrain.runs.environment import free_memory, utc
from edgetrain.training.hub_recorder import HubRecorder
from edgetrain.training.orders import taking_orders
from edgetrain.training.stopping import Stop
from edgetrain.vectors.ranges import Stretch, shared

if TYPE_CHECKING:
    from edgetrain.exchange.keys.gate import Gate
    from edgetrain.exchange.zeromq.member_socket import MemberSocket
    from edgetrain.training.gateway import Uplink

LARGEST_SHARE = 4
"""The largest model that a hub takes has a quarter of the memory that was free when it started."""

_LINKS_UNKNOWN = (
    "how members reach each other is not known before they join (fleet.topology names another)"
)
_UNTRAINED = (
    "no member has contributed anything: nothing was trained. In a loop of your own, is "
    "edgetrain.join called with the optimizer that steps?"
)

Look = Callable[[Hub], None]

Say = Callable[[str], None]
"""Gets one line at a time, for people to read."""


@dataclass(frozen=True)
class HubRequest:
    """The hub to serve: the arguments of `edgetrain hub`."""

    job: Job
    bind: str
    """tcp://HOST:PORT; HOST is an address, a name, an interface, or * for all; port 0: any free."""
    insecure: bool = False
    """Encrypt nothing and admit every peer."""
    keys: Path | None = None
    """The folder of this machine's keys; None: the usual one, used if other machines may join."""
    any_job: bool = False
    """Admit members whatever job they run, if their models are equal."""
    journal: Path | bool = True
    """The journal's folder; True: in the run folder; False: no journal."""
    resume: Path | None = None
    """The run folder of a hub that has ended: continue from its journal."""
    runs: Path = Path("runs")
    """Folder of new run folders, if this is not resumed."""
    uplink: Uplink | None = None
    """To the hub above, where this is the gateway of a site; None: it is not."""
    number: int = 1
    """Number of this hub in hub.hubs; the first leads."""
    beside: Path | None = None
    """The folder of the job file, for a group that steps in."""
    spare: bool = False
    """It has no ranges until people order that some move to it."""

    @property
    def stretch(self) -> Stretch:
        """The ranges of the vector that it has at first. ConfigError for a hub the job has not."""
        if self.spare:
            return Stretch(self.job.strategy.ranges, 0, 0)
        hubs = max(1, len(self.job.hub.hubs))
        if not 1 <= self.number <= hubs:
            raise ConfigError(
                f"--number {self.number}: allowed are 1 to {hubs}",
                "hub.hubs in the job names all hubs",
            )
        return shared(self.job.strategy.ranges, hubs)[self.number - 1]

    @property
    def members(self) -> int:
        return self.job.fleet.members if self.uplink is None else self.uplink.members

    def reducers_in_words(self, found: Resolved) -> str:
        return found.reducers_in_words(0 if self.uplink is None else self.members)

    @property
    def awaited(self) -> str:
        """Who has to come before training begins."""
        if self.spare:
            return "ranges: edgetrain control RUN add-hub ADDRESS, at the lead"
        at = self.job.hub.replica
        few, after_s = self.job.hub.min_members, self.job.hub.start_after_s
        is_hub = few and self.uplink is None  # a site begins whole
        enough = f" (or {few}, {after_s:g} s after they are here)" if is_hub else ""
        return f"{self.members} members{enough}{f', and the replica at {at}' if at else ''}"

    @property
    def traffic_above(self) -> Callable[[], Traffic] | None:
        """Counts the bytes to and from the hub above; None: there is none."""
        return None if self.uplink is None else self.uplink.traffic

    def leave_above(self, finished: bool, say: Say) -> None:
        """Close the way to the hub above, if there is one."""
        if self.uplink is not None:
            self.uplink.close(finished, say)

    @property
    def verb(self) -> str:
        return "hub" if self.uplink is None else "gateway"


def job_to_resume(run: Path, overrides: list[str]) -> Job:
    """The job in the run folder `run`, with "key=value" overrides. ConfigError if it has none."""
    path = run / run_folders.JOB
    if not path.is_file():
        raise ConfigError(f"{run} is no run folder", "it has no job.toml")
    return load(path, overrides)


def serve_job(
    request: HubRequest,
    stop: Stop,
    say: Say,
    warn: Say,
    clock: Callable[[], float] = time.monotonic,
    follow: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Listen, announce the addresses, serve until the job is over; returns the number of rounds, 0
    where members failed.

    `follow` is called with the run folder once it is there. `stop` ends it: before training begins
    at once, afterwards behind a last snapshot. `warn` gets what the journal complains about, and
    that nothing was trained. Owns and closes the socket, the journal and the recorder. Raises
    Stopped, ConfigError, NetworkError, and EdgetrainError if the journal cannot be written, or if
    too few members are left to unmask anything.
    """
    listening = wait_to_listen(*split_address(request.bind), say=say)
    gate = gate_of(request, listening)
    found, journal = _looked_up(request, say, warn), None
    fresh = _maker(found, request, gate, lambda end: socket.wake_for(end), say)
    hub = fresh(any_job=request.any_job)
    socket = _open(request, found, listening, gate)
    with contextlib.ExitStack() as on_error:
        on_error.callback(socket.close)
        folder, earlier_s = make_run_folder(request)
        if request.journal is not False:
            journal = Journal(_journal_folder(request, folder), journal_settings(request.job), warn)
            on_error.callback(journal.close)
            hub = _restored(hub, fresh, journal, request, clock, say)
        on_error.pop_all()
    announce(listening.reachable, socket.port, gate, say)
    say(f"waiting for {request.awaited}; run folder: {folder}")
    began: list[str] = []
    follow(folder)
    recorder = HubRecorder(
        folder, clock, socket.traffic, say=say, earlier_s=earlier_s, name_of=_names(gate),
        on_start=lambda at: began.append(utc(clock() - at)),
    )  # fmt: skip
    recorder.above, recorder.reducers = request.traffic_above, request.reducers_in_words(found)
    group = _group_of(request, listening, socket.port, folder, gate)
    socket.refusals.report = lambda line: recorder(Note("refused", "?", line))
    try:
        stop.defer()
        keys = None if gate is None else gate.allowed
        with taking_orders(folder) as orders, group(recorder, clock, earlier_s) as (observe, look):
            asked = partial(getattr, stop, "asked")
            serve(hub, socket, clock, observe, asked, journal, keys, earlier_s, orders, look)
    finally:
        if (stop.asked and not hub.finished) or hub.rounds.ended_short:
            _save_last(hub, journal, folder, say, request.verb)
        known = {"rounds": hub.round, "began": began[0] if began else None}
        request.leave_above(hub.finished, say)
        ended = _close(folder, known, recorder, socket, journal, warn)
    if not hub.finished:
        stop.check()
    rounds = hub.round
    say(f"done: {rounds} rounds")
    if not rounds:
        warn(_UNTRAINED)
    is_whole = ended.get("status") != "incomplete"
    if not is_whole:
        warn(f"members failed: {', '.join(ended['members_lost'])}")
    return rounds if is_whole else 0


def serve_pipeline(
    request: HubRequest,
    stop: Stop,
    say: Say,
    warn: Say,
    clock: Callable[[], float] = time.monotonic,
    follow: Callable[[Path], None] = lambda folder: None,
) -> int:
    """As `serve_job`, of a job whose members are stages of a pipeline; returns the steps that are
    over. Its journal holds the states of all stages, which `hub.snapshot_every` is about."""
    from edgetrain.exchange.pipeline.serve import relay_messages

    # ConfigError for what a hub of stages cannot be asked for
    from edgetrain.jobs.pipeline import refuse_pipeline
    from edgetrain.training.pipelined.hub import relay_of

    for what, is_asked in (
        ("--any-job has no job for", request.any_job), ("--spare takes no part in", request.spare),
        (f"--number {request.number}: one hub serves", request.number != 1),
    ):  # fmt: skip
        if is_asked:
            refuse_pipeline(request.job, what)
    _check_connections(request.members, warn)
    resolve(request.job)
    _check_resume(request)
    listening = wait_to_listen(*split_address(request.bind), say=say)
    gate = gate_of(request, listening)
    relay, most_bytes = relay_of(request.job, free_memory() // LARGEST_SHARE)
    socket, journal = HubSocket(listening.bind, most_bytes, gate), None
    with contextlib.ExitStack() as on_error:
        on_error.callback(socket.close)
        folder, earlier_s = make_run_folder(request)
        if request.journal is not False:
            journal = Journal(_journal_folder(request, folder), journal_settings(request.job), warn)
            on_error.callback(journal.close)
            if journal.state is not None:
                _refuse_begun(request, journal)
                relay.restore(journal.state)
                say(f"resumed after {relay.committed} steps")
            journal.save(relay.state())
        on_error.pop_all()
    announce(listening.reachable, socket.port, gate, say)
    say(f"waiting for {request.awaited}; run folder: {folder}")
    began: list[str] = []
    follow(folder)
    recorder = HubRecorder(
        folder, clock, socket.traffic, say=say, earlier_s=earlier_s, name_of=_names(gate),
        on_start=lambda at: began.append(utc(clock() - at)),
    )  # fmt: skip
    socket.refusals.report = lambda line: recorder(Note("refused", "?", line))
    try:
        stop.defer()
        with taking_orders(folder) as orders:
            relay_messages(
                relay, socket, clock, recorder, lambda: bool(stop.asked), journal, orders
            )
    finally:
        _close(folder, {"began": began[0] if began else None}, recorder, socket, journal, warn)
    if not relay.finished:
        way = "" if journal is None else f"; go on with: edgetrain hub --resume {folder}"
        say(f"stopped after {relay.committed} steps{way}")
        stop.check()
    say(f"done: {relay.committed} steps")
    return relay.committed


def _group_of(
    request: HubRequest, listening: Listening, port: int, folder: Path, gate: Gate | None
) -> Callable[..., contextlib.AbstractContextManager[tuple[Observer, Look | None]]]:
    """Makes what has a group step in, if the job asks for it: who is told what the hub does, in
    place of the recorder, and what looks at the hub."""

    @contextlib.contextmanager
    def group(
        recorder: HubRecorder, clock: Callable[[], float], earlier_s: float
    ) -> Iterator[tuple[Observer, Look | None]]:
        if not steps_in(request.job):
            yield recorder, None
            return
        from edgetrain.training.fallback import SteppingIn, Told

        address = join_address(listening.reachable[0].address, port)
        told = Told(
            request.job, address, folder.resolve(), request.beside, request.keys, gate is not None
        )
        with closing(SteppingIn(told, clock, recorder, earlier_s)) as stepping:
            yield stepping, stepping.look

    return group


def _looked_up(request: HubRequest, say: Say, warn: Say) -> Resolved:
    """The job with what it names; says what "auto" takes, and what may be amiss."""
    _check_connections(request.members, warn)
    if request.job.fleet.placement:
        from edgetrain.jobs.pipeline import refuse_pipeline

        refuse_pipeline(request.job, "a gateway does not serve")
    if request.any_job:
        refuse_fallback(request.job, "--any-job does not know the members of")
        if (cohort := request.job.strategy.cohort) != 0:
            raise ConfigError(
                f"--any-job and strategy.cohort = {cohort:g}: members that are in no round wait, "
                "and only train.steps says when there are no more rounds",
                "leave out --any-job: loops of your own join a hub with a job, too",
            )
    found = resolve(request.job)
    if found.job.fleet.topology == AUTO:
        from edgetrain.jobs.topology import take_star

        found = take_star(found, _LINKS_UNKNOWN)
        say(found.topology_choice)
    for doubt in doubts_of(found):
        warn(f"warning: {doubt}")
    return found


def _open(
    request: HubRequest, found: Resolved, listening: Listening, gate: Gate | None
) -> HubSocket:
    _check_resume(request)
    _check_replica(request, listening)
    if request.any_job and request.job.fleet.topology in (DIRECT, *COLLECTIVES):
        raise ConfigError(
            f"--any-job and fleet.topology = '{request.job.fleet.topology}': members exchange by "
            "the job's file, which is the same on all",
            "leave --any-job out; loops of your own: edgetrain.join(…, job_file=…)",
        )
    uplink, gateways = request.uplink, request.job.fleet.gateways
    if uplink is None:
        return HubSocket(listening.bind, message_limit(found.codec, gateways), gate)
    socket = HubSocket(listening.bind, message_limit(found.codec), gate)
    uplink.wake = socket.wake_for
    return socket


def _check_replica(request: HubRequest, listening: Listening) -> None:
    """Raise ConfigError if a hub cannot have the job's replica."""
    address = request.job.hub.replica
    if not address:
        return
    host, port = split_address(address)
    own = {each.address for each in listening.reachable} | {split_address(request.bind)[0]}
    if port == split_address(request.bind)[1] and host in own:
        raise ConfigError(
            f"hub.replica = '{address}' is this hub itself",
            "name another machine, or another port",
        )
    why = "--no-journal" if request.journal is False else "--any-job" if request.any_job else ""
    if request.uplink is not None:
        why = "a gateway"
    if why:
        raise ConfigError(
            f"hub.replica = '{address}' and {why}: a replica holds the journal of one job's hub",
            "leave one of them out",
        )


REPLICA = "replica"
"""The name that a replica's machine is enrolled under."""


def _maker(
    found: Resolved,
    request: HubRequest,
    gate: Gate | None,
    wake: Callable[[MemberSocket], None],
    say: Say,
) -> Callable[..., Hub]:
    """Makes hubs of this job, for this machine's memory and its TCP. Says which it is. `wake` lets
    its socket wait for another hub, too."""
    if not request.stretch.is_whole and not request.spare:
        say(f"hub {request.number} of {found.hubs}: {request.stretch} of the vector")
    most_elements = max(1, free_memory() // (4 * LARGEST_SHARE))
    part: Callable[[], HubPart] | None = None
    name_of, uplink = _names(gate), request.uplink
    if found.job.hub.replica:
        from edgetrain.exchange.hub.replicated import ReplicatedPart

        part = partial(
            ReplicatedPart, found.job.hub.replica,
            lambda sender: gate is None or name_of(sender) == REPLICA,
        )  # fmt: skip
    elif found.job.strategy.ranges > 1 or request.spare:
        from edgetrain.training.several import Ways, shared_part, why_fixed

        if (why := why_fixed(found, uplink is not None)) is None:
            leads = request.number == 1 and not request.spare
            ways = Ways(request.keys, request.insecure, wake)
            part = shared_part(found, leads, ways, name_of, gate is not None)
        elif request.spare:
            raise ConfigError(f"--spare: {why}", "only several hubs that share ranges may change")
    if uplink is not None:
        from edgetrain.exchange.gateway.site import SitePart

        part = partial(SitePart, uplink.name, uplink.connect)
    quick_bytes = FIRST_WINDOW_BYTES if restarts_after_idle() else math.inf
    return lambda any_job: hub_of(
        found, any_job=any_job, most_elements=most_elements, quick_bytes=quick_bytes,
        site=0 if uplink is None else uplink.members,
        number=None if request.spare else request.number - 1,
        part=None if part is None else part(),
    )  # fmt: skip


def _check_connections(members: int, warn: Say) -> None:
    most = raise_limit()
    if members > most - RESERVED:
        warn(
            f"{members} members need more connections than the {most} that `ulimit -n` allows "
            "this process: raise the hard limit"
        )


def _close(
    folder: Path,
    known: dict[str, Any],
    recorder: HubRecorder,
    socket: HubSocket,
    journal: Journal | None,
    warn: Say,
) -> dict[str, Any]:
    """Close everything and write the summary, with what is `known`; returns it. What fails here is
    a warning: the job is not lost by it, and an error that ended the hub says what to do."""
    from edgetrain.runs.summary import summarise  # training is over

    socket.close()
    if journal is not None:
        journal.close()
    try:
        recorder.close()
        summary = summarise(folder, known)
        run_folders.write_summary(folder, summary)
    except (EdgetrainError, OSError) as error:
        warn(f"no summary: {error}")
        return {}
    return summary


def gate_of(request: HubRequest, listening: Listening) -> Gate | None:
    """Keys allowed to connect; None: everyone, unencrypted."""
    if request.insecure or (listening.local and request.keys is None):
        return None
    from edgetrain.exchange.keys.gate import Gate
    from edgetrain.exchange.keys.keyring import Keyring
    from edgetrain.exchange.keys.pairs import keys_folder

    ring = Keyring(keys_folder(request.keys))
    if not ring.exists:
        raise ConfigError(
            f"{request.bind} lets other machines in, and this machine has no keys",
            "make them with `edgetrain keys init`; inside a network you trust --insecure will do",
        )
    return Gate(ring, own_name=NAME if steps_in(request.job) else "")


def _names(gate: Gate | None) -> Callable[[bytes], str]:
    """Finds the name under which the machine at a connection was enrolled."""
    if gate is None:
        return lambda sender: ""
    return lambda sender: gate.allowed().get(owner_of(sender), "")


def make_run_folder(request: HubRequest) -> tuple[Path, float]:
    """The run folder, and the seconds of training that are already recorded in it."""
    if request.resume is not None:
        folder = request.resume
        return folder, max((line["t"] for line in run_folders.read_metrics(folder)), default=0.0)
    folder = run_folders.create(request.runs, request.job.name or request.verb, private=True)
    # The job of the run folder. What members train that may run any job, on what and over which
    # network, this hub does not know.
    job = request.job.to_dict()
    if request.any_job:
        members = job["fleet"]["members"]
        job = {key: value for key, value in job.items() if key not in ("task", "data", "start")}
        job["fleet"] = {"members": members}
    run_folders.write_job(folder, job)
    run_folders.write_environment(folder)
    return folder, 0.0


def _journal_folder(request: HubRequest, run: Path) -> Path:
    return run / "journal" if isinstance(request.journal, bool) else request.journal


def _check_resume(request: HubRequest) -> None:
    """Raise ConfigError if the run folder to resume has no journal: training would begin anew in
    it. A hub makes its journal before it listens, so that one is there where training has not
    begun."""
    run = request.resume
    if run is not None and not (_journal_folder(request, run) / LOCK).exists():
        raise ConfigError(
            f"{run} cannot be resumed: there is no journal in {_journal_folder(request, run)} (the "
            "folder is a member's, or its hub wrote none)",
            f"begin anew, in a folder of its own: edgetrain hub {run / run_folders.JOB}",
        )


def _restored(
    hub: Hub,
    fresh: Callable[..., Hub],
    journal: Journal,
    request: HubRequest,
    clock: Callable[[], float],
    say: Say,
) -> Hub:
    """The hub to serve: as the journal has it, where that holds training that has begun."""
    for line in journal.mended:
        say(f"journal: {line}")
    recorded = 0
    for row in run_folders.read_metrics(request.resume, "round") if request.resume else ():
        recorded = row.get("round", 0) + 1
    if journal.state is None:
        if request.resume is not None:
            if recorded:
                raise ConfigError(
                    f"{request.resume} cannot be resumed: rounds are recorded in it, and the "
                    f"journal {journal.folder} is empty",
                    "put back a copy of the journal, or begin anew, in a folder of its own: "
                    f"edgetrain hub {request.resume / run_folders.JOB}",
                )
            say("the journal is empty: training had not begun")
        return hub
    _refuse_begun(request, journal)
    if journal.state.agreed.endswith(ANY_JOB):
        hub = fresh(any_job=True)
    hub.restore(journal.state, journal.records(), clock())
    nobody = f"no member; waiting up to {request.job.hub.empty_after_s:g} s"
    if recorded > hub.round:
        say(
            f"journal: it ends after {hub.round} rounds, and {recorded} are recorded in "
            f"{request.resume}: the others' work is lost, unless you put back a copy of the journal"
        )
    say(f"resumed after {hub.round} rounds with {', '.join(hub.present) or nobody}")
    return hub


def _refuse_begun(request: HubRequest, journal: Journal) -> None:
    """ConfigError for a journal of a job that this hub is not to go on with."""
    if request.resume is None:
        raise ConfigError(
            f"the journal {journal.folder} is of a job that has begun",
            "go on with --resume RUN, or name another folder",
        )


def announce(reachable: tuple[Interface, ...], port: int, gate: Gate | None, say: Say) -> None:
    """Say where members can join, and under which key."""
    for interface in reachable:
        say(f"listening on {interface.name}: members join {join_address(interface.address, port)}")
    if gate is not None:
        say(f"encrypted; its public key is {spell(gate.pair.public)}")


def _save_last(hub: Hub, journal: Journal | None, folder: Path, say: Say, verb: str) -> None:
    """Write a last snapshot, so that a resumed hub merges nothing again, and say how to resume. The
    journal holds every round without it: an error is not reported."""
    if journal is None or not hub.started:
        return
    with contextlib.suppress(EdgetrainError):
        journal.save(hub.state(), hub.needed)
    say(f"stopped after {hub.round} rounds; go on with: edgetrain {verb} --resume {folder}")
