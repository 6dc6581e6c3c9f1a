"""From one place to devices that run: their next job, their next version, how they are.

The device's half is `keeper`. Knows no command line: what people are told, and asked, is handed in.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from edgetrain.errors import ConfigError
from edgetrain.fleet.cluster import ROLES
from edgetrain.fleet.interpreters import PACKAGE_PARENT
from edgetrain.fleet.ssh import AT_ONCE, Remote, SshAnswer, SshHost, copy, on_each
from edgetrain.provisioning import calling, glance
from edgetrain.provisioning.cards.first_boot import MOST_MANIFEST, worker_archive
from edgetrain.provisioning.keeper import LOOKING, MESSAGES, POLL_S, TRIAL_S, protocol_in
from edgetrain.provisioning.reaching import send_list

if TYPE_CHECKING:
    from edgetrain.provisioning.cards.archive import Manifest
    from edgetrain.provisioning.sets import JobSet

HOT_CELSIUS = 80.0
"""Raspberry Pi's firmware slows a board down from here on (its documentation, "Frequency
management")."""
FULL_BYTES = 256 << 20
CLOCK_S = 60.0
"""Seconds that a device's clock may be wrong by."""
LOOK_S = 20.0
PROTOCOL = protocol_in((PACKAGE_PARENT / MESSAGES).read_text("utf-8"))
"""The protocol of this edgetrain. Read, not imported: that takes a fifth of a short command."""


def archive_protocol(path: Path) -> int:
    """The protocol that a worker archive's edgetrain speaks. Raises ConfigError."""
    text = ""
    try:
        with (
            worker_archive(path) as (_, payload),
            tarfile.open(fileobj=payload, mode="r|") as inner,
        ):
            for entry in inner:
                if entry.name == MESSAGES and (file := inner.extractfile(entry)):
                    text = file.read(MOST_MANIFEST).decode()
    except (tarfile.TarError, EOFError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} cannot be unpacked: {error}", "make it anew") from None
    if (found := protocol_in(text)) is None:
        raise ConfigError(f"{path} has no edgetrain in it", "edgetrain devices worker makes one")
    return found


@dataclass(frozen=True)
class DeviceState:
    name: str
    state: str
    """unreachable, not enrolled, refused, waiting, training, serving, done, off, on trial, stuck"""
    why: str = ""
    marks: tuple[str, ...] = ()
    """hot, throttled, under-voltage, disk nearly full, other version, clock wrong"""
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The device's answer."""

    @property
    def is_in_job(self) -> bool:
        return self.state in ("training", "serving")

    @property
    def needs_a_person(self) -> bool:
        """Whether it does not get better by itself."""
        bad = {"under-voltage", "disk nearly full", "other version", "clock wrong"}
        states = ("unreachable", "not enrolled", "refused", "stuck")
        return self.state in states or bool(bad & set(self.marks))


def judged(
    name: str, answer: Mapping[str, Any] | SshAnswer, now: float, version: str
) -> DeviceState:
    """How a device is, from what it said at the time `now`; `version`: of this edgetrain."""
    if isinstance(answer, SshAnswer):
        return DeviceState(name, "unreachable", answer.why)
    unit = answer["unit"]
    state, why = _state(answer, unit)
    theirs = answer["version"].get("edgetrain")
    other = answer["protocol"] not in (None, PROTOCOL) or (theirs and theirs != version)
    marks = marks_of(answer, answer["clock"] - now, other=bool(other))
    return DeviceState(name, state, why, marks, answer)


def marks_of(facts: Mapping[str, Any], clock_s: float, *, other: bool) -> tuple[str, ...]:
    """What stands beside a device's state. clock_s: its clock less this one; other: whether it has
    another version."""
    celsius, free = facts.get("celsius"), facts.get("disk_free_bytes")
    marks = {
        "hot": celsius is not None and celsius >= HOT_CELSIUS,
        "throttled": facts.get("throttled"),
        "under-voltage": facts.get("under_voltage"),
        "disk nearly full": free is not None and free < FULL_BYTES,
        "other version": other,
        "clock wrong": abs(clock_s) > CLOCK_S,
    }
    return tuple(mark for mark, there in marks.items() if there)


def _state(answer: Mapping[str, Any], unit: Mapping[str, Any]) -> tuple[str, str]:
    said = str(unit["text"])
    if answer["trial"]:
        return "on trial", said
    if not answer["enrolled"]:
        return "not enrolled", "its first boot is not over, or the hub did not let it in"
    outcome = answer["outcome"]
    if outcome.get("ended") == "stuck" and unit["active"] not in ("active", "reloading"):
        return "stuck", f"the update did not become READY, and there is no way back: {said}"
    if unit["active"] == "failed":
        return "refused", said or f"exit status {unit['status']}"
    if unit["active"] == "active":
        return "serving" if answer["is_hub"] else "training", said
    if unit["active"] in ("activating", "reloading", "deactivating"):
        return "waiting", said
    if unit["result"] == "success" and said:
        return "done", said
    return "off", f"its {'hub, or gateway,' if answer['is_hub'] else 'member'} is not running"


@dataclass(frozen=True)
class DeviceResult:
    """The result on one device."""

    name: str
    ok: bool
    said: str


class DeviceDesk:
    """Devices, and a way to them. `tell` gets a line for people; `root` is the devices' root, as
    the other side sees it."""

    def __init__(
        self,
        remote: Remote,
        hosts: Sequence[SshHost],
        tell: Callable[[str], None] = lambda line: None,
        *,
        root: str = "/",
        sleep: Callable[[float], None] = time.sleep,
        hub: str = "",
        gateways: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """hub: the name of the device that has the hub. gateways: for each member of a site, by its
        name, that of the gateway that it joins."""
        self.hosts, self.hub, self.gateways = list(hosts), hub, dict(gateways)
        self._remote, self._tell, self._root, self._sleep = remote, tell, root, sleep

    def call(self, host: SshHost, verb: str, *words: str, seconds: float = 300.0) -> Any:
        """What a device answers: a table, or the SshAnswer that says why there is none."""
        answer = calling.call(
            self._remote, host, self._root, calling.KEEPER, verb, *words, seconds=seconds
        )
        try:
            found = json.loads(answer.stdout or b"")
        except ValueError:
            found = None
        if answer.trouble is not None or not isinstance(found, dict):
            return answer if not answer.ok else SshAnswer(1, stderr="it answered no JSON")
        return found

    # -- looking ------------------------------------------------------------------------------

    def states(
        self,
        version: str,
        seconds: float = LOOK_S,
        known: Mapping[str, DeviceState] = MappingProxyType({}),
    ) -> list[DeviceState]:
        """How all devices are; those that are not `known` are asked, each for at most this long."""

        def look(host: SshHost) -> DeviceState:
            if host.name in known:
                return known[host.name]
            answer = glance.look(self._remote, host, self._root, seconds)
            return judged(host.name, answer, time.time(), version)

        def failed(host: SshHost, why: str) -> DeviceState:
            return DeviceState(host.name, "unreachable", why)

        return on_each(self.hosts, look, failed)

    # -- jobs ---------------------------------------------------------------------------------

    def send(
        self,
        job: JobSet,
        units: Mapping[str, str],
        hubs: Mapping[str, str] = MappingProxyType({}),
        lists: Mapping[str, str] = MappingProxyType({}),
    ) -> list[DeviceResult]:
        """Give all devices a job, and let them start on it: first the one that has the hub, then
        gateways. By a device's name: units, the text of its unit; hubs, the addresses that it
        joins, each with its key ("": it keeps those that it has); lists, who may join it."""
        failed: set[str] = set()
        with tempfile.TemporaryDirectory(prefix="edgetrain-send-") as name:

            def put(content: str | bytes) -> Path:
                data = content.encode() if isinstance(content, str) else content
                path = Path(name) / hashlib.sha256(data).hexdigest()
                path.write_bytes(data)
                return path

            def give(host: SshHost) -> DeviceResult:
                joined = self.gateways.get(host.name, self.hub)
                if joined in failed:
                    why = f"left alone: {joined}, which it joins, has not got the job"
                    return DeviceResult(host.name, False, why)
                files = [packed[self.role(host.name) == "member"], put(units[host.name])]
                files += [known[text]] if (text := hubs.get(host.name)) else []
                for path in files:
                    target = f"{self._root}opt/edgetrain/incoming/{path.name}"
                    done = copy(self._remote, host, path, target, digest=path.name, root=True)
                    if not done.ok:
                        return DeviceResult(host.name, False, done.why)
                if host.name in lists:
                    done = send_list(self._remote, host, self._root, lists[host.name])
                    if not done.ok:
                        return DeviceResult(host.name, False, done.why)
                answer = self.call(host, "send", *(path.name for path in files))
                return _result(host, answer, lambda a: "sent" if a["changed"] else "had it already")

            packed = (put(job.for_hub.packed), put(job.packed))
            known = {text: put(text) for text in hubs.values()}
            results: list[DeviceResult] = []
            for role in ROLES:
                results += on_each(self._at(role), give, _failed)
                failed |= {result.name for result in results if not result.ok}
            return results

    def role(self, name: str) -> str:
        """One of ROLES."""
        if name == self.hub:
            return "hub"
        return "gateway" if name in self.gateways.values() else "member"

    def _at(self, role: str) -> list[SshHost]:
        """Those of these devices with a role."""
        return [host for host in self.hosts if self.role(host.name) == role]

    def follow_hub(self, run: Path) -> bool:
        """Add to the metrics in `run` what the hub on a device has written since. Returns whether
        that is at work still."""
        from edgetrain.provisioning.fetching import follow

        return all(follow(self._remote, host, run, self._root) for host in self._at("hub"))

    def fetch(self, run: Path, role: str) -> list[DeviceResult]:
        """Bring the run folders of all devices with a role to that of the hub, `run`."""
        from edgetrain.provisioning.fetching import DiskRoom, fetch

        room = DiskRoom(run)

        def one(host: SshHost) -> DeviceResult:
            why = fetch(self._remote, host, run, self._root, role, room)
            return DeviceResult(host.name, not why, why)

        return on_each(self._at(role), one, _failed)

    def stop(self) -> list[DeviceResult]:
        def one(host: SshHost) -> DeviceResult:
            return _result(host, self.call(host, "stop"), lambda _: "stopped")

        return on_each(self.hosts, one, _failed)

    # -- versions -----------------------------------------------------------------------------

    def check_update(
        self, states: Sequence[DeviceState], manifest: Manifest, protocol: int, *, stops: bool
    ) -> None:
        """Tell of another protocol, before anything is sent. Raises ConfigError for an archive that
        cannot run on a device, and for an older protocol while a device is in a job, unless that is
        stopped."""
        for each in states:
            if not each.facts:
                continue
            has = (each.facts["python"], each.facts["machine"])
            if has != (manifest.python, manifest.machine):
                raise ConfigError(
                    f"the worker is for Python {manifest.python} on {manifest.machine}, and "
                    f"{each.name} has Python {has[0]} on {has[1]}",
                    "edgetrain devices worker --for ITS SYSTEM, then --worker FILE",
                )
            theirs = each.facts["protocol"]
            if theirs is not None and protocol < theirs and each.is_in_job and not stops:
                raise ConfigError(
                    f"{each.name} is in a job, and the update speaks protocol {protocol}, older "
                    f"than its {theirs}: the job's hub would refuse it",
                    "--stop-job lets the members leave first; or wait until the job is over",
                )
        others = {e.facts["protocol"] for e in states if e.facts} - {protocol, None}
        if others:
            old = ", ".join(map(str, sorted(others)))
            self._tell(
                f"the protocol changes from {old} to {protocol}: members need a hub of that version"
            )
        if protocol != PROTOCOL:
            self._tell(f"the hub of this machine speaks protocol {PROTOCOL}, not {protocol}")

    def update(
        self, archive: Path, *, at_once: int = AT_ONCE, stops: bool = False
    ) -> list[DeviceResult]:
        """Give all devices a version: one first and, once that has taken it, the others, this many
        at a time. The first that does not take it ends this: devices after it are left alone."""
        with archive.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        ends = threading.Event()

        def give(host: SshHost) -> DeviceResult:
            if ends.is_set():
                return DeviceResult(host.name, False, "left alone: another did not take the update")
            return tell(self._update(host, archive, digest, stops=stops))

        def tell(result: DeviceResult) -> DeviceResult:
            if not result.ok and result.said.startswith("went back"):
                ends.set()
            self._tell(f"{result.name}: {result.said}")
            return result

        def failed(host: SshHost, why: str) -> DeviceResult:
            return tell(_failed(host, why))

        first = on_each(self.hosts[:1], give, failed)
        if not all(result.ok for result in first):
            ends.set()
        return first + on_each(self.hosts[1:], give, failed, at_once)

    def _update(self, host: SshHost, archive: Path, digest: str, *, stops: bool) -> DeviceResult:
        target = f"{self._root}opt/edgetrain/incoming/{digest}"
        before = glance.look(self._remote, host, self._root, LOOK_S)
        facts = {} if isinstance(before, SshAnswer) else before
        if facts and facts["version"].get("digest") == digest:
            return self._outcome(host, digest)
        if not facts.get("trial"):
            done = copy(self._remote, host, archive, target, digest=digest, root=True)
            if not done.ok:
                return DeviceResult(host.name, False, done.why)
        if stops and isinstance(answer := self.call(host, "stop"), SshAnswer):
            return DeviceResult(host.name, False, answer.why)
        answer = self.call(host, "update", digest, seconds=1800.0)
        problem = _result(host, answer, lambda _: "")
        return problem if not problem.ok else self._outcome(host, digest)

    def _outcome(self, host: SshHost, digest: str) -> DeviceResult:
        """Wait for the end of a device's trial. One that waits for a hub is not waited for: it
        takes itself back if it has to."""
        for _ in range(int((TRIAL_S + 120.0) / POLL_S)):
            answer = glance.look(self._remote, host, self._root, LOOK_S)
            if not isinstance(answer, SshAnswer):
                if not answer["trial"]:
                    why = answer["outcome"].get("why", "")
                    if answer["outcome"].get("ended") == "stuck":
                        said = f"stuck without a way back: {why}"
                        return DeviceResult(host.name, False, said)
                    if answer["version"].get("digest") == digest:
                        return DeviceResult(host.name, True, "updated")
                    return DeviceResult(host.name, False, f"went back: {why or 'why is not known'}")
                looks = answer["unit"]["text"].startswith(LOOKING)
                if looks and not answer["trial"]["strict"] and answer["trial"]["phase"] == "trying":
                    return DeviceResult(host.name, True, "on trial until a hub answers")
            self._sleep(POLL_S)
        return DeviceResult(host.name, False, "its trial has not ended: edgetrain devices status")


def _failed(host: SshHost, why: str) -> DeviceResult:
    return DeviceResult(host.name, False, why)


def _result(host: SshHost, answer: Any, said: Callable[[Mapping[str, Any]], str]) -> DeviceResult:
    if isinstance(answer, SshAnswer):
        return DeviceResult(host.name, False, answer.why)
    if "error" in answer:
        return DeviceResult(host.name, False, str(answer["error"]))
    return DeviceResult(host.name, True, said(answer))
