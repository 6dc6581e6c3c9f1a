"""`edgetrain devices send | update | status`, and `edgetrain run --cluster`: devices that run."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.cli import common
from edgetrain.cli.parser import AddVerb
from edgetrain.cli.remote import add_devices, add_ways, reach
from edgetrain.errors import ConfigError

if TYPE_CHECKING:
    from edgetrain.fleet.cluster import Cluster
    from edgetrain.provisioning.desk import DeviceDesk, DeviceResult, DeviceState
    from edgetrain.provisioning.sets import JobSet

_WATCH_S = 2.0
_STOP_S = 30.0
_LOOK_S = 1.0


def add_verbs(add: AddVerb) -> None:
    send = add("send", _send, "give devices their next job, and let them start on it")
    send.add_argument("job", metavar="JOB", help="a job file")
    add_devices(send)
    update = add(
        "update", _update, "give devices another version, which takes itself back if it is bad"
    )
    add_devices(update)
    update.add_argument(
        "--worker", type=Path, metavar="FILE", help="the archive (default: the devices' system's)"
    )
    update.add_argument(
        "--at-once", type=int, default=16, metavar="N",
        help="devices at a time, once the first has taken it (default: %(default)s)",
    )  # fmt: skip
    update.add_argument("--stop-job", action="store_true", help="let members leave their job first")
    status = add("status", _status, "how devices are; exit status 1 if one needs a person")
    add_devices(status)
    status.add_argument("--watch", action="store_true", help="look again every two seconds")
    status.add_argument(
        "--timeout", type=float, default=20.0, metavar="S",
        help="seconds that a device may take to answer (default: %(default)s)",
    )  # fmt: skip
    common.add_output(status, json=False)
    for each in (send, update, status):
        add_ways(each)


@contextlib.contextmanager
def _desk(
    arguments: argparse.Namespace, found: Cluster, *, keeps: bool = True
) -> Iterator[DeviceDesk]:
    from edgetrain.provisioning.desk import DeviceDesk

    with reach(arguments, found, keeps=keeps) as (remote, devices):
        hub = found.hub_device.name if found.hub_device else ""
        joined = {member.name: found.joined_by(member) for member in found.members}
        gateways = {name: d.name for name, d in joined.items() if d and d.role == "gateway"}
        hosts = [host for _, host in devices]
        yield DeviceDesk(remote, hosts, common.warn, hub=hub, gateways=gateways)


def _report(arguments: argparse.Namespace, results: Sequence[DeviceResult]) -> int:
    lines = [f"{r.name:16} {'ok' if r.ok else 'FAILED':8} {r.said}" for r in results]
    bad = sum(not r.ok for r in results)
    if bad:
        lines.append(f"{bad} of {len(results)} failed: the same command goes on with them")
    common.answer(arguments, [dataclasses.asdict(r) for r in results], "\n".join(lines))
    return int(bad > 0)


# -- jobs ----------------------------------------------------------------------------------------


def _send(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet import cluster

    found = cluster.load(arguments.cluster)
    job = _job_for(arguments, found, arguments.job)
    with _desk(arguments, found) as desk:
        return _report(arguments, desk.send(*job))


def _job_for(
    arguments: argparse.Namespace, found: Cluster, path: str
) -> tuple[JobSet, dict[str, str], dict[str, str], dict[str, str]]:
    """A job for the devices of a cluster; their units, the keys of what they join, and the lists of
    those that others join. Raises ConfigError."""
    from edgetrain.exchange.keys.keyring import Keyring
    from edgetrain.exchange.keys.pairs import keys_folder
    from edgetrain.provisioning import outfit
    from edgetrain.provisioning.cards.flashing import unit
    from edgetrain.provisioning.reaching import hub_keys, members_list

    found = outfit.with_job(found, Path(path))
    job = outfit.job_of(found)
    units = {device.name: unit(found, device) for device in found.devices}
    ring = Keyring(keys_folder(arguments.keys))
    joined = [device for device in found.devices if device.role != "member"]
    for device in joined:
        if device.name not in ring.members().values():
            raise ConfigError(
                f"the key of {device.name}, which has the {device.role}, is not on the list in "
                f"{ring.path}",
                f"edgetrain devices provision {found.path}",
            )
    known = {(d.role, d.site): d for d in found.devices}
    pins = {place: hub_keys(found, ring, device) for place, device in known.items()}
    keys = {device.name: pins[device.role, device.site] for device in found.devices}
    lists = {device.name: members_list(found, ring, device) for device in joined}
    return outfit.set_of(found, job), units, keys, lists


# -- versions ------------------------------------------------------------------------------------


def _update(arguments: argparse.Namespace) -> int:
    from edgetrain.cli.cards import archive_folder
    from edgetrain.fleet import cluster
    from edgetrain.provisioning import desk as desks
    from edgetrain.provisioning.cards import archive
    from edgetrain.runs.environment import version

    if not 1 <= arguments.at_once <= 1000:
        raise ConfigError(f"--at-once {arguments.at_once}: allowed are 1 to 1000")
    found = cluster.load(arguments.cluster)
    if arguments.worker is None:
        there = sorted(archive_folder().glob("*.tar"))
        if len(there) != 1:
            raise ConfigError(
                f"{len(there)} worker archives are in {archive_folder()}",
                "--worker FILE says which",
            )
        arguments.worker = there[0]
    manifest = archive.check(arguments.worker)
    protocol = desks.archive_protocol(arguments.worker)
    with _desk(arguments, found) as desk:
        states = desk.states(version())
        desk.check_update(states, manifest, protocol, stops=arguments.stop_job)
        results = desk.update(arguments.worker, at_once=arguments.at_once, stops=arguments.stop_job)
        return _report(arguments, results)


# -- looking -------------------------------------------------------------------------------------


def _status(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet import cluster
    from edgetrain.provisioning.in_job import states_in_job
    from edgetrain.runs.environment import version

    if not 0.1 <= arguments.timeout <= 3600:
        raise ConfigError(f"--timeout {arguments.timeout:g}: allowed are 0.1 to 3600")
    with _desk(arguments, cluster.load(arguments.cluster), keeps=arguments.watch) as desk:
        while True:
            known = states_in_job(arguments.runs, version(), time.time())
            states = desk.states(version(), arguments.timeout, known)
            common.answer(
                arguments,
                [{**dataclasses.asdict(s), "needs_a_person": s.needs_a_person} for s in states],
                "\n".join(map(_line, states)),
            )
            if not arguments.watch:
                return int(any(state.needs_a_person for state in states))
            time.sleep(_WATCH_S)


def _line(state: DeviceState) -> str:
    facts = state.facts
    heat, free = facts.get("celsius"), facts.get("disk_free_bytes")
    shown = [
        f"{state.name:16} {state.state:13}",
        f"{heat:3.0f} C" if heat is not None else "     ",
        f"{free / 1e9:6.1f} GB free" if free is not None else "",
        ", ".join(state.marks),
        state.why,
    ]
    return "  ".join(part for part in shown if part.strip()).rstrip()


# -- edgetrain run --cluster ---------------------------------------------------------------------


def run_on_cluster(arguments: argparse.Namespace) -> int:
    """Send a job to the devices of a cluster, run its hub here, unless one of them has it, and show
    how they train.

    Ctrl-C asks whether to stop, or to leave it training; without a terminal it stops.
    """
    from edgetrain.fleet import cluster
    from edgetrain.jobs.reading import load
    from edgetrain.runs.folder import read_summary

    for flag in ("resume", "print_commands", "json", "dashboard", "control", "track"):
        if getattr(arguments, flag, None):
            raise ConfigError(
                f"--cluster and --{flag.replace('_', '-')} do not go together", "leave one out"
            )
    found = cluster.load(arguments.cluster)
    if len(arguments.job) != 1 or "=" in arguments.job[0]:
        raise ConfigError(
            "--cluster: devices and hub read one job file", "edgetrain run JOB --cluster FILE"
        )
    job = _job_for(arguments, found, arguments.job[0])
    assert found.hub
    port = found.hub.addresses[0].rpartition(":")[2]
    words = ["hub", arguments.job[0], "--bind", f"tcp://*:{port}", "--runs", str(arguments.runs)]
    words += ["--keys", arguments.keys] if arguments.keys else []
    arguments.devices, arguments.ask_sudo = [], False
    with _desk(arguments, found) as desk:
        hub = _HubProcess(words) if not desk.hub else _HubOnDevice(desk, arguments)
        try:
            results = desk.send(*job)
            _report(argparse.Namespace(json=False), results)
            members = [result for result in results if desk.role(result.name) == "member"]
            here, few = sum(r.ok for r in members), load(arguments.job[0]).first_members
            if here < few:
                raise ConfigError(
                    f"{here} of {len(members)} devices have the job, and it begins with {few}",
                    "the same command again; or hub.min_members in the job, to begin with fewer",
                )
            folder = hub.folder()
            common.say(f"hub {hub.pid}; run folder: {folder}")
            follow(hub, folder, len(members))
        except KeyboardInterrupt:
            if leaves():
                common.say(f"it trains on: {hub.left()}")
                return 0
            hub.stop()
            desk.stop()
            raise
        except BaseException:
            hub.stop()
            raise
        for result in [*desk.fetch(folder, "member"), *desk.fetch(folder, "gateway")]:
            if not result.ok:
                common.warn(f"{result.name}: no run folder of its own: {result.said}")
        common.say(f"the members' own run folders are in {folder / 'members'}")
        ended = hub.wait()
        summary = read_summary(folder) or {}
        return int(ended != 0 or summary.get("status") != "finished")


def follow(hub: _HubProcess | _HubOnDevice, folder: Path, members: int) -> None:
    from edgetrain.cli.screen import Screen

    with Screen(f"hub of {members} devices") as screen:
        screen.follow(folder)
        while hub.is_running:
            time.sleep(0.2)


def leaves() -> bool:
    """Whether the user wants it to train on."""
    if not sys.stdin.isatty():
        return False
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        asked = input("\nstop the job, or leave it training? [s/L] ")
        return not asked.strip().lower().startswith("s")
    return False


class _HubProcess:
    """`edgetrain hub` as a process that outlives this one, if it is left. `log`: its lines."""

    def __init__(self, words: Sequence[str]) -> None:
        file, name = tempfile.mkstemp(prefix="edgetrain-hub-", suffix=".log")
        self.log = Path(name)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "edgetrain", *words], stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        os.close(file)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def folder(self) -> Path:
        """Its run folder, once it listens. Raises ConfigError with what it said if it ends."""
        while True:
            is_running, said = self.is_running, self.log.read_text("utf-8", "replace")
            for line in said.splitlines():
                if line.startswith("waiting for ") and "run folder: " in line:
                    return Path(line.rpartition("run folder: ")[2])
            if not is_running:
                last = said.strip().splitlines()[-1:] or ["it said nothing"]
                raise ConfigError(f"the hub ended: {last[0]}", f"its lines are in {self.log}")
            time.sleep(0.05)

    def left(self) -> str:
        """What people are told who leave it training."""
        return (
            f"`edgetrain watch {self.folder()}` shows it; the hub is process {self.pid} (its "
            f"lines: {self.log})"
        )

    def stop(self) -> None:
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def wait(self) -> int:
        return self._process.wait()


class _HubOnDevice:
    """The hub on one of the devices. What it records comes to a run folder here, meanwhile and,
    whole, at its end."""

    def __init__(self, desk: DeviceDesk, arguments: argparse.Namespace) -> None:
        self._desk, self._job, self._runs = desk, arguments.job[0], arguments.runs
        self._folder: Path | None = None
        self._status: int | None = None
        self.pid = f"on {desk.hub}"

    @property
    def is_running(self) -> bool:
        time.sleep(_LOOK_S)
        return self._desk.follow_hub(self.folder()) or self.wait() < 0

    def folder(self) -> Path:
        from edgetrain.jobs.reading import load
        from edgetrain.runs import folder as folders

        if self._folder is None:
            job = load(self._job)
            self._folder = folders.create(self._runs, job.name or "hub", private=True)
            folders.write_job(self._folder, job.to_dict())
        return self._folder

    def left(self) -> str:
        return "the same command shows it again, and brings its run folder here"

    def stop(self) -> None:
        self._desk.stop()
        self.wait()

    def wait(self) -> int:
        """Bring its run folder, once. Returns 0 if it is there."""
        if self._status is None:
            (result,) = self._desk.fetch(self.folder(), "hub")
            if not result.ok:
                common.warn(f"{result.name}: the hub's run folder is not here: {result.said}")
            self._status = int(not result.ok)
        return self._status
