"""Fetching a data set's original files: only when asked, checked by SHA-256, whole or not at all.

Knows URLs and files, not what is in them.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from edgetrain.errors import TaskError
from edgetrain.files.writing import replacing

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30.0

Progress = Callable[[str, int, int], None]
"""Called with the file's name, the bytes so far and the bytes in all."""


@dataclass(frozen=True)
class Download:
    """One original file: where it is, and what proves that it arrived."""

    url: str
    sha256: str
    size_bytes: int

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def at(self, mirror: str) -> Download:
        """The same file below another address; its checksum stays."""
        return Download(f"{mirror.rstrip('/')}/{self.name}", self.sha256, self.size_bytes)


def cache_folder(name: str) -> Path:
    """Default folder of a data set: below XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "edgetrain", name)


def original(
    wanted: Download, folder: Path, download: bool | str, instead: tuple[str, ...] = ()
) -> Path:
    """The original file in `folder`, or the first there of what may stand `instead` of it.

    A missing one is fetched when `download` says so: true, or the address of a mirror. Raises
    TaskError when it is missing otherwise, and as `fetch` does.
    """
    for name in (*instead, wanted.name):
        if (folder / name).is_file():
            return folder / name
    if not isinstance(download, bool | str):
        raise TaskError(f"data.download = {download!r}", "true, false or a mirror's address")
    if not download:
        raise TaskError(
            f"no {wanted.name} in {folder}",
            "name its folder in data.folder, or set data.download=true",
        )
    return fetch(wanted.at(download) if isinstance(download, str) else wanted, folder)


def say(name: str, done: int, total: int) -> None:
    tenth = max(total // 10, 1)
    if done == total or done // tenth > (done - CHUNK_BYTES) // tenth:
        print(f"{name}: {done / 1e6:.1f} of {total / 1e6:.1f} MB", file=sys.stderr, flush=True)


def fetch(wanted: Download, folder: Path, progress: Progress = say) -> Path:
    """The file in `folder`, fetched first if it is not there.

    It appears under its name only when it is complete and its checksum is right. Processes of one
    machine that want the same folder wait for each other and download once. Raises TaskError for an
    unreachable address, a wrong size or checksum, a folder that cannot be written.
    """
    target = folder / wanted.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder):
            if not target.exists():
                _download(wanted, target, progress)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise TaskError(
            f"cannot fetch {wanted.url} into {folder}: {error}",
            "set data.download to a mirror's address, or put the file there yourself",
        ) from None
    return target


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given up when the file closes, even by a crash
        yield


def _download(wanted: Download, target: Path, progress: Progress) -> None:
    if not wanted.url.startswith(("https://", "http://")):  # urllib would open file:// and ftp://
        raise TaskError(f"cannot fetch {wanted.url}", "an http or https address is needed")
    part = target.with_name(f".{target.name}.part")  # one at a time: the folder is locked
    with replacing(target, part) as file:
        with urllib.request.urlopen(wanted.url, timeout=TIMEOUT_S) as source:  # noqa: S310
            digest = _copy(source, file, wanted, progress)
        if digest != wanted.sha256:
            raise TaskError(
                f"{wanted.url}: SHA-256 {digest}, expected {wanted.sha256}",
                "not the original file; use another mirror",
            )


def _copy(source: BinaryIO, part: BinaryIO, wanted: Download, progress: Progress) -> str:
    """Copy at most the bytes that the file has; returns their SHA-256."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(CHUNK_BYTES):
        done += len(chunk)
        if done > wanted.size_bytes:
            break
        digest.update(chunk)
        part.write(chunk)
        progress(wanted.name, done, wanted.size_bytes)
    if done != wanted.size_bytes:
        much = "more" if done > wanted.size_bytes else f"{done}"
        raise TaskError(
            f"{wanted.url}: {much} bytes, expected {wanted.size_bytes}", "try again, or a mirror"
        )
    return digest.hexdigest()
