"""L-BFGS and its line searches: where the hub moves the base, from a batch's loss and gradient.

Pure: numbers and float32 vectors in and out; no socket, no clock, no member, no slice. Vectors are
kept in float32, the recursion and all dot products are in float64, in one order: the same inputs
give the same bits.

What is decided depends on numbers alone: the loss, and products of the vectors with each other. So
a search may have a stretch of the vectors, as several hubs do: `products` gives its share of these
numbers, `joined` adds the shares up, and every hub's `move` decides the same by the sum.

====================  ==========================================  ================================
phase                 what is asked for at the base               what `move` does
====================  ==========================================  ================================
at rest               loss and gradient                           a new direction, its first trial
trial                 loss, and gradient if it is the first       the next trial, or it is taken
over                  nothing: the gradient is as good as zero    nothing
====================  ==========================================  ================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import BadMessage
from edgetrain.vectors.vector import Vector, tiles

LEAST_GRADIENT = 1e-7
"""Largest element of a gradient that counts as zero."""

LEAST_CHANGE = 1e-9
"""Slopes, and widths of brackets, that are too small to go on with."""

ENOUGH = 1e-4
"""Share of the slope by which a step has to lower the loss (Armijo)."""

FLATTER = 0.9
"""Share of the slope that may be left at a step (strong Wolfe)."""

MOST_TRIALS = 25
"""Trials of a line search."""

UNUSABLE = 1e300
"""A loss that is this large or no finite number: there the line search turns back."""

Phase = Literal["at rest", "trial", "over"]
_PHASES: tuple[Phase, ...] = ("at rest", "trial", "over")


class Tried(NamedTuple):
    """A point of a line: its distance in lengths of the direction, the loss and its slope there."""

    t: float
    loss: float
    slope: float


LineSearch = Generator[float, tuple[float, float], float]
"""Yields the steps to try, is sent (loss, slope) of each, returns the step to take; 0.0: none is
good enough."""


def armijo(start: Tried, first: float, scale: float) -> LineSearch:
    """Backtrack until the loss has fallen by ENOUGH of what the slope promises: by the minimum of
    the parabola through what is known, within 0.1 to 0.5 of the last step. Needs no slopes.

    Nocedal and Wright, Numerical Optimization, 2006, algorithm 3.1 and equation 3.58.
    """
    t = first
    for _ in range(MOST_TRIALS):
        loss, _ = yield t
        if loss <= start.loss + ENOUGH * t * start.slope:
            return t
        bend = loss - start.loss - t * start.slope
        least = -start.slope * t * t / (2 * bend) if bend > 0 else 0.5 * t
        t = min(max(least, 0.1 * t), 0.5 * t)
    return 0.0


def strong_wolfe(start: Tried, first: float, scale: float) -> LineSearch:
    """A step that lowers the loss enough, and has at most FLATTER of the slope left; `scale`: the
    largest element of the direction.

    Nocedal and Wright, 2006, algorithms 3.5 and 3.6, with cubic interpolation (3.59). The guards
    are those of torch.optim.LBFGS, so that both take the same steps: beyond the last step by 1 % to
    ten times, and a tenth of the bracket away from its ends if it does not shrink. A loss that is
    not usable halves the bracket.
    """
    before, t, trials = start, first, 0
    while True:
        here = Tried(t, *(yield t))
        if here.loss > start.loss + ENOUGH * t * start.slope or (
            trials > 1 and here.loss >= before.loss
        ):
            return (yield from _zoom(start, before, here, trials, scale))
        if abs(here.slope) <= -FLATTER * start.slope:
            return t
        if here.slope >= 0:
            return (yield from _zoom(start, before, here, trials, scale))
        trials += 1
        if trials == MOST_TRIALS:
            return t
        t = _cubic(before, here, t + 0.01 * (t - before.t), 10 * t)
        before = here


def _zoom(start: Tried, left: Tried, right: Tried, trials: int, scale: float) -> LineSearch:
    """The part of `strong_wolfe` between two points that have what is looked for between them."""
    low, high = (left, right) if left.loss <= right.loss else (right, left)
    was_slow = False
    while trials < MOST_TRIALS and abs(high.t - low.t) * scale >= LEAST_CHANGE:
        least, most = min(low.t, high.t), max(low.t, high.t)
        t = _cubic(low, high, least, most)
        margin = 0.1 * (most - least)
        is_slow = min(most - t, t - least) < margin
        if is_slow and (was_slow or not least < t < most):
            t = most - margin if abs(t - most) < abs(t - least) else least + margin
            is_slow = False
        was_slow = is_slow
        here = Tried(t, *(yield t))
        trials += 1
        if here.loss > start.loss + ENOUGH * t * start.slope or here.loss >= low.loss:
            low, high = (low, here) if low.loss <= here.loss else (here, low)
            continue
        if abs(here.slope) <= -FLATTER * start.slope:
            return t
        if here.slope * (high.t - low.t) >= 0:
            high = low
        low = here
    return low.t


def _cubic(one: Tried, other: Tried, least: float, most: float) -> float:
    """The minimum of the cubic through two points, within bounds; their middle if it has none."""
    left, right = (one, other) if one.t <= other.t else (other, one)
    if max(left.loss, right.loss) >= UNUSABLE or left.t == right.t:
        return (least + most) / 2
    width = right.t - left.t
    inner = left.slope + right.slope - 3 * (left.loss - right.loss) / (left.t - right.t)
    square = inner * inner - left.slope * right.slope
    if square < 0:
        return (least + most) / 2
    root = math.sqrt(square)
    below = right.slope - left.slope + 2 * root
    if not below:
        return (least + most) / 2
    return min(max(right.t - width * (right.slope + root - inner) / below, least), most)


SEARCHES: Mapping[str, Callable[[Tried, float, float], LineSearch]] = {
    "armijo": armijo,
    "wolfe": strong_wolfe,
}


def dot(one: Vector, other: NDArray[Any]) -> float:
    """The dot product of two vectors, in float64."""
    return math.fsum(
        float(np.add.reduce(np.multiply(one[here], other[here], dtype=np.float64)))
        for here in tiles(one.size)
    )


Numbers = NDArray[np.float64]

Dot = Callable[[Any, Any], float]


def direction(gradient: NDArray[Any], pairs: Sequence[tuple[Any, Any]], dot: Dot = dot) -> Numbers:
    """Minus the inverse Hessian, as (s, y) `pairs` tell it, oldest first, times the gradient: the
    two-loop recursion, of whatever has this `dot` product.

    Nocedal and Wright, 2006, algorithm 7.4 with (7.20): the first guess is (y s) / (y y) of the
    newest pair.
    """
    q = gradient.astype(np.float64)
    alphas = []
    for s, y in reversed(pairs):
        alphas.append(dot(s, q) / dot(s, y))
        q -= np.multiply(y, alphas[-1], dtype=np.float64)
    if pairs:
        s, y = pairs[-1]
        q *= dot(s, y) / dot(y, y)
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        q += np.multiply(s, alpha - dot(y, q) / dot(s, y), dtype=np.float64)
    np.negative(q, out=q)
    return q


def joined(shares: Sequence[Numbers]) -> Numbers:
    """The loss and the products of whole vectors, from those of their stretches, in order; the loss
    as the first has it."""
    whole: Numbers = np.sum(shares, axis=0)
    whole[0] = shares[0][0]
    sizes = slice(1, 1 + _SIZES, 2)
    whole[sizes] = np.max([share[sizes] for share in shares], axis=0)
    return whole


_SIZES = 3
"""The first of the products: the largest element of the gradient, the sum of all of them, and the
largest element of the direction, without signs. Then the dot products of all rows with all."""


class _Rows:
    """The vectors that a move depends on, of a hub's stretch: s of all pairs, y of all pairs, the
    gradient and, on a line, what would be the next pair and the direction. And what is known of the
    whole ones: `products`, or, where the stretch is all there is, what can be seen here."""

    def __init__(
        self, rows: Sequence[Vector], pairs: int, summed_in: type, products: Numbers | None
    ) -> None:
        self.rows, self.gradient, self._summed_in = rows, 2 * pairs, summed_in
        self.s, self.y, self.d = range(self.gradient + 1, self.gradient + 4)
        self._sizes = None if products is None else products[:_SIZES]
        self._dots = None if products is None else products[_SIZES:].reshape(len(rows), len(rows))

    def dot(self, one: int, other: int) -> float:
        if self._dots is None:
            return dot(self.rows[one], self.rows[other])
        return float(self._dots[one, other])

    @property
    def sizes(self) -> Numbers:
        if self._sizes is not None:
            return self._sizes
        gradient, d = self.rows[self.gradient], self.rows[self.d :]
        length = math.fsum(
            float(np.abs(gradient[here]).sum(dtype=self._summed_in))
            for here in tiles(gradient.size)
        )
        return np.array([_largest(gradient), length, _largest(d[0]) if d else 0.0])

    def products(self) -> Numbers:
        """This stretch's share of the products of whole vectors."""
        dots = np.zeros((len(self.rows), len(self.rows)))
        for here in tiles(self.rows[0].size):
            block = np.array([row[here] for row in self.rows], np.float64)
            dots += block @ block.T
        return np.concatenate([self.sizes, dots.ravel()])

    def direction(self, pairs: Sequence[tuple[int, int]]) -> tuple[Vector, float]:
        """The direction by these pairs, and the slope along it."""
        if self._dots is None:
            each = [(self.rows[s], self.rows[y]) for s, y in pairs]
            d = direction(self.rows[self.gradient], each).astype(np.float32)
            return d, dot(self.rows[self.gradient], d)
        units, dots = np.eye(len(self.rows)), self._dots
        factors = direction(
            units[self.gradient],
            [(units[s], units[y]) for s, y in pairs],
            lambda one, other: float(one @ dots @ other),
        )
        found = np.zeros(self.rows[0].size)
        for factor, row in zip(factors, self.rows, strict=True):
            found += np.multiply(row, factor, dtype=np.float64)
        return found.astype(np.float32), float(factors @ dots[self.gradient])


def _largest(vector: Vector) -> float:
    return float(np.abs(vector).max(initial=0.0))


class Lbfgs:
    """Moves a base downhill. Give `move` what `wants_gradient` asks for at the base as it is, add
    what it returns to the base, and so on.

    Sandblaster L-BFGS (Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.2),
    whose parameter servers have a range of the vectors each. They answer the coordinator's dot
    products one after the other; here the products of all vectors are known at once, as in Chen et
    al., Large-scale L-BFGS using MapReduce, NIPS 2014.
    A first trial is asked for with its gradient, since it is nearly always the one that is taken;
    with `armijo` the next ones are asked for by their losses alone, until one is good enough.
    """

    def __init__(self, history: int, search: str) -> None:
        self.history, self.search = history, search
        self.summed_in: type = np.float32
        """What a gradient's length is summed up in. float64 where the vector has ranges: then it
        does not depend on how many hubs share them."""
        self.remarks: list[str] = []
        """Remarks on the last move, for people."""
        self.start(0)

    def start(self, elements: int) -> None:
        self._pairs: list[tuple[Vector, Vector]] = []
        self.phase: Phase = "at rest"
        self.t = 0.0
        """Position of the base on the line, in lengths of the direction."""
        self.iterations = 0
        """Steps that were taken."""
        self.told: Numbers = np.zeros(0)
        """Inputs of the last move: the loss, and the products if given."""
        self.offered: Vector | None = None
        """The gradient that the next move is by, whose products other stretches may have."""
        self._first = 0.0
        self._vectors: dict[str, Vector] = {}
        """x, g and d: the line begins at x, with gradient g, and leads along d."""
        self._sizes = (0.0, 0.0, 0.0)
        """Sizes of g: the largest element and the sum of all, without signs, and the square."""
        self._start = Tried(0.0, 0.0, 0.0)
        self._trials: list[Tried] = []

    @property
    def wants_gradient(self) -> bool:
        """Whether `move` needs the gradient at the base as it is; else the loss is enough."""
        is_first = self.phase == "trial" and not self._trials
        has_slopes = self.phase != "over" and self.search == "wolfe"
        return self.phase == "at rest" or is_first or has_slopes

    @property
    def products_count(self) -> int:
        """The length of `products` at the base as it is."""
        return _SIZES + (2 * len(self._pairs) + 1 + 3 * ("x" in self._vectors)) ** 2

    def products(self, base: Vector, gradient: Vector) -> Numbers:
        """Products of a stretch, after the loss: the input of `joined`, if `wants_gradient`."""
        return self._rows(base, gradient).products()

    def _rows(self, base: Vector, gradient: Vector, products: Numbers | None = None) -> _Rows:
        rows = [s for s, _ in self._pairs] + [y for _, y in self._pairs] + [gradient]
        if "x" in self._vectors:
            known = self._vectors
            rows += [base - known["x"], gradient - known["g"], known["d"]]
        return _Rows(rows, len(self._pairs), self.summed_in, products)

    def move(
        self,
        base: Vector,
        loss: float,
        gradient: Vector | None,
        last: bool,
        products: Numbers | None = None,
    ) -> Vector:
        """What is to be added to the base, whose mean loss and gradient over the batch these are.
        `last`: it is not looked at again, and goes to the best point known. `products`: with a
        gradient, those of the whole vectors; None: these are the whole ones."""
        self.remarks, self.offered = [], None
        self.told = np.array([loss, *(() if products is None else products)])
        if self.phase == "over" or (self.phase == "at rest" and last):
            return np.zeros_like(base)
        rows = None if gradient is None else self._rows(base, gradient, products)
        if self.phase == "at rest":
            assert rows is not None
            return self._begin_line(base, loss, rows)
        slope = 0.0 if rows is None else rows.dot(rows.gradient, rows.d)
        self._trials.append(Tried(self.t, loss, slope))
        if last:
            best = min([self._start, *self._trials], key=lambda point: point.loss)
            return self._to(base, best.t)
        t, is_taken = self._next_trial(0.0 if rows is None else float(rows.sizes[2]))
        if not is_taken:
            return self._to(base, t)
        if t == 0.0:
            # No step along the direction was good enough: take the gradient alone, or end
            if not self._pairs:
                self.remarks.append("no step lowers the loss any further: the base stays")
                self.phase = "over"
                return self._to(base, 0.0)
            self.remarks.append("no step of this direction lowers the loss: the history is dropped")
            self._pairs = []
            return self._along(base, -self._vectors["g"], -self._sizes[2])
        if t == self.t and rows is not None:
            return self._begin_line(base, loss, rows)
        self.phase = "at rest"
        return np.zeros_like(base) if t == self.t else self._to(base, t)

    def _next_trial(self, scale: float) -> tuple[float, bool]:
        """Where the line search goes after its trials so far, and whether it ends there."""
        line = SEARCHES[self.search](self._start, self._first, scale)
        t = next(line)
        try:
            for point in self._trials:
                t = line.send((point.loss, point.slope))
        except StopIteration as end:
            return float(end.value), True
        return t, False

    def _begin_line(self, base: Vector, loss: float, rows: _Rows) -> Vector:
        """The base is a point that was accepted: its first trial of a new direction."""
        count = len(self._pairs)
        pairs = [(each, count + each) for each in range(count)]
        if "x" in self._vectors:
            # Whether a pair with this y s is remembered
            curvature = rows.dot(rows.s, rows.y)
            is_of_use = curvature > 0 and math.isfinite(curvature)
            if not is_of_use:
                self.remarks.append(
                    f"a pair of the history is skipped: y s = {curvature:.3g}, not above 0"
                )
            if is_of_use:
                pairs = [*pairs, (rows.s, rows.y)][-self.history :]
                self._pairs = [(rows.rows[s], rows.rows[y]) for s, y in pairs]
            self.iterations += 1
        if loss >= UNUSABLE:
            self.remarks.append("the loss at the start is no finite number: nothing moves")
            self.phase = "over"
            return np.zeros_like(base)
        self._vectors = {"x": base.copy(), "g": rows.rows[rows.gradient].copy()}
        largest, length, _ = map(float, rows.sizes)
        self._sizes = largest, length, rows.dot(rows.gradient, rows.gradient)
        self._start = Tried(0.0, loss, 0.0)
        return self._along(base, *rows.direction(pairs))

    def _along(self, base: Vector, d: Vector, slope: float) -> Vector:
        """The first trial along `d`, from the point where the line begins."""
        largest, length, _ = self._sizes
        self._start, self._trials = self._start._replace(slope=slope), []
        self._vectors["d"] = d
        if largest <= LEAST_GRADIENT or slope > -LEAST_CHANGE:
            self.remarks.append("the gradient is as good as zero: the base stays")
            self.phase = "over"
            return self._to(base, 0.0)
        self._first = 1.0 if self._pairs else min(1.0, 1.0 / length)
        self.phase = "trial"
        return self._to(base, self._first)

    def _to(self, base: Vector, t: float) -> Vector:
        """What leads from the base to the point `t` of the line."""
        self.t = t
        step = self._vectors["d"] * np.float32(t)
        step += self._vectors["x"]
        step -= base
        return step

    # -- what survives a restart ---------------------------------------------------------------

    def state(self) -> Mapping[str, NDArray[Any]]:
        """All that it remembers: views, valid until the next move."""
        numbers = [
            float(_PHASES.index(self.phase)), self.t, float(self.iterations), self._first,
            *self._sizes, *self._start, *(number for point in self._trials for number in point),
        ]  # fmt: skip
        pairs = {f"s{i}": s for i, (s, _) in enumerate(self._pairs)}
        pairs |= {f"y{i}": y for i, (_, y) in enumerate(self._pairs)}
        offered = {} if self.offered is None else {"offered": self.offered}
        found = {"numbers": np.array(numbers), "told": self.told, **self._vectors, **pairs}
        return {**found, **offered}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Remember exactly this, which an equal rule gave as its `state`. Copies the vectors.
        BadMessage for what it cannot have given."""
        try:
            phase, self.t, iterations, self._first, *points = map(float, state["numbers"])
            self.phase, self.iterations = _PHASES[int(phase)], int(iterations)
            self._sizes, self._start, *self._trials = (
                Tried(*points[i : i + 3]) for i in range(0, len(points), 3)
            )
            self.told = state["told"].copy()
            self.offered = state["offered"].copy() if "offered" in state else None
            names = "xgd" if self.phase == "trial" else [name for name in "xgd" if name in state]
            self._vectors = {name: state[name].copy() for name in names}
            count = sum(name.startswith("s") for name in state)
            self._pairs = [(state[f"s{i}"].copy(), state[f"y{i}"].copy()) for i in range(count)]
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise BadMessage(f"the state of L-BFGS cannot be read: {error!r}") from None
