"""Who may join a hub and with what, and how training begins: every refusal, and the base that all
start from."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hub_desk import ELEMENTS, ZEROS, Desk, raw, refusal, the
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import codecs
from edgetrain.exchange.hub.admission import AgreedModel
from edgetrain.exchange.hub.base_transfer import FirstBase
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.messages import PROTOCOL, Base, Beat, Leave, Reply, Start, Welcome
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.parts import BASE_PART_ELEMENTS, base_part, base_part_count, base_parts
from edgetrain.vectors.vector import checksum


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


def test_a_model_that_is_too_large_is_refused_before_its_base_is_asked_for():
    desk = Desk(2, most_elements=ELEMENTS)
    said = desk.join("a", elements=1 << 40)
    code, reason = refusal(desk, said, "a")
    assert code == "large"
    assert "1,099,511,627,776 parameters, 4,398,047 MB" in reason
    assert "hub.max_model_mb" in reason
    assert the(Welcome, desk.join("b")["b"]).upload, "the next one may bring its own"


def test_a_part_of_a_base_costs_the_same_however_many_there_are():
    """The part is refused or kept; no list is made of those to come."""
    member = MemberRecord("a", b"a", 0, 1.0, 0)
    first = FirstBase()
    first.expect_from(member)
    model = AgreedModel("model", 1 << 40)
    part = Base(0, 1 << 21, bytes(4 * BASE_PART_ELEMENTS))
    tracemalloc.start()
    try:
        assert first.accept_part(part, model) is None
        assert not first.is_whole(model)
        assert first.accept_part(part, model) == ("order", "base part 0 was not asked for")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.integers(1, 5 * BASE_PART_ELEMENTS))
def test_the_parts_of_a_base_are_its_slices(elements):
    parts = list(base_parts(elements))
    assert base_part_count(elements) == len(parts)
    assert [base_part(part, elements) for part in range(len(parts))] == parts
    beyond = base_part(len(parts), elements)
    assert beyond.start == beyond.stop == elements


@given(st.binary(max_size=40))
def test_whatever_a_model_is_said_to_be_the_refusal_can_be_sent_and_printed(junk):
    desk = Desk(2)
    mine = b"float32 5 weight\n"
    desk.join("a", model=layouts.digest(mine), payload=mine)
    said = desk.join("b", model="another", payload=b"float32 5 \x1b[2J\x00" + junk)
    code, _ = refusal(desk, said, "b")
    assert code == "model"
    assert desk.notes[-1].reason.isprintable()


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


def three_parts(base, parts=(0, 1, 2)):
    """These parts of a base of three."""
    cuts = [slice(i * BASE_PART_ELEMENTS, (i + 1) * BASE_PART_ELEMENTS) for i in parts]
    return [Base(i, 3, raw(base[here])) for i, here in zip(parts, cuts, strict=True)]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param([0, 1, 2, 0, 1, 2], id="whole and whole again"),
        pytest.param([0, 0, 1, 2], id="begun again"),
        pytest.param([1, 2, 0, 1, 2], id="the rest of the first, then all"),
    ],
)
@pytest.mark.parametrize("others", ["first", "last"])
def test_a_first_member_that_asked_twice_may_send_its_base_twice(sent, others):
    """Its connection was replaced, both of its joins came, and it heeds both answers."""
    base = np.arange(2 * BASE_PART_ELEMENTS + 3, dtype=np.float32)
    desk = Desk(2)
    for name in "aba" if others == "first" else "aa":
        said = desk.join(name, elements=base.size, session=ord(name))
        assert the(Welcome, said[name]).upload is (name == "a")
    messages = {"b": []}
    for message in three_parts(base, sent):
        for name, told in desk.tell("a", message).items():
            messages.setdefault(name, []).extend(told)
    if others == "last":
        messages["b"] = desk.join("b", elements=base.size, session=ord("b"))["b"]
    received = b"".join(bytes(m.payload) for m in messages["b"] if isinstance(m, Base))
    assert received == raw(base)
    assert desk.hub.started
    assert len(desk.hub.members) == 2, "nobody was refused"


def test_a_base_is_not_taken_more_often_than_it_was_asked_for():
    base = np.arange(2 * BASE_PART_ELEMENTS + 3, dtype=np.float32)
    desk = Desk(2)
    desk.join("a", elements=base.size, session=1)
    desk.join("a", elements=base.size, session=1)
    for message in 2 * three_parts(base):
        desk.tell("a", message)
    said = desk.tell("a", three_parts(base)[0])
    assert refusal(desk, said, "a")[0] == "order"


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


def test_a_stand_in_takes_no_place_of_a_member():
    desk = Desk(2, stand_in="servers").started()
    assert refusal(desk, desk.join("c"), "c") == ("full", "all 2 places are taken")
    assert the(Welcome, desk.join("servers")["servers"]).members == 2
    assert refusal(desk, desk.join("c"), "c")[0] == "full"
    desk.tell("b", Leave(""))
    assert the(Welcome, desk.join("c")["c"])
    assert refusal(desk, desk.join("d"), "d")[0] == "full"
    desk.tell("servers", Leave(""))
    assert refusal(desk, desk.join("d"), "d")[0] == "full"


def test_a_fleet_with_a_stand_in_begins_with_its_members():
    desk = Desk(2, stand_in="servers")
    desk.join("a")
    assert not desk.hub.started
    desk.join("b")
    desk.tell("a", Base(0, 1, raw(ZEROS)))
    assert desk.hub.started


def test_a_stand_in_that_ended_with_its_hub_is_not_waited_for():
    desk = Desk(2, stand_in="servers", lost_after_s=5.0, rejoin_s=60.0).started()
    desk.join("servers")
    state, desk.hub = desk.hub.state(), Desk(2, stand_in="servers", rejoin_s=60.0).hub
    desk.hub.restore(state, [], desk.now)
    desk.notes.clear()
    desk.tick(4.9)
    assert "servers" in desk.hub.present
    desk.tick(0.2)
    assert desk.events()[-1] == ("gone", "servers")
    assert desk.hub.present == ["a", "b"], "devices have hub.rejoin_s"


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
