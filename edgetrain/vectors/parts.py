"""The parts of a vector, each sent as one message. Numbers only: no vector, no codec, no
message.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

BASE_PART_ELEMENTS = 1 << 19
"""A base is sent as float32 in parts of 2 MiB."""


@lru_cache(64)
def parts_of(elements: int, part_elements: int) -> tuple[slice, ...]:
    step = part_elements
    return tuple(slice(at, min(at + step, elements)) for at in range(0, elements, step))


def base_part_count(elements: int) -> int:
    return max(1, -(-elements // BASE_PART_ELEMENTS))


def base_part(part: int, elements: int) -> slice:
    """The slice of one part of a base; empty if there is no such part."""
    start = min(part * BASE_PART_ELEMENTS, elements)
    return slice(start, min(start + BASE_PART_ELEMENTS, elements))


def base_parts(elements: int) -> Iterator[slice]:
    return (base_part(part, elements) for part in range(base_part_count(elements)))
