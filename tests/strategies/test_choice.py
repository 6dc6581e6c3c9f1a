"""What stands for rounds in flight with `correction = "auto"`: chosen by each member for itself."""

from __future__ import annotations

import numpy as np
import pytest
from fleet import Fleet, noisy_descent
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drift import SHAPES

from edgetrain import strategies
from edgetrain.errors import BadMessage
from edgetrain.strategies.choice import APART, ROUNDS, FirstRounds
from edgetrain.strategies.drift import Drift
from edgetrain.strategies.leaving import FIRST, Leaving
from edgetrain.vectors.vector import TILE


def alike(member, step, params):
    """Towards one point for all, with a little noise of each member's own."""
    noise = np.random.default_rng([member, step]).standard_normal(params.size)
    return (0.1 * (params - 3) + 0.05 * noise).astype(np.float32)


def apart(member, step, params):
    """Towards a point of each member's own, far from the others' and around the start."""
    return (0.1 * (params - 20 * (-1) ** member)).astype(np.float32) + noisy_descent(
        member, step, params
    ) * np.float32(0.01)


def run(name, local_step, members=4, local_steps=2, delay=4, steps=40, **more):
    return Fleet(name, members, local_steps, delay, steps, local_step=local_step, **more).run()


def histories(fleet):
    return [np.array(member.history) for member in fleet.members]


@given(**(SHAPES | {"members": st.integers(1, 4)}))
def test_where_members_pull_alike_it_is_leave_bit_for_bit(members, local_steps, delay, steps, rng):
    leave, auto = (
        run(name, alike, members, local_steps, delay, steps, rng=rng)
        for name in ("dga(decay)", "dga")
    )
    for said, chose in zip(*map(histories, (leave, auto)), strict=True):
        assert said.tobytes() == chose.tobytes()
    for member in auto.members:
        assert isinstance(member.half.drift, Leaving)
        if member.half.applied > FIRST + delay + ROUNDS:
            assert (member.half.drift.choice is None) == (delay > 0)


UNTIL_CHOSEN = {0.0: ("dga(decay)", FIRST + ROUNDS), 0.9: ("dga(paper)", ROUNDS)}
"""What stands for rounds until the choice, and for how many, by the optimizer's momentum."""


@settings(max_examples=10)
@given(
    local_steps=st.integers(1, 4), more=st.integers(0, 6), rng=st.randoms(use_true_random=False)
)  # fmt: skip
def test_where_they_pull_apart_with_momentum_it_is_drift_bit_for_bit(local_steps, more, rng):
    """With D >= K no prediction has been compared with its reply before the choice is made."""
    delay = local_steps + more
    steps = local_steps * (ROUNDS + 3) + 2 * delay + 1
    auto, drift, own = (
        run(name, apart, 2, local_steps, delay, steps, rng=rng, momentum=0.9)
        for name in ("dga", "dga(predict)", "dga(paper)")
    )
    assert len({member.params.tobytes() for member in auto.members}) == 1
    for chose, learned in zip(*map(histories, (auto, drift)), strict=True):
        assert chose.tobytes() == learned.tobytes()
    assert histories(own)[0].tobytes() != histories(auto)[0].tobytes()


@pytest.mark.parametrize("momentum", UNTIL_CHOSEN)
def test_one_correction_stands_for_all_rounds_until_the_choice_is_made(momentum):
    name, chosen_after = UNTIL_CHOSEN[momentum]
    for delay in (1, 2, 9):
        steps = 4 * chosen_after + delay - 1
        first, auto = (
            run(name, apart, 2, 4, delay, steps, momentum=momentum) for name in (name, "dga")
        )
        assert histories(first)[0].tobytes() == histories(auto)[0].tobytes()


def test_drift_begins_with_nothing_of_what_stayed_before():
    fleet = run("dga", apart, 2, 4, 9, 4 * (FIRST + ROUNDS + 8))
    assert len({member.params.tobytes() for member in fleet.members}) == 1
    assert all(type(member.half.drift) is Drift for member in fleet.members)
    drift, leave = (half_of(name="dga"), half_of(name="dga(decay)"))
    for half in (drift, leave):
        live(half, FIRST + ROUNDS + 2, reply=0.25)
    assert leave.drift.gap.any()
    expected = drift.base + sum(flight.own for flight in drift.expected.flights)
    np.testing.assert_allclose(drift.params, expected, atol=1e-6)


def test_members_may_choose_differently_and_end_with_the_same_bits():
    """Seven share their data, the eighth has others: it is the one that is led away."""

    def one_apart(member, step, params):
        return alike(member, step, params + 6 if member == 7 else params)

    fleet = run("dga", one_apart, members=8)
    assert [type(member.half.drift) for member in fleet.members] == [Leaving] * 7 + [Drift]
    assert len({member.params.tobytes() for member in fleet.members}) == 1


def rounds(choice, owns, reply):
    for own in owns:
        for start in range(0, own.size, TILE):
            here = slice(start, min(start + TILE, own.size))
            choice.add_tile(here, own, reply[here])
        choice.end_round()
    return choice


@given(st.integers(1, 12), st.floats(0.0, 4.0), st.integers(0, 2**32 - 1))
def test_it_is_the_formula(elements, drift, seed):
    rng = np.random.default_rng(seed)
    reply, away, *noise = rng.standard_normal((2 + ROUNDS, elements)).astype(np.float32)
    owns = [(reply + drift * away + 0.1 * e).astype(np.float32) for e in noise]
    found = rounds(FirstRounds(elements), owns, reply)
    way, fleet = np.sum(owns, 0, np.float64), ROUNDS * reply.astype(np.float64)
    expected = np.sum((way - fleet) ** 2) / np.sum(fleet**2)
    assert found.divergence == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert found.is_made
    assert found.is_divergent == (found.divergence >= APART)
    assert found.reason.startswith("predict: div" if found.is_divergent else "decay: div")


def test_a_long_vector_is_sampled():
    size = 2 * TILE + 3
    own, reply = np.random.default_rng(0).standard_normal((2, size)).astype(np.float32)
    found = rounds(FirstRounds(size), [own] * ROUNDS, reply)
    whole = np.sum((own - reply).astype(np.float64) ** 2) / np.sum(reply.astype(np.float64) ** 2)
    assert found.divergence == pytest.approx(whole, rel=0.05)


def test_a_fleet_that_does_not_move_is_no_reason_to_divide_by_zero():
    still = np.zeros(3, np.float32)
    assert not rounds(FirstRounds(3), [still] * ROUNDS, still).is_divergent


def half_of(elements=6, name="dga"):
    vectors = np.zeros((2, elements), np.float32)
    return strategies.find(name).member_half(strategies.Setting(*vectors, 1, 2))


def live(half, rounds, reply, share=None):
    """Rounds that each lead one step ahead, with this reply; `share` of them is sent."""
    notes = []
    for _ in range(rounds):
        half.params += 1
        own = half.after_step()
        if share is not None:
            half.sent(np.where(np.arange(own.size) < share * own.size, own, np.float32(0)))
        if half.due() is not None:
            half.apply([np.full(own.size, reply, np.float32)])
            notes.append(half.take_note())
    return [note for note in notes if note]


def test_it_says_once_what_it_chose_and_why():
    (said,) = live(half_of(), FIRST + 12, reply=0.25)
    told = "divergence from the fleet over 3 rounds is"
    memory = "2.4e-05 MB of memory"
    assert said == f"predict: {told} 9 (at least 1.25: unequal data); {memory}"
    (said,) = live(half_of(), FIRST + 12, reply=0.8)
    assert said == f"decay: {told} 0.062 (below 1.25: similar data); {memory}"


def test_contributions_that_a_codec_sends_in_part_are_no_evidence():
    """What is left out differs from member to member on equal data, too."""
    half = half_of()
    assert live(half, 12, reply=0.25, share=0.5) == []
    assert half.drift.choice.rounds == 0
    assert half.drift.shares == (1, 0)


@pytest.mark.parametrize("reply", [0.0, 1.0])
@pytest.mark.parametrize("still", [1, FIRST + 5])
def test_rounds_in_which_it_did_not_move_are_no_evidence(still, reply):
    """A zero-initialised head, a rate that warms up: whether the others move or not."""
    half = half_of()
    for _ in range(still):
        half.after_step()
        if half.due() is not None:
            half.apply([np.full(6, reply, np.float32)])
    (said,) = live(half, FIRST + 12, reply=0.25)
    assert said.startswith("predict: divergence from the fleet over 3 rounds is 9 ")


@pytest.mark.parametrize(("rounds", "reply"), [(4, 0.25), (7, 0.25), (15, 0.25), (15, 0.8)])
def test_a_checkpoint_has_the_choice_or_what_was_seen_for_it(rounds, reply):
    half = half_of()
    live(half, rounds, reply)
    again = half_of()
    again.restore_learned({name: value.copy() for name, value in half.learned().items()})
    chosen = Drift if rounds == 15 and reply == 0.25 else Leaving
    assert type(again.drift) is type(half.drift) is chosen
    assert (again.drift.choice is None) == (half.drift.choice is None) == (rounds == 15)
    for name, value in half.learned().items():
        assert again.learned()[name].tobytes() == value.tobytes()


@pytest.mark.parametrize(
    "change",
    [
        {"ways": np.zeros((2, 5))},
        {"ways": np.full((2, 6), np.inf)},
        {"rounds": np.array([float(ROUNDS)])},
        {"rounds": np.array([np.nan])},
        {"rounds": np.zeros(2)},
    ],
)
def test_a_checkpoint_that_no_member_wrote_is_refused(change):
    half = half_of()
    with pytest.raises(BadMessage, match="the checkpoint's first rounds"):
        half_of().restore_learned(half.learned() | change)


def test_strategies_without_a_choice_note_nothing():
    for name in ("dga(paper)", "dga(predict)", "fedavg", "sync-sgd"):
        vectors = np.zeros((2, 3), np.float32)
        half = strategies.find(name).member_half(strategies.Setting(*vectors, 1, 0))
        assert half.take_note() == ""
