"""The text of a codec: what it accepts, how it is spelt, and the sentences for what it refuses."""

import codec_cases as cases
import numpy as np
import pytest

from edgetrain.codecs import parse
from edgetrain.codecs.rules import Rules
from edgetrain.codecs.sparse import TopK
from edgetrain.codecs.table import TABLE
from edgetrain.errors import ConfigError


@pytest.mark.parametrize("spec", cases.ALL)
def test_the_name_gives_the_codec_back(spec: str) -> None:
    codec = parse(spec)
    assert parse(codec.name) == codec
    assert parse(codec.name).name == codec.name
    assert hash(parse(codec.name)) == hash(codec)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (" dense ", "fp32"),
        ("topk( 0.01 )|q2", "topk(0.01) | q2"),
        ("topk(1e-3,exact)", "topk(0.001, exact)"),
        ("topk(0.5, tensor) | fp32", "topk(0.5, tensor)"),
        ("qsgd", "qsgd(7)"),
        ("low-rank(4)", "low-rank(4)"),
        ("low-rank(4, 2)|fp16", "low-rank(4, 2) | fp16"),
        ("dgc(0.01, 0.9, 0, 0)|q2", "dgc(0.01) | q2"),
        ("dgc(0.01, 0.9, 100)", "dgc(0.01, 0.9, 100)"),
        ("dgc(1e-3, 0, 0, 4)", "dgc(0.001, 0.0, 0, 4.0)"),
        ("small(64):fp32;sign", "small(64): fp32; sign"),
    ],
)
def test_canonical_spelling(text: str, name: str) -> None:
    assert parse(text).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpok(0.01)", "did you mean 'topk'"),
        ("q5", "no codec 'q5'"),
        ("", "is not a codec"),
        ("topk(0.01", "is not a codec"),
        ("topk", "one density"),
        ("topk(0)", r"share in \(0, 1\]"),
        ("topk(1.5)", r"share in \(0, 1\]"),
        ("topk(nan)", "one density"),
        ("topk(0.01, exat)", "did you mean 'exact'"),
        ("randk(0.1, exact)", "no option 'exact'"),
        ("int8(3)", "takes no arguments"),
        ("int8 | q2", "nothing can follow"),
        ("topk(0.1) | topk(0.1)", "cannot code values"),
        ("topk(0.1) | q2 | q2", "at most 2"),
        ("qsgd(0)", "from 1 to 127"),
        ("qsgd(1.5)", "from 1 to 127"),
        ("dgc", "one density"),
        ("dgc(0.01, 1)", r"momentum is in \[0, 1\)"),
        ("dgc(0.01, 0.9, 1.5)", "from 0 to 1000000"),
        ("dgc(0.01, 0.9, 0, -1)", "0 or more"),
        ("dgc(0.01, 0.9, 0, 1, 1)", "1 to 4 numbers"),
        ("dgc(0.01, tensor)", "no option 'tensor'"),
        ("small(64): fp32; dgc(0.01)", "whole vector"),
        ("powersgd", "from 1 to 64"),
        ("powersgd(2) | bf16", "nothing can follow"),
        ("topk(0.1) | powersgd(2)", "takes no arguments|no codec"),
        ("*.bias: fp32; powersgd(2)", "whole vector"),
        ("low-rank", "takes a rank"),
        ("low-rank(0)", "from 1 to 64"),
        ("low-rank(4) | q2", "multiplied by the other"),
        ("fp32; sign", "takes every tensor"),
        ("*.bias: fp32", "no pattern matches"),
        (": fp32; sign", "no pattern before"),
        ("small(x): fp32; sign", "whole number"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_every_documented_name_is_a_codec() -> None:
    for name, row in TABLE.items():
        assert row.spelling.startswith(name)
        assert parse(row.example).name.startswith(name)


def test_the_first_rule_that_takes_a_tensor_codes_it() -> None:
    codec = parse("small(4): fp32; *.bias: bf16; head.*: int8; sign")
    assert isinstance(codec, Rules)
    shapes = [("a.weight", (4, 4)), ("a.bias", (4,)), ("head.weight", (3, 3)), ("head.bias", (6,))]
    layout, at = [], 0
    for name, shape in shapes:
        layout.append((name, at, shape))
        at += int(np.prod(shape))
    taken = [rule.name.split(": ")[-1] for rule in codec.rules]
    assert taken == ["fp32", "bf16", "int8", "sign"]
    pieces = {piece.codec.name: piece.ranges for piece in codec.bind(layout).pieces}  # type: ignore[attr-defined]
    assert pieces == {
        "fp32": ((16, 20),),
        "bf16": ((29, 35),),
        "int8": ((20, 29),),
        "sign": ((0, 16),),
    }


def test_neighbours_under_one_rule_are_one_range() -> None:
    layout = (("a", 0, (2, 3)), ("b", 6, (4,)), ("c", 10, (5,)))
    bound = parse("b: fp32; sign").bind(layout)
    assert [piece.ranges for piece in bound.pieces] == [((6, 10),), ((0, 6), (10, 15))]  # type: ignore[attr-defined]
    bound = parse("small(3): fp32; sign").bind(layout)
    assert [piece.ranges for piece in bound.pieces] == [((0, 15),)]  # type: ignore[attr-defined]


def test_a_layout_must_fit() -> None:
    for layout in ([("a", 0, (2,)), ("b", 3, (2,))], []):
        with pytest.raises(ConfigError, match=r"starts at 3|no elements"):
            parse("low-rank(1)").bind(layout)
    x = np.zeros(10, np.float32)
    with pytest.raises(ConfigError, match="bind"):
        parse("topk(0.1, tensor)").encode(x)
    bound = parse("topk(0.1, tensor)").bind((("a", 0, (10,)),))
    with pytest.raises(ConfigError, match="bound to 10 elements, not 11"):
        bound.encode(np.zeros(11, np.float32))
    with pytest.raises(ConfigError, match="bound to 10 elements, not 11"):
        bound.decode(b"", np.zeros(11, np.float32))


def test_another_density_keeps_the_parts() -> None:
    codec = parse("topk(0.001) | q2")
    assert isinstance(codec, TopK)
    warm = codec.at_density(0.25)
    assert (warm.part_elements, warm.density) == (codec.part_elements, 0.25)
    x = cases.make("normal", 5000, 0)
    (payload,) = warm.encode(x)
    out = np.empty_like(x)
    codec.decode(payload, out)
    assert np.count_nonzero(out) == 1250
