"""Shamir's shares: any threshold of them restores the seed, and the bits are those of others."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cryptography")

from edgetrain.exchange.masks.primitives import combine, split

SEEDS = st.binary(min_size=16, max_size=16)
# Made by pycryptodome 4.4.0: its Shamir.split(3, 5, seed).
KNOWN = {
    "00000000000000000000000000000000": [
        "cb2015f8306be92785fe11d2e339206a",
        "fc464f72f17509ac0d5404a6c73802c4",
        "37665a8ac11ee08b88aa1574240122ae",
        "50950cefa4617cd4000895418b590fd4",
        "9bb51917940a95f385f6849368602fbe",
    ],
    "ffffffffffffffffffffffffffffffff": [
        "cd4bb9c5a2f1f90bf9c75a7c08f25c87",
        "aa0c96a6866b1eef274f581d59c04fe3",
        "98b8d09cdb65181b2177fd9eaecdec9b",
        "9676b9fa02f58e3d1d9903af93134477",
        "a4c2ffc05ffb88c91ba1a62c641ee70f",
    ],
    "5c11a3590396c8778c758a63ff592514": [
        "2f0df5700f31bc980477848c17351e5e",
        "b1312edfa2ade347b4d32a7f477536f8",
        "c22d78f6ae0a97a83cd12490af190db2",
        "aa303f06a03795ab5fb23d572cd097ab",
        "d92c692fac90e144d7b033b8c4bcace1",
    ],
}


@given(SEEDS, st.integers(1, 6), st.integers(0, 3))
def test_as_many_shares_as_the_threshold_restore_the_seed(seed, threshold, more):
    shares = split(seed, threshold, threshold + more)
    assert all(len(share) == 16 for share in shares)
    for some in itertools.combinations(range(threshold + more), threshold):
        assert combine({place: shares[place] for place in some}) == seed


@given(SEEDS, st.integers(2, 6))
def test_fewer_shares_say_nothing_of_the_seed(seed, threshold):
    """Those of one place less go with any other seed: as many polynomials lead to each."""
    fewer = dict(enumerate(split(seed, threshold, threshold - 1)))
    assert combine(fewer) != seed
    twice = split(seed, threshold, threshold)
    assert twice != split(seed, threshold, threshold), "coefficients are drawn anew"


@pytest.mark.parametrize("seed", KNOWN)
def test_shares_are_those_of_pycryptodome(seed):
    shares = list(map(bytes.fromhex, KNOWN[seed]))
    for some in itertools.combinations(range(5), 3):
        assert combine({place: shares[place] for place in some}).hex() == seed
