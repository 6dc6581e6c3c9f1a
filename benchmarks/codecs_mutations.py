"""Throws mutated payloads at every decoder: none may raise anything but BadPayload.

    python benchmarks/codecs_mutations.py --count 1000000
    LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \\
        CC="gcc -fsanitize=address,undefined -fno-sanitize-recover=all" XDG_CACHE_HOME=/tmp/asan \\
        python benchmarks/codecs_mutations.py --count 1000000

The second line runs the C kernels under the address and undefined-behaviour sanitizers, which end
the program at the first stray access. NumPy and C must agree on every verdict and every bit.
Memory is measured first, on vectors that are long enough for what is fixed not to weigh: the most
that Python and NumPy allocate while one payload, valid or not, is decoded, added, or added four
times, beyond the vector and the payload, which are there already. The worst codec of each backend
is named; more than the vector's own size and a fixed amount is an error.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.codecs.kernels import native
from edgetrain.errors import BadPayload

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fakes"))
import codec_cases as cases  # the specs and vectors that the tests use
import codec_memory as memory
from codec_mutations import mutate

KINDS = ["normal", "few", "clusters", "steps", "rows"]
MUTATIONS = 4
"""Of each payload, where memory is measured: tracing is slow."""


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


def payloads_of(codec, elements: int) -> list[bytes]:  # type: ignore[no-untyped-def]
    """One payload of each kind of vector."""
    return [bytes(codec.encode(cases.make(kind, elements, i))[0]) for i, kind in enumerate(KINDS)]


def most_memory(choice: str, elements: int, seed: int) -> tuple[int, str]:
    """(bytes, codec) of the decoder that takes most."""
    found = []
    for spec in cases.ALL:
        rng = np.random.default_rng(seed)
        codec = cases.bound(spec, elements)
        payloads = payloads_of(codec, elements)
        payloads += [mutate(payload, rng) for payload in payloads for _ in range(MUTATIONS)]
        memory.worst(
            codec, payloads[:1], elements, choice
        )  # the first time Python itself allocates
        found.append((memory.worst(codec, payloads, elements, choice), codec.name))
    return max(found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--elements", type=int, default=1200, help="of the vectors")
    parser.add_argument("--memory-elements", type=int, default=200_000, help="where that is traced")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    elements = args.elements
    rng = np.random.default_rng(args.seed)
    choices = ["numpy", *native.instruction_sets()[-1:]]
    codecs = [cases.bound(spec, elements) for spec in cases.ALL]
    size = 4 * args.memory_elements
    for choice in choices:
        peak, name = most_memory(choice, args.memory_elements, args.seed)
        print(
            f"memory, {choice}: at most {peak} bytes for a vector of {size} bytes, "
            f"{peak / size:.2f} of it: {name}"
        )
        if peak > size + memory.FIXED:
            print(f"that is more than the vector and {memory.FIXED} bytes")
            return 1
    originals = [payloads_of(codec, elements) for codec in codecs]
    refused, began = 0, time.monotonic()
    with np.errstate(all="ignore"):
        for number in range(args.count):
            which = number % len(codecs)
            payload = mutate(originals[which][int(rng.integers(len(KINDS)))], rng)
            verdicts = []
            for choice in choices:
                with kernels.using(choice):
                    verdicts.append(decode(codecs[which], payload, elements))
            if any(verdict != verdicts[0] for verdict in verdicts):
                print(f"{codecs[which].name}: {' and '.join(choices)} differ on {payload.hex()}")
                return 1
            refused += verdicts[0] is None
    print(
        f"{args.count} mutations of {len(codecs)} codecs' payloads under {', '.join(choices)}: "
        f"{refused} refused with BadPayload, {args.count - refused} valid, nothing else raised; "
        f"{time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
