"""Payloads as bad luck or a liar would make them."""

from __future__ import annotations

import numpy as np


def mutate(payload: bytes, rng: np.random.Generator) -> bytes:
    """One to four edits: bits, bytes, cuts, repeats, varints that promise too much."""
    data = bytearray(payload)
    for _ in range(rng.integers(1, 5)):
        kind, at = rng.integers(7), int(rng.integers(len(data) + 1))
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << int(rng.integers(8))
        elif kind == 1 and data:
            data[at % len(data)] = int(rng.integers(256))
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at:at] = rng.integers(0, 256, rng.integers(1, 9), np.uint8).tobytes()
        elif kind == 4:
            del data[at : at + int(rng.integers(1, 9))]
        elif kind == 5:
            data[at:at] = data[at : at + 20]
        else:
            data[at : at + 5] = b"\xff\xff\xff\xff\x0f"
    return bytes(data)
