"""Files that people and other machines leave: opened only if they are files, read within a limit.

A FIFO or a device in the place of a file is refused, and not waited for; a file that is too large
costs no memory. JSON is read as RFC 8259 has it, so that what is read can be written again.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from edgetrain.errors import ConfigError


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read. Raises FileNotFoundError; ConfigError for anything else."""
    try:
        file = open(path, "rb", opener=_at_once)  # noqa: SIM115  the caller closes it
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigError(f"cannot read {path}: {_reason(error)}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ConfigError(f"{path} is not a regular file", "put the file itself there")
    return file


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for a FIFO's other end."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a file. Raises FileNotFoundError; ConfigError for what is not a regular file,
    cannot be read, or has more than `most` bytes."""
    with open_regular(path) as file:
        return read_open(file, path, most)


OTHERS_WRITE, OTHERS_READ = 0o022, 0o077
"""Permissions that a file must not give to others than its owner."""


def read_guarded(path: Path, most: int, forbidden: int = OTHERS_WRITE) -> str:
    """The text of a file that grants access or allows code, in a folder of such files.

    As OpenSSH does with its keys: raises ConfigError if others than this user and root can change
    the file or the folder (`check_guarded`), or the file gives others a permission in `forbidden`.
    Raises as `read_bytes`, and ConfigError for what is not UTF-8.
    """
    with open_regular(path) as file:
        owner = check_guarded(path.parent)
        _check(path, os.fstat(file.fileno()), forbidden, owner)
        content = read_open(file, path, most)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is not text") from None


def check_guarded(folder: Path) -> int:
    """Raise ConfigError if others than this user and root can change what is in a folder. Returns
    its owner: what root does in a user's folder (`sudo`), it does for that user."""
    status = folder.stat()
    _check(folder, status, OTHERS_WRITE, status.st_uid if os.geteuid() == 0 else 0)
    return status.st_uid


def _check(path: Path, status: os.stat_result, forbidden: int, owner: int) -> None:
    if status.st_mode & forbidden & OTHERS_WRITE:
        raise ConfigError(f"{path} can be written by others than its owner", f"chmod go-w {path}")
    if status.st_mode & forbidden:
        raise ConfigError(f"{path} can be read by others", f"chmod 600 {path}")
    if status.st_uid not in (0, os.geteuid(), owner):
        raise ConfigError(
            f"{path} belongs to another user (number {status.st_uid})",
            "who owns it decides who may come in: chown it",
        )


def read_open(file: BinaryIO, path: Path, most: int) -> bytes:
    """The rest of an open file. Raises ConfigError as `read_bytes`."""
    try:
        content = file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {_reason(error)}") from None
    if len(content) > most:
        size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
        raise ConfigError(f"{path} is larger than {size}", "is it the right file?")
    return content


def read_json(path: Path, most: int) -> Any:
    """The value in a file of JSON. Raises as `read_bytes`, and ConfigError for what is not JSON."""
    content = read_bytes(path, most)
    try:
        return parse_json(content)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def parse_json(text: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises ValueError, also for NaN and infinity, for text
    that no file can hold (half of a surrogate pair), and for one that is nested too deep."""
    try:
        value = _DECODER.decode(text.decode())
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if b"\\ud" in text or b"\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
