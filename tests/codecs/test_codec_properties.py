"""What a codec says of itself, so that nobody has to read its spelling."""

import codec_cases as cases
import numpy as np
import pytest

from edgetrain.codecs import Codec, parse
from edgetrain.codecs.auto import Auto
from edgetrain.vectors.parts import parts_of

FLAGS = (
    "lossless", "verbatim", "nearly_all", "few_elements", "sums_only", "two_trips",
    "gradients_only",
)  # fmt: skip


def flags(codec: Codec) -> set[str]:
    return {flag for flag in FLAGS if getattr(codec, flag)}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("fp32", {"lossless", "verbatim", "nearly_all"}),
        ("bf16", {"nearly_all"}),
        ("int8", {"nearly_all"}),
        ("int4", set()),
        ("sign", set()),
        ("q2", set()),
        ("topk(0.1) | q2", {"few_elements"}),
        ("topk(0.1, tensor)", {"few_elements"}),
        ("randk(0.1)", {"few_elements"}),
        ("dgc(0.1)", {"few_elements", "gradients_only"}),
        ("low-rank(2)", set()),
        ("powersgd(2)", {"lossless", "sums_only", "two_trips", "gradients_only"}),
    ],
)
def test_each_codec_has_its_properties_bound_or_not(spec: str, expected: set[str]) -> None:
    assert flags(parse(spec)) == expected
    assert flags(cases.bound(spec, 3000)) == expected


def test_rules_have_the_properties_of_their_codecs_and_not_of_tensor_names() -> None:
    assert not flags(parse("*topk*: fp32; powersgd.*: bf16; int8"))
    assert flags(parse("*bias: fp32; topk(0.1)")) == {"few_elements"}
    # Bound, only the codecs that a tensor uses count.
    layout = (("a.bias", 0, (5,)),)
    assert flags(parse("*bias: int8; topk(0.1)").bind(layout)) == {"nearly_all"}
    assert flags(parse("*bias: fp32; topk(0.1)").bind(layout)) == {"lossless", "nearly_all"}


@pytest.mark.parametrize("spec", [s for s in cases.ALL if cases.bound(s, 3000).nearly_all])
def test_nearly_all_is_all_to_within_a_part_of_the_largest_element(spec: str) -> None:
    codec, rng = cases.bound(spec, 3000), np.random.default_rng(1)
    vector = rng.standard_normal(3000).astype(np.float32)
    found = np.empty_like(vector)
    for here, payload in zip(
        parts_of(3000, codec.part_elements), codec.encode(vector), strict=True
    ):
        codec.decode(payload, found[here])
    assert np.abs(found - vector).max() <= 0.004 * np.abs(vector).max()


def test_a_rung_of_auto_says_of_itself_whether_it_is_nearly_all() -> None:
    assert [Auto(rung=rung).nearly_all for rung in range(4)] == [True, True, False, False]


def test_only_deep_gradient_compression_has_momentum() -> None:
    assert parse("dgc(0.1)").momentum == 0.9
    assert parse("dgc(0.1, 0.5)").momentum == 0.5
    assert not any(parse(spec).momentum for spec in cases.ALL if "dgc" not in spec)


@pytest.mark.parametrize(
    ("spec", "displacements", "replies"),
    [
        ("dgc(0.01, 0.9, 100, 4) | q2", "topk(0.01) | q2", "dgc(0.01, 0.0, 100) | q2"),
        ("powersgd(2)", "low-rank(2)", "powersgd(2)"),
        ("topk(0.01) | q2", "topk(0.01) | q2", "topk(0.01) | q2"),
    ],
)
def test_a_codec_names_its_stand_ins(spec: str, displacements: str, replies: str) -> None:
    for codec in (parse(spec), cases.bound(spec, 3000)):
        assert codec.for_displacements().name == displacements
        assert not codec.for_displacements().gradients_only
        assert codec.for_replies().name == replies
        assert not codec.for_replies().momentum
