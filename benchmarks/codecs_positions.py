"""What other ways of coding positions would cost: the figures behind decision 011.

    python benchmarks/codecs_positions.py
    python benchmarks/codecs_positions.py char.npz           and the gradients of that file

Bits per index over log2 C(n, k) / k, on uniform positions and on those of top-k. Only sizes are
counted here, with the best Rice parameter of all for each block; the codec itself tries three.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from pathlib import Path

import numpy as np

from edgetrain.codecs.bench import DENSITIES, bits_per_index, combinations_bits

PARAMETERS = np.arange(22)
ESCAPE = 24
WHOLE_BITS = 22


def rice_costs(gaps: np.ndarray, block: int, escape: bool) -> np.ndarray:
    """[parameters, blocks] bits of each block (the incomplete last one left out)."""
    rows = gaps[: gaps.size // block * block].reshape(-1, block)
    costs = []
    for r in PARAMETERS:
        quotients = rows >> r
        bits = quotients + 1 + r
        if escape:
            bits = np.where(quotients >= ESCAPE, ESCAPE + 1 + WHOLE_BITS, bits)
        costs.append(bits.sum(axis=1))
    return np.stack(costs)


def rice(gaps: np.ndarray, block: int, steps: bool, escape: bool) -> float:
    """Bits per gap: the parameter in 5 bits, or as a step from the one before in unary."""
    costs = rice_costs(gaps, block, escape)
    best = costs.argmin(axis=0)
    moved = np.diff(best, prepend=best[:1])
    head = (np.where(moved >= 0, 2 * moved, -2 * moved - 1) + 1).sum() if steps else 5 * best.size
    return float((costs.min(axis=0).sum() + head) / (best.size * block))


def leb128(gaps: np.ndarray) -> bytes:
    out = bytearray()
    for gap in gaps.tolist():
        while gap >= 128:
            out.append(gap & 127 | 128)
            gap >>= 7
        out.append(gap)
    return bytes(out)


def table(name: str, positions: np.ndarray, elements: int, ours: float) -> None:
    """`ours` is a ratio: a sampled threshold keeps a few more or less than the exact one."""
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
    count = gaps.size
    if count < 256:
        return
    bound = combinations_bits(elements, count) / count
    plain = leb128(gaps)
    figures = {
        "LEB128": 8 * len(plain) / count,
        "LEB128 + zlib": 8 * len(zlib.compress(plain, 6)) / count,
        "Rice, one parameter": float(rice_costs(gaps, count, escape=False).min() / count),
    }
    for block in (32, 64, 128):
        figures[f"blocks of {block}, 5 bits"] = rice(gaps, block, steps=False, escape=False)
        figures[f"blocks of {block}, steps"] = rice(gaps, block, steps=True, escape=False)
        figures[f"blocks of {block}, steps, escape"] = rice(gaps, block, steps=True, escape=True)
    print(f"{name}: {count} of {elements}, bound {bound:.3f} bits, ours {ours:.3f}")
    print("\n".join(f"    {what:<30} {bits / bound:.3f}" for what, bits in figures.items()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="gradients, as .npz")
    files = parser.parse_args().files
    rng = np.random.default_rng(0)
    for density in DENSITIES:
        x = rng.standard_normal(4_000_000).astype(np.float32)
        show(f"uniform, {density:.1%}", x, density)
    for path in files:
        with np.load(path) as arrays:
            for name in sorted(arrays.files):
                for density in DENSITIES:
                    show(f"{path.stem} {name}, {density:.1%}", arrays[name], density)
    return 0


def show(name: str, x: np.ndarray, density: float) -> None:
    count = max(1, round(density * x.size))
    least = np.partition(np.abs(x), x.size - count)[x.size - count]
    bits, bound = bits_per_index(x, density)
    table(name, np.flatnonzero(np.abs(x) >= least), x.size, bits / bound)


if __name__ == "__main__":
    sys.exit(main())
