"""The virtual congestion window, round trip by round trip."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.fleet.networks.links.window import ALGORITHMS, MSS, TICK, WholeWindow, Window

RTT = 100_000_000


def one_round(window: Window, now: int) -> int:
    """Fill the window and acknowledge it a round trip later; return the bytes sent."""
    sent = window.room(now)
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
    window.sent(window.room(5 * RTT), 5 * RTT)
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
    assert window.room(100 * RTT) == 10 * MSS


@pytest.mark.parametrize("kind", [Window, WholeWindow])
def test_idling_closes_nothing_where_windows_are_kept(kind: type[Window]) -> None:
    window = kind("cubic", RTT, 1 << 30, restarts=False)
    for n in range(8):
        one_round(window, n * RTT)
    before = window.room(8 * RTT)
    assert window.room(100 * RTT) == before > 10 * MSS
    if isinstance(window, WholeWindow):
        window.sent(MSS, 100 * RTT)
        window.validate(200 * RTT)
        assert int(window.size) == before


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
        assert window.room(now + RTT) <= limit


def mean_window(algorithm: str, loss: float, rtt_ns: int, rounds: int) -> float:
    """Segments per round trip of a sender that always has data and loses one in 1/`loss`.

    The laws hold for losses at regular distances; between random ones CUBIC grows further.
    """
    window = Window(algorithm, rtt_ns, 1 << 40)
    acks: deque[int] = deque()
    now, sent = 0, 0
    while now < rounds * rtt_ns:
        while acks and acks[0] <= now:
            window.acked(MSS, acks.popleft(), rtt_ns)
        while window.room(now) >= MSS:
            window.sent(MSS, now)
            acks.append(now + rtt_ns)
            sent += 1
            if sent % round(1 / loss) == 0:
                window.cut()
        now = acks[0]
    return sent / rounds


@pytest.mark.parametrize("loss", [0.001, 0.01])
def test_reno_keeps_the_law_of_mathis(loss: float) -> None:
    # Mathis, Semke, Mahdavi, Ott 1997
    assert mean_window("reno", loss, RTT, 4000) == pytest.approx(math.sqrt(1.5 / loss), rel=0.1)


@pytest.mark.parametrize(("loss", "rtt_ns"), [(0.001, 2 * RTT), (0.0002, RTT), (0.01, RTT)])
def test_cubic_keeps_its_law(loss: float, rtt_ns: int) -> None:
    # RFC 9438, section 5.1, for C = 0.4 and beta = 0.7; with many losses it is as fast as Reno.
    law = 1.054 * (rtt_ns / 1e9) ** 0.75 / loss**0.75
    expected = max(law, math.sqrt(1.5 / loss))
    assert mean_window("cubic", loss, rtt_ns, 4000) == pytest.approx(expected, rel=0.1)


def send_message(window: Window, now: int, segments: int) -> int:
    """Send a message, each segment taking 1 ms on the line; return when all is acknowledged."""
    acks: deque[tuple[int, int]] = deque()
    free = now
    while segments or acks:
        while segments and window.room(now) >= MSS:
            window.sent(MSS, now)
            free = max(free, now) + 1_000_000
            acks.append((free + RTT, now))
            segments -= 1
        now, sent = acks.popleft()
        window.acked(MSS, now, now - sent)
    return now


def test_before_the_first_loss_cubic_grows_by_a_twentieth_of_what_is_acknowledged() -> None:
    # As Linux does in messages of 690 segments after slow start: 103, 138, 172, 207 segments.
    window, now = Window("cubic", RTT, 1 << 30), 0
    window.size = window.threshold = 103.0 * MSS
    for _ in range(3):
        before = window.size
        now = send_message(window, now, 690)
        assert (window.size - before) / MSS == pytest.approx(690 / 20, rel=0.05)


@pytest.mark.parametrize(("more_ns", "ends"), [(6_000_000, True), (5_000_000, False)])
def test_a_round_trip_that_grows_ends_slow_start_at_the_ninth_acknowledgement(more_ns, ends):
    # As `ss -i` shows for Linux: 20 segments, and 2 for each of the first eight of a round.
    rtt = 45_000_000
    window = Window("cubic", rtt, 1 << 30)
    window.sent(10 * MSS, 0)
    window.acked(10 * MSS, rtt, rtt)
    window.sent(20 * MSS, rtt)
    window.acked(20 * MSS, 2 * rtt, rtt + more_ns)
    assert window.threshold == (36 * MSS if ends else math.inf)
    assert window.size >= 36 * MSS if ends else window.size == 40 * MSS


def test_a_pause_does_not_let_cubic_run_on():
    """Linux shifts the curve by each pause (CA_EVENT_TX_START): it counts only time of sending."""
    rtt = 40_000_000

    def after(pause):
        window, now = WholeWindow("cubic", rtt, 1 << 30), 1
        window.size = window.threshold = 40.0 * MSS
        window.sent(40 * MSS, now)
        window.cut()
        window.recovered()
        window.acked(40 * MSS, now + rtt, rtt)
        for _ in range(30):
            now += rtt + pause
            window.sent(window.room(now), now)
            window.acked(window.in_flight, now + rtt, rtt)
        return window.size / MSS

    assert after(100_000_000) == pytest.approx(after(1), abs=1)


def test_a_whole_window_is_whole():
    window, now = WholeWindow("cubic", 40_000_000, 1 << 30), 1
    for turn in range(200):
        room = window.room(now)
        window.sent(room, now)
        now += 40_000_000
        window.acked(room, now, 40_000_000)
        if turn % 20 == 19:
            window.cut()
            window.recovered()
        assert window.size % MSS == 0
        assert window.size >= 2 * MSS


def test_a_pause_halves_whole_segments() -> None:
    window = Window("cubic", 50_000_000, 4 << 20)
    window.size = 29.0 * MSS
    window.sent(MSS, 1)
    window.acked(MSS, 50_000_001, 50_000_000)
    window.room(50_000_001 + window.timeout)
    assert window.size == 14 * MSS  # 29 >> 1, and not 14.5


def test_every_acknowledgement_of_a_train_is_timed() -> None:
    """What leaves together on a slow line comes back later and later; Linux times it all."""
    rtt, spread = 100_000_000, 50_000_000
    trains, single = (Window("cubic", rtt, 4 << 20) for _ in range(2))
    for turn in range(40):
        for window, last in ((trains, spread), (single, 0)):
            window.sent(16 * MSS, turn * 10**9)
            window.acked(16 * MSS, turn * 10**9 + rtt + last, rtt + last, last)
    assert single.rtt == rtt
    assert rtt + 0.4 * spread < trains.rtt < rtt + spread


def test_the_timeout_of_a_new_connection_falls_a_round_trip_late() -> None:
    window = Window("cubic", 400_000_000, 4 << 20)
    first = window.timeout
    timeouts = []
    for turn in range(4):
        window.sent(MSS, turn * 10**9)
        window.acked(MSS, turn * 10**9 + 400_000_000, 400_000_000)
        timeouts.append(window.timeout)
    assert first == timeouts[0] > timeouts[1] > timeouts[2]


def test_a_window_that_is_not_used_for_a_timeout_comes_halfway_down() -> None:
    """tcp_cwnd_application_limited, RFC 2861: to the middle between it and what was used."""
    window, rtt = WholeWindow("cubic", 100_000_000, 4 << 20), 100_000_000
    window.size = window.threshold = 60.0 * MSS
    window.sent(20 * MSS, 10**9)
    window.validate(10**9)
    assert window.size == 40 * MSS
    window.acked(10 * MSS, 10**9 + rtt, rtt)
    later = 10**9 + rtt + window.timeout + TICK
    window.sent(10 * MSS, later)
    window.validate(later)
    assert window.size == 30 * MSS


def test_an_acknowledgement_puts_off_that_a_window_comes_down() -> None:
    """Also one that finds it used in part only (tcp_cong_avoid sets snd_cwnd_stamp)."""
    window, rtt = WholeWindow("cubic", 100_000_000, 4 << 20), 100_000_000
    window.size = window.threshold = 60.0 * MSS
    window.sent(20 * MSS, 0)
    for turn in range(1, 40):
        now = turn * rtt
        window.acked(20 * MSS, now, rtt)
        window.sent(20 * MSS, now)
        window.validate(now)
    assert now > 3 * window.timeout
    assert window.size == 60 * MSS


def test_a_window_that_is_used_stays() -> None:
    window, rtt = WholeWindow("cubic", 100_000_000, 4 << 20), 100_000_000
    window.size = window.threshold = 20.0 * MSS
    for turn in range(10):
        window.sent(20 * MSS, turn * 120_000_000)
        window.validate(turn * 120_000_000)
        window.acked(20 * MSS, turn * 120_000_000 + rtt, rtt)
    assert window.size >= 20 * MSS


def test_slow_start_ends_by_a_growing_round_trip_only_once() -> None:
    """Until a timeout HyStart does not look again (`found` in tcp_cubic.c)."""
    rtt, window = 100_000_000, WholeWindow("cubic", 100_000_000, 4 << 20)

    def flights() -> bool:
        """A quick one and a slow one; whether slow start has ended."""
        window.size, window.threshold = 40.0 * MSS, 1000.0 * MSS
        for rtt_ns in (rtt, 2 * rtt):
            window.sent(40 * MSS, 0)
            for ack in range(20):
                window.acked(2 * MSS, 10_000_000 * ack, rtt_ns)
        return window.threshold < 1000 * MSS

    assert flights()
    assert not flights()
    window.collapse()
    assert flights()


SURPRISES_MS = (500,) * 12 + (800, 500, 500, 300, 300, 500)


def test_the_deviation_of_round_trips_is_that_of_linux() -> None:
    """tcp_rtt_estimator: of a shorter round trip only an eighth of the surprise counts."""
    window = Window("cubic", 500_000_000, 4 << 20)
    seen = []
    for turn, rtt_ms in enumerate(SURPRISES_MS):
        window.sent(MSS, turn * 10**9)
        window.acked(MSS, turn * 10**9 + rtt_ms * 10**6, rtt_ms * 10**6)
        seen.append(window.deviation)
    deviation, srtt = 1_000_000_000, 500_000_000
    for rtt_ms, found in zip(SURPRISES_MS, seen, strict=True):
        error = rtt_ms * 10**6 - srtt
        srtt += error // 8
        change = abs(error) - deviation // 4
        deviation += change // 8 if error < 0 and change > 0 else change
        assert found == deviation
