"""The hub's driver: what is written before it is sent, and what strangers cost."""

from __future__ import annotations

import msgpack
import numpy as np
from loopback import Loopback

from edgetrain import codecs
from edgetrain.exchange.hub.effects import Note
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.record_file import scan
from edgetrain.exchange.hub.records import Round
from edgetrain.exchange.hub.serve import serve
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import (
    PROTOCOL,
    Base,
    Contribute,
    Join,
    Refuse,
    Reply,
    Resume,
    Start,
    pack,
    unpack,
)
from edgetrain.strategies import find
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.vector import checksum


class Room:
    """A hub that is served as long as messages are there."""

    def __init__(self, journal=None):
        codec = codecs.Dense()
        terms = Terms(find("local-sgd"), 1)
        self.hub = Hub(terms, Policy(1), Mean(), codec, codec)
        self.wires, self.journal, self.notes, self.now = Loopback(), journal, [], 0.0

    def serve(self):
        turns = iter([False, True])

        def stop():
            self.now += 1.0
            return next(turns)

        observe = self.notes.append
        serve(self.hub, self.wires, lambda: self.now, observe, stop, self.journal)

    def started(self, session=0):
        member = self.wires.connect()
        zeros = np.zeros(3, np.float32)
        member.send(pack(Join(PROTOCOL, "", "model", 3, "a", 1.0, checksum(zeros), session)))
        member.send(pack(Base(0, 1, zeros.data.cast("B"))))
        self.serve()
        return member, zeros


def heard(member):
    found = []
    while (frames := member.receive(0.0)) is not None:
        found.append(unpack(frames))
    return found


def test_a_round_is_in_the_journal_when_its_reply_leaves(tmp_path):
    journal = Journal(tmp_path)
    room = Room(journal)
    member, _ = room.started()
    seen = []
    send = room.wires.send

    def watch(to, frames):
        if frames[0] == Reply.kind:
            rounds = [record for record, _ in scan(next(tmp_path.glob("*.log")))]
            seen.append([r.round for r in rounds if isinstance(r, Round)])
        return send(to, frames)

    room.wires.send = watch
    for round in range(2):
        own = np.ones(3, np.float32).data.cast("B")
        known = room.hub.checksum(round)
        member.send(pack(Contribute(round, 0, 1, 1.0, round, known, 0, own)))
        room.serve()
    assert seen == [[0], [0, 1]]
    journal.close()
    again = Journal(tmp_path)
    assert [r.round for r in again.records() if isinstance(r, Round)] == [0, 1]
    again.close()


def test_who_missed_replies_is_sent_them_from_the_journal(tmp_path):
    journal = Journal(tmp_path)
    room = Room(journal)
    member, _ = room.started(session=9)
    for round in range(3):
        own = np.full(3, round, np.float32).data.cast("B")
        known = room.hub.checksum(round)
        member.send(pack(Contribute(round, 0, 1, 1.0, round, known, 0, own)))
        room.serve()
    heard(member)
    member.send(pack(Resume(PROTOCOL, "model", 3, "a", 9, 1, 0, 3, 3, 1)))
    room.serve()
    said = heard(member)
    replies = [m for m in said if isinstance(m, Reply)]
    assert [reply.round for reply in replies] == [1, 2]
    assert np.frombuffer(replies[1].payload, np.float32)[0] == 2
    assert replies[1].checksum == checksum(room.hub.base)
    (start,) = [m for m in said if isinstance(m, Start)]
    assert (start.applied, start.keep) == (1, True)
    journal.close()


def test_strangers_bytes_are_noted_one_in_ten_times_as_many():
    room = Room()
    stranger = room.wires.connect()
    for _ in range(250):
        stranger.send([b"Q", b"x"])
    room.serve()
    refused = [n.reason for n in room.notes if isinstance(n, Note) and n.event == "refused"]
    assert len(refused) == 3
    assert refused[-1].endswith("(100 so far)")
    assert heard(stranger) == []


def test_a_join_of_a_version_to_come_is_answered_whatever_else_it_says():
    room = Room()
    stranger = room.wires.connect()
    stranger.send([b"J", msgpack.packb([PROTOCOL + 4, "a field that is new", 1])])
    room.serve()
    (refuse,) = [m for m in heard(stranger) if isinstance(m, Refuse)]
    assert refuse.code == "protocol"
    assert str(PROTOCOL + 4) in refuse.reason
