"""The arithmetic of `Expected` on some blocks of its vectors, for rounds that touch few.

The same sums in the same order as on whole tiles, so numbers in these blocks get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgetrain.vectors.blocks import (
    Flags,
    move_sums,
    places,
    read_blocks,
    write_blocks,
)
from edgetrain.vectors.vector import Vector, all_finite


def add_reply(
    base: Vector,
    reply: Vector,
    touched: Flags,
    sums: list[int],
    params: Vector,
    rounds: tuple[Vector | None, Sequence[Vector]] | None,
) -> None:
    """base += reply in the blocks `touched`, with the `sums` of its tiles.

    `rounds`: the one replied to, and those still in flight; `params` keep what they are beyond base
    and all of these. None: they become the base.
    """
    for place in places(touched, reply.size):
        old = read_blocks(base, place)
        new = old + read_blocks(reply, place)
        move_sums(sums, place, old, new)
        write_blocks(base, place, new)
        if rounds is not None:
            answered, flying = rounds
            owns = [read_blocks(own, place) for own in flying]
            if answered is not None:
                old += read_blocks(answered, place)
            local = read_blocks(params, place)
            local -= _add_all(old, owns)
            new = _add_all(new, owns)
            new += local
        write_blocks(params, place, new)


def subtract_blocks(
    base: Vector, params: Vector, own: Vector, few: Flags, flying: Sequence[Vector], settle: bool
) -> bool:
    """own = params - base - those `flying`, in the blocks `few`; if `settle`, params = that sum.

    Returns whether all of it is finite.
    """
    for place in places(few, own.size):
        expected = _add_all(read_blocks(base, place), (read_blocks(own, place) for own in flying))
        rest = read_blocks(params, place)
        rest -= expected
        write_blocks(own, place, rest)
        if settle:
            expected += rest
            write_blocks(params, place, expected)
        if not all_finite(rest.reshape(-1)):
            return False
    return True


def _add_all(total: Vector, others: Iterable[Vector]) -> Vector:
    """total += each of the others, in order."""
    for other in others:
        total += other
    return total
