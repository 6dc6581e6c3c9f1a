"""Sorted positions as tokens in Huffman code, in NumPy: the bits that kernels.c writes and reads.

A token is a gap and the entry after it, a run of entries without gaps, or the gap before the last
one again. Shorter than Rice code (gaps.py) where kept elements stand together, as in the rows of an
embedding. Positions and bytes only, no values. docs/reference/codecs.md specifies the code.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgetrain.codecs.kernels import wire
from edgetrain.codecs.kernels.contract import ENTRIES, Bytes, Indices
from edgetrain.codecs.kernels.gaps import (
    GapReader,
    Integers,
    encode_gaps,
    pack_low,
    unpack_low,
)

AGAIN = 0
"""The symbol of the gap before the last one; 1 + 4 * class + 2 * aligned + kind are the others."""
SYMBOLS = 129
CODE_BITS = 11
ONLY = 15
"""Stands for a length: the only symbol of its table, which takes no bits."""
MAX_SHIFT = 7
MAX_CLASSES = 32
AGAIN_FROM = 4
"""Shorter gaps are cheaper in full."""
LEAST_ENTRIES = 64
"""Below, the tables outweigh what they save."""
MANY = 2048
"""Fewer entries are looked at whatever Rice code takes."""
TOKENS = 1024
"""Tokens decoded at a time."""
WINDOW = 1024
"""Bytes of the stream of codes looked at in one go."""
_NO_SYMBOL = 255
_AFTER_RUN = bytes(int(s > 0 and (s - 1) & 1) for s in range(SYMBOLS))


@dataclass
class RunTokens:
    """What gaps become: for each token whether it follows a run, is one, or is `again`.

    `number` is the gap, or the entries of the run and one more.
    """

    after: npt.NDArray[np.bool_]
    run: npt.NDArray[np.bool_]
    again: npt.NDArray[np.bool_]
    number: Integers

    @classmethod
    def of(cls, gaps: Integers) -> RunTokens:
        zero = gaps == 0
        begins = ~zero
        begins[0] = True
        begins[1:] |= ~zero[:-1]
        at = np.flatnonzero(begins)
        run = zero[at]
        number = np.where(run, np.append(at[1:], gaps.size) - at + 1, gaps[at])
        again, plain = np.zeros(at.size, np.bool_), number[~run]
        same = (plain[2:] == plain[:-2]) & (plain[2:] >= AGAIN_FROM)
        again[np.flatnonzero(~run)[2:]] = same
        after = np.zeros(at.size, np.bool_)
        after[1:] = run[:-1]
        return cls(after, run, again, number)

    def symbols(self, shift: int) -> tuple[Integers, Integers, Integers]:
        """(symbol, low bits, their number) of each token."""
        aligned = (self.number & ((1 << shift) - 1) == 0) & (shift > 0)
        rest = np.where(aligned, self.number >> shift, self.number)
        width = np.frexp(rest.astype(np.float64))[1].astype(np.int64) - 1
        low = rest & ((1 << width) - 1)
        symbol = 1 + 4 * width + 2 * aligned + self.run
        for numbers in (symbol, low, width):
            numbers[self.again] = 0
        return symbol, low, width

    def shift(self) -> int:
        """The largest power of two that divides three numbers in four, at most MAX_SHIFT."""
        number = self.number[~self.again]
        for shift in range(MAX_SHIFT, 0, -1):
            if 4 * np.count_nonzero(number & ((1 << shift) - 1) == 0) >= 3 * number.size:
                return shift
        return 0

    def counts(self, symbol: Integers) -> list[Integers]:
        """Counts of each symbol, not after a run and after one."""
        return [
            np.bincount(symbol[self.after == after], minlength=SYMBOLS) for after in (False, True)
        ]


def _log2_256(x: Integers) -> Integers:
    """log2 in units of 1/256, within 0.01 and in integers, as kernels.c has it; of 0 it is 0."""
    e = np.frexp(x.astype(np.float64))[1].astype(np.int64) - 1
    m = (x << 8 >> e) & 255
    logarithm: Integers = (256 * e + m + (88 * m * (256 - m) >> 16)) * (x > 0)
    return logarithm


def _looks_uniform(count: int, elements: int, rice_bytes: int) -> bool:
    """Whether Rice code takes 1 to 1.03 of what many positions without any order must.

    Which is log2(n / k) + 1.443 (1 - k / 2n) bits for each of k among n.
    """
    if count < MANY:
        return False
    ratio = int(_log2_256(np.array([(elements << 8) // count]))[0]) - 8 * 256
    bound = count * (ratio + 369 - 184 * count // elements)
    return 100 * bound <= 100 * 256 * 8 * rice_bytes <= 103 * bound


def _worth_a_try(gaps: Integers, rice_bytes: int) -> bool:
    """Whether tokens may take less than 63/64 of the bytes of Rice code.

    From the entropy of the bit lengths of gaps, those behind a gap of 0 apart.
    """
    lengths = np.frexp(gaps.astype(np.float64))[1]
    after = np.zeros(lengths.size, np.intc)
    after[1:] = lengths[:-1] == 0
    counts = np.bincount(lengths + 32 * after, minlength=64)
    totals = counts.reshape(2, 32).sum(axis=1)
    bits = int((totals * _log2_256(totals)).sum() - (counts * _log2_256(counts)).sum()) >> 8
    bits += int(lengths.sum()) - int(np.count_nonzero(lengths))
    return 64 * bits < 63 * 8 * rice_bytes


def code_lengths(counts: Integers) -> list[int]:
    """Huffman's length of each symbol's code, 0 for one that does not occur, at most CODE_BITS.

    Of nodes that weigh alike the first, symbols in their order before what is made of them. Where
    a code is too long, rare symbols weigh more, and all is done again.
    """
    lengths = [0] * SYMBOLS
    symbols = np.flatnonzero(counts).tolist()
    if len(symbols) == 1:
        lengths[symbols[0]] = ONLY
    if len(symbols) < 2:
        return lengths
    weights = counts[symbols].tolist()
    while True:
        nodes = [(weight, i) for i, weight in enumerate(weights)]
        heapq.heapify(nodes)
        parent = [0] * (2 * len(symbols) - 1)
        for made in range(len(symbols), len(parent)):
            first, second = heapq.heappop(nodes), heapq.heappop(nodes)
            parent[first[1]] = parent[second[1]] = made
            heapq.heappush(nodes, (first[0] + second[0], made))
        depth = [0] * len(parent)
        for i in range(len(parent) - 2, -1, -1):
            depth[i] = depth[parent[i]] + 1
        if max(depth) <= CODE_BITS:
            for i, symbol in enumerate(symbols):
                lengths[symbol] = depth[i]
            return lengths
        weights = [weight >> 1 | 1 for weight in weights]


def _codes(lengths: list[int]) -> list[int]:
    """Canonical codes, the first bit lowest.

    Raises BadPayload unless every sequence of bits is decodable; a table of nothing is valid too.
    """
    used = [length for length in lengths if length]
    if any(CODE_BITS < length != ONLY for length in used):
        raise wire.bad(wire.TABLE)
    codes = [0] * SYMBOLS
    if ONLY in used:
        if len(used) > 1:
            raise wire.bad(wire.TABLE)
        return codes
    if used and sum(1 << CODE_BITS - length for length in used) != 1 << CODE_BITS:
        raise wire.bad(wire.TABLE)
    code, before = 0, 0
    for length, symbol in sorted((length, i) for i, length in enumerate(lengths) if length):
        code <<= length - before
        codes[symbol] = int(f"{code:0{length}b}"[::-1], 2)
        code, before = code + 1, length
    return codes


def _told(shift: int, gap_classes: int, run_classes: int) -> Iterator[tuple[int, int]]:
    """(context, symbol) of each length that the tables tell, in their order."""
    for context in (0, 1):
        yield context, AGAIN
        for kind, classes in ((0, gap_classes), (1, run_classes))[: 2 - context]:
            for aligned in range(2 if shift else 1):
                for number in range(classes):
                    yield context, 1 + 4 * number + 2 * aligned + kind


def encode_positions(positions: Indices, elements: int) -> Bytes:
    """See `NumpyTwin.gaps_encode`: tokens where they are clearly shorter, else Rice code."""
    rice, count = encode_gaps(positions, elements), positions.size
    # Below 2^31 the length of a gap is, too.
    if count < LEAST_ENTRIES or elements >= 2**31 or _looks_uniform(count, elements, rice.size):
        return rice
    gaps = positions.astype(np.int64)
    gaps[1:] -= gaps[:-1].copy() + 1
    if not _worth_a_try(gaps, rice.size):
        return rice
    tokens = RunTokens.of(gaps)
    shift = tokens.shift()
    symbol, low, width = tokens.symbols(shift)
    counts = tokens.counts(symbol)
    lengths = [code_lengths(number) for number in counts]
    seen = np.flatnonzero((counts[0] + counts[1])[1:])
    gap_classes, run_classes = (
        int((seen[seen & 1 == kind] >> 2).max(initial=-1)) + 1 for kind in (0, 1)
    )
    tables = [lengths[context][s] for context, s in _told(shift, gap_classes, run_classes)]
    # As many bits as a code has; the only symbol of a table has none.
    bits = np.array([[n if n <= CODE_BITS else 0 for n in row] for row in lengths])
    after = tokens.after.astype(np.intp)
    code_bits = bits[after, symbol]
    code_bytes = -(-int(code_bits.sum()) // 8)
    low_bytes = -(-(15 + 4 * len(tables) + int(width.sum())) // 8)
    head = b"\0" + wire.put_varint(symbol.size) + wire.put_varint(code_bytes)
    if 64 * (len(head) + code_bytes + low_bytes) >= 63 * rice.size:
        return rice
    codes = np.array([_codes(row) for row in lengths])[after, symbol]
    first = shift | gap_classes << 3 | run_classes << 9
    values = np.concatenate([np.array([first, *tables], np.int64), low])
    widths = np.concatenate([np.array([15, *[4] * len(tables)], np.int64), width])
    streams = [
        pack_low(codes, code_bits.astype(np.uint8)),
        pack_low(values, widths.astype(np.uint8)),
    ]
    return np.concatenate([np.frombuffer(head, np.uint8), *streams])


def position_reader(payload: Bytes, count: int, elements: int, step: int = ENTRIES) -> Gaps:
    """The reader of positions in either code; `next_positions` returns `step` of them."""
    if 0 < count <= elements and payload.size and payload[0] == 0:
        return RunReader(payload, count, elements, step)
    return GapReader(payload, count, elements, step)


class RunReader:
    """See `GapReader`. Takes some 60 bytes for each of `step` and of TOKENS."""

    def __init__(self, payload: Bytes, count: int, elements: int, step: int) -> None:
        self._tokens, at = wire.get_varint(payload, 1)
        code_bytes, at = wire.get_varint(payload, at)
        if not 0 < self._tokens <= count:
            raise wire.bad(wire.COUNT)
        self._low_at = at + code_bytes
        if self._low_at > payload.size:
            raise wire.bad(wire.TRUNCATED)
        self._codes, self._low = payload[at : self._low_at], payload[self._low_at :]
        self._left, self._untold, self._elements, self._step = count, count, elements, step
        self._shift, self._used = 0, 0
        # (symbol, length of its code) for each sequence of CODE_BITS bits, in each context
        most = 15 + 4 * (2 + 2 * 3 * MAX_CLASSES)
        bits = int.from_bytes(self._low[: -(-most // 8)].tobytes(), "little")
        available = 8 * self._low.size
        self._shift, gap_classes, run_classes = bits & 7, bits >> 3 & 63, bits >> 9 & 63
        if available < 15:
            raise wire.bad(wire.TRUNCATED)
        if max(gap_classes, run_classes) > MAX_CLASSES:
            raise wire.bad(wire.TABLE)
        told = list(_told(self._shift, gap_classes, run_classes))
        self._used = 15 + 4 * len(told)
        if self._used > available:
            raise wire.bad(wire.TRUNCATED)
        lengths = [[0] * SYMBOLS for _ in range(2)]
        for i, (context, symbol) in enumerate(told):
            lengths[context][symbol] = bits >> (15 + 4 * i) & 15
        symbols = [np.full(1 << CODE_BITS, _NO_SYMBOL, np.uint8) for _ in range(2)]
        taken = [np.zeros(1 << CODE_BITS, np.uint8) for _ in range(2)]
        for context in (0, 1):
            codes = _codes(lengths[context])
            for symbol, length in enumerate(lengths[context]):
                if length:
                    length = 0 if length == ONLY else length
                    symbols[context][codes[symbol] :: 1 << length] = symbol
                    taken[context][codes[symbol] :: 1 << length] = length
        self._symbols, self._lengths = symbols, taken
        self._bit, self._context = 0, 0  # of the codes
        self._next = 0  # the first position after the last token
        self._last = np.zeros(2, np.int64)  # gaps that were not 0
        self._starts: Integers = np.empty(0, np.int64)  # of entries decoded, not returned
        self._entries: Integers = np.empty(0, np.int64)

    def next_positions(self) -> Indices:
        wanted = min(self._left, self._step)
        while int(self._entries.sum()) < wanted:
            self._decode_tokens()
        ends = np.cumsum(self._entries)
        cut = int(np.searchsorted(ends, wanted))
        taken = self._entries[: cut + 1].copy()
        rest = int(ends[cut]) - wanted
        taken[cut] -= rest
        firsts = self._starts[: cut + 1] - (np.cumsum(taken) - taken)
        positions = np.repeat(firsts, taken) + np.arange(wanted)
        kept = cut if rest else cut + 1
        self._starts, self._entries = self._starts[kept:].copy(), self._entries[kept:].copy()
        if rest:
            self._starts[0] += taken[cut]
            self._entries[0] = rest
        self._left -= wanted
        return positions.astype(np.uint32)

    def finish(self) -> int:
        if self._tokens or self._entries.size:
            raise wire.bad(wire.COUNT)
        for stream, used in ((self._codes, self._bit), (self._low, self._used)):
            last, bit = divmod(used, 8)
            if bit and stream[last] >> bit:
                raise wire.bad(wire.PADDING)
        if -(-self._bit // 8) != self._codes.size:
            raise wire.bad(wire.PADDING)
        return self._low_at - (-self._used // 8)

    def _decode_tokens(self) -> None:
        """Decode some more tokens. Raises BadPayload."""
        number = min(self._tokens, TOKENS)
        if not number:
            raise wire.bad(wire.COUNT)
        symbol = self._next_symbols(number)
        self._tokens -= number
        shape = np.maximum(symbol - 1, 0)
        width = shape >> 2
        low, used = unpack_low(self._low[self._used >> 3 :], width, self._used & 7)
        self._used += used
        numbers = (np.left_shift(1, width) | low) << np.where(shape & 2, self._shift, 0)
        run = (shape & 1) == 1
        if np.any(numbers[run] < 2):
            raise wire.bad(wire.QUOTIENT)
        skipped = np.zeros(number, np.int64)
        skipped[~run] = self._gaps(numbers[~run], symbol[~run] == AGAIN)
        entries = np.where(run, numbers - 1, 1)
        self._untold -= int(entries.sum())
        if self._untold < 0:
            raise wire.bad(wire.COUNT)
        ends = self._next + np.cumsum(skipped + entries)
        self._next = int(ends[-1])
        if self._next > self._elements:
            raise wire.bad(wire.INDEX)
        self._starts = np.concatenate([self._starts, ends - entries])
        self._entries = np.concatenate([self._entries, entries])

    def _gaps(self, numbers: Integers, again: npt.NDArray[np.bool_]) -> Integers:
        """The gaps, where `again` says so as two before. Raises BadPayload."""
        gaps = np.concatenate([self._last, numbers])
        source = np.arange(gaps.size)
        source[2:][again] = 0
        for parity in (0, 1):
            np.maximum.accumulate(source[parity::2], out=source[parity::2])
        # Where nothing came before, what stands for it is 0.
        gaps = gaps[source]
        if not np.all(gaps[2:]):
            raise wire.bad(wire.QUOTIENT)
        self._last = gaps[-2:].copy()
        return gaps[2:]

    def _next_symbols(self, number: int) -> Integers:
        """The symbols of the next `number` tokens. Raises BadPayload."""
        decoded, context = bytearray(), self._context
        while len(decoded) < number:
            first = self._bit >> 3
            here = self._codes[first : first + WINDOW + 2]
            octets = np.zeros(WINDOW + 2, np.int32)
            octets[: here.size] = here
            words = octets[:-2] | octets[1:-1] << 8 | octets[2:] << 16
            ahead = (words[:, None] >> np.arange(8, dtype=np.int32)).reshape(-1)
            ahead &= (1 << CODE_BITS) - 1
            symbols = [table[ahead].tobytes() for table in self._symbols]
            lengths = [table[ahead].tobytes() for table in self._lengths]
            at = self._bit & 7
            while at < 8 * WINDOW and len(decoded) < number:
                symbol = symbols[context][at]
                if symbol == _NO_SYMBOL:
                    raise wire.bad(wire.CODE)
                at += lengths[context][at]
                decoded.append(symbol)
                context = _AFTER_RUN[symbol]
            self._bit = 8 * first + at
            if self._bit > 8 * self._codes.size:
                raise wire.bad(wire.TRUNCATED)
        self._context = context
        return np.frombuffer(bytes(decoded), np.uint8).astype(np.int64)


Gaps = GapReader | RunReader
"""Reads ascending positions in either code, some at a time, in memory for ENTRIES of them."""
