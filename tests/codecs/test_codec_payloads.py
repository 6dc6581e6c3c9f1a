"""What a decoder does with bytes that no encoder wrote: BadPayload, and nothing else."""

import os
import tracemalloc

import codec_cases as cases
import numpy as np
import pytest
from codec_mutations import mutate
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.codecs import Codec, parse
from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.codecs.kernels import native
from edgetrain.errors import BadPayload

ELEMENTS = 1200
MUTATIONS = int(os.environ.get("MUTATIONS", "60"))
"""Of each codec's payloads."""

CARRY_ANYTHING = ["fp32", "powersgd(2)", "fp16", "bf16", "small(64): fp32; topk(0.05) | q2"]
CARRY_ANYTHING += ["*bias: bf16; *.w: low-rank(1); sign"]
"""Dense floating-point codecs look at no value: NaN and infinity are theirs to carry."""


def outcome(codec: Codec, payload: bytes, choice: str) -> bytes | None:
    """What decodes, or None for BadPayload; both `decode` and `add` leave `out` alone then."""
    with kernels.using(choice):
        out, total = np.full(ELEMENTS, 7, np.float32), np.full(ELEMENTS, 7, np.float32)
        try:
            codec.decode(payload, out)
        except BadPayload:
            assert (out == 7).all()
            with pytest.raises(BadPayload):
                codec.add(payload, 2.0, total)
            assert (total == 7).all()
            return None
        codec.add(payload, 2.0, total)
        assert np.isfinite(out).all() or codec.name in CARRY_ANYTHING
        return out.tobytes() + total.tobytes()


@pytest.mark.parametrize("spec", cases.ALL)
def test_mutated_payloads(spec: str) -> None:
    rng = np.random.default_rng(len(spec))
    codec = cases.bound(spec, ELEMENTS)
    originals = [
        bytes(codec.encode(cases.make(kind, ELEMENTS, i))[0])
        for i, kind in enumerate(["normal", "few", "clusters", "steps", "rows"])
    ]
    choices = ["numpy", *native.instruction_sets()[-1:]]
    carried = "ignore" if codec.name in CARRY_ANYTHING else "warn"
    for i in range(MUTATIONS):
        payload = mutate(originals[i % 5], rng)
        with np.errstate(over=carried, invalid=carried):
            assert len({outcome(codec, payload, choice) for choice in choices}) == 1


@pytest.mark.parametrize("spec", cases.SPARSE)
@given(payload=st.binary(max_size=60))
def test_noise(spec: str, payload: bytes) -> None:
    codec = parse(spec)
    first, *others = [
        outcome(codec, payload, c) for c in ("numpy", *native.instruction_sets()[-1:])
    ]
    assert all(first == other for other in others)


LIES = [
    b"\xff\xff\x0f" + bytes(20),  # a quarter of a million entries in 20 bytes
    b"\xff\xff\xff\xff\x0f",
    b"\x80\x80\x10\x05\x01\x02\x03\x04\x05",
    bytes(4) + b"\x80\x80\x10" + bytes(40),
]


@pytest.mark.parametrize("spec", ["topk(0.1)", "topk(0.1) | q2", "topk(0.1) | int8", "randk(0.1)"])
@pytest.mark.parametrize("choice", ["numpy", *native.instruction_sets()[-1:]])
def test_a_lie_allocates_nothing(spec: str, choice: str) -> None:
    codec = parse(spec)
    out = np.zeros(2**18, np.float32)
    lies = LIES[:1] + LIES[3:] if spec == "randk(0.1)" else LIES
    with kernels.using(choice):
        for lie in [lies[0], *lies]:  # the first time round, Python itself allocates
            tracemalloc.start()
            try:
                codec.decode(lie, out)
                refused = False
            except BadPayload:
                refused = True
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert refused
        assert peak < 50_000


# A count of 5 in 100 elements at 3, 4, 20, 63, 99; see docs/reference/codecs.md for how it is made.
POSITIONS = np.array([3, 4, 20, 63, 99], np.uint32)
VALUES = np.array([1.0, -2.0, 3.0, -1.5, 1.0], np.float32)


def test_every_field_is_checked() -> None:
    run = kernels.current()
    good = run.sparse_encode(None, POSITIONS, VALUES, 100, 2)
    codec, out = parse("topk(0.05) | q2"), np.zeros(100, np.float32)
    codec.decode(good, out)
    assert np.flatnonzero(out).tolist() == POSITIONS.tolist()
    unary, low = good[1], good[2 + good[1] :]
    assert low
    bad = {
        "entries than": b"\x65" + good[1:],  # 101 of 100
        "shortest form": b"\x85\x00" + good[1:],
        "too early": good[:-1],
        "bytes follow": good + b"\0",
        "padding bits": good[: 2 + unary] + bytes([low[0], low[1], low[2] | 0x80]) + low[3:],
        "beyond the vector": None,
    }
    for message, payload in bad.items():
        if payload is None:
            with pytest.raises(BadPayload, match=message):
                codec.decode(good, np.zeros(99, np.float32)[: POSITIONS[-1]])
            continue
        with pytest.raises(BadPayload, match=message):
            codec.decode(payload, out)


def test_a_scale_must_be_a_magnitude() -> None:
    for spec, size in (("int8", 260), ("sign", 4 + 32), ("q2", 4 + 4 + 2 * 32)):
        codec, out = parse(spec), np.ones(256, np.float32)
        for scale in (np.nan, np.inf, -1.0, -0.0, 2.0**100):
            payload = np.float32(scale).tobytes() + bytes(size - 4)
            with pytest.raises(BadPayload, match="scale"):
                codec.decode(payload, out)
    out = np.ones(256, np.float32)
    for payload in (np.float32(1).tobytes() + b"\x80" * 256,):
        with pytest.raises(BadPayload, match="levels"):
            parse("int8").decode(payload, out)
    with pytest.raises(BadPayload, match="levels"):
        parse("ternary").decode(np.float32(1).tobytes() + b"\xff" * 52, out)
    with pytest.raises(BadPayload, match="levels"):
        parse("int4").decode(np.float32(1).tobytes() + bytes(128), out)
    assert (out == 1).all()
