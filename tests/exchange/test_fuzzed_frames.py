"""Mutated frames of what replicas, reducers and members say to each other: who reads them raises
only what it may, and holds no more memory than before."""

from __future__ import annotations

import contextlib
import os
import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgpack
import numpy as np
import pytest
from codec_mutations import mutate
from fakes.town import REPLICA, town

from edgetrain.errors import BadMessage, EdgetrainError, Refused
from edgetrain.exchange import further_messages, messages
from edgetrain.exchange.further_messages import (
    Copy,
    Follow,
    Handover,
    Hello,
    Ran,
    Reached,
    RunRound,
    Segment,
    Stored,
    Takeover,
)
from edgetrain.exchange.hub.lead import LeadPart
from edgetrain.exchange.hub.shared import SharedPart
from edgetrain.exchange.member.standby import Ballot
from edgetrain.exchange.messages import (
    PROTOCOL,
    Agree,
    Contribute,
    Join,
    Map,
    Offer,
    Reply,
    Standby,
    pack,
    unpack,
)
from edgetrain.exchange.peers.neighbours import Neighbours
from edgetrain.vectors.ranges import Stretch
from edgetrain.vectors.vector import checksum
from tests.fakes.direct_room import DirectRoom

MUTATIONS = int(os.environ.get("MUTATIONS", "200"))
"""Frames of each kind."""
FRESH = 500
"""Frames until those who read them are made anew: some of what is read ends them."""

KINDS = [
    Map, Reached, Takeover, Hello, Segment, RunRound, Ran, Follow, Copy, Stored, Standby, Offer,
    Agree, Reply, Contribute, Handover,
]  # fmt: skip
VALUES = [
          0, 1, 2, 3, 4, 6, 7, 8, 10, 16, 1 << 32, (1 << 32) + 2, (1 << 63) - 1, -1, True, False,
          0.5, "", "m0", "m1", "a", "tcp://10.0.0.1:5", "x" * 65, None,
          [], [["m0", 1]], [["m1", 0.5]],
          [["m0", "tcp://10.0.0.1:1", "", 0, 8], ["m1", "tcp://10.0.0.1:2", "", 8, 16]],
]  # fmt: skip


def examples() -> dict[type, list[bytes]]:
    """The frames of docs/reference/wire.md, by kind."""
    text = (Path(__file__).parents[2] / "docs/reference/wire.md").read_text("utf-8")
    (block,) = re.findall(r"```vectors\n(.*?)```", text, re.DOTALL)
    found = {}
    for vector in block.strip().split("\n\n"):
        spelled, *frames = vector.split("\n")
        name = spelled.partition("(")[0]
        kind = getattr(messages, name, None) or getattr(further_messages, name)
        found[kind] = [bytes.fromhex(f) for f in frames]
    return found


def direct_hub(room):
    """The lead of a job whose members host reducers: they have joined, and try each other."""
    for index, member in enumerate(room.members):
        join = Join(
            PROTOCOL, "", "model", room.elements, f"m{index}", 1.0, checksum(room.initial),
            index + 1, address=member.address,
        )  # fmt: skip
        room.lead.handle(b"m%d" % index, join, 0.0)
    return room.lead


def shared_hubs(room):
    """A hub with ranges that may move, whose members' sessions are known; a spare; the lead."""
    known = unpack(examples()[Handover]).session
    parts = {(0, 8): SharedPart(), (0, 0): SharedPart(), (0, 16): LeadPart(lambda address: None)}
    for span, part in parts.items():
        terms = replace(room.terms, stretch=Stretch(16, *span))
        hub = room.hub(terms, part)
        for index in range(len(room.members) if span[1] else 0):
            join = Join(
                PROTOCOL, "", "model", room.elements, f"m{index}", 1.0, checksum(room.initial),
                known + index,
            )  # fmt: skip
            hub.handle(b"m%d" % index, join, 0.0)
        yield hub


def readers(rng):
    """Whoever such a message may come to, as functions of it."""
    found = town(steps=12, seed=3, delay=0)
    while found.first.hub.round < 2:
        found.advance() or found.let_time_pass()
    for member in found.members:
        member.end()
    hub, replica, now = found.first.hub, found.replica, found.now
    senders = [member.address for member in found.members] + [REPLICA, b"stranger"]
    room = DirectRoom("fedavg", 3, 4)
    lead, reducer = direct_hub(room), room.reducer(0, 8)
    for member in room.members:
        member.exchange.vanish()  # a thread of each listens

    def tell(hub, message):
        is_told = isinstance(message, Follow) and message.epoch  # that its replica took over
        with contextlib.suppress(*[EdgetrainError] if is_told else []):
            hub.handle(rng.choice(senders), message, now)

    def follow(message):
        with contextlib.suppress(BadMessage, Refused):
            replica.handle_hub(message, now)

    def believe(message):
        if isinstance(message, Map):
            with contextlib.suppress(BadMessage):
                Neighbours.of(message, encrypted=False)

    def vote(message, ballot=Ballot()):  # noqa: B008
        if isinstance(message, Standby):
            ballot.accept_standby(message)
        elif isinstance(message, Offer):
            ballot.accept_offer(message)

    return [
        *(partial(tell, each) for each in shared_hubs(room)),
        partial(tell, hub), partial(tell, lead), partial(tell, reducer), follow, believe, vote,
        lambda message: replica.handle_member(rng.choice(senders), message, now),
    ]  # fmt: skip


def mutated(frames, rng, numbers):
    """A frame, or a field of the header, is another."""
    frames = list(frames)
    if rng.random() < 0.5:
        at = rng.randrange(len(frames))
        frames[at] = mutate(frames[at], numbers)
        return frames
    values = msgpack.unpackb(frames[1])
    for _ in range(rng.randint(0, 2)):
        if values:
            values[rng.randrange(len(values))] = rng.choice(VALUES)
    frames[1] = msgpack.packb(values)
    if len(frames) > 2:
        frames[2] = rng.choice([frames[2], b"", rng.randbytes(20), bytes(4 * rng.randint(0, 40))])
    return frames


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_mutated_frames_raise_only_what_they_may(kind):
    rng, numbers = random.Random(kind.__name__), np.random.default_rng(1)
    original, read, understood = examples()[kind], [], 0
    for count in range(MUTATIONS):
        if count % FRESH == 0:
            read = readers(rng)
        try:
            message = unpack(mutated(original, rng, numbers))
        except BadMessage:
            continue
        pack(message)
        understood += 1
        for reader in read:
            reader(message)
    print(f"{kind.__name__}: {MUTATIONS:,} frames, of which {understood:,} are messages")
