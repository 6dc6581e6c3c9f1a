"""A map is checked before a member believes it, and says who may be heard."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import BadMessage
from edgetrain.exchange.further_messages import Hello
from edgetrain.exchange.keys.pairs import spell
from edgetrain.exchange.messages import Map, Peer
from edgetrain.exchange.peers.neighbours import Neighbours
from edgetrain.vectors.ranges import shared

KEYS = {name: bytes([number]) * 32 for number, name in enumerate("abcd")}


def peer(name, first=0, end=0, address=None, key=""):
    return Peer(
        name, f"tcp://10.0.0.1:{ord(name)}" if address is None else address, key, first, end
    )


def the_map(*peers, first=0, end=0, trying=False, name="a"):
    return Map(3, trying, 77, name, first, end, peers)


def keyed(*peers):
    return [each._replace(key=spell(KEYS[each.name])) for each in peers]


GOOD = the_map(peer("a", 0, 2), peer("b", 2, 5), peer("c", address=""))

BAD = {
    "a range without a reducer": the_map(peer("a", 0, 2), peer("b", 3, 5)),
    "the first range without one": the_map(peer("a", 1, 2)),
    "a range with two": the_map(peer("a", 0, 2), peer("b", 1, 5)),
    "the hub's and a member's": the_map(peer("a", 0, 2), first=0, end=4),
    "ranges while they try": replace(GOOD, trying=True),
    "itself missing": replace(GOOD, name="d"),
    "a name twice": the_map(peer("a", 0, 2), peer("a")),
    "a reducer at no address": the_map(peer("a"), peer("b", 0, 1, address="")),
    "an address that is none": the_map(peer("a", 0, 1, address="10.0.0.1")),
    "a key where there are none": the_map(*keyed(peer("a", 0, 1))),
}


def test_a_map_says_who_reduces_what_and_whom_to_try():
    found = Neighbours.of(GOOD, encrypted=False)
    assert [p.name for p in found.reducers] == ["a", "b"]
    assert [p.name for p in found.others] == ["b"]
    assert found.own.name == "a"
    for end in (4, 0):  # the hub reduces, or members average among themselves
        lone = Neighbours.of(the_map(peer("a"), peer("b"), first=0, end=end), encrypted=False)
        assert lone.reducers == ()


@pytest.mark.parametrize("map", BAD.values(), ids=BAD.keys())
def test_a_map_that_cannot_be_is_refused(map):
    with pytest.raises(BadMessage, match="a map "):
        Neighbours.of(map, encrypted=False)


@pytest.mark.parametrize("key", ["", "short", spell(bytes(31)), spell(bytes(33)), "é" * 43])
def test_an_encrypted_member_takes_no_map_in_which_one_has_no_key(key):
    good = the_map(*keyed(peer("a", 0, 1), peer("b")))
    assert Neighbours.of(good, encrypted=True).by_key == {KEYS[n]: n for n in "ab"}
    with pytest.raises(BadMessage, match="has the key"):
        Neighbours.of(the_map(*keyed(peer("a", 0, 1)), peer("b", key=key)), encrypted=True)


SPANS = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted)


@given(st.lists(SPANS, min_size=1, max_size=4), SPANS, st.booleans())
def test_a_map_is_taken_if_and_only_if_each_range_has_one_reducer_or_none_has(spans, own, trying):
    map = the_map(*(peer(name, *span) for name, span in zip("abcd", spans, strict=False)),
                  first=own[0], end=own[1], trying=trying)  # fmt: skip
    owners = sorted(n for first, end in [own, *spans] for n in range(first, end))
    fits = (not owners) if trying else owners == list(range(len(owners)))
    try:
        Neighbours.of(map, encrypted=False)
    except BadMessage:
        assert not fits
    else:
        assert fits


GREETED = Neighbours.of(the_map(*keyed(peer("a", 0, 1), peer("b"), peer("c"))), encrypted=True)
GOOD_HELLO = Hello(77, "b", "a")


def test_who_is_heard_has_the_ticket_the_names_and_the_key():
    assert GREETED.why_not(GOOD_HELLO, KEYS["b"]) == ""
    for hello, key, why in [
        (replace(GOOD_HELLO, ticket=78), KEYS["b"], "ticket"),
        (replace(GOOD_HELLO, to="c"), KEYS["b"], "this is a"),
        (replace(GOOD_HELLO, name="d"), KEYS["d"], "no member"),
        (GOOD_HELLO, KEYS["c"], "another key"),
        (GOOD_HELLO, b"", "another key"),
    ]:
        assert why in GREETED.why_not(hello, key)


@given(st.integers(2, 16), st.integers(0, 40))
def test_members_begin_to_send_at_different_reducers_and_these_to_answer_at_different_members(
    n, more
):
    """So no line has what all send at once while another has nothing."""
    stretches = shared(n + more, n)
    peers = [peer(chr(97 + i), each.first, each.end) for i, each in enumerate(stretches)]
    named = [replace(the_map(*peers), name=each.name) for each in peers]
    assert len({Neighbours.of(each, False).turn(n) for each in named}) == n
    assert [each.turn(n) for each in stretches] == [*range(n)]
