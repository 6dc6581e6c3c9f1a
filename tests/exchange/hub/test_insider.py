"""What a member with a key can send to bring the hub or the others down; each of these once did."""

from __future__ import annotations

import numpy as np
import pytest

from edgetrain import codecs
from edgetrain.errors import BadMessage
from edgetrain.exchange.further_messages import Advertise
from edgetrain.exchange.hub.effects import Note, Replay, Send
from edgetrain.exchange.hub.protocol import MOST_GAPS, Hub
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.limits import MOST_UNREQUITED, Unrequited
from edgetrain.exchange.messages import (
    PROTOCOL,
    Base,
    Beat,
    Contribute,
    Join,
    Leave,
    Refuse,
    Reply,
    Resume,
)
from edgetrain.strategies import find
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.vector import checksum

ZEROS = np.zeros(3, np.float32)
FAR = (1 << 63) - 1


def join(name, session):
    return Join(PROTOCOL, "", "model", 3, name, 1.0, checksum(ZEROS), session)


def resume(name, session, *, submitted=0, oldest=0, lacks_base=False):
    return Resume(PROTOCOL, "model", 3, name, session, 0, 0, submitted, oldest, 1, lacks_base)


def give(hub, name, round):
    own = ZEROS.tobytes()
    return hub.handle(name, Contribute(round, 0, 1, 1.0, 0, hub.checksum(0), 0, own), 1.0)


def started(*names):
    """A hub that these have joined, each over the connection of its name."""
    codec = codecs.Dense()
    hub = Hub(
        Terms(find("local-sgd"), 1),
        Policy(len(names), lost_after_s=1.0),
        Mean(), codec, codec,
    )  # fmt: skip
    for session, name in enumerate(names, 1):
        hub.handle(name.encode(), join(name, session), 0.0)
    hub.handle(names[0].encode(), Base(0, 1, ZEROS.tobytes()), 0.0)
    assert hub.started
    return hub


def refused(effects):
    return [e.message.code for e in effects if isinstance(e, Send) and type(e.message) is Refuse]


def test_nobody_comes_back_over_the_connection_of_another():
    hub = started("a", "b")
    assert refused(hub.handle(b"b", resume("a", 1), 1.0)) == ["name"]
    assert hub.members.get(b"b").name == "b"
    for name in (b"a", b"b"):
        hub.handle(name, Leave("done"), 2.0)
    assert hub.finished


def test_nobody_joins_again_over_the_connection_of_another():
    hub = started("a", "b")
    assert refused(hub.handle(b"b", join("a", 1), 1.0)) == ["name"]
    for name in (b"a", b"b"):
        hub.handle(name, Leave("done"), 2.0)
    assert hub.finished


@pytest.mark.parametrize("ahead", [{"oldest": FAR, "submitted": FAR}, {"oldest": 5000}])
def test_who_says_it_is_far_ahead_closes_no_rounds(ahead):
    hub = started("a")
    effects = hub.handle(b"a2", resume("a", 1, **ahead), 1.0)
    assert refused(effects) == ["order"]
    assert hub.round == 0


def test_who_says_it_is_far_ahead_does_not_keep_newcomers_waiting():
    hub = started("a", "b")
    hub.handle(b"b2", resume("b", 2, oldest=FAR, submitted=FAR), 1.0)
    hub.handle(b"c", join("c", 3), 2.0)
    assert hub.members.named("c").first_round < 2


def test_who_gives_far_ahead_gets_no_newcomer_expelled():
    hub = started("a", "b", "c")
    for round in range(9):
        own = Contribute(round, 0, 1, 1.0, 0, hub.checksum(0), 0, ZEROS.tobytes())
        assert refused(hub.handle(b"b", own, 1.0)) == []
    hub.handle(b"c", Leave("done"), 2.0)
    hub.handle(b"d", join("d", 4), 2.0)
    first = hub.members.named("d").first_round
    assert first == 9
    own = Contribute(first, 0, 1, 1.0, 0, hub.checksum(0), 0, ZEROS.tobytes())
    assert refused(hub.handle(b"d", own, 3.0)) == []


def test_a_base_that_is_not_finite_is_nobodys():
    codec = codecs.Dense()
    hub = Hub(Terms(find("local-sgd"), 1), Policy(1), Mean(), codec, codec)
    hub.handle(b"a", join("a", 1), 0.0)
    bad = np.array([0, np.nan, 0], np.float32)
    assert refused(hub.handle(b"a", Base(0, 1, bad.tobytes()), 0.0)) == ["payload"]
    hub.handle(b"b", join("b", 2), 0.0)
    hub.handle(b"b", Base(0, 1, ZEROS.tobytes()), 0.0)
    assert hub.started


def test_a_base_that_overflows_is_added_up_in_silence():
    hub = started("a")
    large = np.full(3, 1e38, np.float32).tobytes()
    for round in range(5):
        known = hub.checksum(round)
        effects = hub.handle(b"a", Contribute(round, 0, 1, 1.0, round, known, 0, large), 1.0)
        assert any(isinstance(e, Send) and type(e.message) is Reply for e in effects)
    assert np.isinf(hub.base).all()
    hub.handle(b"a", Beat(), 2.0)


@pytest.mark.parametrize("what", ["copied", "low order", "low order in a round"])
def test_keys_that_would_stop_the_others_are_their_senders_fault(what):
    pytest.importorskip("cryptography")
    from edgetrain.exchange.keys.pairs import KEY_BYTES
    from edgetrain.exchange.masks.aggregator import Aggregator
    from edgetrain.exchange.masks.masker import Masker
    from edgetrain.exchange.masks.terms import MaskTerms

    terms = MaskTerms(3, 2, 8.0)
    hub = Aggregator(terms)
    hub.start_masks(0)
    asked = dict(hub.begin_block(dict.fromkeys("abc", 1.0), 0, 2, 0.0))
    maskers = {name: Masker(terms, 4) for name in asked}
    adverts = {name: maskers[name].answer_hub(message) for name, message in asked.items()}
    hub.accept_message("a", adverts["a"])
    hub.accept_message("b", adverts["b"])
    own, other = bytes(adverts["c"].payload), bytes(adverts["a"].payload)
    at = {"copied": 0, "low order": 0, "low order in a round": KEY_BYTES}[what]
    key = other[:KEY_BYTES] if what == "copied" else bytes(KEY_BYTES)
    bad = own[:at] + key + own[at + KEY_BYTES :]
    with pytest.raises(BadMessage, match="key"):
        hub.accept_message("c", Advertise(adverts["c"].block, bad))
    for name, message in hub.advance_blocks(["a", "b"], 60.0, 0.0):
        assert maskers[name].answer_hub(message) is not None


def test_numbers_that_no_reply_can_carry_cost_nobody_but_their_sender():
    terms = Terms(find("local-sgd"), 1)
    hub = Hub(terms, Policy(2), Mean(), codecs.parse("fp32"), codecs.parse("int8"))
    for session, name in enumerate("ab", 1):
        hub.handle(name.encode(), join(name, session), 0.0)
    hub.handle(b"a", Base(0, 1, ZEROS.tobytes()), 0.0)
    for name, value in (b"a", 1.0), (b"b", -1e37):
        own = np.full(3, value, np.float32).tobytes()
        effects = hub.handle(name, Contribute(0, 0, 1, 1.0, 0, hub.checksum(0), 0, own), 1.0)
    assert refused(effects) == ["payload"]
    assert hub.round == 1
    assert hub.present == ["a"]
    assert np.allclose(hub.base, 1.0, rtol=0.02)


def test_a_member_on_a_bad_link_is_never_sent_too_much():
    assert MOST_GAPS < MOST_UNREQUITED


def bases(effects):
    return sum(isinstance(e, Send) and type(e.message) is Base for e in effects)


def came_and_went(hub):
    """A member joins over one connection, with other parameters, and leaves, until it is refused;
    how many bases it was sent."""
    for sent in range(2 * MOST_UNREQUITED):
        effects = hub.handle(b"z", Join(PROTOCOL, "", "model", 3, "z", 1.0, 5, 9), 1.0)
        if refused(effects):
            assert refused(effects) == ["again"]
            (note,) = [e for e in effects if isinstance(e, Note)]
            assert (note.event, note.member) == ("refused", "z")
            assert f" {MOST_UNREQUITED} times" in note.reason
            return sent
        assert bases(effects) == 1
        hub.handle(b"z", Leave(""), 1.0)
    return None


def test_who_joins_and_leaves_without_end_is_sent_so_many_bases_and_no_more():
    hub = started("a", "b")
    hub.handle(b"b", Leave(""), 1.0)
    assert came_and_went(hub) == MOST_UNREQUITED
    assert came_and_went(hub) == 0
    assert bases(hub.handle(b"y", Join(PROTOCOL, "", "model", 3, "z", 1.0, 5, 9), 1.0)) == 1


def test_a_connection_that_is_gone_is_forgotten():
    hub = started("a", "b")
    hub.handle(b"b", Leave(""), 1.0)
    assert came_and_went(hub) == MOST_UNREQUITED
    assert hub.unreachable(b"z", 2.0) == []
    assert came_and_went(hub) == MOST_UNREQUITED


@pytest.mark.parametrize("what", ["bases", "replies"])
def test_who_comes_back_without_end_is_given_up_and_may_come_back_over_another_connection(what):
    hub = started("a", "b")
    hub.tail = 0
    give(hub, b"a", 0)
    give(hub, b"b", 0)
    assert hub.round == 1
    again = resume("b", 2, submitted=1, oldest=1, lacks_base=what == "bases")
    for _ in range(MOST_UNREQUITED):
        effects = hub.handle(b"b", again, 1.0)
        assert bases(effects) == (what == "bases")
        assert sum(isinstance(e, Replay) for e in effects) == (what == "replies")
    effects = hub.handle(b"b", again, 1.0)
    assert refused(effects) == ["again"]
    assert [e.event for e in effects if isinstance(e, Note)] == ["gone"]
    assert hub.present == ["a"]
    assert refused(hub.handle(b"b2", again, 1.0)) == []
    assert hub.present == ["a", "b"]


def test_whoever_gives_something_whole_may_ask_again():
    hub = started("a", "b")
    for round in range(3):
        for _ in range(MOST_UNREQUITED):
            mine = resume("b", 2, submitted=round, oldest=round, lacks_base=True)
            assert refused(hub.handle(b"b", mine, 1.0)) == []
        give(hub, b"b", round)
    assert hub.present == ["a", "b"]


def test_what_is_remembered_of_connections_is_bounded():
    sent = Unrequited(most=2, connections=3)
    for name in (b"a", b"b", b"c", b"a", b"d"):
        sent.count_sent(name)
    assert len(sent) == 3
    assert [sent.is_enough(name) for name in (b"a", b"b", b"c", b"d")] == [
        True,
        False,
        False,
        False,
    ]
    sent.count_sent(b"b")
    assert not sent.is_enough(b"b"), "what it was sent before is forgotten"
    sent.forget_sender(b"a")
    sent.forget_sender(b"a")
    assert len(sent) == 2
