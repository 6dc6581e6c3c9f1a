"""Members that connect to each other: whom they reach, whom they hear, and hosting a reducer."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
from patience import patience

from edgetrain import codecs, strategies
from edgetrain.errors import Refused
from edgetrain.exchange.further_messages import Hello
from edgetrain.exchange.hub.direct import MappedPart
from edgetrain.exchange.hub.places import LEAD
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.serve import serve
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.keys.gate import Gate
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import Credentials, spell
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.messages import CLIENT, PROTOCOL, Beat, Join, Map, Peer, pack, unpack
from edgetrain.exchange.peers.dialled import Dialled, dialling, try_all
from edgetrain.exchange.peers.listener import Listener, listen
from edgetrain.exchange.peers.neighbours import Neighbours
from edgetrain.exchange.peers.peering import MappedEnd, Peering
from edgetrain.exchange.seam import Request, Submission
from edgetrain.exchange.zeromq.curve import new_pair
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.vector import checksum
from tests.fakes.loopback import Loopback, LoopbackMember

pytestmark = pytest.mark.real

ELEMENTS = 600
PATIENCE_S = patience(60.0)
ZEROS = np.zeros(ELEMENTS, np.float32)


def parts(members):
    terms = Terms(strategies.find("fedavg"), 1, job="job-a")
    policy = Policy(members, heartbeat_s=0.2)
    return terms, policy, Mean(True), codecs.Dense(), codecs.Dense()


def map_of(name="a", ticket=7, number=1, trying=False, keys=None, **addresses):
    """A map of the members at these addresses; the hub reduces everything."""
    rows = tuple(
        Peer(each, where, spell(keys[each]) if keys else "") for each, where in addresses.items()
    )
    return Map(number, trying, ticket, name, 0, 0 if trying else 1, rows)


# -- who is heard, over a link in memory ------------------------------------------------------


class Room:
    """A listener of member a in memory, and what it heard."""

    def __init__(self, **other):
        self.loopback = Loopback()
        self.listener = Listener(self.loopback)
        self.heard = []
        self.let_in(**other)

    def let_in(self, **other):
        self.listener.let_in(Neighbours.of(map_of(a="", b="", c="", **other), encrypted=False))

    def said(self, end, message):
        """What comes back over this connection."""
        end.send(pack(message))
        self.heard += [unpack(frames) for _, frames in self.listener.poll(0.0)]
        frames = end.receive(0.0)
        return None if frames is None else unpack(frames)


def test_only_who_has_said_who_it_is_is_heard():
    room = Room()
    end = room.loopback.connect()
    assert room.said(end, Beat()).code == "unknown"
    assert room.heard == []
    assert room.said(end, Hello(8, "b", "a")).code == "unknown"
    assert room.said(end, Hello(7, "b", "c")).code == "unknown"
    assert room.said(end, Hello(7, "x", "a")).code == "unknown"
    assert room.said(end, Hello(7, "b", "a")) == Hello(7, "a", "b")
    assert room.said(end, Beat()) is None
    assert room.heard == [Beat()]


def test_a_member_that_the_next_map_does_not_name_is_not_heard_any_more():
    room = Room()
    end, other = room.loopback.connect(), room.loopback.connect()
    room.said(end, Hello(7, "b", "a"))
    room.said(other, Hello(7, "c", "a"))
    room.listener.let_in(Neighbours.of(map_of(number=2, a="", c=""), encrypted=False))
    assert room.said(end, Beat()).code == "unknown"
    assert room.said(other, Beat()) is None


def test_a_member_cannot_join_under_anothers_name():
    room = Room()
    end = room.loopback.connect()
    room.said(end, Hello(7, "b", "a"))
    asked = Join(PROTOCOL, "", "m", 5, "c", 1.0, 0)
    assert room.said(end, asked).code == "name"
    assert room.heard == []


def test_garbled_greetings_are_dropped():
    room = Room()
    end = room.loopback.connect()
    end.send([b"I", b"\xff"])
    assert list(room.listener.poll(0.0)) == []
    assert end.receive(0.0) is None


def test_who_dials_too_early_is_heard_once_the_map_is_there():
    now = [0.0]
    loopback = Loopback()
    listener = Listener(loopback)
    found = Neighbours.of(map_of("b", a="", b=""), encrypted=False)
    end = Dialled(loopback.connect(), found.hello_to("a"), lambda: now[0])
    end.send(pack(Join(PROTOCOL, "", "m", 5, "b", 1.0, 0)))
    heard = [frames for _, frames in listener.poll(0.0)]
    assert end.receive(0.0) is None
    listener.let_in(Neighbours.of(map_of(a="", b=""), encrypted=False))
    for _ in range(5):
        now[0] += 0.1
        assert end.receive(0.0) is None
        heard += [frames for _, frames in listener.poll(0.0)]
    assert heard
    assert {type(unpack(frames)) for frames in heard} == {Join}
    listener.send(b"loopback-0", pack(Beat(3)))
    assert unpack(end.receive(0.0)) == Beat(3)


# -- over real sockets ------------------------------------------------------------------------


class Member:
    """A member with a listener, without training."""

    def __init__(self, pair, client=False):
        listener, self.address = (None, CLIENT) if client else listen("tcp://127.0.0.1:0", pair)
        self.pair = pair
        self.peering = Peering(listener, pair)


@pytest.fixture
def closing():
    with contextlib.ExitStack() as stack:
        yield stack


def fleet(closing, names, encrypted):
    found = {name: Member(new_pair() if encrypted else None) for name in names}
    for member in found.values():
        closing.callback(member.peering.close)
    keys = {name: member.pair.public for name, member in found.items()} if encrypted else None
    return found, keys


def try_each_other(members, keys, **other):
    """All take the same map at the same time; who reached whom."""
    addresses = {name: member.address for name, member in members.items()} | other
    answers = {}

    def run(name, member):
        answers[name] = member.peering.accept(map_of(name, trying=True, keys=keys, **addresses))

    threads = [threading.Thread(target=run, args=each) for each in members.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: [who for who, _ in answer.reached] for name, answer in answers.items()}


@pytest.mark.parametrize("encrypted", [False, True])
def test_members_reach_each_other_and_measure_the_way(closing, encrypted):
    members, keys = fleet(closing, "abc", encrypted)
    assert try_each_other(members, keys) == {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]}


def test_nobody_reaches_a_stranger_at_a_members_address(closing):
    """The map names c; at c's address is a machine with another key, or no machine."""
    members, keys = fleet(closing, "ab", True)
    stranger = Member(new_pair())
    closing.callback(stranger.peering.close)
    keys["c"] = new_pair().public
    found = Neighbours.of(
        map_of("a", keys=keys, trying=True, b=members["b"].address, c=stranger.address, a=""), True
    )
    reached = try_all(found, dialling(members["a"].pair), time.monotonic, 1.0)
    assert reached == ()  # b has no map yet either


class Barred(LoopbackMember):
    """An end that lets no message out until it is made anew, as libzmq's once a key is refused."""

    is_barred, sent = False, 0

    def send(self, frames):
        if self.is_barred:
            raise Refused("key", "not let in")
        self.sent += 1

    def reconnect(self):
        super().reconnect()
        self.is_barred = False


def test_a_refusal_that_is_seen_while_sending_is_one_that_may_pass():
    now, end = [0.0], Barred(Loopback(), b"b")
    end.is_barred = True
    dialled = Dialled(end, Hello(7, "b", "a"), lambda: now[0], patience_s=60.0)
    dialled.greet()
    now[0] = 59.0
    assert dialled.receive(0.0) is None
    assert end.sent == 1
    end.is_barred, now[0] = True, 200.0
    dialled.greet()
    end.reconnect, now[0] = lambda: None, 300.0
    with pytest.raises(Refused):
        dialled.receive(0.0)


def stand_before(members, keys):
    """The map is at all of them."""
    for name, member in members.items():
        addresses = {each: other.address for each, other in members.items()}
        member.peering.accept(map_of(name, keys=keys, **addresses))


def greeted(pair, member, to="a", name="b", ticket=7, most_s=3.0):
    """Whether a peer with this pair is answered."""
    credentials = None if pair is None else Credentials(pair, member.pair.public)
    end = MemberSocket(member.address, credentials=credentials)
    dialled = Dialled(end, Hello(ticket, name, to), patience_s=0.3)
    until = time.monotonic() + most_s
    try:
        dialled.greet()
        while not dialled.greeted and time.monotonic() < until:
            frames = dialled.receive(0.05)
            if frames is not None:
                return unpack(frames).code
    except Refused as refused:
        return refused.code
    finally:
        dialled.close()
    return bool(dialled.greeted)


def test_strangers_members_of_another_job_and_the_revoked_are_refused(closing):
    members, keys = fleet(closing, "ab", True)
    stand_before(members, keys)
    a, b = members["a"], members["b"]
    assert greeted(b.pair, a) is True
    assert greeted(new_pair(), a) == "key"
    assert greeted(b.pair, a, ticket=8) == "unknown"
    assert greeted(b.pair, a, name="a") == "unknown"
    a.peering.accept(map_of(number=2, keys=keys, a=a.address))
    assert greeted(b.pair, a) == "key"


def test_a_revoked_members_connection_is_ended(closing):
    members, keys = fleet(closing, "ab", True)
    stand_before(members, keys)
    a, b = members["a"], members["b"]
    end = dialling(b.pair)(b.peering.neighbours.by_name["a"], b.peering.neighbours)
    closing.callback(end.close)
    end.greet()
    until = time.monotonic() + PATIENCE_S
    while not end.greeted and time.monotonic() < until:
        end.receive(0.05)
    a.peering.accept(map_of(number=2, keys=keys, a=a.address))

    def listen_on():
        while time.monotonic() < until:
            end.receive(0.05)

    with pytest.raises(Refused):  # libzmq connects again, and is not let in
        listen_on()


def test_no_thread_and_no_port_is_left_behind():
    before = threading.active_count()
    member = Member(None)
    host, port = member.address.removeprefix("tcp://").split(":")
    member.peering.accept(map_of(a=member.address))
    member.peering.host(Hub(*parts(1)))
    assert threading.active_count() > before
    member.peering.close()
    member.peering.close()
    assert threading.active_count() == before
    HubSocket(f"tcp://{host}:{port}").close()


# -- the whole way: join, try, map, a reducer in a member -------------------------------------


def served(closing, hub, socket, gate=None):
    stop = threading.Event()
    keys = None if gate is None else gate.allowed
    arguments = hub, socket, time.monotonic, lambda effect: None, stop.is_set
    thread = threading.Thread(target=serve, args=arguments, kwargs={"keys": keys})
    thread.start()
    closing.callback(socket.close)
    closing.callback(thread.join)
    closing.callback(stop.set)


def reduce_at_first(reach):
    names = reach.reached_by_all()
    return {names[0]: (0, 1)} if names else {LEAD: (0, 1)}


class Run(threading.Thread):
    """A member that joins the lead, then the reducer, and gives one round of its own to that."""

    def __init__(self, member, address, credentials, number):
        super().__init__()
        self.member, self.number = member, number
        self.reply, self.error = None, None
        end = MappedEnd(MemberSocket(address, credentials=credentials), member.peering)
        self.lead = Link(end, time.monotonic)
        self.start()

    def run(self):
        try:
            self._run()
        except BaseException as error:
            self.error = error

    def _run(self):
        peering, where = self.member.peering, self.member.address
        request = Request("model", f"m{self.number}", job="job-a", address=where)
        params = ZEROS.copy()
        self.lead.join(request, params, checksum(params))
        (reducer,) = peering.neighbours.reducers
        if reducer == peering.neighbours.own:
            peering.host(Hub(*parts(3)))
        link = Link(peering.dial(reducer, peering.neighbours), time.monotonic)
        link.join(request, params, checksum(params))
        own = np.full(ELEMENTS, self.number, np.float32)
        link.submit(Submission(0, own, 1.0, 0, checksum(params)))
        self.reply = np.concatenate(link.wait(0).pieces)
        link.leave("done")
        self.lead.leave("done")
        assert peering.wait_for_end(PATIENCE_S)
        peering.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_members_average_at_a_reducer_that_one_of_them_hosts(closing, tmp_path, encrypted):
    gate = None
    pairs = [new_pair() if encrypted else None for _ in range(3)]
    if encrypted:
        ring = Keyring(tmp_path)
        ring.init(new_pair)
        for number, pair in enumerate(pairs):
            ring.allow(pair.public, f"pi-{number}")
        gate = Gate(ring)
    socket = HubSocket("tcp://127.0.0.1:0", gate=gate)
    lead = MappedPart(reduce_at_first).attach(Hub(*parts(3)))
    served(closing, lead, socket, gate)
    members = [Member(pair, client=number == 0) for number, pair in enumerate(pairs)]
    before = threading.active_count()
    runs = [
        Run(member, socket.address, Credentials(member.pair, gate.pair.public) if gate else None, n)
        for n, member in enumerate(members)
    ]
    for run in runs:
        run.join(PATIENCE_S)
        if run.error is not None:
            raise run.error
    assert all((run.reply == 1.0).all() for run in runs)  # the mean of 0, 1 and 2
    assert threading.active_count() <= before
