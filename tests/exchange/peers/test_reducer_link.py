"""What a member keeps for a reducer that may be lost, and where it says that it is."""

from __future__ import annotations

import numpy as np
import pytest

from edgetrain.errors import Refused
from edgetrain.exchange.messages import (
    Base,
    Contribute,
    Refuse,
    Reply,
    Resume,
    Start,
    Welcome,
    pack,
    unpack,
)
from edgetrain.exchange.peers.reducer_link import ReducerLink
from edgetrain.exchange.seam import CatchUp, Request, Submission
from edgetrain.vectors.vector import checksum
from tests.fakes.loopback import Loopback

ELEMENTS = 8
ZEROS, ONES = np.zeros(ELEMENTS, np.float32), np.ones(ELEMENTS, np.float32)


class Desk:
    """A link of m0's, and what a reducer says to it."""

    def __init__(self):
        self.hub = Loopback()
        self.link = ReducerLink(self.hub.connect(), lambda: 0.0)
        self.say(self.welcome, Start(0, 0, 0, checksum(ZEROS), keep=True))
        self.link.join(Request("model", "m0"), ZEROS.copy(), checksum(ZEROS))

    welcome = Welcome("m0", 0, 2, "fedavg", 1, 0, "fp32", "fp32", 1.0, False)

    def say(self, *messages):
        for message in messages:
            self.hub.send(b"loopback-0", pack(message))

    def contribute(self, round, applied=None):
        applied = self.link.applied if applied is None else applied
        self.link.submit(Submission(round, ZEROS.copy(), 1.0, applied, 0))

    def say_base(self, applied, attempt, base=ONES, each=()):
        """An answer to a Resume."""
        start = Start(
            applied, applied, 0, checksum(base), False, applied, attempt, each=tuple(each)
        )
        self.say(self.welcome, Base(0, 1, base.tobytes()), start)

    def say_reply(self, round, merged=(), vector=ONES):
        self.say(Reply(round, 0, 1, 2, 0, 0, True, vector.tobytes(), merged=tuple(merged)))

    def asked(self):
        """The newest question."""
        found = [unpack(frames) for _, frames in self.hub.poll(0.0)]
        return [each for each in found if isinstance(each, Resume)][-1]


def test_contributions_whose_replies_were_missed_are_dropped_once_a_later_reply_is_there():
    """They were merged in rounds that this member has only the base of. A member that kept them
    would wait for ever, at its end, for a hub to say that they count."""
    desk = Desk()
    link = desk.link
    for round in range(3):
        desk.contribute(round)
    link.ask_again(base=True)
    desk.say_base(3, 1, ZEROS, [("m0", 3)])
    assert isinstance(link.wait(0), CatchUp)
    desk.contribute(3)
    assert link.outbox.kept == (0, 1, 2, 3)  # the reducer may still be lost with what it merged
    desk.say_reply(3, [("m0", 4), ("m1", 4)], ZEROS)
    assert link.wait(3).round == 3
    assert link.outbox.kept == (3,)  # the others may not have got this reply
    assert link.settle()
    assert link.outbox.kept == ()


def test_another_reducer_goes_on_from_a_base_that_was_given_out_in_place_of_replies():
    """The member may not have it in its own base yet: it waits for the other hubs' first."""
    desk = Desk()
    link = desk.link
    link.ask_again(base=True)
    desk.say_base(3, 1)
    assert isinstance(link.wait(0), CatchUp)
    base = ZEROS.copy()
    assert link.add_given_out(base, 0) == link.given_out == 3
    assert np.array_equal(base, ONES)

    desk.say_reply(3)
    desk.say_reply(4)
    link.wait(3)
    link.poll()
    assert link.ready == 5
    assert link.stand_still() == 4  # the one that is not given out counts no more
    assert link.ready == 4
    base = ZEROS.copy()
    assert link.add_given_out(base, 0) == 4
    assert np.array_equal(base, 2 * ONES)
    desk.contribute(4, applied=4)
    assert link.add_given_out(base, 4) == 4  # the member's own base has them all


def test_a_base_that_is_not_given_out_counts_no_more_once_its_reducer_is_lost():
    """Or the member would say that it has what it cannot give to another reducer, and would go on
    from a base that no other reducer has ever had."""
    desk = Desk()
    link = desk.link
    desk.contribute(0)
    link.ask_again(base=True)
    desk.say_base(3, 1)
    link.poll()
    assert link.ready == 4  # the base waits to be given out
    base = ZEROS.copy()
    assert link.stand_still() == link.add_given_out(base, 0) == 0
    assert link.ready == 0
    link.ask_another()
    asked = desk.asked()
    assert (asked.applied, asked.submitted, asked.oldest) == (0, 1, 0)


def test_a_base_says_whose_contributions_are_in_it():
    """Another reducer that goes on from it merges these no second time."""
    desk = Desk()
    link = desk.link
    desk.contribute(0)
    desk.say_reply(0, [("m0", 1), ("m1", 1)])
    link.wait(0)
    link.ask_again(base=True)
    desk.say_base(3, 1, each=[("m0", 1), ("m1", 3)])
    link.poll()
    assert link.merged == {"m0": 1, "m1": 1}  # as long as the base is not given out
    assert isinstance(link.wait(1), CatchUp)
    assert link.merged == {"m0": 1, "m1": 3}


@pytest.mark.parametrize("code", ["ahead", "diverged"])
def test_a_member_with_replies_that_nobody_else_has_takes_the_base_of_another_reducer(code):
    desk = Desk()
    link = desk.link
    link.stand_still()
    link.ask_another()
    desk.say(Refuse(code, "the member has applied 7 replies"))
    link.poll()
    asked = desk.asked()
    assert asked.lacks_base
    assert (asked.applied, asked.checksum) == (0, 0)
    desk.say_base(3, asked.attempt)
    assert link.wait(0).applied == 3
    desk.say(Refuse(code, "of a reducer that it has been with"))
    with pytest.raises(Exception, match="of a reducer that it has been with"):
        link.poll()


@pytest.mark.parametrize("missed", [0, 1])
def test_a_contribution_that_only_the_lost_reducer_had_merged_counts_or_is_said_to_be_lost(missed):
    """The newest is sent again; one before that, of which the others missed the reply, too, is not
    there any more."""
    desk = Desk()
    link = desk.link
    for round in range(2):
        desk.contribute(round)
        desk.say_reply(round, [("m0", round + 1), ("m1", round + 1)])
        link.wait(round)
    link.stand_still()
    link.ask_another()
    asked, done = desk.asked(), 1 - missed
    assert asked.oldest == 1
    start = Start(done, 2, 0, 0, False, 1, asked.attempt, each=(("m0", done),) if done else ())
    desk.say(desk.welcome, Base(0, 1, ONES.tobytes()), start)
    if missed:
        with pytest.raises(Refused, match=r"m0's contribution 0 to .* is lost"):
            link.poll()
        return
    link.poll()
    (sent,) = [
        each for _, frames in desk.hub.poll(0.0) if isinstance(each := unpack(frames), Contribute)
    ]
    assert sent.round == 1
