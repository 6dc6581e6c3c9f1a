"""A hub's state, cut at the borders of ranges, and put together again.

What belongs to elements of the vector (base, what replies have left out, what the outer rule
remembers) is cut; all else is the same on both sides. Values only: no message, no hub.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from edgetrain.errors import ConfigError
from edgetrain.exchange.hub.records import Seat, State
from edgetrain.exchange.transport import owned, owner_of
from edgetrain.vectors.ranges import Stretch
from edgetrain.vectors.vector import Vector, checksum, zeros


def cut(state: State, own: Stretch, wanted: Stretch) -> State:
    """What a hub with the stretch `own` knows of `wanted`, which is in it. The vectors are views.
    Of bases before this one no checksum is known there."""
    whole, part = own.of(state.elements), wanted.of(state.elements)
    here = slice(part.start - whole.start, part.stop - whole.start)
    size = whole.stop - whole.start

    def each(vectors: Mapping[str, Vector]) -> dict[str, Vector]:
        return {n: v[here] if v.size == size else v for n, v in vectors.items()}

    base = None if state.base is None else state.base[here]
    return replace(
        state, base=base, memory=each(state.memory), outer=each(state.outer),
        checksums=_checksums(state.round, base), partitions=(),
    )  # fmt: skip


def joined(state: State, own: Stretch, more: State, theirs: Stretch) -> State:
    """A hub's state with the ranges of `theirs`, which follow its own, from another hub's."""
    size, extra = own.size(state.elements), theirs.size(state.elements)

    def each(one: Mapping[str, Vector], other: Mapping[str, Vector]) -> dict[str, Vector]:
        names = one.keys() | other.keys()
        return {
            n: _end_to_end(one.get(n, zeros(size)), other.get(n, zeros(extra)), size)
            for n in sorted(names)
        }

    base = None
    if state.base is not None and more.base is not None:
        base = np.concatenate([state.base, more.base])
    return replace(
        state, base=base, memory=each(state.memory, more.memory),
        outer=each(state.outer, more.outer), checksums=_checksums(state.round, base),
    )  # fmt: skip


def _end_to_end(one: Vector, other: Vector, size: int) -> Vector:
    """Vectors with an element for each of the hub's are put end to end; others are equal."""
    return np.concatenate([one, other]) if one.size == size else one


def _checksums(round: int, base: Vector | None) -> tuple[tuple[int, int], ...]:
    return () if base is None else ((round, checksum(base)),)


def why_not_of(state: State, own: Stretch) -> str:
    """Why a state cannot be of these ranges; "": its vectors are as long as they."""
    try:
        size = own.size(state.elements)
    except ConfigError as error:
        return error.message
    vectors = [*state.memory.values(), *state.outer.values()]
    vectors += [] if state.base is None else [state.base]
    if any(vector.dtype != np.float32 or vector.shape != (size,) for vector in vectors):
        return f"a state whose vectors are not of {size:,} elements, as {own} have"
    return ""


def why_not_joined(state: State, more: State) -> str:
    """Why two hubs cannot be put together now; "": they can."""
    if (state.model, state.elements) != (more.model, more.elements):
        return "they have not the same model"
    if state.round != more.round:
        return f"one is at round {state.round}, the other at {more.round}"
    here, there = (_merged(each.seats) for each in (state, more))
    if here != there:
        names = sorted(name for name in here | there if here.get(name) != there.get(name))
        return f"they have not merged the same contributions of {', '.join(names)}"[:200]
    return ""


def _merged(seats: tuple[Seat, ...]) -> dict[str, tuple[int, int]]:
    return {seat.name: (seat.session, seat.next_round) for seat in seats}


def from_elsewhere(seats: Iterable[Seat]) -> tuple[Seat, ...]:
    """Members that are at no connection of this hub yet; of the key of each that much is known."""

    def seat(known: Seat) -> Seat:
        key, name = owner_of(known.address), known.name.encode()
        return replace(known, address=owned(key, name) if key else b"?" + name)

    return tuple(map(seat, seats))
