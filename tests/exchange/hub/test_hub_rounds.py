"""When a round closes and what it becomes: means, deadlines, quorums, what is late."""

from __future__ import annotations

import numpy as np
import pytest
from hub_desk import ELEMENTS, ZEROS, Desk, raw, refusal, the
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import codecs
from edgetrain.exchange.hub import delay as pace
from edgetrain.exchange.messages import Base, Beat, Refuse, Reply
from edgetrain.vectors.vector import checksum


def test_a_round_is_the_mean_and_goes_to_all():
    desk = Desk(2).started()
    assert desk.give("a", 0, np.full(ELEMENTS, 1)) == {}
    said = desk.give("b", 0, np.full(ELEMENTS, 4))
    for name in "ab":
        reply = the(Reply, said[name])
        np.testing.assert_array_equal(np.frombuffer(reply.payload, np.float32), 2.5)
        assert (reply.round, reply.members) == (0, 2)
        assert reply.checksum == checksum(np.full(ELEMENTS, 2.5, np.float32))
    assert said["a"][0] is said["b"][0]  # packed once


@pytest.mark.parametrize(("weighted", "expected"), [(True, 1.75), (False, 2.5)])
def test_members_count_by_their_samples_only_where_the_strategy_says_so(weighted, expected):
    desk = Desk(2, weighted=weighted)
    desk.join("a", weight=3.0)
    desk.join("b", weight=1.0)
    desk.tell("a", Base(0, 1, raw(ZEROS)))
    desk.give("a", 0, np.full(ELEMENTS, 1), weight=1e9)  # said in Join, not again
    said = desk.give("b", 0, np.full(ELEMENTS, 4), weight=1.0)
    assert np.frombuffer(the(Reply, said["a"]).payload, np.float32)[0] == pytest.approx(expected)


def test_another_checksum_of_base_is_divergence_with_both_values():
    desk = Desk(2).started()
    code, reason = refusal(desk, desk.give("a", 0, checksum=0xABC), "a")
    assert code == "diverged"
    assert f"{0xABC:016x}" in reason
    assert f"{checksum(ZEROS):016x}" in reason


def test_divergence_is_seen_with_gradients_too():
    desk = Desk(2, gradient=True).started()
    for name in "ab":
        desk.give(name, 0)
    desk.give("a", 1, applied=1, checksum=7)
    assert refusal(desk, desk.give("b", 1, applied=1, checksum=8), "b")[0] == "diverged"


@pytest.mark.parametrize("order", ["zab", "azb", "abz"])
def test_one_that_lies_about_its_base_does_not_get_the_honest_expelled(order):
    desk = Desk(3, gradient=True).started("abz")
    for name in "abz":
        desk.give(name, 0)
    said = {}
    for name in order:
        base = 666 if name == "z" else 7
        for who, messages in desk.give(
            name, 1, np.ones(ELEMENTS), applied=1, checksum=base
        ).items():
            said.setdefault(who, []).extend(messages)
    assert the(Refuse, said["z"]).code == "diverged"
    assert desk.hub.present == ["a", "b"]
    assert the(Reply, said["a"]).members == 2, "what the liar gave does not count"


def test_a_deadline_closes_a_round_with_a_quorum():
    desk = Desk(3, quorum=2, deadline_s=10).started("abc")
    desk.give("a", 0)
    desk.tick(11)
    assert desk.closed == []
    desk.give("b", 0)  # the deadline has passed: the quorum closes it
    (closed,) = desk.closed
    assert (closed.members, closed.missing, closed.open_s) == (("a", "b"), ("c",), 11)
    assert desk.events() == [("late", "c")]


def test_a_deadline_is_counted_from_the_first_contribution():
    desk = Desk(2, deadline_s=10).started()
    desk.tick(100)
    desk.give("a", 0)
    desk.tick(9.9)
    assert desk.closed == []
    desk.tick(0.2)
    assert len(desk.closed) == 1


@pytest.mark.parametrize("gradient", [False, True])
def test_a_quorum_and_a_short_deadline_are_backup_members(gradient):
    """Chen et al., Revisiting Distributed Synchronous SGD, 2016: of n + b the first n count."""
    desk = Desk(4, gradient=gradient, weighted=True, quorum=3, deadline_s=0.01)
    for name, weight in zip("abcd", (1, 1, 1, 5), strict=True):
        desk.join(name, weight=weight)
    desk.tell("a", Base(0, 1, raw(ZEROS)))
    desk.tick(5)
    desk.give("a", 0)
    desk.give("b", 0)
    desk.tick(5)
    assert desk.closed == [], "two are not enough, however long it takes"
    desk.give("c", 0)
    assert [closed.members for closed in desk.closed] == [("a", "b", "c")], "at once"
    desk.give("d", 0, np.full(ELEMENTS, 8))
    known = {"applied": 1, "checksum": desk.hub.checksum(1, 7)}
    desk.give("a", 1, **known)
    desk.tick(1)
    assert len(desk.closed) == 1, "one and a late one are no quorum of three"
    for name in "bcd":
        desk.give(name, 1, **known)
    # What was late has its weight and is one of the quorum; it has no place in a mean of gradients.
    closed = desk.closed[1]
    wanted = (("a", "b", "c"), 3) if gradient else (("a", "b", "d"), 1 + 1 + 5)
    assert (closed.members, closed.weight) == wanted


def test_a_late_displacement_counts_once_in_the_next_round():
    desk = Desk(2, deadline_s=10).started()
    desk.give("a", 0, np.full(ELEMENTS, 1))
    desk.tick(10)
    desk.give("b", 0, np.full(ELEMENTS, 5))
    assert desk.notes[-1].reason == "round 0 had closed; counts in 1"
    after = {"applied": 1, "checksum": desk.hub.checksum(1)}
    desk.give("a", 1, np.full(ELEMENTS, 3), **after)
    assert len(desk.closed) == 1, "b still owes its own round 1"
    said = desk.give("b", 1, np.full(ELEMENTS, 4), **after)
    np.testing.assert_array_equal(np.frombuffer(the(Reply, said["a"]).payload, np.float32), 4)
    assert desk.closed[1].members == ("a", "b", "b")
    np.testing.assert_array_equal(desk.hub.base, 5)
    assert not desk.hub.rounds.open_rounds.sizes()


def test_a_late_gradient_is_dropped():
    desk = Desk(2, gradient=True, deadline_s=10).started()
    desk.give("a", 0)
    desk.tick(10)
    desk.give("b", 0, np.full(ELEMENTS, 5))
    assert "dropped" in desk.notes[-1].reason
    assert not desk.hub.rounds.open_rounds.sizes()
    desk.give("a", 1, np.full(ELEMENTS, 1))
    said = desk.give("b", 1, np.full(ELEMENTS, 3))
    assert np.frombuffer(the(Reply, said["a"]).payload, np.float32)[0] == 2


def test_members_without_a_round_trip_yet_do_not_shorten_an_automatic_delay():
    desk = Desk(2, delay=None).started()
    for round in range(pace.AUTO_ROUNDS):
        for name, wanted in (("a", 3), ("b", 17)):
            said = desk.give(
                name, round, applied=round, checksum=desk.hub.checksum(round), wanted_delay=wanted
            )
        assert the(Reply, said["a"]).delay == 17


@given(st.lists(st.lists(st.floats(-9, 9, width=32), min_size=5, max_size=5), min_size=1))
def test_what_a_reply_leaves_out_is_in_later_ones(rounds):
    codec = codecs.parse("topk(0.2)")
    desk = Desk(1, reply_codec=codec).started("a")
    sent, known = np.zeros(ELEMENTS), checksum(ZEROS)
    for number, vector in enumerate(rounds):
        reply = the(Reply, desk.give("a", number, vector, applied=number, checksum=known)["a"])
        known, out = reply.checksum, np.empty(ELEMENTS, np.float32)
        codec.decode(reply.payload, out)
        assert np.count_nonzero(out) <= 1
        sent += out
    np.testing.assert_allclose(desk.hub.base, sent, atol=1e-4)
    for number in range(len(rounds), len(rounds) + ELEMENTS):
        reply = the(Reply, desk.give("a", number, applied=number, checksum=known)["a"])
        known = reply.checksum
    np.testing.assert_allclose(desk.hub.base, np.sum(rounds, axis=0), atol=1e-3)


def test_a_reply_says_whether_all_that_was_given_is_counted():
    desk = Desk(2).started()
    for round in range(2):
        desk.give("a", round)
    assert the(Reply, desk.give("b", 0)["b"]).settled
    desk.tick(0.0)
    said = desk.tick(desk.hub.policy.deadline_s + 1)
    assert not the(Reply, said["b"]).settled, "b's may be on its way"
    beats = {who: the(Beat, said[who]).merged for who in "ab"}
    assert beats == {"a": 2, "b": 1}
    desk.give("b", 1, applied=2)
    desk.give("a", 2, applied=2)
    desk.give("b", 2, applied=2)
    assert the(Beat, desk.tick(2.0)["b"]).merged == 3


def test_what_is_merged_late_is_told_by_the_next_beats():
    desk = Desk(2, deadline_s=10).started()
    desk.give("a", 0)
    desk.tick(11)
    assert desk.closed[-1].members == ("a",), "what b gave is on its way"
    desk.give("b", 0, applied=1)
    told = []
    for round in range(1, 12):
        for name in "ab":
            desk.give(name, round, applied=round)
        told += [m.merged for m in desk.tick(0.3).get("b", ()) if isinstance(m, Beat)]
    assert told, "a reply every 0.3 s, and beats all the same"
    assert told[0] > 0
