"""Laws of the automatic delay, in a fleet that is nothing but times."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.exchange.delay import (
    APART_SHARE,
    FIRST_WINDOW_BYTES,
    MARGIN,
    SHARE,
    SYNCED_SHARE,
    Delay,
)
from edgetrain.exchange.hub.delay import AgreedDelay, Wish


class Timed:
    """Members that step and wait, and a hub that takes `message_s` for each contribution."""

    def __init__(self, local_steps, steps, step_s, trips_s, message_s=0.0, share=SHARE):
        self.agreed, self.share = AgreedDelay(local_steps, Delay(0, True, share), steps), share
        self.steps, self.step_s, self.trips_s, self.message_s = steps, step_s, trips_s, message_s
        self.paces, self.told = [(self.agreed.local_steps, self.agreed.delay)], []
        self.waited = []
        """Seconds that the slowest member waited, for each of its steps."""
        self.run()

    def run(self):
        members = range(len(self.step_s))
        now, wanted = [0.0] * len(members), [0] * len(members)
        flights, hub_free, local, applied = deque(), 0.0, 0, 0
        local_steps, delay = self.paces[0]
        slowest = max(members, key=lambda m: self.step_s[m])
        for step in range(1, self.steps + 1):
            now = [t + s for t, s in zip(now, self.step_s, strict=True)]
            local += 1
            if local >= local_steps:
                local = 0
                wishes = []
                for m in sorted(members, key=lambda m: now[m] + self.trips_s[m] / 2):
                    arrived = now[m] + self.trips_s[m] / 2
                    if self.message_s:
                        arrived = max(hub_free, arrived) + self.message_s
                    hub_free = max(hub_free, arrived)
                    wish = wanted[m] or math.ceil(MARGIN * self.trips_s[m] / self.step_s[m])
                    wishes.append(Wish(str(m), wish, self.step_s[m], applied, arrived))
                told = self.agreed.agree(len(self.paces) - 1, wishes, hub_free)
                self.told += [told] if told else []
                self.paces.append((self.agreed.local_steps, self.agreed.delay))
                arrives = [hub_free + self.trips_s[m] / 2 for m in members]
                flights.append((step, list(now), arrives, self.paces[-1]))
            before = now[slowest]
            while flights and step - flights[0][0] >= delay:
                _, left, arrives, (local_steps, delay) = flights.popleft()
                now = [max(t, at) for t, at in zip(now, arrives, strict=True)]
                applied += 1
                for m in members:
                    trip = arrives[m] - left[m]
                    wanted[m] = max(1, math.ceil(MARGIN * trip / self.step_s[m]))
            self.waited.append(now[slowest] - before)

    @property
    def bound(self):
        return max(2 * self.paces[0][0], self.steps // self.share)

    @property
    def late_wait(self):
        """The share of the second half of the run that the slowest member waited."""
        half = self.waited[len(self.waited) // 2 :]
        return sum(half) / (sum(half) + len(half) * max(self.step_s))


STEP_S = st.floats(0.002, 0.5)
MEASURED = Delay(is_measured=True)
SHARES = st.sampled_from([SHARE, APART_SHARE])
TRIP_S = st.floats(0.0, 2.0)


@given(
    local_steps=st.integers(1, 9), steps=st.integers(1, 900), message_s=st.floats(0.0, 0.3),
    members=st.lists(st.tuples(STEP_S, TRIP_S), min_size=1, max_size=6), share=SHARES,
)  # fmt: skip
def test_a_round_and_the_delay_are_never_more_than_the_run_can_bear(
    local_steps, steps, message_s, members, share
):
    fleet = Timed(local_steps, steps, *zip(*members, strict=True), message_s, share)
    for k, d in fleet.paces:
        assert k >= local_steps
        assert d >= 0
        assert k + d <= fleet.bound
        assert k == local_steps or 2 * k <= fleet.bound
    grown = {k for k, _ in fleet.paces if k > local_steps}
    assert bool(grown) == bool(fleet.told), "rounds that grow are always told of"


@given(
    local_steps=st.integers(1, 6), step_s=STEP_S,
    trips_s=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6),
)  # fmt: skip
def test_it_hides_the_longest_round_trip_and_no_more(local_steps, step_s, trips_s):
    needed = max(trips_s) / step_s
    steps = SHARE * (math.ceil(1.3 * needed) + local_steps + 2) + 100
    fleet = Timed(local_steps, steps, [step_s] * len(trips_s), trips_s)
    k, d = fleet.paces[-1]
    assert (k, fleet.told) == (local_steps, [])
    assert needed <= d <= MARGIN * needed + 1.01
    assert fleet.late_wait == pytest.approx(0, abs=1e-9)


@given(
    slow_s=st.floats(0.05, 0.2), faster=st.floats(2.0, 30.0), trip_s=st.floats(0.05, 0.5),
    others=st.integers(1, 5),
)  # fmt: skip
def test_fast_members_that_wait_for_a_slow_one_do_not_make_the_delay_longer(
    slow_s, faster, trip_s, others
):
    step_s = [slow_s, *[slow_s / faster] * others]
    fleet = Timed(5, 800, step_s, [trip_s] * len(step_s))
    assert fleet.told == []
    assert max(d for _, d in fleet.paces[1:]) <= max(5, MARGIN * trip_s / slow_s + 2)


@given(
    step_s=st.floats(0.005, 0.05), members=st.integers(2, 8), busy=st.floats(2.0, 8.0),
    trip_s=st.floats(0.0, 0.05),
)  # fmt: skip
def test_where_the_hub_is_the_bottleneck_rounds_get_longer(step_s, members, busy, trip_s):
    """The hub takes `busy` times as long for a round of 5 steps as its members."""
    message_s = busy * 5 * step_s / members
    fleet = Timed(5, 3000, [step_s] * members, [trip_s] * members, message_s)
    k, d = fleet.paces[-1]
    assert fleet.told
    assert k >= 0.9 * busy * 5, "a round takes its members as long as it takes the hub"
    assert fleet.late_wait < 0.15
    assert d <= 2 * MARGIN * (members * message_s + trip_s) / step_s + 2


@given(
    local_steps=st.integers(1, 9), step_s=STEP_S, trip_s=st.floats(0.0, 2.0),
    steps=st.integers(1, 900), share=SHARES,
)  # fmt: skip
def test_one_round_in_flight_is_as_long_as_the_delay(local_steps, step_s, trip_s, steps, share):
    """Where the run can bear it; elsewhere the delay hides what it can, and rounds stay short."""
    agreed = AgreedDelay(local_steps, Delay(0, True, share, one_in_flight=True), steps)
    wanted = math.ceil(MARGIN * trip_s / step_s)
    for round in range(24):
        agreed.agree(round, [Wish("a", wanted, step_s, round, 9.0)], 9.0)
    bound = max(2 * local_steps, steps // share)
    assert agreed.local_steps + agreed.delay <= bound
    if 2 * wanted > bound:
        assert agreed.delay == min(wanted, bound - agreed.local_steps)
        assert agreed.local_steps == local_steps or wanted > agreed.delay
    elif wanted > 0:
        assert agreed.delay <= agreed.local_steps
        assert wanted <= agreed.delay or agreed.local_steps == agreed.delay == local_steps
        assert agreed.local_steps == max(local_steps, agreed.delay)
        assert agreed.delay <= max(local_steps, wanted)


@given(
    local_steps=st.integers(1, 9), step_s=STEP_S, trip_s=st.floats(0.0, 3.0),
    steps=st.integers(1, 900), quick=st.sampled_from([FIRST_WINDOW_BYTES, 43_440, math.inf]),
    sent=st.sampled_from([0, 10_000, 40_000]),
)  # fmt: skip
def test_a_long_trip_is_hidden_in_part_where_windows_are_kept(
    local_steps, step_s, trip_s, steps, quick, sent
):
    delay = Delay(0, True, SYNCED_SHARE, overlaps=True, quick_bytes=quick)
    agreed = AgreedDelay(local_steps, delay, steps)
    plain = AgreedDelay(local_steps, Delay(0, True, SYNCED_SHARE), steps)
    wanted, told = math.ceil(MARGIN * trip_s / step_s), []
    for round in range(24):
        wishes = [Wish("a", wanted, step_s, round, 9.0, sent)]
        told.append(agreed.agree(round, wishes, 9.0))
        plain.agree(round, wishes, 9.0)
    assert agreed.local_steps + agreed.delay <= max(2 * local_steps, steps // SYNCED_SHARE)
    if wanted > steps // APART_SHARE and (quick == math.inf or 0 < sent <= quick):
        assert agreed.delay == max(1, 2 * agreed.local_steps // 5)
        assert local_steps <= agreed.local_steps <= max(local_steps, wanted)
        assert agreed.local_steps == local_steps or any("so members wait" in each for each in told)
    else:
        assert (agreed.local_steps, agreed.delay) == (plain.local_steps, plain.delay)


def test_a_short_run_says_what_its_delay_cannot_hide():
    fleet = Timed(5, 100, [0.003] * 4, [0.5] * 4)
    assert fleet.paces[-1] == (6, 6)
    (told,) = fleet.told
    assert told == (
        "round length raised from 5 to 6 steps: a round trip takes 184 steps, and the delay of "
        "this run is at most 6 (a nearer hub, or more or longer steps; a smaller codec where links "
        "are slow)"
    )


def test_nothing_changes_before_anything_is_measured():
    agreed = AgreedDelay(5, MEASURED, 400)
    assert (agreed.local_steps, agreed.delay) == (5, 5), "the first round waits for nothing either"
    agreed.agree(0, [Wish("a", 0, 1.0, 0, 0.0)], 0.0)
    assert (agreed.local_steps, agreed.delay) == (5, 5)


@given(
    st.integers(1, 9),
    st.one_of(st.just(MEASURED), st.integers(0, 30).map(Delay)),
    st.integers(0, 40),
)
def test_a_hub_that_was_restored_agrees_on_the_same(local_steps, delay, rounds):
    """From a journal's records alone, and from a snapshot in the middle."""
    one, again = AgreedDelay(local_steps, delay, 400), AgreedDelay(local_steps, delay, 400)
    for round in range(rounds):
        applied = max(0, round - one.delay // one.local_steps)
        one.agree(round, [Wish("a", 90, 0.1, applied, 0.0)], 1.0 * round)
        kept, _ = one.to_keep()
        again.replay(round, one.delay, kept)
    found = (again.local_steps, again.delay, again.merged_steps)
    assert found == (one.local_steps, one.delay, one.merged_steps)


def test_a_round_in_flight_when_rounds_get_longer_counts_as_long_as_it_was():
    agreed, said = AgreedDelay(5, MEASURED, 400), [5]
    for round in range(12):
        before, applied = agreed.merged_steps, max(0, round - 3)
        agreed.agree(round, [Wish("a", 200, 0.1, applied, 0.0)], 1.0 * round)
        assert agreed.merged_steps - before == said[applied]
        said.append(agreed.local_steps)
    assert agreed.local_steps > 15
    assert agreed.merged_steps < sum(said[1:])
