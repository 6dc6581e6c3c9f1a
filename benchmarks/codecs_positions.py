"""What positions cost in bits, against other ways of coding them: the figures behind decision 011.

    python benchmarks/codecs_positions.py                ours against what one might take instead
    python benchmarks/codecs_positions.py --blocks       the ways of choosing Rice parameters
    python benchmarks/codecs_positions.py char.npz       also the vectors of codecs_gradients.py

Bits per index of top-k positions: uniform ones, those of three small models after a short training
(gradient, displacement of 20 steps, error feedback), and of the gradient of an embedding whose
rows are drawn by Zipf's law. Each part of a vector is coded on its own, as payloads are. The
references are block Rice code alone, a bitmap and LEB128 gaps under zstd, and Elias and Fano's code
(its size by formula); the goal is at most 1.05 of the best of them. Needs the package `zstandard`.
With --blocks, bits per index over log2 C(n, k) / k, with the best Rice parameter of all for each
block; the codec itself tries three.
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from codecs_speed import DENSITIES, bits_per_index, combinations_bits

from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.codecs.kernels.gaps import encode_gaps
from edgetrain.codecs.sparse import part_for

GOAL = 1.05
EMBEDDINGS = ((125_000, 16), (50_000, 64), (30_000, 50))
TOKENS = 10_000
"""Rows drawn for the gradient of an embedding; some are drawn many times."""
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


def blocks(name: str, positions: np.ndarray, elements: int, ours: float) -> None:
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


def references(gaps: np.ndarray, positions: np.ndarray, elements: int) -> dict[str, int]:
    """Bits of the positions of one part in each of the other codes."""
    import zstandard

    zstd = zstandard.ZstdCompressor()
    kept = np.zeros(elements, np.bool_)
    kept[positions] = True
    low = max(0, math.floor(math.log2(elements / positions.size)))
    return {
        "Rice": 8 * encode_gaps(positions.astype(np.uint32), elements).size,
        "bitmap+zstd": 8 * len(zstd.compress(np.packbits(kept).tobytes())),
        "LEB128+zstd": 8 * len(zstd.compress(leb128(gaps))),
        "Elias-Fano": positions.size * (low + 1) + (elements >> low),
    }


def compared(name: str, positions: np.ndarray, elements: int, density: float) -> None:
    step, total, ours = part_for(density), dict[str, int](), 0
    for start in range(0, elements, step):
        here = positions[(positions >= start) & (positions < start + step)] - start
        if not here.size:
            continue
        room = min(step, elements - start)
        gaps = np.diff(here, prepend=-1) - 1
        for what, bits in references(gaps, here, room).items():
            total[what] = total.get(what, 0) + bits
        ours += 8 * kernels.current().gaps_encode(here.astype(np.uint32), room).size
    best = min(total.values())
    verdict = "" if ours <= GOAL * best else "  MISSED"
    figures = " ".join(f"{bits / positions.size:>11.3f}" for bits in (*total.values(), ours))
    print(f"{name:<36}{positions.size:>7}{figures}{ours / best:>9.3f}{verdict}", flush=True)


def embedding(rows: int, width: int) -> np.ndarray:
    """The gradient of an embedding: normal numbers in the rows that TOKENS words touch."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, rows + 1)
    words = rng.permutation(rows)[rng.choice(rows, TOKENS, p=share / share.sum())]
    x = np.zeros((rows, width), np.float32)
    np.add.at(x, words, rng.standard_normal((TOKENS, width)).astype(np.float32))
    return x.reshape(-1)


def vectors(files: list[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, vector) of all that is compared; names end in what a density is the only one for."""
    yield "uniform", np.random.default_rng(0).standard_normal(4_000_000).astype(np.float32)
    for rows, width in EMBEDDINGS:
        yield f"embedding {rows} x {width}", embedding(rows, width)
    for model, kept in trained():
        for name in sorted(kept):
            yield f"{model} {name}", kept[name]
    for path in files:
        with np.load(path) as arrays:
            for name in sorted(arrays.files):
                yield f"{path.stem} {name}", arrays[name]


def trained() -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """(name of a model, its vectors after a short training)."""
    import torch
    from codecs_gradients import train
    from torch import nn

    from edgetrain.tasks import char_lm, digits

    def mlp() -> nn.Module:
        hidden = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(512, 10))

    def convnet() -> nn.Module:
        first = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1)]
        second = [nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU()]
        last = [nn.Flatten(), nn.Linear(128 * 16, 128), nn.ReLU(), nn.Linear(128, 10)]
        return nn.Sequential(*first, *second, *last)

    torch.set_num_threads(1)
    for name, model in (("MLP", mlp), ("convnet", convnet)):
        task = digits()
        task.model = model  # type: ignore[method-assign]
        yield name, train(task, 200, 16, 1e-3, told=False)
    yield "char-lm", train(char_lm(), 150, 8, 1e-3, told=False)


def densities_of(name: str) -> tuple[float, ...]:
    """Error feedback was made at one density; other vectors are looked at at all."""
    share = name.rpartition("feedback_")[2]
    return (float(share),) if share != name else DENSITIES


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="vectors, as .npz")
    parser.add_argument("--blocks", action="store_true", help="compare Rice parameters instead")
    args = parser.parse_args()
    if not args.blocks:
        names = ("Rice", "bitmap+zstd", "LEB128+zstd", "Elias-Fano", "ours")
        print(f"{'bits per index':<36}{'k':>7}{' '.join(f'{n:>11}' for n in names)}  to best")
    for name, x in vectors(args.files):
        for density in densities_of(name):
            wanted = min(max(1, round(density * x.size)), int(np.count_nonzero(x)))
            least = np.partition(np.abs(x), x.size - wanted)[x.size - wanted]
            positions = np.flatnonzero(np.abs(x) >= least)
            title = f"{name.partition('_')[0]}, {density:.1%}"
            if args.blocks:
                bits, bound = bits_per_index(x, density)
                blocks(title, positions, x.size, bits / bound)
            else:
                compared(title, positions, x.size, density)
    return 0


if __name__ == "__main__":
    sys.exit(main())
