"""A job set: one job, its data and its code, as one file that a device unpacks (`keeper`)."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.files.toml import to_toml
from edgetrain.jobs.job import Job

DATA_FOLDER = "/etc/edgetrain/current/data"
"""Folder of the trained job's data on a device."""


@dataclass(frozen=True)
class JobSet:
    """A job's files for devices; the same bytes for the same files."""

    job: bytes
    """The job file, as a device reads it."""
    facts: dict[str, Any]
    """set.json: what a device, and the desk, knows of the set without reading it."""
    data: bytes | None = field(default=None, repr=False)
    """A tar file of the job's data."""
    bundle: tuple[str, bytes, str] | None = field(default=None, repr=False)
    """The name, content and digest of the job's own code."""

    @property
    def packed(self) -> bytes:
        """A tar file: set.json, job.toml, the bundle, data/."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            _add(tar, "set.json", json.dumps(self.facts, sort_keys=True).encode() + b"\n")
            _add(tar, "job.toml", self.job)
            if self.bundle is not None:
                _add(tar, self.bundle[0], self.bundle[1])
            if self.data is not None:
                with tarfile.open(fileobj=io.BytesIO(self.data)) as data:
                    for entry in data:
                        content = data.extractfile(entry)
                        assert content is not None
                        _add(tar, f"data/{entry.name}", content.read())
        return out.getvalue()

    @property
    def for_hub(self) -> JobSet:
        """The set of the device that has the hub: without data and code."""
        facts = {key: value for key, value in self.facts.items() if "bundle" not in key}
        return JobSet(self.job, facts)

    @property
    def digest(self) -> str:
        """SHA-256 of `packed`: the set's name on the way."""
        return hashlib.sha256(self.packed).hexdigest()


def make(
    job: Job, text: bytes, data: bytes | None, bundle: tuple[str, bytes, str] | None
) -> JobSet:
    """The set of a job whose file is `text`."""
    facts: dict[str, Any] = {"job": job.digest(), "name": job.name or job.task}
    if bundle is not None:
        facts |= {"bundle": bundle[2], "bundle_name": bundle[0]}
    if data is not None:
        there = dataclasses.replace(job, data={**job.data, "folder": DATA_FOLDER})
        text = to_toml(there.to_dict()).encode()
    return JobSet(text, facts, data, bundle)


def pack_data(folder: Path) -> bytes:
    """A tar file of a folder of data, the same bytes for the same files. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}", "job.data names the folder that devices get")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                _add(tar, path.relative_to(folder).as_posix(), path.read_bytes())
    return out.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(content), 0o644, 0
    tar.addfile(entry, io.BytesIO(content))
