"""Worker archives: all that a device runs, for one operating system and Python, as one file.

A tar file of two: `manifest.json`, then `payload.tar.gz`, whose SHA-256 the manifest has. The
payload is what `pip install --target` makes: a folder for PYTHONPATH. The same folder gives the
same bytes. A device unpacks it with Python's tarfile and needs neither pip nor a network.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, did_you_mean, refuse_first
from edgetrain.files.toml import read_toml
from edgetrain.fleet import catalog
from edgetrain.provisioning.cards.first_boot import MOST_MANIFEST, worker_archive
from edgetrain.provisioning.cards.looking import RELEASES, ImageDescription

VERSION = 2
MANIFEST, PAYLOAD = "manifest.json", "payload.tar.gz"
_LEFT_OUT = ("__pycache__", "direct_url.json", "RECORD", "INSTALLER", "REQUESTED")
"""Files that pip writes about this machine; left out as its scripts are, in `bin` at the top."""


@dataclass(frozen=True)
class Manifest:
    """The content of an archive, and the systems it runs on."""

    release: str
    """The operating system, as in `looking.RELEASES`."""
    python: str
    """"3.13"."""
    machine: str
    """"aarch64"."""
    packages: Mapping[str, str]
    """Versions by name; edgetrain and torch are among them."""
    needs: tuple[str, ...] = ()
    """Features that the processor must have, as in workers.toml: ("lse",)."""
    sha256: str = ""
    unpacked: int = 0
    """Bytes that it takes on the device."""
    modules: tuple[str, ...] = ()
    """Top-level modules that a program on the device can import from it."""
    version: int = VERSION


@dataclass(frozen=True)
class Workers:
    """The table of `devices/workers/workers.toml`."""

    folder: Path
    releases: Mapping[str, tuple[str, str]]
    """Python and machine of each operating system that has a lock list."""
    torch: Mapping[tuple[str, str], tuple[str, ...]] = field(repr=False)
    """Features that a processor must have for a (version of torch, machine)."""
    cores: Mapping[str, tuple[str, ...]] = field(repr=False)
    boards: Mapping[str, str] = field(repr=False)
    """The core of each board that a card can be made for."""

    def lock(self, release: str) -> Path:
        """The hash-locked list of packages for an operating system. Raises ConfigError."""
        if release not in self.releases:
            hint = did_you_mean(release, self.releases)
            raise ConfigError(f"no worker for '{release}'", hint)
        return self.folder / f"{release}.txt"

    def torch_needs(self, version: str, machine: str) -> tuple[str, ...]:
        """Processor features that a torch needs. Raises ConfigError for one that was not tried."""
        plain = version.partition("+")[0]
        if (plain, machine) not in self.torch:
            tried = sorted(v for v, m in self.torch if m == machine)
            raise ConfigError(
                f"torch {version} was never tried on {machine}",
                f"tried: {', '.join(tried) or 'none'} ({self.folder / 'workers.toml'})",
            )
        return self.torch[plain, machine]

    def check_board(self, manifest: Manifest, profile: str) -> None:
        """Raises ConfigError if an archive cannot run on a board of the catalog."""
        core = self.boards.get(profile)
        if core is None:
            raise ConfigError(
                f"no card can be made for '{profile}'", did_you_mean(profile, self.boards)
            )
        lacking = [need for need in manifest.needs if need not in self.cores[core]]
        if lacking:
            good = [
                version
                for (version, machine), needs in self.torch.items()
                if machine == manifest.machine and set(needs) <= set(self.cores[core])
            ]
            raise ConfigError(
                f"torch {manifest.packages.get('torch')} needs {', '.join(lacking)}, which the "
                f"{core} of a {profile} does not have: it would die with an illegal instruction",
                f"an archive with torch {', '.join(good)}",
            )


def workers(folder: Path | None = None) -> Workers:
    """Read the table of workers. Raises ConfigError if it is damaged."""
    folder = folder or catalog.folder("devices") / "workers"
    path = folder / "workers.toml"
    try:
        table = read_toml(path)
        return Workers(
            folder,
            {name: (row["python"], row["machine"]) for name, row in table["release"].items()},
            {(r["version"], r["machine"]): tuple(r["needs"]) for r in table["torch"]},
            {name: tuple(row["has"]) for name, row in table["core"].items()},
            dict(table["board"]),
        )
    except (FileNotFoundError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


# -- making --------------------------------------------------------------------------------------


def pack(folder: Path, manifest: Manifest, out: Path) -> Manifest:
    """Make an archive of a folder of packages. Returns its manifest. Raises ConfigError.

    `out` is there only when it is whole.
    """
    with tempfile.TemporaryDirectory(prefix="edgetrain-worker-", dir=out.parent) as scratch:
        payload = Path(scratch) / PAYLOAD
        unpacked = _write_payload(folder, payload)
        with payload.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole = dataclasses.replace(
            manifest, sha256=digest, unpacked=unpacked, modules=tuple(_modules(folder))
        )
        draft = Path(scratch) / "worker.tar"
        text = json.dumps(dataclasses.asdict(whole), indent=1, sort_keys=True).encode() + b"\n"
        with tarfile.open(draft, "w", format=tarfile.USTAR_FORMAT) as tar:
            tar.addfile(_entry(MANIFEST, len(text)), io.BytesIO(text))
            with payload.open("rb") as file:
                tar.addfile(_entry(PAYLOAD, payload.stat().st_size), file)
        draft.chmod(0o644)
        draft.replace(out)
    return whole


def _write_payload(folder: Path, payload: Path) -> int:
    """Write a folder as a tar.gz that depends on nothing else; returns its bytes unpacked."""
    total = 0
    with payload.open("wb") as file:
        packed = gzip.GzipFile("", "wb", 6, file, mtime=0)
        with packed, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in _contents(folder, ["bin"]):
                name = path.relative_to(folder).as_posix()
                if path.is_symlink():
                    raise ConfigError(f"{name} is a link: an archive has files and folders only")
                if path.is_dir():
                    entry = _entry(name, 0)
                    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(entry)
                    continue
                size = path.stat().st_size
                total += size
                entry = _entry(name, size)
                entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
                with path.open("rb") as content:
                    tar.addfile(entry, content)
    return total


def _contents(folder: Path, left_out: Sequence[str] = ()) -> Iterator[Path]:
    """Everything below a folder, in order, except files and folders of some names."""
    for path in sorted(folder.iterdir(), key=lambda p: p.name):
        if path.name in (*_LEFT_OUT, *left_out) or path.suffix == ".pyc":
            continue
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _contents(path)


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = size, 0o644, 0
    return entry


def _modules(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        name = path.name.partition(".")[0]
        is_code = path.suffix in (".py", ".so") or (
            path.is_dir() and "." not in path.name and any(path.rglob("*.py"))
        )
        if is_code and name.isidentifier():
            yield name


def installed(folder: Path) -> dict[str, str]:
    versions = {}
    for info in sorted(folder.glob("*.dist-info")):
        name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
        versions[name.lower().replace("_", "-")] = version
    return versions


# -- reading -------------------------------------------------------------------------------------


def read_manifest(path: Path) -> Manifest:
    """The manifest of an archive. Raises ConfigError if it is none, or of another version."""
    try:
        with tarfile.open(path) as tar:
            file = tar.extractfile(MANIFEST)
            table: dict[str, Any] = json.loads(file.read(MOST_MANIFEST) if file else b"")
            tar.getmember(PAYLOAD)
        if table.get("version") != VERSION:
            raise ConfigError(
                f"{path} is a worker archive of version {table.get('version')}, this is {VERSION}",
                "make it anew with `edgetrain devices worker`",
            )
        lists = {name: tuple(table[name]) for name in ("needs", "modules")}
        return Manifest(**{**table, **lists})
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except tarfile.TarError:
        raise ConfigError(f"{path} is not a worker archive: it is not a tar file") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not a worker archive: {error}") from None


def check(path: Path) -> Manifest:
    """The manifest of an archive whose payload has the digest it states. Raises ConfigError."""
    manifest = read_manifest(path)
    try:
        with worker_archive(path):
            pass
    except (ValueError, tarfile.TarError, EOFError) as error:
        raise ConfigError(f"{path} is damaged: {error}", "make it anew") from None
    return manifest


def check_fits(manifest: Manifest, look: ImageDescription) -> None:
    """Raises ConfigError if an archive does not run on the system of an image."""
    python = f"{look.python[0]}.{look.python[1]}"
    refuse_first(
        ((manifest.python, manifest.machine) != (python, look.machine),
         f"the worker is for Python {manifest.python} on {manifest.machine}, and the image has "
         f"Python {python} on {look.machine}", f"edgetrain devices worker --for {look.release}"),
        (manifest.release != look.release,
         f"the worker is for {RELEASES.get(manifest.release, manifest.release)}, and the image "
         f"is {RELEASES.get(look.release, look.release)}",
         f"edgetrain devices worker --for {look.release}"),
    )  # fmt: skip
