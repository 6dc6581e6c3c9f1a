"""The payloads of messages about masks: bytes of known lengths, written and read for both sides.

A length is checked before anything is read. This module does not know what the bytes mean.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from edgetrain.errors import BadMessage
from edgetrain.exchange.keys.pairs import KEY_BYTES
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.vectors.vector import Buffer

SEED_BYTES = 16
"""Length of a shared secret: 128 bits, the size of Shamir's field and the level of X25519."""
TAG_BYTES = 16
"""Length of the authentication after encrypted bytes."""


def block_context(block: int) -> bytes:
    return struct.pack("<Q", block)


def round_context(block: int, round: int) -> bytes:
    return struct.pack("<QQ", block, round)


def advert_bytes(rounds: int) -> int:
    """Size of an advert: a public key, and a key and a commitment for each round."""
    return KEY_BYTES + 2 * KEY_BYTES * rounds


def keys_of(advert: bytes) -> list[bytes]:
    """The public keys in an advert, without the commitments."""
    starts = [0, *range(KEY_BYTES, len(advert), 2 * KEY_BYTES)]
    return [advert[start : start + KEY_BYTES] for start in starts]


def shares_bytes(rounds: int) -> int:
    """Size of what one member sends to another: two shares for each round, sealed."""
    return 2 * SEED_BYTES * rounds + TAG_BYTES


def key_list_bytes(terms: MaskTerms, unit: float, payload: Buffer) -> bytes:
    """Everything that all members of a block must have been told alike; masks are bound to its
    digest.

    The unit and the terms are part of it: a hub that told one member another clip_range or unit
    could make the others' numbers vanish beside that member's.
    """
    packed = struct.pack("<ddII", unit, terms.clip_range, terms.members, terms.threshold)
    return packed + bytes(payload)


def check_length(payload: Buffer, expected: int, what: str) -> bytes:
    """The payload as bytes. Raises BadMessage unless it has `expected` bytes."""
    if memoryview(payload).nbytes != expected:
        raise BadMessage(f"{what} of {memoryview(payload).nbytes} bytes, expected {expected}")
    return bytes(payload)


def write_table(rows: Mapping[int, bytes], places: int, size: int) -> bytes:
    """A table: a byte a place, 1 if it has a row, then rows of `size` bytes, or zeros."""
    there = bytes(place in rows for place in range(places))
    return there + b"".join(rows.get(place, bytes(size)) for place in range(places))


def read_table(payload: Buffer, places: int, size: int, what: str) -> dict[int, bytes]:
    """The rows of a table, by place. Raises BadMessage, with `what` the table has."""
    data = check_length(payload, places * (1 + size), what)
    there = read_places(data[:places], places, what)
    return {place: data[places + place * size :][:size] for place in there}


def write_places(chosen: Sequence[int], places: int) -> bytes:
    """One byte a place: 1 for the chosen ones."""
    return bytes(place in chosen for place in range(places))


def read_places(payload: Buffer, places: int, what: str) -> tuple[int, ...]:
    """The places with a 1. Raises BadMessage."""
    data = check_length(payload, places, what)
    if any(flag > 1 for flag in data):
        raise BadMessage(f"{what}: a flag is neither 0 nor 1")
    return tuple(place for place, flag in enumerate(data) if flag)
