"""Cards for the devices of a cluster: what goes on each, and all of them written at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.fleet import catalog
from edgetrain.fleet.cluster import HUB_PORT, Cluster, DeviceEntry
from edgetrain.provisioning.cards import archive, blockmap, looking, personal, writing
from edgetrain.provisioning.cards.archive import Manifest, Workers
from edgetrain.provisioning.cards.blockmap import BlockMap
from edgetrain.provisioning.cards.bootfiles import BootFiles, Content
from edgetrain.provisioning.cards.first_boot import HUB_UNIT, UNIT
from edgetrain.provisioning.cards.looking import ImageDescription
from edgetrain.provisioning.cards.medium import FileMedium
from edgetrain.provisioning.cards.personal import FOLDER, Personal
from edgetrain.provisioning.cards.source import CHUNK, Source
from edgetrain.provisioning.cards.writing import CardProgress, CardState, Written
from edgetrain.provisioning.sets import JobSet

PROGRAM = Path(__file__).with_name("first_boot.py")
COMMAND_LINE = "cmdline.txt"


@dataclass(frozen=True)
class Load:
    """The files of a device besides its settings: those below FOLDER, and config.json for them."""

    files: Mapping[str, Content]
    """Files by their names in FOLDER: "worker.tar", "token", "job.toml", …"""
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """The settings that all cards share, and each device's token."""

    ssh_keys: tuple[str, ...]
    job: JobSet
    tokens: Mapping[str, str] = field(repr=False)
    enrol_s: float
    """Seconds that a device tries to enrol for: the life of its token."""
    passphrase: str = field(default="", repr=False)


@dataclass(frozen=True)
class Image:
    """The image of a cluster, with what lies beside it. `look` is None while it is packed."""

    path: Path
    sha256: str
    block_map: BlockMap | None
    size: int | None
    """Bytes decoded; None: not known before decoding."""
    look: ImageDescription | None


@dataclass(frozen=True)
class Target:
    """A device, and the card or file that is to become its own. size: of a file to make."""

    device: DeviceEntry
    path: str
    size: int | None = None


def image_of(cluster: Cluster) -> Image:
    """The image that a cluster file names; looks into it if it is not packed.

    Raises ConfigError.
    """
    if cluster.image is None:
        raise ConfigError(f"{cluster.path}: [image] is missing", "which image goes on the cards?")
    path = cluster.image.file
    if path.exists() and not path.is_file():
        raise ConfigError(f"the image {path} is not a file", "an .img file, packed or not")
    bmap = cluster.image.bmap or blockmap.beside(path)
    sha256 = cluster.image.sha256 or blockmap.digest_beside(path)
    block_map = blockmap.read(bmap) if bmap else None
    source = Source(path)
    try:
        size = block_map.size if block_map else source.size
        look = None
        if source.kind == "raw":
            _, head = next(source.chunks(), (0, memoryview(b"")))
            look = looking.look(str(path), head[: min(len(head), CHUNK)], source.packed_size)
        return Image(path, sha256, block_map, size, look)
    finally:
        source.close()


def read_whole(image: Image) -> None:
    """Read all of an image and check its SHA-256. Raises ConfigError if it is damaged, or not the
    one that was meant."""
    source = Source(image.path, image.sha256)
    try:
        for _ in source.chunks():
            pass
        source.finish()
    finally:
        source.close()


class Archives:
    def __init__(self, workers: Workers, given: Path | None, folder: Path) -> None:
        """given: the one to use; None: the system's own, in `folder`."""
        self._workers = workers
        self._given = given
        self._folder = folder
        self._checked: dict[Path, Manifest] = {}

    def path(self, release: str) -> Path:
        """The archive for a system. Raises ConfigError if it is not there."""
        path = self._given or self._folder / f"{release}.tar"
        if not path.is_file():
            raise ConfigError(
                f"there is no worker archive {path}", f"edgetrain devices worker --for {release}"
            )
        return path

    def candidates(self, look: ImageDescription | None) -> list[Path]:
        """The archives that a card may get: the one for the system of its image or, while that is
        not known, all that are there. Raises ConfigError if there is none."""
        if look or self._given:
            return [self.path(look.release if look else "")]
        there = sorted(self._folder.glob("*.tar"))
        if not there:
            raise ConfigError(
                f"there is no worker archive in {self._folder}",
                "edgetrain devices worker --for raspberry-pi-os-13",
            )
        return there

    def for_card(self, look: ImageDescription, device: DeviceEntry) -> Path:
        """The archive for a card. Raises ConfigError if it cannot run there."""
        path = self.path(look.release)
        if path not in self._checked:
            self._checked[path] = archive.check(path)
        archive.check_fits(self._checked[path], look)
        self._workers.check_board(self._checked[path], device.profile)
        return path


def load_for(
    cluster: Cluster, device: DeviceEntry, settings: Settings, archives: Archives
) -> Callable[[ImageDescription], Load]:
    """The files of a device besides the system's settings, once its system is known."""
    hubs = cluster.addresses(device)
    names = ["job.toml"]
    job = settings.job if device.role == "member" else settings.job.for_hub
    files: dict[str, bytes | Path] = {
        "job.toml": job.job,
        "token": settings.tokens[device.name].encode(),
        unit_name(device): unit(cluster, device).encode(),
    }
    config = {
        "name": device.name,
        "unit": unit_name(device),
        "hubs": list(hubs),
        "enrol_s": settings.enrol_s,
        "settings": names,
        "set": {**job.facts, "digest": job.digest},
    }
    if job.data is not None:
        files["data.tar"] = job.data
    if job.bundle:
        name, content, digest = job.bundle
        files[name] = content
        names.append(name)
        config["bundle"] = digest

    def load(look: ImageDescription) -> Load:
        check_network(cluster, look)
        return Load({**files, "worker.tar": archives.for_card(look, device)}, config)

    return load


def placed(
    device: Personal, load: Load, look: ImageDescription, before: bytes
) -> dict[str, Content]:
    """All files that go onto the boot partition. `before` is what is in cmdline.txt."""
    ours: dict[str, Content] = {f"{FOLDER}/{name}": data for name, data in load.files.items()}
    ours[f"{FOLDER}/first_boot.py"] = PROGRAM.read_bytes()
    ours[f"{FOLDER}/config.json"] = json.dumps(load.config, indent=1).encode() + b"\n"
    settings = personal.files(device, look.first_boot)
    line = personal.command_line(before.decode(errors="replace"), device, look.first_boot)
    return {**ours, **settings, COMMAND_LINE: line.encode()}


def finisher(device: Personal, load_for: Callable[[ImageDescription], Load]) -> writing.Finish:
    """The function that writes a device's files to its card, for `writing.write` to call.

    load_for: what the device gets on the system that was found; may raise EdgetrainError. After
    any error the card does not boot.
    """

    def finish(card: CardState, head: memoryview) -> None:
        medium = card.medium
        look = looking.look(medium.name, head, medium.size)
        boot = BootFiles(medium.name, look.boot)
        before = boot.read(COMMAND_LINE)
        if before is None:
            raise ConfigError(
                f"partition {look.boot.number} has no {COMMAND_LINE}: the image is not for a "
                "Raspberry Pi, or it boots from another partition"
            )
        files = placed(device, load_for(look), look, before)
        boot.write(files)
        medium.flush()
        medium.forget()
        boot.check(files)

    return finish


def check_network(cluster: Cluster, look: ImageDescription) -> None:
    """Raises ConfigError for a network that the image's system cannot join: netplan knows WPA3
    since 0.107, and with a file that it does not know a device has not even its cable. Version 1
    has names read with escapes, and writes their backslashes as they are."""
    wifi, kind = cluster.wifi, (look.release, look.first_boot)
    if wifi and "\\" in wifi.ssid and kind == ("debian-13", looking.CLOUD_INIT):
        raise ConfigError(
            f"wifi.ssid has a backslash, which netplan 1 of {look.describe()} loses",
            "give the network another name, or take a cable",
        )
    if wifi and wifi.security == "wpa3" and kind == ("debian-12", looking.CLOUD_INIT):
        raise ConfigError(
            f"{look.describe()} has netplan 0.106, which knows no WPA3",
            "take an image of Debian 13, or a network with WPA2",
        )


def person(cluster: Cluster, device: DeviceEntry, settings: Settings, nonce: bytes) -> Personal:
    """A device as its card describes it. nonce: another one each time."""
    if cluster.ssh is None:
        raise ConfigError(f"{cluster.path}: [ssh] is missing", "who may log in on the devices?")
    network = personal.DeviceNetwork(
        device.address,
        device.gateway,
        cluster.wifi.ssid if cluster.wifi else "",
        cluster.wifi.country if cluster.wifi else "",
        settings.passphrase,
        cluster.wifi.security if cluster.wifi else "",
        bool(cluster.wifi and cluster.wifi.hidden),
        cluster.system.dns,
    )
    instance = personal.instance_id(device.name, nonce)
    return Personal(
        device.name, cluster.ssh.user, settings.ssh_keys, network, instance,
        cluster.system.timezone, cluster.system.locale,
    )  # fmt: skip


_BEFORE = "ExecStartPre=+-/bin/sh -c '{}'\n"
_FIRST_WINDOW = (
    "ip -4 route show default | while read -r route; do ip route change $$route initcwnd {}; done"
)
_RECEIVE = (
    "cd /proc/sys/net/ipv4; read -r least first most <tcp_rmem; echo $$least {} $$most >tcp_rmem"
)
"""Commands of a unit, where $$ is a dollar."""
_PINS = "\nLoadCredential=hubs:/var/lib/edgetrain-keys/hubs"


def unit_name(device: DeviceEntry) -> str:
    """The name of the unit of a device's member; or of its hub, which a gateway is to its site."""
    return UNIT if device.role == "member" else HUB_UNIT


def unit(cluster: Cluster, device: DeviceEntry) -> str:
    """The unit of a device's member, or hub, with all but the number of threads filled in. As root,
    before each start, it sets TCP as the cluster's `system` says; if that fails it starts all the
    same."""
    assert cluster.hub
    system = cluster.system
    text = (catalog.folder("devices") / "systemd" / unit_name(device)).read_text(encoding="utf-8")
    text = text[text.index("[Unit]") :]  # without what explains the template
    before = ""
    if system.first_window:
        before += _BEFORE.format(_FIRST_WINDOW.format(system.first_window))
    if system.receive_kb:
        before += _BEFORE.format(_RECEIVE.format(1000 * system.receive_kb))
    text = text.replace("\nExecStart=", f"\n{before}ExecStart=")
    hubs = [hub.replace("%", "%%") for hub in cluster.addresses(device)]  # a unit's percent sign
    if device.role == "hub":
        return _hubs_unit(text, ("hub", "", "90", "", hubs[0].rpartition(":")[2]))
    if device.role == "gateway":
        members = sum(cluster.joined_by(member) is device for member in cluster.members)
        above = " ".join(f"--above {hub}" for hub in hubs)
        words = f"gateway {above} --members {members} --name {device.site}"
        of = f" of the site {device.site}"
        return _hubs_unit(text, (words, of, "infinity", _PINS, str(HUB_PORT)))
    index = cluster.index(device)
    text = text.replace("@HUBS@", " ".join(f"--hub {hub}" for hub in hubs))
    cap = f" --max-celsius {device.max_celsius:g}" if device.max_celsius else ""
    return text.replace("--index @INDEX@", f"--index {index}{cap}").replace("@INDEX@", str(index))


def _hubs_unit(text: str, values: Sequence[str]) -> str:
    for word, value in zip(("COMMAND", "OF", "START_S", "PINS", "PORT"), values, strict=True):
        text = text.replace(f"@{word}@", value)
    return text


def flash(
    image: Image,
    targets: Sequence[Target],
    finish: Mapping[str, writing.Finish],
    done: Callable[[str], None] = lambda _: None,
    progress: Callable[[CardProgress], None] = lambda _: None,
) -> Written:
    """Write the cards of several devices at once. finish: by the device's name; `done` is called
    with it when the card boots.

    Raises ConfigError if a card cannot be opened, or if the image cannot be used.
    """
    media: list[FileMedium] = []
    source = Source(image.path, image.sha256)
    try:
        for target in targets:
            media.append(FileMedium(target.path, target.size))
        names = {id(m): t.device.name for m, t in zip(media, targets, strict=True)}

        def finish_card(card: CardState, head: memoryview) -> None:
            finish[names[id(card.medium)]](card, head)

        return writing.write(
            source, media, image.block_map, finish=finish_card, progress=progress,
            done=lambda card: done(names[id(card.medium)]),
            probe_size=all(target.size is None for target in targets),
        )  # fmt: skip
    finally:
        for medium in media:
            medium.close()
        source.close()
