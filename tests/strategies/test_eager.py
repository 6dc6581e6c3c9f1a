"""Eager updates: the stand-in is the paper's formula, and alone it is plain training."""

from __future__ import annotations

import numpy as np
from fleet import Fleet, noisy_descent
from hypothesis import given
from hypothesis import strategies as st
from test_strategy_laws import SHAPES

from edgetrain import strategies


def naive_eager(initial, members, local_steps, delay, steps):
    """base + sum over rounds in flight of (own/N + last reply - last own/N) + steps since, in
    float64, on all members at once; parameters before each step. Until a reply is known, own."""
    base, last = initial.astype(np.float64), [None] * members
    flying, since = [[] for _ in range(members)], [np.zeros(initial.size) for _ in range(members)]
    ends, histories = [], [[] for _ in range(members)]

    def at(m):
        stands = [o if last[m] is None else o / members + last[m] for o in flying[m]]
        return base + sum(stands, np.zeros(initial.size)) + since[m]

    for step in range(steps):
        for m in range(members):
            w = at(m)
            histories[m].append(w)
            since[m] = since[m] - noisy_descent(m, step, w.astype(np.float32)).astype(np.float64)
        if (step + 1) % local_steps == 0:
            ends.append(step + 1)
            for m in range(members):
                flying[m].append(since[m])
                since[m] = np.zeros(initial.size)
        while ends and ends[0] + delay <= step + 1:
            ends.pop(0)
            owns = [rounds.pop(0) for rounds in flying]
            mean = sum(owns) / members
            base = base + mean
            last = [mean - own / members for own in owns]
    return histories


@given(**SHAPES)
def test_the_stand_in_is_the_papers_formula(members, local_steps, delay, steps, rng):
    fleet = Fleet("eager | sgd(1)", members, local_steps, delay, steps, rng=rng).run()
    for member, expected in zip(
        fleet.members, naive_eager(fleet.initial, members, local_steps, delay, steps), strict=True
    ):
        np.testing.assert_allclose(np.array(member.history), expected, rtol=2e-4, atol=2e-4)


@given(**(SHAPES | {"members": st.just(1)}))
def test_one_member_is_plain_training(members, local_steps, delay, steps, rng):
    fleet = Fleet("eager | sgd(1)", members, local_steps, delay, steps, rng=rng).run()
    plain = fleet.initial.copy()
    for step in range(steps):
        plain -= noisy_descent(0, step, plain)
    np.testing.assert_allclose(fleet.members[0].params, plain, rtol=1e-5, atol=1e-5)
    gap = fleet.members[0].half.drift.gap
    assert not gap.any(), "the last reply is this member's last contribution"


def test_without_a_delay_it_is_diloco_bit_for_bit():
    ends = [Fleet(name, 3, 2, 0, 11).run().hub.base.tobytes() for name in ("eager", "diloco")]
    assert ends[0] == ends[1]


def test_what_it_has_learned_is_in_a_checkpoint():
    row = strategies.find("eager")
    first, second = (
        row.member_half(
            strategies.Setting(np.zeros(5, np.float32), np.zeros(5, np.float32), 1, 3, members=2)
        )
        for _ in range(2)
    )
    first.drift.gap[:] = np.arange(5)
    second.restore_learned({name: array.copy() for name, array in first.learned().items()})
    assert second.drift.gap.tobytes() == first.drift.gap.tobytes()
