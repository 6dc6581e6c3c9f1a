"""What a member agrees to: one of hub and replica may go on alone, and never both."""

from __future__ import annotations

from fakes.fleet import Wire

from edgetrain.exchange.member.session import Silence
from edgetrain.exchange.member.standby import Ballot, StandbyEnd
from edgetrain.exchange.messages import Agree, Beat, Leave, Offer, Standby, pack


def said(link, sent=0, *, asks=False, out=False) -> Standby:
    return Standby("tcp://c:5555", "", link, max(link, sent), 1.0, asks, out)


def ballot(*, link=5) -> Ballot:
    made = Ballot()
    made.begin_session()
    made.accept_standby(said(link))
    return made


def test_nobody_agrees_to_a_takeover_before_the_hub_has_told_a_position():
    assert Ballot().accept_offer(Offer(9)) is None
    assert ballot().accept_offer(Offer(9)) == Agree(9, True)


def test_a_takeover_from_before_what_the_hub_knows_to_be_held_is_refused():
    assert ballot(link=5).accept_offer(Offer(4)) is None
    assert ballot(link=5).accept_offer(Offer(5)) == Agree(5, True)


def test_who_agreed_to_a_takeover_agrees_to_an_out_only_above_it():
    made = ballot(link=5)
    made.accept_offer(Offer(7))
    assert made.accept_standby(said(7, asks=True)) is None
    assert made.accept_standby(said(8, asks=True)) == Agree(8, False)


def test_who_agreed_to_an_out_agrees_to_a_takeover_only_once_it_is_released():
    made = ballot(link=5)
    assert made.accept_standby(said(5, asks=True)) == Agree(5, False)
    assert made.accept_offer(Offer(9)) is None
    made.accept_standby(said(5))
    assert made.accept_offer(Offer(9)) is None
    made.accept_standby(said(6))
    assert made.accept_offer(Offer(9)) == Agree(9, True)


def test_who_is_told_that_the_replica_is_out_does_not_let_it_take_over():
    made = ballot(link=5)
    made.accept_standby(said(6, out=True))
    assert made.accept_offer(Offer(9)) is None


def test_a_process_that_goes_on_with_a_session_agrees_to_an_out_only_above_what_was_sent():
    made = Ballot()
    made.accept_standby(said(5, sent=8, asks=True))
    assert made.accept_standby(said(8, asks=True)) is None
    assert made.accept_standby(said(9, asks=True)) == Agree(9, False)


def test_who_goes_to_the_replica_and_comes_straight_back_asks_its_hub_again():
    now = [0.0]
    hub, replica = Wire(lambda: None), Wire(lambda: None)
    end = StandbyEnd(hub, lambda address, key: replica, lambda: now[0])
    silence = Silence(end, lambda: now[0], 60.0, 60.0)
    assert not silence.note_connections()
    hub.send_to_member(pack(said(5)))
    hub.deliver_to_member()
    end.receive(0.0)
    for back in (False, True):
        now[0] += 2.0
        if back:
            hub.send_to_member(pack(Beat()))
            hub.deliver_to_member()
        assert end.receive(0.0) is None
        assert silence.note_connections(), "the question that it sent before may be lost"
        end.send(pack(Leave("instead of a question")))
    assert not silence.note_connections()
