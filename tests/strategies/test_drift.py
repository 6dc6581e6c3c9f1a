"""What stands for rounds in flight with `correction = "predict"`, against the rule in float64."""

from __future__ import annotations

import numpy as np
import pytest
from fleet import Fleet, noisy_descent
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain import strategies
from edgetrain.errors import BadMessage
from edgetrain.strategies.displacement import Displacement
from edgetrain.strategies.drift import SAMPLE, Drift
from edgetrain.vectors.vector import TILE

SHAPES = {
    "members": st.integers(1, 5),
    "local_steps": st.integers(1, 6),
    "delay": st.integers(0, 14),
    "steps": st.integers(1, 40),
    "rng": st.randoms(use_true_random=False),
}


class Naive:
    """One member as docs/explanation/dga.md writes it, whole vectors in float64."""

    def __init__(self, initial, local_steps, delay, stride=1, momentum=0.0):
        self.base, self.local = initial.astype(np.float64), np.zeros(initial.size)
        self.local_steps, self.delay, self.stride, self.momentum = (
            local_steps,
            delay,
            stride,
            momentum,
        )
        self.flights, self.replies = [], 0
        self.gap, self.theta = np.zeros(initial.size), 0.0
        self.keep, self.learn, self.products = 1.0, 0.0, np.zeros(2)

    @property
    def params(self):
        stands = [self.keep * own + self.learn * self.gap for _, own, _ in self.flights]
        return self.base + sum(stands) + self.local

    def submit(self, step):
        own, self.local = self.local, np.zeros(self.local.size)
        self.flights.append((step, own, self.gap.copy() if self.replies else None))
        return own

    def apply(self, reply, step):
        _, own, predicted = self.flights.pop(0)
        self.base = self.base + reply
        if self.delay == 0:  # it was overwritten at once: there is nothing to learn from
            return
        n = -(-self.delay // self.local_steps)
        self.replies += 1
        self.keep = 1 - self.theta * (1 / 2 + 1 / (4 * n))
        self.learn = self.theta * (1 / 4 + 1 / (4 * n))
        if self.momentum:
            share = (1 / 2 + 1 / (4 * n)) * (1 - self.momentum**self.local_steps)
            self.keep, self.learn = 1 - self.theta * share, self.theta * (1 - share)
        rate = max(1 / (n + 1), 1 / self.replies)
        difference = reply - own
        if predicted is not None:
            d, f = difference[:: self.stride], predicted[:: self.stride]
            if f @ f > 0:
                self.products = 0.8 * self.products + [d @ f, f @ f]
                self.theta = min(max(self.products[0] / self.products[1], 0), 1)
        self.gap = self.gap + rate * (difference - self.gap)


def naive(initial, members, local_steps, delay, steps, stride=1, momentum=0.0):
    """Parameters of each member before each step, and the members."""
    fleet = [Naive(initial, local_steps, delay, stride, momentum) for _ in range(members)]
    histories, own = [[] for _ in fleet], []
    for step in range(1, steps + 1):
        for m, member in enumerate(fleet):
            histories[m].append(member.params)
            move = noisy_descent(m, step - 1, member.params.astype(np.float32))
            member.local -= move.astype(np.float64)
        if step % local_steps == 0:
            own.append([member.submit(step) for member in fleet])
        due = step - delay
        if due > 0 and due % local_steps == 0:
            reply = np.mean(own[due // local_steps - 1], axis=0)
            for member in fleet:
                member.apply(reply, step)
    return histories, fleet


@given(**(SHAPES | {"members": st.integers(2, 5), "momentum": st.sampled_from([0.0, 0.5, 0.9])}))
def test_it_is_the_rule_as_it_is_written(members, local_steps, delay, steps, rng, momentum):
    fleet = Fleet(
        "dga(predict)", members, local_steps, delay, steps, rng=rng, momentum=momentum
    ).run()
    assert len({m.params.tobytes() for m in fleet.members}) == 1
    histories, _ = naive(fleet.initial, members, local_steps, delay, steps, momentum=momentum)
    for member, expected in zip(fleet.members, histories, strict=True):
        np.testing.assert_allclose(np.array(member.history), expected, rtol=1e-3, atol=1e-3)


def test_theta_is_measured_on_a_sample_of_a_long_vector():
    elements = 2 * TILE + 3
    fleet = Fleet("dga(predict)", 2, 2, 4, 16, elements=elements).run()
    stride = -(-elements // SAMPLE)
    histories, _ = naive(fleet.initial, 2, 2, 4, 16, stride)
    for member, expected in zip(fleet.members, histories, strict=True):
        np.testing.assert_allclose(np.array(member.history), expected, rtol=1e-3, atol=1e-3)
    drift = fleet.members[0].half.drift
    assert drift.predicted().size == len(range(0, elements, stride)) <= SAMPLE
    assert 0.5 < drift.theta <= 1, "two members that pull apart are predicted well"


def descent_with_momentum(momentum, rate=0.05):
    """A quadratic loss for each member, the optima apart, by an optimizer with momentum."""
    optima = np.random.default_rng(5).standard_normal((3, 7))
    velocity = np.zeros((3, 7))

    def local_step(member, step, params):
        velocity[member] = momentum * velocity[member] + params - optima[member]
        return (rate * velocity[member]).astype(np.float32)

    return local_step, optima.mean(0)


@pytest.mark.parametrize("local_steps", [6, 12, 29])
def test_with_momentum_members_gather_around_the_optimum_of_all(local_steps):
    """As much of the gap is predicted as own progress is kept: what is left of a member's drift is
    none where members rest. The shares of plain SGD leave some of it on the other side."""

    def away(momentum):
        step, optimum = descent_with_momentum(0.9)
        fleet = Fleet(
            "dga(predict)",
            3,
            local_steps,
            local_steps,
            40 * local_steps,
            local_step=step,
            momentum=momentum,
        ).run()
        starts = np.array([member.history[-local_steps] for member in fleet.members])
        return float(np.abs(starts - optimum).max())

    assert away(0.9) < 0.05 < away(0.0)


@settings(max_examples=10)
@given(
    rng=st.randoms(use_true_random=False), local_steps=st.integers(1, 4), delay=st.integers(4, 12)
)
def test_members_that_pull_apart_stay_nearer_to_each_other_than_with_dga(rng, local_steps, delay):
    def spread(name):
        fleet = Fleet(name, 3, local_steps, delay, 60, rng=rng).run()
        histories = np.array([member.history for member in fleet.members])[:, 30:]
        return float(np.std(histories, axis=0).mean())

    assert spread("dga(predict)") < 0.9 * spread("dga(paper)")


@given(**(SHAPES | {"members": st.just(1)}))
def test_alone_it_is_dga_bit_for_bit(members, local_steps, delay, steps, rng):
    ends = [
        Fleet(name, members, local_steps, delay, steps, rng=rng, momentum=0.9).run().members[0]
        for name in ("dga(paper)", "dga(predict)", "dga")
    ]
    for end in ends[1:]:
        assert end.params.tobytes() == ends[0].params.tobytes()
        assert np.array(end.history).tobytes() == np.array(ends[0].history).tobytes()


@given(**(SHAPES | {"delay": st.just(0)}))
def test_without_delay_it_is_fedavg_bit_for_bit(members, local_steps, delay, steps, rng):
    ends = [
        Fleet(name, members, local_steps, delay, steps, rng=rng).run().members[0].params.tobytes()
        for name in ("local-sgd", "dga(predict)", "dga")
    ]
    assert ends[0] == ends[1] == ends[2]


@given(
    members=st.integers(2, 4), local_steps=st.integers(1, 4), wanted=st.integers(1, 12),
    codec=st.sampled_from(["fp32", "topk(0.3) | q2"]),
    rng=st.randoms(use_true_random=False),
)  # fmt: skip
def test_a_delay_that_changes_moves_no_parameters(members, local_steps, wanted, codec, rng):
    """All that members walk reaches the base once, though what stands for a round follows n."""
    fleet = Fleet(
        "dga(predict)", members, local_steps, None, 40,
        rng=rng, wanted_delay=wanted, codec=codec, reply_codec="fp32", elements=8,
    ).run()  # fmt: skip
    assert {m.state for m in fleet.members} == {"done"}
    assert len({m.params.tobytes() for m in fleet.members}) == 1
    moved = fleet.members[0].half.base.astype(np.float64) - fleet.initial
    unsent = sum(m.unsent for m in fleet.members) / members
    walked = sum(m.walked for m in fleet.members) / members
    np.testing.assert_allclose(moved + unsent, walked, rtol=1e-3, atol=1e-3)


def half_of(elements=6):
    params = np.zeros(elements, np.float32)
    drift = Drift(elements)
    return Displacement(params, local_steps=2, delay=4, drift=drift), drift


def trained(half, rng, rounds=8):
    for _ in range(2 * rounds):
        half.params += rng.standard_normal(half.params.size).astype(np.float32)
        own = half.after_step()
        if half.due() is not None:
            half.apply([own + 1])
    return half


def test_a_checkpoint_has_all_that_was_learned():
    half, drift = half_of()
    trained(half, np.random.default_rng(0))
    again, other = half_of()
    again.restore_learned({name: value.copy() for name, value in half.learned().items()})
    assert other.gap.tobytes() == drift.gap.tobytes()
    for name, value in half.learned().items():
        assert again.learned()[name].tobytes() == value.tobytes()
    assert other.theta == drift.theta
    assert drift.theta > 0
    own = strategies.find("dga(paper)").member_half(
        strategies.Setting(np.zeros(3, np.float32), None, 1, 0)
    )
    assert own.learned() == {}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"gap": np.zeros(5, np.float32), "figures": np.ones(4)},
        {"gap": np.zeros(6, np.float32), "figures": np.ones(3)},
        {"gap": np.zeros(6, np.float32), "figures": np.array([1.0, np.nan, 1, 1])},
        {"gap": np.zeros(6, np.float32), "figures": np.array([1.0, 1, -1, 1])},
    ],
)
def test_a_checkpoint_that_no_member_wrote_is_refused(state):
    half, _ = half_of()
    with pytest.raises(BadMessage, match="the checkpoint's drift"):
        half.restore_learned(state)
