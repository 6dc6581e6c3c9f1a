"""Laws of the final sync: when members switch, to what, and that a restored hub does the same."""

from __future__ import annotations

import itertools
import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.exchange.delay import CHOSEN, FINAL_SYNC_SHARE, Delay
from edgetrain.exchange.hub.delay import AgreedDelay, Wish
from edgetrain.exchange.hub.final_sync import CLOSE, FinalSync
from edgetrain.exchange.hub.final_sync import EVERY as SHORT
from edgetrain.exchange.messages import MAX_COUNT


class Counted:
    """A member's half that only counts steps, and the hub that answers it."""

    def __init__(self, local_steps, delay, steps, wanted=0):
        self.agreed = AgreedDelay(local_steps, delay, steps)
        self.ends, self.waited, self.told, self.ends_at = [], [], [], []
        """Steps at which rounds ended and their replies were applied; notes; `end_after` each."""
        half_every, half_delay = self.agreed.local_steps, min(self.agreed.first, self.agreed.delay)
        flights, local, applied = deque(), 0, 0
        for step in range(1, steps + 1):
            local += 1
            if local >= half_every or step == steps:
                local = 0
                self.ends.append(step)
                wish = Wish("a", wanted, 0.1, applied, 0.0)
                told = self.agreed.agree(len(self.ends) - 1, [wish], 0.1 * step)
                self.told += [told] if told else []
                self.ends_at.append(self.agreed.end_after(len(self.ends)))
                flights.append((step, self.agreed.local_steps, self.agreed.delay))
            while flights and step - flights[0][0] >= half_delay:
                _, half_every, half_delay = flights.popleft()
                applied += 1
                self.waited.append(step)


EVERY, STEPS = st.integers(1, 40), st.integers(1, 400)
FIXED = st.integers(0, 60)


@given(local_steps=EVERY, delay=FIXED, steps=STEPS, share=st.floats(0.01, 1.0))
def test_a_fixed_delay_lands_where_it_is_said(local_steps, delay, steps, share):
    run = Counted(local_steps, Delay(delay, final_sync=share), steps)
    final_sync = FinalSync.of(share, steps)
    assert (steps - final_sync.begins) % SHORT == 0 or not final_sync.begins
    assert sum(end - begin for begin, end in zip([0, *run.ends], run.ends, strict=False)) == steps
    if run.agreed.final_sync is None:
        assert (local_steps <= SHORT, delay) == (True, 0), "rounds are short already"
        return
    if local_steps + delay < final_sync.begins:  # otherwise no reply reaches members before
        assert final_sync.begins in run.ends
    synced = [end for end in run.ends if end > max(final_sync.begins, local_steps + delay)]
    assert all(later - earlier == SHORT for earlier, later in itertools.pairwise(synced[:-1]))
    applied = dict(zip(run.ends, run.waited, strict=False))
    for end in synced:
        assert applied[end] == end, "each of its rounds waits for its reply"


@given(local_steps=EVERY, delay=FIXED, steps=STEPS, share=st.floats(0.01, 1.0))
def test_the_hub_knows_which_round_is_the_last(local_steps, delay, steps, share):
    run = Counted(local_steps, Delay(delay, final_sync=share), steps)
    final_sync = run.agreed.final_sync
    if final_sync is None or local_steps + delay < final_sync.begins:
        assert run.ends_at == [len(run.ends)] * len(run.ends)
    assert run.agreed.merged_steps >= steps


@given(
    local_steps=st.integers(1, 9),
    wanted=st.integers(1, 60),
    steps=STEPS,
    share=st.floats(0.05, 1.0),
)
def test_a_measured_delay_lands_too(local_steps, wanted, steps, share):
    run = Counted(local_steps, Delay(0, True, final_sync=share), steps, wanted)
    if run.agreed.final_sync.begins < steps - local_steps - wanted:
        assert (run.agreed.local_steps, run.agreed.delay) == (SHORT, 0)
    assert len([told for told in run.told if told.startswith("Final sync")]) <= 1


@given(local_steps=EVERY, delay=FIXED, steps=STEPS)
def test_it_is_chosen_where_members_are_far_apart(local_steps, delay, steps):
    final_sync = AgreedDelay(local_steps, Delay(delay, final_sync=CHOSEN), steps).final_sync
    if local_steps + delay <= CLOSE:
        assert final_sync is None
    else:
        assert final_sync == FinalSync.of(FINAL_SYNC_SHARE, steps)


@given(local_steps=EVERY, delay=FIXED, steps=STEPS, share=st.sampled_from([0.0, CHOSEN]))
def test_without_a_final_sync_nothing_changes(local_steps, delay, steps, share):
    """Where the run's length is not known, too."""
    steps = 0 if share else steps
    run = AgreedDelay(local_steps, Delay(delay, final_sync=share), steps)
    for round in range(40):
        assert run.agree(round, [Wish("a", 0, 1.0, round, 0.0)], 1.0) == ""
        assert (run.local_steps, run.delay, run.to_keep()) == (local_steps, delay, (0, 0))
    assert not steps or run.end_after(0) != MAX_COUNT


@given(
    st.integers(1, 12), st.one_of(st.none(), st.integers(0, 12)), st.integers(0, 40),
    st.sampled_from([CHOSEN, 0.2, 1.0]),
)  # fmt: skip
def test_a_hub_that_was_restored_lands_at_the_same_step(local_steps, delay, rounds, share):
    delay = Delay(delay or 0, delay is None, final_sync=share)
    one, again = AgreedDelay(local_steps, delay, 200), AgreedDelay(local_steps, delay, 200)
    snapshot = AgreedDelay(local_steps, delay, 200)
    for round in range(rounds):
        applied = max(0, round - one.delay // one.local_steps)
        one.agree(round, [Wish("a", 9, 0.1, applied, 0.0)], 1.0 * round)
        kept, merged = one.to_keep()
        again.replay(round, one.delay, kept)
        snapshot.restore(one.delay, kept)
        snapshot.merged_steps = merged or (round + 1) * snapshot.local_steps
        for restored in (again, snapshot):
            assert (restored.local_steps, restored.delay) == (one.local_steps, one.delay)
            assert restored.merged_steps == one.merged_steps
            assert (restored.final_sync, restored.is_final_sync) == (
                one.final_sync,
                one.is_final_sync,
            )


def test_it_says_what_it_does_and_costs():
    run = Counted(29, Delay(12, final_sync=CHOSEN), 280)
    (told,) = run.told
    assert told == (
        "Final synchronisation: the last 35 of 280 steps run in 5 rounds without delay, because "
        "members had diverged for 29 + 12 steps (K + D). Disable with strategy.final_sync = 0"
    )
    assert run.ends[-7:] == [232, 245, 252, 259, 266, 273, 280]
    (told,) = Counted(5, Delay(0, True, final_sync=0.1), 200, wanted=11).told
    assert "in 3 rounds without delay, about 3 s, because" in told


@pytest.mark.parametrize(
    ("share", "steps", "begins"), [(0.1, 280, 252), (1.0, 280, 0), (0.001, 280, 273), (1.0, 3, 0)]
)
def test_it_is_of_whole_rounds_and_at_least_one(share, steps, begins):
    assert FinalSync.of(share, steps) == FinalSync(steps, begins)
    assert math.isclose((steps - begins) / steps, share, abs_tol=7 / steps)
