"""The run folder: the one interface between running and looking.

    runs/20260131-142501-digits/
        job.toml           the job as run, every key
        environment.json   software and machine
        metrics.jsonl      what happened, line by line (see metrics/)
        summary.json       the result
        *.png              pictures

`compare` makes a folder of run folders, with a job, a summary and a picture of its own. This module
makes folders and writes and reads their files. Keys and units: docs/reference/run-folder.md.
Importing it loads only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.files.reading import read_json
from edgetrain.files.toml import read_toml, to_toml
from edgetrain.files.writing import write_text
from edgetrain.runs import shapes
from edgetrain.runs.environment import capture
from edgetrain.runs.metrics.lines import HUB, Lines

JOB, ENVIRONMENT, METRICS, SUMMARY = "job.toml", "environment.json", "metrics.jsonl", "summary.json"
ORDERS = "orders.sock"
"""The hub's socket for orders in its run folder, while it runs: see training/orders.py."""
_ROOM_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
"""Limit of a JSON file that is read: a sweep of thousands of runs has a few MiB."""

FORMAT = 2
"""Version of the run folder, in summary.json; folders without one are of version 1. Raised when an
older reader would misunderstand a folder."""

# --- making a folder ---


def create(
    root: Path | str,
    name: str,
    *,
    now: time.struct_time | None = None,
    private: bool = False,
) -> Path:
    """Make a new folder root/<YYYYmmdd-HHMMSS>-<name>, and its parents, and return it.

    If `private`, only its owner may look into it, and read what is written there.

    If the name is taken, by a run that started in the same second, it ends in -2, -3, and so on.
    Raises ConfigError if the folder cannot be made or its disk is full.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", now or time.localtime())
    base = f"{stamp}-{_file_name(name)}"
    for attempt in range(1, 10_000):
        try:
            path = Path(root) / (base if attempt == 1 else f"{base}-{attempt}")
            return _make(path, 0o700 if private else 0o777)
        except FileExistsError:
            continue
    raise ConfigError(f"cannot make a run folder: {Path(root) / base} is taken 9,999 times")


def check_room(root: Path | str) -> None:
    """Raise ConfigError if `create` would fail for a reason that can be seen without making
    anything: a disk that is full, a folder that cannot be written, a file in its place."""
    path = Path(root)
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{there} is a file")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        free = shutil.disk_usage(there).free
        if free < _ROOM_BYTES:
            raise OSError(errno.ENOSPC, f"only {free} bytes are left on its disk")
    except OSError as error:
        raise _cannot_write(path, error) from None


def create_inside(folder: Path, name: str, *, again: bool = False) -> Path:
    """Make the folder of one run of several, folder/<name>. Raises ConfigError if it exists; with
    `again` what another process has left there is deleted."""
    if again:
        shutil.rmtree(folder / _file_name(name), ignore_errors=True)
    try:
        return _make(folder / _file_name(name))
    except FileExistsError:
        raise ConfigError(
            f"two runs of {folder} would both be called '{_file_name(name)}'", "name them apart"
        ) from None


def _make(path: Path, mode: int = 0o777) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode)
        free = shutil.disk_usage(path).free
    except FileExistsError:
        if path.parent.is_dir():
            raise
        raise ConfigError(f"cannot make {path}: {path.parent} is a file") from None
    except OSError as error:
        raise _cannot_write(path, error) from None
    if free < _ROOM_BYTES:
        path.rmdir()
        raise _cannot_write(path, OSError(errno.ENOSPC, f"only {free} bytes are left on its disk"))
    return path


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    way_out = "free some space, or choose" if full else "choose"
    return ConfigError(
        f"cannot write {path}: {error.strerror}", f"{way_out} another folder for runs"
    )


def _file_name(name: str) -> str:
    """The name with letters, digits, '.', '_' and '-' only; not hidden, empty or too long."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "run"


def remove_unbegun(folder: Path) -> None:
    """Delete the folder of a run that was refused before it began: one without a line of metrics.
    A folder with anything else in it is left as it is."""
    try:
        if (folder / METRICS).exists() and (folder / METRICS).stat().st_size:
            return
        names = {each.name for each in folder.iterdir()}
        if names <= {JOB, ENVIRONMENT, METRICS, SUMMARY}:
            for name in names:
                (folder / name).unlink()
            folder.rmdir()
    except OSError:
        return  # what cannot be deleted is left


# --- its files ---


def metrics_path(folder: Path) -> Path:
    return folder / METRICS


def write_job(folder: Path, job: Mapping[str, Any]) -> None:
    """Write job.toml: the job as run, with all keys and defaults. Raises ConfigError."""
    _write(folder / JOB, to_toml(job))


def write_environment(folder: Path) -> None:
    """Write environment.json: what `environment.capture` finds now. Raises ConfigError."""
    _write(folder / ENVIRONMENT, json.dumps(capture(), indent=2) + "\n")


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, whole or not at all, with the number of its format first; NaN and
    infinity become null. Raises ConfigError."""
    plain = _plain({"format": FORMAT} | dict(summary))
    _write(folder / SUMMARY, json.dumps(plain, indent=2, allow_nan=False) + "\n")


def read_job(folder: Path) -> dict[str, Any]:
    """Read job.toml, or {} if there is none. Raises ConfigError if it is damaged."""
    try:
        return _shaped(folder / JOB, read_toml(folder / JOB), shapes.JOB)
    except FileNotFoundError:
        return {}


class NewerFormat(ConfigError):
    """A newer edgetrain wrote this run folder."""


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Read summary.json, None if the run is not over. Raises ConfigError, NewerFormat."""
    path = folder / SUMMARY
    try:
        summary = read_json(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    if not isinstance(summary, dict):
        raise ConfigError(f"{path} holds no summary")
    version = summary.get("format", 1)
    if not isinstance(version, int) or version > FORMAT:
        raise NewerFormat(
            f"{folder} is a run folder of format {version!r}; this edgetrain reads up to {FORMAT}",
            "read it with the edgetrain that wrote it, or a newer one",
        )
    return _shaped(path, summary, shapes.SUMMARY)


def read_environment(folder: Path) -> dict[str, Any]:
    """Read environment.json; {} if there is none, or it is damaged."""
    try:
        environment = read_json(folder / ENVIRONMENT, _MOST_BYTES)
    except (FileNotFoundError, ConfigError):
        return {}
    fine = isinstance(environment, dict) and not shapes.wrong(environment, shapes.ENVIRONMENT)
    return environment if fine else {}


def _shaped(path: Path, table: dict[str, Any], shape: shapes.Shape) -> dict[str, Any]:
    if said := shapes.wrong(table, shape):
        raise ConfigError(f"{path}: {said}", "it is damaged, or another program wrote it")
    return table


def read_metrics(folder: Path, *kinds: str) -> Lines:
    """The run's records, or those of some kinds, in file order, without lines that are damaged."""
    return Lines(metrics_path(folder), *kinds)


@contextlib.contextmanager
def socket_path(folder: Path, name: str = ORDERS) -> Iterator[str]:
    """A socket's path, however deep its folder lies: one may have 107 bytes. Raises OSError."""
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}/{name}"
    finally:
        os.close(opened)


def remove_dead_socket(folder: Path) -> None:
    """Remove the socket of a hub that was killed: ordinary copying stops at it."""
    try:
        with socket_path(folder) as path, socket.socket(socket.AF_UNIX) as knocking:
            knocking.setblocking(False)
            knocking.connect(path)
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):
            (folder / ORDERS).unlink()
    except OSError:  # there is none, it is another user's, or its hub is busy
        pass


def runs_in(folder: Path) -> list[Path]:
    """The run folders in a folder, in order, or [folder] if it is a run itself. Sockets of hubs
    that were killed are removed from them.

    The order is that of `runs` in the folder's summary, or else of creation. Raises ConfigError if
    there is no folder, or no run in it.
    """
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist", "`edgetrain runs` lists the run folders")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", "give a run folder, not one of its files")
    is_run = (folder / METRICS).exists()
    inside = [folder] if is_run else [path.parent for path in folder.glob(f"*/{METRICS}")]
    for run in inside:
        remove_dead_socket(run)
    if is_run:
        return inside
    listed = (read_summary(folder) or {}).get("runs")
    if not inside:
        raise ConfigError(
            f"{folder} is no run folder: no {METRICS} in it", "give one that `edgetrain run` made"
        )
    order = {name: place for place, name in enumerate(listed)} if isinstance(listed, list) else {}
    return sorted(
        inside,
        key=lambda run: (order.get(run.name, len(order)), _changed_at(run / JOB), run.name),
    )


def folders_in(root: Path | str, *, begun: bool = True) -> list[Path]:
    """Folders of runs, comparisons and sweeps in `root`, the newest last. Without `begun`: also
    those in which no run has begun yet."""
    folders = [path for path in Path(root).glob("*/") if _has_runs(path, begun)]
    return sorted(folders, key=lambda path: (path.name[:15], _changed_at(path), path.name))


def _has_runs(path: Path, begun: bool) -> bool:
    try:
        return bool(
            (path / METRICS).exists()
            or next(path.glob(f"*/{METRICS}"), None)
            or (not begun and (path / JOB).exists() and not (path / SUMMARY).exists())
        )
    except OSError:  # a folder of another user, or one that is being removed
        return False


def newest_whole(root: Path | str) -> Path:
    """The newest of `folders_in`; a hub's before that of a member beside it. ConfigError."""
    folders = folders_in(root, begun=False)
    last = newest(root, begun=False)
    if not _is_of_one_member(last):
        return last
    began = _changed_at(last / ENVIRONMENT)
    written = (path for path in reversed(folders) if _written_at(path) >= began)
    return next((path for path in written if not _is_of_one_member(path)), last)


def _is_of_one_member(path: Path) -> bool:
    """Whether a member wrote this folder, without the hub."""
    try:
        writers = {record["member"] for record in itertools.islice(read_metrics(path), 200)}
    except ConfigError:
        return False
    return len(writers) == 1 and HUB not in writers


def _written_at(path: Path) -> float:
    files = [path / name for name in (JOB, METRICS, SUMMARY)]
    return max((_changed_at(file) for file in files if file.exists()), default=-math.inf)


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return math.inf


def newest(root: Path | str, *, begun: bool = True) -> Path:
    folders = folders_in(root, begun=begun)
    if not folders:
        raise ConfigError(
            f"no run in {root}", "`edgetrain run` makes one; --runs says where to look"
        )
    return folders[-1]


def _write(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise _cannot_write(path, error) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
