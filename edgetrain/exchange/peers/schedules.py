"""Ring, butterfly and tree: who sends which part of a vector to whom, in which order.

Pure, and the same on every member: no vector, no connection, no time. Members stand at *places*
0 to N - 1; which member stands where is decided elsewhere (`ring_order`). The vector is cut into
*chunks*, as many as the topology has owners of a sum, and these into *segments*, which are what one
message carries: a member sends a segment on as soon as its own sum is in it, while the rest of the
step is still on its way.

=========  ==============================================  ==================================
topology   a chunk's sum                                   trips
=========  ==============================================  ==================================
ring       goes once around: ((x0 + x1) + x2) + ...        2 (N - 1), a part of N each
butterfly  of pairs, of pairs of pairs, ...                2 log2 N, halves, then doubles
tree       as the butterfly's, all of it at place 0        2 log2 N, whole vectors
=========  ==============================================  ==================================

Ring: Patarasuk and Yuan 2009 (bandwidth optimal all-reduce). Butterfly: recursive halving and
doubling, Rabenseifner 2004; members beyond a power of two add theirs to another one's first, and
get the mean from it at the end. The tree is binomial, from the largest distance to the smallest, so
that it adds in the butterfly's order and has its bits, for every N.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from edgetrain.errors import ConfigError

SEGMENT = 1 << 18
"""Elements of a segment, at most: 1 MiB."""

GRAIN = 16
"""Chunks begin at multiples of this many elements: a cache line."""


class Transfer(NamedTuple):
    """Chunks that one place sends to another in a step."""

    sender: int
    receiver: int
    chunks: tuple[int, ...]
    """In the order in which they are sent."""
    adds: bool
    """Whether the receiver adds its own sum; otherwise they are the mean, and stay as they are."""


Steps = Iterator[list[Transfer]]


def _ring(members: int) -> Steps:
    places = range(members)
    for adds in (True, False):
        for step in range(members - 1):
            first = 0 if adds else 1
            yield [
                Transfer(place, (place + 1) % members, ((place + first - step) % members,), adds)
                for place in places
            ]


def _butterfly(members: int) -> Steps:
    whole = _power_of_two(members)
    places, extra = range(whole), range(members - whole)
    if extra:
        yield [Transfer(whole + place, place, _needed(place, whole), True) for place in extra]
    distances = [whole >> level for level in range(1, whole.bit_length())]
    for distance in distances:
        yield [
            Transfer(place ^ distance, place, _needed(place, distance), True) for place in places
        ]
    for distance in reversed(distances):
        yield [
            Transfer(place, place ^ distance, _gathered(place, distance), False) for place in places
        ]
    if extra:
        yield [Transfer(place, whole + place, _gathered(place, whole), False) for place in extra]


def _needed(place: int, distance: int) -> tuple[int, ...]:
    """The chunks that a place goes on with after the step with this distance, in the order in which
    it sends them on."""
    return tuple(place ^ number for number in reversed(range(distance)))


def _gathered(place: int, distance: int) -> tuple[int, ...]:
    """The chunks whose mean a place has before the step with this distance, as they came."""
    return tuple(place ^ number for number in range(distance))


def _tree(members: int) -> Steps:
    distances = [1 << level for level in range((members - 1).bit_length())]
    pairs = [
        [(place, place + distance) for place in range(min(distance, members - distance))]
        for distance in distances
    ]
    for level in reversed(pairs):
        yield [Transfer(far, near, (0,), True) for near, far in level]
    for level in pairs:
        yield [Transfer(near, far, (0,), False) for near, far in level]


def _power_of_two(members: int) -> int:
    """The largest one that is not more."""
    return 1 << (members.bit_length() - 1)


_SHAPES: dict[str, tuple[Callable[[int], Steps], Callable[[int], int]]] = {
    "ring": (_ring, lambda members: members),
    "butterfly": (_butterfly, _power_of_two),
    "tree": (_tree, lambda members: 1),
}
"""The steps and the number of chunks of each topology."""

SHAPES = tuple(_SHAPES)


class Action(NamedTuple):
    """One thing that a member does with one segment."""

    sends: bool
    """Send it to `place`; otherwise receive it from there."""
    place: int
    segment: int
    adds: bool
    """The receiver adds its own sum."""
    ends: bool = False
    """After which the receiver has the sum of all members: it makes the mean of that."""


@dataclass(frozen=True)
class SumOrder:
    """A topology for `members` members and vectors of `elements` elements, both from 0 and 1 up.

    Raises ConfigError for a topology that is not in SHAPES.
    """

    topology: str
    members: int
    elements: int
    segment: int = SEGMENT
    """Elements of a segment, at most."""

    def __post_init__(self) -> None:
        if self.topology not in _SHAPES or self.members < 1:
            raise ConfigError(f"{self.topology!r} of {self.members} members: not a collective")

    def steps(self) -> Steps:
        """All places' messages in each step."""
        return _SHAPES[self.topology][0](self.members)

    @cached_property
    def chunks(self) -> tuple[slice, ...]:
        """The chunks in order, as equal as whole grains allow; some may be empty."""
        count = _SHAPES[self.topology][1](self.members)
        grains = -(-self.elements // GRAIN)
        cuts = [min(grains * n // count * GRAIN, self.elements) for n in range(count + 1)]
        return tuple(slice(*cut) for cut in itertools.pairwise(cuts))

    @cached_property
    def _segments_of(self) -> tuple[range, ...]:
        found, first = [], 0
        for chunk in self.chunks:
            count = -(-(chunk.stop - chunk.start) // self.segment)
            found.append(range(first, first + count))
            first += count
        return tuple(found)

    @cached_property
    def segments(self) -> tuple[slice, ...]:
        """The segments in order: none is empty, together they are the vector."""
        return tuple(
            slice(start, min(start + self.segment, chunk.stop))
            for chunk in self.chunks
            for start in range(chunk.start, chunk.stop, self.segment)
        )

    def actions(self, place: int) -> list[Action]:
        """What the member at a place does, in order. Sending does not wait; what has to be received
        before a segment can be sent on stands before it, and nothing else does."""
        received: list[Action] = []
        sent: list[tuple[int, Action]] = []
        """With the number of receptions that come before."""
        after: dict[int, int] = {}
        """The number of receptions until each segment was received last."""
        steps = list(self.steps())
        last = max((at for at, step in enumerate(steps) if any(t.adds for t in step)), default=-1)
        for at, step in enumerate(steps):
            sent += [
                (after.get(segment, 0), Action(True, transfer.receiver, segment, transfer.adds))
                for transfer in step
                if transfer.sender == place
                for segment in self.segments_of(transfer.chunks)
            ]
            for transfer in step:
                if transfer.receiver != place:
                    continue
                for segment in self.segments_of(transfer.chunks):
                    ends = transfer.adds and at == last
                    received.append(Action(False, transfer.sender, segment, transfer.adds, ends))
                    after[segment] = len(received)
        sent.sort(key=lambda entry: entry[0])
        return _merged(received, sent)

    def segments_of(self, chunks: tuple[int, ...]) -> Iterator[int]:
        """The numbers of the segments of these chunks, in the order in which they are sent."""
        return (segment for chunk in chunks for segment in self._segments_of[chunk])


def _merged(received: Sequence[Action], sent: Sequence[tuple[int, Action]]) -> list[Action]:
    """Each sending right after the receptions that it needs."""
    actions, at = [], 0
    for number in range(len(received) + 1):
        while at < len(sent) and sent[at][0] <= number:
            actions.append(sent[at][1])
            at += 1
        actions += received[number : number + 1]
    return actions


MOST_LOOKED_AT = 200_000
"""Places tried before a ring around unreachable pairs counts as not there."""


def ring_order(
    names: Sequence[str], can: Callable[[str, str], bool], most: int = MOST_LOOKED_AT
) -> tuple[str, ...] | None:
    """An order of all members in which each can connect to the next, and the last to the first;
    None if there is none. The order given is kept where it will do; the same on every machine.

    Depth first, the member with the fewest ways on first (Warnsdorff's rule). That there is none is
    proved for small fleets; for large ones the search gives up after `most` places, and None then
    means that none was found.
    """
    if len(names) < 2:
        return tuple(names)
    if all(can(a, b) for a, b in zip(names, [*names[1:], names[0]], strict=True)):
        return tuple(names)
    onward = {a: [b for b in names if b != a and can(a, b)] for a in names}
    start = names[0]
    path, taken = [start], {start}
    choices = [_next(onward, start, taken)]
    while choices and most > 0:
        most -= 1
        name = next(choices[-1], None)
        if name is None:
            choices.pop()
            taken.discard(path.pop())
            continue
        path.append(name)
        taken.add(name)
        if len(path) == len(names) and start in onward[name]:
            return tuple(path)
        choices.append(_next(onward, name, taken))
    return None


def _next(onward: dict[str, list[str]], name: str, taken: set[str]) -> Iterator[str]:
    """Where to go on from here, the one with the fewest ways on first."""
    free = [other for other in onward[name] if other not in taken]
    free.sort(key=lambda other: sum(far not in taken for far in onward[other]))
    return iter(free)


def can_run(topology: str, order: Sequence[str], can: Callable[[str, str], bool]) -> bool:
    """Whether every member can connect to all that it sends to, at these places."""
    return all(
        can(order[transfer.sender], order[transfer.receiver])
        for step in SumOrder(topology, len(order), 0).steps()
        for transfer in step
    )


def places_of(
    topology: str, names: Sequence[str], can: Callable[[str, str], bool]
) -> tuple[str, ...] | None:
    """The member at each place, so that all that a topology connects can connect; None: there is
    none, and the job takes the star. A butterfly and a tree take the order as it is."""
    if topology == "ring":
        return ring_order(names, can)
    return tuple(names) if can_run(topology, names, can) else None
