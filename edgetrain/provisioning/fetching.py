"""Members' own run folders, from devices to a place beside their hub's: RUN/members/NAME; those of
gateways, RUN/gateways/NAME; and that of a hub on a device.

Only the files that these write are taken, each within a limit: a device may send anything.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import BinaryIO

from edgetrain.errors import ConfigError
from edgetrain.fleet.ssh import Remote, SshHost
from edgetrain.jobs.reading import load
from edgetrain.provisioning.cards.first_boot import HUB_UNIT, UNIT
from edgetrain.runs import folder as folders

FOLDERS = {"hub": "", "gateway": "gateways", "member": "members"}
"""Where the run folders of devices with a role lie in that of the hub."""
FILES = ("job.toml", "environment.json", "metrics.jsonl", "summary.json", "model.safetensors")
MOST_BYTES = 4 << 30
"""Bytes that a device may send: a model, and 16 MB of lines."""
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
            file.write(more)
    return not (answer.ok and state in (b"inactive", b"failed"))


def fetch(remote: Remote, host: SshHost, run: Path, root: str = "/", role: str = "member") -> str:
    """Bring the run folder of a device with this role to its place in RUN, which that of a hub is
    itself, instead of what is there. Returns why it is not there, or ""."""
    is_hub, folder = role == "hub", run / FOLDERS[role]
    with tempfile.TemporaryFile(dir=run) as file:

        def heard(chunk: bytes) -> None:
            if file.tell() <= MOST_BYTES:
                file.write(chunk)

        where = (UNIT, MEMBERS_RUNS) if role == "member" else (HUB_UNIT, HUBS_RUNS)
        words = ["sh", "-c", _PACK, "sh", root, str(ENDING_S), *where]
        answer = remote.run(host, words, seconds=FETCH_S, root=True, heard=heard)
        if not answer.ok:
            return answer.why
        if file.tell() > MOST_BYTES:
            return f"its run folder has more than {MOST_BYTES >> 30} GiB"
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
    """The regular files of FILES, and nothing else. Raises TarError, OSError."""
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r|") as tar:
        for entry in tar:
            name = entry.name.removeprefix("./")
            content = tar.extractfile(entry) if entry.isreg() and name in FILES else None
            if content is not None:
                with (into / name).open("wb") as out:
                    shutil.copyfileobj(content, out, io.DEFAULT_BUFFER_SIZE << 4)
