"""Where what a lossy codec has not sent waits: in the parameters, or beside them."""

from __future__ import annotations

import numpy as np
import pytest
from fleet import Fleet
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import BadMessage
from edgetrain.exchange.member.outbox import Outbox
from edgetrain.strategies.displacement import Displacement
from edgetrain.strategies.unsent import EVIDENCE, SAMPLE, Unsent
from edgetrain.vectors.vector import TILE


class Moving(Unsent):
    """Moves the unsent part as a fixed pattern says, whatever replies teach."""

    pattern = (True, True, False, True, False, False)
    turn = 0

    def belongs_beside(self):
        self.turn += 1
        return self.pattern[self.turn % len(self.pattern)]


@given(
    name=st.sampled_from(["local-sgd", "dga", "dga(predict)"]),
    codec=st.sampled_from(["topk(0.3) | q2", "sign", "topk(0.4, tensor)"]),
    pattern=st.lists(st.booleans(), min_size=1, max_size=8),
    members=st.integers(1, 4), local_steps=st.integers(1, 5), delay=st.integers(0, 12),
    steps=st.integers(1, 40), elements=st.integers(1, 20),
    rng=st.randoms(use_true_random=False),
)  # fmt: skip
def test_wherever_it_waits_it_is_sent_later_and_once(
    name, codec, pattern, members, local_steps, delay, steps, elements, rng
):
    fleet = Fleet(
        name, members, local_steps, delay, steps,
        rng=rng, elements=elements, codec=codec, reply_codec="fp32",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Moving, "pattern", tuple(pattern))
        patch.setattr("edgetrain.strategies.displacement.Unsent", Moving)
        fleet.run()
    first = fleet.members[0]
    assert [m.state for m in fleet.members] == ["done"] * members
    assert first.params.tobytes() == first.half.base.tobytes()
    for member in fleet.members:
        assert member.params.tobytes() == first.params.tobytes()
        assert member.checksums == first.checksums
        np.testing.assert_allclose(member.sent + member.unsent, member.walked, rtol=1e-3, atol=1e-3)


@given(
    name=st.sampled_from(["local-sgd", "dga", "dga(predict)"]),
    codec=st.sampled_from(["fp16", "int8", "int4", "topk(0.3) | q2", "auto", "auto(0.3)"]),
    members=st.integers(1, 3), local_steps=st.integers(1, 5), delay=st.integers(0, 12),
    steps=st.integers(1, 30), rung=st.integers(0, 3), rng=st.randoms(use_true_random=False),
)  # fmt: skip
def test_there_is_a_round_for_the_rest_alone_only_where_it_is_more_than_a_little(
    name, codec, members, local_steps, delay, steps, rung, rng
):
    """What is given up at the end is what the last message left out. `auto` is on any rung, and
    comes to another one after its last message."""
    fleet = Fleet(
        name,
        members,
        local_steps,
        delay,
        steps,
        rng=rng,
        elements=20,
        codec=codec,
        reply_codec="fp32",
    )
    add, encoders = Outbox.add, []

    def on_a_rung(outbox, head, vector, rest_later):
        outbox.follow(rung)
        read = add(outbox, head, vector, rest_later)
        encoders.append(outbox.codec)
        outbox.follow(3 - rung)
        return read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outbox, "add", on_a_rung)
        fleet.run()
    first = fleet.members[0]
    one_more = not (steps % local_steps or encoders[-1].nearly_all)
    assert len(first.submitted) == -(-steps // local_steps) + one_more
    assert first.params.tobytes() == first.half.base.tobytes()
    for member in fleet.members:
        assert (member.state, member.checksums) == ("done", first.checksums)
        assert member.params.tobytes() == first.params.tobytes()
        np.testing.assert_allclose(member.sent + member.unsent, member.walked, rtol=1e-3, atol=1e-3)


@given(
    local_steps=st.integers(1, 4), delay=st.integers(0, 9), rounds=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_beside_the_parameters_it_is_error_feedback(local_steps, delay, rounds, seed):
    """Gradients are taken at base + all of each round in flight + local steps, in float64."""
    rng, elements = np.random.default_rng(seed), 7
    half = Displacement(np.zeros(elements, np.float32), local_steps, delay)
    half.unsent = Moving(elements)
    half.unsent.pattern = (True,)
    half.unsent.beside = np.zeros(elements, np.float32)
    base, residual, local = np.zeros((3, elements))
    flights = []
    for step in range(1, local_steps * rounds + 1):
        move = rng.standard_normal(elements).astype(np.float32)
        half.params += move
        local = local + move
        whole = half.after_step()
        if step % local_steps == 0:
            np.testing.assert_allclose(whole, residual + local, rtol=1e-4, atol=1e-4)
            sent = np.where(rng.random(elements) < 0.3, whole, 0).astype(np.float32)
            half.sent(sent)
            residual, flights, local = residual + local - sent, [*flights, (step, local)], 0 * local
        while half.due() is not None:
            reply = rng.standard_normal(elements).astype(np.float32)
            half.apply([reply])
            base = base + reply
            flights = flights[1:]
        expected = base + local + sum(own for _, own in flights)
        np.testing.assert_allclose(half.params, expected, rtol=1e-4, atol=1e-4)
        assert all(step - at < delay for at, _ in flights)


def agreeing(unsent, rng, sign, replies, elements=4000):
    """Let it compare replies that go where the unsent part points (sign 1), or away from it."""
    for _ in range(replies):
        whole = rng.standard_normal(elements).astype(np.float32)
        sent = np.where(np.abs(whole) > 2, whole, 0).astype(np.float32)
        chosen = rng.random(elements) < 0.05
        reply = np.where(chosen, sign * whole + 0.5, 0).astype(np.float32)
        unsent.learn([reply], unsent.sample(whole[:: unsent.stride], sent))


def test_it_leaves_where_the_fleet_goes_elsewhere_and_returns_where_it_follows():
    unsent, rng = Unsent(4000), np.random.default_rng(0)
    assert not unsent.belongs_beside(), "without evidence it stays"
    agreeing(unsent, rng, 1, 3)
    assert not unsent.belongs_beside()
    agreeing(unsent, rng, -1, 12)
    assert unsent.belongs_beside()
    unsent.beside = np.zeros(4000, np.float32)
    agreeing(unsent, rng, 1, 30)
    assert not unsent.belongs_beside()


def test_a_codec_that_leaves_no_element_out_gives_no_evidence():
    unsent, ones = Unsent(100), np.ones(100, np.float32)
    for _ in range(10):
        unsent.learn([-ones], unsent.sample(ones, -ones))
    assert not unsent.belongs_beside()
    assert unsent.state() == {}


def test_a_long_vector_is_compared_on_a_sample_piece_by_piece():
    elements = 2 * TILE + 3
    rng, unsent = np.random.default_rng(1), Unsent(2 * TILE + 3)
    whole, reply = rng.standard_normal((2, elements)).astype(np.float32)
    sent = np.where(np.abs(whole) > 1, whole, 0).astype(np.float32)
    cuts = [slice(0, TILE), slice(TILE, 2 * TILE), slice(2 * TILE, elements)]
    stride = -(-elements // SAMPLE)
    unsent.learn((reply[here] for here in cuts), unsent.sample(whole[::stride], sent))
    u, r = (v[::stride].astype(np.float64) for v in (whole * (sent == 0), reply))
    wanted = [(u * r).sum(), (u * u).sum(), (r * r)[u != 0].sum(), (u != 0).sum()]
    np.testing.assert_allclose(unsent.state()["agreement"], wanted, rtol=1e-6)


def waiting_beside(local_step):
    """The members of a fleet whose unsent part waits beside the parameters at some time."""
    moved = set()

    class Watched(Unsent):
        def belongs_beside(self):
            if found := super().belongs_beside():
                moved.add(id(self))
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgetrain.strategies.displacement.Unsent", Watched)
        fleet = Fleet(
            "dga", 4, 5, 5, 150, elements=800, local_step=local_step,
            codec="topk(0.02) | q2", reply_codec="fp32",
        ).run()  # fmt: skip
    assert {m.state for m in fleet.members} == {"done"}
    return len(moved)


def towards(of_its_own):
    """Local steps towards a point: of each member's own, or the same for all."""

    def local_step(member, step, params):
        rng = np.random.default_rng([member, step])
        point = np.random.default_rng(member if of_its_own else 0).standard_normal(params.size)
        noise = rng.standard_normal(params.size)
        return (0.1 * (params - 3 * point) + 0.05 * noise).astype(np.float32)

    return local_step


def test_it_moves_where_members_pull_apart_and_stays_where_they_pull_together():
    assert waiting_beside(towards(of_its_own=True)) == 4
    assert waiting_beside(towards(of_its_own=False)) == 0


def test_what_was_learned_is_in_a_checkpoint():
    unsent = Unsent(4000)
    agreeing(unsent, np.random.default_rng(2), -1, 12)
    other = Displacement(np.zeros(4000, np.float32))
    other.restore_learned(unsent.state())
    other.start(0, 0)
    rest = np.arange(4000, dtype=np.float32)
    other.restore_rest(rest)
    assert not other.params.any(), "it waits beside the parameters, as before"
    np.testing.assert_array_equal(other.rest(), rest)
    np.testing.assert_array_equal(other.finish(), rest)


@pytest.mark.parametrize(
    "evidence", [[1.0, 1.0, 1.0], [np.nan, 1, 1, 1], [0, -1, 1, 1], [0, 1, 1, -EVIDENCE]]
)
def test_a_damaged_agreement_is_refused(evidence):
    with pytest.raises(BadMessage, match="agreement"):
        Unsent(5).restore({"agreement": np.array(evidence)})
