"""A device's first boot: unpack the worker, make keys, enrol, blank the secrets, start the worker.

Copied to the boot partition and run there by the system's Python, as root: only the standard
library. `--root FOLDER` runs it on another root, so that it can be tried anywhere.

Each step may be cut off at any moment by a loss of power and is repeated then; a stamp in
/var/lib/edgetrain-setup says that it is done. The steps:

    step      what is there when it is done
    survives  nothing; the folder of stamps is on a disk that lasts
    unpack    the worker in /opt/edgetrain/a, /opt/edgetrain/current leads there
    settings  job, data, bundle in /etc/edgetrain/jobs/1, /etc/edgetrain/current leads there
    keys      the device's own key pair, and its SSH host key
    enrol     the hub's key is pinned; the hub has this device's key, and its SSH host key
    blank     token and passphrases on the boot partition are overwritten with zeros, then cut
    tune      the journal in memory, no access times: a card wears out; TCP keeps its windows
    start     the unit of the worker is enabled and started

Exit status: 0 done, 2 will not get better by itself, 75 try again.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

DONE, BAD, AGAIN = 0, 2, 75
SECRETS = (
    "edgetrain/token",
    "network-config",
    "user-data",
    "firstrun.sh",
    "edgetrain/setup.sh",
)
"""Files of the boot partition that are overwritten."""
PAUSES_S = (2.0, 5.0, 10.0, 20.0, 30.0, 60.0)
"""Seconds between tries to enrol; the last one from then on."""
FLEETING = ("tmpfs", "ramfs", "overlay", "squashfs")
"""File systems whose content a reboot loses."""
UNIT, HUB_UNIT = "edgetrain-member.service", "edgetrain-hub.service"
UNITS = "etc/systemd/system"
KEYS = "var/lib/edgetrain-keys"
MEMBERS = "etc/edgetrain/hub/members"
"""The list of a device that has the hub: who may join."""
SPARE = 64 << 20
"""Bytes of a disk that stay free, and more than the headers of an archive take."""
MOST_MANIFEST = 1 << 20
"""Bytes of an archive's manifest."""
HOST_KEY = "etc/ssh/ssh_host_ed25519_key"


class Failed(Exception):
    """A step that fails again however often it is tried."""


class Later(Exception):
    """A step that may succeed at the next try."""


class FirstBoot:
    def __init__(self, root: Path, boot: str, python: str, run: Callable[..., int]) -> None:
        """root: "/" on a device; boot: the boot partition's folder below it; python: a program;
        run: runs a command with an environment, returns its exit status."""
        self.root = root
        self.boot = root / boot.lstrip("/")
        self.ours = self.boot / "edgetrain"
        self.stamps = root / "var/lib/edgetrain-setup"
        self.slots = root / "opt/edgetrain"
        self.settings = root / "etc/edgetrain"
        self._python = python
        self._run = run
        self.config: dict[str, Any] = json.loads((self.ours / "config.json").read_text("utf-8"))

    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        """All steps, in order."""
        return [
            ("survives", self.survives),
            ("unpack", self.unpack),
            ("settings", self.copy_settings),
            ("keys", self.make_keys),
            ("enrol", self.enrol),
            ("blank", self.blank),
            ("tune", self.tune),
            ("start", self.start),
        ]

    def go(self) -> None:
        """Do what is not done yet. Raises Failed, Later, OSError."""
        for name, step in self.steps():
            stamp = self.stamps / name
            if stamp.exists() and name != "survives":
                continue
            say(f"{name} …")
            step()
            self.stamps.mkdir(parents=True, exist_ok=True)
            write(stamp, b"", 0o644)
        write(self.stamps / "done", b"", 0o644)

    # -- steps -----------------------------------------------------------------------------------

    def survives(self) -> None:
        """Refuse a state folder that a reboot would lose, before the token is used up."""
        kind = filesystem_of(self.root, "/var/lib")
        if kind in FLEETING:
            raise Failed(
                f"/var/lib is on {kind}: a reboot would lose this device's key. Turn the overlay "
                "file system off (raspi-config), then boot again; the token was not used"
            )

    def unpack(self) -> None:
        """Unpack the archive into slot a, check it, and give it its name in one step."""
        slot, part = self.slots / "a", self.slots / "a.part"
        if not slot.exists():
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            archive = self.ours / "worker.tar"
            try:
                with (
                    worker_archive(archive) as (_, payload),
                    tarfile.open(fileobj=payload, mode="r|") as inner,
                ):
                    extract(inner, part)
            except (OSError, tarfile.TarError, EOFError, ValueError, KeyError) as error:
                shutil.rmtree(part, ignore_errors=True)
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise  # the disk may be enlarged yet
                raise Failed(f"the worker archive cannot be unpacked: {error}") from None
            sync_tree(part)
            part.rename(slot)
            sync_folder(self.slots)
        relink(self.slots / "current", "a")

    def copy_settings(self) -> None:
        """Copy the job and what it needs from the boot partition; write the worker's unit."""
        folder = self.settings / "jobs/1"
        part = folder.with_name("1.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for name in self.config.get("settings", []):
            write(part / name, (self.ours / name).read_bytes(), 0o644)
        data = self.ours / "data.tar"
        if data.exists():
            with tarfile.open(data) as tar:
                extract(tar, part / "data")
        facts = {**self.config.get("set", {}), "number": 1}
        write(part / "set.json", json.dumps(facts, sort_keys=True).encode() + b"\n", 0o644)
        sync_tree(part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        relink(self.settings / "current", "jobs/1")
        self.write_unit()

    def write_unit(self) -> None:
        """Write the unit of the worker, in place of one for what ran here before."""
        unit, units = str(self.config.get("unit", UNIT)), self.root / UNITS
        text = (self.ours / unit).read_text("utf-8")
        text = text.replace("@THREADS@", str(os.cpu_count() or 1))
        units.mkdir(parents=True, exist_ok=True)
        other = UNIT if unit == HUB_UNIT else HUB_UNIT
        if (units / other).exists():
            self._run(["systemctl", "disable", "--now", other], {})
            (units / other).unlink()
        hub = (self.root / MEMBERS).parent
        if unit == HUB_UNIT:  # its folder of keys: the list, and what systemd hands it
            hub.mkdir(parents=True, exist_ok=True)
            for name in ("key", "hubs"):
                relink(hub / name, f"/run/credentials/{HUB_UNIT}/{name}")
        else:
            shutil.rmtree(hub, ignore_errors=True)
        write(units / unit, text.encode(), 0o644)

    def make_keys(self) -> None:
        """Make this device's key pair, here, and its SSH host key if it has none."""
        if not (self.root / KEYS / "key").exists():
            self._edgetrain("keys", "init", "--keys", str(self.root / KEYS))
        if digest := self.config.get("bundle"):
            self._edgetrain("bundle", "allow", digest, "--keys", str(self.root / KEYS))
        bundles = self.root / KEYS / "bundles"
        if not bundles.exists():  # the unit hands it to the member
            bundles.parent.mkdir(parents=True, exist_ok=True)
            write(bundles, b"", 0o600)
        host_key = self.root / HOST_KEY
        public = host_key.with_name(f"{host_key.name}.pub")
        if not (is_there(host_key) and is_there(public)) and shutil.which("ssh-keygen"):
            host_key.parent.mkdir(parents=True, exist_ok=True)
            host_key.unlink(missing_ok=True)  # of a first boot that was cut off
            name = f"root@{self.config['name']}"
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(host_key)]
            self._run(words, {})
            os.sync()

    def enrol(self) -> None:
        """Use the token. Tries again until the hub answers, or the token's life is over."""
        token = self.ours / "token"
        hubs = [word for hub in self.config["hubs"] for word in ("--hub", hub)]
        words = ["keys", "enroll", *hubs, "--token", f"@{token}", "--keys", str(self.root / KEYS)]
        public = self.root / f"{HOST_KEY}.pub"
        if public.exists():
            words += ["--ssh-host-key", str(public)]
        began, tries = time.monotonic(), 0
        while True:
            status = self._status("edgetrain", *words)
            if status == 0:
                return
            if status != AGAIN:
                raise Failed("the hub does not let this device in: write the card again")
            if time.monotonic() - began > self.config.get("enrol_s", 3600.0):
                raise Later("no hub has answered yet")
            time.sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
            tries += 1

    def blank(self) -> None:
        """Overwrite what is secret on the boot partition, on the spot, then cut it.

        Cutting alone would leave it in clusters that are free and still hold it.
        """
        for name in SECRETS:
            path = self.boot / name
            if path.exists():
                blank_file(path)
        cloud = self.root / "etc/cloud"
        if cloud.is_dir():  # what it has written stays; without its files it must not run again
            write(cloud / "cloud-init.disabled", b"edgetrain set this device up\n", 0o644)

    def tune(self) -> None:
        """Write less to the card: the journal in memory, no access times. Let TCP keep its windows
        between two rounds."""
        journal = self.root / "etc/systemd/journald.conf.d/10-edgetrain.conf"
        journal.parent.mkdir(parents=True, exist_ok=True)
        write(journal, b"[Journal]\nStorage=volatile\nRuntimeMaxUse=32M\n", 0o644)
        windows = self.root / "etc/sysctl.d/10-edgetrain.conf"
        windows.parent.mkdir(parents=True, exist_ok=True)
        write(windows, b"net.ipv4.tcp_slow_start_after_idle = 0\n", 0o644)
        if self.root == Path("/"):  # if it fails: from the next boot on
            self._run(["sysctl", "-q", "-p", str(windows)], {})
        table = self.root / "etc/fstab"
        if table.exists():
            before = table.read_text("utf-8")
            after = "".join(map(without_access_times, before.splitlines(keepends=True)))
            if after != before:
                write(table, after.encode(), 0o644)

    def start(self) -> None:
        for words in (
            ["systemctl", "daemon-reload"],
            ["systemctl", "enable", "--now", "--no-block", UNIT],
        ):
            if self._run(words, {}):
                raise Later(f"{' '.join(words)} failed")

    # -- tools -----------------------------------------------------------------------------------

    def _edgetrain(self, *words: str) -> None:
        if status := self._status("edgetrain", *words):
            kind = Later if status == AGAIN else Failed
            raise kind(f"edgetrain {' '.join(words[:2])} ended with status {status}")

    def _status(self, module: str, *words: str) -> int:
        environment = {"PYTHONPATH": str(self.slots / "a")}
        return self._run([self._python, "-m", module, *words], environment)


def unit_in(root: Path) -> str:
    """The unit of what runs on this device: a member, if it has none yet."""
    return HUB_UNIT if (root / UNITS / HUB_UNIT).exists() else UNIT


def release_in(text: str, *, is_pi: bool) -> str:
    """An operating system, "debian-13", from the text of its os-release; is_pi: of a Raspberry Pi's
    own images."""
    lines = [line.partition("=") for line in text.splitlines()]
    said = {key: value.strip("\"'") for key, _, value in lines}
    kind, version = said.get("ID", "unknown"), said.get("VERSION_ID", "")
    if kind in ("debian", "raspbian") and is_pi:
        kind = "raspberry-pi-os"
    return f"{kind}-{version}" if version else kind


def filesystem_of(root: Path, path: str) -> str:
    """The kind of the file system that holds a path, from /proc/mounts below the root."""
    best, kind = "", ""
    table = root / "proc/mounts"
    for line in table.read_text("utf-8").splitlines() if table.exists() else ():
        _, place, filesystem, *_ = line.split()
        under = place == "/" or path == place or path.startswith(place.rstrip("/") + "/")
        if under and len(place) >= len(best):
            best, kind = place, filesystem
    return kind


class Hashing:
    """A file to read from that hashes what is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._hash.update(data)
        return data

    def finish(self) -> None:
        while self.read(1 << 20):
            pass

    def digest(self) -> str:
        return self._hash.hexdigest()


class Capped:
    """A file to read from that ends in a ReadError after this many bytes."""

    def __init__(self, file: Any, most: int) -> None:
        self._file, self._left = file, most

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise tarfile.ReadError("it unpacks to more bytes than it says")
        return data


@contextlib.contextmanager
def worker_archive(path: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """The manifest of a worker archive, and its payload: a tar file to read from, of which no more
    is unpacked than the manifest says. Raises ValueError, TarError, EOFError, KeyError; at the end,
    too, for a payload with another SHA-256."""
    with tarfile.open(path) as outer:
        files = [outer.extractfile(name) for name in ("manifest.json", "payload.tar.gz")]
        if files[0] is None or files[1] is None:
            raise ValueError("it is not a worker archive")
        manifest = json.loads(files[0].read(MOST_MANIFEST))
        packed = Hashing(files[1])  # type: ignore[arg-type]
        plain = gzip.GzipFile(fileobj=packed)  # type: ignore[call-overload]
        try:
            yield manifest, Capped(plain, int(manifest["unpacked"]) + SPARE)
        except (zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(str(error)) from None
        packed.finish()
        if packed.digest() != manifest["sha256"]:
            raise ValueError("its payload has another SHA-256")


def extract(tar: tarfile.TarFile, into: Path) -> None:
    """Unpack a tar file of files and folders, all of whose bytes are in it. Raises TarError."""
    # Debian 12's Python has no filters yet.
    how: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    tar.extractall(into, map(_plain, tar), **how)  # noqa: S202


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    if entry.issparse() or not (entry.isreg() or entry.isdir()):
        raise tarfile.ReadError(f"{entry.name} is sparse, or no file and no folder")
    return entry


def blank_file(path: Path) -> None:
    """Overwrite a file with zeros in its place, bring that to the disk, then cut it to nothing."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        file.write(bytes(-(-size // 4096) * 4096))
        file.flush()
        os.fsync(file.fileno())
        file.truncate(0)
        os.fsync(file.fileno())


def without_access_times(line: str) -> str:
    """A line of fstab, with noatime if it mounts ext4."""
    words = line.split()
    if len(words) < 4 or words[0].startswith("#") or words[2] != "ext4":
        return line
    options = words[3].split(",")
    if "noatime" in options:
        return line
    kept = [option for option in options if option not in ("atime", "relatime")]
    return "\t".join([*words[:3], ",".join([*kept, "noatime"]), *words[4:]]) + "\n"


def write(path: Path, content: bytes, mode: int) -> None:
    """Put a file in the place of `path`, whole, also after a loss of power."""
    draft = path.with_name(f".{path.name}.part")
    file = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, mode)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(file, view) :]
        os.fchmod(file, mode)
        os.fsync(file)
    finally:
        os.close(file)
    draft.replace(path)
    sync_folder(path.parent)


def relink(path: Path, target: str) -> None:
    """Let a link lead there, in one rename."""
    draft = path.with_name(f"{path.name}.part")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(path)
    sync_folder(path.parent)


def is_there(path: Path) -> bool:
    """Whether there is such a file, with something in it: a loss of power may leave it empty."""
    return path.exists() and path.stat().st_size > 0


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_tree(folder: Path) -> None:
    """Bring everything in a folder to the disk: of one file system all, which is fewer calls."""
    os.sync()
    sync_folder(folder)


def say(text: str) -> None:
    print(f"edgetrain first boot: {text}", flush=True)


def run(words: list[str], environment: dict[str, str], output: Any = None) -> int:
    """Run a command; its `output` goes where ours does, or to this file."""
    own = {**os.environ, **environment}
    try:
        return subprocess.run(words, env=own, check=False, stdout=output).returncode
    except FileNotFoundError:
        return 127


def main(argv: list[str] | None = None) -> int:
    """Do all steps; returns the exit status."""
    parser = argparse.ArgumentParser(prog="first_boot.py", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("/"), metavar="FOLDER")
    parser.add_argument("--boot", default="/boot/firmware", metavar="FOLDER")
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args(argv)
    try:
        FirstBoot(arguments.root, arguments.boot, arguments.python, run).go()
    except Failed as error:
        say(f"failed: {error}")
        return BAD
    except (Later, OSError) as error:
        say(f"later: {error}")
        return AGAIN
    say("done")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
