"""The payloads of the messages that set masks up and take them off: bytes of known lengths.

Written and read here, for both sides; a length is checked before anything is looked at. What the
bytes mean is not known here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from edgetrain.errors import BadMessage
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.vectors.vector import Buffer

SEED, KEY, TAG = 16, 32, 16


def block_context(block: int) -> bytes:
    """What binds a key to its block."""
    return struct.pack("<Q", block)


def round_context(block: int, round: int) -> bytes:
    """What binds a key to a round of its block."""
    return struct.pack("<QQ", block, round)


def advert_bytes(rounds: int) -> int:
    """A key to encrypt shares to the member; for each round a public key and a commitment."""
    return KEY + 2 * KEY * rounds


def keys_of(advert: bytes) -> list[bytes]:
    """The public keys in an advert, without the commitments."""
    starts = [0, *range(KEY, len(advert), 2 * KEY)]
    return [advert[start : start + KEY] for start in starts]


def shares_bytes(rounds: int) -> int:
    """What one member is sent by another: both shares of each round, sealed."""
    return 2 * SEED * rounds + TAG


def key_list_bytes(terms: MaskTerms, unit: float, payload: Buffer) -> bytes:
    """Everything that all members of a block must have been told alike; masks are bound to its
    digest.

    The unit and the terms are part of it: a hub that told one member another span or unit could
    make the others' numbers vanish beside that member's.
    """
    packed = struct.pack("<ddII", unit, terms.span, terms.members, terms.threshold)
    return packed + bytes(payload)


def check_length(payload: Buffer, expected: int, what: str) -> bytes:
    """The payload as bytes; BadMessage unless it is exactly so long."""
    if memoryview(payload).nbytes != expected:
        raise BadMessage(f"{what} of {memoryview(payload).nbytes} bytes, expected {expected}")
    return bytes(payload)


def write_table(rows: Mapping[int, bytes], places: int, size: int) -> bytes:
    """One byte a place that says whether it has a row, then the rows, zeros where there is none."""
    there = bytes(place in rows for place in range(places))
    return there + b"".join(rows.get(place, bytes(size)) for place in range(places))


def read_table(payload: Buffer, places: int, size: int, what: str) -> dict[int, bytes]:
    """What `write_table` wrote; BadMessage."""
    data = check_length(payload, places * (1 + size), what)
    there = read_places(data[:places], places, what)
    return {place: data[places + place * size :][:size] for place in there}


def write_places(chosen: Sequence[int], places: int) -> bytes:
    """One byte a place: 1 for the chosen ones."""
    return bytes(place in chosen for place in range(places))


def read_places(payload: Buffer, places: int, what: str) -> tuple[int, ...]:
    """The chosen places; BadMessage."""
    data = check_length(payload, places, what)
    if any(flag > 1 for flag in data):
        raise BadMessage(f"{what}: a flag is neither 0 nor 1")
    return tuple(place for place, flag in enumerate(data) if flag)
