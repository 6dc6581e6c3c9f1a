"""The hub's door over real sockets: encrypted, only for those on the list, and told of the rest."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

import pytest
import zmq
from test_transport import PATIENCE_S, heard

from edgetrain.errors import HubUnreachable, Refused
from edgetrain.exchange.addresses import split_address
from edgetrain.exchange.keys.gate import ENROL, Gate, enrolled
from edgetrain.exchange.keys.keyring import LOOK_S, Keyring, read_token
from edgetrain.exchange.keys.pairs import Credentials, spell
from edgetrain.exchange.transport import owned, owner_of
from edgetrain.exchange.zeromq.curve import new_pair, pair_of
from edgetrain.exchange.zeromq.frames import HANDSHAKE_MS, WAITING_MESSAGES
from edgetrain.exchange.zeromq.handshakes import HANDSHAKES_TRIED, MemberHandshake, Newcomers
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket

pytestmark = pytest.mark.real


def wait_for(hub, end):
    """The next message of a member's end; the hub is served, and hears nothing meanwhile."""
    until = time.monotonic() + PATIENCE_S
    frames = None
    while frames is None and time.monotonic() < until:
        assert list(hub.poll(0.02)) == []
        frames = end.receive(0.0)
    return frames


class Place:
    """A hub with a gate, and what it was told of."""

    def __init__(self, path, handshake_ms=HANDSHAKE_MS):
        self.ring = Keyring(path)
        self.pair = self.ring.init(new_pair)
        gate = Gate(self.ring)
        self.hub = HubSocket("tcp://127.0.0.1:0", gate=gate, handshake_ms=handshake_ms)
        self.told = []
        self.hub.refusals.report = self.told.append
        self.ends = []

    def join(self, pair, hub=None):
        credentials = Credentials(pair, hub or self.pair.public)
        self.ends.append(MemberSocket(self.hub.address, credentials=credentials))
        return self.ends[-1]

    def device(self, name="pi-1"):
        pair = new_pair()
        self.ring.allow(pair.public, name)
        self.pause()
        return pair

    def pause(self):
        """Until the gate looks at its files again."""
        until = time.monotonic() + 1.1 * LOOK_S
        while time.monotonic() < until:
            assert list(self.hub.poll(0.02)) == []

    def until_told(self, *words):
        """Serve until a refusal with these words was told; nothing may get through meanwhile."""
        until = time.monotonic() + PATIENCE_S
        while not any(all(word in line for word in words) for line in self.told):
            assert time.monotonic() < until, (words, self.told)
            assert list(self.hub.poll(0.02)) == []

    def fails(self, end, error, match):
        with pytest.raises(error, match=match):
            wait_for(self.hub, end)

    def close(self):
        for end in self.ends:
            end.close(linger_ms=0)
        self.hub.close()


@pytest.fixture
def place(tmp_path):
    found = Place(tmp_path)
    yield found
    found.close()


def test_a_device_on_the_list_talks_to_the_hub(place):
    pair = place.device()
    member = place.join(pair)
    member.send([b"J", b"hello", b"x" * 200_000])
    ((sender, frames),) = heard(place.hub, 1)
    assert [bytes(f) for f in frames] == [b"J", b"hello", b"x" * 200_000]
    assert owner_of(sender) == pair.public
    assert place.hub.send(sender, [b"W", b"welcome"])
    assert [bytes(f) for f in member.receive(PATIENCE_S)] == [b"W", b"welcome"]
    assert member.receive(0.0) is None
    assert member.connections == 1
    assert place.told == []


def test_a_connection_that_goes_by_anothers_key_is_not_heard(place):
    honest, thief = place.device("pi-1"), place.device("pi-2")
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.ROUTING_ID, owned(honest.public, b"x" * 16))
        sock.setsockopt(zmq.CURVE_SERVERKEY, place.pair.public)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, thief.public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, thief.secret)
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(place.hub.address)
        sock.send_multipart([b"J", b"hello"])
        place.until_told("goes by another's key")


def test_a_key_that_is_not_on_the_list_is_refused_on_both_sides(place):
    stranger = new_pair()
    member = place.join(stranger)
    member.send([b"J", b"hello"])
    place.until_told("127.0.0.1: ", f"key {spell(stranger.public)[:8]}… is not on the list")
    place.fails(member, Refused, "does not let this machine's key in")


def test_a_member_with_another_hubs_key_pinned_gives_up_and_says_why(place):
    member = place.join(place.device(), hub=new_pair().public)
    member.send([b"J", b"hello"])
    place.until_told("its pinned key differs")
    place.fails(member, HubUnreachable, "is it the hub whose key is pinned|the hub whose key")


def test_a_member_that_does_not_encrypt_is_refused(place):
    member = MemberSocket(place.hub.address)
    place.ends.append(member)
    # Whoever notices first closes the connection, and then the other side need not notice.
    said, sent = "", False
    until = time.monotonic() + PATIENCE_S
    while not said and not place.told:
        assert time.monotonic() < until
        try:
            if not sent:
                member.send([b"J", b"hello"])
                sent = True
            assert list(place.hub.poll(0.02)) == []
            assert member.receive(0.0) is None
        except HubUnreachable as error:
            said = str(error)
    assert not said or "the hub encrypts, and this member was told not to" in said
    assert all("does not encrypt as this hub does" in line for line in place.told)


def test_a_member_that_encrypts_says_that_the_hub_does_not():
    hub = HubSocket("tcp://127.0.0.1:0")
    member = MemberSocket(hub.address, credentials=Credentials(new_pair(), new_pair().public))
    member.send([b"J", b"hello"])
    told = []
    hub.refusals.report = told.append
    # Whoever notices first closes the connection: the other side knows only that.
    with pytest.raises(HubUnreachable, match=r"encrypts, and the hub does|started with its keys"):
        wait_for(hub, member)
    member.close(linger_ms=0)
    hub.close()


class Dropping:
    """Accepts connections and closes them at once, as a proxy does whose hub is down."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.dropped = 0

    def drop(self, count, end):
        """So many; `end` looks for what it is told meanwhile."""
        self.listener.settimeout(0.05)
        until = time.monotonic() + PATIENCE_S
        goal = self.dropped + count
        while self.dropped < goal and time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                self.listener.accept()[0].close()
                self.dropped += 1
            assert end.receive(0.0) is None


PROTOCOL = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


def test_a_handshake_that_fails_once_the_hub_has_proved_itself_is_damage_and_no_other_hub():
    """libzmq reports the same of both: the handshake, or what followed it, was wrong."""
    handshake = MemberHandshake(encrypted=True)
    with pytest.raises(HubUnreachable, match="this member encrypts"):
        handshake.record_event(PROTOCOL)
    assert not handshake.proved
    assert handshake.record_event(zmq.EVENT_HANDSHAKE_SUCCEEDED) == "nothing"
    assert (handshake.state, handshake.connections) == ("stands", 1)
    assert handshake.record_event(PROTOCOL) == "renew"
    handshake.socket_renewed()
    assert handshake.state == "away"
    assert handshake.record_event(PROTOCOL) == "hang up"
    assert handshake.record_event(zmq.EVENT_HANDSHAKE_SUCCEEDED) == "nothing"
    assert (handshake.state, handshake.connections) == ("stands", 2)
    with pytest.raises(Refused, match="does not let this machine's key in"):
        handshake.record_event(zmq.EVENT_HANDSHAKE_FAILED_AUTH)


@pytest.mark.parametrize("encrypted", [True, False])
def test_handshakes_that_break_off_mean_a_wrong_key_only_where_there_is_one(encrypted):
    handshake = MemberHandshake(encrypted)
    broken_off = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    for _ in range(HANDSHAKES_TRIED - 1):
        assert handshake.record_event(broken_off) == "nothing"
    if encrypted:
        with pytest.raises(HubUnreachable, match="is it the hub whose key is pinned"):
            handshake.record_event(broken_off)
    assert handshake.record_event(zmq.EVENT_HANDSHAKE_SUCCEEDED) == "nothing"
    for _ in range(2 * HANDSHAKES_TRIED):
        assert handshake.record_event(broken_off) == "nothing"


class Flipping:
    """Passes on what goes between one member and a hub, but for one bit of a message, to the hub or
    to the member, once it is told so."""

    def __init__(self, hub):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.hub = split_address(hub)
        self.flip = {True: threading.Event(), False: threading.Event()}
        """Whether it is to the hub."""
        self.down = threading.Event()
        """Drop connections, as a proxy does whose hub is down."""
        self.dropped = 0
        self.open = [self.listener]
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                here = self.listener.accept()[0]
                if self.down.is_set():
                    here.close()
                    self.dropped += 1
                    continue
                there = socket.create_connection(self.hub)
                self.open += here, there
                for pair in ((here, there), (there, here)):
                    self.threads.append(threading.Thread(target=self.forward, args=(*pair, there)))
                    self.threads[-1].start()

    def forward(self, source, sink, hub):
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                flip = self.flip[sink is hub]
                if len(data) > 1000 and flip.is_set():
                    flip.clear()
                    data[-1] ^= 1
                sink.sendall(data)
        self.hang_up(source, sink)

    def hang_up(self, *ends):
        for each in ends:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.hang_up(*self.open)
        for thread in self.threads:
            thread.join()
        for each in self.open:
            each.close()


def test_a_connection_with_a_damaged_message_ends_and_the_member_is_missed_at_once(place):
    """libzmq is so easily led to keep it, unread and taking what is sent, that nobody would be."""
    way = Flipping(place.hub.address)
    credentials = Credentials(place.device(), place.pair.public)
    member = MemberSocket(way.address, credentials=credentials)
    with contextlib.closing(way), contextlib.closing(member):
        member.send([b"J", b"hello"])
        ((sender, _),) = heard(place.hub, 1)
        assert place.hub.send(sender, [b"W"])
        assert member.receive(PATIENCE_S)
        place.pause()  # once in a while libzmq looks at its commands, and then it went wrong
        way.flip[True].set()
        member.send([b"C", b"x" * 2000])
        until = time.monotonic() + PATIENCE_S
        while place.hub.send(sender, [b"B"]):
            assert time.monotonic() < until, "its connection is taken for alive"
            assert list(place.hub.poll(0.02)) == []
        assert place.told == []
        member.reconnect()
        member.send([b"R", b"again"])
        ((again, frames),) = heard(place.hub, 1)
        assert again == sender
        assert bytes(frames[0]) == b"R"
        assert place.hub.send(sender, [b"W"])


def test_a_member_to_which_a_message_comes_damaged_connects_again_at_once(place):
    way = Flipping(place.hub.address)
    credentials = Credentials(place.device(), place.pair.public)
    member = MemberSocket(way.address, credentials=credentials)
    with contextlib.closing(way), contextlib.closing(member):
        member.send([b"J", b"hello"])
        ((sender, _),) = heard(place.hub, 1)
        assert place.hub.send(sender, [b"W"])
        assert member.receive(PATIENCE_S)
        place.pause()  # as above
        way.flip[False].set()
        assert place.hub.send(sender, [b"C", b"x" * 2000])
        until = time.monotonic() + PATIENCE_S
        while member.connections == 1:
            assert time.monotonic() < until, "it takes the connection for alive"
            assert list(place.hub.poll(0.02)) == []
            assert member.receive(0.0) is None
        assert member.connections == 2  # and so it says where it is
        member.send([b"R"])
        assert [sender for sender, _ in heard(place.hub, 1)] == [sender]
        assert place.hub.send(sender, [b"W"])


def test_who_went_away_without_having_proved_itself():
    newcomers = Newcomers()

    def tell(*events):
        return [newcomers.record_event(getattr(zmq, f"EVENT_{e}"), value) for e, value in events]

    assert tell(("ACCEPTED", 7), ("DISCONNECTED", 7)) == [False, True]
    # It said nothing for too long, or went away while it was asked: that is told as such.
    late = ("ACCEPTED", 7), ("HANDSHAKE_FAILED_NO_DETAIL", 110), ("DISCONNECTED", 7)
    assert not any(tell(*late))
    # A member: whether it said something or not.
    assert not any(tell(("ACCEPTED", 7), ("HANDSHAKE_SUCCEEDED", 0), ("DISCONNECTED", 7)))
    tell(("ACCEPTED", 7), ("HANDSHAKE_SUCCEEDED", 0))
    newcomers.message_came(7)
    assert tell(("ACCEPTED", 8), ("DISCONNECTED", 7), ("DISCONNECTED", 8)) == [False, False, True]
    # One that the door has refused already.
    tell(("ACCEPTED", 9))
    newcomers.was_refused()
    assert tell(("DISCONNECTED", 9)) == [False]
    # What cannot be matched is not carried on for ever.
    newcomers.was_refused()
    newcomers.was_refused()
    assert tell(("ACCEPTED", 9), ("DISCONNECTED", 9)) == [False, False]
    assert tell(("ACCEPTED", 9), ("DISCONNECTED", 9)) == [False, True]


def test_a_hub_with_another_key_may_break_off_so_often_and_no_more(place):
    proxy = Dropping()
    credentials = Credentials(place.device(), place.pair.public)
    member = MemberSocket(f"tcp://127.0.0.1:{proxy.port}", credentials=credentials)
    place.ends.append(member)
    with pytest.raises(HubUnreachable, match="is it the hub whose key is pinned"):
        proxy.drop(2 * HANDSHAKES_TRIED, member)
    proxy.listener.close()


def test_a_hub_that_was_genuine_may_be_away_for_a_while(place):
    way = Flipping(place.hub.address)
    credentials = Credentials(place.device(), place.pair.public)
    member = MemberSocket(way.address, credentials=credentials)
    with contextlib.closing(way):
        member.send([b"J"])
        assert heard(place.hub, 1)
        way.down.set()
        way.hang_up(*way.open[1:])
        until = time.monotonic() + PATIENCE_S
        while way.dropped < 2 * HANDSHAKES_TRIED:
            assert time.monotonic() < until
            assert list(place.hub.poll(0.02)) == []
            assert member.receive(0.0) is None
        member.close(linger_ms=0)


def test_a_revoked_key_is_dropped_while_it_is_connected_and_does_not_come_back(place):
    pair = place.device()
    member = place.join(pair)
    member.send([b"J"])
    heard(place.hub, 1)
    place.ring.revoke("pi-1")
    place.pause()
    member.send([b"C"])
    place.until_told(f"key {spell(pair.public)[:8]}… has been revoked")
    again = place.join(pair)
    again.send([b"J"])
    place.fails(again, Refused, "does not let this machine's key in")


def test_a_member_whose_key_was_refused_is_told_when_it_sends_and_never_waits(place):
    """libzmq makes no other connection then, and would let a sender wait for one for ever."""
    member = place.join(new_pair())
    member.send([b"J"])
    place.until_told("is not on the list")
    said = []

    def send_on():
        while True:
            member.send([b"C"])
            time.sleep(0.01)

    def send():
        with pytest.raises(Refused, match="does not let this machine's key in") as caught:
            send_on()
        said.append(caught.value.code)
        member.send([b"L"])  # also a farewell

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sending.join(PATIENCE_S)
    assert said == ["key"]
    assert not sending.is_alive()


def test_a_device_enrols_with_a_token_once_and_then_joins(place):
    text = place.ring.issue_token("pi-7", new_pair, time.time())
    hub, secret = read_token(text)
    device = new_pair()

    def enrol(key):
        end = place.join(pair_of(secret), hub)
        end.send([ENROL, key])
        return enrolled(wait_for(place.hub, end))

    assert enrol(device.public) == "pi-7"
    place.pause()
    member = place.join(device, hub)
    member.send([b"J"])
    assert heard(place.hub, 1)
    assert enrol(device.public) == "pi-7", "it may not have heard the first answer"
    with pytest.raises(Refused, match="was used before"):
        enrol(new_pair().public)
    assert any("token for 'pi-7' was used before" in line for line in place.told)
    assert place.ring.members() == {device.public: "pi-7"}
    secrets = (text, spell(secret), spell(place.pair.secret), spell(device.secret))
    assert not any(word in line for word in secrets for line in place.told)


def test_revoking_a_name_ends_its_key_its_tokens_and_its_connection(place):
    """Another board holds an older token for the same name, and is connected already."""
    _, older = read_token(place.ring.issue_token("pi-0", new_pair, time.time()))
    waiting = place.join(pair_of(older))
    place.pause()
    hub, newer = read_token(place.ring.issue_token("pi-0", new_pair, time.time()))
    device = new_pair()
    end = place.join(pair_of(newer), hub)
    end.send([ENROL, device.public])
    assert enrolled(wait_for(place.hub, end)) == "pi-0"
    place.pause()
    member = place.join(device)
    member.send([b"J"])
    heard(place.hub, 1)
    place.ring.revoke("pi-0")
    place.until_told(f"key {spell(device.public)[:8]}… has been revoked")
    place.fails(member, Refused, "does not let this machine's key in")
    waiting.send([ENROL, new_pair().public])
    with pytest.raises(Refused, match="was revoked, or replaced by a newer one"):
        enrolled(wait_for(place.hub, waiting))
    assert place.ring.members() == {}


def test_a_token_lets_nobody_say_anything_but_enrol(place):
    hub, secret = read_token(place.ring.issue_token("pi-7", new_pair, time.time()))
    end = place.join(pair_of(secret), hub)
    end.send([b"J", b"let me in"])
    place.until_told("a token's holder sent no enrolment")


def test_what_is_no_zmq_is_told_and_a_port_scan_disturbs_nobody(place):
    member = place.join(place.device())
    member.send([b"J"])
    heard(place.hub, 1)
    address = ("127.0.0.1", place.hub.port)
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL".ljust(64, b"\0") + b"garbage" * 20)
        place.until_told("a connection: ")
    with socket.create_connection(address) as scan:
        scan.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    member.send([b"C"])
    assert heard(place.hub, 1)


def test_slow_handshakes_are_ended(tmp_path):
    place = Place(tmp_path, handshake_ms=200)
    with socket.create_connection(("127.0.0.1", place.hub.port)) as slow:
        slow.sendall(b"\xff\0")
        place.until_told("did not say who it is within 0 s")
        slow.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionResetError):
            while slow.recv(100):
                pass
    place.close()


def test_a_peer_cannot_fill_the_hubs_memory_with_what_is_not_read_yet():
    hub = HubSocket("tcp://127.0.0.1:0", max_message_bytes=1 << 20)
    member = MemberSocket(hub.address)
    member.send([b"first"])
    heard(hub, 1)
    count = 4 * WAITING_MESSAGES
    for _ in range(count):
        member.send([bytes(1 << 20)])
    until = time.monotonic() + 0.5
    seen = hub.traffic().received_bytes
    while time.monotonic() < until:  # nobody reads
        seen = hub.traffic().received_bytes
    assert seen < (2 * WAITING_MESSAGES) << 20
    assert len(heard(hub, count)) == count
    member.close()
    hub.close()


def test_connections_of_the_past_are_counted_and_not_kept():
    hub = HubSocket("tcp://127.0.0.1:0")
    for turn in range(1, 4):
        member = MemberSocket(hub.address)
        member.send([b"x" * 1000])
        heard(hub, 1)
        assert turn * 1000 < hub.traffic().received_bytes < turn * 2000
        member.close()
        until = time.monotonic() + PATIENCE_S
        while hub.traffic() and hub.connections:
            assert time.monotonic() < until
            list(hub.poll(0.01))
    assert 3000 < hub.traffic().received_bytes < 6000
    hub.close()
