"""Members that are lost, come back, come anew, or leave; and the hub that waits for them."""

from __future__ import annotations

import numpy as np
import pytest
from hub_desk import ELEMENTS, ZEROS, Desk, back, lost, raw, refusal, the, with_session

from edgetrain import codecs
from edgetrain.exchange.hub.members import AWAY
from edgetrain.exchange.messages import PROTOCOL, Base, Beat, Leave, Reply, Start, Welcome
from edgetrain.exchange.transport import owned
from edgetrain.vectors.vector import checksum


def test_unreachable_then_gone():
    desk = Desk(2, lost_after_s=5).started()
    desk.give("a", 0)
    desk.take(desk.hub.unreachable(b"b", desk.now))
    desk.take(desk.hub.unreachable(b"b", desk.now))
    assert desk.events() == [("late", "b")]
    desk.tick(4.9)
    assert desk.hub.present == ["a", "b"]
    said = desk.tick(0.2)
    assert desk.events() == [("late", "b"), ("gone", "b")]
    assert the(Reply, said["a"]).members == 1
    assert desk.hub.present == ["a"]


def test_a_member_that_is_heard_again_is_not_gone():
    desk = Desk(2, lost_after_s=5).started()
    desk.take(desk.hub.unreachable(b"b", desk.now))
    desk.tick(4)
    desk.tell("b", Beat())
    desk.tick(4)
    assert desk.hub.present == ["a", "b"]


def test_strangers_cannot_be_unreachable():
    assert Desk(2).started().hub.unreachable(b"z", 0.0) == []


def test_what_a_member_gave_before_it_went_counts():
    desk = Desk(2, lost_after_s=5).started()
    desk.give("b", 0, np.full(ELEMENTS, 3))
    desk.tell("b", Leave("done"))
    said = desk.give("a", 0, np.full(ELEMENTS, 1))
    assert np.frombuffer(the(Reply, said["a"]).payload, np.float32)[0] == 2
    assert "b" not in said


def test_a_half_sent_contribution_does_not_count():
    codec = codecs.Dense()
    codec.part_elements = 4
    desk = Desk(2, codec=codec).started()
    desk.give("b", 0, part=0, parts=2, payload=b"\0" * 16)
    desk.tell("b", Leave("done"))
    desk.give("a", 0, part=0, parts=2, payload=b"\0" * 16)
    desk.give("a", 0, part=1, parts=2, payload=b"\0" * 4)
    assert desk.closed[0].members == ("a",)


def test_beats_go_to_everyone_once_a_beat():
    desk = Desk(3, heartbeat_s=1.0)
    desk.join("a")
    desk.join("b")
    waiting = Beat(here=2)
    assert desk.tick(0.1) == {"a": [waiting], "b": [waiting]}
    assert desk.tick(0.5) == {}
    assert desk.tick(0.5) == {"a": [waiting], "b": [waiting]}
    assert Desk(2, heartbeat_s=1.0).started().tick(1.0) == {"a": [Beat()], "b": [Beat()]}


def test_a_newcomer_starts_from_the_present_base_at_the_next_round():
    desk = Desk(3).started("abd")
    desk.tell("d", Leave("done"))
    desk.give("a", 0, np.full(ELEMENTS, 1))
    desk.give("b", 0, np.full(ELEMENTS, 3))
    desk.give("a", 1)
    said = desk.join("c")
    start = the(Start, said["c"])
    assert (start.applied, start.round, start.keep) == (1, 2, False)
    np.testing.assert_array_equal(np.frombuffer(the(Base, said["c"]).payload, np.float32), 2)
    said = desk.give("b", 1)
    assert the(Reply, said["c"]).round == 1, "it is told of rounds it had no part in"
    for name in "abc":
        said = desk.give(name, 2, applied=1, checksum=desk.hub.checksum(1))
    assert desk.closed[-1].members == ("a", "b", "c")


def test_the_base_sent_to_a_newcomer_is_its_own_copy():
    desk = Desk(2).started("ad")
    desk.tell("d", Leave("done"))
    desk.give("a", 0, np.full(ELEMENTS, 1))
    sent = the(Base, desk.join("b")["b"]).payload
    for name in "ab":
        desk.give(name, 1, np.full(ELEMENTS, 1), applied=1, checksum=desk.hub.checksum(1))
    np.testing.assert_array_equal(np.frombuffer(sent, np.float32), 1)


def test_a_base_that_is_sent_while_the_first_round_closes_is_the_one_before_it():
    desk = Desk(2)
    desk.join("a")
    desk.join("z", checksum=1, session=7)
    said = [the(Base, desk.tell("a", Base(0, 1, raw(ZEROS)))["z"])]
    desk.give("z", 0, np.full(ELEMENTS, 1))
    said.append(the(Base, back(desk, name="z", applied=0, submitted=1, lacks_base=True)["z"]))
    desk.give("a", 0, np.full(ELEMENTS, 1))
    assert desk.hub.round == 1
    for base in said:
        np.testing.assert_array_equal(np.frombuffer(base.payload, np.float32), 0)


def test_a_member_that_comes_back_is_a_newcomer():
    desk = Desk(2, lost_after_s=5).started()
    desk.take(desk.hub.unreachable(b"b", desk.now))
    desk.tick(6)
    desk.give("a", 0, np.full(ELEMENTS, 1))
    assert refusal(desk, desk.tell("b", Beat()), "b")[0] == "unknown"
    said = desk.join("b", checksum=desk.hub.checksum(1))
    assert the(Start, said["b"]).keep
    assert the(Start, said["b"]).applied == 1


def test_a_newcomer_gets_an_empty_reply_to_a_round_that_nobody_can_give_to_any_more():
    desk = Desk(3).started("acd")
    desk.tell("d", Leave("done"))
    desk.give("c", 0, np.full(ELEMENTS, 1))
    desk.give("a", 0, np.full(ELEMENTS, 1))
    desk.give("a", 1, payload=b"x", applied=1, checksum=desk.hub.checksum(1))
    start = the(Start, desk.join("b")["b"])
    assert (start.applied, start.round) == (1, 2)
    said = desk.tell("c", Leave("done"))
    assert refusal(desk, said, "a")[0] == "payload"
    reply = the(Reply, said["b"])
    assert (reply.round, reply.members) == (1, 0)
    np.testing.assert_array_equal(np.frombuffer(reply.payload, np.float32), 0)
    assert desk.closed[-1].members == ()
    assert reply.checksum == checksum(desk.hub.base)
    desk.give("b", 2, np.full(ELEMENTS, 1), applied=2, checksum=reply.checksum)
    assert desk.closed[-1].members == ("b",)


def test_a_hub_that_has_lost_everyone_waits_for_them():
    desk = with_session(rejoin_s=5, empty_after_s=30)
    lost(desk, "a", "b")
    assert desk.hub.present == []
    desk.tick(29)
    assert not desk.hub.finished
    assert the(Start, back(desk)["z"])
    desk.tick(100)
    assert desk.hub.present == ["b"]
    lost(desk, "z")
    desk.tick(29)
    assert not desk.hub.finished
    desk.tick(2)
    assert desk.hub.finished


def test_a_hub_whose_last_member_has_left_is_done_whoever_was_lost_before():
    desk = Desk(2).started()
    lost(desk, "b")
    desk.tell("a", Leave("done"))
    assert desk.hub.finished


def test_an_index_is_free_again_when_its_member_has_gone():
    desk = Desk(2).started()
    for i in range(5):
        desk.tell("b", Leave(""))
        assert the(Welcome, desk.join("b", name=f"b{i}")["b"]).index == 1


def test_whoever_started_anew_takes_the_place_of_its_lost_connection():
    desk = Desk(2, lost_after_s=50).started()
    desk.give("b", 0)
    desk.take(desk.hub.unreachable(b"b", desk.now))
    start = the(Start, desk.join("z", name="b")["z"])
    assert start.round == 1, "the one before has given to round 0"
    assert desk.events() == [("late", "b"), ("gone", "b"), ("joined", "b")]
    assert desk.hub.present == ["a", "b"]


def test_another_connection_takes_over_and_what_came_twice_counts_once():
    desk = with_session()
    desk.give("b", 0, np.full(ELEMENTS, 3))
    said = back(desk)
    start = the(Start, said["z"])
    assert (start.round, start.resend, start.keep, start.attempt) == (1, 1, True, 1)
    assert the(Welcome, said["z"]).name == "b"
    desk.give("z", 0, np.full(ELEMENTS, 3))
    said = desk.give("a", 0, np.full(ELEMENTS, 1))
    assert np.frombuffer(the(Reply, said["z"]).payload, np.float32)[0] == 2
    assert "b" not in said
    assert desk.closed[0].members == ("a", "b")


def test_who_comes_back_behind_the_fleet_gets_the_base_and_goes_on_with_it():
    desk = with_session(lost_after_s=1)
    desk.take(desk.hub.unreachable(b"b", desk.now))
    desk.tick(2)
    for round in range(3):
        known = {"applied": round, "checksum": desk.hub.checksum(round)}
        desk.give("a", round, np.full(ELEMENTS, 1), **known)
    said = back(desk, checksum=checksum(ZEROS))
    start = the(Start, said["z"])
    assert (start.applied, start.round, start.keep, start.resend) == (3, 3, False, 0)
    np.testing.assert_array_equal(np.frombuffer(the(Base, said["z"]).payload, np.float32), 3)
    desk.give("z", 0, np.full(ELEMENTS, 8))
    assert desk.notes[-1].reason == "round 0 had closed; counts in 3"
    known = {"applied": 3, "checksum": desk.hub.checksum(3)}
    desk.give("z", 3, np.full(ELEMENTS, 1), **known)
    desk.give("a", 3, np.full(ELEMENTS, 3), **known)
    assert desk.closed[-1].members == ("a", "b", "b")
    np.testing.assert_array_equal(desk.hub.base, 3 + 4)


def test_who_lacks_a_base_gets_it_though_the_journal_has_the_replies():
    desk = with_session()
    desk.hub.tail = 0
    for name in ("b", "a"):
        desk.give(name, 0, np.full(ELEMENTS, 1))
    # Its checkpoint is older than what it gave: that has been merged, and is not waited for again.
    said = back(desk, submitted=0, oldest=0, lacks_base=True)
    start = the(Start, said["z"])
    assert (start.applied, start.round, start.keep, start.resend) == (1, 1, False, 1)
    np.testing.assert_array_equal(np.frombuffer(the(Base, said["z"]).payload, np.float32), 1)
    kept = back(desk, submitted=0, oldest=0)
    assert the(Start, kept["z"]).keep


def test_a_hub_without_a_base_cannot_give_one():
    desk = Desk(2, gradient=True)
    desk.join("a")
    desk.join("b", session=7)
    desk.tell("a", Base(0, 1, raw(ZEROS)))
    desk.hub.tail = 0
    for name in ("b", "a"):
        desk.give(name, 0)
    assert the(Start, back(desk, submitted=0, oldest=0)["z"]).keep
    said = back(desk, "y", submitted=0, oldest=0, lacks_base=True)
    assert refusal(desk, said, "y")[0] == "started"


def test_the_name_of_a_member_that_is_away_is_not_given_to_a_newcomer():
    desk = Desk(3)
    for who, session in zip("abc", (6, 7, 8), strict=True):
        desk.join(who, name="", session=session)
    desk.tell("a", Base(0, 1, raw(ZEROS)))
    lost(desk, "b")
    assert the(Welcome, desk.join("d", name="")["d"]).name == "m3"
    desk.tell("a", Leave("done"))
    assert the(Welcome, back(desk, name="m1", submitted=0)["z"]).name == "m1"
    desk.tell("z", Leave("done"))
    assert the(Welcome, desk.join("e", name="")["e"]).name == "m0", "whoever left has none"


NOT_BACK = {
    "protocol": {"protocol": PROTOCOL + 1},
    "session": {"session": 8},
    "model": {"elements": ELEMENTS + 1},
    "ahead": {"applied": 1},
    "diverged": {"checksum": 5},
}


@pytest.mark.parametrize("code", NOT_BACK)
def test_who_cannot_come_back_is_told_why(code):
    desk = with_session()
    said = back(desk, **NOT_BACK[code])
    assert refusal(desk, said, "z")[0] == code
    assert ("b" in desk.hub.present) == (code == "session"), "a stranger expels nobody"


def test_members_that_were_given_up_are_not_remembered_without_end():
    desk = with_session(lost_after_s=1)
    for i in range(30):
        desk.tell("b", Leave(""))
        desk.join(f"c{i}", session=100 + i)
        desk.take(desk.hub.unreachable(f"c{i}".encode(), desk.now))
        desk.tick(2)
    assert len(desk.hub.members.away) == 2 * AWAY


def test_finished_when_the_last_one_is_gone():
    desk = Desk(2, lost_after_s=5).started()
    desk.tell("a", Leave("done"))
    assert not desk.hub.finished
    desk.take(desk.hub.unreachable(b"b", desk.now))
    desk.tick(6)
    assert not desk.hub.finished
    desk.tick(desk.hub.policy.rejoin_s)
    assert not desk.hub.finished
    desk.tick(desk.hub.policy.empty_after_s)
    assert desk.hub.finished
    assert desk.hub.present == []


def keyed(letter, connection="1"):
    """The name of a connection that was proved with a key."""
    return owned(letter.encode() * 32, connection.encode()).decode()


def two_with_keys(**policy):
    desk = Desk(2, **policy)
    desk.join(keyed("A"), name="a")
    desk.join(keyed("B"), name="b", session=7)
    desk.tell(keyed("A"), Base(0, 1, raw(ZEROS)))
    desk.notes.clear()
    return desk


def test_a_name_stays_with_the_key_that_came_with_it():
    desk = two_with_keys(lost_after_s=1)
    lost(desk, keyed("B"))  # given up, and remembered
    for other in ("plain", keyed("C"), keyed("C", "2")):
        assert refusal(desk, desk.join(other, name="b"), other)[0] == "taken"
        assert refusal(desk, back(desk, other), other)[0] == "session"
    assert desk.hub.present == ["a"]
    there = keyed("B", "2")
    assert the(Start, back(desk, there)[there])
    desk.take(desk.hub.unreachable(there.encode(), desk.now))  # not given up yet
    assert refusal(desk, desk.join(keyed("C"), name="b"), keyed("C"))[0] == "taken"
    anew = keyed("B", "3")
    assert the(Welcome, desk.join(anew, name="b", session=8)[anew])


def test_a_restored_hub_that_refuses_one_it_had_given_up_stays_up():
    desk = two_with_keys(lost_after_s=1)
    lost(desk, keyed("B"))
    again = Desk(2, lost_after_s=1)
    again.hub.restore(desk.hub.state(), [], 0.0)
    said = back(again, keyed("B"), applied=5)
    assert refusal(again, said, keyed("B"))[0] == "ahead"
    assert again.hub.present == ["a"]
    assert the(Start, back(again, keyed("B"))[keyed("B")])
