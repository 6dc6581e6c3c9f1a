"""One suite for every transport, and what only ZeroMQ over TCP can get wrong."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import zmq
from loopback import Loopback
from patience import patience

from edgetrain.errors import HubUnreachable, NetworkError
from edgetrain.exchange.addresses import check_reachable, split_address
from edgetrain.exchange.messages import Beat, Leave, pack
from edgetrain.exchange.transport import SILENCE_S
from edgetrain.exchange.zeromq.frames import ZERO_COPY_BYTES, set_options
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.exchange.zeromq.tcp_counters import connection_to

pytestmark = pytest.mark.real

PATIENCE_S = patience(60.0)


class Loop:
    """A hub's end and a way to make members' ends."""

    def __init__(self):
        self.hub = Loopback()
        self.ends = []

    def connect(self):
        self.ends.append(self.hub.connect())
        return self.ends[-1]

    def close(self):
        for end in self.ends:
            end.close()
        self.hub.close()


class Zmq(Loop):
    def __init__(self):
        self.hub = HubSocket("tcp://127.0.0.1:0")
        self.ends = []

    def connect(self):
        self.ends.append(MemberSocket(self.hub.address))
        return self.ends[-1]


@pytest.fixture(params=[Loop, Zmq], ids=["loopback", "zmq"])
def wires(request):
    found = request.param()
    yield found
    found.close()


def heard(hub, count):
    """So many messages, as they come."""
    found = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
        found += [(sender, [bytes(f) for f in frames]) for sender, frames in hub.poll(0.1)]
    return found


def test_messages_go_both_ways_in_order(wires):
    a, b = wires.connect(), wires.connect()
    for i in range(50):
        a.send([b"a", b"%d" % i])
        b.send([b"b", b"%d" % i, b"payload"])
    found = heard(wires.hub, 100)
    senders = {frames[0]: sender for sender, frames in found}
    assert len(set(senders.values())) == 2
    for letter, frames_in_each in ((b"a", 2), (b"b", 3)):
        own = [frames for _, frames in found if frames[0] == letter]
        assert [int(frames[1]) for frames in own] == list(range(50))
        assert {len(frames) for frames in own} == {frames_in_each}
        assert {sender for sender, frames in found if frames[0] == letter} == {senders[letter]}
    for i in range(50):
        assert wires.hub.send(senders[b"a"], [b"x", b"%d" % i])
    got = [a.receive(PATIENCE_S) for _ in range(50)]
    assert [int(bytes(frames[1])) for frames in got] == list(range(50))
    assert b.receive(0.0) is None


def test_nothing_there_is_none_or_nothing(wires):
    member = wires.connect()
    assert member.receive(0.0) is None
    assert member.receive(0.01) is None
    assert list(wires.hub.poll(0.0)) == []
    assert list(wires.hub.poll(0.01)) == []


def test_a_peer_that_is_not_there_is_false(wires):
    assert wires.hub.send(b"nobody", [b"x"]) is False


def test_a_peer_that_left_is_false(wires):
    member = wires.connect()
    member.send([b"hello"])
    ((sender, _),) = heard(wires.hub, 1)
    assert wires.hub.send(sender, [b"x"]) is True
    member.close()
    deadline = time.monotonic() + PATIENCE_S
    while wires.hub.send(sender, [b"x"]):
        assert time.monotonic() < deadline
        list(wires.hub.poll(0.01))


def test_the_same_frames_reach_everyone(wires):
    ends = [wires.connect() for _ in range(3)]
    for end in ends:
        end.send([b"hello"])
    frames = [b"R", b"header", bytes(range(256)) * 1000]
    for sender, _ in heard(wires.hub, 3):
        assert wires.hub.send(sender, frames)
    for end in ends:
        assert [bytes(f) for f in end.receive(PATIENCE_S)] == frames


@pytest.mark.parametrize("size", [0, 1, ZERO_COPY_BYTES, 5_000_001])
def test_payloads_of_any_size_and_kind(wires, size):
    member = wires.connect()
    member.send([b"hello"])  # a hub ends a stranger whose first message is larger than a join
    heard(wires.hub, 1)
    payload = bytearray(size)
    if size:
        payload[0], payload[-1] = 7, 9
    for kind in (bytes, bytearray, memoryview):
        member.send([b"C", b"h", kind(payload)])
    found = heard(wires.hub, 3)
    assert [frames[2] for _, frames in found] == [bytes(payload)] * 3
    wires.hub.send(found[0][0], [b"R", b"h", memoryview(payload)])
    assert bytes(member.receive(PATIENCE_S)[2]) == bytes(payload)


def test_received_payloads_outlive_the_transport(wires):
    member = wires.connect()
    member.send([b"C", b"h", b"x" * 100_000])
    frames = None
    deadline = time.monotonic() + PATIENCE_S
    while frames is None and time.monotonic() < deadline:
        frames = next((frames for _, frames in wires.hub.poll(0.1)), None)
    wires.close()
    assert bytes(frames[2]) == b"x" * 100_000


def test_what_was_sent_before_closing_arrives(wires):
    member = wires.connect()
    member.send([b"a", b"x" * 1_000_000])
    member.send(pack(Leave("done")))
    member.close()
    assert [frames[0] for _, frames in heard(wires.hub, 2)] == [b"a", b"L"]


def test_closing_twice(wires):
    member = wires.connect()
    member.close()
    member.close()
    wires.hub.close()
    wires.hub.close()


# -- TCP ------------------------------------------------------------------------------------------


@pytest.fixture
def hub():
    found = HubSocket("tcp://127.0.0.1:0")
    yield found
    found.close()


def test_a_port_in_use_is_named(hub):
    with pytest.raises(NetworkError, match=f"port {hub.port} on 127.0.0.1 is in use.*another hub"):
        HubSocket(hub.address)


def test_an_address_that_is_not_ours_is_named():
    with pytest.raises(NetworkError, match=r"cannot listen on 192\.0\.2\.1:5555.*this machine's"):
        HubSocket("tcp://192.0.2.1:5555")


@pytest.mark.parametrize(
    "address",
    ["", "hub", "hub:5555", "tcp://hub", "tcp://:5555", "udp://hub:1", "tcp://h:70000", "tcp://h:x",
     "tcp://h:1/path", "tcp://[::1:5"],
)  # fmt: skip
def test_what_is_no_address_is_refused(address):
    with pytest.raises(NetworkError, match="is not an address"):
        split_address(address)


def test_addresses_are_split():
    assert split_address("tcp://hub.local:5555") == ("hub.local", 5555)
    assert split_address("tcp://[::1]:0") == ("::1", 0)


def test_the_hub_can_be_reached(hub):
    assert check_reachable(hub.address, 5.0) == "127.0.0.1"


def test_a_refused_port_is_named():
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(HubUnreachable, match=f"nothing listens at {address}"):
            check_reachable(address, 5.0)


def test_a_name_that_cannot_be_resolved_is_named():
    with pytest.raises(HubUnreachable, match=r"'no-such\.invalid' cannot be resolved"):
        check_reachable("tcp://no-such.invalid:5555", 5.0)


@pytest.mark.parametrize(
    ("error", "said"),
    [(TimeoutError(), "no answer from .* within 0.5 s"), (OSError(101, "no route"), "no route")],
)
def test_silence_and_missing_routes_are_named(monkeypatch, error, said):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(socket, "create_connection", fails)
    with pytest.raises(HubUnreachable, match=said):
        check_reachable("tcp://192.0.2.1:5555", 0.5)


def test_traffic_is_counted_by_the_kernel(hub):
    member = MemberSocket(hub.address)
    member.send([b"C", b"h", b"x" * 200_000])
    ((sender, _),) = heard(hub, 1)
    hub.send(sender, [b"R", b"h", b"y" * 100_000])
    assert member.receive(PATIENCE_S)
    traffic = member.traffic()
    assert 200_000 < traffic.sent_bytes < 210_000
    assert 100_000 < traffic.received_bytes < 110_000
    assert 0 < traffic.round_trip_s < 1
    member.close()


def test_an_address_that_says_nothing_gives_way_to_the_next(hub):
    """One that did say something is tried again first. Bytes over all of them are counted."""
    first, second = HubSocket("tcp://127.0.0.1:0"), hub
    member = MemberSocket([first.address, second.address])
    member.send([b"J" * 100_000])
    ((sender, _),) = heard(first, 1)
    first.send(sender, [b"W"])
    assert member.receive(PATIENCE_S)
    assert member.traffic().sent_bytes > 100_000
    member.reconnect()
    member.send([b"R"])
    assert heard(first, 1) == [(sender, [b"R"])], "from here, and under the same name"
    first.close()
    member.reconnect()
    member.send([b"R" * 100_000])
    assert [name for name, _ in heard(second, 1)] == [sender]
    assert member.traffic().sent_bytes > 200_000
    member.reconnect()
    member.send([b"R"])
    assert list(second.poll(0.3)) == [], "the turn of the first again"
    member.close()


def test_messages_over_the_limit_end_the_connection_before_they_are_read():
    hub = HubSocket("tcp://127.0.0.1:0", max_message_bytes=1000)
    member = MemberSocket(hub.address)
    member.send([b"ok"])
    assert heard(hub, 1)
    member.send([b"x" * 1001])
    member.send([b"after"])
    assert all(len(f) < 1001 for _, frames in hub.poll(0.3) for f in frames)
    member.close()
    hub.close()


def test_bytes_that_are_no_zmq_do_not_disturb_the_others(hub):
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        member = MemberSocket(hub.address)
        member.send(pack(Beat()))
        assert heard(hub, 1)[0][1] == [bytes(f) for f in pack(Beat())]
        member.close()


class Narrow:
    """A TCP proxy that lets so many bytes a second through each way."""

    def __init__(self, port, bytes_per_s):
        self.rate = bytes_per_s
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.connections = 0
        self.open = True
        self.hub_port = port
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    def _accept(self):
        while self.open:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            far = socket.create_connection(("127.0.0.1", self.hub_port))
            for ends in ((near, far), (far, near)):
                self.threads.append(threading.Thread(target=self._pump, args=ends, daemon=True))
                self.threads[-1].start()

    def _pump(self, source, sink):
        size = max(1, self.rate // 50)
        with source, sink:
            try:
                while self.open and (chunk := source.recv(size)):
                    sink.sendall(chunk)
                    threading.Event().wait(len(chunk) / self.rate)
            except OSError:
                return

    def close(self):
        self.open = False
        self.listener.close()


def test_a_message_may_take_longer_than_a_peer_may_be_silent():
    # On a slow link nothing else can be heard while one large frame is under way, so that a
    # heartbeat would close the connection.
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        set_options(sock, max_message_bytes=-1)
        assert sock.getsockopt(zmq.HEARTBEAT_IVL) == 0
    hub = HubSocket("tcp://127.0.0.1:0")
    narrow = Narrow(hub.port, 1_000_000)
    member = MemberSocket(narrow.address)
    member.send([b"C", b"h", b"x" * 700_000])
    ((sender, frames),) = heard(hub, 1)
    assert len(frames[2]) == 700_000
    assert narrow.connections == 1
    assert hub.send(sender, [b"R", b"h", b"y" * 700_000])
    seen = {member.received_bytes()}
    while (frames := member.receive(0.05)) is None:
        seen.add(member.received_bytes())
    assert len(frames[2]) == 700_000
    assert len(seen) > 3, "it can be seen coming"
    member.close()
    narrow.close()
    hub.close()


def test_the_kernel_watches_the_connection_from_both_ends(hub):
    member = MemberSocket(hub.address)
    member.send([b"x"])
    heard(hub, 1)
    near = connection_to(hub.port)
    far = connection_to(near.getsockname()[1])
    for end in (near, far):
        with end:
            timeout_ms = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert timeout_ms == SILENCE_S * 1000
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            assert 0 < idle < SILENCE_S
    member.close()


def test_a_connection_that_nobody_reads_is_broken_off_and_its_queue_with_it(monkeypatch):
    monkeypatch.setattr("edgetrain.exchange.zeromq.frames.SILENCE_S", 2)
    hub = HubSocket("tcp://127.0.0.1:0")
    context = zmq.Context()
    deaf = context.socket(zmq.DEALER)  # it reads one message into its queue, and then no more
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.LINGER, 0)
    deaf.connect(hub.address)
    deaf.send_multipart([b"J", b"h"])
    ((sender, _),) = heard(hub, 1)
    base = bytes(1 << 20)
    for _ in range(32):  # more than the kernels on both ends hold
        assert hub.send(sender, [b"B", b"h", base])
    until = time.monotonic() + 30
    while hub.send(sender, [b"H", b"h"]):  # beats; its window stays shut, and probes are answered
        assert time.monotonic() < until
        list(hub.poll(0.1))
    deaf.close()
    context.term()
    hub.close()
