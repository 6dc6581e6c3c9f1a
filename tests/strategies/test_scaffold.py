"""SCAFFOLD: its laws."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
from fleet import Fleet
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import strategies
from edgetrain.cli.common import check_before_torch
from edgetrain.errors import BadMessage, ConfigError
from edgetrain.exchange.hub.terms import Policy
from edgetrain.jobs import reading
from edgetrain.jobs.rules import resolve
from edgetrain.strategies.scaffold import LEAP, ROUNDING

ELEMENTS = 5
ZEROS = np.zeros(ELEMENTS, np.float32)
ROOM = {"members": st.integers(1, 5), "every": st.integers(1, 5), "steps": st.integers(1, 20)}


def pull(member, step, w):
    """A member's gradient, with curvature of its own, and its own noise."""
    noise = np.random.default_rng([member, step]).standard_normal(w.size)
    return 0.1 * (1 + member / 8) * (w - member) + 0.05 * noise


class Paper:
    """Algorithm 1 of the paper, option II, with all members: c_i, c, x, in float64. The gradients
    are taken where float32 would be."""

    def __init__(self, start, members):
        self.x, self.c = start.astype(np.float64), np.zeros((members, start.size))

    def round(self, first, last, rate):
        c, ends = self.c.mean(0), []
        for m, c_m in enumerate(self.c):
            y = self.x.copy()
            for step in range(first, last):
                y -= rate(step) * (pull(m, step, y) - c_m + c)
            ends.append(y)
        total = sum(rate(step) for step in range(first, last))
        self.c += [-c + (self.x - y) / total for y in ends]
        self.x = np.mean(ends, 0)


@given(**ROOM, rng=st.randoms(use_true_random=False))
def test_it_is_the_papers_algorithm(members, every, steps, rng):
    fleet = Fleet("scaffold", members, every, 0, steps, rng=rng, local_step=plain).run()
    paper = Paper(fleet.initial, members)
    for first in range(0, steps, every):
        paper.round(first, min(first + every, steps), lambda step: 1.0)
    for member in fleet.members:
        np.testing.assert_allclose(member.params, paper.x, rtol=1e-4, atol=1e-4)


def plain(member, step, w):
    return pull(member, step, w.astype(np.float64)).astype(np.float32)


def naive(start, members, every, steps, weights):
    """The docstring's formulas, in the fewest lines, in float32: (parameters, variates)."""
    x, v, rates = start.copy(), np.zeros((members, start.size), np.float32), 0.0
    fleet = np.zeros_like(start)
    for first in range(0, steps, every):
        owns, taken = [], range(first, min(first + every, steps))
        fleet *= np.float32(len(taken) / rates if rates else 0)
        for m in range(members):
            y, share = x.copy(), np.float32(1 / rates if rates else 0)
            for step in taken:
                y -= plain(m, step, y)
                y += v[m] * share
            owns.append(y - x)
            v[m] = v[m] * sum([share for _ in taken], np.float32(0)) + fleet - owns[m]
        mean = owns[0].copy()
        for weight, own in zip(weights[1:], owns[1:], strict=True):
            mean += np.float32(weight / weights[0]) * own
        mean *= np.float32(1 / sum(weight / weights[0] for weight in weights))
        x, v, rates = x + mean, v + (mean - fleet), float(len(taken))
        fleet = fleet + (mean - fleet)
        v[np.abs(v) <= ROUNDING * np.abs(fleet)] = 0
    return x, v


@given(
    **ROOM,
    rng=st.randoms(use_true_random=False),
    weights=st.lists(st.just(1.0) | st.just(2.0), min_size=5, max_size=5),
)
def test_it_is_its_formula_bit_for_bit(members, every, steps, rng, weights):
    weights = weights[:members]
    fleet = Fleet(
        "scaffold", members, every, 0, steps, rng=rng, local_step=plain, weights=weights
    ).run()
    x, v = naive(fleet.initial, members, every, steps, weights)
    for member, variates in zip(fleet.members, v, strict=True):
        assert member.params.tobytes() == x.tobytes()
        assert member.half.variates.tobytes() == variates.tobytes()
    total = np.average([m.half.variates for m in fleet.members], axis=0, weights=weights)
    most = max(np.abs(m.half.variates).max() for m in fleet.members)
    assert np.abs(total).max() <= 1e-6 * max(most, np.abs(x).max())


@pytest.mark.parametrize("members", [1, 2, 4, 8])
def test_with_equal_batches_it_is_fedavg_bit_for_bit(members):
    ends = [
        Fleet(name, members, 3, 0, 20, local_step=lambda m, step, w: plain(0, step, w)).run()
        for name in ("scaffold", "fedavg")
    ]
    first, second = ({m.params.tobytes() for m in fleet.members} for fleet in ends)
    assert first == second
    assert len(first) == 1


@given(seed=st.integers(0, 2**32), rates=st.lists(st.floats(0.01, 0.4), min_size=2, max_size=12))
def test_variates_follow_a_learning_rate_that_changes(seed, rates):
    """Two members, rounds of two steps: the paper's algorithm at those rates."""
    start = np.random.default_rng(seed).standard_normal(ELEMENTS).astype(np.float32)
    rates = rates[: len(rates) // 2 * 2]
    paper, members = Paper(start, 2), [start.copy(), start.copy()]
    halves = [
        strategies.find("scaffold").member_half(strategies.Setting(p, None, 2, 0)) for p in members
    ]
    for first in range(0, len(rates), 2):
        owns = []
        for m, (half, params) in enumerate(zip(halves, members, strict=True)):
            for step in (first, first + 1):
                params -= np.float32(rates[step]) * plain(m, step, params)
                half.note_rate(rates[step])
                own = half.after_step()
            owns.append(own.copy())
        for half in halves:
            half.apply([np.mean(owns, axis=0)])
        paper.round(first, first + 2, lambda step: rates[step])
    for half, params in zip(halves, members, strict=True):
        assert params.tobytes() == half.base.tobytes()
        np.testing.assert_allclose(params, paper.x, rtol=1e-4, atol=1e-4)


def test_a_rate_that_leaps_is_not_corrected_by_what_is_only_rounding():
    params = np.ones(ELEMENTS, np.float32)
    half = strategies.find("scaffold").member_half(strategies.Setting(params, None, 1, 0))
    for rate in (1e-6, 2e-6, LEAP):
        half.note_rate(rate)
        before = params.copy()
        half.after_step()  # no optimizer: the contribution is nothing
        np.testing.assert_allclose(half.variates, half.fleet, atol=3e-7)
        half.apply([np.full(ELEMENTS, 0.25, np.float32)])
        assert half.quiet_steps() == 0
        np.testing.assert_allclose(params, before + 0.25)


@given(
    codec=st.sampled_from(["fp16", "int8", "sign", "small(1): fp32; low-rank(1)"]),
    **(ROOM | {"members": st.integers(2, 4)}),
    rng=st.randoms(use_true_random=False),
)
def test_with_a_lossy_codec_nothing_is_lost_and_variates_are_of_what_is_read(
    codec, members, every, steps, rng
):
    fleet = Fleet(
        "scaffold", members, every, 0, steps, rng=rng, codec=codec, reply_codec="fp32", elements=8
    ).run()
    assert len({m.params.tobytes() for m in fleet.members}) == 1
    moved = fleet.hub.base.astype(np.float64) - fleet.initial
    sent = np.mean([member.sent for member in fleet.members], axis=0)
    np.testing.assert_allclose(moved, sent, rtol=1e-3, atol=1e-3)
    variates = np.array([member.half.variates for member in fleet.members])
    assert np.abs(variates.sum(0)).max() <= 1e-5 * max(1, np.abs(variates).max())


@given(
    members=st.integers(2, 5), every=st.integers(1, 4), rng=st.randoms(use_true_random=False),
    when=st.integers(0, 200),
)  # fmt: skip
def test_a_killed_member_does_not_stop_the_others(members, every, rng, when):
    fleet = Fleet(
        "scaffold", members, every, 0, 20, rng=rng, policy=Policy(members, gone_s=5.0),
        local_step=plain,
    )  # fmt: skip
    fleet.run(fleet.killing(members - 1, when))
    survivors = [m for m in fleet.members if m.index not in fleet.dead]
    assert [m.state for m in survivors] == ["done"] * len(survivors)
    assert len({m.params.tobytes() for m in survivors}) == 1


def ends_with_missing(strategy, missing, rounds=300):
    """How far from the optimum of five quadratic losses a base ends, if in each round other
    `missing` members take no steps, and hear the reply only."""
    rng, bases = np.random.default_rng(0), np.zeros((5, ELEMENTS), np.float32)
    curvature, pulls = (
        0.05 * (1 + np.arange(5) / 2)[:, None],
        3 * rng.standard_normal((5, ELEMENTS)),
    )
    find = strategies.find(strategy)
    halves = [find.member_half(strategies.Setting(params, None, 4, 0)) for params in bases]
    for round in range(rounds):
        here = rng.choice(5, 5 - missing, replace=False)
        owns = []
        for m in here:
            for _ in range(4):
                bases[m] -= curvature[m] * (bases[m] - pulls[m])
                halves[m].note_rate(1.0)
                own = halves[m].after_step()
            owns.append(own.copy())
        for half in halves:
            half.skip_to(round + 1)
            half.note_merged(0, 0, len(here) / 5)
            half.apply([np.mean(owns, axis=0)])
    return np.abs(bases - (curvature * pulls).sum(0) / curvature.sum()).max()


@pytest.mark.parametrize("missing", [0, 1, 2, 3, 4])
def test_members_that_miss_rounds_end_at_the_optimum_of_all(missing):
    assert ends_with_missing("scaffold", missing) < 1e-5
    assert ends_with_missing("fedavg", missing) > 1e-2


def test_lost_replies_are_the_mean_way_of_the_base():
    params = np.zeros(ELEMENTS, np.float32)
    half = strategies.find("scaffold").member_half(strategies.Setting(params, None, 1, 0))
    for _ in range(2):
        half.note_rate(1.0)
        half.after_step()
        half.apply([np.ones(ELEMENTS, np.float32)])
    half.note_rate(1.0)
    half.after_step()
    half.rebase(np.full(ELEMENTS, 7, np.float32), 4)
    assert params.tobytes() == half.base.tobytes() == np.full(ELEMENTS, 7, np.float32).tobytes()
    half.note_rate(1.0)
    assert (half.after_step() == (7 - 2) / 2).all(), "two replies took the base from 2 to 7"


# -- checkpoints ----------------------------------------------------------------------------------


def two_rounds(params):
    """A half of rounds of 3 steps, one step into its third round."""
    half = strategies.find("scaffold").member_half(strategies.Setting(params, None, 3, 0))
    for step in range(7):
        params -= plain(0, step, params)
        half.note_rate(1.0)
        if (own := half.after_step()) is not None:
            half.apply([own * np.float32(0.5)])
    return half


def restored(half, state, rest, steps):
    params = half.base.copy()
    again = strategies.find("scaffold").member_half(strategies.Setting(params, None, 3, 0))
    again.restore_learned(state)
    again.start(half.applied, half.round)
    if rest is not None:
        again.restore_rest(rest, steps)
    return again, params


def test_a_checkpoint_in_the_middle_of_a_round_has_the_variates():
    params = np.ones(ELEMENTS, np.float32)
    half = two_rounds(params)
    state = {name: value.copy() for name, value in half.learned().items()}
    rest = half.rest()
    np.testing.assert_allclose(rest, half.variates / 3 - plain(0, 6, half.base), atol=1e-6)
    again, others = restored(half, state, rest, half.local_steps)
    np.testing.assert_allclose(others, params, atol=1e-6)
    for step in (7, 8):
        for each, vector in ((half, params), (again, others)):
            vector -= plain(0, step, vector)
            each.note_rate(1.0)
            own = each.after_step()
            if step == 8:
                each.apply([own])
    np.testing.assert_allclose(others, params, atol=1e-6)
    np.testing.assert_allclose(again.variates, half.variates, atol=1e-6)


def test_a_checkpoint_whose_steps_were_contributed_since_leaves_whole_variates():
    half = two_rounds(np.ones(ELEMENTS, np.float32))
    again, _ = restored(half, half.learned(), None, 0)
    whole = half.variates.copy()
    for _ in range(3):
        again.note_rate(1.0)
        own = again.after_step()
    np.testing.assert_allclose(own, whole, atol=1e-6)


@pytest.mark.parametrize("state", [
    {"variates": np.zeros(4, np.float32), "fleet": ZEROS, "rates": np.zeros(3)},
    {"variates": ZEROS},
    {"variates": ZEROS, "rates": np.array([1.0, 0.0, 0.0])},
    {"variates": ZEROS, "fleet": ZEROS, "rates": np.array([1.0, -1.0, 0.0])},
    {"variates": ZEROS, "fleet": ZEROS, "rates": np.array([np.nan, 0.0, 0.0])},
])  # fmt: skip
def test_a_damaged_checkpoint_is_refused(state):
    half = strategies.find("scaffold").member_half(
        strategies.Setting(np.zeros(ELEMENTS, np.float32), None, 3, 0)
    )
    with pytest.raises(BadMessage, match="variates"):
        half.restore_learned(state)


# -- whole jobs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["codec=topk(0.01)"], "elements that are left out would count as steps not taken"),
        (["codec=auto"], "take int8, or fedavg"),
        (["reply_codec=topk(0.1) | q2"], "strategy.reply_codec = 'topk(0.1) | q2': scaffold"),
        (["delay=3"], "strategy.delay = 3: scaffold waits for every reply"),
        (["correction=drift"], "scaffold: correction = drift: there is no delay to correct"),
        (["merge=median"], "scaffold weighs members"),
        (["outer=nesterov(0.7, 0.9)"], "members compare their contributions with the mean"),
        (["unit=member", "noise=1"], "the noise in a reply is larger than the drift"),
        (["strategy=scaffold(1)"], "'scaffold' takes no arguments"),
    ],
)
def test_what_does_not_go_together_is_one_clear_line(words, said):
    with pytest.raises(ConfigError) as refused:
        resolve(reading.load(None, ["strategy=scaffold", *words]))
    assert said in str(refused.value)


def test_adamw_is_a_warning_with_the_figure(capsys):
    for words, said in (
        (["strategy=scaffold", "optimizer={ name = 'AdamW', lr = 0.01 }"], 1),
        (["strategy=fedavg", "optimizer={ name = 'AdamW', lr = 0.01 }"], 0),
        (["strategy=scaffold", "optimizer={ name = 'sgd', lr = 0.01 }"], 0),
    ):
        check_before_torch(Namespace(json=True), [reading.load(None, words)])
        warned = capsys.readouterr().err
        assert warned.count("warning: scaffold is made for SGD, and the optimizer is adamw") == said


@pytest.mark.parametrize(("words", "said"), [
    (["strategy=dga", "data.partition=dirichlet(0.3)", "optimizer={ name = 'AdamW' }"], 1),
    (["strategy=sync-sgd", "data.partition=dirichlet(0.3)", "optimizer={ name = 'AdamW' }"], 0),
    (["strategy=dga", "data.partition=iid", "optimizer={ name = 'AdamW' }"], 0),
    (["strategy=dga", "data.partition=dirichlet(0.3)", "optimizer={ name = 'sgd', lr = 0.1 }"], 0),
])  # fmt: skip
def test_adamw_on_unequal_data_is_a_warning_with_the_figure(capsys, words, said):
    check_before_torch(Namespace(json=True), [reading.load(None, words)])
    assert capsys.readouterr().err.count("no strategy with local steps ended above 83 %") == said
