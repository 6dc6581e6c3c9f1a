"""Keys that are revoked while a hub runs, one place a key, and how often its owner may come."""

from __future__ import annotations

import os
import threading
import time
from socket import socketpair

import numpy as np
import pytest
from fleet import Disk
from hub_desk import ELEMENTS, ZEROS, Desk, back, lost, raw, refusal, the
from hypothesis import given
from hypothesis import strategies as st
from loopback import Loopback, LoopbackMember

from edgetrain.codecs import Dense
from edgetrain.errors import Refused
from edgetrain.exchange.hub.effects import Closed, Send, Write
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.records import Departed
from edgetrain.exchange.hub.serve import serve
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.keys.gate import Gate
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.limits import ENTRIES_A_MINUTE, SenderRate
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.messages import PROTOCOL, Base, Join, Leave, Reply, Start, Welcome, pack
from edgetrain.exchange.seam import Request, Submission
from edgetrain.exchange.transport import owned
from edgetrain.exchange.zeromq.curve import new_pair
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_connections import MemberConnections
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.strategies import find
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.vector import checksum


def key_of(letter):
    return letter.encode() * 32


def at(letter, connection="1"):
    """The name of a connection that was proved with the key of this letter."""
    return owned(key_of(letter), connection.encode()).decode()


class Keyed(Desk):
    """A desk that keeps a journal; members are called by the letter of their key."""

    def __init__(self, members="abc", **policy):
        super().__init__(len(members), **policy)
        self.disk = Disk()
        for number, name in enumerate(members, 1):
            self.join(at(name), name=name, session=number)
        self.tell(at(members[0]), Base(0, 1, raw(ZEROS)))
        assert self.hub.started
        self.disk.save(self.hub.state())
        self.notes.clear()

    def take(self, effects):
        super().take(effects)
        for effect in effects:
            if isinstance(effect, Write) and hasattr(self, "disk"):
                self.disk.append(effect.record)

    def revoke(self, letter, rest):
        """Only the keys of `rest` are left; what the hub then says."""
        self.said = {}
        self.take(self.hub.revoke_all_but({key_of(name) for name in rest}, self.now))
        return self.said

    def restored(self, **policy):
        again = Desk(len("abc"), **policy)
        again.hub.restore(self.disk.state, self.disk.records(), 0.0)
        return again.hub


def test_a_revoked_member_is_expelled_at_once_and_sent_nothing_more():
    desk = Keyed(deadline_s=60)
    for name in "ab":
        said = desk.give(at(name), 0, np.full(ELEMENTS, 1))
    assert not said, "the round waits for c"
    said = desk.revoke("c", "ab")
    assert sorted(said) == [at("a"), at("b")]
    assert the(Reply, said[at("a")]).members == 2
    assert desk.hub.present == ["a", "b"]
    assert ("gone", "c") in desk.events()
    assert at("c") not in desk.tick(10)
    for name in "ab":
        checksum = desk.hub.checksum(1)
        said = desk.give(at(name), 1, applied=1, checksum=checksum)
    assert sorted(said) == [at("a"), at("b")]


def test_a_revoked_key_has_no_way_back_also_after_a_restart():
    desk = Keyed(lost_after_s=1)
    lost(desk, at("b"))  # away
    desk.revoke("bc", "a")
    assert [r for r in desk.disk.records() if isinstance(r, Departed) and r.final] != []
    assert len(desk.hub.members.away) == 0
    hub = desk.restored()
    assert hub.present == ["a"]
    assert len(hub.members.away) == 0
    assert refusal(desk, back(desk, at("b"), session=2), at("b"))[0] == "session"
    assert the(Welcome, desk.join(at("d"), name="c")[at("d")]).name == "c", "the name is free"


def test_members_without_a_key_cannot_be_revoked():
    desk = Desk(2).started()
    desk.take(desk.hub.revoke_all_but(set(), 0.0))
    assert desk.hub.present == ["a", "b"]


def test_a_job_whose_only_member_is_revoked_waits_for_another():
    desk = Keyed("a", rejoin_s=5, empty_after_s=30)
    desk.revoke("a", "")
    assert not desk.hub.finished
    assert not desk.restored().finished
    desk.tick(1)
    desk.tick(29)
    assert not desk.hub.finished
    desk.tick(2)
    assert desk.hub.finished


def test_a_member_whose_key_was_revoked_while_the_hub_was_down_is_not_waited_for():
    desk = Keyed()
    hub = desk.restored()
    effects = hub.revoke_all_but({key_of("a"), key_of("b")}, 0.0)
    assert hub.present == ["a", "b"]
    assert not [e for e in effects if isinstance(e, Send) and e.to == at("c").encode()]


def test_the_driver_revokes_when_the_list_has_changed():
    desk = Keyed("ab")
    lists = [{key_of("a"): "a", key_of("b"): "b"}, {key_of("b"): "b"}]
    turns = iter([False, False, True])
    present = []

    def stop():
        present.append(list(desk.hub.present))
        return next(turns)

    asked = iter([lists[0], lists[1]])
    serve(desk.hub, Loopback(), lambda: 0.0, lambda effect: None, stop, keys=lambda: next(asked))
    assert present[0] == ["a", "b"]
    assert desk.hub.present == ["b"]


# -- one place a key ------------------------------------------------------------------------------


def test_one_key_has_one_place():
    desk = Keyed("abc")
    desk.tell(at("c"), Leave(""))
    code, reason = refusal(desk, desk.join(at("a", "2"), name="x"), at("a", "2"))
    assert code == "name"
    assert "'a' is there already with this key" in reason
    assert desk.hub.present == ["a", "b"]


def test_a_member_that_is_away_does_not_come_back_beside_another_of_its_key():
    desk = Keyed("abc", lost_after_s=1)
    lost(desk, at("c"))
    assert the(Welcome, desk.join(at("c", "2"), name="x")[at("c", "2")])
    code, _ = refusal(desk, back(desk, at("c", "3"), name="c", session=3), at("c", "3"))
    assert code == "name"
    assert desk.hub.present == ["a", "b", "x"]


def test_whoever_started_anew_under_another_name_takes_the_place_of_its_lost_connection():
    desk = Keyed("abc", lost_after_s=50)
    desk.take(desk.hub.unreachable(at("c").encode(), desk.now))
    assert the(Start, desk.join(at("c", "2"), name="x")[at("c", "2")])
    assert desk.hub.present == ["a", "b", "x"]


DEEDS = st.sampled_from(["join", "anew", "leave", "lost", "back", "tick"])


@given(st.lists(st.tuples(DEEDS, st.sampled_from("abcd"), st.sampled_from("stuv")), max_size=30))
def test_no_history_gives_a_key_two_places(history):
    desk = Keyed("abc", lost_after_s=1)
    for number, (deed, letter, name) in enumerate(history):
        where = at(letter, str(number))
        there = next((m for m in desk.hub.members if m.sender[1:33] == key_of(letter)), None)
        match deed:
            case "join" | "anew":
                desk.join(where, name=name if deed == "join" else "", session=100 + number)
            case "leave" if there is not None:
                desk.tell(there.sender.decode(), Leave(""))
            case "lost" if there is not None:
                desk.take(desk.hub.unreachable(there.sender, desk.now))
            case "back":
                away = [*desk.hub.members.away, *desk.hub.members]
                for one in [m for m in away if m.name == name]:
                    back(desk, where, name=name, session=one.session)
            case _:
                desk.tick(2)
        keys = [member.sender[1:33] for member in desk.hub.members]
        assert len(keys) == len(set(keys))
        for restored in desk.restored().members:
            assert restored.name in desk.hub.present


# -- how often ------------------------------------------------------------------------------------


def test_entries_are_counted_by_key_and_minute():
    entries = SenderRate(2, 60.0)
    assert [entries.count_message(b"k", 1.0) for _ in range(3)] == [True, True, False]
    assert entries.count_message(b"other", 1.0)
    assert not entries.count_message(b"k", 59.0)
    assert entries.count_message(b"k", 60.0)


@pytest.mark.parametrize("key", [True, False])
def test_an_insider_that_joins_and_leaves_without_end_writes_a_bounded_journal(key):
    desk = Keyed("ab")
    desk.tell(at("b"), Leave(""))
    writes, wires = [], Loopback()
    end = LoopbackMember(wires, at("z").encode() if key else b"z")
    join = Join(PROTOCOL, "job-a", "model", ELEMENTS, "z", 1.0, desk.hub.checksum(0), 9)
    for _ in range(4 * ENTRIES_A_MINUTE):
        end.send(pack(join))
        end.send(pack(Leave("")))
    handle = desk.hub.handle

    def counted(sender, message, now):
        effects = handle(sender, message, now)
        writes.extend(e for e in effects if isinstance(e, Write))
        return effects

    desk.hub.handle = counted
    notes, turns = [], iter([False, True])
    serve(desk.hub, wires, lambda: 0.0, notes.append, lambda: next(turns))
    assert len(writes) == 2 * (ENTRIES_A_MINUTE if key else 4 * ENTRIES_A_MINUTE)
    assert any("within a minute" in note.reason for note in notes) == key


# -- over sockets ---------------------------------------------------------------------------------


def test_a_device_that_is_revoked_while_it_trains_is_gone_within_a_second(tmp_path):
    """The other goes on, and the revoked one learns why it is not answered."""
    ring = Keyring(tmp_path)
    hub_key = ring.init(new_pair).public
    pairs = [new_pair(), new_pair()]
    for number, pair in enumerate(pairs):
        ring.allow(pair.public, f"pi-{number}")
    gate = Gate(ring)
    socket = HubSocket("tcp://127.0.0.1:0", gate=gate)
    hub = Hub(Terms(find("local-sgd"), 1), Policy(2, heartbeat_s=0.1), Mean(), Dense(), Dense())
    closed, over = [], threading.Event()

    def observe(effect):
        closed.extend([effect] if isinstance(effect, Closed) else [])

    serving = threading.Thread(
        target=lambda: serve(hub, socket, time.monotonic, observe, over.is_set, keys=gate.allowed)
    )
    serving.start()
    links = []
    try:
        for number, pair in enumerate(pairs):
            end = MemberSocket(socket.address, credentials=Credentials(pair, hub_key))
            links.append(Link(end, time.monotonic, hub_timeout_s=20))
            join = lambda link=links[-1], n=number: link.join(  # noqa: E731
                Request("model", f"m{n}"),
                np.zeros(3, np.float32),
                checksum(np.zeros(3, np.float32)),
            )
            if number == 0:
                first = threading.Thread(target=join)
                first.start()
            else:
                join()
        first.join(20)
        known = checksum(np.zeros(3, np.float32))
        links[0].submit(Submission(0, np.ones(3, np.float32), 1.0, 0, known))
        ring.revoke("pi-1")
        assert links[0].wait(0).members == 1  # and not after the deadline of a minute
        with pytest.raises(Refused, match="does not let this machine's key in"):
            links[1].wait(0)
        assert hub.present == ["m0"]
    finally:
        over.set()
        serving.join(10)
        for link in links:
            link.vanish()
        socket.close()


def test_connections_are_ended_by_key_and_descriptors_that_were_reused_are_left_alone():
    ours, theirs = socketpair()
    other, far = socketpair()
    with ours, theirs, other, far:
        known = MemberConnections(most=2)
        known.message_came(at("a").encode(), ours.fileno())
        known.message_came(at("b").encode(), other.fileno())
        assert known.hang_up_all_but({key_of("b")}) == {key_of("a")}
        assert theirs.recv(1) == b"", "it is told that the connection is over"
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
        descriptor = other.fileno()
        known.message_came(at("c").encode(), descriptor)
        os.dup2(ours.fileno(), descriptor)  # another socket has its number now
        assert known.hang_up_all_but(set()) == set()
        known.message_came(at("d").encode(), 10**6)  # closed
