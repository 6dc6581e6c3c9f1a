"""Bytes that are passed on unread: how they are cut into parts, each sent as one message, and their
digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from edgetrain.vectors.parts import BASE_PART_ELEMENTS
from edgetrain.vectors.vector import Buffer

BLOB_PART_BYTES = 4 * BASE_PART_ELEMENTS
"""Bytes in a part, as many as in a part of a base: 2 MiB."""


def blob_part_count(size: int) -> int:
    return -(-size // BLOB_PART_BYTES)


def blob_part(part: int, size: int) -> slice:
    """The bytes of one part; empty if there is no such part."""
    start = min(part * BLOB_PART_BYTES, size)
    return slice(start, min(start + BLOB_PART_BYTES, size))


def blob_parts(blob: Buffer) -> Iterator[memoryview]:
    whole = memoryview(blob).cast("B")
    for part in range(blob_part_count(whole.nbytes)):
        yield whole[blob_part(part, whole.nbytes)]


def blob_digest(pieces: Iterable[Buffer]) -> str:
    """64 hexadecimal digits of the bytes in consecutive pieces (BLAKE2b), however they are cut."""
    digest = hashlib.blake2b(digest_size=32)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
