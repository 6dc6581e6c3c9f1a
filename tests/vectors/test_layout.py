"""A layout's text: what is described comes back, and nothing but BadMessage leaves `read`."""

from __future__ import annotations

import contextlib
import doctest
import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import BadMessage, ConfigError
from edgetrain.vectors import layout

NAMES = st.text(st.characters(exclude_categories=("C", "Z")) | st.just(" "), min_size=1)
TENSORS = st.lists(
    st.tuples(
        NAMES.filter(lambda name: len(name) <= layout.MAX_NAME),
        st.lists(st.integers(0, 50), max_size=5).map(tuple),
        st.sampled_from(["float32", "bfloat16", "float64"]),
    ),
    max_size=8,
)


def elements_of(tensors) -> int:
    return sum(math.prod(shape) for _, shape, _ in tensors)


@given(TENSORS.filter(bool))
def test_what_is_described_comes_back(tensors):
    found = layout.read(layout.describe(tensors), elements_of(tensors))
    assert [(name, shape) for name, _, shape in found] == [(n, shape) for n, shape, _ in tensors]
    at = 0
    for _, start, shape in found:
        assert start == at
        at += math.prod(shape)


@given(TENSORS, TENSORS)
def test_only_equal_models_have_equal_digests(one, other):
    same = layout.digest(layout.describe(one)) == layout.digest(layout.describe(other))
    assert same == (one == other)


@given(TENSORS.filter(bool), st.integers(-3, 3).filter(bool))
def test_another_number_of_elements_is_refused(tensors, more):
    with pytest.raises(BadMessage, match="elements"):
        layout.read(layout.describe(tensors), elements_of(tensors) + more)


@given(TENSORS, st.data())
def test_damaged_layouts_raise_only_bad_message(tensors, data):
    text = bytearray(layout.describe(tensors) or b"float32 3 a\n")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        match data.draw(st.sampled_from(["insert", "cut", "flip"])):
            case "insert":
                text[at:at] = data.draw(
                    st.binary(max_size=6) | st.sampled_from([b"x9", b"\n", b" "])
                )
            case "cut":
                del text[at:]
            case "flip" if at < len(text):
                text[at] ^= data.draw(st.integers(1, 255))
    elements = elements_of(tensors) + 3 * (not tensors)
    with contextlib.suppress(BadMessage):
        found = layout.read(bytes(text), elements)
        assert sum(math.prod(shape) for _, _, shape in found) == elements


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"float32 3 a",
        b"float32 3 a\n\n",
        b"float32 3 a\nand more",
        b"float32 -3 a\n",
        b"float32 3x a\n",
        b"float32 3 \n",
        b"float32 3 a\x00\n",
        b"float32 3 \xff\n",
        b"float32 3.0 a\n",
        b"Float32 3 a\n",
        "float32 ٣ a\n".encode(),  # a digit to str.isdigit
        b"float32 " + b"9" * 14 + b" a\n",
        b"float32 " + b"x".join([b"1"] * 33) + b" a\n",
        b"float32 3 " + b"a" * (layout.MAX_NAME + 1) + b"\n",
        b"float32 1 a\n" * (layout.MAX_BYTES // 12 + 1),
        b"float32 3 a\n" + b"float32 0 a\n" * (layout.MAX_BYTES // 12),
    ],
    ids=lambda text: repr(text[:24]),
)
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(BadMessage):
        layout.read(text, 3)


def test_a_lie_about_sizes_costs_no_memory():
    text = b"float32 " + b"x".join([b"9" * 13] * 32) + b" a\n"
    many = b"float32 1 a\n" * 80_000
    tracemalloc.start()
    for lie in (text, many):
        with pytest.raises(BadMessage):
            layout.read(lie, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * layout.MAX_BYTES


@pytest.mark.parametrize(
    "tensor",
    [("a\nb", (1,), "float32"), ("", (1,), "float32"), ("a" * 600, (1,), "float32"),
     ("a", (1,) * 33, "float32"), ("a\u2028", (1,), "float32"), ("a\x7f", (), "float32")],
    ids=lambda tensor: repr(tensor[0][:8]),
)  # fmt: skip
def test_a_model_that_cannot_be_described_is_refused_at_home(tensor):
    with pytest.raises(ConfigError, match="cannot be described"):
        layout.describe([tensor])


def test_too_many_tensors_are_refused_at_home():
    with pytest.raises(ConfigError, match="allowed are 1048576"):
        layout.describe([("a" * 500, (1,), "float32")] * 3000)


def test_the_example_is_true():
    assert doctest.testmod(layout).failed == 0


def test_digests_with_fixed_values_agree_with_those_that_do_not_tell():
    text = layout.describe([("weight", (2, 2), "float32")])
    plain, one, other = (layout.digest(text, fixed) for fixed in ("", "a" * 24, "b" * 24))
    assert layout.tensors_agree(plain, one)
    assert layout.tensors_agree(one, other)
    assert not layout.tensors_agree(plain, layout.digest(b"another"))
    assert layout.fixed_agree(plain, one)
    assert layout.fixed_agree(one, one)
    assert not layout.fixed_agree(one, other)
    assert max(map(len, (plain, one, other))) <= 64


def test_the_first_tensor_that_differs_is_named():
    one = layout.describe([("a", (2,), "float32"), ("b", (3,), "float32")])
    other = layout.describe([("a", (2,), "float32"), ("b", (4,), "float32"), ("c", (), "float32")])
    assert "'float32 3 b' and 'float32 4 b'" in layout.first_difference(one, other)
    assert "'no tensor' and 'float32 - c'" in layout.first_difference(one, one + b"float32 - c\n")
    assert layout.first_difference(one, one) == layout.first_difference(one, b"") == ""
