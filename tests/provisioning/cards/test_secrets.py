"""No token and no Wi-Fi key stay on a card's boot partition, in a file or in a free cluster."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import first_boot_device
import first_boots
import media
import pi_images
import pytest

from edgetrain.provisioning.cards import archive, blockmap, flashing, looking, personal, writing
from edgetrain.provisioning.cards.medium import FileMedium
from edgetrain.provisioning.cards.source import Source

IMAGES = {
    "raspberry-pi-os-13": "cloud-init",
    "raspberry-pi-os-13 of October": "firstrun.sh",
    "raspberry-pi-os-13 with rpi-preseed": "rpi-preseed",
    "raspberry-pi-os-12": "firstrun.sh",
    "ubuntu-24.04": "cloud-init",
}
TOKEN = first_boot_device.TOKEN
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f me@host"
NETWORK = personal.DeviceNetwork(ssid="lab", country="DE", passphrase="correct horse")
WPA3 = dataclasses.replace(NETWORK, security="wpa3")
OPEN = personal.DeviceNetwork(ssid="lab", country="DE", security="open")
HIDDEN = dataclasses.replace(NETWORK, hidden=True)
KINDS = (HIDDEN, OPEN, WPA3, WPA3, WPA3)
"""Of the network of each image's card."""
JOB = b'name = "what is no secret"\n'
# `edgetrain` on the device: makes a key, and enrols.
STAND_IN = """\
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--keys") + 1])
folder.mkdir(parents=True, exist_ok=True)
(folder / "key").write_text("x")
"""
WHY_NOT = pi_images.missing() or ", ".join(looking.missing_tools())
pytestmark = [pytest.mark.real, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


def device(network: personal.DeviceNetwork = NETWORK) -> personal.Personal:
    return personal.Personal("pi-0", "fleet", (KEY,), network, personal.instance_id("pi-0", b"1"))


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> flashing.Load:
    folder = tmp_path_factory.mktemp("worker")
    (folder / "site/edgetrain").mkdir(parents=True)
    (folder / "site/edgetrain/__init__.py").write_text("")
    (folder / "site/edgetrain/__main__.py").write_text(STAND_IN)
    manifest = archive.Manifest("any", "3.11", "x86_64", {"edgetrain": "0.1.0"})
    archive.pack(folder / "site", manifest, folder / "worker.tar")
    files = {
        "worker.tar": folder / "worker.tar",
        "token": TOKEN.encode(),
        "job.toml": JOB,
        "edgetrain-member.service": b"threads @THREADS@\n",
    }
    return flashing.Load(files, {"name": "pi-0", "hubs": ["tcp://hub:5555"], "settings": []})


def flash(
    image: Path,
    card: Path,
    load: flashing.Load,
    bmap: Path | None = None,
    network: personal.DeviceNetwork = NETWORK,
) -> Path:
    source, medium = Source(image), FileMedium(card, image.stat().st_size)
    try:
        finish = flashing.finisher(device(network), lambda found: load)
        (done,) = writing.write(
            source, [medium], blockmap.read(bmap) if bmap else None, finish=finish, probe_size=False
        ).cards
    finally:
        medium.close()
        source.close()
    assert done.ok, done.error
    return card


def on_boot_partition(card: Path) -> bytes:
    """All of it, whatever its file system says is free."""
    begin = 4 << 20
    return card.read_bytes()[begin : begin + (pi_images.BOOT_MB << 20)]


@pytest.mark.skipif(bool(first_boots.why_not()), reason=first_boots.why_not())
def test_no_secret_is_on_any_formats_card_after_its_own_first_boot(tmp_path, load):
    cards, keys = {}, {}
    for number, (name, kind) in enumerate(zip(IMAGES, KINDS, strict=True)):
        image = pi_images.make(tmp_path / f"os-{number}.img", pi_images.SYSTEMS[name])
        card = flash(image, tmp_path / f"{number}.img", load, network=kind)
        key = {"wpa3": "correct horse", "open": ""}.get(kind.security, kind.psk)
        assert TOKEN.encode() in on_boot_partition(card)
        assert json.dumps(key)[1:-1].encode() in on_boot_partition(card).replace(b"\\s", b" ")
        cards[card], keys[card] = IMAGES[name], key
    found = first_boots.run(cards, [key for key in keys.values() if key], tmp_path)
    for card, first_boot in cards.items():
        psk = keys[card] or "correct horse"
        seen = found[card.name]
        assert seen["scripts"] == [0] * (1 if first_boot == "cloud-init" else 2), seen["said"]
        assert "systemd." not in seen["line"]
        left = on_boot_partition(card)
        assert JOB in left, "what is no secret is found"
        for secret in (TOKEN, TOKEN[-43:], psk, "correct horse", r"correct\shorse"):
            assert secret.encode() not in left, (first_boot, secret[:12])
        if first_boot != "cloud-init" and keys[card]:  # its script has run: the system has the key
            system = card.read_bytes()[(4 + pi_images.BOOT_MB) << 20 :]
            assert psk.encode() in system or psk.replace(" ", r"\s").encode() in system
        if first_boot == "firstrun.sh":
            assert not seen["left"], "before the device has enrolled, as it may never do"


@pytest.mark.parametrize("with_map", [False, True])
def test_a_card_that_is_written_again_keeps_no_secret_of_the_first_time(tmp_path, load, with_map):
    image = pi_images.make(tmp_path / "os.img", pi_images.SYSTEMS["raspberry-pi-os-13"])
    content, bmap = image.read_bytes(), tmp_path / "os.img.bmap"
    full = [at for at in range(0, len(content), 4096) if any(content[at : at + 4096])]
    bmap.write_text(media.block_map(content, [(at // 4096, at // 4096) for at in full]))
    more = {"data.tar": b"x" * 500_000, **load.files}  # the first time, the token lay behind it
    card = flash(image, tmp_path / "card.img", flashing.Load(more, load.config))
    assert TOKEN.encode() in on_boot_partition(card)
    again = {**load.files, "token": b"the second"}
    flash(image, card, flashing.Load(again, load.config), bmap if with_map else None)
    left = on_boot_partition(card)
    assert b"the second" in left
    assert TOKEN.encode() not in left


def test_firstrun_leaves_nothing_in_the_place_where_it_was(tmp_path):
    """The same script in a folder, where there is no card: another name of the file stays."""
    script = personal.files(device(), "firstrun.sh")["firstrun.sh"].decode()
    boot = tmp_path / "boot"
    boot.mkdir()
    (boot / "cmdline.txt").write_text("quiet systemd.run=/x systemd.unit=y\n")
    ours = script.replace(personal.BOOT, str(boot))
    begin, end = ours.index("echo pi-0"), ours.index("ln -sf")
    place = boot / "firstrun.sh"
    place.write_text(ours[:begin] + f": {NETWORK.psk}\n" + ours[end:].replace("ln -sf", ": ln", 1))
    place.chmod(0o755)
    kept = tmp_path / "kept"
    kept.hardlink_to(place)  # as a card keeps its clusters
    done = subprocess.run(["bash", place], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not place.exists()
    assert kept.read_bytes() == b""
    assert (boot / "cmdline.txt").read_text() == "quiet\n"
