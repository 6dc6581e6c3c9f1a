"""The small parts of chaos: schedules, ledgers, clocks, verdicts over lossy codecs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos import fleet, ledger, schedule
from chaos.clock import Clock
from chaos.fleet import Setting
from chaos.hub import from_json, to_json
from chaos.laws import Ended, Merging, Witness, judge
from chaos.ledger import End, Given, Ledger
from chaos.schedule import Happening
from chaos.trials import Schedules
from edgetrain import codecs
from edgetrain.errors import ConfigError
from edgetrain.exchange.hub.records import CountedOnce, Round
from edgetrain.exchange.messages import Base, Beat, Contribute, pack
from edgetrain.jobs import reading
from edgetrain.strategies.merging.rule import Mean
from edgetrain.training.hub import HubRequest
from edgetrain.vectors.vector import checksum


def test_kinds_by_name_and_the_near_miss():
    assert schedule.parse_kinds("") == schedule.KINDS
    assert schedule.parse_kinds("link , hub") == ("hub", "link")
    with pytest.raises(ConfigError, match="did you mean 'hub'"):
        schedule.parse_kinds("hubs")
    with pytest.raises(ConfigError, match="'frames' is for real processes"):
        schedule.parse_kinds("hub,frames")
    assert schedule.parse_kinds("", schedule.PROCESS_KINDS) == schedule.PROCESS_KINDS
    assert schedule.parse_kinds("frames,hub", schedule.PROCESS_KINDS) == ("hub", "frames")


def test_real_processes_have_a_share_of_the_time_by_the_patience_of_their_hub():
    setting = Setting(reading.load(None, ["lost_after_s=2", "members=3"]))
    drawn = Schedules(4.0, 30).of(7, setting)
    simulated = schedule.draw(7, 3, 40.0, 30)
    assert drawn == tuple(happening.shrunk(0.1) for happening in simulated)
    assert max(happening.at_s for happening in drawn) <= 4.0
    assert Happening(10.0, "link", 4.0, (1,)).shrunk(0.1) == Happening(1.0, "link", 0.4, (1,))
    assert fleet.share_of(reading.load(None, ["lost_after_s=600"])) == 1.0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["on_disk_full=go on"], "journal, which then has gaps"),
        (["strategy=sync-sgd"], "cannot join"),
        (["merge=krum(1)", "members=5"], "leave it at 'mean'"),
        (["secure=true"], "leave secure out"),
        (["privacy=member", "privacy.where=hub"], "noise to the members"),
    ],
)
def test_what_cannot_be_judged_is_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        Setting(reading.load(None, words))


@pytest.mark.parametrize("journal", [True, False, Path("elsewhere")])
def test_a_hub_process_is_told_its_whole_request(journal):
    job = reading.load(None, ["members=3", "strategy=dga", "delay=auto"])
    request = HubRequest(
        job, "tcp://lo:7", True, Path("keys"), True, journal, Path("runs/one"), Path("elsewhere")
    )
    assert from_json(to_json(request)) == request
    assert from_json(to_json(HubRequest(job, "tcp://*:0"))) == HubRequest(job, "tcp://*:0")


# -- ledgers and clocks ---------------------------------------------------------------------------

SENT = (
    Base(0, 2, b"ab"),
    Base(1, 2, b"c"),
    Beat(),
    Contribute(7, 0, 2, 1.0, 0, 0, 0, b"defg"),
    Contribute(7, 1, 2, 1.0, 0, 0, 0, b""),
)
KEPT = [
    Given(None, 0, b"ab"),
    Given(None, 1, b"c"),
    Given(7),
    Given(7, 0, b"defg"),
    Given(7, 1, b""),
]


def write(path):
    found = Ledger(path)
    for message in SENT:
        if message == SENT[3]:
            found.promise(7)
        found.note(pack(message))
    found.close()


def test_a_ledger_has_what_was_given_and_nothing_else(tmp_path):
    write(tmp_path / "gave")
    assert list(ledger.read(tmp_path / "gave")) == KEPT
    assert list(ledger.read(tmp_path / "none")) == []


@given(st.data())
def test_a_ledger_that_was_cut_short_has_what_is_whole(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("ledger") / "gave"
    write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    found = list(ledger.read(path))
    assert found == KEPT[: len(found)]
    assert len(found) < len(KEPT)


def test_an_end_is_there_or_not(tmp_path):
    assert End.read(tmp_path / "end") is None
    End(3, "0f").write(tmp_path / "end")
    assert End.read(tmp_path / "end") == End(3, "0f")


def test_a_clock_jumps_for_all_who_look_at_it_and_for_who_comes_after(tmp_path):
    ours, theirs = Clock(tmp_path / "clock"), Clock(tmp_path / "clock")
    before = theirs()
    ours.jump(1000.0)
    ours.jump(500.0)
    assert 1500 <= theirs() - before < 1600
    assert 1500 <= Clock(tmp_path / "clock")() - before < 1600
    ours.close()


# -- verdicts over lossy codecs -------------------------------------------------------------------

SIZE = 300
INT8 = Merging(Mean(), codecs.parse("int8"), codecs.parse("topk(0.1)"))


def lossy_fleet():
    """Three rounds of two members as a hub merges them, and what is known of them then."""
    rng = np.random.default_rng(0)
    witness, rounds = Witness(), []
    base = initial = rng.standard_normal(SIZE, np.float32)
    memory = codecs.memory(INT8.reply_codec, SIZE)
    for round in range(3):
        given = {name: INT8.codec.encode(rng.standard_normal(SIZE, np.float32)) for name in "ab"}
        for name, payloads in given.items():
            witness.saw(name, round, 0, payloads[0])
        merged = np.zeros(SIZE, np.float32)
        for payloads in given.values():
            INT8.codec.add(payloads[0], 1.0, merged)
        (reply,) = memory.encode(merged * np.float32(0.5))
        told = np.empty(SIZE, np.float32)
        INT8.reply_codec.decode(reply, told)
        base = base + told
        counted = tuple(CountedOnce(name, round, 1.0) for name in given)
        rounds.append(Round(round, counted, 0, 0, 0, (bytes(reply),)))
    return initial, witness, rounds, {"a": Ended(3, f"{checksum(base):016x}")}


def test_lossy_rounds_are_merged_again_with_what_replies_left_out():
    initial, witness, rounds, ended = lossy_fleet()
    assert judge(rounds, witness, INT8, initial, ended, "ab") == []
    other = replace(rounds[1], reply=rounds[0].reply)
    broken = judge([rounds[0], other, rounds[2]], witness, INT8, initial, ended, "ab")
    assert broken == ["round 1: merged again, its reply is another"]


def test_a_contribution_that_is_not_whole_does_not_count():
    initial, witness, rounds, ended = lossy_fleet()
    torn = Witness()
    for name in "ab":
        for round in range(3):
            (payload,) = witness.payloads(name, round)
            torn.saw(name, round, 0, payload[: len(payload) - (round == 2)])
    broken = judge(rounds, torn, INT8, initial, ended, "ab")
    assert "round 2 counts what is no whole contribution" in broken


def test_what_was_promised_has_to_count_sent_or_not():
    initial, witness, rounds, ended = lossy_fleet()
    witness.promised("b", 3)
    broken = judge(rounds, witness, INT8, initial, ended, "ab")
    assert broken == ["b was there all the time, and its rounds [3] are lost"]
    assert judge(rounds, witness, INT8, initial, ended, "a") == []
