"""Laws of rounds that concern one range of the vector, and of the strategy that has them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from flat_vectors import FlatVectors
from fleet import Disk, Fleet, noisy_descent
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import strategies
from edgetrain.errors import ConfigError
from edgetrain.exchange.delay import Delay
from edgetrain.exchange.hub.terms import Policy
from edgetrain.exchange.member.driver import Driver
from edgetrain.exchange.seam import Entry, Request
from edgetrain.strategies.streaming import Streaming
from edgetrain.vectors.blocks import BLOCK
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.ranges import Ranges
from edgetrain.vectors.vector import checksum

ELEMENTS = 5 * BLOCK - 9

SHAPES = {
    "members": st.integers(1, 4),
    "count": st.integers(1, 5),
    "local_steps": st.integers(1, 4),
    "delay": st.integers(0, 11),
    "steps": st.integers(1, 24),
    "rng": st.randoms(use_true_random=False),
}
ALPHAS = st.sampled_from([0, 0.25, 0.5])


def fleet_of(count, alpha, *shape, outer="sgd(1)", **others):
    """With sgd(1) a reply is the mean."""
    name = f"streaming-diloco({count}, {alpha}) | {outer}"
    return Fleet(name, *shape, elements=ELEMENTS, **others)


def assert_equal_replicas(fleet):
    assert [m.state for m in fleet.members] == ["done"] * len(fleet.members)
    base = fleet.hub.base
    for member in fleet.members:
        assert member.params.tobytes() == base.tobytes()
        assert member.half.base.tobytes() == base.tobytes()
        assert member.half.checksum == checksum(base)
        for applied, known in member.checksums.items():
            assert known == fleet.hub.checksum(applied)


@given(alpha=ALPHAS, codec=st.sampled_from(["fp32", "topk(0.3) | q2", "int8"]), **SHAPES)
def test_replicas_are_equal_and_every_step_arrives_once_in_each_range(
    alpha, codec, members, count, local_steps, delay, steps, rng
):
    fleet = fleet_of(
        count, alpha, members, local_steps, delay, steps, rng=rng, codec=codec, reply_codec="fp32"
    ).run()
    assert_equal_replicas(fleet)
    moved = fleet.hub.base.astype(np.float64) - fleet.initial
    received = sum(m.sent for m in fleet.members) / members
    np.testing.assert_allclose(moved, received, rtol=1e-3, atol=1e-4)
    if not alpha:  # what stays of a reply is no step: it is sent as well
        for member in fleet.members:
            np.testing.assert_allclose(
                member.sent + member.unsent, member.walked, rtol=1e-3, atol=1e-3
            )


@given(**SHAPES)
def test_the_result_does_not_depend_on_the_order_of_events(
    members, count, local_steps, delay, steps, rng
):
    outer = "nesterov(0.7, 0.9)"
    one = fleet_of(count, 0.5, members, local_steps, delay, steps, outer=outer, rng=rng).run()
    rng = random.Random(12345)
    other = fleet_of(count, 0.5, members, local_steps, delay, steps, outer=outer, rng=rng).run()
    assert_equal_replicas(one)
    assert one.members[0].params.tobytes() == other.members[0].params.tobytes()


@given(
    pair=st.sampled_from(
        [("streaming-diloco(1, 0)", "diloco"), ("streaming-diloco(1, 0) | sgd(1)", "dga(paper)")]
    ),
    **SHAPES,
)
def test_one_fragment_is_the_whole_model(pair, members, count, local_steps, delay, steps, rng):
    delay = 0 if "diloco" in pair else delay
    fleet, other = (
        Fleet(name, members, local_steps, delay, steps, rng=rng, elements=ELEMENTS).run()
        for name in pair
    )
    assert fleet.members[0].params.tobytes() == other.members[0].params.tobytes()
    assert fleet.hub.round == other.hub.round
    for one, same in zip(fleet.members, other.members, strict=True):
        assert np.array(one.history).tobytes() == np.array(same.history).tobytes()


def naive(initial, members, count, alpha, local_steps, delay, steps):
    """The paper's loop in float64, with DGA's correction where it has the global parameters;
    the parameters of all members before each step."""
    ranges = Ranges(initial.size, count)
    w = [initial.astype(np.float64) for _ in range(members)]
    at_submit = [initial.astype(np.float64) for _ in range(members)]
    histories = [[] for _ in range(members)]
    flying = []
    for step in range(1, steps + 1):
        for m in range(members):
            histories[m].append(w[m].copy())
            w[m] -= noisy_descent(m, step - 1, w[m].astype(np.float32))
        if step % local_steps == 0:
            here = ranges.of(step // local_steps - 1)
            owns = [w[m][here] - at_submit[m][here] for m in range(members)]
            flying.append((step + delay, here, owns))
            for m in range(members):
                at_submit[m][here] = w[m][here]
        while flying and flying[0][0] <= step:
            _, here, owns = flying.pop(0)
            mean = sum(owns) / members
            for m in range(members):
                w[m][here] += (1 - alpha) * (mean - owns[m])
                at_submit[m][here] += mean - owns[m]
    return histories


@given(alpha=ALPHAS, **SHAPES)
def test_it_is_the_papers_loop_with_delayed_gradient_averagings_correction(
    alpha, members, count, local_steps, delay, steps, rng
):
    fleet = fleet_of(count, alpha, members, local_steps, delay, steps, rng=rng).run()
    expected = naive(fleet.initial, members, count, alpha, local_steps, delay, steps)
    for member, history in zip(fleet.members, expected, strict=True):
        np.testing.assert_allclose(np.array(member.history), history, rtol=2e-4, atol=2e-4)


@given(
    count=st.integers(2, 4), members=st.integers(2, 4), local_steps=st.integers(1, 3),
    delay=st.integers(0, 7), when=st.integers(0, 200), rng=st.randoms(use_true_random=False),
)  # fmt: skip
def test_a_killed_member_does_not_stop_the_others(count, members, local_steps, delay, when, rng):
    fleet = fleet_of(
        count,
        0.25,
        members,
        local_steps,
        delay,
        16,
        rng=rng,
        policy=Policy(members, lost_after_s=5.0),
    )
    fleet.run(fleet.killing(members - 1, when))
    fleet.members = [m for m in fleet.members if m.index not in fleet.dead]
    assert_equal_replicas(fleet)
    assert fleet.hub.finished
    assert not fleet.hub.rounds.open_rounds.sizes()


@given(
    count=st.integers(1, 3), wanted=st.integers(1, 12), members=st.integers(1, 3),
    rng=st.randoms(use_true_random=False),
)  # fmt: skip
def test_an_automatic_delay_holds_for_all_fragments(count, wanted, members, rng):
    fleet = fleet_of(
        count, 0.5, members, 2, None, 40, rng=rng, wanted_delay=wanted, bounded=True
    ).run()
    assert_equal_replicas(fleet)


def test_a_member_that_comes_late_starts_from_the_base_of_all_fragments():
    fleet = fleet_of(3, 0.5, 3, 2, 4, 40, policy=Policy(3))
    late = fleet.members.pop()
    fleet.hub.policy = Policy(2)

    def arrive():
        if fleet.hub.round == 5 and late not in fleet.members:
            fleet.hub.policy = Policy(3)
            fleet.members.append(late)

    fleet.run(arrive)
    assert {m.state for m in fleet.members} == {"done"}
    assert any("m2" in closed.members for closed in fleet.closed)
    assert late.half.round > 5


def test_a_round_sends_the_elements_of_its_range():
    fleet = fleet_of(4, 0, 2, 1, 0, 8, disk=Disk()).run()
    ranges = Ranges(ELEMENTS, 4)
    sizes = [sum(memoryview(p).nbytes for p in r.reply) for r in fleet.disk.rounds()]
    assert sizes == [4 * ranges.size(round) for round in range(len(sizes))]
    assert len(sizes) == 8 + 3  # the others have three, two and one step left


def test_a_checkpoint_between_two_rounds_holds_the_steps_of_all_fragments():
    rng = np.random.default_rng(3)
    params = rng.standard_normal(ELEMENTS).astype(np.float32)
    half = Streaming(params, 3, 0.5, local_steps=2, delay=0)
    for _ in range(10):
        params += rng.standard_normal(ELEMENTS).astype(np.float32)
        half.note_rate(1.0)
        own = half.after_step()
        if own is not None:
            half.apply([own * np.float32(0.5)])
    assert not half.steps_taken
    rest = half.rest()
    again = Streaming(half.base, 3, 0.5, local_steps=2, delay=0)
    again.start(half.applied, half.round)
    again.restore_rest(rest, half.steps_taken)
    assert again.has_steps
    np.testing.assert_allclose(
        np.concatenate([f.params for f in again.fragments]), params, rtol=1e-5, atol=1e-5
    )
    ends = []
    for each in (half, again):
        given = [each.finish(rest=False)]
        while each.due() is not None:
            each.apply([np.zeros_like(given[-1])])
            given.append(each.follow_up())
        assert [g is None for g in given] == [False, False, True]
        ends.append(given[:2])
    for mine, other in zip(*ends, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("streaming-diloco(0, 0.5)", "P = 0"),
        ("streaming-diloco(1.5, 0.5)", "P = 1.5"),
        ("streaming-diloco(2, 1)", "alpha = 1"),
        ("streaming-diloco(2)", r"streaming-diloco\(P, alpha\)"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text, said):
    with pytest.raises(ConfigError) as refused:
        strategies.find(text)
    assert said.replace("\\", "") in str(refused.value)


def test_more_fragments_than_blocks_are_refused():
    params = np.zeros(ELEMENTS, np.float32)
    with pytest.raises(ConfigError, match="6 ranges of a vector of 1271 elements"):
        Streaming(params, 6, 0.5, local_steps=1, delay=0)


def test_a_member_that_waits_for_the_others_weighs_nothing_once_all_fragments_are_sent(
    monkeypatch,
):
    drain = Driver.drain

    def wait_and_drain(self, **more):
        if not self.is_drained:
            self.wait_for_fleet(lambda: None)
        drain(self, **more)

    monkeypatch.setattr(Driver, "drain", wait_and_drain)
    fleet = fleet_of(3, 0, 2, 1, 0, 16)
    fleet.members[0].steps = 4
    fleet.run()
    assert_equal_replicas(fleet)
    weights = [closed.weight for closed in fleet.closed]
    assert weights[:18] == [2.0] * 6 + [1.0] * 12  # two fragments have steps after the fourth
    assert not any(weights[18:])
    for member in fleet.members:
        np.testing.assert_allclose(member.sent, member.walked, rtol=1e-3, atol=1e-3)


def test_a_member_that_is_asked_to_stop_sends_what_is_left_of_all_fragments():
    class Nowhere:
        """An exchange that keeps what is handed over."""

        sent_nearly_all = True
        memory, ready = VectorPool(ELEMENTS), 0

        def __init__(self):
            self.given = []

        def factors(self):
            return None

        def poll(self):
            return None

        def submit(self, submission):
            self.given.append((submission.round, submission.vector))

    class Down:
        def step(self):
            params[:] -= 1

    params = np.zeros(ELEMENTS, np.float32)
    entry = Entry(
        name="m0", index=0, members=1, strategy="streaming-diloco(4, 0.5)", local_steps=2,
        delay=Delay(50), codec="fp32", is_masked=False, round=0, applied=0,
        checksum=checksum(params), resend=0,
    )  # fmt: skip
    driver = Driver(Nowhere(), FlatVectors(params), Down(), entry, Request(""), lambda: 0.0)
    driver.begin()
    for _ in range(11):
        driver.step()
    driver.submit_rest()
    sums = np.zeros(ELEMENTS)
    for round, vector in driver.exchange.given:
        sums[driver.half.ranges.of(round)] += vector
    assert sums.tolist() == [-11] * ELEMENTS
    assert [round for round, _ in driver.exchange.given] == list(range(5 + 4))
