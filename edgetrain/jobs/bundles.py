"""Job code as one file whose digest the owner of a device allows before any of it is imported.

A bundle is a zip archive in a form that has one spelling: names sorted, nothing compressed, no
dates, folders, links or attributes. So a digest stands for files and names and nothing else.
Reading checks the whole archive in memory before anything is written. No torch, no network.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shlex
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from edgetrain.errors import ConfigError
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import keys_folder
from edgetrain.files.reading import read_bytes, read_guarded

SUFFIX = ".bundle"
MOST_BYTES = 16 << 20
"""Largest size of a bundle, and so of all its files: it is code, without data."""
MOST_FILES = 1000
MOST_NAME = 200

Digest = str
"""SHA-256 in 64 hexadecimal digits."""

Files = Mapping[str, bytes]

_DATE = (1980, 1, 1, 0, 0, 0)
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def digest_of(archive: bytes) -> Digest:
    return hashlib.sha256(archive).hexdigest()


# -- making ---------------------------------------------------------------------------------------


def make(source: Path) -> bytes:
    """The bundle of a file, or of all files in a folder; the same bytes for the same files.

    Hidden files, and caches of Python, are left out. Raises ConfigError for a link (what it points
    to may be anything), for names that another system spells differently, and for too much.
    """
    return pack({name: _read(path) for name, path in _found(source).items()})


def pack(files: Files) -> bytes:
    """The bundle of these files (name with '/' -> content). ConfigError as `make`."""
    _check(list(files), sum(map(len, files.values())))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.create_system = 3
            entry.external_attr = (stat.S_IFREG | 0o600) << 16
            archive.writestr(entry, files[name])
    return out.getvalue()


def _found(source: Path) -> dict[str, Path]:
    if source.is_symlink() or not source.exists():
        raise ConfigError(f"{source} is no file and no folder", "name the task's own")
    if source.is_file():
        return {source.name: source}
    found = {}
    for folder, inside, names in os.walk(source):
        inside[:] = [n for n in inside if not n.startswith(".") and n != "__pycache__"]
        for name in [*names, *inside]:
            path = Path(folder, name)
            if path.is_symlink():
                raise ConfigError(f"{path} is a link", "put the file itself there")
        for name in names:
            path = Path(folder, name)
            if name.startswith(".") or name.endswith((".pyc", SUFFIX)):
                continue
            found[path.relative_to(source).as_posix()] = path
    return found


def _read(path: Path) -> bytes:
    """The content of a file, at most MOST_BYTES. ConfigError, also if there is none."""
    try:
        return read_bytes(path, MOST_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


# -- reading --------------------------------------------------------------------------------------


def read(path: Path) -> bytes:
    """The bytes of a bundle's file. ConfigError where it is no file, missing or too large."""
    try:
        return _read(path)
    except ConfigError as error:
        raise ConfigError(f"bundle: {error.message}", error.hint) from None


def unpack(archive: bytes) -> dict[str, bytes]:
    """The files in a bundle's bytes. Nothing is written.

    Refused with ConfigError is every archive that `pack` would not have written bit for bit: so
    there is no path that leads elsewhere, link, second spelling, compressed bomb, comment or hidden
    byte that would have to be recognised one by one.
    """
    if len(archive) > MOST_BYTES:
        raise ConfigError(f"a bundle of {len(archive)} bytes", _limits())
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as found:
            entries = found.infolist()
            _check([entry.filename for entry in entries], sum(e.file_size for e in entries))
            for entry in entries:
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ConfigError(f"'{entry.filename}' in the bundle is compressed", _REMAKE)
                if stat.S_ISLNK(entry.external_attr >> 16):
                    raise ConfigError(f"'{entry.filename}' in the bundle is a link", _REMAKE)
            files = {entry.filename: found.read(entry) for entry in entries}
    except ConfigError:
        raise
    except Exception as error:  # whatever zipfile makes of hostile bytes
        raise ConfigError(f"this is no bundle: {error}", _REMAKE) from None
    if pack(files) != archive:
        raise ConfigError("the bundle is not as `edgetrain bundle make` writes it", _REMAKE)
    return files


_REMAKE = "make it with `edgetrain bundle make`"


def _limits() -> str:
    return (
        f"at most {MOST_FILES} files and {MOST_BYTES >> 20} MiB: a bundle is code, and data has "
        "data.folder"
    )


def _check(names: list[str], total: int) -> None:
    if not names:
        raise ConfigError("a bundle without files", "name a task's file or folder")
    if len(names) > MOST_FILES or total > MOST_BYTES:
        raise ConfigError(f"{len(names)} files of {total} bytes in a bundle", _limits())
    for name in names:
        parts = name.split("/")
        if len(name) > MOST_NAME or not all(map(_PART.match, parts)):
            raise ConfigError(
                f"'{name[:MOST_NAME]}' cannot be a file's name in a bundle",
                "letters, digits, '.', '_' and '-', parts joined by '/', none beginning with a dot",
            )
    folded = {name.lower() for name in names}
    if len(folded) < len(names):
        raise ConfigError("a bundle has names that differ in case only", "rename one of them")
    inner = {p.as_posix().lower() for n in names for p in PurePosixPath(n).parents}
    if folded & inner:
        raise ConfigError("a bundle has a file and a folder of one name", "rename one of them")


# -- whose code may run here ----------------------------------------------------------------------


class Allowed:
    """The bundles whose code may run on this device: the file `bundles` beside the keys, mode 0600,
    a digest and a note a line. Who can write it decides what runs."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bundles"
        usual = folder == keys_folder(None)
        self.option = "" if usual else f" --keys {shlex.quote(str(folder))}"
        """Option of the commands of `edgetrain bundle` for this list."""
        self._ring = Keyring(folder)

    def all(self) -> dict[Digest, str]:
        """Digest -> note. ConfigError for a damaged file, and for one that others can write."""
        try:
            text = read_guarded(self.path, MOST_BYTES)
        except FileNotFoundError:
            return {}
        lines = [line.split("#")[0].split(None, 1) for line in text.splitlines()]
        for number, line in enumerate(lines, 1):
            if line and not _DIGEST.match(line[0]):
                raise ConfigError(f"{self.path}, line {number}: a digest has 64 digits")
        return {line[0]: line[1].strip() if len(line) > 1 else "" for line in lines if line}

    def allow(self, digest: Digest, note: str = "") -> None:
        clean = re.sub(r"[^A-Za-z0-9_.-]+", "-", note)[:64]
        with self._ring.locked():
            self._write(self.all() | {checked(digest): clean})

    def revoke(self, start: str) -> Digest:
        """No longer; by the digest, or a beginning of it that only one has. Returns it."""
        with self._ring.locked():
            known = self.all()
            found = [digest for digest in known if start and digest.startswith(start.lower())]
            if len(found) != 1:
                raise ConfigError(
                    f"{len(found)} bundles that are allowed begin with '{start}'",
                    "`edgetrain bundle list` prints them",
                )
            self._write({digest: note for digest, note in known.items() if digest != found[0]})
        return found[0]

    def _write(self, known: Mapping[Digest, str]) -> None:
        text = "".join(f"{digest} {note}".rstrip() + "\n" for digest, note in known.items())
        self._ring.write(self.path.name, text, 0o600)


def checked(digest: str) -> Digest:
    """A digest as people write it; ConfigError."""
    found = digest.strip().lower().removeprefix("sha256:")
    if not _DIGEST.match(found):
        raise ConfigError(
            f"'{digest[:80]}' is no digest and no file", "`edgetrain bundle make` says both"
        )
    return found


# -- running --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BundleName:
    """A bundle in a job's `task`: "my.bundle#module:object", "my.bundle@3fa9…#module:object"."""

    path: str
    pin: str
    """Digits that its digest begins with; "": any that is allowed."""
    inner: str
    """module:object."""


def named(spec: str) -> BundleName | None:
    """The bundle that a task names; None: it names none. ConfigError for a pin that is none."""
    path, sign, inner = spec.partition("#")
    if not sign:
        return None
    path, at, pin = path.partition("@")
    if at and not re.fullmatch(r"[0-9a-f]{16,64}", pin):
        raise ConfigError(f"task '{spec}': after '@' there are 16 to 64 digits of the digest")
    return BundleName(path, pin, inner)


def opened(path: Path, allowed: Allowed, pin: str = "") -> Path:
    """A private folder with the files of a bundle that is allowed here, to import from.

    The bytes whose digest is looked up are those that are unpacked. The folder is new in each
    process and its own (mode 0700), and is removed when the process ends. Raises ConfigError before
    anything is written, and for a digest that does not begin with `pin`.
    """
    archive = read(path)
    digest = digest_of(archive)
    if not digest.startswith(pin):
        raise ConfigError(
            f"{path} has sha256 {digest}, the job wants {pin}…", "get the file that the job means"
        )
    files = unpack(archive)
    if digest not in allowed.all():
        raise ConfigError(
            f"the code in {path} is not allowed on this device (sha256 {digest}; what is, stands "
            f"in {allowed.path})",
            f"look into it, then: edgetrain bundle allow {digest}{allowed.option}",
        )
    if digest not in _UNPACKED:
        _UNPACKED[digest] = _written(files)
    return _UNPACKED[digest]


_UNPACKED: dict[Digest, Path] = {}
"""Folder of this process's unpacked bundles."""


def _written(files: Files) -> Path:
    from multiprocessing.util import Finalize  # atexit is not called in multiprocessing's children

    folder = Path(tempfile.mkdtemp(prefix="edgetrain-bundle-"))
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=1)
    for name, content in files.items():
        target = folder / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with target.open("xb") as file:
            file.write(content)
    return folder
