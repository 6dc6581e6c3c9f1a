"""Machines that already run become devices of a cluster, over ssh; and stop being devices.

A device is looked at first, then only what differs is made, by the steps of its first boot
(`onsite`, `cards.first_boot`). Nothing is enrolled with a token: its key is read over ssh and put
on the list here, and this hub's key is written there.

    part     due if
    worker   no slot is in use: /opt/edgetrain/current
    job      no job set is there: /etc/edgetrain/current
    keys     it has no key pair, or no list of bundles
    hub      /var/lib/edgetrain-keys/hubs lacks an address; with another hub's key it is refused
    list     its key is not on this machine's list under its name; of a device that others join: or
             it has another list
    user     a key of [ssh] keys is not in the user's authorized_keys
    tune     the settings of journal and TCP are not there
    unit     the unit of the member, the hub or the gateway has another text
    start    the unit is not enabled, or a run was cut off before this; or another part was due

Another job or version than the cluster file's is no difference: `devices send` and `devices update`
bring those. A device that others join comes before them, since they know it by its key: the hub,
then gateways. Each device is put on the list of the one that it joins before it starts. Secret keys
stay where they are made. Knows no command line.
"""

from __future__ import annotations

import io
import json
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import Public, public_key, spell
from edgetrain.fleet.cluster import ROLES, Cluster, DeviceEntry
from edgetrain.fleet.ssh import COPY_S, Remote, SshAnswer, SshHost, copy, on_each
from edgetrain.provisioning import calling, onsite
from edgetrain.provisioning.cards.archive import read_manifest
from edgetrain.provisioning.cards.first_boot import FLEETING, SPARE
from edgetrain.provisioning.cards.flashing import Archives, Settings, load_for, unit, unit_name
from edgetrain.provisioning.cards.looking import ImageDescription, Partition
from edgetrain.provisioning.keeper import other_hub
from edgetrain.provisioning.reaching import hub_keys, members_list, send_list

LOOK_S, SET_UP_S = 30.0, 900.0
CLOCK_S = 86_400.0
"""Seconds by which a device's clock may differ from this machine's."""
PARTS = ("worker", "job", "keys", "hub", "list", "user", "tune", "unit", "start")
_UNPACK = 'mkdir -p "$1" && tar -x --no-same-owner -C "$1"'


@dataclass(frozen=True)
class Provisioned:
    """The result on one device."""

    name: str
    ok: bool
    changed: tuple[str, ...] = ()
    """The parts that were made; with `--check`, those that would be."""
    why: str = ""
    """Why it is not done, with the way out."""


def call(
    remote: Remote, host: SshHost, root: str, *words: str, seconds: float = LOOK_S
) -> SshAnswer:
    return calling.call(remote, host, root, calling.ONSITE, *words, seconds=seconds)


def wrong(facts: Mapping[str, Any], now: float) -> str:
    """Why a machine cannot become a device, with the way out; "" if it can."""
    if not facts["systemctl"]:
        return "it has no systemd, which starts the member (Debian, Ubuntu or Raspberry Pi OS)"
    if facts["read_only"]:
        return "its root is mounted read-only (mount -o remount,rw / ; then look for why: dmesg)"
    if facts["filesystem"] in FLEETING and facts["filesystem"] != "overlay":
        return f"/var/lib is on {facts['filesystem']}: a reboot would lose its key"
    if abs(facts["clock"] - now) > CLOCK_S:
        days = (facts["clock"] - now) / 86_400
        return f"its clock is off by {days:+.0f} days (timedatectl set-ntp true, or date -s)"
    return ""


def due(
    facts: Mapping[str, Any], wanted: Mapping[str, str], listed: str, users_keys: Sequence[str]
) -> tuple[str, ...]:
    """The parts that differ. wanted: texts of "unit", "hubs" and "list"; listed: the key on this
    machine's list under the device's name."""
    there = facts["users_keys"].splitlines()
    text = wanted["unit"].replace("@THREADS@", str(facts["cores"]))
    lacks = {
        "worker": not facts["slot"],
        "job": not facts["set"],
        "keys": not (facts["key"] and facts["bundles"]),
        "hub": not set(wanted["hubs"].splitlines()) <= set(facts["hubs"].splitlines()),
        "list": not facts["key"] or facts["key"] != listed or facts["list"] != wanted["list"],
        "user": any(key not in there for key in users_keys),
        "tune": not facts["tuned"],
        "unit": facts["unit"] != text,
        "start": facts["staged"] or not facts["enabled"],
    }
    found = tuple(part for part in PARTS if lacks[part])
    if not found or "start" in found or (found == ("list",) and wanted["list"]):
        return found  # a hub that runs takes another list
    return (*found, "start")


class Provisioner:
    """The devices of one cluster, their settings, and the hub's list of keys."""

    def __init__(
        self,
        found: Cluster,
        settings: Settings,
        archives: Archives,
        ring: Keyring,
        remote: Remote,
        *,
        root: str = "/",
        now: Callable[[], float] = time.time,
    ) -> None:
        """root: the folder on the devices that is set up; another one in tests."""
        assert found.hub
        assert found.ssh
        self._cluster, self._settings, self._archives = found, settings, archives
        self._ring, self._remote, self._root, self._now = ring, remote, root, now
        self._user = found.ssh.user
        self._joined: dict[str, SshHost] = {}
        self._listing = threading.Lock()

    def provision(
        self,
        devices: Sequence[tuple[DeviceEntry, SshHost]],
        *,
        check: bool = False,
        told: Callable[[Provisioned], None] = lambda _: None,
    ) -> list[Provisioned]:
        """Set up these devices, several at a time; those in trouble do not hold up the others."""

        def tell(result: Provisioned) -> Provisioned:
            told(result)
            return result

        def work(item: tuple[DeviceEntry, SshHost]) -> Provisioned:
            return tell(self._one(*item, check=check))

        def failed(item: tuple[DeviceEntry, SshHost], why: str) -> Provisioned:
            return tell(Provisioned(item[0].name, ok=False, why=why))

        self._joined = {device.name: host for device, host in devices if device.role != "member"}
        found: list[Provisioned] = []
        for role in ROLES:
            found += on_each([each for each in devices if each[0].role == role], work, failed)
        return found

    def _one(self, device: DeviceEntry, host: SshHost, *, check: bool) -> Provisioned:
        looked = call(self._remote, host, self._root, "look", self._user)
        if not looked.ok:
            return Provisioned(device.name, ok=False, why=_reason(looked))
        facts = _said(looked)
        hubs = hub_keys(self._cluster, self._ring, device)
        wanted = {
            "unit": unit(self._cluster, device),
            "hubs": hubs,
            "list": members_list(self._cluster, self._ring, device),
        }
        members = self._ring.members()
        listed = next((spell(key) for key, name in members.items() if name == device.name), "")
        parts = due(facts, wanted, listed, self._settings.ssh_keys)
        # The hubs of this cluster: this machine's, and those that devices on its list had.
        known = "".join(f"- {spell(key)}\n" for key in (self._ring.pair().public, *members))
        why = wrong(facts, self._now()) or other_hub(facts["hubs"], known)
        if (joined := self._cluster.joined_by(device)) and not (hubs or check):
            why = why or f"{joined.name}, which it joins, is not set up, and comes first"
        if parts and (why := why or self._no_room(facts, device, parts)):
            return Provisioned(device.name, ok=False, why=why)
        if check or not parts:
            return Provisioned(device.name, ok=True, changed=parts)
        if parts != ("list",):
            answer = self._set_up(device, host, facts, parts, hubs)
            if not answer.ok:
                return Provisioned(device.name, ok=False, why=_reason(answer))
            facts = {**facts, **_said(answer)}
        allowed = self._allow(public_key(facts["key"]), device)
        if not allowed.ok:
            return Provisioned(device.name, ok=False, why=f"the hub's list: {_reason(allowed)}")
        if "start" not in parts:
            return Provisioned(device.name, ok=True, changed=parts)
        started = call(self._remote, host, self._root, "start", seconds=SET_UP_S)
        if not started.ok:
            return Provisioned(device.name, ok=False, changed=parts, why=_reason(started))
        return Provisioned(device.name, ok=True, changed=parts)

    def _allow(self, key: Public, device: DeviceEntry) -> SshAnswer:
        """Put a device on the list, also on that of the device that it joins: before it starts,
        since it would take no for an answer. Give it its own list, if others join it."""
        with self._listing:
            self._ring.allow(key, device.name, replace=True)
            root, answer = f"{self._root.rstrip('/')}/", SshAnswer()
            for each in (self._cluster.joined_by(device), device):
                if answer.ok and each and (host := self._joined.get(each.name)):
                    members = members_list(self._cluster, self._ring, each)
                    answer = send_list(self._remote, host, root, members)
            return answer

    def _no_room(self, facts: Mapping[str, Any], device: DeviceEntry, parts: Sequence[str]) -> str:
        """Why the worker does not run, or fit, there; "" if it does."""
        if "worker" not in parts:
            return ""
        path = self._archives.for_card(_look(facts), device)
        manifest = read_manifest(path)
        if lacking := sorted(set(manifest.needs) - set(facts["features"])):
            return (
                f"torch {manifest.packages.get('torch')} needs {', '.join(lacking)}, which its "
                "processor does not have (an archive with an older torch)"
            )
        needed = path.stat().st_size + manifest.unpacked + SPARE
        if facts["free_bytes"] < needed:
            return (
                f"disk full: {facts['free_bytes'] / 1e6:.0f} MB are free, and {needed / 1e6:.0f} "
                "MB are needed (free some: apt clean, journalctl --vacuum-size=10M)"
            )
        return ""

    def _set_up(
        self,
        device: DeviceEntry,
        host: SshHost,
        facts: Mapping[str, Any],
        parts: Sequence[str],
        hubs: str,
    ) -> SshAnswer:
        """Send what is due, and make it."""
        stage = f"{self._root.rstrip('/')}/{onsite.STAGE}/edgetrain"
        settings = Settings(self._settings.ssh_keys, self._settings.job, {device.name: ""}, 0.0, "")
        load = load_for(self._cluster, device, settings, self._archives)(_look(facts))
        files = {name: file for name, file in load.files.items() if isinstance(file, bytes)}
        del files["token"]
        if "job" not in parts:
            files = {unit_name(device): files[unit_name(device)]}
        files["config.json"] = json.dumps(load.config).encode()
        files["hubs"] = hubs.encode()
        files["users_keys"] = "".join(f"{key}\n" for key in settings.ssh_keys).encode()
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), 0o600
                tar.addfile(entry, io.BytesIO(content))
        words = ["sh", "-c", _UNPACK, "sh", stage]
        sent = self._remote.run(host, words, packed.getvalue(), seconds=COPY_S, root=True)
        worker = load.files["worker.tar"]
        if sent.ok and "worker" in parts and isinstance(worker, Path):
            target = f"{stage}/worker.tar"
            sent = copy(self._remote, host, worker, target, root=True)
        if not sent.ok:
            return sent
        made = [part for part in parts if part not in ("list", "start")]
        words = ["set-up", self._user, *made]
        return call(self._remote, host, self._root, *words, seconds=SET_UP_S)


def remove(
    devices: Sequence[SshHost], ring: Keyring, remote: Remote, root: str = "/"
) -> list[Provisioned]:
    def work(host: SshHost) -> Provisioned:
        answer = call(remote, host, root, "remove", seconds=SET_UP_S)
        if not answer.ok:
            why = f"{_reason(answer)}; its key may still join: edgetrain keys revoke {host.name}"
            return Provisioned(host.name, ok=False, why=why)
        if host.name in ring.members().values():
            ring.revoke(host.name)
        return Provisioned(host.name, ok=True, changed=("removed",))

    def failed(host: SshHost, why: str) -> Provisioned:
        return Provisioned(host.name, ok=False, why=why)

    return on_each(devices, work, failed)


def _said(answer: SshAnswer) -> dict[str, Any]:
    """What `onsite` says: its last line."""
    said: dict[str, Any] = json.loads(answer.text.splitlines()[-1])
    return said


def _reason(answer: SshAnswer) -> str:
    """Why a device is not done, with the way out."""
    if answer.trouble is None:
        if answer.status == 127:
            return "it has no python3 (apt install python3)"
        if "No space left on device" in answer.stderr:
            return "disk full (free some: apt clean, journalctl --vacuum-size=10M)"
        if "Read-only file system" in answer.stderr:
            return "its root is read-only (mount -o remount,rw / ; then look for why: dmesg)"
    return answer.why


def _look(facts: Mapping[str, Any]) -> ImageDescription:
    """A running system, as an image of it would be described."""
    none = Partition(0, 0, 0)
    python = (int(facts["python"][0]), int(facts["python"][1]))
    return ImageDescription(facts["release"], python, facts["machine"], "", none, none)
