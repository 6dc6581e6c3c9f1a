"""Members of a collective in memory: queues between every two places."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from edgetrain.exchange.peers.summing import Portions, Summing


def means(schedule, contributions, weights, pick=lambda waiting: waiting[0]):
    """What each place ends with, and how much each has sent. `pick` chooses who goes on, of the
    places that can."""
    shares = Portions(weights)
    parts = [Summing(schedule, place, own, shares) for place, own in enumerate(contributions)]
    ways, sent = defaultdict(deque), [0] * len(parts)

    def send(place):
        for action, payload in parts[place].sendable():
            sent[place] += memoryview(payload).nbytes
            message = (action.segment, action.adds, bytearray(payload))
            ways[place, action.place].append(message)

    for place in range(len(parts)):
        send(place)
    while waiting := [p for p, part in enumerate(parts) if part.wanted is not None]:
        able = [p for p in waiting if ways[parts[p].wanted.place, p]]
        assert able, "nobody can go on"
        place = pick(able)
        wanted = parts[place].wanted
        segment, adds, payload = ways[wanted.place, place].popleft()
        assert (segment, adds) == (wanted.segment, wanted.adds), "out of order"
        parts[place].accept(payload)
        send(place)
    assert not any(ways.values()), "something is never received"
    empty = np.zeros(0, np.float32)
    return [np.concatenate([empty, *part.pieces()]) for part in parts], sent
