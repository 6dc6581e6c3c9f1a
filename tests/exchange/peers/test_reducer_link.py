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
