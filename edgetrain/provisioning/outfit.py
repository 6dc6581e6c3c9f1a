"""What goes on the devices of a cluster: the job, its code and data, settings, one-time tokens.

Knows no command line: who asks for a secret and who owns a file is handed in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from edgetrain.errors import ConfigError
from edgetrain.exchange.keys.keyring import Keyring, read_token
from edgetrain.files.reading import OTHERS_READ, parse_json, read_guarded
from edgetrain.fleet import cluster, devices
from edgetrain.fleet.cluster import Cluster, DeviceEntry, JobFiles
from edgetrain.jobs import on_card
from edgetrain.jobs.bundles import digest_of
from edgetrain.jobs.job import Job
from edgetrain.jobs.reading import load, placed
from edgetrain.provisioning import sets
from edgetrain.provisioning.cards import flashing
from edgetrain.provisioning.cards.archive import Workers, read_manifest
from edgetrain.provisioning.cards.flashing import Settings
from edgetrain.provisioning.sets import JobSet

AsOwner = Callable[[Path], AbstractContextManager[None]]
"""A block in which files beside this one get its owner."""


def check_profile(workers: Workers, device: DeviceEntry) -> None:
    """Refuse a profile that does not exist, and one that no card can be made for."""
    devices.load(device.profile)
    if device.profile.startswith("jetson"):
        raise ConfigError(
            f"{device.name} is a {device.profile}, and Jetson boards are not flashed from here",
            "use NVIDIA's SDK Manager or l4t_initrd_flash, then enrol the board by hand "
            "(docs/how-to/real-machines.md)",
        )
    if device.profile not in workers.boards:
        known = ", ".join(sorted(workers.boards))
        raise ConfigError(f"no card can be made for '{device.profile}'", f"known: {known}")


def job_of(found: Cluster) -> Job:
    """The job of a cluster, checked against it. Raises ConfigError."""
    for table in ("hub", "ssh", "job"):
        if getattr(found, table) is None:
            raise ConfigError(
                f"{found.path}: [{table}] is missing", "`edgetrain devices init` explains it"
            )
    assert found.job
    job = load(found.job.file)
    fleet = job.fleet
    cluster.check_fleet(found, fleet.members, fleet.device, gateways=fleet.gateways)
    return job


def settings_of(found: Cluster, job: Job, token_s: float, ask: Callable[[str], str]) -> Settings:
    """What all cards have; without tokens, which hold for `token_s` seconds. `ask` gets a question
    and returns the secret that answers it. Raises ConfigError."""
    assert found.ssh
    assert found.job
    passphrase = ""
    if found.wifi:
        question = f"passphrase of '{found.wifi.ssid}': "
        passphrase = cluster.secret(
            found.wifi, found.path.parent, os.environ, lambda: ask(question)
        )
    return flashing.Settings(
        tuple(cluster.ssh_keys(found.ssh)), set_of(found, job), {}, token_s, passphrase
    )


def with_job(found: Cluster, path: Path) -> Cluster:
    """The cluster with this job in place of its own. Its data is the job's own data.folder, if that
    is here, else that of [job]; its bundle lies beside it. Raises ConfigError."""
    job = load(path)
    folder = job.data.get("folder")
    data = found.job.data if found.job else None
    if folder and (here := placed(str(folder), path.parent)).is_dir():
        data = here
    name = job.task.partition("#")[0].partition("@")[0] if "#" in job.task else ""
    bundle = path.parent / name if name else None
    if found.hub is None:
        raise ConfigError(f"{found.path} has no hub", '[hub] addresses = ["tcp://HOST:PORT"]')
    if folder and data is None:
        raise ConfigError(
            f"the job's data.folder is '{folder}', which is not here: devices would lack it",
            'name a folder of this machine, or job.data = "FOLDER" in the cluster file',
        )
    fleet = job.fleet
    cluster.check_fleet(found, fleet.members, fleet.device, gateways=fleet.gateways)
    return replace(found, job=JobFiles(path, data, bundle))


def set_of(found: Cluster, job: Job) -> JobSet:
    """What the devices of a cluster get of its job. Raises ConfigError."""
    assert found.job
    bundle = None
    named = job.task.partition("#")[0] if "#" in job.task else ""
    if found.job.bundle is not None:
        if Path(named).name != named or found.job.bundle.name != named:
            raise ConfigError(
                f"the job's task is '{job.task}', and job.bundle is {found.job.bundle.name}",
                "on a device both are in one folder: give the bundle's plain name in both",
            )
        try:
            content = found.job.bundle.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {found.job.bundle}: {error.strerror}") from None
        bundle = (named, content, digest_of(content))
    elif named:
        raise ConfigError(
            f"the job's task is in {named}, and {found.path} has no job.bundle",
            f'bundle = "{named}"',
        )
    data = sets.pack_data(found.job.data) if found.job.data else None
    return sets.make(job, found.job.file.read_bytes(), data, bundle)


def check_task(
    found: Cluster,
    job: Job,
    settings: Settings,
    candidates: Sequence[Path],
    owner: tuple[int, int] | None,
) -> str:
    """Why it was not tried whether a worker and card of this cluster can make the job's task; "" if
    they can. It is tried as `owner`, user and group. Raises ConfigError if none can."""
    assert found.job
    folder = job.data.get("folder")
    if folder and not found.job.data:
        raise ConfigError(
            f"the job's data.folder is '{folder}', which no card has",
            'job.data = "FOLDER" in the cluster file copies a folder to every card',
        )
    refused: list[ConfigError] = []
    for path in candidates:
        card = on_card.Card(
            settings.job.job, read_manifest(path).modules, found.job.data, settings.job.bundle
        )
        try:
            return on_card.check(card, owner)
        except ConfigError as error:
            refused.append(error)
    raise refused[0]


class Tokens(Protocol):
    """A source of tokens for cards."""

    def draw(self, names: Sequence[str]) -> dict[str, str]:
        """A token for each of these devices."""

    def open(self, name: str) -> None:
        """Let a device's token be used: its card is written."""


class GivenTokens:
    """Tokens that the hub's machine has opened already."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        """Raises ConfigError if the file has not a token for each of these devices."""
        self._known = read_tokens(path)
        if lacking := [name for name in names if name not in self._known]:
            raise ConfigError(f"{path} has no token for {', '.join(lacking)}")
        for name in names:
            try:
                read_token(self._known[name])
            except ConfigError as error:
                raise ConfigError(f"{path}, {name}: {error.message}", error.hint) from None
        if len({self._known[name] for name in names}) < len(names):
            raise ConfigError(f"{path} has one token for two devices", "each has its own")

    def draw(self, names: Sequence[str]) -> dict[str, str]:
        return {name: self._known[name] for name in names}

    def open(self, name: str) -> None:
        pass


class DrawnTokens:
    """Tokens of this machine's keys. A token can be used, and the key of the device's older card
    is taken off the list, when the new card is written: a card that fails changes nothing."""

    def __init__(self, ring: Keyring, minutes: float, as_owner: AsOwner) -> None:
        """Tokens hold for so many minutes. Files of the ring are written in `as_owner` of it."""
        self._ring, self._minutes, self._as_owner = ring, minutes, as_owner
        self._drawn: dict[str, bytes] = {}

    def draw(self, names: Sequence[str]) -> dict[str, str]:
        from edgetrain.exchange.zeromq.curve import new_pair

        tokens = {}
        for name in names:
            tokens[name], self._drawn[name] = self._ring.draw_token(new_pair)
        return tokens

    def open(self, name: str) -> None:
        with self._as_owner(self._ring.path):
            if name in self._ring.members().values():
                self._ring.revoke(name)
            self._ring.open_token(name, self._drawn[name], time.time(), self._minutes)


def read_tokens(path: Path) -> dict[str, str]:
    try:
        found = parse_json(read_guarded(path, 1 << 20, OTHERS_READ).encode())
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise ConfigError(
            f"{path} is not a file of tokens", "edgetrain keys enroll --cluster FILE --out FILE"
        )
    return found
