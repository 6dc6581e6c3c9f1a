"""Parts that are merged before a round is whole change nothing but the time at which it is done."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from merging_room import Counting

from edgetrain.codecs import Dense
from edgetrain.exchange.hub.effects import Send
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import PROTOCOL, Base, Contribute, Join, Leave, Reply
from edgetrain.strategies import find
from edgetrain.vectors.vector import checksum

ELEMENTS, PART, PARTS = 11, 4, 3


def started(names: str) -> tuple[Hub, Counting]:
    codec, rule = Dense(), Counting()
    codec.part_elements = PART
    terms = Terms(find("local-sgd"), 1)
    hub = Hub(terms, Policy(len(names)), rule, codec, codec)
    base = np.zeros(ELEMENTS, np.float32)
    for name in names:
        join(hub, name)
    hub.handle(names[0].encode(), Base(0, 1, memoryview(base).cast("B")), 0.0)
    assert hub.started
    return hub, rule


def join(hub: Hub, name: str) -> None:
    known = checksum(np.zeros(ELEMENTS, np.float32))
    hub.handle(name.encode(), Join(PROTOCOL, "", "model", ELEMENTS, name, 1.0, known), 0.0)


def part(vector, index: int) -> Contribute:
    payload = memoryview(vector[PART * index : PART * (index + 1)].copy()).cast("B")
    known = checksum(np.zeros(ELEMENTS, np.float32))
    return Contribute(0, index, PARTS, 1.0, 0, known, 0, payload)


def reply(effects) -> np.ndarray | None:
    """What the first member that is replied to gets."""
    sent = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Reply)]
    pieces = [e.message.payload for e in sent if e.to == sent[0].to]
    return np.frombuffer(b"".join(pieces), np.float32) if pieces else None


def mean(vectors) -> np.ndarray:
    """In the order of names, as a hub that waits for all would add them."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total * np.float32(1 / len(vectors))


@given(
    order=st.permutations("abcd" * PARTS),
    leaver=st.sampled_from(["", *"abcd"]),
    after=st.integers(0, 4 * PARTS - 1),
    back=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_reply_is_the_mean_of_who_counts_bit_for_bit(order, leaver, after, back, seed):
    hub, _ = started("abcd")
    rng = np.random.default_rng(seed)
    vectors = {name: rng.standard_normal(ELEMENTS).astype(np.float32) for name in "abcd"}
    sent = dict.fromkeys("abcd", 0)
    got = None
    for turn, name in enumerate(order):
        if turn == after and leaver:
            found = reply(hub.handle(leaver.encode(), Leave("test"), 0.0))
            got = found if got is None else got
            if back and hub.round == 0 and sent[leaver] < PARTS:
                join(hub, leaver)
                vectors[leaver], sent[leaver] = vectors[leaver] * np.float32(3), 0
        if leaver == name and turn >= after and sent[name] == PARTS:
            continue
        found = reply(hub.handle(name.encode(), part(vectors[name], sent[name]), 0.0))
        got = found if got is None else got
        sent[name] += 1
    for name in "abcd":  # a member that came back has more to send
        while sent[name] < PARTS and got is None:
            got = reply(hub.handle(name.encode(), part(vectors[name], sent[name]), 0.0))
            sent[name] += 1
    counted = [vectors[name] for name in "abcd" if sent[name] == PARTS]
    assert got is not None
    assert got.tobytes() in {mean(counted).tobytes(), *without(vectors, leaver)}


def without(vectors, leaver: str) -> list[bytes]:
    return [mean([v for name, v in vectors.items() if name != leaver]).tobytes()] if leaver else []


def test_each_part_is_merged_once_and_only_the_last_at_the_close():
    hub, rule = started("abc")
    vector = np.arange(ELEMENTS, dtype=np.float32)
    for index in range(PARTS):
        for name in "cab":
            hub.handle(name.encode(), part(vector, index), 0.0)
        assert rule.merged == index + 1
    assert hub.round == 1
    assert hub.base.tobytes() == vector.tobytes()


def test_a_part_made_with_a_member_that_left_is_made_again():
    hub, rule = started("abc")
    vectors = {name: np.full(ELEMENTS, 10.0**i, np.float32) for i, name in enumerate("abc")}
    for name in "abc":
        hub.handle(name.encode(), part(vectors[name], 0), 0.0)
    assert rule.merged == 1
    hub.handle(b"c", Leave("test"), 0.0)
    for index in range(1, PARTS):
        for name in "ab":
            hub.handle(name.encode(), part(vectors[name], index), 0.0)
    assert hub.round == 1
    np.testing.assert_array_equal(hub.base, np.full(ELEMENTS, 5.5, np.float32))
