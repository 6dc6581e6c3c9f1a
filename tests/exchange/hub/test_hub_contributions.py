"""What is wrong with a contribution, and what that costs whom."""

from __future__ import annotations

import numpy as np
import pytest
from hub_desk import ELEMENTS, Desk, back, refusal, the, with_session

from edgetrain import codecs
from edgetrain.exchange.hub import delay as pace
from edgetrain.exchange.hub import protocol as hub_module
from edgetrain.exchange.messages import Leave, Reply, Start


@pytest.mark.parametrize(
    "other",
    [
        {"parts": 2},
        {"applied": 1},
    ],
    ids=str,
)
def test_contributions_out_of_order(other):
    desk = Desk(2).started()
    code, reason = refusal(desk, desk.give("a", **({"round": 0} | other)), "a")
    assert code == "order"
    assert any(character.isdigit() for character in reason)
    assert desk.hub.present == ["b"]


@pytest.mark.parametrize(
    "other", [{"round": 1}, {"part": 1, "parts": 2}, {"part": 1}, {"round": 3}], ids=str
)
def test_who_sends_with_a_gap_has_lost_something_and_is_told_to_come_back(other):
    desk = Desk(2).started()
    assert refusal(desk, desk.give("a", **({"round": 0} | other)), "a")[0] == "unknown"
    assert desk.hub.present == ["a", "b"]
    assert refusal(desk, desk.give("a", 0), "a")[0] == "unknown", "until it has said where it is"


def test_what_is_no_message_has_lost_something_too():
    desk = Desk(2).started()
    desk.said = {}
    desk.take(desk.hub.garbled(b"a", 0.0))
    assert refusal(desk, desk.said, "a")[0] == "unknown"
    assert desk.hub.garbled(b"stranger", 0.0) == []


def test_gaps_without_end_are_no_accident():
    desk = with_session()
    for attempt in range(hub_module.MOST_GAPS):
        assert refusal(desk, desk.give("b", 2), "b")[0] == "unknown"
        back(desk, "b", attempt=attempt + 1)
    assert refusal(desk, desk.give("b", 2), "b")[0] == "order"
    assert desk.hub.present == ["a"]


def test_a_gap_is_forgotten_once_something_whole_has_come():
    desk = with_session()
    for round in range(2 * hub_module.MOST_GAPS):
        assert refusal(desk, desk.give("b", round + 1), "b")[0] == "unknown"
        back(desk, "b", oldest=round, submitted=round, applied=round)
        desk.give("a", round, applied=round)
        desk.give("b", round, applied=round)
        assert desk.hub.round == round + 1


def test_a_contribution_before_the_start_is_out_of_order():
    desk = Desk(2)
    desk.join("a")
    assert refusal(desk, desk.give("a", 0), "a")[0] == "order"


def test_hub_messages_from_a_member_are_out_of_order():
    desk = Desk(2).started()
    code, reason = refusal(desk, desk.tell("a", Start(0, 0, 0, 0, True)), "a")
    assert (code, reason) == ("order", "Start is for members")


def test_no_member_runs_ahead_for_ever(monkeypatch):
    monkeypatch.setattr(pace, "MAX_AHEAD", 3)
    desk = Desk(2).started()
    for round in range(4):
        assert desk.give("a", round) == {}
    assert refusal(desk, desk.give("a", 4), "a")[0] == "order"


def test_a_payload_larger_than_the_codec_allows():
    desk = Desk(2).started()
    code, reason = refusal(desk, desk.give("a", 0, payload=b"x" * 21), "a")
    assert code == "size"
    assert "21" in reason
    assert "20" in reason


def test_parts_are_bounded_one_by_one():
    codec = codecs.Dense()
    codec.part_elements = 4
    desk = Desk(2, codec=codec).started()
    desk.give("a", 0, part=0, parts=2, payload=b"x" * 16)
    assert refusal(desk, desk.give("a", 0, part=1, parts=2, payload=b"x" * 8), "a")[0] == "size"


@pytest.mark.parametrize("bad", "ab")
@pytest.mark.parametrize("members", [2, 3])
def test_a_payload_that_cannot_be_decoded_expels_its_sender_and_the_round_closes_once(members, bad):
    names = "abc"[:members]
    desk = Desk(members).started(names)
    for name in names:
        said = desk.give(
            name, 0, np.ones(ELEMENTS), **({"payload": b"x" * 19} if name == bad else {})
        )
    code, reason = refusal(desk, said, bad)
    assert code == "payload"
    assert "19" in reason
    assert "20" in reason
    good = [name for name in names if name != bad]
    assert desk.hub.present == good
    assert desk.events() == [("refused", bad)]
    (closed,) = desk.closed
    assert (closed.round, closed.members) == (0, tuple(good))
    assert desk.hub.round == 1
    for name in good:
        reply = the(Reply, said[name])
        assert reply.members == members - 1
        np.testing.assert_array_equal(np.frombuffer(reply.payload, np.float32), 1)
    np.testing.assert_array_equal(desk.hub.base, 1)
    assert not desk.hub.rounds.open_rounds.sizes()


def test_bad_payloads_only_leave_nothing_behind():
    desk = Desk(2).started()
    desk.give("a", 0, payload=b"x")
    said = desk.give("b", 0, payload=b"y")
    assert refusal(desk, said, "a")[0] == refusal(desk, said, "b")[0] == "payload"
    assert desk.closed == []
    assert desk.hub.finished
    assert not desk.hub.rounds.open_rounds.sizes()


def test_a_bad_payload_of_a_member_that_has_left_is_dropped():
    desk = Desk(2).started()
    desk.give("a", 0, payload=b"x")
    desk.tell("a", Leave("done"))
    desk.give("b", 0)
    assert [closed.members for closed in desk.closed] == [("b",)]
    assert desk.hub.present == ["b"]


def test_a_left_members_bad_payload_does_not_touch_who_came_after_it():
    desk = Desk(2).started()
    desk.give("a", 0, payload=b"x")
    desk.tell("a", Leave("done"))
    desk.join("a")
    desk.give("b", 0)
    assert desk.hub.present == ["a", "b"]


def test_several_bad_payloads_of_one_member():
    desk = Desk(2).started()
    for round in range(3):
        desk.give("a", round, payload=b"x")
    for round in range(3):
        desk.give("b", round, applied=round, checksum=desk.hub.checksum(round))
    assert [closed.members for closed in desk.closed] == [("b",)] * 3
    assert desk.events() == [("refused", "a")] * 3, "none is dropped in silence"


def test_a_bad_payload_does_not_let_a_round_pass_without_its_quorum():
    desk = Desk(3, quorum=2, deadline_s=10).started("abc")
    desk.give("a", 0, payload=b"x")
    desk.give("b", 0)
    desk.tick(10)
    assert desk.closed == []
    assert desk.hub.present == ["b", "c"]
    desk.give("c", 0)
    assert [closed.members for closed in desk.closed] == [("b", "c")]
