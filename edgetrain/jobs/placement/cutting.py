"""Cut layers into stages: contiguous, within memory, with the least a * sum(t) + c * max(t).

Exact. For each bound on the longest stage the least sum is a shortest path (Zheng et al., Alpa,
OSDI 2022); bounds are tried from the smallest that is feasible, until none can improve the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cut:
    """Where each stage begins and ends, [first, last) in layers, the slot it is in, and what a step
    costs."""

    cost: float
    ends: tuple[tuple[int, int], ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class _Path:
    total: float
    longest: float
    ends: tuple[tuple[int, int], ...]
    slots: tuple[int, ...]


class Costs(Protocol):
    """What stages cost. Arrays are [first, last + 1] over layers, infinite where not possible."""

    layers: int

    def last(self, slot: int) -> Array:
        """Seconds of the last stage, from each layer to the end, [layers + 1]."""

    def inner(self, slot: int, left: int, far: bool) -> Array:
        """Seconds of a stage after which `left - 1` follow, the next on another server if `far`."""


def cut_in_order(
    costs: Costs, stages: int, far: Sequence[bool], a: float, c: float, bound: float = math.inf
) -> Cut | None:
    """Stage s in slot s; `far[s]` says that the next one is on another server. None: nothing fits,
    or nothing costs less than `bound`."""
    arrays = [costs.inner(s, stages - s, far[s]) for s in range(stages - 1)]
    last = costs.last(stages - 1)

    def shortest(limit: float) -> _Path | None:
        best = np.where(last <= limit, last, math.inf)
        steps = []
        for array in reversed(arrays):
            reached = np.where(array <= limit, array, math.inf) + best[None, :]
            steps.append(reached.argmin(1))
            best = reached.min(1)
        if not best[0] < math.inf:
            return None
        places = [0]
        for step in reversed(steps):
            places.append(int(step[places[-1]]))
        ends = tuple(zip(places, [*places[1:], costs.layers], strict=True))
        times = [array[i, j] for array, (i, j) in zip(arrays, ends, strict=False)]
        times.append(last[ends[-1][0]])
        return _Path(float(best[0]), float(max(times)), ends, tuple(range(stages)))

    candidates = _candidates([*arrays, last[None, :]])
    return _search(shortest, candidates, a, c, bound)


def cut_over(
    costs: Costs, servers: Sequence[int], most: int, a: float, c: float, bound: float = math.inf
) -> Cut | None:
    """Any number of stages up to `most`, in any of the slots in order: `servers[d]` is the server
    of slot d, and slots of one server are alike, so that its first ones are used."""
    count = len(servers)
    firsts = [d for d in range(count) if d == 0 or servers[d] != servers[d - 1]]
    ways = {
        d: [(d + 1, False)] * (d + 1 < count and servers[d + 1] == servers[d])
        + [(e, True) for e in firsts if servers[e] > servers[d]]
        for d in range(count)
    }
    inner = {
        (d, k, far): costs.inner(d, k, far)
        for d in range(count)
        for k in range(2, most + 1)
        for far in {far for _, far in ways[d]}
    }
    last = [costs.last(d) for d in range(count)]

    def shortest(limit: float) -> _Path | None:
        best: dict[tuple[int, int], Array] = {}
        came: dict[tuple[int, int], tuple[Array, Array]] = {}
        for d in range(count):
            best[d, 1] = np.where(last[d] <= limit, last[d], math.inf)
        for k in range(2, most + 1):
            for d in range(count):
                best[d, k], came[d, k] = _relax(
                    [(e, inner[d, k, far], best[e, k - 1]) for e, far in ways[d]],
                    limit, costs.layers,
                )  # fmt: skip
        d, k = min(((d, k) for d in firsts for k in range(1, most + 1)), key=lambda at: best[at][0])
        if not best[d, k][0] < math.inf:
            return None
        return _walk(d, k, float(best[d, k][0]), came, ways, inner, last, costs.layers)

    return _search(
        shortest, _candidates([*inner.values(), *(x[None, :] for x in last)]), a, c, bound
    )


def _relax(
    ways: list[tuple[int, Array, Array]], limit: float, layers: int
) -> tuple[Array, tuple[Array, Array]]:
    """The least sum from each layer on over all next slots, the next slot and its first layer."""
    best = np.full(layers + 1, math.inf)
    slot, place = np.zeros(layers + 1, np.int64), np.zeros(layers + 1, np.int64)
    for number, array, after in ways:
        reached = np.where(array <= limit, array, math.inf) + after[None, :]
        found = reached.min(1)
        better = found < best
        best = np.where(better, found, best)
        slot = np.where(better, number, slot)
        place = np.where(better, reached.argmin(1), place)
    return best, (slot.astype(float), place.astype(float))


def _walk(
    d: int,
    k: int,
    total: float,
    came: dict[tuple[int, int], tuple[Array, Array]],
    ways: dict[int, list[tuple[int, bool]]],
    inner: dict[tuple[int, int, bool], Array],
    last: list[Array],
    layers: int,
) -> _Path:
    layer, ends, slots, times = 0, [], [], []
    while k > 1:
        nexts, places = came[d, k]
        e, j = int(nexts[layer]), int(places[layer])
        far = dict(ways[d])[e]
        ends.append((layer, j))
        slots.append(d)
        times.append(inner[d, k, far][layer, j])
        d, k, layer = e, k - 1, j
    ends.append((layer, layers))
    slots.append(d)
    times.append(last[d][layer])
    return _Path(total, float(max(times)), tuple(ends), tuple(slots))


def _candidates(arrays: Sequence[Array]) -> Array:
    found = np.concatenate([array[np.isfinite(array)] for array in arrays])
    return np.unique(found)


def _search(
    shortest: Callable[[float], _Path | None],
    candidates: Array,
    a: float,
    c: float,
    bound: float,
) -> Cut | None:
    if not candidates.size:
        return None
    freest = shortest(math.inf)
    if freest is None or a * freest.total + c * candidates[0] >= bound:
        return None
    if not c:
        return Cut(a * freest.total, freest.ends, freest.slots)
    best, found = bound, None
    place, high = 0, candidates.size - 1
    while place < high:
        middle = (place + high) // 2
        if shortest(float(candidates[middle])) is None:
            place = middle + 1
        else:
            high = middle
    while place < candidates.size:
        limit = float(candidates[place])
        if a * freest.total + c * limit >= best:
            break
        path = shortest(limit)
        assert path is not None
        cost = a * path.total + c * path.longest
        if cost < best:
            best, found = cost, Cut(cost, path.ends, path.slots)
        if path.total <= freest.total:
            break
        place += 1
    return found
