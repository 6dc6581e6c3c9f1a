"""The window a receiver offers, beside what Linux 6.18 offered (TCP_INFO of real connections)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgetrain.fleet.networks.links.receive_window import ReceiveWindow

RTT = 100_000_000
SEGMENT = 1448


def flight(window: ReceiveWindow, segments: int, now: int) -> int:
    for place in range(segments):
        window.received(SEGMENT, now + place * 100_000)
    return window.offer


def test_it_grows_as_that_of_linux() -> None:
    """Flights of 10, 18, 38 and 80 segments: what a first message of 400 kB sends in slow start."""
    window = ReceiveWindow(RTT, 6 << 20)
    assert window.offer == 64_088
    assert flight(window, 10, RTT) == 84_150
    assert flight(window, 18, 2 * RTT) == 84_150  # what was read is not more than at first
    assert flight(window, 38, 3 * RTT) == 135_532  # 132,641 measured: in steps of segments
    assert flight(window, 80, 4 * RTT) == 354_599  # 351,707 measured
    assert not window.grows
    window.received(SEGMENT, 5 * RTT)
    assert window.grows


@given(st.lists(st.tuples(st.integers(1, 100_000), st.integers(0, 3 * RTT)), max_size=60))
def test_it_is_never_taken_back_and_ends_at_the_limit(arrivals: list[tuple[int, int]]) -> None:
    window, now = ReceiveWindow(RTT, 1 << 20), 0
    before = window.offer
    for size, pause in arrivals:
        now += pause
        window.received(size, now)
        assert before <= window.offer <= 1 << 20
        before = window.offer
