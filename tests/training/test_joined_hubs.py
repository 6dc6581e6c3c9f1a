"""A loop of one's own that joins the lead of several hubs joins all of them."""

from __future__ import annotations

import contextlib
from functools import partial

import numpy as np
from children import HubThread, in_threads, joined

from edgetrain.exchange.hub.lead import LeadPart
from edgetrain.exchange.hub.shared import SharedPart
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.vectors.ranges import Stretch, shared

RANGES = 2


def trained(hubs):
    sockets = [HubSocket("tcp://127.0.0.1:0", 1 << 24) for _ in range(hubs)]
    at = [f"tcp://127.0.0.1:{socket.port}" for socket in sockets]
    own = shared(RANGES, hubs) if hubs > 1 else [Stretch(RANGES, 0, RANGES)]
    rows = [(a, "", s.first, s.end) for a, s in zip(at[1:], own[1:], strict=True)]
    parts = [LeadPart(None, at[0], rows), *(SharedPart() for _ in range(hubs - 1))]
    with contextlib.ExitStack() as stack:
        for socket, stretch, part in zip(sockets, own, parts, strict=True):
            thread = HubThread(
                socket, "dga", local_steps=2, delay=2, codec="int8", stretch=stretch, part=part
            )
            stack.enter_context(thread.serving())
        return in_threads(*[partial(joined, at[0], index, 8) for index in range(2)])


def test_it_ends_with_the_bits_of_one_hub():
    one, several = (trained(hubs) for hubs in (1, RANGES))
    assert np.array_equal(one[0], one[1])
    assert [each.tobytes() for each in several] == [each.tobytes() for each in one]
