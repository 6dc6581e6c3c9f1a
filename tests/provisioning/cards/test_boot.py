"""A flashed card boots, enrols, joins and trains; then the power fails, and the hub is away.

Boots Debian under user-mode-linux: `make test-boot`. All look at one card: the last goes on
where the power was cut off.
"""

from __future__ import annotations

import json
import mmap
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boot_card
import card_job
import held
import pytest
from personal_devices import NETWORKS, device

from edgetrain.exchange.keys.host_keys import fingerprint
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.provisioning.cards import personal
from edgetrain.runs.folder import read_summary

WHY_NOT = boot_card.missing()
pytestmark = [
    pytest.mark.boot,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
STEPS = 160
QUIET_BYTES = 20_000
"""What a device that waits for its hub may write to its card in a minute."""


def in_boot_partition(card: Path, text: bytes) -> bool:
    """Whether the first partition has these bytes anywhere, also where no file is."""
    with card.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text, 0, (8 + boot_card.BOOT_MB) << 20) >= 0


@dataclass(frozen=True)
class Trained:
    """A card that was flashed, has booted and trained a while; then its power was cut off."""

    folder: Path
    card: Path
    words: str
    token: str
    said: str
    """Its console."""
    run: Path
    """The hub's run folder."""

    @property
    def ring(self) -> Keyring:
        return Keyring(self.folder / "keys")


@pytest.fixture(scope="module")
def space() -> Iterator[held.Space]:
    with boot_card.network() as found:
        yield found


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> boot_card.Built:
    return boot_card.build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, built, space) -> Trained:
    folder = tmp_path_factory.mktemp("cluster")
    card_job.make_folder(folder, built.image, STEPS)
    card, words, token = card_job.flashed(folder, built.worker)
    with (
        boot_card.Guest(card, space, folder / "first", words) as guest,
        card_job.Hub(folder, space) as hub,
    ):
        guest.until("StatusText=training:_", 600)
        guest.until("exposure level", 60)
        until = time.monotonic() + 120
        while card_job.steps_in(guest.said)[-1] <= 30:
            assert time.monotonic() < until, guest.said[-3000:]
            time.sleep(0.5)
        guest.kill()
        hub.end()
    (run,) = (folder / "runs").iterdir()
    return Trained(folder, card, words, token, guest.said, run)


def test_a_flashed_card_boots_enrols_joins_and_trains(trained):
    states = card_job.watched(trained.said)
    ready = next(i for i, s in enumerate(states) if s["ActiveState"] == "active")
    before = {s.get("StatusText", "") for s in states[:ready]}
    assert not any("training" in text for text in before), "not ready before the welcome"
    assert states[ready]["StatusText"].startswith(("training", "welcome"))
    assert states[ready]["MemoryMax"] != "infinity"
    (exposure,) = re.findall(r"exposure level.*: ([\d.]+)", trained.said)
    assert float(exposure) <= 4
    assert list(trained.ring.members().values()) == ["pi-0"]
    assert fingerprint(trained.ring.hosts()["pi-0"]) in trained.said, "as the device has made it"
    assert not trained.ring.open_tokens(0), "the token is used"


def test_no_secret_is_left_on_the_boot_partition(trained):
    for secret in (trained.token, trained.token[-43:], card_job.PSK, "PRIVATE KEY", "\nsecret "):
        assert not in_boot_partition(trained.card, secret.encode()), secret[:12]
    assert in_boot_partition(trained.card, b'name = "boot"\n'), "what is no secret is found"


def test_firstrun_leaves_no_secret_and_its_device_trains(tmp_path, space):
    """As Raspberry Pi OS 12 does it: the kernel's command line starts firstrun.sh, systemd restarts
    the device, and the second boot enrols."""
    built = boot_card.build(tmp_path / "built", boot_card.user_mode_linux(firstrun=True))
    card_job.make_folder(tmp_path, built.image, STEPS, card_job.WIFI)
    card, words, token = card_job.flashed(tmp_path, built.worker)
    psk = card_job.PSK.encode()
    assert "systemd.run=/boot/firmware/firstrun.sh" in words
    assert in_boot_partition(card, psk)
    # This kernel begins anew with its old words; the firmware reads cmdline.txt again.
    words = words.replace("run_success_action=reboot", "run_success_action=poweroff")
    with boot_card.Guest(card, space, tmp_path / "first", words) as guest:
        guest.end(600)
    assert not in_boot_partition(card, psk), guest.said[-3000:]
    assert in_boot_partition(card, token.encode()), "it has not enrolled yet"
    assert card_job.boot_files(card).read("firstrun.sh") is None
    words = card_job.words_of(card)
    assert "systemd." not in words
    with (
        boot_card.Guest(card, space, tmp_path / "second", words) as guest,
        card_job.Hub(tmp_path, space),
    ):
        guest.until("StatusText=training:_", 900)
        guest.kill()
    for secret in (psk, token.encode(), token[-43:].encode()):
        assert not in_boot_partition(card, secret), secret[:12]


def accepts(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What a program of the device's operating system says."""
    return subprocess.run(["chroot", str(root), *words], capture_output=True, text=True, timeout=60)


def test_cloud_init_and_netplan_accept_the_files_of_every_network(built, tmp_path):
    root = tmp_path / "root"
    boot_card.extract(built.root, root)
    try:
        given = root / "tmp/given"
        given.write_text("#cloud-config\nusers: 7\n")
        refused = accepts(root, "cloud-init", "schema", "--config-file", "/tmp/given")
        assert "users: 7 is not of type" in refused.stderr + refused.stdout
        for name in NETWORKS:
            files = personal.files(device(name), "cloud-init")
            given.write_bytes(files["user-data"])
            said = accepts(root, "cloud-init", "schema", "--config-file", "/tmp/given")
            assert "Valid cloud-config" in said.stdout, (name, said.stderr)
            plan = root / "tmp/plan" / name
            (plan / "etc/netplan").mkdir(parents=True)
            network = json.loads(files["network-config"])
            (plan / "etc/netplan/50.yaml").write_text(json.dumps({"network": network}))
            (plan / "etc/netplan/50.yaml").chmod(0o600)
            said = accepts(root, "netplan", "generate", "--root-dir", f"/tmp/plan/{name}")
            if name.endswith("wpa3"):  # this is Debian 12: see flashing.check_network
                assert "unknown key management type 'sae'" in said.stderr
                continue
            assert (said.returncode, said.stderr) == (0, ""), name
            made = {path.name for path in (plan / "run/systemd/network").iterdir()}
            assert ("10-netplan-wlan0.network" in made) == ("wifi" in name)
    finally:
        shutil.rmtree(root)


def is_quiet(states: list[dict[str, str]]) -> bool:
    """Whether there is a minute in which the device wrote next to nothing to its card."""
    found = [(int(s["up"]), 512 * int(s["sectors"])) for s in states if s.get("sectors")]
    return any(
        later - up >= 60 and after - before < QUIET_BYTES
        for i, (up, before) in enumerate(found)
        for later, after in found[i:]
    )


def wait_until_quiet(guest: boot_card.Guest, seconds: float) -> list[dict[str, str]]:
    """What a guest says while it looks for the hub, once it has written nothing for a minute."""
    until = time.monotonic() + seconds
    while True:
        looking = [
            s for s in card_job.watched(guest.said) if "looking_for" in s.get("StatusText", "")
        ]
        if is_quiet(looking):
            return looking
        assert time.monotonic() < until, guest.said[-3000:]
        time.sleep(1)


def test_after_a_power_cut_it_waits_for_the_hub_and_goes_on_from_its_checkpoint(trained, space):
    members = trained.ring.members()
    hub_again = (trained.folder, space, "--resume", str(trained.run))
    with boot_card.Guest(trained.card, space, trained.folder / "second", trained.words) as guest:
        guest.until("StatusText=looking_for_the_hub", 400)
        looking = wait_until_quiet(guest, 240)
        assert {s["ActiveState"] for s in looking} == {"activating"}
        assert {s["torch"] for s in looking if s["torch"]} == {"0"}, "it has loaded torch"
        with card_job.Hub(*hub_again):
            guest.until("StatusText=training:_", 400)
            assert card_job.steps_in(guest.said)[0] > 20, "it began anew"
        guest.until("ActiveState=reloading", 60)
        away = next(s for s in card_job.watched(guest.said) if s["ActiveState"] == "reloading")
        assert away["StatusText"].startswith("looking_for_the_hub:_nothing_from_it")
        with card_job.Hub(*hub_again) as hub:
            assert hub.process.wait(300) == 0, guest.said[-3000:]
            guest.until("StatusText=done", 60)
    assert trained.ring.members() == members, "the same key: it has not enrolled again"
    assert read_summary(trained.run)["rounds"] == STEPS // 5
