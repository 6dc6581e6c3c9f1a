"""Laws of the strategies, over members, every, delay, interleavings and drop-outs."""

from __future__ import annotations

import random

import numpy as np
import pytest
from every_strategy import OUT_OF_STEP, SPELLED
from fleet import Fleet, noisy_descent
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import ConfigError, Diverged
from edgetrain.exchange.hub.terms import Policy
from edgetrain.strategies.displacement import EXPLODED, Displacement
from edgetrain.strategies.gradient import Gradient
from edgetrain.vectors.vector import TILE, checksum

SHAPES = {
    "members": st.integers(1, 5),
    "local_steps": st.integers(1, 6),
    "delay": st.integers(0, 14),
    "steps": st.integers(1, 30),
    "rng": st.randoms(use_true_random=False),
}


@given(
    name=st.sampled_from(
        [
            "sync-sgd",
            "local-sgd",
            "fedavg",
            "scaffold",
            "dga",
            "dga(predict)",
            "dga(variates)",
            "dga-uncorrected",
            "diloco",
        ]
    ),
    **SHAPES,
)
def test_replicas_end_equal_bit_for_bit(name, members, local_steps, delay, steps, rng):
    fleet = Fleet(name, members, local_steps, delay, steps, rng=rng).run()
    assert [m.state for m in fleet.members] == ["done"] * members
    assert fleet.hub.finished
    first = fleet.members[0]
    for member in fleet.members:
        assert member.params.tobytes() == first.params.tobytes()
        assert member.half.base.tobytes() == first.half.base.tobytes()
        assert member.checksums == first.checksums
    if fleet.hub.base is not None:
        assert fleet.hub.base.tobytes() == first.half.base.tobytes()


LOSSY = ["topk(0.3) | q2", "small(1): fp32; low-rank(1)", "topk(0.4, tensor)", "sign"]


@given(
    name=st.sampled_from(["sync-sgd", "local-sgd", "dga", "dga(predict)"]),
    codec=st.sampled_from(LOSSY),
    reply_codec=st.sampled_from(["", "fp32", "topk(0.2) | q2", "*b: bf16; low-rank(1)"]),
    elements=st.integers(1, 20),
    **SHAPES,
)
def test_what_codecs_leave_out_is_sent_later_in_both_directions(
    name, codec, reply_codec, elements, members, local_steps, delay, steps, rng
):
    fleet = Fleet(
        name, members, local_steps, delay, steps,
        rng=rng, elements=elements, codec=codec, reply_codec=reply_codec,
    ).run()  # fmt: skip
    assert [m.state for m in fleet.members] == ["done"] * members
    first = fleet.members[0]
    for member in fleet.members:
        assert member.params.tobytes() == first.params.tobytes()
        assert member.checksums == first.checksums
    if name == "sync-sgd":
        return
    assert fleet.hub.base.tobytes() == first.half.base.tobytes()
    assert first.params.tobytes() == first.half.base.tobytes()
    kept = fleet.hub.rounds.merger.replies.residual
    moved = first.half.base.astype(np.float64) - fleet.initial
    received = sum(m.sent for m in fleet.members) / members
    np.testing.assert_allclose(moved + (kept if kept.size else 0), received, rtol=1e-3, atol=1e-4)
    for member in fleet.members:  # nothing that an optimizer did is lost, or sent twice
        np.testing.assert_allclose(member.sent + member.unsent, member.walked, rtol=1e-3, atol=1e-3)


@given(rank=st.integers(1, 2), elements=st.integers(1, 40), **SHAPES)
def test_two_trips_are_the_algorithm_that_takes_them(
    rank, elements, members, local_steps, delay, steps, rng
):
    codec = f"powersgd({rank})"
    fleet = Fleet("sync-sgd", members, 1, 0, steps, rng=rng, elements=elements, codec=codec).run()
    assert [m.state for m in fleet.members] == ["done"] * members
    first = fleet.members[0]
    assert {m.params.tobytes() for m in fleet.members} == {first.params.tobytes()}
    plain = [fleet.codec.factors() for _ in range(members)]
    w = fleet.initial.copy()
    merged = np.empty_like(w)
    for step in range(steps):
        lefts = [f.left(noisy_descent(m, step, w)) for m, f in enumerate(plain)]
        rights = [f.right(mean_of(lefts)) for f in plain]
        for f in plain:
            f.finish(mean_of(rights), merged)
        w -= merged
    np.testing.assert_allclose(first.params, w, rtol=1e-4, atol=1e-4)
    rounds = steps * (2 if plain[0].right_elements else 1)
    assert fleet.hub.round == rounds


def mean_of(vectors):
    return np.mean(vectors, axis=0, dtype=np.float32)


@given(
    name=st.sampled_from(["sync-sgd", "fedavg", "dga", "dga(predict)", "fedadam", "dga(variates)"]),
    **SHAPES,
)
def test_the_result_does_not_depend_on_the_order_of_events(
    name, members, local_steps, delay, steps, rng
):
    one = Fleet(name, members, local_steps, delay, steps, rng=rng).run()
    other = Fleet(name, members, local_steps, delay, steps, rng=random.Random(12345)).run()
    assert one.members[0].params.tobytes() == other.members[0].params.tobytes()


@given(
    name=st.sampled_from(["local-sgd", "fedavg", "scaffold", "dga"]),
    **(SHAPES | {"members": st.just(1)}),
)
def test_one_member_is_plain_training(name, members, local_steps, delay, steps, rng):
    fleet = Fleet(name, members, local_steps, delay, steps, rng=rng).run()
    plain = fleet.initial.copy()
    for step in range(steps):
        plain -= noisy_descent(0, step, plain)
    np.testing.assert_allclose(fleet.members[0].params, plain, rtol=1e-5, atol=1e-5)


def naive_dga(initial, members, local_steps, delay, steps):
    """The paper's algorithm as it is written: w += mean_r - own_r, D steps after the round's end.

    In float64, on all members at once; trajectories before each step.
    """
    w = [initial.astype(np.float64) for _ in range(members)]
    since = [x.copy() for x in w]
    own: dict[int, list] = {}
    ends: dict[int, int] = {}
    histories = [[] for _ in range(members)]
    local_gain = [np.zeros_like(w[0]) for _ in range(members)]
    for step in range(steps):
        for m in range(members):
            histories[m].append(w[m].copy())
            move = -noisy_descent(m, step, w[m].astype(np.float32)).astype(np.float64)
            w[m] += move
            local_gain[m] += move
        if (step + 1) % local_steps == 0:
            own[len(own)] = local_gain
            ends[len(ends)] = step + 1
            local_gain = [np.zeros_like(w[0]) for _ in range(members)]
        for r, end in ends.items():
            if end + delay == step + 1:
                mean = sum(own[r]) / members
                for m in range(members):
                    w[m] += mean - own[r][m]
    del since
    return histories


@given(**SHAPES)
def test_dga_is_the_papers_formula(members, local_steps, delay, steps, rng):
    fleet = Fleet("dga(paper)", members, local_steps, delay, steps, rng=rng).run()
    for member, expected in zip(
        fleet.members, naive_dga(fleet.initial, members, local_steps, delay, steps), strict=True
    ):
        np.testing.assert_allclose(np.array(member.history), expected, rtol=2e-4, atol=2e-4)


def naive_delayed_sgd(initial, members, local_steps, delay, steps):
    """The parameters before each step where only means move them: no member keeps what it sent."""
    w = [initial.astype(np.float64) for _ in range(members)]
    base, since, means = initial.astype(np.float64), [0.0] * members, {}
    histories: list[list] = [[] for _ in range(members)]
    for step in range(1, steps + 1):
        for m in range(members):
            histories[m].append(w[m].copy())
            moved = -noisy_descent(m, step - 1, w[m].astype(np.float32)).astype(np.float64)
            since[m] = since[m] + moved
            w[m] = w[m] + moved
        if step % local_steps == 0:
            means[step + delay] = sum(since) / members
            since, w = [0.0] * members, [base.copy() for _ in range(members)]
        if step in means:
            base = base + means[step]
            w = [each + means[step] for each in w]
    return histories


@given(**SHAPES)
def test_without_the_correction_only_stale_means_move_the_parameters(
    members, local_steps, delay, steps, rng
):
    fleet = Fleet("dga-uncorrected", members, local_steps, delay, steps, rng=rng).run()
    naive = naive_delayed_sgd(fleet.initial, members, local_steps, delay, steps)
    for member, expected in zip(fleet.members, naive, strict=True):
        np.testing.assert_allclose(np.array(member.history), expected, rtol=2e-4, atol=2e-4)


@given(**(SHAPES | {"delay": st.just(0)}))
def test_without_delay_the_correction_makes_no_difference(members, local_steps, delay, steps, rng):
    ends = [
        Fleet(name, members, local_steps, delay, steps, rng=rng).run().members[0].params.tobytes()
        for name in ("dga(paper)", "dga-uncorrected")
    ]
    assert ends[0] == ends[1]


@given(**(SHAPES | {"delay": st.just(0)}))
def test_delay_zero_is_fedavg(members, local_steps, delay, steps, rng):
    fleet = Fleet("dga(paper)", members, local_steps, delay, steps, rng=rng).run()
    other = Fleet("local-sgd", members, local_steps, delay, steps, rng=random.Random(1)).run()
    assert fleet.members[0].params.tobytes() == other.members[0].params.tobytes()
    w = fleet.initial.astype(np.float64)
    for first in range(0, steps, local_steps):
        ends = []
        for m in range(members):
            x = w.copy()
            for step in range(first, min(first + local_steps, steps)):
                x -= noisy_descent(m, step, x.astype(np.float32))
            ends.append(x)
        w = sum(ends) / members
    np.testing.assert_allclose(fleet.members[0].params, w, rtol=2e-4, atol=2e-4)


@given(**(SHAPES | {"delay": st.just(0)}))
def test_without_delay_params_are_base_after_every_reply(members, local_steps, delay, steps, rng):
    fleet = Fleet("local-sgd", members, local_steps, delay, steps, rng=rng)

    def check():
        for member in fleet.members:
            if member.state == "joining" or not member.half.applied:
                continue
            if member.half.due() is None and not member.driver.is_mid_step:
                local = member.driver.steps % local_steps
                if local == 0 and member.half.applied == member.half.round:
                    assert member.params.tobytes() == member.half.base.tobytes()

    fleet.run(check)


@given(
    weights=st.lists(st.floats(0.1, 1000), min_size=2, max_size=4),
    local_steps=st.integers(1, 4),
    rng=st.randoms(use_true_random=False),
)
def test_fedavg_weighs_by_samples(weights, local_steps, rng):
    fleet = Fleet(
        "fedavg", len(weights), local_steps, 0, local_steps, rng=rng, weights=weights
    ).run()
    ends = []
    for m in range(len(weights)):
        x = fleet.initial.astype(np.float64)
        for step in range(local_steps):
            x -= noisy_descent(m, step, x.astype(np.float32))
        ends.append(x)
    mean = sum(w * e for w, e in zip(weights, ends, strict=True)) / sum(weights)
    np.testing.assert_allclose(fleet.members[0].params, mean, rtol=1e-4, atol=1e-4)


@given(
    name=st.sampled_from(["sync-sgd", "fedavg", "dga", "dga(predict)"]),
    members=st.integers(2, 5),
    local_steps=st.integers(1, 4),
    delay=st.integers(0, 9),
    rng=st.randoms(use_true_random=False),
    when=st.integers(0, 200),
)
def test_a_killed_member_does_not_stop_the_others(name, members, local_steps, delay, rng, when):
    fleet = Fleet(
        name, members, local_steps, delay, 20, rng=rng, policy=Policy(members, lost_after_s=5.0)
    )
    fleet.run(fleet.killing(members - 1, when))
    survivors = [m for m in fleet.members if m.index not in fleet.dead]
    assert [m.state for m in survivors] == ["done"] * len(survivors)
    assert len({m.params.tobytes() for m in survivors}) == 1
    assert fleet.hub.finished
    assert not fleet.hub.rounds.open_rounds.sizes(), (
        "contributions must not be kept for rounds nobody waits for"
    )


@given(
    members=st.integers(1, 4), local_steps=st.integers(1, 4), wanted=st.integers(1, 12),
    rng=st.randoms(use_true_random=False),
)  # fmt: skip
def test_an_automatic_delay_is_agreed_on_and_reproducible(members, local_steps, wanted, rng):
    auto = Fleet("dga", members, local_steps, None, 40, rng=rng, wanted_delay=wanted).run()
    assert {m.state for m in auto.members} == {"done"}
    assert auto.hub.rounds.delay.delay == wanted
    assert len({m.params.tobytes() for m in auto.members}) == 1


@given(
    name=st.sampled_from(["dga", "dga(predict)"]), members=st.integers(1, 4),
    local_steps=st.integers(1, 3), wanted=st.integers(20, 90), steps=st.integers(48, 90),
    codec=st.sampled_from(["fp32", "topk(0.3) | q2"]), rng=st.randoms(use_true_random=False),
)  # fmt: skip
def test_rounds_that_grow_lose_nothing(name, members, local_steps, wanted, steps, codec, rng):
    fleet = Fleet(
        name, members, local_steps, None, steps, rng=rng, wanted_delay=wanted, bounded=True,
        codec=codec, reply_codec="fp32", elements=8,
    ).run()  # fmt: skip
    assert {m.state for m in fleet.members} == {"done"}
    assert len({m.params.tobytes() for m in fleet.members}) == 1
    first = fleet.members[0]
    assert first.half.local_steps == max(local_steps, max(2 * local_steps, steps // 8) // 2)
    assert fleet.hub.round < steps / local_steps or first.half.local_steps < 2 * local_steps
    moved = first.half.base.astype(np.float64) - fleet.initial
    unsent = sum(m.unsent for m in fleet.members) / members
    walked = sum(m.walked for m in fleet.members) / members
    np.testing.assert_allclose(moved + unsent, walked, rtol=1e-3, atol=1e-3)


def test_a_newcomer_starts_from_the_fleets_base():
    fleet = Fleet("dga", 3, 2, 4, 40, policy=Policy(3))
    late = fleet.members.pop()
    fleet.hub.policy = Policy(2)
    rounds = 0

    def arrive():
        nonlocal rounds
        rounds += 1
        if fleet.hub.round == 5 and late not in fleet.members:
            fleet.hub.policy = Policy(3)
            fleet.members.append(late)

    fleet.run(arrive)
    assert {m.state for m in fleet.members} == {"done"}
    assert late.half.round > 5
    assert any("m2" in closed.members for closed in fleet.closed)
    assert all("m2" not in closed.members for closed in fleet.closed[:5])


def test_vectors_longer_than_a_tile_are_handled_tile_by_tile():
    elements = 2 * TILE + 3
    fleet = Fleet("dga", 2, 2, 3, 6, elements=elements).run()
    a, b = fleet.members
    assert a.params.tobytes() == b.params.tobytes()
    assert a.half.checksum == checksum(a.half.base)


def test_rounds_missed_while_waiting_for_a_reply_are_only_replied_to():
    params = np.zeros(4, np.float32)
    half = Displacement(params)
    params += 1
    half.after_step()
    half.skip_to(2)  # the fleet went on: round 1 was closed without this member
    half.apply([np.full(4, 3, np.float32)])
    half.apply([np.full(4, 5, np.float32)])
    assert (half.applied, half.round, half.due()) == (2, 2, None)
    assert params.tobytes() == half.base.tobytes() == np.full(4, 8, np.float32).tobytes()


@pytest.mark.parametrize("delay", [0, 3])
def test_after_the_last_step_a_base_in_place_of_missed_replies_is_the_parameters(delay):
    rng = np.random.default_rng(5)
    params, base = rng.standard_normal((2, 50), np.float32)
    half = Displacement(params, delay=delay)
    for round in range(3):
        params += rng.standard_normal(50, np.float32)
        own = half.after_step()
        half.sent(own.round(1))
        if half.due() == round:
            half.apply([own])
    half.sent(half.finish().round(1))
    half.rebase(base, half.round)
    assert half.due() is None
    assert params.tobytes() == half.base.tobytes() == base.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_stop_the_member_that_has_them(bad):
    params = np.zeros(5, np.float32)
    half = Displacement(params)
    params[3] = bad
    with pytest.raises(Diverged, match="not finite after step 1"):
        half.after_step()
    gradient = np.full(5, bad, np.float32)
    with pytest.raises(Diverged, match="gradient of step 0"):
        Gradient(np.zeros(5, np.float32), gradient).before_step()


@pytest.mark.parametrize("elements", [5, 12_288])
def test_a_member_that_explodes_stops_before_it_sends_what_it_did(elements):
    """It would be in the mean of all. One member of a thousand did that to a fleet."""
    params = np.zeros(elements, np.float32)
    half = Displacement(params)
    for round, step in enumerate((1.0, 0.01, EXPLODED)):  # nothing was before the first
        params += np.float32(step)
        assert half.after_step() is not None
        half.apply([np.full(elements, step, np.float32)])
        assert half.applied == round + 1
    params += np.float32(2 * EXPLODED**2)
    with pytest.raises(Diverged, match="with step 4 led 198 times as far as any before it"):
        half.after_step()


@pytest.mark.parametrize("first", [0, 1], ids=["even weights", "odd weights"])
def test_rounds_of_a_sparse_model_are_as_long_as_they_are(first):
    """Rounds of equal length, each of which moves two of 8,192 weights from zero, have not
    exploded; one that is 200 times as long has, whichever weight it moves."""
    half = Displacement(params := np.zeros(8192, np.float32))
    for round in range(6):
        near = (first + round // 3) % 2
        params[[2 * round + near, 2 * round + 1 - near]] += np.array([0.1, 1e-4], np.float32)
        half.apply([half.after_step().copy()])
    params[101 - first] += np.float32(2 * EXPLODED)
    with pytest.raises(Diverged, match="times as far"):
        half.after_step()


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("scale", [0.0, 1.0], ids=["zero initialisation", "random initialisation"])
@pytest.mark.parametrize("rates", [
    [1e-8] * 8 + [0.1] * 8,
    [0.0] * 3 + [1e-6, 1e-3, 1.0, 1.0],
    [0.5, 1e-3, 1e-7, 1e-7, 0.5, 1e-3, 0.5],
], ids=["warm-up", "from nothing", "restarts"])  # fmt: skip
def test_a_round_that_is_as_much_longer_as_its_rate_is_higher_has_not_exploded(
    rates, scale, local_steps
):
    rng = np.random.default_rng(0)
    params = (scale * rng.standard_normal(50)).astype(np.float32)
    half = Displacement(params, local_steps)
    for rate in rates:
        for _ in range(local_steps):
            params -= np.float32(rate) * rng.standard_normal(50).astype(np.float32)
            half.note_rate(rate)
            own = half.after_step()
        half.apply([own.copy()])
    for _ in range(local_steps):
        params += np.float32(2 * EXPLODED**2 * max(rates))
        half.note_rate(rates[-1])
        if half.steps_taken == local_steps - 1:
            with pytest.raises(Diverged, match="times as far as any"):
                half.after_step()
        else:
            half.after_step()


STARTS = [(name, True) for name in (*SPELLED, *OUT_OF_STEP, "fedavg | sgd(0.5)")]
STARTS += [(name, False) for name in SPELLED if name.startswith(("dga", "eager", "stream"))]


@pytest.mark.parametrize(("name", "moves"), STARTS)
def test_no_direction_that_the_first_round_lacks_is_left_out_for_ever(name, moves):
    """200 steps with gradients that are the same, but for the first round's: these are sparse and
    of rank one, or (as a whole: for what is measured of all elements) zero."""
    rng = np.random.default_rng(3)
    always, apart = rng.uniform(0.5, 1.5, 21), rng.standard_normal(21)
    columns = np.where(np.arange(10) % 5 == 2, always[:10], 0)
    first = moves * np.append(np.outer([1, 0.5], columns), 0)

    def local_step(member, step, params):
        gradient = first if step < 4 else always + (member - 0.5) * apart
        return (0.01 * gradient).astype(np.float32)

    fleet = Fleet(name, 2, 4, 4, 200, elements=21, local_step=local_step).run()
    assert [m.state for m in fleet.members] == ["done"] * 2
    moved = (fleet.initial - fleet.members[0].params).astype(np.float64)
    if fleet.strategy.outer.startswith(("ada", "yogi")):
        assert moved.min() > 0.3 * moved.max()
    else:
        np.testing.assert_allclose(moved / moved.mean(), always / always.mean(), rtol=0.1)


@pytest.mark.parametrize(("local_steps", "delay"), [(0, 0), (-1, 0), (1, -1)])
def test_bad_values_raise_where_they_enter(local_steps, delay):
    with pytest.raises(ConfigError, match=r"allowed|at least"):
        Displacement(np.zeros(3, np.float32), local_steps, delay)
