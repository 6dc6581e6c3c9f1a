"""The laws that hold for every codec, every chain and every wrapper."""

import codec_cases as cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain import codecs
from edgetrain.codecs import Feedback, parse, salt_of
from edgetrain.codecs.deep import DeepGradient
from edgetrain.codecs.sparse import TopK
from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.vectors.vector import Vector

SOME = settings(max_examples=25, deadline=None)


@pytest.mark.parametrize("spec", cases.ALL)
@SOME
@given(x=cases.vectors)
def test_decoded_is_within_the_stated_bound(spec: str, x: Vector) -> None:
    codec = cases.bound(spec, x.size)
    before = x.copy()
    payloads = codec.encode(x)
    assert (x == before).all()
    cases.assert_within_bound(codec, x, cases.decode(codec, payloads, x.size))


@pytest.mark.parametrize("spec", cases.ALL)
@SOME
@given(
    kinds=st.lists(st.sampled_from(cases.KINDS[:5] + cases.KINDS[7:]), min_size=1, max_size=5),
    elements=st.integers(1, 2000),
    seed=st.integers(0, 2**32 - 1),
)
def test_feedback_loses_nothing(spec: str, kinds: list[str], elements: int, seed: int) -> None:
    codec = cases.bound(spec, elements)
    feedback = Feedback(codec, elements)
    given_, sent = np.zeros(elements), np.zeros(elements)
    size = np.zeros(elements)
    for i, kind in enumerate(kinds):
        x = cases.make(kind, elements, seed + i)
        given_ += x
        decoded = cases.decode(codec, feedback.encode(x), elements)
        sent += decoded
        size = np.maximum(size, np.abs(decoded) + np.abs(x))
    left = feedback.residual if feedback.residual.size else np.zeros(elements)
    rounding = 2**-23 * len(kinds) * (size.max() + np.abs(left).max())
    assert np.abs(sent + left - given_).max() <= 4 * rounding


MATRICES = (("w", 0, (24, 20)), ("b", 480, (20,)), ("v", 500, (15, 30)))
FOR_EVER = [
    (spec, start)
    for spec in (*cases.ALL, "dgc(0.05, 0.0)")
    for start in ("zero", "rank-one", "sparse")
    if not spec.startswith(("dgc(0.02)", "powersgd")) and (start != "rank-one" or "low" in spec)
]
"""Momentum adds up to more than the gradients; test_lowrank.py has PowerSGD."""


def constant_after(start: str, steps: int, elements: int = 950) -> list[Vector]:
    """The same gradient in each step but the first: that is zero, or its matrices are of rank one;
    or all are sparse, with zeros where a sample of one in 14 elements would look."""
    rng = np.random.default_rng(5)
    always, first = rng.standard_normal((2, elements)).astype(np.float32)
    if start == "zero":
        first[:] = 0
    elif start == "rank-one":
        for at, rows, columns in ((0, 24, 20), (500, 15, 30)):
            outer = np.outer(rng.standard_normal(rows), rng.standard_normal(columns))
            first[at : at + rows * columns] = outer.reshape(-1)
    else:
        always[(rng.random(elements) > 0.1) | (np.arange(elements) % 14 == 0)] = 0
        first = always
    return [first, *[always] * (steps - 1)]


@pytest.mark.parametrize(("spec", "start"), FOR_EVER)
def test_no_direction_is_left_out_for_ever(spec: str, start: str) -> None:
    codec = parse(spec).bind(MATRICES)
    feedback, left, shares = codecs.memory(codec, 950), np.zeros(950), []
    for step, gradient in enumerate(constant_after(start, 200)):
        left += gradient
        left -= cases.decode(codec, feedback.encode(gradient), 950)
        if step in (49, 199):
            shares.append(np.linalg.norm(left) / (step * np.linalg.norm(gradient)))
    assert shares[1] < 0.01 or shares[1] < 0.6 * shares[0]


@pytest.mark.parametrize(
    "spec",
    ["qsgd(7)", "ternary", "topk(0.5) | qsgd(3)", "*w: ternary; fp32", "topk(0.9) | ternary"],
)
def test_members_and_rounds_make_other_errors(spec: str) -> None:
    codec, x = parse(spec).bind(MATRICES), constant_after("sparse", 1)[0]
    salts = [salt_of(f"m{member}", 3) for member in range(8)]
    salts += [salt_of("m0", round) for round in range(8)]
    errors = np.array([cases.decode(codec, codec.encode(x, salt), 950) - x for salt in salts])
    for eight in (errors[:8], errors[8:]):
        assert 0.25 < np.linalg.norm(eight.mean(0)) / np.linalg.norm(eight[0]) < 0.5  # 8 ** -0.5


@pytest.mark.parametrize("spec", cases.ALL)
@SOME
@given(x=cases.vectors, seed=st.integers(0, 2**32 - 1))
def test_draining_is_encoding_the_sum(spec: str, x: Vector, seed: int) -> None:
    codec = cases.bound(spec, x.size)
    residual = cases.make("clusters", x.size, seed)
    total = residual + x
    payloads = codec.drain(residual, x)
    assert [bytes(p) for p in payloads] == [bytes(p) for p in codec.encode(total)]
    left = total - cases.decode(codec, payloads, x.size)
    assert np.array_equal(residual, left)


@pytest.mark.parametrize("spec", cases.ALL)
@SOME
@given(x=cases.vectors, weight=st.sampled_from([0.0, 1.0, -0.3, 1 / 3]))
def test_adding_is_adding_what_decodes(spec: str, x: Vector, weight: float) -> None:
    codec = cases.bound(spec, x.size)
    (payload,) = codec.encode(x)
    decoded = cases.decode(codec, [payload], x.size)
    out = cases.make("normal", x.size, 1)
    once = out + np.float32(weight) * decoded
    twice = once + np.float32(0.5) * decoded
    many = out.copy()
    codec.add(payload, weight, out)
    assert np.array_equal(out, once)
    codec.add_many([payload, payload], [weight, 0.5], many)
    assert np.array_equal(many, twice)


@pytest.mark.parametrize("spec", cases.ALL)
@SOME
@given(x=cases.vectors)
def test_no_payload_exceeds_what_was_announced(spec: str, x: Vector) -> None:
    codec = cases.bound(spec, x.size)
    for where, payload in zip(cases.parts(codec, x.size), codec.encode(x), strict=True):
        assert len(payload) <= codec.max_bytes(x[where].size)


@SOME
@given(
    runs=st.lists(st.integers(0, 2**12), min_size=1, max_size=300),
    density=st.sampled_from([0.001, 0.5, 1.0]),
)
def test_no_pattern_of_gaps_exceeds_what_was_announced(runs: list[int], density: float) -> None:
    ends = np.cumsum(np.array(runs) + 1)
    x = np.zeros(int(ends[-1]), np.float32)
    x[ends - 1] = 1
    codec = TopK(density, parse("q1"))  # type: ignore[arg-type]
    for payload in codec.encode(x):
        assert len(payload) <= codec.max_bytes(x.size)


@pytest.mark.parametrize("spec", [s for s in cases.ALL if s != "fp32"])
def test_what_is_not_finite_is_refused(spec: str) -> None:
    if spec in ("fp16", "bf16", "powersgd(2)") or "bias" in spec:
        pytest.skip("floating-point numbers carry what they are given")
    for bad in (np.nan, np.inf, -np.inf, 2.0**110):
        x = cases.make("normal", 1500, 3)
        x[777] = bad
        if spec.startswith("randk"):
            x[:] = bad
        with pytest.raises(EdgetrainError, match="diverged"):
            cases.bound(spec, x.size).encode(x)


@pytest.mark.parametrize("spec", cases.SPARSE + cases.DENSE)
def test_a_long_vector_in_parts(spec: str) -> None:
    codec = parse(spec)
    elements = 2 * codec.part_elements + 12345 if codec.part_elements <= 2**20 else 5_000_000
    x = cases.make("clusters", elements, 4)
    decoded = cases.decode(codec, codec.encode(x), elements)
    error = np.abs(decoded - x)
    if spec in ("fp32", "fp16", "bf16", "int8"):
        assert (error <= 0.01 * np.abs(x) + 0.5).all()
    else:
        assert np.linalg.norm(error) <= 1.5 * np.linalg.norm(x)
    feedback = Feedback(codec, elements)
    feedback.encode(x)
    if feedback.residual.size:
        assert np.array_equal(feedback.residual, x - decoded)


def test_a_sampled_threshold_meets_its_density() -> None:
    elements = 4_000_000
    for kind in ("normal", "clusters"):
        x = cases.make(kind, elements, 5)
        codec = TopK(0.1)
        step = codec.part_elements
        payloads = codec.encode(x)
        kept = np.zeros(elements, bool)
        for i, payload in enumerate(payloads):
            part = kept[i * step : (i + 1) * step]
            part[codec.entries(payload, part.size)[0]] = True
        assert abs(kept.sum() / codec.wanted(elements) - 1) < 0.1
        assert np.abs(x[kept]).min() >= np.abs(x[~kept]).max()


@pytest.mark.parametrize("width", [8, 16, 64, 256])
def test_the_share_is_met_where_large_magnitudes_stand_together(width: int) -> None:
    """Rows of an embedding: some are touched, most are not."""
    elements, codec = 1 << 20, TopK(0.1)
    for seed in range(4):
        draws = np.random.default_rng(seed)
        x = 0.01 * draws.standard_normal(elements).astype(np.float32)
        touched = draws.random(elements // width) < 0.12
        sizes = draws.lognormal(3, 1, size=(touched.sum(), 1)).astype(np.float32)
        x.reshape(-1, width)[touched] *= sizes
        kept = sum(positions.size for _, positions, _ in codec.pick(x, None, zero=False))
        assert abs(kept / codec.wanted(elements) - 1) < 0.1


def test_exact_is_exact_however_long() -> None:
    x = cases.make("clusters", 1_500_000, 6)
    for spec in ("topk(0.1, exact)", "topk(0.01)", "topk(0.4, exact)"):
        codec = parse(spec)
        kept = sum(
            codec.entries(p, x[w].size)[0].size  # type: ignore[attr-defined]
            for w, p in zip(cases.parts(codec, x.size), codec.encode(x), strict=True)
        )
        assert kept == codec.wanted(x.size)  # type: ignore[attr-defined]


def test_equal_magnitudes_do_not_flood() -> None:
    x = np.ones(3_000_000, np.float32)
    codec = TopK(0.1)
    assert sum(map(len, codec.encode(x))) < 5 * 300_000


@SOME
@given(
    elements=st.integers(1, 500),
    momentum=st.sampled_from([0.0, 0.9]),
    clip=st.sampled_from([None, 0.5, 100.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_deep_gradient_compression_follows_its_equations(
    elements: int, momentum: float, clip: float | None, seed: int
) -> None:
    codec = TopK(0.1)
    dgc = DeepGradient(codec, elements, momentum, clip=clip, members=4)
    u, v = np.zeros(elements), np.zeros(elements)
    for i in range(6):
        g = cases.make("cubed", elements, seed + i)
        sent = cases.decode(codec, dgc.encode(g), elements)
        scale = min(1.0, clip / 2 / np.linalg.norm(g)) if clip else 1.0
        u = momentum * u + scale * g
        v = v + u
        assert np.allclose(v - sent, dgc.residual, atol=1e-4)
        kept = sent != 0
        assert np.allclose(sent[kept], v[kept], atol=1e-4)
        u[kept], v[kept] = 0, 0
        assert np.allclose(dgc.velocity, u, atol=1e-4)


def test_warm_up_falls_to_the_density() -> None:
    dgc = DeepGradient(TopK(0.001), 10_000, warmup=4)
    densities = []
    for i in range(6):
        densities.append(dgc.codec_now().density)  # type: ignore[attr-defined]
        payloads = dgc.encode(cases.make("normal", 10_000, i))
        assert dgc.codec.entries(payloads[0], 10_000)[0].size == round(densities[-1] * 10_000)  # type: ignore[attr-defined]
    assert densities[0] == 0.25
    assert densities[4:] == [0.001, 0.001]
    ratios = np.diff(np.log(densities[:5]))
    assert np.allclose(ratios, ratios[0])


def test_state_can_be_kept_and_taken_over() -> None:
    for make in (lambda: Feedback(parse("sign"), 700), lambda: DeepGradient(TopK(0.1), 700)):
        first, second = make(), make()
        for i in range(3):
            first.encode(cases.make("normal", 700, i))
        second.restore({name: array.copy() for name, array in first.state().items()})
        x = cases.make("normal", 700, 9)
        assert [bytes(p) for p in first.encode(x)] == [bytes(p) for p in second.encode(x)]
        before = second.residual.copy()
        with pytest.raises(ConfigError, match="residual"):
            second.restore({})
        assert (second.residual == before).all()
        second.reset()
        assert not any(array.any() for array in second.state().values())
