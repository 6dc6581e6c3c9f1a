"""From a stock image to one device's card: what is found in images, and what is put there."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import time
import tomllib
from difflib import unified_diff
from pathlib import Path

import first_boot_device
import pi_images
import pytest
from personal_devices import NETWORKS, device

from edgetrain.errors import ConfigError
from edgetrain.fleet.cluster import Cluster, Wifi
from edgetrain.provisioning.cards import bootfiles, flashing, looking, personal, writing
from edgetrain.provisioning.cards import first_boot as first_boot_program
from edgetrain.provisioning.cards.medium import FileMedium
from edgetrain.provisioning.cards.source import Source

GOLDEN = Path(__file__).parent / "golden"
WHY_NOT = pi_images.missing() or ", ".join(looking.missing_tools())
needs_tools = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> dict[str, Path]:
    """One image of each system, made when it is asked for."""
    folder = tmp_path_factory.mktemp("images")

    class Made(dict):
        def __missing__(self, name: str) -> Path:
            self[name] = pi_images.make(folder / f"{len(self)}.img", pi_images.SYSTEMS[name])
            return self[name]

    return Made()


def look(path: Path) -> looking.ImageDescription:
    content = path.read_bytes()
    return looking.look(str(path), content[: 1 << 20], len(content))


FORMATS = ["cloud-init", "firstrun.sh", "rpi-preseed"]
FOUND = {
    "raspberry-pi-os-13": ("raspberry-pi-os-13", (3, 13), "cloud-init", "bootfs"),
    "raspberry-pi-os-13 of October": ("raspberry-pi-os-13", (3, 13), "firstrun.sh", "bootfs"),
    "raspberry-pi-os-13 with rpi-preseed": ("raspberry-pi-os-13", (3, 13), "rpi-preseed", "bootfs"),
    "raspberry-pi-os-12": ("raspberry-pi-os-12", (3, 11), "firstrun.sh", "bootfs"),
    "ubuntu-24.04": ("ubuntu-24.04", (3, 12), "cloud-init", "system-boot"),
}


@pytest.mark.real
@needs_tools
@pytest.mark.parametrize("name", FOUND)
def test_what_an_image_is(images, name):
    found = look(images[name])
    release, python, first_boot, label = FOUND[name]
    assert (found.release, found.python, found.first_boot) == (release, python, first_boot)
    assert found.machine == "aarch64"
    assert found.boot == looking.Partition(1, 4 << 20, 20 << 20, "vfat", label.upper())
    assert found.root.start == 24 << 20
    assert looking.RELEASES[release] in found.describe()


@pytest.mark.real
@needs_tools
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("32-bit", r"raspberry-pi-os-13\) is for armv7l.*take the arm64 image"),
        ("raspberry-pi-os-11", r"raspberry-pi-os-11\) has Python 3\.9, and edgetrain needs 3\.11"),
        ("fedora", "the image is fedora-42, .*known: debian-12, "),
    ],
)
def test_images_that_are_refused(images, name, said):
    with pytest.raises(ConfigError, match=said):
        look(images[name])


@pytest.mark.real
@needs_tools
def test_a_boot_partition_that_is_not_fat(tmp_path):
    system = pi_images.SYSTEMS["raspberry-pi-os-13"]
    path = pi_images.make(tmp_path / "x.img", system, boot_kind="ext4")
    with pytest.raises(ConfigError, match=r"first partition is not FAT \(partitions: 1: ext4, 2"):
        look(path)


@pytest.mark.real
@needs_tools
def test_an_image_that_is_cut_short(images, tmp_path):
    path = tmp_path / "x.img"
    path.write_bytes(images["raspberry-pi-os-13"].read_bytes()[: 30 << 20])
    with pytest.raises(
        ConfigError, match="cut short: its partition 2 ends at byte 41943040, and it has 31457280"
    ):
        look(path)


BOOT, DATA, ROOT = "boot", "data", "root"


@pytest.fixture(scope="module")
def pieces(images, tmp_path_factory):
    """Partitions: FAT, a file system without a system, the system's."""
    whole = images["raspberry-pi-os-13"].read_bytes()
    empty = tmp_path_factory.mktemp("pieces") / "x.img"
    pi_images.make(empty, pi_images.SYSTEMS["raspberry-pi-os-13"], boot_kind="ext4")
    boot = slice(4 << 20, 24 << 20)
    return {BOOT: whole[boot], DATA: empty.read_bytes()[boot], ROOT: whole[24 << 20 :]}


@pytest.mark.real
@needs_tools
@pytest.mark.parametrize(
    ("order", "numbers", "sector", "said"),
    [
        ((BOOT, DATA, ROOT), (1, 2, 3), 512, (1, 3)),
        ((BOOT, ROOT, DATA), (1, 2, 3), 512, (1, 2)),
        ((BOOT, BOOT, ROOT), (1, 2, 3), 512, (1, 3)),  # the other one is a spare
        ((BOOT, ROOT), (2, 1), 512, (2, 1)),
        ((BOOT, BOOT, ROOT, ROOT), (1, 2, 3, 4), 512, "systems on partitions 3 and 4, and which"),
        ((DATA, BOOT, ROOT), (1, 2, 3), 512, r"first partition is not FAT \(partitions: 1: ext4"),
        ((BOOT, DATA), (1, 2), 512, "no /usr/lib/os-release"),
        ((BOOT, ROOT), (1, 2), 4096, "sectors of 4096 bytes, and cards have 512"),
    ],
)
def test_partitions_in_other_orders(pieces, tmp_path, order, numbers, sector, said):
    content, table = bytearray(4 << 20), bytearray(512)
    for name, number in zip(order, numbers, strict=True):
        kind = 0x0C if name == BOOT else 0x83
        place = (kind, len(content) // sector, len(pieces[name]) // sector)
        struct.pack_into("<4xB3xII", table, 430 + 16 * number, *place)
        content += pieces[name]
    content[:510], content[510:512] = table[:510], b"\x55\xaa"
    (tmp_path / "x.img").write_bytes(content)
    if isinstance(said, str):
        with pytest.raises(ConfigError, match=said) as caught:
            look(tmp_path / "x.img")
        assert "download" not in str(caught.value)
    else:
        found = look(tmp_path / "x.img")
        assert (found.boot.number, found.root.number) == said


def test_a_missing_tool_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(looking, "find_program", lambda name: name != "mcopy" or None)
    with pytest.raises(ConfigError, match=r"mcopy is not installed \(apt install mtools\)"):
        looking.check_tools()


# -- formats --------------------------------------------------------------------------------------


def files(network: str, first_boot: str) -> dict[str, str]:
    found = personal.files(device(network), first_boot)
    line = personal.command_line(pi_images.PI_LINE, device(network), first_boot)
    return {name: content.decode() for name, content in found.items()} | {"cmdline.txt": line}


@pytest.mark.parametrize("first_boot", FORMATS)
def test_files_are_as_the_golden_ones(first_boot):
    """Those of a wireless network whole, those of others as differences from them.

    EDGETRAIN_GOLDEN=write writes them: look at the difference before you keep it.
    """
    wifi = files("wifi", first_boot)
    golden = {GOLDEN / f"{first_boot}-wifi" / name: content for name, content in wifi.items()}
    for network in NETWORKS.keys() - {"wifi"}:
        golden[GOLDEN / f"{first_boot}-{network}.diff"] = "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for name, content in files(network, first_boot).items()
            for line in unified_diff(
                wifi[name].splitlines(True), content.splitlines(True), name, name, n=0
            )
        )
    for path, content in golden.items():
        if os.environ.get("EDGETRAIN_GOLDEN") == "write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == content, path


def test_no_file_and_no_repr_has_the_passphrase_itself():
    for first_boot in FORMATS:
        for content in personal.files(device("wifi"), first_boot).values():
            assert b"correct horse" not in content
    assert "correct horse" not in repr(device("wifi"))
    # wpa_passphrase lab "correct horse"
    assert NETWORKS["wifi-static"].psk == personal.DeviceNetwork(
        ssid="lab", passphrase=NETWORKS["wifi-static"].psk
    ).psk  # fmt: skip


def test_the_key_of_a_wireless_network_is_the_standards():
    """The test vector of IEEE 802.11i-2004, H.4.3."""
    network = personal.DeviceNetwork(ssid="IEEE", country="DE", passphrase="password")
    assert network.psk == "f42c6fc52df0ebef9ebb4b90b38a5f902e83fe1b135a70e23aed762e9710a12e"


def test_a_key_stands_beside_its_kind_of_network():
    """Without it netplan 1 permits SAE, for which no key will do: findings/ has the script."""
    access = json.loads(personal.files(device("wifi-static"), "cloud-init")["network-config"])
    (point,) = access["wifis"]["wlan0"]["access-points"].values()
    assert point == {"auth": {"key-management": "psk", "password": NETWORKS["wifi-static"].psk}}


def test_wpa3_has_the_passphrase_itself_in_files_that_are_blanked_and_nowhere_else():
    """Its backslash, blanks and dollar sign come through JSON, the shell and a key file."""
    word = NETWORKS["wifi-wpa3"].passphrase
    access = json.loads(personal.files(device("wifi-wpa3"), "cloud-init")["network-config"])
    (point,) = access["wifis"]["wlan0"]["access-points"].values()
    assert point == {"auth": {"key-management": "sae", "password": word}}
    for first_boot, name in (("firstrun.sh", "firstrun.sh"), ("rpi-preseed", personal.SETUP)):
        files = personal.files(device("wifi-wpa3"), first_boot)
        (line,) = re.findall(r"^psk=(.*)$", files.pop(name).decode(), re.MULTILINE)
        read = re.sub(r"\\(.)", lambda found: {"s": " "}.get(found[1], found[1]), line)
        assert read == word
        assert line.encode() not in b"".join(files.values())
        assert name in first_boot_program.SECRETS


def test_cloud_init_gets_another_instance_each_time():
    first, second = (device(nonce=bytes([i] * 4)) for i in (1, 2))
    for name in ("meta-data",):
        contents = [personal.files(d, "cloud-init")[name] for d in (first, second)]
        assert contents[0] != contents[1]
    once = personal.command_line(pi_images.PI_LINE, first, "cloud-init")
    noted = f"# mine\n{once}\n  # and: root=x\n"
    again = personal.command_line(noted, second, "cloud-init")
    assert again.count("ds=nocloud") == 1
    assert again.endswith(f"ds=nocloud;i={second.instance}\n")
    assert again.split()[: len(pi_images.PI_LINE.split())] == pi_images.PI_LINE.split()


@pytest.mark.parametrize("first_boot", FORMATS)
def test_the_command_line_is_one_line_and_switches_the_memory_cgroup_on(first_boot):
    before = "console=tty1 cgroup_disable=memory rootwait\n# more\n"
    line = personal.command_line(before, device(), first_boot)
    assert line.count("\n") == 1
    assert " cgroup_enable=memory " in line
    assert "cgroup_disable" not in line


@pytest.mark.real
def test_firstrun_is_a_script_that_bash_accepts():
    for network in NETWORKS:
        for first_boot, name in (("firstrun.sh", "firstrun.sh"), ("rpi-preseed", personal.SETUP)):
            script = personal.files(device(network), first_boot)[name]
            done = subprocess.run(["bash", "-n"], input=script, capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, b"")


PRESEED_KEYS = {
    "system": {"hostname": str},
    "user": {"name": str, "passwordless_sudo": bool},
    "runcmd": {"early": list, "early_cmd_timeout": int},
}
"""Of schema/rpi-preseed.schema in https://github.com/raspberrypi/rpi-preseed: those used here."""


def test_what_rpi_preseed_reads_has_no_secret_and_only_keys_of_its_schema():
    for network in NETWORKS:
        files = personal.files(device(network), "rpi-preseed")
        text = files["rpi-preseed.toml"].decode()
        table = tomllib.loads(text)
        assert table.pop("config_version") == "1.1"
        for name, section in table.items():
            kinds = {key: type(value) for key, value in section.items()}
            assert kinds == PRESEED_KEYS[name]
        (command,) = table["runcmd"]["early"]
        assert command == f"bash {personal.BOOT}/{personal.SETUP}"
        assert not set('[]#"\\') & set(command), "old parsers end an array there"
        assert 0 < table["runcmd"]["early_cmd_timeout"] < 30, "its unit's TimeoutStartSec"
        chosen = NETWORKS[network]
        psk = chosen.psk if chosen.ssid and chosen.security == "wpa2" else ""
        assert not psk or psk not in text
        assert not psk or psk.encode() in files[personal.SETUP]
        assert personal.SETUP in first_boot_device.program().SECRETS, "overwritten afterwards"


# -- onto a card ----------------------------------------------------------------------------------


def flash(image: Path, card: Path, load: flashing.Load) -> writing.CardState:
    source = Source(image)
    medium = FileMedium(card, image.stat().st_size)
    try:
        finish = flashing.finisher(device(), lambda found: load)
        return writing.write(source, [medium], finish=finish, probe_size=False).cards[0]
    finally:
        medium.close()
        source.close()


@pytest.mark.real
@needs_tools
@pytest.mark.parametrize("name", FOUND)
def test_a_card_has_its_devices_files_and_the_image_is_as_it_was(images, name, tmp_path):
    archive = tmp_path / "worker.tar"
    archive.write_bytes(os.urandom(3_000_000))
    load = flashing.Load({"worker.tar": archive, "token": b"secret"}, {"name": "pi-0"})
    began = time.monotonic()
    done = flash(images[name], tmp_path / "card.img", load)
    assert done.ok, done.error
    assert time.monotonic() - began < 10
    boot = bootfiles.BootFiles(str(tmp_path / "card.img"), look(tmp_path / "card.img").boot)
    first_boot = FOUND[name][2]
    for file, content in personal.files(device(), first_boot).items():
        assert boot.read(file) == content
    assert boot.read("edgetrain/worker.tar") == archive.read_bytes()
    assert boot.read("edgetrain/token") == b"secret"
    assert json.loads(boot.read("edgetrain/config.json")) == {"name": "pi-0"}
    assert boot.read("edgetrain/first_boot.py") == flashing.PROGRAM.read_bytes()
    line = boot.read("cmdline.txt").decode()
    assert line.startswith(pi_images.SYSTEMS[name].line.strip())
    was, now = images[name].read_bytes(), (tmp_path / "card.img").read_bytes()
    assert now[: 4 << 20] == was[: 4 << 20]
    assert now[24 << 20 :] == was[24 << 20 :]


@pytest.mark.real
@needs_tools
def test_a_card_written_twice_has_only_the_second_settings(images, tmp_path):
    image, card = images["raspberry-pi-os-13"], tmp_path / "card.img"
    for token in (b"first token", b"2nd"):
        assert flash(image, card, flashing.Load({"token": token})).ok
    boot = bootfiles.BootFiles(str(card), look(card).boot)
    assert boot.read("edgetrain/token") == b"2nd"


def does_not_boot(card: Path) -> bool:
    return card.read_bytes()[:512] == bytes(512)


@pytest.mark.real
@needs_tools
def test_no_space_for_the_archive(images, tmp_path):
    archive = tmp_path / "worker.tar"
    archive.write_bytes(bytes(25_000_000))
    card = tmp_path / "card.img"
    done = flash(images["raspberry-pi-os-13"], card, flashing.Load({"worker.tar": archive}))
    assert "MB free, and 26 MB are needed" in done.error
    assert does_not_boot(card)


@pytest.mark.real
@needs_tools
def test_an_image_that_is_refused_leaves_a_card_that_does_not_boot(images, tmp_path):
    card = tmp_path / "card.img"
    done = flash(images["32-bit"], card, flashing.Load({}))
    assert "is for armv7l" in done.error
    assert does_not_boot(card)


@pytest.mark.real
@needs_tools
def test_files_that_do_not_read_back(images, tmp_path, monkeypatch):
    write = bootfiles.BootFiles.write

    def damage(self: bootfiles.BootFiles, files: dict[str, bootfiles.Content]) -> None:
        write(self, {**files, "edgetrain/token": b"sekret"})

    monkeypatch.setattr(bootfiles.BootFiles, "write", damage)
    card = tmp_path / "card.img"
    done = flash(images["raspberry-pi-os-13"], card, flashing.Load({"token": b"secret"}))
    assert "edgetrain/token did not read back from the card" in done.error
    assert does_not_boot(card)


@pytest.mark.parametrize(
    ("release", "first_boot", "security", "fits"),
    [
        ("debian-12", looking.CLOUD_INIT, "wpa3", False),
        ("debian-12", looking.CLOUD_INIT, "wpa2", True),
        ("debian-13", looking.CLOUD_INIT, "wpa3", True),
        ("raspberry-pi-os-12", looking.FIRSTRUN, "wpa3", True),
    ],
)
def test_a_network_that_the_images_netplan_does_not_know_is_refused(
    release, first_boot, security, fits
):
    part = looking.Partition(1, 0, 1)
    image = looking.ImageDescription(release, (3, 11), "aarch64", first_boot, part, part)
    cluster = Cluster(Path("c.toml"), wifi=Wifi("lab", "DE", "env:X", security))
    if fits:
        flashing.check_network(cluster, image)
        return
    with pytest.raises(ConfigError, match=r"netplan 0\.106, which knows no WPA3"):
        flashing.check_network(cluster, image)


@pytest.mark.parametrize(
    ("release", "first_boot", "ssid", "fits"),
    [
        ("debian-13", looking.CLOUD_INIT, r"lab\guests", False),
        ("debian-13", looking.CLOUD_INIT, "lab/guests", True),
        ("debian-12", looking.CLOUD_INIT, r"lab\guests", True),
        ("raspberry-pi-os-13", looking.CLOUD_INIT, r"lab\guests", True),  # NetworkManager
        ("raspberry-pi-os-12", looking.FIRSTRUN, r"lab\guests", True),
    ],
)
def test_a_name_that_the_images_netplan_cannot_write_is_refused(release, first_boot, ssid, fits):
    """`wpa_cli get_network 0 ssid` answers "ab" for the file that netplan 1.1.2 makes of a\\b."""
    part = looking.Partition(1, 0, 1)
    image = looking.ImageDescription(release, (3, 11), "aarch64", first_boot, part, part)
    cluster = Cluster(Path("c.toml"), wifi=Wifi(ssid, "DE", "env:X"))
    if fits:
        flashing.check_network(cluster, image)
        return
    with pytest.raises(ConfigError, match=r"a backslash, which netplan 1 of .* loses"):
        flashing.check_network(cluster, image)
