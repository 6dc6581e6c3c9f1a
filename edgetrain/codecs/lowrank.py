"""Low-rank codecs for matrices: `low-rank`, one trip a member, and PowerSGD proper, two trips.

A tensor is treated as the matrix of its first dimension by all others. Payloads must decode to the
same bits on all machines, so decoding sums products in a fixed order, not with BLAS; only values
that one member computes for itself use BLAS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgetrain.codecs.base import TILE, Codec, add_scaled, as_bytes, check_vector
from edgetrain.codecs.dense import Dense
from edgetrain.codecs.fixed import Ranged, whole_seed
from edgetrain.codecs.kernels import wire
from edgetrain.codecs.kernels.contract import LIMIT, Bytes
from edgetrain.codecs.kernels.wire import hash32
from edgetrain.codecs.rules import Bound, Unbound, check_layout
from edgetrain.errors import ConfigError
from edgetrain.vectors.vector import Buffer, Layout, Vector, zeros

FACTOR_CODECS = ("fp32", "fp16", "bf16")
"""Codecs with relative precision in each number; with coarser ones feedback diverges."""


@dataclass(frozen=True)
class Matrix:
    """A tensor sent as two factors of `rank` columns: rows x columns elements from `start` on."""

    start: int
    rows: int
    columns: int
    rank: int

    def view(self, vector: Vector) -> Vector:
        stop = self.start + self.rows * self.columns
        return vector[self.start : stop].reshape(self.rows, self.columns)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.rows * self.rank, self.columns * self.rank


@dataclass(frozen=True)
class Shapes:
    """Tensors that are sent as factors, and the [start, stop) ranges sent as they are."""

    elements: int
    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...]

    @property
    def left_size(self) -> int:
        return sum(m.sizes[0] for m in self.matrices) + sum(b - a for a, b in self.rest)

    @property
    def right_size(self) -> int:
        return sum(m.sizes[1] for m in self.matrices)


def shapes_for(layout: Layout, rank: int) -> Shapes:
    """Factor every tensor of two or more dimensions where the factors are smaller than it."""
    if not 1 <= rank <= 64:
        raise ConfigError(f"low-rank takes a rank of 1 to 64, not {rank}")
    check_layout(layout)
    matrices, rest, at = [], [], 0
    for _, start, shape in layout:
        size = math.prod(shape)
        at = start + size
        rows = shape[0] if shape else 1
        columns = size // rows if rows else 0
        if len(shape) >= 2 and rank * (rows + columns) < size:
            matrices.append(Matrix(start, rows, columns, rank))
        elif size:
            rest.append((start, at))
    return Shapes(at, tuple(matrices), tuple(rest))


class LowRank(Unbound):
    """PowerSGD's factors in one trip: each member's own P and Q, with P orthonormal.

        P = orthonormal(M Q0);  Q = M^T P;  decoded = P Q^T      `iterations` times, Q0 fresh noise

    Stateless, so there is no warm start; feedback and a second iteration make up for it. Q0 follows
    from the vector: with the same noise again and again feedback would never send what it misses,
    since what is left of M is at right angles to Q0. `values`
    codes the factors: fp32, fp16 or bf16. Bound: ||M - decoded|| <= ||M|| for each matrix (a
    projection), up to the bound of `values`; small tensors are within the bound of `values`.
    Not PowerSGD proper, which averages P before Q is computed (Vogels 2019): see `PowerSGD`.
    """

    def __init__(self, rank: int, values: Ranged | None = None, iterations: int = 1) -> None:
        if not 1 <= rank <= 64 or not 1 <= iterations <= 8:
            raise ConfigError(
                f"low-rank takes a rank of 1 to 64 and 1 to 8 iterations, not {rank}, {iterations}"
            )
        if values is not None and values.name not in FACTOR_CODECS:
            raise ConfigError(
                f"low-rank cannot code its factors as '{values.name}'",
                f"an error in one is multiplied by the other: use {', '.join(FACTOR_CODECS)}",
            )
        self.rank = rank
        self.iterations = iterations
        self.values = values or Dense()
        options = f"{rank}, {iterations}" if iterations > 1 else f"{rank}"
        tail = "" if self.values.name == "fp32" else f" | {self.values.name}"
        self.name = f"low-rank({options}){tail}"

    def bind(self, layout: Layout) -> Codec:
        return BoundLowRank(self, shapes_for(layout, self.rank))


@dataclass(frozen=True)
class _Numbers:
    """The numbers of a checked payload, decoded some at a time. FACTOR_CODECS have no blocks."""

    codec: Ranged
    payload: Bytes
    count: int

    def copy_to(self, out: Vector, first: int, weight: float | None = None) -> None:
        self.codec.read(self.payload, self.count, first, out, weight)

    def largest(self, start: int, stop: int) -> float:
        """The largest magnitude in [start, stop); NaN if any is NaN, 0 if the range is empty."""
        top = np.float32(0)
        for first in range(start, stop, TILE):
            values = np.empty(min(stop - first, TILE), np.float32)
            self.copy_to(values, first)
            top = np.maximum(top, np.abs(values).max())
        return float(top)

    def multiply(self, matrix: Matrix, at: int, weight: float | None, out: Vector) -> None:
        """out [rows, columns] = P Q^T, or += weight * that, P being at `at` and Q behind it."""
        wide = min(matrix.columns, 2048, 2 * TILE // matrix.rank)
        high = min(matrix.rows, 2 * TILE // wide)
        lefts = np.empty((matrix.rank, high), np.float32)
        rights = np.empty((matrix.rank, wide), np.float32)
        for column in range(0, matrix.columns, wide):
            q = rights[:, : matrix.columns - column]
            for j in range(matrix.rank):
                self.copy_to(q[j], at + matrix.sizes[0] + j * matrix.columns + column)
            for row in range(0, matrix.rows, high):
                p = lefts[:, : matrix.rows - row]
                for j in range(matrix.rank):
                    self.copy_to(p[j], at + j * matrix.rows + row)
                here = out[row : row + high, column : column + wide]
                if weight is None:
                    product(p, q, here)
                else:
                    tile = np.empty(here.shape, np.float32)
                    product(p, q, tile)
                    tile *= np.float32(weight)
                    here += tile


class BoundLowRank(Bound):
    """`LowRank` for vectors of one layout.

    Wire: for each matrix P (columns one after the other), then Q the same way; then the other
    tensors; all of it as one vector under `values`.
    """

    def __init__(self, codec: LowRank, shapes: Shapes) -> None:
        self.name = codec.name
        self.part_elements = shapes.elements
        self._codec = codec
        self._shapes = shapes
        self._numbers = shapes.left_size + shapes.right_size

    def encode(self, vector: Vector, salt: int = 0) -> list[Buffer]:
        check_vector(vector)
        self._check_size(vector.size)
        if not np.all(np.abs(vector) < LIMIT):
            raise wire.too_large()
        pieces, seed = [], whole_seed(vector, salt)
        for number, matrix in enumerate(self._shapes.matrices):
            q = start_of(matrix, number, seed)
            pieces += [side.T.reshape(-1) for side in self._factors(matrix, vector, q)]
        pieces += [vector[start:stop] for start, stop in self._shapes.rest]
        return [self._codec.values.encode_part(np.concatenate(pieces))]

    def check(self, payload: Buffer, elements: int) -> None:
        self._check_size(elements)
        values, at = self._codec.values, 0
        values.check(payload, self._numbers)
        numbers = _Numbers(values, as_bytes(payload), self._numbers)
        for matrix in self._shapes.matrices:
            left, right = matrix.sizes
            p, q = numbers.largest(at, at + left), numbers.largest(at + left, at + left + right)
            # Written so that a NaN is refused too.
            if not matrix.rank * p * q < 2 * LIMIT**1.1:
                raise wire.bad(wire.MAGNITUDE)
            at += left + right
        if not numbers.largest(at, self._numbers) < 2 * LIMIT:
            raise wire.bad(wire.MAGNITUDE)

    def apply(self, payload: Buffer, weight: float | None, out: Vector) -> None:
        numbers, at = _Numbers(self._codec.values, as_bytes(payload), self._numbers), 0
        for matrix in self._shapes.matrices:
            numbers.multiply(matrix, at, weight, matrix.view(out))
            at += sum(matrix.sizes)
        for start, stop in self._shapes.rest:
            numbers.copy_to(out[start:stop], at, weight)
            at += stop - start

    def max_bytes(self, elements: int) -> int:
        self._check_size(elements)
        return self._codec.values.max_bytes(self._numbers)

    def _factors(self, matrix: Matrix, vector: Vector, q: Vector) -> tuple[Vector, Vector]:
        m = matrix.view(vector)
        for _ in range(self._codec.iterations):
            # Only the directions of q matter here; scaled, no product of large numbers overflows.
            p = np.linalg.qr(m @ (q / max(float(np.abs(q).max()), 1e-30)))[0].astype(np.float32)
            q = m.T @ p
        return p, q


class TwoTrips(Unbound):
    """`powersgd(r)`: the payloads of each of the two trips of `PowerSGD`, which `factors` makes.

    The vectors of both trips are shorter than the model's and are padded with zeros, which are
    not sent. Lossless, since the residual is kept by `PowerSGD`, not by the codec.
    """

    lossless = True
    sums_only = True
    two_trips = True
    gradients_only = whole = True

    def __init__(self, rank: int) -> None:
        if not 1 <= rank <= 64:
            raise ConfigError(f"powersgd takes a rank of 1 to 64, not {rank}")
        self.rank = rank
        self.name = f"powersgd({rank})"

    def for_displacements(self) -> LowRank:
        return LowRank(self.rank)

    def bind(self, layout: Layout) -> Codec:
        return BoundTwoTrips(self, layout)


class BoundTwoTrips(Codec):
    """`TwoTrips` for vectors of one layout.

    Wire: as fp32, without the elements at the end whose bits are all zero.
    """

    lossless = True
    sums_only = True
    two_trips = True
    gradients_only = True

    def __init__(self, codec: TwoTrips, layout: Layout) -> None:
        check_layout(layout)
        self.name = codec.name
        self._rank = codec.rank
        self._layout = layout

    def for_displacements(self) -> Codec:
        return LowRank(self._rank).bind(self._layout)

    def factors(self) -> PowerSGD:
        """A member's half of the two trips, with a residual of zero."""
        return PowerSGD(self._layout, self._rank)

    def encode_part(self, part: Vector, salt: int = 0) -> Buffer:
        check_vector(part)
        filled = np.flatnonzero(part.view(np.uint32))
        return part[: int(filled[-1]) + 1 if filled.size else 0].view(np.uint8).data

    def drain(self, residual: Vector, vector: Vector, salt: int = 0) -> list[Buffer]:
        """Sends residual + vector whole; the residual becomes zero."""
        total = residual + vector
        residual[:] = 0
        return self.encode(total)

    def check(self, payload: Buffer, elements: int) -> None:
        content = as_bytes(payload)
        if content.size % 4 or content.size > 4 * elements:
            raise wire.bad(wire.COUNT)
        if content.size and not content[-4:].any():
            raise wire.bad(wire.TRAILING)

    def apply(self, payload: Buffer, weight: float | None, out: Vector) -> None:
        values = np.frombuffer(payload, "<f4")
        if weight is None:
            out[: values.size] = values
            out[values.size :] = 0
        else:
            add_scaled(values, weight, out[: values.size])

    def max_bytes(self, elements: int) -> int:
        return 4 * elements


class PowerSGD:
    """PowerSGD proper (Vogels, Karimireddy, Jaggi 2019, algorithm 1): two dependent means a step.

        delta = gradient + residual
        left(gradient)    -> P = delta Q                                   mean over the members
        right(mean P)     -> P' = orthonormal(mean P);  Q = delta^T P'      mean over the members
        finish(mean Q)    -> gradient = P' (mean Q)^T;  residual = delta - P' Q^T

    Vectors in and out are flat float32; tensors that are not factored are sent whole with P.
    Laws: mean(gradient + residual before) == result + mean(residual after), to rounding; the
    result has the same bits on every member. Q starts each step where the last one ended (warm
    start), at first and in place of columns of zeros with the same noise on every member. One
    thread; the calls go in this order.
    Difference to the paper: the residual is computed with this member's own Q, so that it is
    what this member has not sent; the sums over members are the same.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._shapes = shapes_for(layout, rank)
        self._starts = [start_of(m, i) for i, m in enumerate(self._shapes.matrices)]
        self._lefts: list[Vector] = []
        self._rights: list[Vector] = []
        self._rest: Vector = zeros(0)
        self.residual: Vector = zeros(self._shapes.elements)
        """gradient parts not sent yet [elements]; between `left` and `finish` it holds delta"""

    @property
    def left_elements(self) -> int:
        return self._shapes.left_size

    @property
    def right_elements(self) -> int:
        return self._shapes.right_size

    def state(self) -> dict[str, Vector]:
        """The arrays of a checkpoint between two steps, as views: write them before the next."""
        starts = {f"start {i}": start for i, start in enumerate(self._starts)}
        return {"residual": self.residual, **starts}

    def restore(self, state: Mapping[str, Vector]) -> None:
        """Copy the arrays of a `state`. ConfigError, and no change, if they do not fit."""
        mine = self.state()
        for name, array in mine.items():
            if name not in state or state[name].shape != array.shape:
                raise ConfigError(f"the checkpoint of PowerSGD lacks '{name}' {array.shape}")
        self.residual[:] = state["residual"]
        self._starts = [state[f"start {i}"].copy() for i in range(len(self._starts))]

    def left(self, gradient: Vector) -> Vector:
        """The first contribution [left_elements]: each matrix's P, then the other tensors."""
        check_vector(gradient)
        if gradient.size != self._shapes.elements:
            raise ConfigError(
                f"PowerSGD keeps {self._shapes.elements} elements, not {gradient.size}"
            )
        self.residual += gradient
        pieces = [
            (m.view(self.residual) @ self._start(m, i)).T.reshape(-1)
            for i, m in enumerate(self._shapes.matrices)
        ]
        for start, stop in self._shapes.rest:
            pieces.append(self.residual[start:stop].copy())
            self.residual[start:stop] = 0
        return np.concatenate(pieces)

    def _start(self, matrix: Matrix, number: int) -> Vector:
        """Q to start with: where the last step ended, each column scaled by a power of two, so that
        no product with it vanishes or overflows. A column of zeros, from a gradient that had fewer
        directions than there are columns, would stay one for ever: noise takes its place."""
        ended = self._starts[number]
        largest = np.abs(ended).max(axis=0)
        noise = start_of(matrix, number, whole_seed(ended.reshape(-1)))
        return np.where(largest, np.ldexp(ended, -np.frexp(largest)[1]), noise)

    def right(self, mean_left: Vector) -> Vector:
        """The second contribution [right_elements], from the mean of all first ones."""
        self._lefts, self._rights, at = [], [], 0
        for matrix in self._shapes.matrices:
            size = matrix.sizes[0]
            columns = mean_left[at : at + size].reshape(matrix.rank, matrix.rows)
            self._lefts.append(orthonormal(columns))
            at += size
        self._rest = mean_left[at:].copy()
        for matrix, p in zip(self._shapes.matrices, self._lefts, strict=True):
            self._rights.append((matrix.view(self.residual).T @ p.T).T)
        if not self._rights:
            return zeros(0)
        return np.concatenate([q.reshape(-1) for q in self._rights]).astype(np.float32)

    def finish(self, mean_right: Vector, out: Vector) -> None:
        """Write the merged gradient to `out` [elements]; the residual keeps what was not sent."""
        at = 0
        for i, matrix in enumerate(self._shapes.matrices):
            size = matrix.sizes[1]
            mean = mean_right[at : at + size].reshape(matrix.rank, matrix.columns)
            product(self._lefts[i], mean, matrix.view(out))
            kept = matrix.view(self.residual)
            kept -= self._lefts[i].T @ self._rights[i]
            self._starts[i] = mean.T.copy()
            at += size
        at = 0
        for start, stop in self._shapes.rest:
            out[start:stop] = self._rest[at : at + stop - start]
            at += stop - start


def start_of(matrix: Matrix, number: int, seed: int = 0) -> Vector:
    """[columns, rank] uniform noise in (-1, 1), the same on every machine for one `seed`."""
    place = np.arange(matrix.columns * matrix.rank, dtype=np.uint32)
    bits = hash32(place ^ hash32(np.array([number + 1], np.uint32) ^ np.uint32(seed)))
    noise = (bits >> np.uint32(8)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
    return noise.reshape(matrix.columns, matrix.rank)


def product(left: Vector, right: Vector, out: Vector) -> None:
    """out [rows, columns] = sum over j of left[j] x right[j], added in the order of j."""
    np.multiply.outer(left[0], right[0], out=out)
    for p, q in zip(left[1:], right[1:], strict=True):
        out += np.multiply.outer(p, q)


def orthonormal(columns: Vector) -> Vector:
    """Gram-Schmidt of `columns` [rank, rows], same bits everywhere; dependent ones become 0."""
    result: list[npt.NDArray[np.float64]] = []
    for column in columns.astype(np.float64):
        before = _dot(column, column)
        rest = column
        for _ in range(2):
            for done in result:
                rest = rest - _dot(done, rest) * done
        square = _dot(rest, rest)
        independent = square > 1e-10 * before and square > 1e-60
        result.append(rest / math.sqrt(square) if independent else np.zeros_like(rest))
    return np.array(result, np.float32)


def _dot(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """The sum of a * b, added pairwise by halves: the same order with every BLAS."""
    terms = np.zeros(1 << max(a.size - 1, 0).bit_length(), np.float64)
    terms[: a.size] = a * b
    while terms.size > 1:
        half = terms.size // 2
        terms = terms[:half] + terms[half:]
    return float(terms[0])
