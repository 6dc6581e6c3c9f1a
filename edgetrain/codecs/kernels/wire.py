"""Parts that all payloads share: varints, the hash behind noise, and why payloads are refused.

The order of REASONS is that of `enum bad` in kernels.c, negated.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgetrain.codecs.kernels.contract import Indices
from edgetrain.errors import BadPayload, EdgetrainError

REASONS = (
    "",
    "it ends too early",
    "a number is not in its shortest form or exceeds 32 bits",
    "it announces more entries than the vector or the payload holds",
    "a Rice parameter leaves 0..30",
    "a gap is spelt in a way that no encoder chooses",
    "a position lies beyond the vector",
    "padding bits are not zero",
    "a scale is negative, not finite, or beyond 2^100",
    "bytes follow its end",
    "a code lies outside its levels",
    "its table of codes does not decode every sequence of bits",
)
(
    _,
    TRUNCATED,
    VARINT,
    COUNT,
    PARAMETER,
    QUOTIENT,
    INDEX,
    PADDING,
    MAGNITUDE,
    TRAILING,
    CODE,
    TABLE,
) = range(len(REASONS))


def bad(reason: int) -> BadPayload:
    """The error for a payload refused because of REASONS[reason]."""
    return BadPayload(f"bad payload: {REASONS[reason]}")


def too_large() -> EdgetrainError:
    """The error of an encoder for NaN, infinity or magnitudes of 2^100 and more."""
    return EdgetrainError(
        "the vector holds NaN, infinity or a magnitude beyond 2^100; no lossy codec carries that",
        "training has diverged: lower the learning rate or clip gradients",
    )


def put_varint(value: int) -> bytes:
    """LEB128, seven bits a byte, lowest first; `value` is in 0..2^32-1.

    >>> put_varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def get_varint(payload: npt.NDArray[np.uint8], at: int) -> tuple[int, int]:
    """(value, first byte after it). Raises BadPayload for all but the shortest spelling."""
    value = 0
    for i in range(5):
        if at + i >= payload.size:
            raise bad(TRUNCATED)
        byte = int(payload[at + i])
        value |= (byte & 127) << (7 * i)
        if byte < 128:
            if (i and not byte) or value >= 2**32:
                raise bad(VARINT)
            return value, at + i + 1
    raise bad(VARINT)


def hash32(x: Indices) -> Indices:
    """Wellons' lowbias32, a permutation of 32-bit integers."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
