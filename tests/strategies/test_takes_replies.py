"""The half of members that are out of step: where it stands, and when it waits."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fleet import Fleet

from edgetrain import strategies
from edgetrain.exchange.hub.terms import Policy
from edgetrain.strategies.out_of_step import OutOfStep

ONE = np.float32(1)


def half_of(row, local_steps=2, delay=1000):
    params = np.zeros(3, np.float32)
    return strategies.find(row).member_half(
        strategies.Setting(params, np.zeros(3, np.float32), local_steps, delay)
    )


def step(half, by):
    """One local step; the contribution's first element, if the round ended."""
    half.params += np.float32(by)
    own = half.after_step()
    return None if own is None else float(own[0])


def reply(half, value, merged=0, complete=0):
    half.note_merged(merged, complete)
    half.apply([np.full(3, value, np.float32)])


@pytest.mark.parametrize("correction", ["own", "none"])
def test_parameters_are_the_base_and_what_is_in_flight_and_the_steps_since(correction):
    half = half_of(f"fedbuff(2, 0, {correction})")
    stays = correction == "own"
    assert [step(half, 1), step(half, 1)] == [None, 2]
    assert half.params[0] == (2 if stays else 0)
    assert half.due(0) is None, "nothing is there, and it does not wait"
    reply(half, 8)  # others' contributions
    assert half.params[0] == 8 + (2 if stays else 0)
    assert [step(half, 1), step(half, 2)] == [None, 3]
    assert half.params[0] == 8 + (5 if stays else 0)
    step(half, 10)
    reply(half, 4, merged=1)  # the first of its own is in this one
    assert half.params[0] == 12 + (3 if stays else 0) + 10
    reply(half, 1, merged=2)
    assert half.params[0] == 13 + 10
    assert half.base[0] == 13
    assert half.applied == 3
    assert half.round == 2


def test_replies_are_taken_at_the_ends_of_rounds_and_with_fetch_in_between():
    half, fetching = half_of("fedbuff(2, 0)", local_steps=3), half_of("async-sgd(2)", local_steps=3)
    taken = {half: [], fetching: []}
    for number in range(1, 7):
        for each, found in taken.items():
            step(each, 1)
            if each.due(each.applied + 1) is not None:
                found.append(number)
    assert taken[half] == [3, 6]
    assert taken[fetching] == [2, 4, 6]
    assert (half.quiet_steps(), fetching.quiet_steps()) == (2, 1)


def test_a_member_waits_for_its_own_and_for_the_slowest_only():
    half = half_of("fedbuff(2, 0)", local_steps=2, delay=3)
    step(half, 1)
    step(half, 1)
    assert [half.due(0) for _ in [step(half, 1), step(half, 1)]] == [None, None]
    step(half, 1)
    assert half.due(0) == 0, "its first contribution is three steps old"
    ahead = half_of("ssp(1)", local_steps=1)
    step(ahead, 1)
    assert ahead.due(0) is None
    step(ahead, 1)
    assert ahead.due(0) == 0, "it is two rounds ahead of a member that has given nothing"
    reply(ahead, 1, complete=1)
    assert ahead.due(1) is None
    ahead.finish()
    assert ahead.due(1) == 1, "at the end it waits for its own"


def test_half_is_the_paper_s_base_bit_for_bit_when_its_contributions_are_answered():
    params = np.full(3, 0.1, np.float32)
    half = OutOfStep(params, local_steps=1)
    for number in range(50):
        params += np.float32(0.01 * number)
        half.after_step()
        reply(half, 0.3, merged=number + 1)
    base = np.full(3, 0.1, np.float32)
    for _ in range(50):
        base += np.float32(0.3)
    assert params.tobytes() == base.tobytes() == half.base.tobytes()


def test_adagrad_at_the_hub_bears_a_rate_at_which_downpour_diverges():
    """Four members' displacements are added in full. At this rate each goes 0.6 of its way, so that
    the sum goes 2.4 times as far as it should: |1 - 2.4|^rounds."""
    ends = {}
    for outer in ("sgd(1)", "adagrad(1)"):
        fleet = Fleet(
            f"async-sgd(1) | {outer}", 4, 1, 0, 40, rng=random.Random(0), elements=8,
            local_step=lambda member, step, params: np.float32(0.6) * (params - ONE),
            policy=Policy(4, deadline_s=1e3),
        ).run()  # fmt: skip
        ends[outer] = float(np.abs(fleet.hub.base - 1).max())
    assert ends["sgd(1)"] > 1e5
    assert ends["adagrad(1)"] < 0.05
