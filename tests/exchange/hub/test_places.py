"""The hub's map: who can connect to whom, who reduces what, and that everyone knows it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgetrain.exchange.further_messages import Reached
from edgetrain.exchange.hub.places import LEAD, TRY_S, Reach
from edgetrain.exchange.keys.pairs import spell
from edgetrain.exchange.messages import CLIENT, Base, Join, Leave, Map, Resume, Start
from edgetrain.exchange.transport import owned
from tests.fakes.hub_desk import ELEMENTS, ZEROS, Desk, raw, refusal, the

RANGES = 4


def share(reach: Reach):
    """All ranges at the first that everyone reached; at the hub if there is none."""
    return dict.fromkeys(reach.reached_by_all()[:1] or (LEAD,), (0, RANGES))


def address(name):
    return f"tcp://10.0.0.{ord(name)}:5556"


def desk(members=3, **other):
    return Desk(members, assign=share, **other)


def joined(names="abc", clients=()):
    found = desk(len(names))
    for number, name in enumerate(names, 1):
        where = CLIENT if name in clients else address(name)
        found.join(name, address=where, session=number)
    return found


def answer(found, who, number, reached):
    return found.tell(who, Reached(number, tuple((name, 20) for name in reached)))


def test_members_try_each_other_once_all_are_there_and_training_waits_for_that():
    found = desk()
    for number, name in enumerate("ab", 1):
        assert not any(
            isinstance(m, Map)
            for said in found.join(name, address=address(name), session=number).values()
            for m in said
        )
    said = found.join("c", address=CLIENT, session=3)
    tried = [the(Map, said[name]) for name in "abc"]
    assert [map.name for map in tried] == list("abc")
    assert len({map.rows for map in tried}) == 1
    assert tried[0].trying
    assert tried[0].number == 1
    assert [place[:3] for place in tried[0].peers] == [
        ("a", address("a"), ""), ("b", address("b"), ""), ("c", "", ""),
    ]  # fmt: skip
    found.tell("a", Base(0, 1, raw(ZEROS)))
    assert not found.hub.started
    answer(found, "a", 1, "b")
    answer(found, "c", 1, "ab")
    assert not found.hub.started
    said = answer(found, "b", 1, "")
    for name in "abc":
        settled = the(Map, said[name])
        assert (settled.number, settled.trying, settled.ticket) == (2, False, tried[0].ticket)
        assert [place[3:] for place in settled.peers] == [(0, 0), (0, RANGES), (0, 0)]
        assert said[name].index(settled) < said[name].index(the(Start, said[name]))
    assert found.hub.part.places.reach.round_trip_s("a", "b") == 20e-4


def test_the_hub_reduces_what_nobody_else_can():
    found = joined(clients="abc")
    for name in "abc":
        said = answer(found, name, 1, "")
    settled = the(Map, said["a"])
    assert (settled.first, settled.end) == (0, RANGES)
    assert {place[3:] for place in settled.peers} == {(0, 0)}


def test_a_member_that_says_nothing_is_waited_for_as_long_as_tries_take():
    found = joined()
    found.tell("a", Base(0, 1, raw(ZEROS)))
    answer(found, "a", 1, "bc")
    answer(found, "b", 1, "ac")
    assert not any(isinstance(m, Map) for m in found.tick(TRY_S - 1).get("a", []))
    assert not found.hub.started
    assert not the(Map, found.tick(2)["a"]).trying
    assert found.hub.started
    assert ("map", "hub") in found.events()


def test_who_does_neither_dial_nor_listen_is_refused_by_name():
    found = desk()
    assert refusal(found, found.join("a"), "a")[0] == "peers"


def test_an_answer_to_an_earlier_map_counts_for_nothing():
    found = joined()
    found.tell("c", Leave(""))
    said = found.join("d", address=address("d"), session=9)
    again = the(Map, said["a"])
    assert again.trying
    assert [place.name for place in again.peers] == ["a", "b", "d"]
    for name in "abd":
        said = answer(found, name, 1, "abd".replace(name, ""))
    assert not said
    assert not found.hub.part.places.is_settled


def test_who_joins_again_while_they_try_gets_the_map_again():
    found = joined()
    said = found.join("b", address=address("b"), session=2)
    assert the(Map, said["b"]).trying
    assert "a" not in said
    said = found.join("b", address="tcp://10.0.0.9:1", session=2)
    assert the(Map, said["a"]).number == 2


def started(names="abc"):
    found = joined(names)
    found.tell("a", Base(0, 1, raw(ZEROS)))
    for name in names:
        answer(found, name, 1, names.replace(name, ""))
    assert found.hub.started
    return found


def test_all_learn_who_left_who_is_away_and_who_came():
    found = started()
    found.tell("c", Leave("done"))
    gone = the(Map, found.tick(1)["a"])
    assert [place.name for place in gone.peers] == ["a", "b"]
    said = found.join("d", address=address("d"), session=7)
    assert [place.name for place in the(Map, said["b"]).peers] == ["a", "b", "d"]
    found.take(found.hub.unreachable(b"b", found.now))
    away = the(Map, found.tick(6)["a"])
    assert [(place.name, place.address) for place in away.peers] == [
        ("a", address("a")), ("d", address("d")), ("b", ""),
    ]  # fmt: skip
    resume = Resume(11, "model", ELEMENTS, "b", 2, 0, 0, 0, 0, 1, address="tcp://10.0.0.9:7")
    back = the(Map, found.tell("b", resume)["a"])
    assert ("b", "tcp://10.0.0.9:7") in [place[:2] for place in back.peers]
    assert gone.number < away.number < back.number


def test_members_are_known_by_the_keys_they_have_proved():
    found = desk(1)
    sender, key = owned(bytes(32), b"x"), spell(bytes(32))
    hub = found.hub
    effects = hub.handle(sender, _join("a"), 0.0)
    (told,) = [e.message for e in effects if isinstance(getattr(e, "message", None), Map)]
    assert [place.key for place in told.peers] == [key]


def _join(name):
    return Join(11, "job-a", "model", ELEMENTS, name, 1.0, 0, 5, address=address(name))


HAPPENINGS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.sampled_from("abcd")),
        st.tuples(st.just("leave"), st.sampled_from("abcd")),
        st.tuples(st.just("lose"), st.sampled_from("abcd")),
        st.tuples(st.just("reach"), st.sampled_from("abcd"), st.sets(st.sampled_from("abcde"))),
        st.tuples(st.just("tick"), st.sampled_from([0.3, 8.0, TRY_S])),
        st.tuples(st.just("upload"), st.sampled_from("abcd")),
    ),
    max_size=40,
)


@given(HAPPENINGS)
def test_whatever_happens_all_have_the_same_map_of_all_who_are_in(happenings):
    """Numbers only grow; once a tick has passed every member's last map names all members that are
    in, in order; each range has one reducer; nobody starts before that is known."""
    found, last = desk(3), {}

    def note(said):
        for who, messages in said.items():
            for message in messages:
                if isinstance(message, Map):
                    assert message.number >= (last[who].number if who in last else 0)
                    last[who] = message
                elif isinstance(message, Start):
                    assert found.hub.part.places.is_settled

    session = 0
    for what, *which in happenings:
        match what, *which:
            case "join", who:
                session += 1
                where = CLIENT if who == "d" else address(who)
                note(found.join(who, address=where, session=session))
            case "leave", who:
                note(found.tell(who, Leave("")))
                last.pop(who, None)
            case "lose", who:
                found.take(found.hub.unreachable(who.encode(), found.now))
            case "reach", who, reached:
                number = last[who].number if who in last else 1
                note(answer(found, who, number, sorted(reached)))
            case "upload", who:
                note(found.tell(who, Base(0, 1, raw(ZEROS))))
            case "tick", seconds:
                note(found.tick(seconds))
        last = {who: map for who, map in last.items() if who in found.hub.present}
    note(found.tick(0.3))
    places = found.hub.part.places
    if places.is_settled:
        assert set(last) == set(found.hub.present)
        assert len({map.number for map in last.values()}) <= 1
        for map in last.values():
            inside = [place for place in map.peers if place.address or place.name == "d"]
            assert sorted(p.name for p in inside if p.name in found.hub.present) == (
                found.hub.present
            )
            spans = [(map.first, map.end), *(place[3:] for place in map.peers)]
            owners = [n for first, end in spans for n in range(first, end)]
            if found.hub.started:
                assert set(owners) <= set(range(RANGES))
                assert len(owners) == len(set(owners))
            else:
                assert sorted(owners) == list(range(RANGES))
