"""Members' own run folders, from devices to a place beside their hub's: RUN/members/NAME; those of
gateways, RUN/gateways/NAME; and that of a hub on a device.

Only the files that these write are taken, each within a limit: a device may send anything.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO

from edgetrain.errors import ConfigError
from edgetrain.fleet.ssh import CHUNK, Remote, SshHost
from edgetrain.jobs.reading import load
from edgetrain.provisioning.cards.first_boot import HUB_UNIT, SPARE, UNIT
from edgetrain.runs import folder as folders

FOLDERS = {"hub": "", "gateway": "gateways", "member": "members"}
"""Folders of devices' runs, by role, in that of the hub."""
FILES = ("job.toml", "environment.json", "metrics.jsonl", "summary.json", "model.safetensors")
MOST_BYTES = 4 << 30
"""Bytes that a device may send: a model, and lines."""
FETCH_S = 1800.0
ENDING_S = 30
"""Seconds that a member may take to end, once its hub has."""
_PACK = """\
n=0
while [ $n -lt "$2" ]; do
  case $(systemctl show "$3" --property=ActiveState) in
    *ActiveState=inactive*|*ActiveState=failed*) break;;
  esac
  n=$((n + 1)); sleep 1
done
IFS=; cd $1$4 2> /dev/null || exit 0
last=$(ls -1 | sort | tail -n 1)
[ -z "$last" ] || exec tar -c -C "$last" --exclude=./journal .
"""
"""Packs the newest run folder once its member, or hub, has ended; what it writes last is in it
then."""
_MORE = """systemctl show "$3" --property=ActiveState | sed -n 's/^ActiveState=//p'
IFS=; cd $1$4 && tail -c "+$2" "$(ls -1 | sort | tail -n 1)/metrics.jsonl"
exit 0
"""
MEMBERS_RUNS, HUBS_RUNS = "run/edgetrain", "var/lib/edgetrain/runs/*"
"""Where a device has its run folders; of a hub those of one job are kept."""


def follow(remote: Remote, host: SshHost, run: Path, root: str = "/") -> bool:
    """Add to the metrics in `run` what the hub on a device has written since. Returns whether that
    is at work still, as far as is known."""
    path = folders.metrics_path(run)
    begin = path.stat().st_size + 1 if path.exists() else 1
    words = ["sh", "-c", _MORE, "sh", root, str(begin), HUB_UNIT, HUBS_RUNS]
    answer = remote.run(host, words, seconds=30.0, root=True)
    state, _, more = answer.stdout.partition(b"\n")
    if answer.ok:
        with path.open("ab") as file:
            file.write(more[: max(0, MOST_BYTES - begin)])
    return not (answer.ok and state in (b"inactive", b"failed"))


class DiskRoom:
    """Bytes that the devices of a fleet may bring to a folder, all together: half of what its disk
    has free, since an archive lies beside what is unpacked of it."""

    def __init__(self, folder: Path) -> None:
        self._left = (shutil.disk_usage(folder).free - SPARE) // 2
        self._lock = threading.Lock()

    def take(self, count: int) -> bool:
        """Whether there is room for as many bytes, which are taken then."""
        with self._lock:
            fits = count <= self._left
            self._left -= count if fits else 0
        return fits


def fetch(
    remote: Remote,
    host: SshHost,
    run: Path,
    root: str = "/",
    role: str = "member",
    room: DiskRoom | None = None,
) -> str:
    """Bring the run folder of a device with this role to its place in RUN, which that of a hub is
    itself, instead of what is there. Returns why it is not there, or "". room: of all devices."""
    is_hub, folder, room = role == "hub", run / FOLDERS[role], room or DiskRoom(run)
    with tempfile.TemporaryFile(dir=run) as file:
        full = False

        def heard(chunk: bytes) -> None:
            nonlocal full
            if not full and file.tell() <= MOST_BYTES:
                full = not room.take(len(chunk))
                file.write(b"" if full else chunk)

        where = (UNIT, MEMBERS_RUNS) if role == "member" else (HUB_UNIT, HUBS_RUNS)
        words = ["sh", "-c", _PACK, "sh", root, str(ENDING_S), *where]
        answer = remote.run(host, words, seconds=FETCH_S, root=True, heard=heard)
        if not answer.ok:
            return answer.why
        if file.tell() > MOST_BYTES:
            return f"its run folder has more than {MOST_BYTES >> 30} GiB"
        if full:
            return f"disk full: what the devices send does not fit on that of {run}"
        if not file.tell():
            return f"its {role} has written no run folder since the device was started"
        target = run if is_hub else folder / host.name
        part = folder / f".{host.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            _unpack(file, part)
            if load(part / folders.JOB).digest() != load(run / folders.JOB).digest():
                return "its newest run folder is of another job"
            if not is_hub:
                shutil.rmtree(target, ignore_errors=True)
            target.mkdir(exist_ok=True)
            for each in part.iterdir():
                each.replace(target / each.name)
        except (tarfile.TarError, OSError, EOFError, ConfigError) as error:
            return f"its run folder cannot be read: {error}"
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return ""


def _unpack(file: BinaryIO, into: Path) -> None:
    """The regular files of FILES, and nothing else: headers are read one by one, so that nothing is
    made, or held in memory, that did not come as bytes. Raises TarError, OSError."""
    file.seek(0)
    while (block := file.read(tarfile.BLOCKSIZE)) != bytes(tarfile.BLOCKSIZE):
        entry = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        name, begin = entry.name.removeprefix("./"), file.tell()
        more = file.read(min(entry.size, CHUNK)) if entry.type == tarfile.XHDTYPE else b""
        if entry.size < 0 or entry.type == tarfile.GNUTYPE_SPARSE or b"GNU.sparse." in more:
            raise tarfile.TarError(f"{name[:80]!r} is sparse, or has no size")
        if entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and name in FILES:
            left = entry.size
            with (into / name).open("wb") as out:
                while left and (chunk := file.read(min(left, CHUNK))):
                    left -= out.write(chunk)
            if left:
                raise tarfile.ReadError(f"{name} is cut short")
        file.seek(begin + -(-entry.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
