"""Bits of codecs and of members' halves, from NumPy's code paths and from the kernels in C.

    python tests/endurance/same_bits.py 1000000 'topk(0.1) | q2' 'int8'

prints one line of JSON: for each codec a digest of all payloads, of what they decode to, and of
what is left; for "outer adam" one of a member's base, checksum and parameters around that rule;
for "factors 2" one of what all members make of the same factors. (A member's own factors are
BLAS's: `low-rank` has other bits on another machine.) `EDGETRAIN_KERNELS` and
`NPY_DISABLE_CPU_FEATURES` say what computes. What is drawn is made of integers, so that it is the
same wherever it is drawn. edgetrain and NumPy alone are needed: Debian's arm64 Python under
qemu-aarch64-static runs it, with NumPy's wheel and cross-compiled kernels.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

from edgetrain import codecs
from edgetrain.codecs.kernels import chosen
from edgetrain.codecs.lowrank import orthonormal, product
from edgetrain.strategies import outer as outer_rules
from edgetrain.strategies.displacement import Displacement
from edgetrain.vectors.vector import Vector, checksum

LAYOUT = (("a.w", 0, (96, 40)), ("a.bias", 3840, (40,)), ("b.w", 3880, (20, 3, 3, 3)))
ELEMENTS = 4420
AT_ONCE = 2**16
KINDS = ("any", "near", "few", "ties", "subnormal")


def drawn(kind: str, elements: int, rng: np.random.Generator) -> Vector:
    """float32 [elements] below 2^99: of any size; of sizes of 16 octaves, as gradients have; few
    that are not zero; with many equal ones; or smaller than float32's normal numbers."""
    bits = rng.integers(0, 2**32, elements, np.uint32)
    sign, mantissa = bits & np.uint32(2**31), bits & np.uint32(2**23 - 1)
    low, high = {"any": (1, 226), "subnormal": (0, 1)}.get(kind, (112, 128))
    exponent = rng.integers(low, high, elements, np.uint32) << np.uint32(23)
    if kind == "ties":
        mantissa &= np.uint32(3 << 21)
    vector = (sign | exponent | mantissa).view(np.float32)
    if kind == "few":
        vector[rng.integers(0, 32, elements, np.uint32) > 0] = 0
    return vector


def of_codec(spec: str, elements: int) -> str:
    """The digest of a codec's payloads, decoded vectors and residuals."""
    found, rng = hashlib.sha256(), np.random.default_rng(11)
    codec = codecs.parse(spec)
    size = ELEMENTS if codec.unbound else AT_ONCE
    codec = codec.bind(LAYOUT) if codec.unbound else codec
    memory, total = codecs.memory(codec, size), np.zeros(size, np.float32)
    for number in range(max(len(KINDS), elements // size)):
        if number % len(KINDS) == 0:
            memory.reset()
        vector = drawn(KINDS[number % len(KINDS)], size, rng)
        for where, payload in zip(
            codec.slices(size), memory.encode(vector, salt=number), strict=True
        ):
            found.update(bytes(payload))
            codec.add(payload, 1 / 3, total[where])
            decoded = np.empty_like(total[where])
            codec.decode(payload, decoded)
            found.update(decoded.tobytes())
        found.update(memory.residual.tobytes())
        found.update(total.tobytes())
        total[:] = 0
    return found.hexdigest()[:16]


def of_members(rule: str, elements: int) -> str:
    """The digest of a member's parameters and of its base, two rounds of delay behind, where an
    outer rule at the hub steps on its contributions."""
    found, rng = hashlib.sha256(), np.random.default_rng(12)
    outer = outer_rules.parse(rule)
    outer.start(AT_ONCE)
    params = drawn("near", AT_ONCE, rng)
    half = Displacement(params, 1, 2)
    own: list[Vector] = []
    for _ in range(max(4, elements // AT_ONCE)):
        params -= np.float32(0.01) * drawn("near", AT_ONCE, rng)
        own.append(half.after_step().copy())
        if half.due() is not None:
            reply = own.pop(0)
            outer.step(reply, 0)
            half.apply([reply])
            assert half.checksum == checksum(half.base)
            found.update(half.base.tobytes() + params.tobytes())
    return found.hexdigest()[:16]


def of_factors(rank: int, elements: int) -> str:
    """The digest of what every member makes of the same factors: orthonormal columns, products."""
    found, rng = hashlib.sha256(), np.random.default_rng(13)
    rows = 128
    for number in range(max(4, elements // (rows * rows))):
        kind = KINDS[number % 2]
        p = orthonormal(drawn(kind, rank * rows, rng).reshape(rank, rows))
        q, out = drawn("near", rank * rows, rng).reshape(rank, rows), np.empty((rows, rows), "f4")
        product(p, q, out)
        found.update(p.tobytes() + out.tobytes())
    return found.hexdigest()[:16]


def of(name: str, elements: int) -> str:
    """The digest of one of these by its name."""
    kind, _, rest = name.partition(" ")
    if kind == "outer":
        return of_members(rest, elements)
    return of_factors(int(rest), elements) if kind == "factors" else of_codec(name, elements)


def main(words: list[str]) -> None:
    """Print the digests of what is named, over so many elements of each."""
    digests = {name: of(name, int(words[0])) for name in words[1:]}
    print(json.dumps({"kernels": chosen.backend().sentence, "digests": digests}))


if __name__ == "__main__":
    main(sys.argv[1:])
