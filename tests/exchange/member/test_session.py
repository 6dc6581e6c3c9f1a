"""The table at the head of the session's module, row by row; and when silence is too long."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import BadMessage, Diverged, HubUnreachable, Refused
from edgetrain.exchange.further_messages import Assign, Rekey
from edgetrain.exchange.member.session import Ask, Back, Session, Silence
from edgetrain.exchange.messages import (
    Base,
    Beat,
    Contribute,
    Fixed,
    Join,
    Refuse,
    Reply,
    Resume,
    Start,
    Welcome,
)
from edgetrain.exchange.seam import Past, Request
from edgetrain.exchange.transport import Traffic

PAST = Past(session=5, name="m0", round=7, applied=6, checksum=3, has_base=False)


def welcome(epoch=0, threshold=0):
    return Welcome("m0", 0, 1, "dga", 5, 0, "fp32", "fp32", 1.0, False, epoch, threshold)


def start(attempt=0, *, round=0, keep=True):
    return Start(applied=4, round=round, delay=2, checksum=9, keep=keep, attempt=attempt)


def reply(round=0):
    return Reply(round, 0, 1, 1, 0, 0, True, b"")


UNKNOWN = Refuse("unknown", "who?")


def session_in(state, past=None):
    """A session in this state, that has asked once (and once more to come back)."""
    session = Session(Request("model"), 3, 1, past)
    session.ask(0, 1)
    if state != "joining":
        session.accept_before_start(welcome(threshold=2))
    if state in ("training", "returning"):
        assert session.accept_before_start(start(1 if past else 0)) is not None
    if state == "returning":
        session.ask(0, 1)
    assert session.state == state
    return session


def accept(session, message, connections=1):
    if session.has_begun:
        return session.accept_in_training(message, connections)
    return session.accept_before_start(message)


ROWS = [
    ("joining", welcome(), "welcomed", Welcome),
    ("joining", Base(0, 1, b""), "joining", Base),
    ("joining", Fixed(0, 1, b""), "joining", Fixed),
    ("joining", Beat(3), "joining", None),
    ("welcomed", start(), "training", Start),
    ("welcomed", welcome(2), "welcomed", Welcome),
    ("welcomed", Base(0, 1, b""), "welcomed", Base),
    ("welcomed", Fixed(0, 1, b""), "welcomed", Fixed),
    ("welcomed", Beat(0), "welcomed", None),
    ("welcomed", Beat(1), "joining", Ask),
    ("welcomed", UNKNOWN, "joining", Ask),
    ("training", reply(), "training", Reply),
    ("training", Beat(0), "training", None),
    ("training", Beat(1), "training", Ask),
    ("training", UNKNOWN, "training", Ask),
    ("training", Rekey(0, 0, 1), "training", Rekey),
    ("training", Base(0, 1, b""), "training", None),
    ("training", replace(start(), applied=5, round=5), "training", Back),
    ("returning", reply(), "returning", None),
    ("returning", Beat(0), "returning", None),
    ("returning", UNKNOWN, "returning", None),
    ("returning", welcome(2), "returning", Welcome),
    ("returning", Base(0, 1, b""), "returning", None),
    ("returning", Fixed(0, 1, b""), "returning", None),
    ("returning", Rekey(0, 0, 1), "returning", Rekey),
    ("returning", start(9), "returning", None),
    ("returning", start(1), "training", Back),
]


@pytest.mark.parametrize(("state", "message", "then", "found"), ROWS)
def test_each_row_of_the_table(state, message, then, found):
    session = session_in(state)
    answer = accept(session, message)
    assert session.state == then
    assert answer is None if found is None else isinstance(answer, found)


WRONG = [
    ("joining", start()),
    ("joining", reply()),
    ("welcomed", reply()),
    ("welcomed", Contribute(0, 0, 1, 1.0, 0, 0, 0, b"")),
    ("training", welcome()),
    ("training", Fixed(0, 1, b"")),
    ("training", start()),
    ("returning", Contribute(0, 0, 1, 1.0, 0, 0, 0, b"")),
]


@pytest.mark.parametrize(("state", "message"), WRONG)
def test_what_is_not_in_the_table_is_a_bad_message(state, message):
    phase = "during training" if state in ("training", "returning") else "before the start"
    with pytest.raises(BadMessage, match=f"the hub sent {type(message).__name__} {phase}"):
        accept(session_in(state), message)


@pytest.mark.parametrize("state", ["joining", "welcomed", "training", "returning"])
def test_other_refusals_are_raised_in_every_state(state):
    with pytest.raises(Refused, match="the hub refused: full: no place"):
        accept(session_in(state), Refuse("full", "no place"))
    with pytest.raises(Refused, match=r"^people ended the job$"):  # which is no failure
        accept(session_in(state), Refuse("ended", "people ended the job"))
    with pytest.raises(Diverged, match="1 and 2"):
        accept(session_in(state), Refuse("diverged", "1 and 2"))


def test_a_join_that_was_sent_twice_may_be_answered_twice():
    session = session_in("joining")
    with pytest.raises(Refused, match="unknown"):
        accept(session, UNKNOWN)
    assert isinstance(session.ask(0, 1), Join)
    assert accept(session, UNKNOWN) is None
    accept(session, welcome())
    accept(session, start())
    assert [accept(session, each) for each in (welcome(), Base(0, 1, b""), start())] == [None] * 3
    assert session.state == "training"


@pytest.mark.parametrize("message", [reply(), Rekey(0, 0, 1), Assign(0, 1, False, ())])
def test_a_member_whose_start_was_lost_ignores_what_it_is_sent_in_training(message):
    session = session_in("joining")
    session.ask(0, 1)
    assert accept(session, message) is None
    accept(session, welcome())
    assert accept(session, message) is None
    assert isinstance(accept(session, start()), Start)


def test_a_question_says_where_the_member_stands():
    session = session_in("training")
    session.next_round, session.applied, session.checksum = 8, 6, 3
    first = session.ask(0, 1, oldest=5)
    assert isinstance(first, Resume)
    assert (first.name, first.session) == ("m0", session.number)
    assert (first.applied, first.checksum, first.submitted, first.oldest) == (6, 3, 8, 5)
    assert session.ask(0, 1).oldest == 8
    assert session.ask(0, 1).attempt == first.attempt + 2


def test_from_a_checkpoint_the_first_question_is_where_it_was():
    session = Session(Request("model", "other"), 3, 1, PAST)
    first, second = session.ask(0, 0), session.ask(0, 0)
    assert (first.name, first.session, first.lacks_base) == ("m0", 5, True)
    assert (first.applied, first.checksum, first.submitted, first.oldest) == (6, 3, 7, 7)
    assert (first.attempt, second.attempt) == (1, 2)
    accept(session, welcome())
    assert accept(session, start(1)) is None, "the answer to the first one"
    assert accept(session, reply()) is None, "it comes again behind the answer to the second one"
    assert isinstance(accept(session, start(2)), Start)
    assert not session.ask(0, 1).lacks_base


def test_while_it_returns_a_beat_is_a_reason_to_ask_only_if_the_question_was_lost():
    session = session_in("returning")
    session.ask(4, connections=2)
    assert accept(session, Beat(4), connections=3) is None, "this epoch was asked"
    assert accept(session, Beat(5), connections=2) is None, "its answer comes behind the beat"
    assert accept(session, Beat(5), connections=3) == Ask(5)


def test_a_base_whose_answer_broke_off_is_dropped_when_the_next_answer_begins():
    session = session_in("returning")
    accept(session, welcome())
    accept(session, Base(0, 1, b"of a hub that died"))
    accept(session, welcome(epoch=1))
    accept(session, Base(0, 1, b"base"))
    assert list(accept(session, start(1, keep=False)).base) == [b"base"]


def test_back_with_another_base_it_stands_where_that_is():
    session = session_in("returning")
    accept(session, Base(0, 2, b"stale"))
    accept(session, start(9))
    accept(session, Base(0, 1, b"base"))
    back = accept(session, start(1, round=6, keep=False))
    assert (back.missed, list(back.base)) == (True, [b"base"])
    assert (session.next_round, session.applied, session.checksum) == (6, 4, 9)


def test_back_where_the_fleet_still_is_nothing_was_missed():
    session = session_in("returning")
    session.next_round = 6
    back = accept(session, start(1, round=6))
    assert (back.missed, list(back.base)) == (False, [])


class Wire:
    """As much of a transport as silence looks at."""

    def __init__(self):
        self.connections, self.bytes, self.reconnected, self.now = 1, 0, 0, 0.0
        self.addresses = {"": ""}

    def received_bytes(self):
        return self.bytes

    def traffic(self):
        return Traffic(0, 0, 0, 1.0)

    def reconnect(self):
        self.reconnected += 1

    def clock(self):
        return self.now


def silence_over(wire):
    silence = Silence(wire, wire.clock, 30.0, 600.0)
    silence.set_beat(1.0)
    return silence


def test_bytes_of_a_message_under_way_are_a_sign_of_life():
    wire = Wire()
    silence = silence_over(wire)
    for wire.now in range(0, 1000, 7):
        wire.bytes += 1
        assert not silence.reconnect_if_silent()
        silence.check()


def test_a_silent_hub_is_reconnected_with_growing_pauses_and_then_given_up():
    wire = Wire()
    silence = silence_over(wire)
    at = []
    for wire.now in range(600):
        if silence.reconnect_if_silent():
            silence.note_question()
            at.append(wire.now)
        silence.check()
    assert at[:3] == [9, 9 + 17, 9 + 17 + 33], "four beats and round trips, then twice as many"
    assert at[-1] - at[-2] == 61
    wire.now = 601
    with pytest.raises(HubUnreachable, match=r"silent for 601 s \("):
        silence.check()
    wire.addresses = {"tcp://a:1": "the hub breaks off", "tcp://b:2": ""}
    with pytest.raises(
        HubUnreachable, match=r"601 s; tcp://a:1: the hub breaks off; .*2: no answe"
    ):
        silence.check()


@given(st.integers(2, 12), st.floats(0.05, 10.0))
def test_all_addresses_of_a_silent_hub_are_tried_within_a_minute(addresses, heartbeat_s):
    wire = Wire()
    wire.addresses = dict.fromkeys(range(addresses), "")
    silence = Silence(wire, wire.clock, 30.0, 600.0)
    silence.set_beat(heartbeat_s)
    at = []
    while wire.now < 600:
        if silence.reconnect_if_silent():
            silence.note_question()
            at.append(wire.now)
        wire.now += 0.125
    assert at[0] == pytest.approx(4 * (heartbeat_s + 1), abs=0.25), (
        "no sooner than with one address"
    )
    for first, last in zip(at, at[addresses:], strict=False):
        assert last - first <= 60 + 0.25 * addresses


def test_a_long_round_trip_is_waited_for_however_many_addresses_there_are():
    wire = Wire()
    wire.addresses = dict.fromkeys(range(30), "")
    silence, at = silence_over(wire), []
    for wire.now in range(600):
        if silence.reconnect_if_silent():
            silence.note_question()
            at.append(wire.now)
    assert min(late - early for early, late in itertools.pairwise(at)) >= 4


def test_the_first_connection_took_nothing_with_it():
    wire = Wire()
    silence = silence_over(wire)
    assert not silence.note_connections()
    assert not silence.note_connections()
    wire.connections = 2
    assert silence.note_connections()
    wire = Wire()
    wire.connections = 2
    assert silence_over(wire).note_connections(), "two have stood before the first check"
