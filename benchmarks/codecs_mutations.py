"""Throws mutated payloads at every decoder: none may raise anything but BadPayload.

    python benchmarks/codecs_mutations.py --count 1000000
    LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \\
        CC="gcc -fsanitize=address,undefined -fno-sanitize-recover=all" XDG_CACHE_HOME=/tmp/asan \\
        python benchmarks/codecs_mutations.py --count 1000000

The second line runs the C kernels under the address and undefined-behaviour sanitizers, which end
the program at the first stray access. Memory is watched too: the most that Python and NumPy
allocate while one payload is decoded and added, the two vectors for that included, is printed
against the size of the vector (take --elements 200000 for that: with few, what is fixed weighs
most). NumPy and C must agree on every verdict and every bit.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

from edgetrain.codecs import kernels, native
from edgetrain.errors import BadPayload

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "codecs"))
import codec_cases as cases  # the specs and vectors that the tests use
from test_codec_payloads import mutate

KINDS = ["normal", "few", "clusters", "steps"]
PEAK_EVERY = 1000
"""Allocation is traced for one round of codecs in so many mutations: tracing is slow."""


def decode(codec, payload: bytes, elements: int) -> bytes | None:  # type: ignore[no-untyped-def]
    """What a payload decodes and adds up to, or None if it is refused."""
    out, total = np.full(elements, 7, np.float32), np.full(elements, 7, np.float32)
    try:
        codec.decode(payload, out)
    except BadPayload:
        if not (out == 7).all():
            raise AssertionError(f"{codec.name} wrote before it refused") from None
        return None
    codec.add(payload, 0.5, total)
    return out.tobytes() + total.tobytes()


def peak_of(codec, payload: bytes, elements: int) -> int:  # type: ignore[no-untyped-def]
    """Bytes allocated at most while a payload is decoded."""
    tracemalloc.start()
    decode(codec, payload, elements)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--elements", type=int, default=1200, help="of the vectors")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    elements = args.elements
    rng = np.random.default_rng(args.seed)
    choices = ["numpy", *native.instruction_sets()[-1:]]
    codecs = [cases.bound(spec, elements) for spec in cases.ALL]
    originals = [
        [bytes(codec.encode(cases.make(kind, elements, i))[0]) for i, kind in enumerate(KINDS)]
        for codec in codecs
    ]
    refused, peak, began = 0, 0, time.monotonic()
    with np.errstate(all="ignore"):
        for number in range(args.count):
            which = number % len(codecs)
            payload = mutate(originals[which][int(rng.integers(len(KINDS)))], rng)
            verdicts = []
            for choice in choices:
                with kernels.using(choice):
                    verdicts.append(decode(codecs[which], payload, elements))
                    if number >= PEAK_EVERY and number % PEAK_EVERY < len(codecs):
                        peak = max(peak, peak_of(codecs[which], payload, elements))
            if any(verdict != verdicts[0] for verdict in verdicts):
                print(f"{codecs[which].name}: {' and '.join(choices)} differ on {payload.hex()}")
                return 1
            refused += verdicts[0] is None
    print(
        f"{args.count} mutations of {len(codecs)} codecs' payloads under {', '.join(choices)}: "
        f"{refused} refused with BadPayload, {args.count - refused} valid, nothing else raised; "
        f"peak {peak} bytes allocated for a vector of {4 * elements} bytes; "
        f"{time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
