"""kernels.c through ctypes: no Python ABI, so one library serves every Python on an architecture.

This module finds and loads the library; compiler.py compiles it. Imported by chosen.py only.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edgetrain.codecs.kernels import compiler, wire
from edgetrain.codecs.kernels.contract import (
    CHUNK,
    ENTRIES,
    LEVEL_BLOCK,
    SIGN_BLOCK,
    Blocks,
    Bytes,
    Indices,
)
from edgetrain.vectors.vector import Vector

INSTRUCTION_SETS = ["portable", "avx2", "avx512", "neon"]

PACKAGED = Path(__file__).with_name("_kernels.so")

TILE = 2**16
"""Elements of the sum that stay in cache while the entries of all messages are added."""

_I, _F, _P, _N, _U = (
    ctypes.c_int64,
    ctypes.c_float,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
)
_SIGNATURES: dict[str, list[Any]] = {
    "stream_add": [_P, _P, _I],
    "momentum": [_P, _P, _I, _F, _F],
    "select_large": [_P, _P, _I, _U, _P, _P, _I, _N, _P],
    "threshold": [_P, _P, _I, _I, _I, _U, _P, _P],
    "threshold_of": [_P, _P, _I, _I, _P, _P],
    "trim": [_P, _P, _P, _I, _U, _I],
    "gaps_encode": [_P, _I, _I, _P, _P],
    "gaps_size": [],
    "gaps_begin": [_P, _P, _I, _I, _I],
    "gaps_next": [_P, _I, _P],
    "gaps_end": [_P],
    "gaps_decode": [_P, _I, _I, _I, _P],
    "levels_encode": [_P, _I, _F, _N, _P, _P],
    "levels_check": [_P, _I, _I, _N],
    "levels_read": [_P, _I, _I, _I, _N, _N, _F, _P],
    "write_residual": [_P, _P, _P, _P, _I],
    "scatter": [_P, _P, _P, _I],
    "scatter_add": [_P, _P, _P, _I, _F],
    "sparse_encode": [_P, _P, _P, _I, _I, _N, _P, _P],
    "sparse_head": [_P, _I, _I, _P],
    "sparse_decode": [_P, _I, _I, _I, _N, _F, _P, _P],
    "sparse_check": [_P, _I, _I, _N],
    "sparse_apply": [_P, _I, _I, _N, _N, _F, _P],
    "sparse_heads": [_P, _P, _I, _I, _P, _P],
    "sparse_decode_many": [_P, _P, _P, _I, _I, _N, _P, _P, _P, _P],
    "sparse_apply_many": [_P, _P, _P, _I, _I, _N, _P, _P, _N, _P],
    "scatter_tiles": [_P, _I, _P, _P, _P, _P, _I, _I],
    "blocks_encode": [_P, _P, _I, _N, _N, _N, _U, _P, _P],
    "blocks_check": [_P, _P, _I, _N, _N],
    "blocks_decode": [_P, _P, _I, _N, _N, _F, _P],
    "signs_encode": [_P, _I, _P, _P],
    "signs_drain": [_P, _P, _I, _P, _P],
    "signs_check": [_P, _P, _I],
    "signs_decode": [_P, _P, _I, _N, _F, _P],
    "planes_drain": [_P, _P, _I, _N, _P],
    "halves_encode": [_P, _P, _I, _N, _P],
    "halves_decode": [_P, _I, _N, _N, _F, _P],
}


@cache
def load() -> tuple[ctypes.CDLL | None, str, str]:
    """(library or None, its path, why): the packaged one, else one built into the user's cache."""
    problem = ""
    if PACKAGED.exists():
        try:
            return _open(PACKAGED), str(PACKAGED), "built with the package"
        except OSError as error:
            problem = f"the packaged library does not load ({error}); "
    try:
        path = compiler.cached_library()
        return _open(path), str(path), f"{problem}built on first use"
    except (compiler.CannotCompile, OSError) as error:
        return None, "", f"{problem}{error}"


def instruction_sets() -> list[str]:
    """The instruction sets of this machine, slowest first; empty without a library."""
    library, _, _ = load()
    if library is None:
        return []
    vector = ["neon"] if library.kernels_has_neon() else ["avx2", "avx512"]
    return ["portable", *vector][: 1 + library.kernels_best()]


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = _U if name.startswith("threshold") else _I
    return library


def _at(array: np.ndarray[Any, Any] | None) -> int | None:
    return None if array is None else int(array.ctypes.data)


def _checked(result: int) -> int:
    """`result` of a decoder; raises BadPayload if it is negative."""
    if result < 0:
        raise wire.bad(-result)
    return result


def _encoded(result: int) -> None:
    if result < 0:
        raise wire.too_large()


class _Scratch(threading.local):
    """Arrays that each thread keeps between calls: new memory costs a page fault for each 4 KiB.

    They grow to the size of a part; pages beyond the last entry are never touched.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, tuple[np.ndarray[Any, Any], int]] = {}

    def borrow_array(self, name: str, size: int, dtype: Any) -> tuple[np.ndarray[Any, Any], int]:
        """(array of at least `size`, its address)."""
        kept = self._arrays.get(name)
        if kept is None or kept[0].size < size:
            fresh = np.empty(size, dtype)
            kept = self._arrays[name] = (fresh, _at(fresh) or 0)
        return kept


class _Messages:
    """Payloads as C sees them: arrays of addresses, lengths and weights, kept alive together.

    `start` and `head` are for `sparse_heads` to fill, `cursor` is for `scatter_tiles`.
    """

    def __init__(self, payloads: Sequence[Bytes], weights: Sequence[float]) -> None:
        self.number = len(payloads)
        places = bytes(8 * (self.number + 1))
        arrays: tuple[array[Any], ...] = (
            array("Q", [_at(p) or 0 for p in payloads]),
            array("q", [p.size for p in payloads]),
            array("f", weights),
            *(array("q", places) for _ in range(3)),
        )
        self._kept = (payloads, arrays)
        where = [numbers.buffer_info()[0] for numbers in arrays]
        self.addresses, self.lengths, self.weights, self.start, self.head, self.cursor = where


class _Gaps:
    """See `gaps.GapReader`. The state of kernels.c is an array, and points into the payload."""

    def __init__(self, library: ctypes.CDLL, payload: Bytes, count: int, elements: int) -> None:
        self._c, self._payload = library, payload
        self._state = np.empty(-(-library.gaps_size() // 8), np.uint64)
        self._positions = np.empty(min(count, ENTRIES), np.uint32)
        self._where, self._to = _at(self._state), _at(self._positions)
        _checked(library.gaps_begin(self._where, _at(payload), payload.size, count, elements))

    def next_positions(self) -> Indices:
        return self._positions[: _checked(self._c.gaps_next(self._where, ENTRIES, self._to))]

    def finish(self) -> int:
        return _checked(self._c.gaps_end(self._where))


class Native:
    """The kernels in C; `numpy_twin.NumpyTwin` describes each method."""

    name = "c"

    def __init__(self, library: ctypes.CDLL, choice: str) -> None:
        """`choice` is "auto" or one of `instruction_sets()`, for the whole process."""
        known = instruction_sets()
        index = len(known) - 1 if choice == "auto" else known.index(choice)
        self.instructions = known[library.kernels_use(index)]
        self._c = library
        self._scratch = _Scratch()

    def few(self, elements: int) -> int:
        return max(elements // 2, ENTRIES)

    def stream_add(self, r: Vector, g: Vector) -> None:
        self._c.stream_add(_at(r), _at(g), r.size)

    def threshold(
        self, r: Vector, g: Vector | None, rank: int, stride: int, seed: int
    ) -> tuple[int, int]:
        _, scratch = self._scratch.borrow_array("magnitudes", r.size // stride + CHUNK, np.uint32)
        hits = ctypes.c_int64()
        bits = self._c.threshold(
            _at(r), _at(g), r.size, rank, stride, seed, scratch, ctypes.byref(hits)
        )
        return bits, hits.value

    def threshold_of(self, r: Vector, g: Vector | None, rank: int) -> tuple[int, int]:
        _, scratch = self._scratch.borrow_array("magnitudes", r.size, np.uint32)
        hits = ctypes.c_int64()
        bits = self._c.threshold_of(_at(r), _at(g), r.size, rank, scratch, ctypes.byref(hits))
        return bits, hits.value

    def select(
        self, r: Vector, g: Vector | None, bound: int, zero: bool, room: int = 0
    ) -> tuple[Indices, Vector, int]:
        room = room or r.size + 16
        positions, position_at = self._scratch.borrow_array("positions", room, np.uint32)
        values, value_at = self._scratch.borrow_array("values", room, np.float32)
        stopped = ctypes.c_int64()
        count = self._c.select_large(
            _at(r), _at(g), r.size, bound, position_at, value_at, room, zero, ctypes.byref(stopped)
        )
        return positions[:count], values[:count], stopped.value

    def trim(
        self, r: Vector | None, positions: Indices, values: Vector, bound: int, wanted: int
    ) -> tuple[Indices, Vector]:
        kept = self._c.trim(_at(r), _at(positions), _at(values), values.size, bound, wanted)
        return positions[:kept], values[:kept]

    def gaps_encode(self, positions: Indices, elements: int) -> Bytes:
        room = 5 * positions.size + 64
        out = np.empty(room, np.uint8)
        _, low = self._scratch.borrow_array("low", room, np.uint8)
        used = self._c.gaps_encode(_at(positions), positions.size, elements, _at(out), low)
        return out[:used]

    def gaps_decode(self, payload: Bytes, count: int, elements: int) -> tuple[Indices, int]:
        positions = np.empty(max(count, 0), np.uint32)
        used = self._c.gaps_decode(_at(payload), payload.size, count, elements, _at(positions))
        return positions, _checked(used)

    def levels_encode(self, values: Vector, anchor: float, bits: int) -> tuple[Bytes, Vector]:
        blocks, plane = -(-values.size // LEVEL_BLOCK), -(-values.size // 8)
        out = np.empty(4 + 2 * blocks + bits * plane, np.uint8)
        sent = np.empty(values.size, np.float32)
        _encoded(self._c.levels_encode(_at(values), values.size, anchor, bits, _at(out), _at(sent)))
        return out, sent

    def gaps(self, payload: Bytes, count: int, elements: int) -> _Gaps:
        return _Gaps(self._c, payload, count, elements)

    def levels_check(self, payload: Bytes, count: int, bits: int) -> int:
        return _checked(self._c.levels_check(_at(payload), payload.size, count, bits))

    def levels_read(
        self, payload: Bytes, count: int, first: int, bits: int, out: Vector, weight: float | None
    ) -> None:
        how = (bits, 0, 1.0) if weight is None else (bits, 1, weight)
        self._c.levels_read(_at(payload), count, first, first + out.size, *how, _at(out))

    def write_residual(self, r: Vector, positions: Indices, values: Vector, sent: Vector) -> None:
        self._c.write_residual(_at(r), _at(positions), _at(values), _at(sent), positions.size)

    def scatter(self, r: Vector, positions: Indices, values: Vector, weight: float | None) -> None:
        arrays = (_at(r), _at(positions), _at(values), positions.size)
        if weight is None:
            self._c.scatter(*arrays)
        else:
            self._c.scatter_add(*arrays, weight)

    def sparse_encode(
        self, r: Vector | None, positions: Indices, values: Vector, elements: int, bits: int
    ) -> bytes:
        count = positions.size
        out, out_at = self._scratch.borrow_array("payload", 10 * count + 128, np.uint8)
        _, low = self._scratch.borrow_array("low", 5 * count + 64, np.uint8)
        used = self._c.sparse_encode(
            _at(r), _at(positions), _at(values), count, elements, bits, out_at, low
        )
        _encoded(used)
        return out[:used].tobytes()

    def sparse_head(self, payload: Bytes, elements: int) -> tuple[int, int]:
        head = ctypes.c_int64()
        count = self._c.sparse_head(_at(payload), payload.size, elements, ctypes.byref(head))
        return _checked(count), head.value

    def sparse_decode(self, payload: Bytes, elements: int, bits: int) -> tuple[Indices, Vector]:
        count, head = self.sparse_head(payload, elements)
        positions, values = np.empty(count, np.uint32), np.empty(count, np.float32)
        body = ((_at(payload) or 0) + head, payload.size - head)
        where = (_at(positions), _at(values))
        _checked(self._c.sparse_decode(*body, count, elements, bits, 1.0, *where))
        return positions, values

    def sparse_check(self, payload: Bytes, elements: int, bits: int) -> None:
        _checked(self._c.sparse_check(_at(payload), payload.size, elements, bits))

    def sparse_apply(self, payload: Bytes, bits: int, out: Vector, weight: float | None) -> None:
        how = (bits, 0, 1.0) if weight is None else (bits, 1, weight)
        self._c.sparse_apply(_at(payload), payload.size, out.size, *how, _at(out))

    def sparse_set(self, payload: Bytes, bits: int, out: Vector) -> None:
        self._merge(_Messages([payload], [1.0]), bits, out, add=False)

    def sparse_add(
        self, payloads: Sequence[Bytes], weights: Sequence[float], bits: int, out: Vector
    ) -> None:
        self._merge(_Messages(payloads, weights), bits, out, add=True)

    def _merge(self, given: _Messages, bits: int, out: Vector, add: bool) -> None:
        """out = decoded of the only message, or += weight * decoded of each."""
        elements, to, number = out.size, _at(out), given.number
        sizes = (given.addresses, given.lengths)
        heads = (given.start, given.head)
        count = _checked(self._c.sparse_heads(*sizes, number, elements, *heads))
        how = (*sizes, given.weights, number, elements, bits, *heads)
        if count > self.few(elements):
            _checked(self._c.sparse_apply_many(*how, add, to))
            return
        _, positions = self._scratch.borrow_array("positions", count, np.uint32)
        _, values = self._scratch.borrow_array("values", count, np.float32)
        _checked(self._c.sparse_decode_many(*how, positions, values))
        if add:
            cursors = (given.start, given.cursor)
            self._c.scatter_tiles(to, elements, positions, values, *cursors, number, TILE)
        else:
            out[:] = 0
            self._c.scatter(to, positions, values, count)

    def blocks_encode(
        self, r: Vector, g: Vector | None, code: Blocks, noise: int, out: Bytes
    ) -> None:
        at, shape = _at(out) or 0, (code.levels, code.width, code.stochastic, noise)
        codes_at = at + code.scale_bytes(r.size)
        _encoded(self._c.blocks_encode(_at(r), _at(g), r.size, *shape, at, codes_at))

    def blocks_check(self, payload: Bytes, elements: int, code: Blocks) -> None:
        at = _at(payload) or 0
        codes_at = at + code.scale_bytes(elements)
        _checked(self._c.blocks_check(at, codes_at, elements, code.levels, code.width))

    def blocks_read(
        self,
        payload: Bytes,
        elements: int,
        first: int,
        code: Blocks,
        out: Vector,
        weight: float | None,
    ) -> None:
        at = _at(payload) or 0
        codes_at = at + code.scale_bytes(elements) + code.code_bytes(first)
        how = (code.width, weight is not None, weight or 0.0)
        self._c.blocks_decode(at + code.scale_bytes(first), codes_at, out.size, *how, _at(out))

    def signs_encode(self, r: Vector, g: Vector | None, out: Bytes) -> None:
        at = _at(out) or 0
        bits_at = at + 4 * -(-r.size // SIGN_BLOCK)
        if g is None:
            _encoded(self._c.signs_encode(_at(r), r.size, at, bits_at))
        else:
            _encoded(self._c.signs_drain(_at(r), _at(g), r.size, at, bits_at))

    def signs_check(self, payload: Bytes, elements: int) -> None:
        at = _at(payload) or 0
        _checked(self._c.signs_check(at, at + 4 * -(-elements // SIGN_BLOCK), elements))

    def signs_read(
        self, payload: Bytes, elements: int, first: int, out: Vector, weight: float | None
    ) -> None:
        at = _at(payload) or 0
        bits_at = at + 4 * -(-elements // SIGN_BLOCK) + first // 8
        how = (weight is not None, weight or 0.0)
        self._c.signs_decode(at + 4 * (first // SIGN_BLOCK), bits_at, out.size, *how, _at(out))

    def planes_encode(self, r: Vector, g: Vector | None, bits: int, out: Bytes) -> None:
        if g is not None:
            _encoded(self._c.planes_drain(_at(r), _at(g), r.size, bits, _at(out)))
            return
        _, sent = self._scratch.borrow_array("values", r.size, np.float32)
        _encoded(self._c.levels_encode(_at(r), r.size, 0.0, bits, _at(out), sent))

    def halves_encode(self, r: Vector, g: Vector | None, brain: bool, out: Bytes) -> None:
        self._c.halves_encode(_at(r), _at(g), r.size, brain, _at(out))

    def halves_read(
        self,
        payload: Bytes,
        elements: int,
        first: int,
        brain: bool,
        out: Vector,
        weight: float | None,
    ) -> None:
        at, how = (_at(payload) or 0) + 2 * first, (brain, weight is not None, weight or 0.0)
        self._c.halves_decode(at, out.size, *how, _at(out))

    def momentum(self, u: Vector, g: Vector, m: float, scale: float) -> None:
        self._c.momentum(_at(u), _at(g), u.size, m, scale)
