"""One clock for the folders of several machines: Start says how long training has been going on."""

from __future__ import annotations

import numpy as np
import pytest
from loopback import Loopback

from edgetrain import codecs
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.serve import serve
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.messages import PROTOCOL, Base, Join, Start, Welcome, pack, unpack
from edgetrain.exchange.seam import Request
from edgetrain.exchange.transport import Traffic
from edgetrain.strategies import find
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.vector import checksum

ZEROS = np.zeros(3, np.float32)


def join(wires, name):
    """A member's end, over which it asks to be let in."""
    end = wires.connect()
    end.send(pack(Join(PROTOCOL, "", "model", 3, name, 1.0, checksum(ZEROS), ord(name))))
    return end


def starts(end):
    """What the hub said to it about the start, in milliseconds."""
    found = []
    while (frames := end.receive(0.0)) is not None:
        message = unpack(frames)
        found += [message.t_ms] if isinstance(message, Start) else []
    return found


@pytest.mark.parametrize("earlier_s", [0.0, 100.0])
def test_start_says_how_long_training_has_been_going_on(earlier_s):
    wires, now = Loopback(), [50.0]
    hub = Hub(Terms(find("local-sgd"), 1), Policy(2), Mean(), codecs.Dense(), codecs.Dense())
    ends = [join(wires, "a"), join(wires, "b")]
    ends[0].send(pack(Base(0, 1, ZEROS.tobytes())))

    def script():
        while not hub.started:
            yield False
        hub.policy = Policy(3)
        now[0] += 7.25
        ends.append(join(wires, "c"))
        while len(hub.present) < 3:
            yield False
        yield True

    turns = script()
    serve(hub, wires, lambda: now[0], lambda effect: None, lambda: next(turns), earlier_s=earlier_s)
    before = round(1000 * earlier_s)
    assert [starts(end) for end in ends] == [[before], [before], [before + 7250]]


class Script:
    """A hub's answer, over a connection with a round trip."""

    def __init__(self, *said):
        self.said = [pack(message) for message in said]

    def send(self, frames):
        """Nobody listens."""

    def receive(self, timeout_s):
        return self.said.pop(0)

    def received_bytes(self):
        return 0

    def traffic(self):
        return Traffic(0, 0, 0, 0.2)

    def close(self):
        """There is no connection."""


def test_a_member_knows_when_training_began_by_its_own_clock():
    welcome = Welcome("c", 2, 3, "local-sgd", 1, 0, "fp32", "fp32", 1.0, False, status_ms=2500)
    start = Start(4, 5, 0, checksum(ZEROS), True, t_ms=7250)
    link = Link(Script(welcome, start), lambda: 1000.0)
    entry = link.join(Request("model"), ZEROS.copy(), checksum(ZEROS))
    assert entry.began == pytest.approx(1000.0 - 7.25 - 0.1)
    assert entry.status_s == 2.5
