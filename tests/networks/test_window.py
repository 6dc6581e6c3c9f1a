"""The virtual congestion window, round trip by round trip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.networks.window import ALGORITHMS, MSS, Window

RTT = 100_000_000


def one_round(window: Window, now: int) -> int:
    """Fill the window, have it acknowledged a round trip later; returns bytes sent."""
    sent = window.room()
    window.sent(sent, now)
    window.acked(sent, now + RTT, RTT)
    return sent


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_slow_start_doubles(algorithm: str) -> None:
    window = Window(algorithm, RTT, 1 << 30)
    sent = [one_round(window, n * RTT) for n in range(5)]
    assert sent == [10 * MSS * 2**n for n in range(5)]


@pytest.mark.parametrize(("algorithm", "share"), [("cubic", 0.7), ("reno", 0.5)])
def test_a_loss_cuts_once_a_round(algorithm: str, share: float) -> None:
    window = Window(algorithm, RTT, 1 << 30)
    for n in range(5):
        one_round(window, n * RTT)
    before = window.size
    window.sent(window.room(), 5 * RTT)
    window.cut()
    window.cut()
    assert window.size == pytest.approx(before * share, rel=0.01)


def test_an_application_that_does_not_fill_it_does_not_open_it() -> None:
    window = Window("cubic", RTT, 1 << 30)
    for n in range(50):
        window.sent(MSS, n * RTT)
        window.acked(MSS, (n + 1) * RTT, RTT)
    assert window.size == 10 * MSS


def test_idling_closes_it_down_to_the_initial_window() -> None:
    window = Window("cubic", RTT, 1 << 30)
    for n in range(8):
        one_round(window, n * RTT)
    window.sent(MSS, 100 * RTT)
    assert window.size == 10 * MSS


@given(
    algorithm=st.sampled_from(ALGORITHMS),
    events=st.lists(st.sampled_from(["round", "cut", "collapse", "pause"]), max_size=60),
)
def test_it_never_gets_stuck_and_never_passes_the_limit(algorithm: str, events: list[str]) -> None:
    window, now, limit = Window(algorithm, RTT, 1 << 20), 0, 1 << 20
    for event in events:
        if event == "cut":
            window.cut()
        elif event == "collapse":
            window.collapse()
        now += 50 * RTT if event == "pause" else RTT
        assert one_round(window, now) >= MSS
        assert window.in_flight == 0
        assert window.room() <= limit
