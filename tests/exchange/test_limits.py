"""Limits: messages a second, lines about refusals, rounds ahead, replies that nobody takes."""

from __future__ import annotations

import itertools

import pytest
from loopback import Loopback
from merging_room import ELEMENTS, Room, closed, filled, is_reply_to

from edgetrain import codecs
from edgetrain.codecs import Dense
from edgetrain.exchange import limits
from edgetrain.exchange.delay import MAX_IN_FLIGHT, Delay
from edgetrain.exchange.hub import rounds as exchange
from edgetrain.exchange.hub.delay import AUTO_ROUNDS, MAX_AHEAD, AgreedDelay, Wish
from edgetrain.exchange.hub.effects import Note, Send
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.serve import serve
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.limits import Refusals, SenderRate
from edgetrain.exchange.messages import Beat, Refuse, pack, unpack
from edgetrain.exchange.transport import Traffic
from edgetrain.jobs.building import LARGEST_PART_BYTES, message_limit
from edgetrain.runs import folder as runs
from edgetrain.strategies import find
from edgetrain.strategies.merging.rule import Mean
from edgetrain.training.hub_recorder import FIRST, NEWEST, HubRecorder


def test_a_sender_has_so_many_messages_a_second_and_is_then_forgotten():
    rate = SenderRate(most=3)
    assert [rate.count_message(b"a", 0.1 * i) for i in range(5)] == [True] * 3 + [False] * 2
    assert rate.count_message(b"b", 0.6)
    assert rate.count_message(b"a", 1.0)
    for sender in range(1000):
        rate.count_message(b"%d" % sender, 2.0)
    rate.count_message(b"a", 3.0)
    assert len(rate) == 1


def test_the_first_refusals_are_told_and_then_every_tenfold():
    found = []
    refusals = Refusals()
    refusals.report = found.append
    for number in range(1, 2001):
        refusals.add("key", f"line {number}")
    refusals.add("token", "another kind")
    assert found == [
        "line 1", "line 2", "line 3", "line 10 (10 of this kind so far)",
        "line 100 (100 of this kind so far)", "line 1000 (1000 of this kind so far)",
        "another kind",
    ]  # fmt: skip


def test_a_flood_is_dropped_and_told_and_others_are_heard(monkeypatch):
    monkeypatch.setattr(limits.SenderRate.__init__, "__defaults__", (50, 1.0))
    wire = Loopback()
    flood, other = wire.connect(), wire.connect()
    for _ in range(500):
        flood.send(pack(Beat()))
    other.send(pack(Beat()))
    codec, told = Dense(), []
    hub = Hub(Terms(find("local-sgd"), 1), Policy(1), Mean(), codec, codec)
    turns = itertools.count()
    serve(hub, wire, lambda: 0.5, told.append, stop=lambda: next(turns) > 3)
    assert [n.reason for n in told] == ["more than 50 messages a second: the rest is dropped"]
    answered = sum(1 for _ in iter(lambda: flood.receive(0.0), None))
    assert answered == 50
    assert unpack(other.receive(0.0)).code == "unknown"


@pytest.mark.parametrize(
    ("codec", "limit"),
    [
        ("fp32", 4 << 20),
        ("int8", 2_129_920),
        ("sign", 2 << 20),
        ("low-rank(4)", LARGEST_PART_BYTES),
    ],
)
def test_no_frame_is_larger_than_the_job_has_use_for(codec, limit):
    assert message_limit(codecs.parse(codec)) == limit


def test_refusals_do_not_fill_a_run_folder(tmp_path):
    folder = runs.create(tmp_path, "refusals")
    said = []
    recorder = HubRecorder(folder, lambda: 0.0, lambda: Traffic(0, 0, 0, 0.0), say=said.append)
    recorder(Note("started", "hub", "1 member"))
    for number in range(10_000):
        recorder(Note("refused", f"x{number}", f"full: all {number} places are taken"))
        recorder(Note("refused", "?", f"garbage {number}"))
    recorder.close()
    assert len(list(runs.read_metrics(folder))) == len(said) == 1 + (20 + 3) + (200 + 2)


def test_a_kind_of_refusal_is_told_although_there_were_many_of_others(tmp_path):
    """Each kind is limited where it comes from; together they are more than 20 lines."""
    folder = runs.create(tmp_path, "refusals")
    said = []
    recorder = HubRecorder(folder, lambda: 0.0, lambda: Traffic(0, 0, 0, 0.0), say=said.append)
    strangers = Refusals()
    strangers.report = lambda line: recorder(Note("refused", "?", line))
    for kind in range(12):
        for number in range(1000):
            strangers.add(str(kind), f"{kind} {number}")
    recorder.close()
    assert "? refused: 11 0" in said


@pytest.mark.parametrize("started", [True, False])
def test_what_happens_in_days_before_the_start_fills_neither_memory_nor_the_folder(
    tmp_path, started
):
    folder = runs.create(tmp_path, "waiting")
    recorder = HubRecorder(folder, lambda: 0.0, lambda: Traffic(0, 0, 0, 0.0))
    for number in range(5_000):
        recorder(Note("joined", f"x{number}", "1 of 2"))
        recorder(Note("left", f"x{number}", "done"))
    if started:
        recorder(Note("started", "hub", "2 members"))
    recorder.close()
    told = list(runs.read_metrics(folder, "event"))
    assert len(told) == FIRST + NEWEST
    assert [event["about"] for event in told[:3]] == ["x0", "x0", "x1"]
    last = told[-1].get("about"), told[-1]["event"]
    assert last == ((None, "started") if started else ("x4999", "left"))
    left_out = 10_000 + started - FIRST - NEWEST
    assert told[FIRST]["reason"].endswith(f"({left_out:,} events before this one are left out)")
    assert sum("left out" in event["reason"] for event in told) == 1


def refusals(effects):
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Refuse)]


def test_a_member_cannot_pile_up_rounds_at_the_hub():
    room = Room(Mean(), "ab")
    most = AgreedDelay(1, Delay()).slack
    assert most == 8
    for round in range(most + 1):
        assert refusals(room.contribute("a", round, filled(1.0))) == []
    (refused,) = refusals(room.contribute("a", most + 1, filled(1.0)))[:1]
    assert (refused.code, refused.reason) == ("order", "round 9 is more than 8 ahead of 0")


def test_slack_grows_with_the_delay_and_has_an_end():
    assert AgreedDelay(1, Delay(20)).slack == 4 * 22
    assert AgreedDelay(1, Delay(10**9)).slack == MAX_AHEAD


def test_a_member_that_takes_no_replies_is_given_up(monkeypatch):
    monkeypatch.setattr(exchange, "BEHIND_BYTES", 4 * ELEMENTS * 10)
    room = Room(Mean(), "ab")
    now, gone = 0.0, []
    for round in range(20):
        room.contribute("a", round, filled(1.0), now)
        now += 10.0
        effects = room.hub.tick(now)
        assert closed(effects)[0].round == round or gone
        room.known += [e.message.checksum for e in effects if is_reply_to("a", e)]
        gone += [e for e in effects if isinstance(e, Note) and e.event == "gone"]
        if gone:
            break
    assert round == 10
    assert (gone[0].member, gone[0].reason) == (
        "b", "the member is more than 10 rounds behind",
    )  # fmt: skip
    assert closed(room.contribute("a", round + 1, filled(1.0), now))[0].members == ("a",)


def test_an_automatic_delay_does_not_grow_without_end_because_one_member_says_so():
    delay = AgreedDelay(5, Delay(is_measured=True))
    delay.agree(AUTO_ROUNDS - 1, [Wish("a", 10**9, 1.0, 0, 0.0)], 0.0)
    assert delay.delay + delay.local_steps == (MAX_IN_FLIGHT + 1) * 5
