"""Linux's rules of loss recovery, one by one: what a sender knows, and when it sends again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.fleet.networks.links.loss_recovery import (
    NEVER,
    PROBE_ALONE_NS,
    PROBE_SLACK_NS,
    Received,
    Recovery,
    on_wheel,
)
from edgetrain.fleet.networks.links.window import MSS, WholeWindow

MS = 1_000_000
RTT = 100 * MS


def sender(rtt=RTT):
    """A sender with measured round trips, and its window."""
    window = WholeWindow("cubic", rtt, 1 << 22)
    for _ in range(60):  # the variance of the first sample decreases
        window.sent(100, 0)
        window.acked(100, rtt, rtt)
    return Recovery(window), window


def flight(recovery, segments, now=0):
    """Send this many segments, each as its own piece."""
    return [recovery.send(MSS, now) for _ in range(segments)]


def acknowledge(recovery, pieces, now):
    for piece in pieces:
        recovery.acked(piece, now, 0)


def test_what_arrives_leaves_nothing_to_do():
    recovery, window = sender()
    acknowledge(recovery, flight(recovery, 5), RTT)
    assert recovery.idle
    assert recovery.deadline == NEVER
    assert (recovery.lost, window.in_flight) == ([], 0)


def test_three_segments_behind_a_hole_tell_at_once():
    recovery, window = sender()
    first, *rest = flight(recovery, 8)
    recovery.vanish(first)
    acknowledge(recovery, rest[:2], RTT)
    assert recovery.lost == []
    acknowledge(recovery, rest[2:3], RTT)
    assert recovery.lost == [first]
    assert window.threshold == 7 * MSS  # 10 * 717 / 1024, in whole segments


def test_with_fewer_a_quarter_of_a_round_trip_is_waited_for():
    recovery, _ = sender()
    first, second, third = flight(recovery, 3)
    recovery.vanish(first)
    acknowledge(recovery, (second, third), RTT)
    assert recovery.lost == []
    assert recovery.deadline == RTT + RTT // 4
    recovery.expire(recovery.deadline)
    assert recovery.lost == [first]


def test_a_lost_end_is_probed_for_after_two_round_trips():
    recovery, window = sender()
    *head, last = flight(recovery, 5)
    recovery.vanish(last)
    acknowledge(recovery, head[:3], RTT)  # others are still on the way: two segments
    assert recovery.deadline == RTT + on_wheel(2 * window.rtt + PROBE_SLACK_NS)
    recovery.expire(recovery.deadline)
    assert recovery.probing
    assert recovery.lost == []
    now = 4 * RTT
    probe = recovery.probe(now)
    assert (probe.start, probe.end) == (last.start, last.end)
    acknowledge(recovery, (head[3], probe), now + RTT)
    assert recovery.idle
    assert (recovery.missing, window.in_flight) == (0, 0)
    assert window.threshold < 10 * MSS  # a loss that a probe has repaired is one


def test_a_single_segment_waits_for_an_acknowledgement_that_may_be_late():
    recovery, window = sender(rtt=500 * MS)
    recovery.vanish(*flight(recovery, 1))
    alone = min(2 * window.rtt + PROBE_ALONE_NS, window.timeout)
    assert recovery.deadline == on_wheel(alone)


def test_a_probe_that_is_lost_too_ends_in_a_timeout_and_timeouts_double():
    recovery, window = sender()
    recovery.vanish(*flight(recovery, 1))
    now = recovery.deadline
    recovery.expire(now)
    recovery.vanish(recovery.probe(now))
    waits = []
    for _ in range(4):
        assert recovery.deadline > now
        waits.append(recovery.deadline - now)
        now = recovery.deadline
        recovery.expire(now)
        assert window.size == MSS
        recovery.vanish(recovery.resend(window.space(), now))
    assert waits == [on_wheel(window.timeout << n) for n in range(4)]


def test_the_window_falls_in_proportion_and_ends_at_the_threshold():
    recovery, window = sender()
    window.size = 20.0 * MSS
    first, *rest = flight(recovery, 20)
    recovery.vanish(first)
    sent, now, again = 0, RTT, None
    for piece in rest:
        recovery.acked(piece, now, 0)
        while recovery.lost and window.space() >= MSS:
            again = recovery.resend(window.space(), now)
            sent += 1
        while window.space() >= MSS:
            recovery.send(MSS, now)
            sent += 1
    assert again is not None
    assert sent == 14  # 20 * 717 / 1024: the share of the window that remains
    recovery.acked(again, 2 * RTT, 0)
    assert window.size == 14 * MSS


def test_a_repetition_that_is_lost_is_noticed_by_what_leaves_after_it():
    recovery, window = sender()
    first, *rest = flight(recovery, 10)
    recovery.vanish(first)
    acknowledge(recovery, rest, RTT)
    again = recovery.resend(window.space(), RTT)
    recovery.vanish(again)
    later = recovery.send(MSS, RTT)
    acknowledge(recovery, (later,), 2 * RTT)
    assert recovery.lost == [again]


def test_what_was_only_late_does_no_harm():
    recovery, window = sender()
    late, *_ = pieces = flight(recovery, 6)
    recovery.time_out(10 * RTT)
    assert [piece.start for piece in recovery.lost] == [piece.start for piece in pieces]
    copy = recovery.resend(window.space(), 10 * RTT)
    acknowledge(recovery, pieces, 11 * RTT)
    assert recovery.idle
    assert (recovery.lost, window.in_flight) == ([], 0)
    assert late.done
    assert copy.done
    recovery.acked(copy, 12 * RTT, 0)
    assert window.in_flight == 0


ranges = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 8)).map(
        lambda pair: (MSS * pair[0], MSS * (pair[0] + pair[1]))
    ),
    max_size=30,
)


@given(ranges)
def test_what_has_been_received_is_a_set_of_bytes(taken):
    received, there = Received(), set()
    for start, end in taken:
        before = received.next
        moved = received.add_range(start, end)
        there.update(range(start // MSS, end // MSS))
        first_hole = next(place for place in range(100) if place not in there)
        assert received.next == first_hole * MSS
        assert moved == (received.next > before)
        assert received.segments == sum(place > first_hole for place in there)
        for place in range(40):
            whole = place in there and place + 1 in there
            assert received.has(place * MSS, (place + 2) * MSS) == whole


@pytest.mark.parametrize(("delay_ms", "late_ms"), [(100, 4), (240, 4), (400, 18), (3000, 130)])
def test_timers_ring_late_as_a_wheel_of_ticks_does(delay_ms, late_ms):
    assert on_wheel(delay_ms * MS) == (delay_ms + late_ms) * MS


def test_a_probe_of_what_was_only_late_is_forgotten():
    recovery, window = sender()
    piece = recovery.send(4 * MSS, 0)
    probe = recovery.probe(3 * RTT)
    assert (probe.start, probe.end) == (3 * MSS, 4 * MSS)
    acknowledge(recovery, (piece, probe), 4 * RTT)
    assert recovery.idle
    assert window.in_flight == 0
