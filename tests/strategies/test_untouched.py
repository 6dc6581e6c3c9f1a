"""Rounds that touch few rows: work on a few blocks gives the bits that work on all gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.strategies import expected
from edgetrain.strategies.displacement import Displacement
from edgetrain.strategies.unsent import Unsent
from edgetrain.vectors.blocks import BLOCK, are_few, touched_blocks
from edgetrain.vectors.vector import TILE, Vector, checksum

ELEMENTS = 5 * TILE + 5 * BLOCK + 77


class Moving(Unsent):
    """Moves the unsent part as a fixed pattern says, whatever replies teach."""

    turn = 0

    def belongs_beside(self) -> bool:
        self.turn += 1
        return self.turn % 5 in (3, 4)


class Member:
    """A member whose steps touch few elements, and whose replies touch few others."""

    def __init__(self, elements: int, delay: int, lossy: bool, moves: bool, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.params = self.rng.standard_normal(elements).astype(np.float32)
        self.negative_zeros = self.rng.integers(0, elements, 50)
        self.params[self.negative_zeros] = -0.0
        self.half = Displacement(self.params, local_steps=2, delay=2 * delay)
        if moves:
            self.half.unsent = Moving(elements)
        self.lossy = lossy
        self.replies: list[Vector] = []
        self.seen: list[bytes] = []
        """Contributions, and the checksum of the base after each reply."""

    def exchange(self, own: Vector | None) -> None:
        """Send a contribution, and take the replies that are due."""
        if own is not None:
            if self.lossy:
                own = np.where(np.abs(own) > 0.5, np.sign(own), 0).astype(np.float32)
                self.half.sent(own)
            own = own + np.float32(0)  # where it is -0.0 or 0.0, the reply is the same for both
            self.seen.append(own.tobytes())
            self.replies.append(own)
        while self.half.due() is not None:
            share = self.rng.choice([0, 0.5, 0.5])  # 0: the round closed without this member
            self.take(np.float32(share) * self.replies.pop(0))

    def take(self, reply: Vector) -> None:
        """Take a reply, in which some elements more are other than zero."""
        reply[self.rng.integers(0, reply.size, 4)] = 1.5
        reply[self.rng.choice(self.negative_zeros, 3)] = -0.0
        self.half.apply([reply])
        assert self.half.checksum == checksum(self.half.base)
        self.seen.append(self.half.checksum.to_bytes(8, "little"))

    def train(self, rounds: int) -> None:
        """Train `rounds` rounds of two steps; once, a base comes in place of replies."""
        for step in range(2 * rounds):
            at = self.rng.integers(0, self.params.size - 8)
            self.params[at : at + 8] += self.rng.standard_normal(8).astype(np.float32)
            if step == rounds | 1:
                base = self.half.base.copy()
                base[self.rng.integers(0, base.size, 9)] = 0.25
                self.half.rebase(base, self.half.round)
                self.replies.clear()
            self.exchange(self.half.after_step())
        self.exchange(self.half.finish())

    def result(self) -> tuple[list[bytes], bytes, bytes]:
        """What was seen; the base; the parameters."""
        return self.seen, self.half.base.tobytes(), self.params.tobytes()


@given(
    elements=st.sampled_from([ELEMENTS, 20 * BLOCK, 40 * BLOCK + 1]), delay=st.integers(0, 3),
    lossy=st.booleans(), moves=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_few_blocks_give_the_bits_of_all(
    elements: int, delay: int, lossy: bool, moves: bool, seed: int
) -> None:
    some, all_blocks = (Member(elements, delay, lossy, moves, seed) for _ in range(2))
    some.train(8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(expected, "are_few", lambda flags: False)
        all_blocks.train(8)
    assert len(some.seen) > 12
    assert some.result() == all_blocks.result()
    assert some.params.tobytes() == some.half.base.tobytes()


def test_a_base_of_negative_zeros_is_added_to_where_a_reply_is_zero() -> None:
    """-0.0 + 0.0 is 0.0: blocks without anything in them change all the same."""
    members = [Displacement(np.full(20 * BLOCK, -0.0, np.float32)) for _ in range(2)]
    reply = np.zeros(20 * BLOCK, np.float32)
    reply[3] = -0.0
    with pytest.MonkeyPatch.context() as patched:
        for half in members:
            for _ in range(3):
                half.params[BLOCK] += 1
                half.after_step()
                half.apply([reply.copy()])
                reply[3] = 0
            reply[3] = -0.0
            patched.setattr(expected, "are_few", lambda flags: False)
    assert members[0].base.tobytes() == members[1].base.tobytes()
    assert not np.signbit(members[0].base).any()


@pytest.mark.parametrize("delay", [0, 3])
def test_a_reply_of_few_rows_reads_only_their_tiles(
    monkeypatch: pytest.MonkeyPatch, delay: int
) -> None:
    params = np.ones(ELEMENTS, np.float32)
    half, sent = Displacement(params, local_steps=1, delay=delay), []
    for number in range(delay + 3):
        params[number] += 1
        sent.append(half.after_step())
        if half.due() is None:
            continue
        if half.applied:
            monkeypatch.setattr("edgetrain.strategies.displacement.tile_sum", None)
        half.apply([sent.pop(0)])
    assert half.applied == 3
    assert half.checksum == checksum(half.base)


def test_what_is_not_zero_is_seen() -> None:
    for size in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK):
        for at in {0, size // 2, size - 1}:
            vector = np.zeros(size, np.float32)
            assert not touched_blocks(vector).any()
            vector[at] = -0.0
            flags = touched_blocks(vector)
            assert np.flatnonzero(flags).tolist() == [at // BLOCK]


def test_one_block_in_four_is_few() -> None:
    assert are_few(np.array([True] + [False] * 3))
    assert not are_few(np.array([True] + [False] * 2))
