"""Which connections of a hub are ended: whatever they send, what is kept of them is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgetrain.exchange.zeromq.arrivals import BARRED_S, MOST_BARRED, Arrivals, Barred, Limits
from edgetrain.exchange.zeromq.frames import FEWEST_WAITING, WAITING_MESSAGES, waiting_messages

LIMITS = Limits(newcomers=8, member_bytes=100, newcomer_bytes=20, newcomers_bytes=60)


def arrivals(newcomers=(), members=()):
    found = Arrivals(LIMITS)
    for number in (*newcomers, *members):
        found.add(number)
    for number in members:
        found.count_message(number, b"key %d" % number)
    found.find_excessive(dict.fromkeys((*newcomers, *members), 0))
    return found


def test_newcomers_of_the_address_with_most_go_first_and_the_oldest_of_them():
    addresses = {
        1: "honest",
        2: "crowd",
        3: "crowd",
        4: "honest",
        **dict.fromkeys(range(5, 10), "crowd"),
    }
    found = arrivals(newcomers=range(1, 9))
    assert found.find_crowd(addresses.get) == []
    found.add(9)
    assert found.find_crowd(addresses.get) == [2, 3, 5]


def test_members_are_no_crowd():
    found = arrivals(members=range(50))
    assert found.find_crowd(lambda number: "one") == []


def test_a_descriptor_that_is_used_again_is_a_newcomer_again():
    found = arrivals(members=[7])
    found.remove(7)
    found.add(7)
    assert found.find_excessive({7: 21}) == [(7, 21)]
    found.remove(7)
    assert 7 not in found
    assert found.find_excessive({7: 1000}) == []


def test_a_member_may_send_more_than_its_limit_as_long_as_it_is_read():
    found = arrivals(members=[7])
    for total in range(0, 10_000, 100):
        assert found.find_excessive({7: total}) == []
        found.count_message(7, b"key 7")
    assert found.find_excessive({7: 9_900}) == []
    assert found.find_excessive({7: 10_000}) == []
    assert found.find_excessive({7: 10_001}) == [(7, 101)]


def test_a_key_has_twice_the_limit_for_all_its_connections():
    found = Arrivals(LIMITS)
    for number in range(5):
        found.add(number)
        found.count_message(number, b"key")
    found.find_excessive(dict.fromkeys(range(5), 0))
    assert found.find_excessive(dict.fromkeys(range(5), 40)) == []
    assert len(found.find_excessive(dict.fromkeys(range(5), 60))) == 2


@given(
    st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 150), st.sampled_from(["", "a", "b", "new"])),
        max_size=60,
    )
)
def test_after_a_look_nobody_has_more_than_the_limits(steps):
    """Each step: a connection sends so many bytes, and after that a whole message of a key, or
    begins anew; then all are looked at."""
    found, received, owners, unfinished = Arrivals(LIMITS), {}, {}, {}
    for number, sent, what in steps:
        if what == "new" or number not in received:
            found.add(number)
            received[number], owners[number], unfinished[number] = 0, "", 0
        received[number] += sent
        unfinished[number] += sent
        if what in ("a", "b"):
            found.count_message(number, what.encode())
            owners[number], unfinished[number] = what, 0
        for ended, _ in found.find_excessive(received):
            found.remove(ended)
            del received[ended], owners[ended], unfinished[ended]
        new = [unfinished[n] for n in received if not owners[n]]
        assert all(each <= LIMITS.newcomer_bytes for each in new)
        assert sum(new) <= LIMITS.newcomers_bytes
        for key in "ab":
            own = [unfinished[n] for n in received if owners[n] == key]
            assert all(each <= LIMITS.member_bytes for each in own)
            assert sum(own) <= 2 * LIMITS.member_bytes


@given(st.integers(1, 1 << 31))
def test_large_messages_wait_in_smaller_numbers(size):
    waiting = waiting_messages(size)
    assert FEWEST_WAITING <= waiting <= WAITING_MESSAGES
    most = Limits.of(1024, waiting, size).member_bytes
    assert waiting * size < most, "what may wait is never ended"
    assert waiting_messages(-1) == WAITING_MESSAGES
    assert Limits.of(1024, waiting, -1).member_bytes is None
    assert Limits.of(1024, waiting, size).newcomers == 256


def test_an_address_is_barred_for_a_while_and_others_are_not():
    barred = Barred()
    assert not barred
    barred.add("one", 100.0)
    assert barred.has("one", 100.0)
    assert barred.has("one", 99.9 + BARRED_S)
    assert not barred.has("two", 100.0)
    assert not barred.has("one", 100.0 + BARRED_S)
    assert not barred, "what is over is forgotten"


@given(st.lists(st.integers(0, 3000), min_size=MOST_BARRED, max_size=2 * MOST_BARRED))
def test_as_many_barred_addresses_are_remembered_as_are_bounded_and_the_latest(numbers):
    barred = Barred()
    for now, number in enumerate(numbers):
        barred.add(str(number), now / 1e6)
    kept = {number for number in numbers if barred.has(str(number), 1.0)}
    latest = list(dict.fromkeys(reversed(numbers)))[:MOST_BARRED]
    assert kept == set(latest)
