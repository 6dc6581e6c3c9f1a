"""What a member keeps for a reducer that may be lost."""

from __future__ import annotations

import numpy as np

from edgetrain.exchange.messages import Base, Reply, Start, Welcome, pack
from edgetrain.exchange.peers.reducer_link import ReducerLink
from edgetrain.exchange.seam import CatchUp, Request, Submission
from edgetrain.vectors.vector import checksum
from tests.fakes.loopback import Loopback

ELEMENTS = 8


def test_contributions_whose_replies_were_missed_are_dropped_once_a_later_reply_has_them():
    """They were merged in rounds that this member has only the base of. A member that kept them
    would wait for ever, at its end, for a hub to say that they count."""
    hub, zeros = Loopback(), np.zeros(ELEMENTS, np.float32)
    end = hub.connect()
    link = ReducerLink(end, lambda: 0.0)

    def said(*messages):
        for message in messages:
            hub.send(b"loopback-0", pack(message))

    def contribute(round):
        link.submit(Submission(round, zeros.copy(), 1.0, link.applied, checksum(zeros)))

    said(
        Welcome("m0", 0, 2, "fedavg", 1, 0, "fp32", "fp32", 1.0, False),
        Start(0, 0, 0, checksum(zeros), keep=True),
    )
    link.join(Request("model", "m0"), zeros.copy(), checksum(zeros))
    for round in range(3):
        contribute(round)
    link.ask_again(base=True)
    said(
        Welcome("m0", 0, 2, "fedavg", 1, 0, "fp32", "fp32", 1.0, False),
        Base(0, 1, zeros.tobytes()),
        Start(3, 3, 0, checksum(zeros), keep=False, resend=3, attempt=1),
    )
    assert isinstance(link.wait(0), CatchUp)
    contribute(3)
    assert link.outbox.kept == (0, 1, 2, 3)  # the reducer may still be lost with what it merged
    said(
        Reply(3, 0, 1, 2, 0, checksum(zeros), True, zeros.tobytes(), merged=(("m0", 4), ("m1", 4)))
    )
    assert link.wait(3).round == 3
    assert link.outbox.kept == ()


def test_another_reducer_goes_on_from_a_base_that_was_given_out_in_place_of_replies():
    """The member may not have it in its own base yet: it waits for the other hubs' first."""
    hub, zeros, ones = Loopback(), np.zeros(ELEMENTS, np.float32), np.ones(ELEMENTS, np.float32)
    link = ReducerLink(hub.connect(), lambda: 0.0)

    def said(*messages):
        for message in messages:
            hub.send(b"loopback-0", pack(message))

    said(
        Welcome("m0", 0, 2, "fedavg", 1, 0, "fp32", "fp32", 1.0, False),
        Start(0, 0, 0, checksum(zeros), keep=True),
    )
    link.join(Request("model", "m0"), zeros.copy(), checksum(zeros))
    link.ask_again(base=True)
    said(
        Welcome("m0", 0, 2, "fedavg", 1, 0, "fp32", "fp32", 1.0, False),
        Base(0, 1, ones.tobytes()),
        Start(3, 3, 0, checksum(ones), keep=False, resend=3, attempt=1),
    )
    assert isinstance(link.wait(0), CatchUp)
    base = zeros.copy()
    assert link.add_given_out(base, 0) == link.given_out == 3
    assert np.array_equal(base, ones)

    replies = [Reply(n, 0, 1, 2, 0, 0, True, ones.tobytes()) for n in (3, 4)]
    said(*replies)
    link.wait(3)
    link.poll()
    assert link.ready == 5
    assert link.stand_still() == 4  # the one that is not given out counts no more
    assert link.ready == 4
    base = zeros.copy()
    assert link.add_given_out(base, 0) == 4
    assert np.array_equal(base, 2 * ones)
    link.submit(Submission(4, zeros.copy(), 1.0, 4, 0))
    assert link.add_given_out(base, 4) == 4  # the member's own base has them all
