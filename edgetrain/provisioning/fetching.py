"""Members' own run folders, from devices to a place beside their hub's: RUN/members/NAME.

Only the files that a member writes are taken, each within a limit: a device may send anything.
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
from edgetrain.runs import folder as folders

FOLDER = "members"
FILES = ("job.toml", "environment.json", "metrics.jsonl", "summary.json", "model.safetensors")
MOST_BYTES = 4 << 30
"""Bytes that a device may send: a model, and 16 MB of lines."""
FETCH_S = 1800.0
ENDING_S = 30
"""Seconds that a member may take to end, once its hub has."""
_PACK = """\
n=0
while [ $n -lt "$2" ]; do
  case $(systemctl show edgetrain-member.service --property=ActiveState) in
    *ActiveState=inactive*|*ActiveState=failed*) break;;
  esac
  n=$((n + 1)); sleep 1
done
cd "$1run/edgetrain" 2> /dev/null || exit 0
last=$(ls -1 | sort | tail -n 1)
[ -z "$last" ] || exec tar -c -C "$last" .
"""
"""Packs the newest run folder once its member has ended; what it writes last is in it then."""


def fetch(remote: Remote, host: SshHost, run: Path, root: str = "/") -> str:
    """Bring the run folder of a device's member to RUN/members/NAME, in place of one that is there.
    Returns why it is not there, or ""."""
    with tempfile.TemporaryFile(dir=run) as file:

        def heard(chunk: bytes) -> None:
            if file.tell() <= MOST_BYTES:
                file.write(chunk)

        words = ["sh", "-c", _PACK, "sh", root, str(ENDING_S)]
        answer = remote.run(host, words, seconds=FETCH_S, root=True, heard=heard)
        if not answer.ok:
            return answer.why
        if file.tell() > MOST_BYTES:
            return f"its run folder has more than {MOST_BYTES >> 30} GiB"
        if not file.tell():
            return "its member has written no run folder since the device was started"
        target = run / FOLDER / host.name
        part = target.with_name(f".{host.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            _unpack(file, part)
            if load(part / folders.JOB).digest() != load(run / folders.JOB).digest():
                return "its newest run folder is of another job"
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
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
