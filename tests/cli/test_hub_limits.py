"""A hub process with little to live on: few descriptors, and peers that take what they can."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import pytest
import zmq
from command_line import EDGETRAIN, running
from hub_runs import hub_folder, journal_of
from raw_member import RawMember, train

from edgetrain.exchange.addresses import split_address
from edgetrain.exchange.keys.keyring import Keyring, read_token
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.transport import owned
from edgetrain.exchange.zeromq.curve import new_pair, pair_of

pytestmark = pytest.mark.real


class Place:
    """A hub process of a job with two members, keyed or not, under limits that a shell sets."""

    def __init__(self, stack, folder: Path, limits: str, *words: str, keyed=True):
        self.stack = stack
        keys = Keyring(folder / "keys")
        pair = keys.init(new_pair)
        pairs = [new_pair(), new_pair(), new_pair()]
        hub, secret = read_token(keys.issue_token("pi-9", new_pair, time.time()))
        self.token, self.insider = (
            Credentials(pair_of(secret), hub), Credentials(pairs[2], pair.public)
        )  # fmt: skip
        for number, each in enumerate(pairs):
            keys.allow(each.public, f"pi-{number}")
        self.devices = [Credentials(each, pair.public) if keyed else None for each in pairs]
        program = ("sh", "-c", f'{limits}; exec "$@"', "sh", *EDGETRAIN)
        words = ("--keys", str(folder / "keys"), *words) if keyed else words
        self.hub = stack.enter_context(
            running(
                "hub", "members=2", "strategy=local-sgd", "local_steps=1", "--any-job",
                "--bind", "tcp://127.0.0.1:0", *words, cwd=folder, program=program,
            )
        )  # fmt: skip
        self.address = self.hub.until("members join").split()[-1]
        self.hub.until("run folder")

    def join(self, number: int) -> RawMember:
        member = RawMember(self.address, self.devices[number], f"pi-{number}")
        self.stack.callback(member.socket.close, 0)
        return member.ask()

    def members(self) -> list[RawMember]:
        """Both, after training has begun."""
        found = [self.join(0), self.join(1)]
        for member in found:
            member.start()
        return found

    def peak_bytes(self) -> int:
        """The most memory that the hub has had."""
        status = Path(f"/proc/{self.hub.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10

    def grows_by(self, attack, most: int) -> int:
        """By how many bytes the hub's memory grows until `attack`, a generator, is over or the hub
        has broken it off; it stops early beyond `most`."""
        before = self.peak_bytes()
        until = time.monotonic() + 20
        for _ in attack:
            if time.monotonic() > until or self.peak_bytes() - before > most:
                break
        return self.peak_bytes() - before

    @contextlib.contextmanager
    def strangers(self, count: int):
        """Connections that say nothing."""
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                end = stack.enter_context(socket.socket())
                end.setblocking(False)
                end.connect_ex(split_address(self.address))
            yield


def endless(address: str, credentials: Credentials, size: int, frames: int):
    """One message of so many frames, from a peer that proves a key; until it is broken off."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.ROUTING_ID, owned(credentials.pair.public, b"x" * 16))
        sock.setsockopt(zmq.CURVE_SERVERKEY, credentials.hub)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, credentials.pair.public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, credentials.pair.secret)
        monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        sock.connect(address)
        sock.send(b"a whole message, of which the first byte is no kind")
        body = bytes(size)
        for _ in range(frames):
            sock.send(body, zmq.SNDMORE, copy=False)
        sock.send(b"", zmq.SNDMORE)  # the last one never comes
        with contextlib.suppress(zmq.ZMQError):
            sock.send(b"")
        while not monitor.poll(50):
            yield
        sock.disable_monitor()
        monitor.close()


def claims(address: str, connections: int, size: int):
    """Strangers who begin a handshake with a command that is as long as a message may be."""
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE".ljust(64, b"\0")
    with contextlib.ExitStack() as stack:
        for _ in range(connections):
            end = stack.enter_context(socket.create_connection(split_address(address)))
            end.settimeout(10)
            with contextlib.suppress(OSError):
                end.sendall(greeting + b"\6" + (2 << 20).to_bytes(8, "big") + bytes(size))
            yield


MB = 1_000_000


@pytest.mark.parametrize(
    ("who", "most"),
    [
        ("a stranger", 128),
        ("a token", 64),
        ("a key", 128),
        ("a key, often", 256),
        ("a key, and small frames", 128),
    ],
)
def test_a_hubs_memory_is_bounded_whoever_sends_frames_without_end(who, most, tmp_path):
    """400 MB come, or more than a million frames, which libzmq would keep until the last frame of
    the message is there. `most`: in MB, as docs/explanation/security.md has it."""
    with contextlib.ExitStack() as stack:
        place = Place(stack, tmp_path, "true")
        members = place.members()
        train(members, 3)
        attacks = {
            "a stranger": [lambda: claims(place.address, 250, 1_600_000)],
            "a token": 4 * [lambda: endless(place.address, place.token, MB, 400)],
            "a key": [lambda: endless(place.address, place.insider, MB, 400)],
            "a key, often": 12 * [lambda: endless(place.address, place.insider, MB, 400)],
            "a key, and small frames": [
                lambda: endless(place.address, place.insider, 0, 1_500_000)
            ],
        }[who]
        grown = 0
        for attack in attacks:  # what the first leaves is used again
            grown += place.grows_by(attack(), most * MB - grown)
            assert grown < most * MB
        train(members, 10)
        for member in members:
            member.leave()
        assert place.hub.finish() == 0, place.hub.said
    assert "no whole message; it is ended" in place.hub.said


@pytest.mark.parametrize("keyed", [True, False])
def test_silent_connections_do_not_end_a_hub_with_few_descriptors(keyed, tmp_path):
    """Every round writes a snapshot, which opens files, and reads the kernel's counters."""
    with contextlib.ExitStack() as stack:
        place = Place(stack, tmp_path, "ulimit -n 128", "hub.snapshot_every=1", keyed=keyed)
        members = place.members()
        train(members, 3)
        with place.strangers(500):
            train(members, 30)
            members[1].leave()
            members[1] = place.join(1).start()
            train(members, 10)
        for member in members:
            member.leave()
        assert place.hub.finish() == 0, place.hub.said
    assert "cannot be written" not in place.hub.said
    rounds, _, _ = journal_of(hub_folder(tmp_path) / "journal")
    assert rounds >= 42
