"""The test vectors of docs/reference/codecs.md: what an implementation in another language must
write.

Stochastic codecs are there too: their noise is drawn from the vector itself.
"""

from pathlib import Path

import numpy as np
import pytest

from edgetrain.codecs import parse
from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.vectors.vector import Layout, Vector

DOCS = Path(__file__).parents[2] / "docs/reference/codecs.md"

SPARSE = np.zeros(100, np.float32)
SPARSE[[3, 4, 20, 63, 99]] = [1, -2, 3, -1.5, 1]
ESCAPED = np.zeros(2000, np.float32)
ESCAPED[[0, 1, 2, 1999]] = 1
ROWS = np.zeros(2000, np.float32)
ROWS.reshape(-1, 16)[[3, 20, 21, 50, 77]] = 1
DENSE = np.array([0.5, -1, 2, -3, 4, -5, 6], np.float32)
MATRIX = np.outer([1, 2, 3, 4], [1, 0, -1, 2, 3]).astype(np.float32).reshape(-1)
WITH_BIAS = np.concatenate([MATRIX, np.array([7, -7], np.float32)])
WEIGHT = ("w", 0, (4, 5))

VECTORS: dict[str, list[tuple[str, str]]] = {
    "sparse": [
        (
            "topk(0.05)",
            "05 02 4f 02 03 af 03 00 00 80 3f 00 00 00 c0 00 00 40 40 00 00 c0 bf 00 00 80 3f",
        ),
        ("topk(0.05) | q1", "05 02 4f 02 03 af 03 00 00 80 3f 33 3f 0a"),
        ("topk(0.05) | q2", "05 02 4f 02 03 af 03 00 00 80 3f 33 3f 0a 04"),
        ("topk(0.05) | q4", "05 02 4f 02 03 af 03 00 00 80 3f 33 3f 0a 0e 02 04"),
        ("topk(0.05) | int8", "05 02 4f 02 03 af 03 06 83 c1 3c 2a ab 7f c0 2a"),
        ("topk(0.05) | bf16", "05 02 4f 02 03 af 03 80 3f 00 c0 40 40 c0 bf 80 3f"),
    ],
    "escaped": [("topk(0.002) | q1", "04 05 00 78 00 00 80 00 f3 01 00 00 80 3f 00 00 00")],
    "rows": [
        (
            "topk(0.04) | q1",
            "50 00 08 01 19 2c 04 00 00 00 10 00 00 08 01 00 00 00 00 f8 80 15 "
            "00 00 80 3f 00 00 00 00 00 00 00 00 00 00 00 00",
        )
    ],
    "dense": [
        ("fp16", "00 38 00 bc 00 40 00 c2 00 44 00 c5 00 46"),
        ("bf16", "00 3f 80 bf 00 40 40 c0 80 40 a0 c0 c0 40"),
        ("int8", "06 83 41 3d 0b eb 2a c0 55 96 7f"),
        ("int4", "b7 6d 5b 3f 79 4a 2d 0f"),
        ("qsgd(3)", "00 00 00 40 88 69 5a 0b"),
        ("ternary", "00 00 c0 40 4f 01"),
        ("sign", "49 92 44 40 2a"),
        ("q1", "00 00 00 00 45 40 2a"),
        ("q2", "00 00 00 00 45 40 2a 60"),
        ("q3", "00 00 00 00 45 40 2a 38 40"),
        ("randk(0.3)", "66 56 d5 13 02 00 00 80 bf 00 00 a0 c0"),
    ],
    "filled up": [("powersgd(1)", "00 00 80 3f 00 00 00 00 00 00 00 c0")],
    "with bias": [("small(4): bf16; sign", "04 e0 40 e0 c0 07 00 00 60 40 84 10 02")],
}
INPUTS: dict[str, tuple[Vector, Layout]] = {
    "sparse": (SPARSE, (("all", 0, (100,)),)),
    "escaped": (ESCAPED, (("all", 0, (2000,)),)),
    "rows": (ROWS, (("all", 0, (2000,)),)),
    "dense": (DENSE, (("all", 0, (7,)),)),
    "filled up": (np.array([1, 0, -2, 0, 0], np.float32), (("all", 0, (5,)),)),
    "with bias": (WITH_BIAS, (WEIGHT, ("b", 20, (2,)))),
}
ALL = [(kind, spec, text) for kind, rows in VECTORS.items() for spec, text in rows]


@pytest.mark.parametrize(("kind", "spec", "text"), ALL)
@pytest.mark.parametrize("choice", ["numpy", "best"])
def test_vector(kind: str, spec: str, text: str, choice: str) -> None:
    x, layout = INPUTS[kind]
    codec = parse(spec).bind(layout)
    with kernels.using("numpy" if choice == "numpy" else "auto"):
        (payload,) = codec.encode(x)
        assert bytes(payload).hex(" ") == text
        out = np.empty_like(x)
        codec.decode(bytes.fromhex(text), out)
    assert np.linalg.norm(out - x) <= np.linalg.norm(x)


@pytest.mark.parametrize(("kind", "spec", "text"), ALL)
def test_the_documentation_has_it(kind: str, spec: str, text: str) -> None:
    assert f"{spec:<22}{text}" in DOCS.read_text()


def test_factors_of_a_matrix() -> None:
    codec = parse("low-rank(1)").bind((WEIGHT,))
    p, q = np.array([1, 2, 3, 4], np.float32), np.array([1, 0, -1, 2, 3], np.float32)
    out = np.empty_like(MATRIX)
    codec.decode(np.concatenate([p, q]).tobytes(), out)
    assert (out == MATRIX).all()
    codec.decode(codec.encode(MATRIX)[0], out)
    assert np.allclose(out, MATRIX, atol=1e-5)
