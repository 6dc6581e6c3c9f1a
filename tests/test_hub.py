"""The hub's protocol: every refusal, deadline and departure, with no socket and no clock."""

from __future__ import annotations

import gc
import random
import tracemalloc

import numpy as np
import pytest
from fleet import Fleet
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import codecs, exchange, pace
from edgetrain import hub as hub_module
from edgetrain import layout as layouts
from edgetrain.checksum import checksum
from edgetrain.effects import Closed, Note, Send
from edgetrain.hub import Hub
from edgetrain.merge import Mean
from edgetrain.messages import (
    CODES,
    PROTOCOL,
    Base,
    Beat,
    Contribute,
    Join,
    Leave,
    Refuse,
    Reply,
    Resume,
    Start,
    Welcome,
    pack,
)
from edgetrain.parts import BASE_PART_ELEMENTS
from edgetrain.roster import AWAY
from edgetrain.terms import Policy, Terms

ELEMENTS = 5
ZEROS = np.zeros(ELEMENTS, np.float32)


def raw(vector) -> bytes:
    return np.asarray(vector, np.float32).tobytes()


class Desk:
    """A hub and what it said; members are called by the letter that is also their address."""

    def __init__(
        self,
        members=2,
        *,
        gradient=False,
        weighted=False,
        codec=None,
        reply_codec=None,
        delay=0,
        **policy,
    ):
        terms = Terms(
            "sync-sgd" if gradient else "dga",
            "gradient" if gradient else "displacement",
            weighted, 1, delay, "job-a",
        )  # fmt: skip
        codec = codec or codecs.Dense()
        reply_codec = reply_codec or codecs.Dense()
        self.hub = Hub(terms, Policy(members, **policy), Mean(not gradient), codec, reply_codec)
        self.now = 0.0
        self.said: dict[str, list] = {}
        self.notes: list[Note] = []
        self.closed: list[Closed] = []

    def take(self, effects):
        for effect in effects:
            if isinstance(effect, Send):
                pack(effect.message)  # all that a hub says can be packed
                self.said.setdefault(effect.to.decode(), []).append(effect.message)
            elif isinstance(effect, Note):
                self.notes.append(effect)
            elif isinstance(effect, Closed):
                self.closed.append(effect)

    def tell(self, who, message):
        """What the hub answers to everyone."""
        self.said = {}
        self.take(self.hub.handle(who.encode(), message, self.now))
        return self.said

    def tick(self, seconds):
        self.now += seconds
        self.said = {}
        self.take(self.hub.tick(self.now))
        return self.said

    def join(self, who, **other):
        asked = {
            "protocol": PROTOCOL, "job": "job-a", "model": "model", "elements": ELEMENTS,
            "name": who, "weight": 1.0, "checksum": checksum(ZEROS),
        }  # fmt: skip
        return self.tell(who, Join(**(asked | other)))

    def give(self, who, round, vector=ZEROS, **other):
        given = {
            "round": round, "part": 0, "parts": 1, "weight": 1.0, "applied": 0,
            "checksum": checksum(ZEROS), "wanted_delay": 0, "payload": raw(vector),
        }  # fmt: skip
        return self.tell(who, Contribute(**(given | other)))

    def started(self, names="ab", **other):
        for name in names:
            self.join(name, **other)
        self.tell(names[0], Base(0, 1, raw(ZEROS)))
        assert self.hub.started
        self.notes.clear()
        return self

    def events(self):
        return [(note.event, note.member) for note in self.notes]


def the(kind, messages):
    (found,) = [message for message in messages if isinstance(message, kind)]
    return found


def refusal(desk, said, who):
    """(code, reason); and the code is one of the documented ones."""
    found = the(Refuse, said[who])
    assert found.code in CODES
    return found.code, found.reason


# -- joining --------------------------------------------------------------------------------------


def test_the_first_member_is_asked_for_its_parameters_and_all_start_from_them():
    desk = Desk(2)
    first = the(Welcome, desk.join("a")["a"])
    assert (first.upload, first.index, first.members) == (True, 0, 2)
    second = the(Welcome, desk.join("b", checksum=1)["b"])
    assert (second.upload, second.index) == (False, 1)
    base = np.arange(ELEMENTS, dtype=np.float32)
    said = desk.tell("a", Base(0, 1, raw(base)))
    assert not the(Start, said["b"]).keep
    assert bytes(the(Base, said["b"]).payload) == raw(base)
    assert the(Start, said["b"]).checksum == checksum(base)


def test_equal_parameters_are_not_sent_again():
    desk = Desk(2)
    desk.join("a")
    desk.join("b")
    said = desk.tell("a", Base(0, 1, raw(ZEROS)))
    assert [type(m) for m in said["b"]] == [Start]
    assert the(Start, said["b"]).keep


def test_a_base_of_several_parts_arrives_whole():
    elements = 2 * BASE_PART_ELEMENTS + 3
    base = np.arange(elements, dtype=np.float32)
    desk = Desk(2)
    for name in "ab":
        desk.join(name, elements=elements, checksum=0)
    for part in range(3):
        here = slice(part * BASE_PART_ELEMENTS, (part + 1) * BASE_PART_ELEMENTS)
        said = desk.tell("a", Base(part, 3, raw(base[here])))
    received = b"".join(bytes(m.payload) for m in said["b"] if isinstance(m, Base))
    assert received == raw(base)
    assert the(Start, said["b"]).checksum == checksum(base)


def test_names_are_chosen_where_none_is_asked_for_and_free_again_afterwards():
    desk = Desk(3)
    assert [the(Welcome, desk.join(c, name="")[c]).name for c in "abc"] == ["m0", "m1", "m2"]
    desk.tell("b", Leave(""))
    assert the(Welcome, desk.join("d", name="")["d"]).name == "m1"


REFUSED = {
    "protocol": ({"protocol": PROTOCOL + 1}, [str(PROTOCOL), str(PROTOCOL + 1)]),
    "job": ({"job": "job-b"}, ["job-a", "job-b"]),
    "model": ({"model": "other", "elements": 1234}, ["model", "other", "5", "1,234"]),
    "name": ({"name": "a"}, ["'a'"]),
}


@pytest.mark.parametrize("code", REFUSED)
def test_who_does_not_fit_is_refused_with_both_values(code):
    asked, values = REFUSED[code]
    desk = Desk(3)
    desk.join("a")
    found, reason = refusal(desk, desk.join("x", **asked), "x")
    assert found == code
    assert all(value in reason for value in values)
    assert desk.hub.present == ["a"]
    assert desk.events()[-1] == ("refused", asked.get("name", "x"))


TENSORS = layouts.describe([("w", (2, 2), "float32"), ("b", (1,), "float32")])
TOLD = {"model": layouts.digest(TENSORS), "payload": TENSORS}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"payload": b""}, "'low-rank(1)' depends on the shapes"),
        ({"payload": b"float32 2x2 w"}, "does not end"),
        ({"model": "0" * 32}, "0" * 12),
        ({"elements": 6}, "6"),
        ({"payload": layouts.describe([("w", (5,), "float32")])}, layouts.digest(TENSORS)[:12]),
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_is_refused_and_changes_nothing(asked, reason):
    desk = Desk(2, codec=codecs.parse("low-rank(1)"))
    code, said = refusal(desk, desk.join("a", **(TOLD | asked)), "a")
    assert code == "layout"
    assert reason in said
    assert desk.hub.present == []
    assert the(Welcome, desk.join("b", **TOLD)["b"]).codec == "low-rank(1)"


def test_codecs_that_look_at_tensors_are_bound_to_what_the_first_member_tells():
    desk = Desk(1, codec=codecs.parse("small(1): fp32; low-rank(1)")).started("a", **TOLD)
    codec = codecs.parse("small(1): fp32; low-rank(1)").bind(layouts.read(TENSORS, ELEMENTS))
    vector = np.array([1, 2, 2, 4, 9], np.float32)
    said = desk.give("a", 0, payload=bytes(codec.encode(vector)[0]))
    np.testing.assert_allclose(np.frombuffer(the(Reply, said["a"]).payload, np.float32), vector)


def test_a_job_whose_members_all_left_takes_another_model():
    desk = Desk(2, codec=codecs.parse("low-rank(1)"))
    desk.join("a", **TOLD)
    desk.tell("a", Leave(""))
    other = layouts.describe([("v", (3, 4), "float32")])
    said = desk.join("b", model=layouts.digest(other), payload=other, elements=12)
    assert the(Welcome, said["b"]).upload


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


def test_equal_models_of_other_length_do_not_fit_either():
    desk = Desk(2)
    desk.join("a")
    assert refusal(desk, desk.join("b", elements=ELEMENTS + 1), "b")[0] == "model"


def test_a_member_with_its_own_loop_needs_no_job():
    desk = Desk(1)
    assert the(Welcome, desk.join("a", job="")["a"])


def test_full():
    desk = Desk(1)
    desk.join("a")
    assert refusal(desk, desk.join("b"), "b") == ("full", "all 1 places are taken")


def test_joining_twice_over_one_connection_names_the_member_that_is_there():
    desk = Desk(3)
    desk.join("a", name="")
    code, reason = refusal(desk, desk.join("a", name=""), "a")
    assert code == "name"
    assert "'m0'" in reason


def test_gradient_strategies_take_nobody_in_after_the_start():
    desk = Desk(2, gradient=True).started()
    desk.give("a", 0)
    desk.give("b", 0)
    desk.tell("b", Leave("done"))
    code, reason = refusal(desk, desk.join("c"), "c")
    assert code == "started"
    assert "sync-sgd is at round 1" in reason


def test_ended():
    desk = Desk(1).started("a")
    desk.give("a", 0)
    desk.tell("a", Leave("done"))
    assert desk.hub.finished
    assert refusal(desk, desk.join("b"), "b") == ("ended", "the job is over after 1 rounds")


@pytest.mark.parametrize("message", [Beat(), Leave("x"), Base(0, 1, b""), Start(0, 0, 0, 0, True)])
def test_strangers_are_told_to_join(message):
    desk = Desk(2).started()
    assert refusal(desk, desk.tell("z", message), "z")[0] == "unknown"
    assert desk.hub.present == ["a", "b"]


# -- order and size -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [Base(1, 1, raw(ZEROS)), Base(0, 2, raw(ZEROS)), Base(0, 1, raw(ZEROS)[1:]), Base(0, 1, b"")],
)
def test_a_wrong_base_costs_the_uploader_its_place_and_the_next_one_is_asked(message):
    desk = Desk(2)
    desk.join("a")
    desk.join("b")
    said = desk.tell("a", message)
    assert refusal(desk, said, "a")[0] in ("order", "size")
    assert the(Welcome, said["b"]).upload
    desk.join("c")
    assert the(Start, desk.tell("b", Base(0, 1, raw(ZEROS)))["c"])


def test_a_base_that_nobody_asked_for_is_out_of_order():
    desk = Desk(3)
    desk.join("a")
    desk.join("b")
    assert refusal(desk, desk.tell("b", Base(0, 1, raw(ZEROS))), "b")[0] == "order"


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
    for attempt in range(hub_module.MOST_STRAYS):
        assert refusal(desk, desk.give("b", 2), "b")[0] == "unknown"
        back(desk, "b", attempt=attempt + 1)
    assert refusal(desk, desk.give("b", 2), "b")[0] == "order"
    assert desk.hub.present == ["a"]


def test_a_gap_is_forgotten_once_something_whole_has_come():
    desk = with_session()
    for round in range(2 * hub_module.MOST_STRAYS):
        assert refusal(desk, desk.give("b", round + 1), "b")[0] == "unknown"
        back(desk, "b", oldest=round, submitted=round, applied=round)
        desk.give("a", round, applied=round)
        desk.give("b", round, applied=round)
        assert desk.hub.round == round + 1


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
    assert not desk.hub._rounds


def test_bad_payloads_only_leave_nothing_behind():
    desk = Desk(2).started()
    desk.give("a", 0, payload=b"x")
    said = desk.give("b", 0, payload=b"y")
    assert refusal(desk, said, "a")[0] == refusal(desk, said, "b")[0] == "payload"
    assert desk.closed == []
    assert desk.hub.finished
    assert not desk.hub._rounds


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
        desk.give("b", round, applied=round, checksum=desk.hub._checksums[round])
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


# -- rounds ---------------------------------------------------------------------------------------


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
    known = {"applied": 1, "checksum": desk.hub._checksums.get(1, 7)}
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
    after = {"applied": 1, "checksum": desk.hub._checksums[1]}
    desk.give("a", 1, np.full(ELEMENTS, 3), **after)
    assert len(desk.closed) == 1, "b still owes its own round 1"
    said = desk.give("b", 1, np.full(ELEMENTS, 4), **after)
    np.testing.assert_array_equal(np.frombuffer(the(Reply, said["a"]).payload, np.float32), 4)
    assert desk.closed[1].members == ("a", "b", "b")
    np.testing.assert_array_equal(desk.hub.base, 5)
    assert not desk.hub._rounds


def test_a_late_gradient_is_dropped():
    desk = Desk(2, gradient=True, deadline_s=10).started()
    desk.give("a", 0)
    desk.tick(10)
    desk.give("b", 0, np.full(ELEMENTS, 5))
    assert "dropped" in desk.notes[-1].reason
    assert not desk.hub._rounds
    desk.give("a", 1, np.full(ELEMENTS, 1))
    said = desk.give("b", 1, np.full(ELEMENTS, 3))
    assert np.frombuffer(the(Reply, said["a"]).payload, np.float32)[0] == 2


def test_members_without_a_round_trip_yet_do_not_shorten_an_automatic_delay():
    desk = Desk(2, delay=None).started()
    for round in range(pace.AUTO_ROUNDS):
        for name, wanted in (("a", 3), ("b", 17)):
            said = desk.give(
                name, round, applied=round, checksum=desk.hub._checksums[round], wanted_delay=wanted
            )
        last = round == pace.AUTO_ROUNDS - 1
        assert the(Reply, said["a"]).delay == (17 if last else 0)


# -- going and coming -----------------------------------------------------------------------------


def test_unreachable_then_gone():
    desk = Desk(2, gone_s=5).started()
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
    desk = Desk(2, gone_s=5).started()
    desk.take(desk.hub.unreachable(b"b", desk.now))
    desk.tick(4)
    desk.tell("b", Beat())
    desk.tick(4)
    assert desk.hub.present == ["a", "b"]


def test_strangers_cannot_be_unreachable():
    assert Desk(2).started().hub.unreachable(b"z", 0.0) == []


def test_what_a_member_gave_before_it_went_counts():
    desk = Desk(2, gone_s=5).started()
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


@pytest.mark.parametrize("sent", [0, 1])
def test_the_uploader_dies_before_the_start(sent):
    desk = Desk(2)
    desk.join("a")
    for _ in range(sent):
        desk.tell("a", Base(0, 1, raw(ZEROS)))
    desk.take(desk.hub.unreachable(b"a", desk.now))
    desk.join("b")
    if not sent:
        assert not desk.hub.started
        said = desk.tick(6)
        assert the(Welcome, said["b"]).upload
        desk.tell("b", Base(0, 1, raw(ZEROS)))
        said = desk.join("c")
        assert the(Start, said["b"])
    assert desk.hub.started


def test_everyone_leaves_before_the_start_and_another_model_may_come():
    desk = Desk(2)
    desk.join("a")
    desk.tell("a", Leave(""))
    assert not desk.hub.finished
    assert the(Welcome, desk.join("b", model="other", elements=9)["b"]).upload


def test_beats_go_to_everyone_once_a_beat():
    desk = Desk(3, beat_s=1.0)
    desk.join("a")
    desk.join("b")
    assert desk.tick(0.1) == {"a": [Beat()], "b": [Beat()]}
    assert desk.tick(0.5) == {}
    assert desk.tick(0.5) == {"a": [Beat()], "b": [Beat()]}


def test_a_newcomer_starts_from_the_present_base_at_the_next_round():
    desk = Desk(3)
    desk.hub.policy = Policy(2)
    desk.started()
    desk.hub.policy = Policy(3)
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
        said = desk.give(name, 2, applied=1, checksum=desk.hub._checksums[1])
    assert desk.closed[-1].members == ("a", "b", "c")


def test_the_base_sent_to_a_newcomer_is_its_own_copy():
    desk = Desk(3)
    desk.hub.policy = Policy(1)
    desk.started("a")
    desk.hub.policy = Policy(2)
    desk.give("a", 0, np.full(ELEMENTS, 1))
    sent = the(Base, desk.join("b")["b"]).payload
    for name in "ab":
        desk.give(name, 1, np.full(ELEMENTS, 1), applied=1, checksum=desk.hub._checksums[1])
    np.testing.assert_array_equal(np.frombuffer(sent, np.float32), 1)


def test_a_member_that_comes_back_is_a_newcomer():
    desk = Desk(2, gone_s=5).started()
    desk.take(desk.hub.unreachable(b"b", desk.now))
    desk.tick(6)
    desk.give("a", 0, np.full(ELEMENTS, 1))
    assert refusal(desk, desk.tell("b", Beat()), "b")[0] == "unknown"
    said = desk.join("b", checksum=desk.hub._checksums[1])
    assert the(Start, said["b"]).keep
    assert the(Start, said["b"]).applied == 1


def test_a_newcomer_gets_an_empty_reply_to_a_round_that_nobody_can_give_to_any_more():
    desk = Desk(2)
    desk.hub.policy = Policy(1)
    desk.started("a")
    desk.hub.policy = Policy(2)
    desk.give("a", 0, np.full(ELEMENTS, 1))
    desk.hub._peers[b"a"].next_round = 2  # as if it had given to round 1
    start = the(Start, desk.join("b")["b"])
    assert (start.applied, start.round) == (1, 2)
    desk.hub._peers[b"a"].next_round = 1
    said = desk.give("a", 1, payload=b"x", applied=1, checksum=desk.hub._checksums[1])
    assert refusal(desk, said, "a")[0] == "payload"
    reply = the(Reply, said["b"])
    assert (reply.round, reply.members) == (1, 0)
    np.testing.assert_array_equal(np.frombuffer(reply.payload, np.float32), 0)
    assert desk.closed[-1].members == ()
    assert reply.checksum == checksum(desk.hub.base)
    desk.give("b", 2, np.full(ELEMENTS, 1), applied=2, checksum=reply.checksum)
    assert desk.closed[-1].members == ("b",)


def lost(desk, *names):
    """These members cannot be reached any more, for as long as the hub has patience."""
    for name in names:
        desk.take(desk.hub.unreachable(name.encode(), desk.now))
    desk.tick(desk.hub.policy.gone_s)


def test_a_hub_that_has_lost_everyone_waits_for_them():
    desk = with_session(return_s=30)
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
    desk = Desk(2, gone_s=50).started()
    desk.give("b", 0)
    desk.take(desk.hub.unreachable(b"b", desk.now))
    start = the(Start, desk.join("z", name="b")["z"])
    assert start.round == 1, "the one before has given to round 0"
    assert desk.events() == [("late", "b"), ("gone", "b"), ("joined", "b")]
    assert desk.hub.present == ["a", "b"]


RESUME = {
    "protocol": PROTOCOL, "model": "model", "elements": ELEMENTS, "name": "b", "session": 7,
    "applied": 0, "checksum": 0, "submitted": 1, "oldest": 0, "attempt": 1,
}  # fmt: skip


def back(desk, who="z", **other):
    return desk.tell(who, Resume(**(RESUME | other)))


def with_session(**policy):
    desk = Desk(2, **policy)
    desk.join("a")
    desk.join("b", session=7)
    desk.tell("a", Base(0, 1, raw(ZEROS)))
    desk.notes.clear()
    return desk


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
    desk = with_session(gone_s=1)
    desk.take(desk.hub.unreachable(b"b", desk.now))
    desk.tick(2)
    for round in range(3):
        known = {"applied": round, "checksum": desk.hub._checksums[round]}
        desk.give("a", round, np.full(ELEMENTS, 1), **known)
    said = back(desk, checksum=checksum(ZEROS))
    start = the(Start, said["z"])
    assert (start.applied, start.round, start.keep, start.resend) == (3, 3, False, 0)
    np.testing.assert_array_equal(np.frombuffer(the(Base, said["z"]).payload, np.float32), 3)
    desk.give("z", 0, np.full(ELEMENTS, 8))
    assert desk.notes[-1].reason == "round 0 had closed; counts in 3"
    known = {"applied": 3, "checksum": desk.hub._checksums[3]}
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
    desk = with_session(gone_s=1)
    for i in range(30):
        desk.tell("b", Leave(""))
        desk.join(f"c{i}", session=100 + i)
        desk.take(desk.hub.unreachable(f"c{i}".encode(), desk.now))
        desk.tick(2)
    assert len(desk.hub._away) == 2 * AWAY


def test_finished_when_the_last_one_is_gone():
    desk = Desk(2, gone_s=5).started()
    desk.tell("a", Leave("done"))
    assert not desk.hub.finished
    desk.take(desk.hub.unreachable(b"b", desk.now))
    desk.tick(6)
    assert not desk.hub.finished
    desk.tick(desk.hub.policy.return_s)
    assert desk.hub.finished
    assert not desk.hub._peers


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_does_not_grow_with_rounds_or_members(monkeypatch, gradient):
    monkeypatch.setattr(exchange, "REMEMBERED", 16)
    desk = Desk(2, gradient=gradient, deadline_s=1.0).started("ab")
    sums = {}

    def rounds(first, last):
        for round in range(first, last):
            sums[round] = desk.hub._checksums.get(round, round + 1)
            desk.give("a", round, applied=round, checksum=sums[round])
            if round % 2:
                desk.tick(1.0)
            desk.give("b", round, applied=max(0, round - 3), checksum=sums[max(0, round - 3)])
            desk.notes.clear()
            desk.closed.clear()

    rounds(0, 50)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    rounds(50, 250)
    sums.clear()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert desk.hub.round >= 200
    assert len(desk.hub._checksums) <= 17
    assert len(desk.hub._rounds) <= 1
    assert grown < 20_000


def test_members_that_name_old_checksums_leave_nothing_behind(monkeypatch):
    monkeypatch.setattr(exchange, "REMEMBERED", 8)
    desk = Desk(2, gradient=True, deadline_s=1.0).started("ab")
    for round in range(60):
        desk.give("a", round, applied=round, checksum=round or checksum(ZEROS))
        desk.tick(1.0)
    for round in range(60):
        desk.give("b", round, applied=round, checksum=round or checksum(ZEROS))
    assert desk.hub.present == ["a", "b"]
    assert len(desk.hub._checksums) <= 9


def test_members_that_come_and_go_leave_nothing_behind():
    desk = Desk(2).started("ab")
    for i in range(100):
        desk.tell("b", Leave(""))
        desk.join("b")
        assert desk.hub.present == ["a", "b"]
        desk.give("a", i, applied=i, checksum=desk.hub._checksums[i])
        desk.give("b", i, applied=i, checksum=desk.hub._checksums[i])
    assert len(desk.hub._peers) == 2
    assert desk.hub.round == 100


# -- anything, in any order -----------------------------------------------------------------------

FIELDS = {"round": st.integers(0, 3), "part": st.integers(0, 1), "applied": st.integers(0, 3)}
ACTIONS = st.one_of(
    st.tuples(st.just("join"), st.sampled_from("abc"), st.sampled_from(["a", "b", ""])),
    st.tuples(st.just("base"), st.sampled_from("abc"), st.sampled_from([raw(ZEROS), b"", b"x"])),
    st.tuples(st.just("give"), st.sampled_from("abc"), st.sampled_from([raw(ZEROS), b"x" * 19])),
    st.tuples(st.just("wild"), st.sampled_from("abcz"), st.fixed_dictionaries(FIELDS)),
    st.tuples(st.just("leave"), st.sampled_from("abc"), st.none()),
    st.tuples(st.just("beat"), st.sampled_from("abcz"), st.none()),
    st.tuples(st.just("lost"), st.sampled_from("abcz"), st.none()),
    st.tuples(st.just("tick"), st.none(), st.floats(0, 4)),
)


@given(st.lists(ACTIONS, max_size=40), st.booleans(), st.integers(1, 3))
def test_whatever_arrives_the_hub_stands_and_keeps_its_books(actions, gradient, quorum):
    desk = Desk(2, gradient=gradient, quorum=quorum, deadline_s=3.0, gone_s=2.0)
    for what, who, extra in actions:
        before = desk.hub.round
        closed = len(desk.closed)
        match what:
            case "join":
                desk.join(who, name=extra)
            case "base":
                desk.tell(who, Base(0, 1, extra))
            case "give":
                peer = desk.hub._peers.get(who.encode())
                due = peer.next_round if peer else 0
                known = desk.hub._checksums.get(desk.hub.round, 5)
                desk.give(who, due, payload=extra, applied=desk.hub.round, checksum=known)
            case "wild":
                desk.give(who, **extra)
            case "leave":
                desk.tell(who, Leave("done"))
            case "beat":
                desk.tell(who, Beat())
            case "lost":
                desk.take(desk.hub.unreachable(who.encode(), desk.now))
            case "tick":
                desk.tick(extra)
        assert desk.hub.round - before == len(desk.closed) - closed
        assert [c.round for c in desk.closed] == list(range(desk.hub.round))
        assert len(desk.hub.present) == len(desk.hub._peers) <= 2
        assert all(round >= desk.hub.round for round, _ in desk.hub._rounds)
        assert all(entry.contributions for _, entry in desk.hub._rounds)


@given(
    st.integers(2, 5), st.integers(0, 6), st.integers(0, 200), st.integers(0, 2**32),
)  # fmt: skip
def test_one_bad_payload_at_any_time_costs_one_member(members, delay, when, seed):
    fleet = Fleet("dga", members, 1, delay, 12, rng=random.Random(seed))
    spoilt = []

    def maybe_spoil():
        member = fleet.members[-1]
        for frames in member.to_hub:
            if frames[0] == Contribute.kind and len(member.history) * members > when and not spoilt:
                frames[2] = b"x"
                spoilt.append(frames)

    fleet.run(maybe_spoil)
    good = fleet.members[:-1] if spoilt else fleet.members
    assert [m.state for m in good] == ["done"] * len(good)
    assert len({m.params.tobytes() for m in good}) == 1
    assert not fleet.hub._rounds
    if spoilt:
        expelled = [note for note in fleet.notes if note.event == "refused"]
        assert expelled[0].member == f"m{members - 1}"
        assert expelled[0].reason.startswith("payload: ")
