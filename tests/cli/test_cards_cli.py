"""`edgetrain devices flash`, as its user types it: onto files, and all that it refuses."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import tomllib
from pathlib import Path

import pi_images
import pytest

from edgetrain.__main__ import main
from edgetrain.cli import cards, sudo
from edgetrain.errors import ConfigError
from edgetrain.exchange.keys.keyring import Keyring, read_token
from edgetrain.exchange.zeromq.curve import pair_of
from edgetrain.jobs import on_card
from edgetrain.jobs.reading import parse
from edgetrain.provisioning.cards import archive, bootfiles, disks, looking, making

WHY_NOT = pi_images.missing() or ", ".join(looking.missing_tools())
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"not installed: {WHY_NOT}"),
]
CLUSTER = """
[hub]
addresses = ["tcp://192.168.1.5:5555", "tcp://hub.local:5555"]
[image]
file = "os.img"
[wifi]
ssid = "lab"
country = "DE"
secret = "file:lab.psk"
[ssh]
user = "fleet"
keys = ["id.pub"]
[job]
file = "job.toml"
data = "digits"
[[device]]
name = "pi-0"
profile = "raspberry-pi-4b"
[[device]]
name = "pi-1"
profile = "raspberry-pi-3b"
address = "192.168.1.20/24"
"""
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f me@host"
JOB = 'task = "edgetrain.tasks:digits"\n[fleet]\nmembers = 2\n'


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("image") / "os.img"
    return pi_images.make(path, pi_images.SYSTEMS["raspberry-pi-os-13"])


@pytest.fixture
def folder(tmp_path, image, monkeypatch) -> Path:
    """A folder with all that a cluster needs, and no cards in this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(disks, "listing", lambda: '{"blockdevices": []}')
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr(on_card, "check", lambda card, owner: "")  # seconds: torch is loaded
    (tmp_path / "os.img").symlink_to(image)
    (tmp_path / "lab.psk").write_text("correct horse\n")
    (tmp_path / "lab.psk").chmod(0o600)
    (tmp_path / "id.pub").write_text(
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f me@host\n"
    )
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits/digits.csv").write_text("1,2,3\n")
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    worker(tmp_path, "raspberry-pi-os-13", "3.13")
    assert main(["keys", "init", "--keys", "hub"]) == 0
    return tmp_path


CHECK = on_card.check
LOCKED = [
    "edgetrain",
    "torch",
    "torchgen",
    "functorch",
    "numpy",
    "zmq",
    "msgpack",
    "psutil",
    "safetensors",
    "tomli_w",
    "filelock",
    "typing_extensions",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "fsspec",
]
"""The modules of a worker archive."""


def worker(
    folder: Path, release: str, python: str, torch: str = "2.9.1", needs=(), modules=()
) -> Path:
    site = folder / f"site-{release}-{python}-{torch}"
    site.mkdir(exist_ok=True)
    for name in modules or ("edgetrain",):
        (site / f"{name}.py").write_text("")
    path = folder / "cache/edgetrain/workers" / f"{release}.tar"
    path.parent.mkdir(parents=True, exist_ok=True)
    packages = {"edgetrain": "0.1.0", "torch": torch}
    archive.pack(site, archive.Manifest(release, python, "aarch64", packages, needs), path)
    return path


def flash(*words: str) -> int:
    return main(["devices", "flash", "cluster.toml", "--keys", "hub", *words])


def fail_card(monkeypatch, name: str) -> None:
    """Let a device's files not read back from its card."""
    placed = bootfiles.BootFiles.check

    def check(self: bootfiles.BootFiles, files: dict) -> None:
        if name in str(self._image):
            files = {**files, "gone": b"x"}
        placed(self, files)

    monkeypatch.setattr(bootfiles.BootFiles, "check", check)


def boot_files(path: Path) -> bootfiles.BootFiles:
    content = path.read_bytes()
    found = looking.look(str(path), content[: 1 << 20], len(content))
    return bootfiles.BootFiles(str(path), found.boot)


def test_a_card_for_each_device(folder, capsys):
    assert flash("--image-out", "cards", "--json") == 0
    said = capsys.readouterr()
    answer = json.loads(said.out.splitlines()[-1])
    assert [(c["device"], c["ok"]) for c in answer["cards"]] == [("pi-0", True), ("pi-1", True)]
    assert "image  os.img (Raspberry Pi OS 13 (trixie), Python 3.13, aarch64)" in said.err
    assert "correct horse" not in said.out + said.err
    tokens = []
    for index, name in enumerate(("pi-0", "pi-1")):
        boot = boot_files(folder / "cards" / f"{name}.img")
        config = json.loads(boot.read("edgetrain/config.json"))
        assert config["name"] == name
        assert f"--index {index} " in boot.read(f"edgetrain/{config['unit']}").decode()
        assert config["hubs"] == ["tcp://192.168.1.5:5555", "tcp://hub.local:5555"]
        token = boot.read("edgetrain/token").decode()
        tokens.append(pair_of(read_token(token)[1]).public)
        there = tomllib.loads(boot.read("edgetrain/job.toml").decode())
        assert parse(there).digest() == parse(tomllib.loads(JOB)).digest() == config["set"]["job"]
        assert there["data"]["folder"] == "/etc/edgetrain/current/data"
        assert b"digits.csv" in boot.read("edgetrain/data.tar")
        user_data = json.loads(boot.read("user-data").removeprefix(b"#cloud-config\n"))
        assert user_data["hostname"] == name
        unit = boot.read("edgetrain/edgetrain-member.service").decode()
        assert f"--hub tcp://192.168.1.5:5555 --hub tcp://hub.local:5555 --index {index}" in unit
        assert "member /etc/edgetrain/current/job.toml --hub" in unit
        assert "@" not in unit.replace("@THREADS@", "").replace("@system-service", "")
    ring = Keyring(folder / "hub")
    assert [name for name, _ in ring.open_tokens(0)] == ["pi-0", "pi-1"]
    assert len(set(tokens)) == 2


def test_a_packed_image_is_looked_into_when_it_is_on_the_card(folder, image, capsys):
    (folder / "os.img.xz").write_bytes(lzma.compress(image.read_bytes(), preset=0))
    (folder / "cluster.toml").write_text(CLUSTER.replace('"os.img"', '"os.img.xz"'))
    assert flash("pi-1", "--image-out", "cards") == 0
    assert "packed: looked into later" in capsys.readouterr().err
    assert not (folder / "cards/pi-0.img").exists()
    assert boot_files(folder / "cards/pi-1.img").read("edgetrain/token")


def test_a_dry_run_writes_nothing_and_issues_no_token(folder, capsys):
    assert flash("--image-out", "cards", "--dry-run") == 0
    assert "pi-1  would be written to cards/pi-1.img" in capsys.readouterr().err
    assert not (folder / "cards").exists()
    assert not Keyring(folder / "hub").open_tokens(0)


def test_tokens_from_the_hubs_machine(folder, capsys):
    assert main(["keys", "enroll", "--cluster", "cluster.toml", "--out", "t.json",
                 "--keys", "hub"]) == 0  # fmt: skip
    assert stat.S_IMODE((folder / "t.json").stat().st_mode) == 0o600
    tokens = json.loads((folder / "t.json").read_text())
    assert "2 tokens in t.json" in capsys.readouterr().out
    words = ["devices", "flash", "cluster.toml", "--keys", "none", "--image-out", "cards"]
    assert main([*words, "--tokens", "t.json"]) == 0
    assert boot_files(folder / "cards/pi-0.img").read("edgetrain/token").decode() == tokens["pi-0"]
    for text, said in (
        ({"pi-0": tokens["pi-0"], "pi-1": "x"}, "t.json, pi-1: this is not an enrolment token"),
        (dict.fromkeys(tokens, tokens["pi-0"]), "t.json has one token for two devices"),
        ([], "t.json is not a file of tokens"),
    ):
        (folder / "t.json").write_text(json.dumps(text))
        assert main([*words, "--tokens", "t.json"]) == 2
        assert said in capsys.readouterr().err
    (folder / "t.json").write_text('{"pi-0": "x"}')
    assert main([*words, "--tokens", "t.json"]) == 2
    assert "has no token for pi-1" in capsys.readouterr().err
    assert main(words) == 2
    assert "the hub's keys are not on this machine" in capsys.readouterr().err


def test_a_device_that_is_on_the_list_wants_replace(folder, capsys):
    Keyring(folder / "hub").allow(b"k" * 32, "pi-0")
    assert flash("--image-out", "cards") == 2
    assert "pi-0 may join the hub already" in capsys.readouterr().err
    assert flash("--image-out", "cards", "--replace") == 0
    assert "pi-0" not in Keyring(folder / "hub").members().values()
    assert [name for name, _ in Keyring(folder / "hub").open_tokens(0)] == ["pi-0", "pi-1"]


def test_a_card_that_fails_keeps_its_device_on_the_list(folder, capsys, monkeypatch):
    ring = Keyring(folder / "hub")
    ring.allow(b"k" * 32, "pi-0")
    ring.allow(b"l" * 32, "pi-1")
    fail_card(monkeypatch, "pi-0")
    assert flash("--image-out", "cards", "--replace") == 1
    assert ring.members() == {b"k" * 32: "pi-0"}, "the card of pi-1 was written"
    assert [name for name, _ in ring.open_tokens(0)] == ["pi-1"]


def test_a_card_whose_token_cannot_be_opened_does_not_boot(folder, capsys, monkeypatch):
    def refuse(*_: object) -> None:
        raise ConfigError("cannot write tokens: no space")

    monkeypatch.setattr(Keyring, "open_token", refuse)
    assert flash("pi-0", "--image-out", "cards") == 1
    assert "cannot write tokens: no space" in capsys.readouterr().err
    assert (folder / "cards/pi-0.img").read_bytes()[:512] == bytes(512)


def test_files_in_place_of_cards_are_for_their_owner_alone(folder):
    """They hold the token and the key of the wireless network."""
    (folder / "old").mkdir(mode=0o755)
    (folder / "old/pi-0.img").write_bytes(b"of an older version")
    (folder / "old/pi-0.img").chmod(0o644)
    for name in ("old", "new/cards"):
        assert flash("pi-0", "--image-out", name) == 0
        assert stat.S_IMODE((folder / name / "pi-0.img").stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "new/cards").stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "old").stat().st_mode) == 0o755, "the user's own"


def test_an_image_whose_size_only_decoding_tells_becomes_files(folder, image, capsys):
    with gzip.open(folder / "os.img.gz", "wb", 1) as file:
        file.write(image.read_bytes())
    (folder / "cluster.toml").write_text(CLUSTER.replace('"os.img"', '"os.img.gz"'))
    (folder / "cards").mkdir()
    (folder / "cards/pi-0.img").write_bytes(b"x" * (image.stat().st_size + 4096))
    assert flash("--image-out", "cards") == 0, capsys.readouterr().err
    for name in ("pi-0", "pi-1"):
        assert (folder / f"cards/{name}.img").stat().st_size == image.stat().st_size
        assert boot_files(folder / f"cards/{name}.img").read("edgetrain/token")


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("id.pub", "id.pub is a file"),
        ("id.pub/cards", "id.pub is a file"),
        ("/proc/cards", "/proc/cards: "),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_line(folder, capsys, out, said):
    for more in ((), ("--dry-run",))[: 1 if out.startswith("/proc") else 2]:
        capsys.readouterr()
        assert flash("--image-out", out, *more) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"edgetrain: cannot write to --image-out {out}: ")
        assert said in line


def test_sudo_uses_the_home_of_its_caller_and_says_which_folders(folder, capsys, monkeypatch):
    home = folder / "home/me"
    (home / ".ssh").mkdir(parents=True)
    (folder / "id.pub").rename(home / ".ssh/id.pub")
    (folder / "hub").rename(folder / "made")
    (home / ".config").mkdir()
    (folder / "made").rename(home / ".config/edgetrain")
    (folder / "cache").rename(home / ".cache")
    (folder / "cluster.toml").write_text(CLUSTER.replace("id.pub", "~/.ssh/id.pub"))
    monkeypatch.setenv("HOME", "/root")
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    me = pwd.struct_passwd(("me", "x", 1000, 1000, "", str(home), "/bin/sh"))
    monkeypatch.setattr(sudo, "caller", lambda: me)
    capsys.readouterr()
    assert main(["devices", "flash", "cluster.toml", "--image-out", "cards", "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert f"keys   {home}/.config/edgetrain\n" in said
    assert f"worker {home}/.cache/edgetrain/workers\n" in said
    monkeypatch.setattr(sudo, "roots_home", lambda: folder / "root")
    (home / ".config").rename(folder / "away")
    words = ["devices", "flash", "cluster.toml", "--image-out", "cards"]
    assert main(words) == 2
    assert "edgetrain keys init, without sudo" in capsys.readouterr().err
    (folder / "away").rename(folder / "root")
    (folder / "root/edgetrain").rename(folder / "root/moved")
    (folder / "root/.config").mkdir()
    (folder / "root/moved").rename(folder / "root/.config/edgetrain")
    assert main(words) == 2
    assert f"--keys {folder}/root/.config/edgetrain" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as sudo gives it")
def test_what_root_makes_in_a_users_folder_is_the_users():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chown(folder, 65534, 65534)
        with sudo.as_owner_of(folder / "new/keys"):
            (folder / "new").mkdir()
        (folder / "image").write_bytes(b"")
        sudo.give_to_owner_of(folder / "new", folder / "image")
        for path in (folder / "new", folder / "image"):
            assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534)
        assert (os.geteuid(), os.getegid()) == (0, 0)


def test_who_called_sudo(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name, called in (("nobody", "nobody"), ("root", None), ("no such user", None), ("", None)):
        monkeypatch.setenv("SUDO_USER", name)
        found = sudo.caller()
        assert (found and found.pw_name) == called
    monkeypatch.setenv("SUDO_USER", "nobody")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert sudo.caller() is None


def test_a_card_that_fails_does_not_stop_the_others(folder, capsys, monkeypatch):
    (folder / "cards").mkdir()
    fail_card(monkeypatch, "pi-0")
    assert flash("--image-out", "cards", "--json") == 1
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [c["ok"] for c in answer["cards"]] == [False, True]
    assert (folder / "cards/pi-0.img").read_bytes()[:512] == bytes(512)


# Bad input in a cluster file, its job or its secrets: what it is, the file, what stands there and
# what it becomes, and what is said.
REFUSED = [
    ("two devices with one name", "cluster.toml", '"pi-1"', '"pi-0"',
     "two devices are called pi-0"),
    ("no host name", "cluster.toml", '"pi-1"', '"pi_1"', "device[1].name = 'pi_1' is not a host"),
    (
        "a static address twice", "cluster.toml", 'profile = "raspberry-pi-4b"',
        'profile = "raspberry-pi-4b"\naddress = "192.168.1.20/24"',
        "two devices have the address 192.168.1.20",
    ),
    ("fewer devices than members", "job.toml", "members = 2", "members = 3",
     "has 2 devices, and the job's fleet.members is 3 (set fleet.members = 2, or list 3"),
    ("more devices than members", "job.toml", "members = 2", "members = 1",
     "has 2 devices, and the job's fleet.members is 1 (set fleet.members = 2, or list 1"),
    ("no port", "cluster.toml", "tcp://192.168.1.5:5555", "tcp://192.168.1.5",
     "'tcp://192.168.1.5', which is not an address with a port"),
    ("no secret", "cluster.toml", 'secret = "file:lab.psk"\n', "", "without wifi.secret"),
    ("a secret that is not there", "cluster.toml", "lab.psk", "no.psk",
     "wifi.secret: there is no file no.psk"),
    ("nobody to ask for a secret", "cluster.toml", "file:lab.psk", "ask",
     'wifi.secret = "ask", and nobody can be asked (file:NAME or env:NAME, or a terminal)'),
    ("an image that is a folder", "cluster.toml", '"os.img"', '"digits"',
     "the image digits is not a file"),
    ("an image that is this folder", "cluster.toml", '"os.img"', '"."', "is not a file"),
    ("a pipe as an image", "cluster.toml", '"os.img"', '"/dev/zero"', "is not a file"),
    ("half a key", "id.pub", "HR4f me@host", "HR me@host", "is not a whole SSH public key"),
    ("a secret that is not set", "cluster.toml", "file:lab.psk", "env:NO_SUCH_PSK",
     "the environment has no NO_SUCH_PSK (export NO_SUCH_PSK=…)"),
    ("a secret in the file", "cluster.toml", "file:lab.psk", "correct horse",
     "never stands in this file"),
    ("a passphrase too short", "lab.psk", "correct horse", "short",
     "the passphrase of 'lab' has 5 characters (WPA wants 8 to 63, or 64 hexadecimal digits)"),
    ("a passphrase too long", "lab.psk", "correct horse", "x" * 65, "has 65 characters"),
    ("no country", "cluster.toml", 'country = "DE"\n', "", "wifi.country is missing"),
    ("a private key", "id.pub", "ssh-ed25519 AAAA", "-----BEGIN OPENSSH PRIVATE KEY-----",
     "is a private key, which belongs on no card (give "),
    ("no such profile", "cluster.toml", "raspberry-pi-3b", "raspbery-pi-3b",
     "did you mean 'raspberry-pi-3b'"),
    ("a Jetson", "cluster.toml", "raspberry-pi-3b", "jetson-nano", "use NVIDIA's SDK Manager"),
    ("a profile of no card", "cluster.toml", "raspberry-pi-3b", "laptop",
     "no card can be made for 'laptop'"),
    ("a job that slows devices down", "job.toml", "members = 2",
     'members = 2\ndevice = "raspberry-pi-4b"',
     "fleet.device is 'raspberry-pi-4b': it would slow real devices down (for a job on real"),
    ("a bundle that is not given", "job.toml", "edgetrain.tasks:digits", "my.bundle#x:Y",
     'no job.bundle (bundle = "my.bundle")'),
    ("no image", "cluster.toml", '"os.img"', '"none.img"', "cannot read the image"),
    ("no data", "cluster.toml", 'data = "digits"', 'data = "none"', "no folder"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "old", "new", "said"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_bad_input_costs_one_line_and_nothing_is_begun(folder, capsys, name, old, new, said):
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))
    capsys.readouterr()
    assert flash("--image-out", "cards") == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert error.startswith("edgetrain: ")
    assert "correct horse" not in error
    assert not (folder / "cards").exists()


def test_an_address_outside_the_hubs_network_is_told_in_one_line(folder, capsys):
    text = (folder / "cluster.toml").read_text()
    (folder / "cluster.toml").write_text(text.replace("192.168.1.20/24", "10.0.0.20/24"))
    capsys.readouterr()
    assert flash("--image-out", "cards", "--dry-run") == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "/24" in line]
    assert "pi-1 has the address 10.0.0.20/24, and the hub at 192.168.1.5 is not in" in line


def tool_missing(monkeypatch, name: str) -> None:
    found = looking.find_program
    monkeypatch.setattr(looking, "find_program", lambda n: None if n == name else found(n))


def lsblk_missing(monkeypatch) -> None:
    monkeypatch.setattr(disks, "listing", LISTING)
    which = shutil.which
    monkeypatch.setattr(
        disks.shutil, "which", lambda name, **more: None if name == "lsblk" else which(name, **more)
    )


def not_linux(monkeypatch) -> None:
    monkeypatch.setattr(disks.sys, "platform", "darwin")


LISTING = disks.listing
MACHINES = {
    "no mtools": (
        lambda m: tool_missing(m, "mcopy"), "mcopy is not installed (apt install mtools)"
    ),
    "no debugfs": (
        lambda m: tool_missing(m, "debugfs"), "debugfs is not installed (apt install e2fsprogs)"
    ),
    "no lsblk": (lsblk_missing, "lsblk is not installed (apt install util-linux)"),
    "not Linux": (not_linux, "cards are written on Linux, not on darwin"),
}  # fmt: skip


@pytest.mark.parametrize("what", MACHINES)
def test_a_machine_that_cannot_write_cards_says_what_is_missing(folder, capsys, monkeypatch, what):
    change, said = MACHINES[what]
    change(monkeypatch)
    capsys.readouterr()
    assert flash("--to", "/dev/sdq", "--yes") == 2
    *before, line = capsys.readouterr().err.splitlines()
    assert line.startswith("edgetrain: ")
    assert said in line
    assert not [other for other in before if other.startswith("edgetrain: ")]


def test_a_dry_run_compares_the_images_sha256(folder, capsys):
    text = CLUSTER.replace('"os.img"', f'"os.img"\nsha256 = "{"0" * 64}"')
    (folder / "cluster.toml").write_text(text)
    capsys.readouterr()
    assert flash("--image-out", "cards", "--dry-run") == 2
    assert "os.img is not the image that was meant: its SHA-256 is" in capsys.readouterr().err
    digest = hashlib.sha256((folder / "os.img").read_bytes()).hexdigest()
    (folder / "cluster.toml").write_text(text.replace("0" * 64, digest))
    assert flash("--image-out", "cards", "--dry-run") == 0


def test_the_end_of_input_is_no(folder, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(disks, "listing", listed)
    assert flash("pi-0", "--to", "/dev/sdq") == 2
    assert "nothing was written" in capsys.readouterr().err


def test_a_missing_compiler_and_a_missing_network_are_two_things(tmp_path, monkeypatch):
    def fail(said: str) -> None:
        done = subprocess.CompletedProcess([], 1, "", said)
        monkeypatch.setattr(making.subprocess, "run", lambda *_, **more: done)

    monkeypatch.setattr(making.shutil, "which", lambda name: None)
    monkeypatch.setattr(making.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(
        ConfigError,
        match=r"aarch64-linux-gnu-gcc is not installed.*apt install gcc-aarch64-linux-gnu",
    ):
        making.build_wheel(tmp_path, "aarch64")
    fail("ERROR: Failed building wheel for edgetrain")
    with pytest.raises(ConfigError) as refused:
        making.install(tmp_path, "3.13", "aarch64", "x")
    assert "network" not in str(refused.value)
    fail("WARNING: Retrying: Temporary failure in name resolution\nERROR: No matching distribution")
    with pytest.raises(ConfigError, match="is there a network"):
        making.install(tmp_path, "3.13", "aarch64", "x")


def test_a_hub_without_keys_is_told_where_they_come_from(folder, capsys):
    capsys.readouterr()
    assert main(["devices", "flash", "cluster.toml", "--keys", "none", "--image-out", "c"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the hub's keys are not on this machine" in line
    assert "edgetrain keys init" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pi-2", "--image-out", "cards"], "no device 'pi-2' (did you mean 'pi-"),
        (["--yes"], "--yes without --to"),
        (["--image-out", "cards", "--minutes", "43201"], "allowed are more than 0 to 43200"),
        (["--to", "/dev/sdq", "--yes"], "no disk /dev/sdq"),
        ([], "no card was found (no disk at all)"),
        (["--image-out", "cards", "--worker", "none.tar"], "there is no worker archive none.tar"),
    ],
)
def test_bad_words(folder, capsys, words, said):
    capsys.readouterr()
    assert flash(*words) == 2
    assert said in capsys.readouterr().err


def test_a_job_that_no_card_could_train_is_refused_before_anything_is_written(
    folder, capsys, monkeypatch
):
    monkeypatch.setattr(on_card, "check", CHECK)
    worker(folder, "raspberry-pi-os-13", "3.13", modules=LOCKED)
    (folder / "job.toml").write_text(JOB.replace("digits", "mnist"))
    (folder / "cluster.toml").write_text(CLUSTER.replace('data = "digits"\n', ""))
    capsys.readouterr()
    assert flash("--image-out", "cards") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no card has what the job's task needs: no train-images-idx3" in line
    assert not (folder / "cards").exists()


def test_a_folder_of_data_that_is_on_no_card_is_refused(folder, capsys):
    (folder / "cluster.toml").write_text(CLUSTER.replace('data = "digits"\n', ""))
    (folder / "job.toml").write_text(JOB + '[data]\nfolder = "digits"\n')
    capsys.readouterr()
    assert flash("--image-out", "cards") == 2
    assert "data.folder is 'digits', which no card has" in capsys.readouterr().err


def test_what_a_packed_image_may_get_is_tried_before_it_is_looked_into(
    folder, image, capsys, monkeypatch
):
    (folder / "os.img.xz").write_bytes(lzma.compress(image.read_bytes(), preset=0))
    (folder / "cluster.toml").write_text(CLUSTER.replace('"os.img"', '"os.img.xz"'))
    worker(folder, "raspberry-pi-os-12", "3.11", modules=("torch", "other"))
    asked = []

    def check(card: on_card.Card, owner: object) -> str:
        asked.append(card)
        if "other" in card.modules:
            raise ConfigError("no card has it")
        return "nothing was tried"

    monkeypatch.setattr(on_card, "check", check)
    assert flash("--image-out", "cards", "--dry-run") == 0
    assert "warning: whether cards can train was not tried: nothing" in capsys.readouterr().err
    assert [card.data for card in asked] == [Path("digits")] * 2
    for path in cards.archive_folder().iterdir():
        path.unlink()
    assert flash("--image-out", "cards", "--dry-run") == 2
    assert "there is no worker archive in" in capsys.readouterr().err


def listed(**more) -> str:
    entry = {
        "name": "sdq", "kname": "sdq", "path": "/dev/sdq", "type": "disk", "size": 32 * 10**9,
        "ro": False, "rm": True, "hotplug": True, "tran": "usb", "subsystems": "block:scsi:usb",
        "model": "SD", "serial": "7", "mountpoints": [None], "fstype": None, **more,
    }  # fmt: skip
    return json.dumps({"blockdevices": [entry]})


def test_a_card_in_use_is_refused_and_a_good_one_is_shown_before_it_is_written(
    folder, capsys, monkeypatch
):
    monkeypatch.setattr(disks, "listing", lambda: listed(mountpoints=["/media/me"]))
    assert flash("pi-0", "--to", "/dev/sdq", "--yes") == 2
    assert "/dev/sdq is in use: sdq is mounted at /media/me" in capsys.readouterr().err
    monkeypatch.setattr(disks, "listing", listed)
    assert flash("pi-0", "--to", "/dev/sdq") == 2
    said = capsys.readouterr().err
    assert "pi-0  <-  /dev/sdq  32.0 GB  SD, serial 7" in said
    assert "everything on 1 card(s) will be lost, and nobody can be asked" in said
    assert flash("--to", "/dev/sdq", "--to", "/dev/sdq", "--yes") == 2
    assert "--to names a card twice" in capsys.readouterr().err
    assert flash("--dry-run") == 0
    assert flash("pi-0", "--to", "/dev/sdq", "--yes") == 2
    assert "/dev/sdq: No such file" in capsys.readouterr().err.replace("cannot open ", "")


def test_a_worker_that_cannot_run_there_is_refused_before_anything_is_written(folder, capsys):
    worker(folder, "raspberry-pi-os-13", "3.13", "2.10.0", ("lse",))
    assert flash("--image-out", "cards") == 2
    assert "torch 2.10.0 needs lse, which the cortex-a72" in capsys.readouterr().err
    path = worker(folder, "raspberry-pi-os-12", "3.11")
    assert flash("--image-out", "cards", "--worker", str(path)) == 2
    assert "the worker is for Python 3.11 on aarch64, and the image has" in capsys.readouterr().err
    assert not (folder / "cards").exists()


def test_a_worker_is_made_from_the_list_of_its_system(folder, capsys, monkeypatch):
    from edgetrain.provisioning.cards import making

    def make(workers, release, out, wheel, told):
        (folder / "made").mkdir()
        python, machine = workers.releases[release]
        packages = {"edgetrain": "0.1.0", "torch": "2.9.1"}
        found = archive.Manifest(release, python, machine, packages)
        return archive.pack(folder / "made", found, out)

    monkeypatch.setattr(making, "make", make)
    assert main(["devices", "worker", "--for", "ubuntu-24.04", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["file"] == str(cards.archive_folder() / "ubuntu-24.04.tar")
    assert answer["python"] == "3.12"
    assert main(["devices", "worker", "--for", "ubuntu-24.4"]) == 2
    assert "did you mean 'ubuntu-24.04'" in capsys.readouterr().err
