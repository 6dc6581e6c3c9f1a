"""Control variates on gradients: `scaffold`, and `dga(variates)`, and their laws."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from fleet import Disk, Fleet
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import strategies
from edgetrain.cli.running import check_before_torch
from edgetrain.errors import BadMessage, ConfigError
from edgetrain.exchange.hub.terms import Policy
from edgetrain.jobs import reading
from edgetrain.jobs.rules import resolve
from edgetrain.strategies.variates import EASE
from tests.fakes.flat_vectors import FlatVectors

ELEMENTS = 5
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROOM = {
    "members": st.integers(1, 5), "local_steps": st.integers(1, 5), "steps": st.integers(1, 20),
    "rng": st.randoms(use_true_random=False),
}  # fmt: skip


def pull(member, step, w):
    """A member's gradient, with curvature of its own, and its own noise."""
    noise = np.random.default_rng([member, step]).standard_normal(w.size)
    wide = w.astype(np.float64)
    return (0.1 * (1 + member / 8) * (wide - member) + 0.05 * noise).astype(np.float32)


def papers_scaffold(start, members, local_steps, steps):
    """Algorithm 1 of the paper, option II, with all members and a rate of 1, in float64."""
    x, own = start.astype(np.float64), np.zeros((members, start.size))
    for first in range(0, steps, local_steps):
        taken, ends = range(first, min(first + local_steps, steps)), []
        for m, c_m in enumerate(own):
            y = x.copy()
            for step in taken:
                y -= pull(m, step, y) - c_m + own.mean(0)
            ends.append(y)
        own += [-own.mean(0) + (x - y) / len(taken) for y in ends]
        x = np.mean(ends, 0)
    return x


@given(**ROOM)
def test_without_a_delay_it_is_the_papers_algorithm(members, local_steps, steps, rng):
    fleet = Fleet("scaffold", members, local_steps, 0, steps, rng=rng, local_step=pull).run()
    x = papers_scaffold(fleet.initial, members, local_steps, steps)
    for member in fleet.members:
        np.testing.assert_allclose(member.params, x, rtol=1e-4, atol=1e-4)


def naive(start, members, local_steps, delay, steps, ease):
    """The docstring's formulas, in float64: parameters before each step, and the variates."""
    w, v = np.tile(start.astype(np.float64), (members, 1)), np.zeros((members, start.size))
    sums, moves, flying, histories = np.zeros_like(v), np.zeros_like(v), [], []
    for step in range(steps):
        histories.append(w.copy())
        pulls = np.array([pull(m, step, w[m]) for m in range(members)], np.float64)
        sums, moves, w = sums + pulls, moves - pulls - v, w - pulls - v
        if (step + 1) % local_steps == 0:
            flying.append((step + 1 + delay, moves, sums / local_steps))
            sums, moves = np.zeros_like(v), np.zeros_like(v)
        while flying and flying[0][0] <= step + 1:
            _, own, g = flying.pop(0)
            w = w + own.mean(0) - own
            v = v + ease * (g.mean(0) - g - v)
    return np.array(histories), v


@given(delay=st.integers(0, 14), **ROOM)
def test_with_a_delay_it_is_its_formula(delay, members, local_steps, steps, rng):
    fleet = Fleet(
        "dga(variates)", members, local_steps, delay, steps, rng=rng, local_step=pull
    ).run()
    ease = float(EASE) if delay else 1.0
    histories, _ = naive(fleet.initial, members, local_steps, delay, steps, ease)
    for m, member in enumerate(fleet.members):
        np.testing.assert_allclose(np.array(member.history), histories[:, m], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("members", [1, 2, 4])
@pytest.mark.parametrize("names", [("scaffold", "fedavg", 0), ("dga(variates)", "dga(paper)", 4)])
def test_with_equal_batches_nothing_is_corrected_bit_for_bit(members, names):
    *names, delay = names
    ends = [
        Fleet(name, members, 3, delay, 20, local_step=lambda m, step, w: pull(0, step, w)).run()
        for name in names
    ]
    first, second = ({m.params.tobytes() for m in fleet.members} for fleet in ends)
    assert first == second
    assert len(first) == 1


@given(
    codec=st.sampled_from(["fp16", "int8", "sign", "small(1): fp32; low-rank(1)"]),
    delay=st.sampled_from([0, 3]), **(ROOM | {"members": st.integers(2, 4)}),
)  # fmt: skip
def test_with_a_lossy_codec_nothing_is_lost_and_variates_are_of_what_is_read(
    codec, delay, members, local_steps, steps, rng
):
    fleet = Fleet(
        "dga(variates)", members, local_steps, delay, steps, rng=rng, codec=codec,
        reply_codec="fp32", elements=8, local_step=pull,
    ).run()  # fmt: skip
    assert len({m.params.tobytes() for m in fleet.members}) == 1
    moved = fleet.hub.base.astype(np.float64)
    moved[:8] -= fleet.initial
    sent = np.mean([member.sent for member in fleet.members], axis=0)
    np.testing.assert_allclose(moved, sent, rtol=1e-3, atol=1e-3)
    variates = np.array([member.half.variates for member in fleet.members])
    assert np.abs(variates.sum(0)).max() <= 1e-4 * max(1, np.abs(variates).max())


@given(
    members=st.integers(2, 5), local_steps=st.integers(1, 4), rng=st.randoms(use_true_random=False),
    when=st.integers(0, 200), name=st.sampled_from(["scaffold", "dga(variates)"]),
)  # fmt: skip
def test_a_killed_member_does_not_stop_the_others(members, local_steps, rng, when, name):
    fleet = Fleet(
        name,
        members,
        local_steps,
        3,
        20,
        rng=rng,
        policy=Policy(members, lost_after_s=5.0),
        local_step=pull,
    )
    fleet.run(fleet.killing(members - 1, when))
    survivors = [m for m in fleet.members if m.index not in fleet.dead]
    assert [m.state for m in survivors] == ["done"] * len(survivors)
    assert len({m.params.tobytes() for m in survivors}) == 1


def half_of(size=ELEMENTS, local_steps=1, delay=0, at=0.0):
    """A half without a fleet, and its vectors."""
    params, gradient = np.zeros(2 * size, np.float32), np.zeros(size, np.float32)
    params[:size] = at
    row = strategies.find("dga(variates)" if delay else "scaffold")
    return (
        row.member_half(strategies.Setting(params, gradient, local_steps, delay)),
        params,
        gradient,
    )


def step_of(half, params, gradient, pulled):
    """A step of plain SGD at a rate of 1."""
    gradient[:] = pulled
    half.before_step()
    params[: gradient.size] -= gradient
    half.note_rate(1.0)
    return half.after_step()


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("missing", [0, 1, 2, 3, 4])
def test_members_that_miss_rounds_end_at_the_optimum_of_all(
    missing, back, monkeypatch, own_imports
):
    """Whether they hear the replies to these, or find the base when they are back."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from missing import distance

    assert distance("scaffold", missing, back) < 1e-5
    assert missing < 4 or distance("fedavg", missing, back) > 1e-2


@pytest.mark.parametrize("when", [60, 75, 90])
def test_the_base_has_the_mean_gradient_of_all_members_also_of_those_that_are_away(when):
    weights = [1.0, 2.0, 5.0]
    fleet = Fleet("scaffold", 3, 2, 0, 12, weights=weights, local_step=pull)
    away = fleet.members[2]
    fleet.run(fleet.killing(2, when))
    assert sum("m2" in closed.members for closed in fleet.closed) == len(away.submitted) < 6
    mean = np.average([member.sent for member in fleet.members], axis=0, weights=weights)
    np.testing.assert_allclose(fleet.hub.base[7:], mean[7:], rtol=1e-4, atol=1e-5)


def test_newcomers_and_those_that_come_back_find_the_fleets_gradient_in_the_base():
    half, params, gradient = half_of()
    step_of(half, params, gradient, 1.0)
    half.apply([np.array([-2.0] * 5 + [2.0] * 5, np.float32)])
    np.testing.assert_array_equal(half.variates, 1.0)  # the fleet's 2, its own 1
    half.skip_to(3)
    half.rebase(np.array([-9.0] * 5 + [5.0] * 5, np.float32), 3)
    np.testing.assert_array_equal(half.variates, 4.0)  # the fleet's 5 by now
    late, params, gradient = half_of()
    params[:] = half.base
    late.start(3, 3)
    assert step_of(late, params, gradient, 7.0)[ELEMENTS:].tolist() == [7.0 - 5.0] * ELEMENTS
    np.testing.assert_array_equal(late.variates, 0.0)


def test_a_round_without_gradients_says_nothing_new():
    half, params, gradient = half_of()
    step_of(half, params, gradient, 1.0)
    half.apply([np.array([-1.0] * 5 + [1.0] * 5, np.float32)])
    assert half.after_step()[ELEMENTS:].tolist() == [0.0] * ELEMENTS


@pytest.mark.parametrize(("kill", "codec"), [(30, ""), (60, "int8"), (90, "")])
def test_a_hub_that_is_killed_goes_on_from_its_journal_with_the_same_bits(kill, codec):
    room = {"local_step": pull, "reply_codec": codec}
    whole = Fleet("dga(variates)", 3, 2, 3, 14, **room).run()
    fleet = Fleet("dga(variates)", 3, 2, 3, 14, **room, disk=Disk(3), kills=[kill]).run()
    assert [m.state for m in fleet.members] == ["done"] * 3
    assert {m.params.tobytes() for m in fleet.members} == {whole.members[0].params.tobytes()}


def test_a_member_without_room_for_gradients_is_told_so():
    fleet = Fleet("scaffold", 1, 2, 0, 4)
    (member,) = fleet.members
    member.flat = FlatVectors(member.params, fleet.description)
    fleet.run()
    assert member.state == "refused"
    assert "exchanges mean gradients" in fleet.notes[-1].reason


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 4])
@pytest.mark.parametrize("steps", [6, 7])
def test_a_checkpoint_goes_on_with_the_same_variates(delay, steps):
    """Rounds of 3 steps, of one member whose fleet does half of what it does."""

    def go(half, params, gradient, first, last):
        for step in range(first, last):
            own = step_of(half, params, gradient, pull(0, step, params[:ELEMENTS]))
            if own is not None:
                owns.append(own * np.float32(0.5))
            while (due := half.due()) is not None:
                half.apply([owns[due]])

    owns = []
    half, params, gradient = half_of(local_steps=3, delay=delay, at=1.0)
    go(half, params, gradient, 0, steps)
    while half.applied < half.round:  # replies that came while it was written are in the base
        half.apply([owns[half.applied]])
    state = {name: value.copy() for name, value in half.learned().items()}
    rest, taken = half.rest(), half.steps_taken
    again, others, gradients = half_of(local_steps=3, delay=delay)
    others[:] = half.base
    again.restore_learned(state)
    again.start(half.applied, half.round)
    if rest is not None:
        again.restore_rest(rest, taken)
    for each in ((half, params, gradient), (again, others, gradients)):
        go(*each, steps, 12)
    np.testing.assert_allclose(others, params, atol=1e-5)
    np.testing.assert_allclose(again.variates, half.variates, atol=1e-5)


V = np.zeros(ELEMENTS, np.float32)


@pytest.mark.parametrize("change", [
    {"variates": np.zeros(4, np.float32)}, {"last": None}, {"counts": np.array([1.0, -1.0])},
    {"counts": None}, {"sum": np.full(ELEMENTS, np.nan, np.float32)},
])  # fmt: skip
def test_a_damaged_checkpoint_is_refused(change):
    whole = {"variates": V, "own": V, "last": V, "sum": V, "counts": np.array([1.0, 0.0])}
    half_of()[0].restore_learned(whole)
    with pytest.raises(BadMessage, match="variates"):
        half_of()[0].restore_learned({k: v for k, v in (whole | change).items() if v is not None})


# -- whole jobs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["codec=topk(0.01)"], "elements that are left out would count as gradients of zero"),
        (["codec=auto"], "choose dga or fedavg, or take int8"),
        (["reply_codec=topk(0.1) | q2"], "scaffold and strategy.reply_codec = 'topk(0.1) | q2'"),
        (["delay=3"], "scaffold and strategy.delay = 3: it waits for every reply"),
        (["correction=predict"], "scaffold: correction = predict: there is no delay to correct"),
        (["merge=median"], "counts each member once"),
        (["strategy=dga(variates)", "merge=median"], "compares members"),
        (["strategy=dga(variates) | nesterov(0.7, 0.9)"], "would get a step on it"),
        (["strategy=dga | nesterov(0.7, 0.9)", "correction=variates"], "would get a step on it"),
        (["outer=nesterov(0.7, 0.9)"], "members compare their contributions with the mean"),
        (["unit=member", "noise=1"], "the noise in a reply is larger than the drift"),
        (["strategy=scaffold(1)"], "'scaffold' takes no arguments"),
    ],
)
def test_what_does_not_go_together_is_one_clear_line(words, said):
    with pytest.raises(ConfigError) as refused:
        resolve(reading.load(None, ["strategy=scaffold", *words]))
    assert said in str(refused.value)


@pytest.mark.parametrize(("words", "said"), [
    (["strategy=dga", "data.partition=dirichlet(0.3)", "optimizer={ name = 'AdamW' }"], 1),
    (["strategy=scaffold", "data.partition=dirichlet(0.3)", "optimizer={ name = 'AdamW' }"], 0),
    (["strategy=dga(variates)", "data.partition=dirichlet(0.3)", "optimizer.name=AdamW"], 0),
    (["strategy=sync-sgd", "data.partition=dirichlet(0.3)", "optimizer={ name = 'AdamW' }"], 0),
    (["strategy=dga", "data.partition=iid", "optimizer={ name = 'AdamW' }"], 0),
    (["strategy=dga", "data.partition=dirichlet(0.3)", "optimizer={ name = 'sgd', lr = 0.1 }"], 0),
])  # fmt: skip
def test_adamw_on_unequal_data_is_a_warning_with_the_figure(capsys, words, said):
    check_before_torch(Namespace(json=True), [reading.load(None, words)])
    assert capsys.readouterr().err.count("dga ended at 85 % and sync-sgd at 98") == said
