"""What a member has given, in a file that a kill can only cut short; and how it ended.

Written before it is sent: what is torn at the end was not handed over.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from edgetrain.exchange.messages import Base, Contribute, unpack
from edgetrain.runs.files import write_text
from edgetrain.vectors.vector import Buffer

_HEAD = struct.Struct("<cQIQ")


_PROMISE = b"P"


@dataclass(frozen=True)
class Given:
    """A line of a ledger: a part of a contribution to `round`; of the base all begin with, then
    `round` is None; or the promise of a contribution to `round`, then `payload` is None."""

    round: int | None
    part: int = 0
    payload: bytes | None = None


class Ledger:
    """Notes what a member sends. `file` is opened unbuffered."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", 0)

    def note(self, frames: Sequence[Buffer]) -> None:
        """A packed message is about to be sent: keep it, if it gives anything."""
        if bytes(frames[0]) not in (Contribute.kind, Base.kind):
            return
        message = unpack(list(frames))
        if isinstance(message, Contribute):
            self._write(message.kind, message.round, message.part, message.payload)
        elif isinstance(message, Base):
            self._write(message.kind, 0, message.part, message.payload)

    def promise(self, round: int) -> None:
        """A contribution to this round has been made, and will be sent, some day."""
        self._write(_PROMISE, round, 0, b"")

    def _write(self, kind: bytes, round: int, part: int, payload: Buffer) -> None:
        content = bytes(payload)
        self._file.write(_HEAD.pack(kind, round, part, len(content)) + content)

    def close(self) -> None:
        """Let go of the file; works twice."""
        self._file.close()


def read(path: Path) -> Iterator[Given]:
    """What is whole in a ledger, in the order of giving; nothing where there is none."""
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
    """How a member's process ended: with a base, or with what it says went wrong."""

    applied: int = 0
    """Replies it had applied."""
    base: str = ""
    """Checksum of its base, as text; "": it did not come to its end."""
    error: str = ""

    def write(self, path: Path) -> None:
        """Write it to `path`, whole or not at all."""
        write_text(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> End | None:
        """None: it has not ended by itself."""
        return cls(**json.loads(path.read_text())) if path.exists() else None
