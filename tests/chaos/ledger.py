"""What a member has sent, in a file that a kill can only truncate; and how the member ended.

An entry is written before its message is sent. So an entry that is torn at the end of the file was
not sent, and everything that was sent is in the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from edgetrain.exchange.messages import Base, Contribute, unpack
from edgetrain.files.writing import write_text
from edgetrain.vectors.vector import Buffer

_HEAD = struct.Struct("<cQIQ")


_PROMISE = b"P"


@dataclass(frozen=True)
class Given:
    """An entry of a ledger.

    With `round` and `payload`: a part of a contribution; with `round` only: the promise of a
    contribution; with `payload` only: a part of the base that all members begin with.
    """

    round: int | None
    part: int = 0
    payload: bytes | None = None


class Ledger:
    """Appends to a member's file, unbuffered: the kernel has each entry at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", 0)

    def note(self, frames: Sequence[Buffer]) -> None:
        """Note a packed message that is about to be sent, if it is a contribution or a base."""
        if bytes(frames[0]) not in (Contribute.kind, Base.kind):
            return
        message = unpack(list(frames))
        if isinstance(message, Contribute):
            self._write(message.kind, message.round, message.part, message.payload)
        elif isinstance(message, Base):
            self._write(message.kind, 0, message.part, message.payload)

    def promise(self, round: int) -> None:
        """Note that a contribution to `round` has been made, and will be sent."""
        self._write(_PROMISE, round, 0, b"")

    def _write(self, kind: bytes, round: int, part: int, payload: Buffer) -> None:
        content = bytes(payload)
        self._file.write(_HEAD.pack(kind, round, part, len(content)) + content)

    def close(self) -> None:
        """Close the file; works twice."""
        self._file.close()


def read(path: Path) -> Iterator[Given]:
    """The whole entries of a ledger, in order; none if there is no file."""
    data = path.read_bytes() if path.exists() else b""
    at = 0
    while at + _HEAD.size <= len(data):
        kind, round, part, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if at + size > len(data):
            return
        payload = data[at : at + size]
        at += size
        if kind == _PROMISE:
            yield Given(round)
        else:
            yield Given(None if kind == Base.kind else round, part, payload)


@dataclass(frozen=True)
class End:
    """How a member's process ended: with a base, or with an error."""

    applied: int = 0
    """Number of replies that it had applied."""
    base: str = ""
    """Checksum of its base in 16 hexadecimal digits; "": it did not train to the end."""
    error: str = ""

    def write(self, path: Path) -> None:
        """Write it to `path`, whole or not at all."""
        write_text(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> End | None:
        """Read it from `path`; None: the process has not ended, or was killed."""
        return cls(**json.loads(path.read_text())) if path.exists() else None
