"""What stays of a reply for a while: the rule in float64, and what it never does."""

from __future__ import annotations

import numpy as np
import pytest
from fleet import Fleet, noisy_descent
from hypothesis import given
from hypothesis import strategies as st
from test_strategy_laws import SHAPES

from edgetrain import strategies
from edgetrain.errors import BadMessage
from edgetrain.strategies.choice import ROUNDS
from edgetrain.strategies.displacement import Displacement
from edgetrain.strategies.leaving import FIRST, SHARE, Leaving, share_of
from edgetrain.vectors.blocks import BLOCK


def naive(initial, members, local_steps, delay, steps, share, waits):
    """base + rounds in flight + stayed + steps since, in float64; parameters before each step."""
    base = initial.astype(np.float64)
    flying, since, stayed = [], np.zeros((members, initial.size)), np.zeros((members, initial.size))
    histories, replies = [], 0
    for step in range(1, steps + 1):
        at = base + sum(own for _, own in flying) + stayed + since
        histories.append(at)
        moves = [noisy_descent(m, step - 1, at[m].astype(np.float32)) for m in range(members)]
        since = since - np.array(moves, np.float64)
        if step % local_steps == 0:
            flying.append((step, since))
            since = np.zeros_like(since)
        while flying and flying[0][0] + (delay if replies >= waits else 0) <= step:
            own = flying.pop(0)[1]
            base = base + own.mean(0)
            stayed = (replies >= waits) * share * (stayed + own - own.mean(0))
            replies += 1
    return np.array(histories)


@given(**(SHAPES | {"members": st.integers(2, 5)}), momentum=st.sampled_from([0.0, 0.9]))
def test_it_is_the_rule_as_it_is_written(members, local_steps, delay, steps, rng, momentum):
    fleet = Fleet(
        "dga(decay)", members, local_steps, delay, steps, rng=rng, momentum=momentum
    ).run()
    assert len({m.params.tobytes() for m in fleet.members}) == 1, "nothing stays at the end"
    share = SHARE if momentum else share_of(local_steps, delay)
    expected = naive(
        fleet.initial,
        members,
        local_steps,
        delay,
        steps,
        share if delay else 0,
        0 if momentum else FIRST,
    )
    for number, member in enumerate(fleet.members):
        np.testing.assert_allclose(member.history, expected[:, number], rtol=1e-3, atol=1e-3)


@given(**(SHAPES | {"members": st.integers(2, 4)}))
def test_the_mean_of_all_members_takes_every_step_at_once(members, local_steps, delay, steps, rng):
    """With it, as with `paper`, no gradient is late for the mean: only for the other members."""
    fleet = Fleet("dga(decay)", members, local_steps, delay, steps, rng=rng).run()
    history = np.array([m.history for m in fleet.members], np.float64)
    taken = [
        [noisy_descent(m, step, at.astype(np.float32)) for step, at in enumerate(path)]
        for m, path in enumerate(history)
    ]
    walked = history[:, 0].mean(0) - np.cumsum(np.mean(taken, 0, np.float64), 0)
    np.testing.assert_allclose(history.mean(0)[1:], walked[:-1], rtol=1e-4, atol=1e-4)


def deviation(correction, local_steps, delay, curvature, rounds):
    """How far a member is from the mean after each of many rounds, in one direction: of the base,
    which stays 0, since another member is at its mirror image. It is led away once."""
    vectors = np.zeros((2, 1), np.float32)
    setting = strategies.Setting(*vectors, local_steps, delay)
    half = strategies.find(f"dga({correction})").member_half(setting)
    params, found = half.params, []
    for step in range((FIRST + rounds) * local_steps):
        params -= np.float32(curvature) * params if step != FIRST * local_steps else 1
        own = half.after_step()
        while half.due() is not None:
            half.apply([np.zeros(1, np.float32)])
        if own is not None:
            found.append(abs(float(params[0])))
    return np.array(found)


@given(st.integers(1, 12), st.integers(1, 30), st.floats(0.05, 0.97))
def test_members_come_back_to_the_mean_at_rates_up_to_one_and_the_share(local_steps, delay, part):
    """The rate times the curvature, below which plain SGD does not swing up; FedAvg's is 2."""
    limit = 1 + share_of(local_steps, delay)
    assert 1.5 < limit < 2
    assert limit >= 1.75 or delay < local_steps
    far = deviation("decay", local_steps, delay, part * limit, 8 * (60 + delay))
    assert far[-20 - delay :].max() < 0.05 * far.max()


@given(st.integers(1, 12))
def test_without_it_they_swing_up_from_a_rate_of_one_on(delay):
    far = deviation("paper", 1, delay, 1.1, 400)
    assert far[-20:].max() > 10 * far[:20].max()


@given(**(SHAPES | {"members": st.just(1)}))
def test_with_momentum_one_member_is_dga_bit_for_bit(members, local_steps, delay, steps, rng):
    runs = [
        Fleet(f"dga({c})", 1, local_steps, delay, steps, momentum=0.9).run()
        for c in ("decay", "paper")
    ]
    assert len({run.hub.base.tobytes() for run in runs}) == 1


def test_without_a_delay_it_is_local_sgd_bit_for_bit():
    ends = [
        Fleet(name, 3, 2, 0, 11).run().hub.base.tobytes() for name in ("dga(decay)", "local-sgd")
    ]
    assert ends[0] == ends[1]


def half_of(elements=6):
    params = np.zeros(elements, np.float32)
    return Displacement(params, local_steps=1, delay=2, drift=Leaving(elements))


def live(half, rounds, reply):
    for _ in range(rounds):
        half.params += 1
        own = half.after_step()
        if half.due() is not None:
            half.apply([np.full(own.size, reply, np.float32)])
    return half


def test_what_stayed_is_not_contributed_where_a_final_sync_begins():
    half = live(half_of(), FIRST + 5, 0.5)
    half.delay = 0
    while half.due() is not None:
        half.apply([np.full(6, 0.5, np.float32)])
    np.testing.assert_array_equal(half.params, half.base)
    half.drift.gap[:], half.params[:] = 3, half.params + 3  # as after a reply that said so
    half.params += 0.25
    assert half.after_step().tolist() == [0.25] * 6
    half.apply([np.full(6, 0.5, np.float32)])
    np.testing.assert_array_equal(half.params, half.base)
    assert not half.drift.gap.any()


def test_a_checkpoint_has_what_stayed():
    half = live(half_of(), FIRST + 5, 0.5)
    assert half.drift.gap.any()
    again = half_of()
    again.restore_learned({name: value.copy() for name, value in half.learned().items()})
    again.params[:] = half.base
    again.start(half.applied, half.round)
    np.testing.assert_array_equal(again.drift.gap, half.drift.gap)
    np.testing.assert_array_equal(again.params, half.base + half.drift.gap)
    assert again.rest() is None
    with pytest.raises(BadMessage, match="what stayed"):
        half_of(5).restore_learned(half.learned())


def chooser(elements, momentum=0.9):
    vectors = np.zeros((2, elements), np.float32)
    return strategies.find("dga").member_half(strategies.Setting(*vectors, 1, 2, momentum=momentum))


@pytest.mark.parametrize(
    ("reply", "momentum", "word"), [(0.25, 0.9, "predict"), (0.8, 0.9, "decay"), (0.8, 0, "decay")]
)
def test_auto_takes_it_on_equal_data(reply, momentum, word):
    half = live(chooser(6, momentum), FIRST + 12, reply)
    assert half.take_note().startswith(f"{word}: divergence from the fleet over {ROUNDS} rounds")
    assert isinstance(half.drift, Leaving) == (word == "decay")
    again = chooser(6, momentum)
    again.restore_learned({name: value.copy() for name, value in half.learned().items()})
    assert type(again.drift) is type(half.drift)
    assert {n: v.tobytes() for n, v in again.learned().items()} == {
        n: v.tobytes() for n, v in half.learned().items()
    }


def test_what_auto_chose_goes_on_as_if_it_had_begun_with_nothing_left():
    """The first rounds, before the choice, are those of `paper`; nothing has stayed of them."""
    auto, said = live(chooser(6), ROUNDS + 1, 0.8), live(chooser(6), ROUNDS + 2, 0.8)
    assert isinstance(said.drift, Leaving)
    assert not said.drift.gap.any()
    assert auto.drift.choice is not None


def test_rounds_that_touch_few_blocks_keep_own_progress():
    """Which costs the blocks that they touch, not the whole vector."""
    half = chooser(400 * BLOCK)
    for _ in range(FIRST + ROUNDS + 2):
        half.params[:3] += 1
        own = half.after_step()
        if half.due() is not None:
            half.apply([own.copy()])
    assert half.take_note().startswith("paper: ")
    assert half.drift is None
