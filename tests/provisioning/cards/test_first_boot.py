"""A device's first boot, on a root in a folder: cut off anywhere, it ends in the same state."""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import random
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import first_boot_device as device
import pytest
from wrong_hubs import FIRST, Serving, at_first

from edgetrain.exchange.keys.host_keys import read_host_key
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.zeromq.curve import new_pair
from edgetrain.provisioning.cards import archive

CONFIG = {"name": "pi-0", "hubs": ["tcp://hub:5555"], "settings": ["job.toml"]}
STEPS = ["survives", "unpack", "settings", "keys", "enrol", "blank", "tune", "start"]
first_boot = device.program()


@pytest.fixture(scope="module")
def worker(tmp_path_factory) -> Path:
    """A worker archive with a package in it."""
    folder = tmp_path_factory.mktemp("worker")
    (folder / "site/edgetrain").mkdir(parents=True)
    (folder / "site/edgetrain/__init__.py").write_text("x = 1\n")
    (folder / "site/tool").write_text("#!/bin/sh\n")
    (folder / "site/tool").chmod(0o755)
    manifest = archive.Manifest("raspberry-pi-os-13", "3.13", "aarch64", {"edgetrain": "0.1.0"})
    archive.pack(folder / "site", manifest, folder / "worker.tar")
    return folder / "worker.tar"


@pytest.fixture
def root(tmp_path, worker) -> Path:
    device.prepare(tmp_path / "root", worker, CONFIG)
    return tmp_path / "root"


def go(root: Path, **more: Any) -> None:
    boot = first_boot.FirstBoot(root, "/boot/firmware", "python3", run_for(root))
    for name, value in more.items():
        setattr(boot, name, value)
    boot.go()


def run_for(root: Path):
    return lambda words, environment: device.stand_in(root, words)


def state(root: Path) -> dict[str, str]:
    """Everything that a finished first boot leaves: files, modes, contents."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file():
            content = path.read_bytes() if path.name not in ("key", "systemctl") else b""
            found[name] = f"{path.stat().st_mode:o} {content!r}"
    return found


def check_finished(root: Path) -> None:
    assert (root / "opt/edgetrain/current/edgetrain/__init__.py").read_text() == "x = 1\n"
    assert (root / "opt/edgetrain/a/tool").stat().st_mode & 0o111
    assert (root / "etc/edgetrain/current/job.toml").read_text() == 'name = "x"\n'
    assert (root / "etc/edgetrain/jobs/1/data/digits.csv").read_bytes() == b"data"
    assert "@THREADS@" not in (root / "etc/systemd/system/edgetrain-member.service").read_text()
    keys = (root.parent / "hub-list").read_text().splitlines()
    assert keys == [(root / "var/lib/edgetrain-keys/key").read_text()]
    if shutil.which("ssh-keygen"):
        host_key = (root / "etc/ssh/ssh_host_ed25519_key.pub").read_text()
        assert (root.parent / "hub-host-keys").read_text() == host_key
    assert (root / "boot/firmware/edgetrain/token").read_bytes() == b""
    assert (root / "boot/firmware/network-config").read_bytes() == b""
    assert "/ \text4" not in (root / "etc/fstab").read_text()
    assert "defaults,noatime" in (root / "etc/fstab").read_text()
    windows = (root / "etc/sysctl.d/10-edgetrain.conf").read_text()
    assert windows == "net.ipv4.tcp_slow_start_after_idle = 0\n"
    assert (root / "var/lib/edgetrain-setup/done").exists()


def test_a_first_boot(root, capsys):
    go(root)
    check_finished(root)
    said = capsys.readouterr().out
    assert [line.split()[3] for line in said.splitlines()] == STEPS
    before = state(root)
    go(root)
    assert state(root) == before, "a second run changes nothing"


@pytest.mark.parametrize("last", STEPS)
def test_cut_off_after_each_step(root, last, tmp_path, worker):
    class CutError(Exception):
        pass

    boot = first_boot.FirstBoot(root, "/boot/firmware", "python3", run_for(root))
    steps = boot.steps()

    def cut() -> None:
        dict(steps)[last]()
        raise CutError  # done, and not yet stamped

    boot.steps = lambda: [(name, cut if name == last else step) for name, step in steps]
    with pytest.raises(CutError):
        boot.go()
    go(root)
    check_finished(root)
    device.prepare(tmp_path / "other", worker, CONFIG)
    (tmp_path / "hub-list").unlink()
    go(tmp_path / "other")
    assert state(root).keys() == state(tmp_path / "other").keys()


def killed_at(root: Path, line: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-S", "-E", device.__file__, str(root), str(line)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.real
def test_killed_a_hundred_times_at_random(tmp_path, worker):
    device.prepare(tmp_path / "whole/root", worker, CONFIG)
    whole = killed_at(tmp_path / "whole/root", 0)
    lines = int(whole.stdout.splitlines()[-1])
    wanted = state(tmp_path / "whole/root")
    draw = random.Random(15)
    kills, runs = 0, 0
    while kills < 100:
        folder = tmp_path / f"run{runs}"
        device.prepare(folder / "root", worker, CONFIG)
        while killed_at(folder / "root", draw.randint(1, lines)).returncode == -9:
            kills += 1
        check_finished(folder / "root")
        assert state(folder / "root") == wanted
        shutil.rmtree(folder)
        runs += 1
    assert runs >= 2


@pytest.mark.real
@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="package openssh-client is missing")
def test_a_host_key_that_was_cut_off_is_made_anew_and_a_whole_one_is_kept(root):
    private = root / "etc/ssh/ssh_host_ed25519_key"
    public = private.with_name(f"{private.name}.pub")

    def run(words: list[str], environment: dict[str, str]) -> int:
        return 0 if "edgetrain" in words else first_boot.run(words, environment)

    boot = first_boot.FirstBoot(root, "/boot/firmware", "python3", run)
    for cut in (private, public):
        private.write_text("")
        public.write_text("x")
        cut.write_bytes(b"")
        boot.make_keys()
        assert "PRIVATE KEY" in private.read_text()
        assert public.read_text().startswith("ssh-ed25519 AAAA")
        assert read_host_key(public.read_text())
    whole = public.read_text()
    boot.make_keys()
    assert public.read_text() == whole


def test_no_secret_is_left_in_the_place_where_it_was(tmp_path):
    path = tmp_path / "token"
    path.write_text(device.TOKEN * 100)
    with path.open("rb") as kept:  # the same file, as the card keeps its clusters
        writes = []
        first_boot.os.fsync, fsync = (
            (lambda fd: writes.append(path.read_bytes())),
            first_boot.os.fsync,
        )
        try:
            first_boot.blank_file(path)
        finally:
            first_boot.os.fsync = fsync
        assert set(writes[0]) == {0}
        assert len(writes[0]) >= len(device.TOKEN * 100)
        assert kept.read() == b""
    first_boot.blank_file(path)


@pytest.mark.parametrize("kind", ["overlay", "tmpfs"])
def test_a_state_folder_that_a_reboot_loses_is_said_before_the_token_is_used(root, kind):
    (root / "proc/mounts").write_text(f"/dev/root / ext4 rw 0 0\n{kind} /var/lib {kind} rw 0 0\n")
    with pytest.raises(first_boot.Failed, match=f"/var/lib is on {kind}.*token was not used"):
        go(root)
    assert not (root.parent / "hub-list").exists()
    assert (root / "boot/firmware/edgetrain/token").read_text() == device.TOKEN


def test_a_damaged_archive_is_refused_and_leaves_no_slot(root):
    path = root / "boot/firmware/edgetrain/worker.tar"
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        content[tar.getmember("payload.tar.gz").offset_data + 50] ^= 1
    path.write_bytes(content)
    with pytest.raises(first_boot.Failed, match="the worker archive cannot be unpacked"):
        go(root)
    assert not (root / "opt/edgetrain/a").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_is_tried_again(root, monkeypatch, number):
    def full(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    words = ["--root", str(root), "--boot", "/boot/firmware", "--python", "python3"]
    monkeypatch.setattr(first_boot, "run", lambda *words: device.stand_in(root, *words[:1]))
    with monkeypatch.context() as patched:
        patched.setattr(first_boot, "extract", full)
        assert first_boot.main(words) == first_boot.AGAIN
    assert list((root / "opt/edgetrain").iterdir()) == []
    assert first_boot.main(words) == first_boot.DONE
    check_finished(root)


def test_an_unknown_token_is_not_tried_again(root):
    (root / "boot/firmware/edgetrain/token").write_text("another")
    with pytest.raises(first_boot.Failed, match="write the card again"):
        go(root)


@pytest.mark.real
@pytest.mark.parametrize("first", FIRST)
def test_a_first_boot_enrols_whatever_is_at_the_first_address(first, tmp_path, worker):
    """With edgetrain's own commands in place of the stand-ins."""

    def run(words, environment):
        if words[1:4] == ["-m", "edgetrain", "keys"]:
            return subprocess.run([sys.executable, *words[1:]], check=False).returncode
        if words[0] == "ssh-keygen":
            return subprocess.run(words, check=False).returncode
        return device.stand_in(root, words)

    with contextlib.closing(Serving(tmp_path)) as hub, at_first(first, tmp_path) as wrong:
        token = hub.ring.issue_token("pi-0", new_pair, time.time())
        root = tmp_path / "root"
        device.prepare(root, worker, CONFIG | {"hubs": [wrong, hub.address]}, token)
        first_boot.FirstBoot(root, "/boot/firmware", "python3", run).go()
        ring = Keyring(root / first_boot.KEYS)
        assert hub.ring.members() == {ring.pair().public: "pi-0"}
        assert ring.hubs() == dict.fromkeys([wrong, hub.address], hub.ring.pair().public)
    assert (root / "boot/firmware/edgetrain/token").read_bytes() == b""
    assert (root / "var/lib/edgetrain-setup/done").exists()


def test_a_hub_that_is_away_is_asked_again_with_growing_pauses(root, monkeypatch):
    pauses, answers = [], [75, 75, 75, 0]
    monkeypatch.setattr(first_boot.time, "sleep", pauses.append)

    def run(words, environment):
        if "enroll" in words:
            return answers.pop(0) or device.stand_in(root, words)
        return device.stand_in(root, words)

    first_boot.FirstBoot(root, "/boot/firmware", "python3", run).go()
    assert pauses == [2.0, 5.0, 10.0]
    check_finished(root)


def test_it_gives_up_for_now_when_the_tokens_life_is_over(root, monkeypatch):
    monkeypatch.setattr(first_boot.time, "sleep", lambda _: None)
    now = iter(range(0, 100_000, 100))
    monkeypatch.setattr(first_boot.time, "monotonic", lambda: float(next(now)))
    boot = first_boot.FirstBoot(
        root, "/boot/firmware", "python3", lambda w, e: 75 * ("enroll" in w)
    )
    with pytest.raises(first_boot.Later, match="no hub has answered yet"):
        boot.go()


@pytest.mark.real
def test_the_exit_status_says_whether_to_try_again(root, capsys):
    words = ["--root", str(root), "--python", "/bin/false"]
    assert first_boot.main(words) == first_boot.BAD
    assert "edgetrain keys init ended with status 1" in capsys.readouterr().out
    (root / "boot/firmware/edgetrain/worker.tar").unlink()
    shutil.rmtree(root / "var/lib/edgetrain-setup")
    shutil.rmtree(root / "opt")
    assert first_boot.main(words) == first_boot.BAD


def test_it_needs_only_the_standard_library():
    tree = ast.parse(device.PROGRAM.read_text("utf-8"))
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# /dev/x / ext4 defaults 0 1\n", "# /dev/x / ext4 defaults 0 1\n"),
        ("/dev/x / ext4 relatime,ro 0 1\n", "/dev/x\t/\text4\tro,noatime\t0\t1\n"),
        ("/dev/x / ext4 noatime 0 1\n", "/dev/x / ext4 noatime 0 1\n"),
        ("/dev/x /b vfat defaults 0 2\n", "/dev/x /b vfat defaults 0 2\n"),
        ("\n", "\n"),
    ],
)
def test_no_access_times(before, after):
    assert first_boot.without_access_times(before) == after
