"""Which layers of a stage keep their activations, and which compute them again, to save memory.

Layers that take long to compute again keep their activations, as many as there is room for. This is
a knapsack, but for what the largest of the layers that are computed again needs meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgetrain.jobs.placement.cutting import Array

Places = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
EXACT = 6
"""Layers of a run of which all choices are tried. In longer ones layers are kept in the order of
seconds saved a byte."""
LEVELS = 2
"""Limits that are tried, in such a run, for the largest layer that is computed again."""
MOST_KEPT = 256
"""Sets of layers that are remembered on the way to the best one."""


@dataclass(frozen=True)
class Activations:
    """Of each layer in a row, with the micro-batches of a stage in flight."""

    kept: Array
    """Bytes, if its activations are kept."""
    entering: Array
    """Bytes that are kept if they are not."""
    again: Array
    """Bytes while it is computed again."""
    longer: Array
    """Seconds that computing it again takes."""

    def part(self, first: int, end: int) -> Activations:
        """The part of these layers only."""
        these = slice(first, end)
        return Activations(
            self.kept[these], self.entering[these], self.again[these], self.longer[these]
        )


def no_less_again(layers: Activations, room: Array) -> Array:
    """Seconds that `least_again` is not below, found without a choice of layers: what memory lacks,
    at the price of the layer of each run that saves most bytes a second."""
    lacks = _sums(layers.kept) - room
    saves = layers.kept - layers.entering
    with np.errstate(divide="ignore", invalid="ignore"):
        prices = np.where(saves > 0, layers.longer / saves, math.inf)
    cheapest = -_largest(-prices, -math.inf)
    possible = _sums(np.minimum(layers.kept, layers.entering)) <= room
    short = possible & (lacks > 0) & (cheapest < math.inf)
    found = np.where(possible, 0.0, math.inf)
    found[short] = lacks[short] * cheapest[short] * (1 - 1e-9)
    return found


def least_again(layers: Activations, room: Array, wanted: Mask) -> Array:
    """The fewest seconds of computing again for every run of layers [first, end) whose activations
    have `room` bytes, all of [layers + 1, layers + 1]; infinite where nothing fits. Runs that are
    not `wanted` may be infinite, too."""
    found = np.where(_sums(layers.kept) <= room, 0.0, math.inf)
    undecided = np.isinf(found) & (_sums(np.minimum(layers.kept, layers.entering)) <= room)
    undecided &= wanted
    first, end = np.nonzero(np.triu(undecided, EXACT + 1))
    if first.size:
        found = np.minimum(found, _in_order(layers, room, int((end - first).max())))
    for length in range(1, min(EXACT, len(layers.kept)) + 1):
        first = np.flatnonzero(np.diagonal(undecided, length))
        if first.size:
            found[first, first + length] = _of_all(layers, first, length, room)
    return found


def chosen_again(layers: Activations, room: float) -> list[int] | None:
    """Which of these layers are computed again, by their places; None: no choice fits."""
    if layers.kept.sum() <= room:
        return []
    best, fewest = None, math.inf
    for level in _levels(layers):
        keeps = _kept_below(layers, room, level)
        if keeps is None:
            continue
        again = [place for place in range(len(layers.kept)) if place not in keeps]
        seconds = float(layers.longer[again].sum())
        if seconds < fewest:
            best, fewest = again, seconds
    return best


def _levels(layers: Activations) -> list[float]:
    """Limits for the largest layer that is computed again. In long runs few, of those that leave
    most layers a choice."""
    levels: list[float] = np.unique(layers.again)[::-1].tolist()
    count = len(layers.kept)
    if count <= EXACT:
        return levels
    return [each for each in levels[:LEVELS] if 4 * int((layers.again > each).sum()) <= count]


def _of_all(layers: Activations, first: Places, length: int, room: Array) -> Array:
    """Of runs of this length that begin at these layers, over all choices."""
    choices = (np.arange(2**length)[:, None] >> np.arange(length)) & 1
    places = first[:, None] + np.arange(length)
    needs = layers.kept[places] @ (1 - choices).T + layers.entering[places] @ choices.T
    needs += (layers.again[places][:, None, :] * choices).max(2)
    seconds = layers.longer[places] @ choices.T
    found: Array = np.where(needs <= room[first, first + length][:, None], seconds, math.inf).min(1)
    return found


def _in_order(layers: Activations, room: Array, most: int) -> Array:
    """Of all runs up to `most` layers, keeping them in the order of seconds saved a byte."""
    found = np.full_like(room, math.inf)
    weights = layers.kept - layers.entering
    for level in _levels(layers):
        must = (layers.again > level) | (weights <= 0)
        left = room - _sums(layers.entering + weights * must)
        left -= _largest(np.where(layers.again > level, 0.0, layers.again))
        seconds = _sums(layers.longer * ~must)
        fits = left >= 0
        for place in _order(weights, layers.longer, must):
            here = np.s_[max(0, place + 1 - most) : place + 1, place + 1 : place + 1 + most]
            takes = left[here] >= weights[place]
            left[here] -= weights[place] * takes
            seconds[here] -= layers.longer[place] * takes
        found = np.minimum(found, np.where(fits, np.maximum(seconds, 0.0), math.inf))
    places = np.arange(len(found))
    return np.where(places[None, :] - places[:, None] <= most, found, math.inf)


def _order(weights: Array, longer: Array, must: Mask) -> list[int]:
    free = [place for place in range(len(weights)) if not must[place]]
    return sorted(free, key=lambda place: -longer[place] / weights[place])


def _kept_below(layers: Activations, room: float, level: float) -> set[int] | None:
    """The best layers to keep where none that needs more than `level` is computed again."""
    weights = layers.kept - layers.entering
    must = (layers.again > level) | (weights <= 0)
    left = room - float((layers.entering + weights * must).sum())
    left -= float(layers.again[layers.again <= level].max())
    if left < 0:
        return None
    order, taken, rest = _order(weights, layers.longer, must), set(), left
    for place in order:
        if weights[place] <= rest:
            taken.add(place)
            rest -= weights[place]
    better = {order[place] for place in _best_within(weights[order], layers.longer[order], left)}
    if layers.longer[list(better)].sum() > layers.longer[list(taken)].sum():
        taken = better
    return taken | {int(place) for place in np.flatnonzero(must)}


def _best_within(weights: Array, values: Array, room: float) -> tuple[int, ...]:
    """The places whose weights together are within `room` and whose values together are the most:
    of all sets those that another one beats in both are forgotten (Nemhauser and Ullmann 1969)."""
    sets: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for place, (weight, value) in enumerate(zip(weights, values, strict=True)):
        more = [(w + weight, v + value, (*chosen, place)) for w, v, chosen in sets]
        fitting = sorted((each for each in sets + more if each[0] <= room),
                         key=lambda each: (each[0], -each[1]))  # fmt: skip
        sets, most = [], -math.inf
        for each in fitting:
            if each[1] > most:
                most = each[1]
                sets.append(each)
        sets = sets[-MOST_KEPT:]
    return max(sets, key=lambda each: each[1])[2]


def _sums(values: Array) -> Array:
    total = np.concatenate([[0.0], np.cumsum(values)])
    found: Array = total[None, :] - total[:, None]
    return found


def _largest(values: Array, of_none: float = 0.0) -> Array:
    count = len(values)
    found = np.full((count + 1, count + 1), of_none)
    upper = np.where(np.tri(count, dtype=bool).T, values[None, :], of_none)
    np.maximum.accumulate(upper, 1, out=found[:-1, 1:])
    return found
