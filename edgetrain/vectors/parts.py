"""How a vector is cut into the parts that travel as one message each. Numbers only: no vector, no
codec, no message.
"""

from __future__ import annotations

from collections.abc import Iterator

BASE_PART_ELEMENTS = 1 << 19
"""A base travels as float32 in parts of 2 MiB."""


def parts_of(elements: int, part_elements: int) -> Iterator[slice]:
    """The slices of a vector that travel as one part each."""
    for start in range(0, elements, part_elements):
        yield slice(start, min(start + part_elements, elements))


def base_parts(elements: int) -> Iterator[slice]:
    """The parts in which a base travels."""
    return parts_of(elements, BASE_PART_ELEMENTS)
