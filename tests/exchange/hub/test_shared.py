"""A hub of several, whose ranges may move, asked by hand; and what the lead refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import codecs, strategies
from edgetrain.errors import ConfigError
from edgetrain.exchange.further_messages import Handover
from edgetrain.exchange.hub import records
from edgetrain.exchange.hub.cutting import cut, joined, why_not_joined
from edgetrain.exchange.hub.effects import Send, Write
from edgetrain.exchange.hub.lead import LeadPart
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.records import Seat, Sharing, State
from edgetrain.exchange.hub.shared import SharedPart
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import PROTOCOL, Beat, Join, Leave, Refuse
from edgetrain.vectors.ranges import Ranges, Stretch

RANGES, ELEMENTS = 4, 4 * 256 + 30


NOTHING = Stretch(RANGES, 0, 0)


def hub(stretch=NOTHING, part=None, strategy="dga"):
    row = strategies.find(strategy)
    terms = Terms(row, 2, stretch=stretch, job="0f")
    codec = codecs.parse("fp32")
    merge, outer = row.merge_rule(), row.outer_rule()
    return (part or SharedPart()).attach(Hub(terms, Policy(2), merge, codec, codec, outer=outer))


def lead(**more):
    return hub(Stretch(RANGES, 0, RANGES), LeadPart(lambda address: None, **more))


def asked(agreed, stage=0, **more):
    return Handover(PROTOCOL, stage, 1, agreed=agreed, **more)


def told(effects):
    (message,) = [effect.message for effect in effects if isinstance(effect, Send)]
    return message


def test_only_the_enrolled_lead_is_answered():
    spare = hub(part=SharedPart(lambda sender: sender == b"lead"))
    question = asked(lead().part.shared_terms())
    assert told(spare.handle(b"lead", question, 0.0)) == replace(
        question, stage=1, agreed="", first=0, end=0
    )
    for stage in (0, 2, 4, 6, 8, 10):
        refused = told(spare.handle(b"stranger", replace(question, stage=stage), 0.0))
        assert isinstance(refused, Refuse), stage
        assert refused.code == "hub"


LOWER = Stretch(RANGES, 0, 2)


def started(stretch=LOWER, records=()):
    """A hub with ranges, members and a base."""
    found = hub(stretch)
    seats = [Seat(f"m{index}", b"m%d" % index, 7 + index, index, 1.0, 0, 3) for index in (0, 1)]
    found.restore(
        replace(state_of(stretch, seats), agreed=found.state().agreed, memory={}), records, 0
    )
    return found


def moved(at, taken, **more):
    """Hand a state over to a hub, by hand; its answer."""
    question = Handover(PROTOCOL, 6, 1, round=3, first=0, end=RANGES, session=7)
    payload = records.pack_state(taken)
    return told(at.handle(b"lead", replace(question, payload=payload, **more), 0.0))


def test_without_keys_a_hub_with_ranges_goes_by_a_session_of_its_members():
    ranged = started()
    for stage in (2, 4, 6, 8, 10):
        for session in (0, 6):
            question = replace(asked("", stage), session=session)
            refused = told(ranged.handle(b"stranger", question, 0.0))
            assert isinstance(refused, Refuse), (stage, session)
    assert ranged.part.pending is None
    assert ranged.terms.stretch == LOWER
    held = told(ranged.handle(b"lead", replace(asked("", 2), session=8), 0.0))
    assert isinstance(held, Handover)
    assert held.stage == 3


def test_a_state_is_taken_up_to_what_its_ranges_can_be():
    theirs = Stretch(RANGES, 2, RANGES)
    for at, taken in ((started(), theirs), (hub(), Stretch(RANGES, 0, RANGES))):
        at.policy = replace(at.policy, most_elements=ELEMENTS)
        state = replace(state_of(taken), memory={}, outer={})
        assert "at most" in moved(at, state, parts=1 << 20).why
        assert "part 1 of 1" in moved(at, state, part=1).why
        longer = replace(state, base=np.zeros(ELEMENTS + 1, np.float32))
        assert "elements" in moved(at, longer).why
        doubles = replace(state, base=np.zeros(taken.size(ELEMENTS), np.float64))
        assert "elements" in moved(at, doubles).why


def test_a_state_of_other_ranges_or_of_another_job_changes_nothing():
    theirs = replace(state_of(Stretch(RANGES, 2, RANGES)), memory={}, outer={})
    ranged = started()
    assert "do not go on" in moved(ranged, theirs, first=1).why
    assert "there are none" in moved(ranged, theirs, end=RANGES + 1).why
    assert "the same model" in moved(ranged, replace(theirs, model="other")).why
    assert ranged.terms.stretch == LOWER
    spare, whole = hub(strategy="diloco"), Stretch(RANGES, 0, RANGES)
    spare.policy = replace(spare.policy, most_elements=ELEMENTS)
    assert "no state of this job" in moved(spare, state_of(whole)).why
    assert spare.part.is_spare
    fitting = replace(state_of(whole), memory={}, outer={})
    seats = [Seat("m0", b"m0", 7, 0, 1.0, 0, 3)]
    assert not moved(hub(), replace(fitting, seats=tuple(seats))).why


def test_a_hub_of_another_job_or_version_says_so():
    spare = hub()
    other = hub(strategy="fedavg")
    question = asked(other.part.shared_terms())
    assert "another job" in told(spare.handle(b"lead", question, 0.0)).why
    question = replace(asked(lead().part.shared_terms()), protocol=PROTOCOL + 1)
    assert told(spare.handle(b"lead", question, 0.0)).why == (
        f"it speaks version {PROTOCOL}, the lead {PROTOCOL + 1}"
    )


def test_a_spare_lets_no_member_in():
    join = Join(PROTOCOL, "0f", "model", ELEMENTS, "m0", 1.0, 0, session=1 << 63)
    assert told(hub().handle(b"m0", join, 0.0)).code == "hub"


def test_orders_before_training_and_unknown_ones_are_refused():
    answers = []
    hubs = lead(address="tcp://a:1", rows=[("tcp://b:1", "", 2, 4)])
    for words in (("hubs", "add", "tcp://c:1"), ("pause",), ("dance",)):
        hubs.obey(Order(words, answers.append), 0.0)
    hub().obey(Order(("hubs",), answers.append), 0.0)
    assert [each["error"] for each in answers] == [
        "training has not begun: hub.hubs in the job says which hubs begin",
        "pause: training has not begun",
        "dance: this hub takes no such order",
        "hubs: this hub is not the lead",
    ]


def state_of(stretch, seats=(), round=3):
    size = stretch.size(ELEMENTS)
    numbers = np.arange(size, dtype=np.float32) + stretch.of(ELEMENTS).start
    return State(
        "agreed", "model", b"", ELEMENTS, 0, round, 0, tuple(seats), (), (), numbers,
        {"residual": 2 * numbers}, {"momentum": 3 * numbers},
    )  # fmt: skip


@given(st.integers(0, RANGES), st.integers(0, RANGES))
def test_a_state_that_is_cut_and_put_together_is_what_it_was(one, other):
    first, end = sorted((one, other))
    own = Stretch(RANGES, first, end)
    state = state_of(own)
    for middle in range(first, end + 1):
        lower, upper = Stretch(RANGES, first, middle), Stretch(RANGES, middle, end)
        if middle in (first, end):
            continue  # one of the two has all of it
        both = cut(state, own, lower), cut(state, own, upper)
        whole = joined(both[0], lower, both[1], upper)
        for name, found in (("base", whole.base), ("residual", whole.memory["residual"])):
            expected = state.base if name == "base" else state.memory["residual"]
            assert found.tobytes() == expected.tobytes(), name
        assert whole.outer["momentum"].tobytes() == state.outer["momentum"].tobytes()
        sizes = [each.base.size for each in both]
        borders = Ranges(ELEMENTS, RANGES)
        assert sizes[0] == borders.at(middle - 1).stop - borders.at(first).start


def test_states_in_which_a_contribution_counts_at_one_hub_only_are_not_put_together():
    seats = [Seat("m0", b"", 7, 0, 1.0, 0, merged) for merged in (3, 2)]
    own = Stretch(RANGES, 0, 2)
    here, there = state_of(own, seats[:1]), state_of(own, seats[1:])
    assert "contributions of m0" in why_not_joined(here, there)
    assert "at round 3" in why_not_joined(here, state_of(own, seats[:1], round=4))
    assert why_not_joined(here, here) == ""


@given(st.booleans(), st.integers(0, 1 << 40), st.text(max_size=20))
def test_a_sharing_is_read_as_it_was_written(pending, round, address):
    known = Sharing(5, round, pending, 1, 3, 2, ((address, "key", 3, 4),), "", address, True)
    assert records.decode(*_bytes(known)) == known
    state = replace(state_of(Stretch(RANGES, 1, 3)), partitions=(known, known))
    assert records.decode(*_bytes(state)).partitions == (known, known)


def _bytes(record):
    header, payloads = records.encode(record)
    return header, b"".join(payloads)


def test_a_hold_outlives_the_hub_and_no_round_closes_before_it_is_over():
    follower = started(Stretch(RANGES, 2, 4))
    effects = follower.handle(b"lead", asked("", 2, round=9, session=7), 0.0)
    (written,) = [effect.record for effect in effects if isinstance(effect, Write)]
    assert (written.pending, written.round) == (True, 9)
    assert not [effect for effect in effects if isinstance(effect, Send)]  # round 9 is not there
    again = started(Stretch(RANGES, 2, 4), [written])
    assert again.part.pending == written
    released = again.handle(b"lead", asked("", 10, round=9, session=7), 0.0)
    assert again.part.pending is None
    assert [effect.record.round for effect in released if isinstance(effect, Write)] == [0]


def test_a_follower_is_not_resumed_as_a_lead():
    known = Sharing(1, 4, False, 2, 4, 4)
    state = replace(state_of(Stretch(RANGES, 2, 4)), partitions=(known,))
    with pytest.raises(ConfigError, match="not the lead"):
        lead().restore(state, [], 0.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add", "tcp://b:1"), "tcp://b:1 is a hub of this job already"),
        (("add", "tcp://a:1"), "tcp://a:1 is a hub of this job already"),
        (("add", "tcp://e:1"), "4 hubs share 4 ranges, and each hub needs one"),
        (("remove", "tcp://a:1"), "the lead cannot be removed"),
        (("remove", "tcp://x:1"), "tcp://x:1 is no hub of this job"),
    ],
)
def test_an_order_that_cannot_be_is_refused_in_one_line(words, said, monkeypatch):
    monkeypatch.setattr(Hub, "finished", False)
    rows = [(f"tcp://{at}:1", "", number, number + 1) for number, at in enumerate("bcd", 1)]
    first = hub(Stretch(RANGES, 0, 1), LeadPart(None, "tcp://a:1", rows))
    first.rounds.start(0)
    answers = []
    first.obey(Order(("hubs", *words), answers.append), 0.0)
    assert [answer["error"] for answer in answers] == [said]
    assert first.part.pending is None


def test_a_follower_lets_in_no_member_of_another_job_and_no_stranger():
    follower = hub(Stretch(RANGES, 2, 4))
    join = Join(PROTOCOL, "ff", "model", ELEMENTS, "m0", 1.0, 0, session=1 << 63)
    assert told(follower.handle(b"m0", join, 0.0)).code == "job"
    assert told(follower.handle(b"?", Beat(), 0.0)).code == "unknown"
    assert follower.present == []


def test_ranges_that_a_hub_does_not_have_are_not_given_and_nothing_ends():
    spare, ranged = hub(), started()
    for stage in (4, 8):
        question = Handover(PROTOCOL, stage, 1, round=3, first=1, end=RANGES, session=7)
        for at in (spare, ranged):
            answer = told(at.handle(b"lead", question, 0.0))
            assert (answer.stage, answer.payload) == (stage + 1, b"")
            assert answer.why == "not all ranges from 1 to 4 are here"
    assert ranged.terms.stretch == LOWER


@pytest.mark.parametrize(
    ("stretch", "reason", "ends"),
    [
        (LOWER, "Refused: people removed the member from the job", False),
        (LOWER, "done", True),
        (Stretch(RANGES, 0, RANGES), "Refused: people removed the member from the job", True),
    ],
)
def test_a_hub_of_several_waits_for_those_that_it_alone_has_lost(stretch, reason, ends):
    found = started(stretch)
    found.membership.remove(found.members.named("m1"), "gone", "unreachable for 5 s")
    found.handle(b"m0", Leave(reason), 1.0)
    assert not found.members
    assert found.finished == ends
    for now in (2.0, 2.0 + found.policy.empty_after_s):
        found.tick(now)
    assert found.finished
