"""Merge rules: the weighted mean of what arrived, the same on every run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import codecs
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.vector import Buffer, Vector


@dataclass
class Encoded:
    """A piece as the hub holds it: a payload, a codec, a weight."""

    weight: float
    payload: Buffer
    codec: codecs.Codec

    def read(self, out: Vector) -> None:
        self.codec.decode(self.payload, out)

    def add(self, weight: float, out: Vector) -> None:
        self.codec.add(self.payload, weight, out)


def pieces_of(vectors, weights, codec=None):
    codec = codec or codecs.Dense()
    return [Encoded(w, codec.encode(v)[0], codec) for v, w in zip(vectors, weights, strict=True)]


FLEETS = st.integers(1, 6).flatmap(
    lambda members: st.tuples(
        st.lists(st.floats(1e-3, 1e6), min_size=members, max_size=members),
        st.integers(1, 50),
        st.integers(0, 99),
    )
)


def drawn(weights, size, seed):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(size).astype(np.float32) for _ in weights]


@given(FLEETS, st.sampled_from(["fp32", "bf16", "int8"]))
def test_it_is_the_weighted_mean_of_what_was_decoded(fleet, spelled):
    weights, size, _seed = fleet
    codec = codecs.parse(spelled)
    pieces = pieces_of(drawn(*fleet), weights, codec)
    decoded = np.empty((len(weights), size), np.float32)
    for piece, row in zip(pieces, decoded, strict=True):
        piece.read(row)
    out = np.full(size, np.nan, np.float32)  # overwritten, not added to
    Mean().merge(pieces, out)
    expected = np.average(decoded.astype(np.float64), axis=0, weights=weights)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@given(FLEETS)
def test_one_member_gets_its_own_back_bit_for_bit(fleet):
    weights, size, _seed = fleet
    (vector,) = drawn(weights[:1], size, 1)
    out = np.empty(size, np.float32)
    Mean().merge(pieces_of([vector], weights[:1]), out)
    assert out.tobytes() == vector.tobytes()


@given(FLEETS, st.integers(-20, 20))
def test_only_the_ratio_of_weights_counts(fleet, power):
    weights, size, _ = fleet
    one, other = np.empty((2, size), np.float32)
    Mean().merge(pieces_of(drawn(*fleet), weights), one)
    Mean().merge(pieces_of(drawn(*fleet), [w * 2.0**power for w in weights]), other)
    assert one.tobytes() == other.tobytes()


@given(FLEETS)
def test_equal_contributions_are_their_own_mean(fleet):
    weights, size, seed = fleet
    (vector,) = drawn(weights[:1], size, seed)
    out = np.empty(size, np.float32)
    Mean().merge(pieces_of([vector] * len(weights), weights), out)
    np.testing.assert_allclose(out, vector, rtol=1e-5)


def test_extreme_weights_stay_finite():
    vectors = drawn([0, 0], 4, 0)
    for weights in ([1e-9, 1e15], [1e15, 1e-9]):
        out = np.empty(4, np.float32)
        Mean().merge(pieces_of(vectors, weights), out)
        np.testing.assert_allclose(out, vectors[int(weights[1] > 1)], rtol=1e-5)


@pytest.mark.parametrize("keeps", [True, False])
def test_the_rule_says_whether_late_contributions_count(keeps):
    assert Mean(keeps).keeps_late is keeps
