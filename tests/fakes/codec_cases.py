"""What the codec tests share: every codec, vectors of every kind, and the stated bounds."""

import numpy as np
from hypothesis import strategies as st

from edgetrain.codecs import Codec, parse
from edgetrain.codecs.auto import Auto
from edgetrain.codecs.blocks import Blockwise, Planes, Sign
from edgetrain.codecs.dense import BFloat, Dense, Half
from edgetrain.codecs.kernels.contract import LEVEL_BLOCK, SIGN_BLOCK
from edgetrain.codecs.lowrank import BoundLowRank, BoundTwoTrips
from edgetrain.codecs.rules import BoundRules
from edgetrain.codecs.sparse import RandK, TopK
from edgetrain.vectors.vector import Layout, Vector

DENSE = ["fp32", "fp16", "bf16", "int8", "int4", "qsgd(1)", "qsgd(7)", "qsgd(50)", "ternary"]
DENSE += ["sign", "q1", "q2", "q3", "q4"]
SPARSE = ["topk(0.01)", "topk(0.1) | q2", "topk(0.05, exact) | q1", "topk(0.2) | q4"]
SPARSE += ["topk(0.03) | q3", "topk(0.1) | int8", "topk(0.1) | bf16", "topk(0.3) | ternary"]
SPARSE += ["dgc(0.02) | q2"]
SPARSE += ["auto", "auto(0.3)", "auto(1.0)"]
SPARSE += ["topk(1.0) | q2", "randk(0.1)", "randk(0.02) | fp16", "randk(0.5) | q2"]
SHAPED = ["topk(0.02, tensor) | q2", "low-rank(2)", "low-rank(1, 2) | bf16"]
SHAPED += ["powersgd(2)"]
SHAPED += ["small(64): fp32; topk(0.05) | q2", "*bias: bf16; *.w: low-rank(1); sign"]
ALL = DENSE + SPARSE + SHAPED

KINDS = ["normal", "cubed", "few", "equal", "steps", "tiny", "huge", "zeros", "ramp", "clusters"]
KINDS += ["rows"]


def layout_of(elements: int) -> Layout:
    """Tensors of several shapes that fill a vector of that length."""
    shapes = [(16, 12), (16,), (3, 4, 5), (), (40, 9), (5,)]
    layout, at, i = [], 0, 0
    while at < elements:
        shape = shapes[i % len(shapes)]
        size = int(np.prod(shape))
        if at + size > elements:
            shape, size = (elements - at,), elements - at
        name = f"layer{i}." + ("bias" if len(shape) == 1 else "w")
        layout.append((name, at, shape))
        at += size
        i += 1
    return layout


def bound(spec: str, elements: int) -> Codec:
    """The codec of a spec, bound to `layout_of`."""
    return parse(spec).bind(layout_of(elements))


def make(kind: str, elements: int, seed: int) -> Vector:
    """A vector of one of KINDS."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(elements)
    if kind == "cubed":
        x = x**3
    elif kind == "few":
        x = x * (rng.random(elements) < 0.03)
    elif kind == "equal":
        x = np.full(elements, rng.choice([-0.75, 0.3, 1.0]))
    elif kind == "steps":
        x = np.round(2 * x) / 2
    elif kind == "tiny":
        x = x * 1e-36
    elif kind == "huge":
        x = x * 1e28
    elif kind == "zeros":
        x = x * 0
    elif kind == "ramp":
        x = np.arange(elements) - elements / 3
    elif kind == "clusters":
        x = x * np.exp(3 * np.sin(np.arange(elements) / 50))
    elif kind == "rows":
        x = x * np.repeat(rng.random(elements // 16 + 1) < 0.1, 16)[:elements]
    return np.ascontiguousarray(x, np.float32)


vectors = st.builds(make, st.sampled_from(KINDS), st.integers(1, 3000), st.integers(0, 2**32 - 1))


def parts(codec: Codec, elements: int) -> list[slice]:
    step = codec.part_elements
    return [slice(start, start + step) for start in range(0, elements, step)]


def decode(codec: Codec, payloads: list, elements: int) -> Vector:
    out = np.full(elements, np.nan, np.float32)
    for where, payload in zip(parts(codec, elements), payloads, strict=True):
        codec.decode(payload, out[where])
    return out


def assert_within_bound(codec: Codec, x: Vector, y: Vector) -> None:
    """y = decode(encode(x)) keeps what the codec's docstring promises."""
    error, size = np.abs(y.astype(np.float64) - x), np.abs(x.astype(np.float64))
    tolerance = 1e-6 * size.max() + 1e-36
    if isinstance(codec, Dense):
        assert (x == y).all()
    elif isinstance(codec, BoundTwoTrips):
        assert x.tobytes() == y.tobytes()
    elif isinstance(codec, BFloat):
        assert (error <= 2**-8 * size + 1e-40).all()
    elif isinstance(codec, Half):
        inside = size <= 65504
        assert (error[inside] <= 2**-11 * size[inside] + 2**-25).all()
    elif isinstance(codec, Blockwise):
        top = per_block(size, codec.code.block, np.max)
        share = 1.001 if codec.code.stochastic else 0.501
        assert (error <= share * top / codec.code.levels + 2.0**-100).all()
    elif isinstance(codec, Sign):
        assert (error <= np.maximum(size, per_block(size, SIGN_BLOCK, np.mean)) + tolerance).all()
        assert (error**2).sum() <= (size**2).sum() * 1.00001
    elif isinstance(codec, Planes):
        mean = per_block(size, LEVEL_BLOCK, np.mean) * 1.01
        assert (error <= np.maximum(size, 6.3 * mean) + tolerance).all()
    elif isinstance(codec, TopK):
        assert_top(codec, x, y)
    elif isinstance(codec, RandK):
        assert ((y == 0) | (error <= 7 * size.max())).all()
        assert np.count_nonzero(y) <= max(1, round(codec.density * x.size)) + 1
    elif isinstance(codec, Auto):
        assert_within_bound(codec.chosen, x, y)
    elif isinstance(codec, BoundRules):
        for piece in codec.pieces:
            assert_within_bound(piece.codec, piece.gather_elements(x), piece.gather_elements(y))
    elif isinstance(codec, BoundLowRank):
        slack = 1.02 if codec.name.endswith("bf16") else 1.00001
        assert np.linalg.norm(error) <= slack * np.linalg.norm(size) + 1e-36
    else:
        raise AssertionError(f"no bound is known for {codec}")


def assert_top(codec: TopK, x: Vector, y: Vector) -> None:
    """What is kept is at least as large as what is not, and as much is kept as was said."""
    size, wanted = np.abs(x), codec.wanted(x.size)
    count = 0
    kept = np.zeros(x.size, bool)
    payloads = codec.encode(x)
    for where, payload in zip(parts(codec, x.size), payloads, strict=True):
        positions, values = codec.entries(payload, x[where].size)
        assert (np.diff(positions.astype(np.int64)) > 0).all()
        kept[where][positions] = True
        count += positions.size
        if codec.values.fused_bits == 32:
            assert (values == x[where][positions]).all()
    assert not y[~kept].any()
    assert not kept[x == 0].any()
    assert count == min(wanted, np.count_nonzero(x))
    if kept.any() and not kept.all():
        assert size[kept].min() >= size[~kept].max()


def per_block(values: np.ndarray, block: int, what: object) -> np.ndarray:
    """`what` of each block, repeated for each of its elements."""
    result = np.empty(values.size)
    for start in range(0, values.size, block):
        result[start : start + block] = what(values[start : start + block])  # type: ignore[operator]
    return result
