"""What strangers, and one insider, can do to a hub: its memory and the honest members' steps.

    make test-endurance TESTS=tests/endurance/test_attacks.py DESCRIPTORS=256

A hub process with keys, two honest member processes that take 10 ms a step and exchange 0.4 MB in
each, and one attack after the other, each between two quiet times of the same length. A line has
the hub's resident memory after the attack, and the median step during it as a multiple of that in
the two quiet times beside it. Attackers and attacked share this machine's cores: on a busy machine
the ratio says more about the machine. Messages without end cost whoever sends and whoever reads
them a core each; so these attacks are done a second time, on another hub with the same keys, and
`beside` is the honest members' step meanwhile: what the cores alone take from them. At the end:
the hub is up, its memory has grown by at most 5 % (since a first thousand connections, whose room
it keeps for the next), and by what messages without end may make it keep (128 MB, see
docs/explanation/security.md), no ratio is above 1.10 (of `beside`, where there is one), and there
is a line in its log for each kind of refusal.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import zmq

from edgetrain.errors import EdgetrainError
from edgetrain.exchange.addresses import split_address
from edgetrain.exchange.keys.keyring import Keyring, read_token
from edgetrain.exchange.keys.pairs import Credentials, Pair, spell
from edgetrain.exchange.messages import PROTOCOL, Base, Beat, Contribute, Join, Leave, Message, pack
from edgetrain.exchange.transport import owned
from edgetrain.exchange.zeromq.curve import new_pair, pair_of
from edgetrain.exchange.zeromq.frames import HANDSHAKE_MS
from edgetrain.exchange.zeromq.member_socket import MemberSocket

STEP_S = 0.01
ELEMENTS = 100_000
SOCKETS = 1000
CROWD = 3500
INSIDER_PER_S = 8000
"""Just below the limit of messages a second: what is above it is dropped before it is decoded."""

MOST_GROWTH, MOST_SLOWER = 1.05, 1.10


# -- the honest -----------------------------------------------------------------------------------


def honest(pipe: Connection, address: str, folder: str, name: str) -> None:
    """A member that steps until it is told to stop; answers what its steps took since the last
    time it was asked."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from edgetrain.training.member.joining import join

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(ELEMENTS // 100, 100, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    member = join(address, model, optimizer, name=name, keys=folder)
    pipe.send("in")
    model.weight.grad = torch.zeros_like(model.weight)
    took: list[float] = []
    while True:
        began = time.monotonic()
        time.sleep(STEP_S)
        member.step()
        took.append(time.monotonic() - began)
        if pipe.poll():
            if pipe.recv() == "stop":
                break
            pipe.send(took)
            took = []
    member.abandon("done")
    pipe.send(took)


# -- the attacks ----------------------------------------------------------------------------------


@dataclass
class Target:
    """What an attacker knows: the address, the hub's public key, and what has leaked."""

    address: str
    hub: bytes
    frames: int
    used_token: Pair
    revoked: Pair
    insider: Pair
    token: Pair
    """A token that nobody has used."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def place(self) -> tuple[str, int]:
        """Host and port."""
        return split_address(self.address)


Attack = Callable[[Target, threading.Event], int]
"""Runs until the event is set, or its work is done; returns how much it did."""


def nothing(target: Target, stop: threading.Event) -> int:
    """What the others are to be compared with."""
    stop.wait()
    return 0


def knocking(pair: Callable[[Target], Pair]) -> Attack:
    """Proper members with a key that is not let in, one after the other."""

    def attack(target: Target, stop: threading.Event) -> int:
        done = 0
        while not stop.is_set():
            end = MemberSocket(target.address, credentials=Credentials(pair(target), target.hub))
            end.send(pack(Beat()))
            with suppress(EdgetrainError):
                end.receive(0.05)
                end.receive(0.05)
            end.close(linger_ms=0)
            done += 1
        return done

    return attack


def wrong_hub_key(target: Target, stop: threading.Event) -> int:
    """Members that take another hub for this one."""
    other = Target(**{**vars(target), "hub": new_pair().public})
    return knocking(lambda target: new_pair())(other, stop)


def plain(target: Target, stop: threading.Event) -> int:
    """Members that do not encrypt."""
    done = 0
    while not stop.is_set():
        end = MemberSocket(target.address)
        end.send(pack(Beat()))
        with suppress(EdgetrainError):
            end.receive(0.05)
        end.close(linger_ms=0)
        done += 1
    return done


def port_scan(target: Target, stop: threading.Event) -> int:
    """Connect and go, 500 times a second."""
    done = 0
    while not stop.wait(0.002):
        with suppress(OSError), socket.create_connection(target.place, 1.0):
            done += 1
    return done


def thousand_sockets(target: Target, stop: threading.Event) -> int:
    """Connections that say nothing, as many as there may be."""
    with held(target, SOCKETS) as found:
        stop.wait()
        return len(found)


def thousands(target: Target, stop: threading.Event) -> int:
    """3,500 connections that say nothing, and another for each that the hub ends."""
    with held(target, CROWD) as found:
        done = len(found)
        while not stop.wait(0.5):
            for number, each in enumerate(found):
                if ended(each):
                    each.close()
                    with suppress(OSError):
                        found[number] = socket.create_connection(target.place, 1.0)
                        done += 1
        return done


def ended(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection."""
    connection.setblocking(False)
    try:
        while connection.recv(1024):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def many_frames(pair: Callable[[Target], Pair], size: int) -> Attack:
    """Messages without end: a gigabyte in frames of so many bytes, or (0) a million of them."""

    def attack(target: Target, stop: threading.Event) -> int:
        done, key = 0, pair(target)
        while not stop.is_set():
            with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
                sock.setsockopt(zmq.LINGER, 0)
                sock.setsockopt(zmq.SNDHWM, 0)
                sock.setsockopt(zmq.ROUTING_ID, owned(key.public, os.urandom(16)))
                sock.setsockopt(zmq.CURVE_SERVERKEY, target.hub)
                sock.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
                sock.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
                monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                sock.connect(target.address)
                sock.send(b"one that is whole")
                body = bytes(size)
                for _ in range(1000 if size else 1_000_000):
                    sock.send(body, zmq.SNDMORE, copy=False)
                sock.send(b"")
                while not stop.is_set() and not monitor.poll(50):
                    pass
                sock.disable_monitor()
                monitor.close()
                done += 1
        return done

    return attack


def slow_loris(target: Target, stop: threading.Event) -> int:
    """Connections that say hello one byte at a time."""
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE".ljust(64, b"\0")
    with held(target, 200) as found:
        at = 0
        while not stop.wait(0.1):
            for each in found:
                with suppress(OSError):
                    each.send(greeting[at % 64 : at % 64 + 1])
            at += 1
        return len(found)


@contextmanager
def held(target: Target, count: int) -> Iterator[list[socket.socket]]:
    """So many open connections."""
    found: list[socket.socket] = []
    try:
        for _ in range(count):
            with suppress(OSError):
                found.append(socket.create_connection(target.place, 1.0))
        yield found
    finally:
        for each in found:
            each.close()


def fuzzed_streams(target: Target, stop: threading.Event) -> int:
    """Bytes that begin like ZeroMQ and go wrong somewhere, without a key: 200 times a second."""
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE".ljust(64, b"\0")
    hello = b"\4\xc8\5HELLO\1\0" + bytes(190)
    done = 0
    while not stop.wait(0.005):
        data = bytearray(greeting + hello + target.rng.randbytes(target.rng.randrange(200)))
        for _ in range(target.rng.randrange(4)):
            data[target.rng.randrange(len(data))] = target.rng.randrange(256)
        with suppress(OSError), socket.create_connection(target.place, 1.0) as each:
            each.sendall(data[: target.rng.randrange(1, len(data) + 1)])
            done += 1
    return done


def samples(rng: random.Random) -> Message:
    """A message as a member might send it."""
    part, parts = rng.randrange(3), rng.randrange(1, 4)
    numbers = (rng.randrange(5), rng.choice([0, 1, 2**63 - 1]), rng.randrange(2**64))
    messages: list[Message] = [
        Beat(),
        Leave("x" * rng.randrange(200)),
        Join(PROTOCOL, "", "model", rng.choice([1, ELEMENTS, 2**40]), "x", 1.0, numbers[2]),
        Base(part, parts, rng.randbytes(rng.randrange(2000))),
        Contribute(
            numbers[0], part, parts, 1.0, numbers[1], numbers[2], 0,
            rng.randbytes(rng.choice([0, 16, 4000])),
        ),
    ]  # fmt: skip
    return rng.choice(messages)


def fuzzed(rng: random.Random) -> list[bytes]:
    """A message with something wrong with it; now and then nothing is."""
    frames = [bytearray(frame) for frame in pack(samples(rng))]
    for _ in range(rng.randrange(3)):
        frame = rng.choice(frames)
        match rng.randrange(5):
            case 0 if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            case 1:
                del frame[rng.randrange(len(frame) + 1) :]
            case 2:
                frame += rng.randbytes(rng.choice([1, 5, 5000]))
            case 3:
                frames.append(bytearray(rng.randbytes(rng.randrange(10))))
            case _:
                frame[:] = rng.randbytes(rng.randrange(20))
    return [bytes(frame) for frame in frames]


def fuzzed_frames(target: Target, stop: threading.Event) -> int:
    """An insider, whose key is on the list, sends messages that are none."""
    done, began = 0, time.monotonic()
    with_key = Credentials(target.insider, target.hub)
    end = MemberSocket(target.address, credentials=with_key)
    while done < target.frames:
        if done > INSIDER_PER_S * (time.monotonic() - began):
            time.sleep(0.002)
        for _ in range(20):
            frames = fuzzed(target.rng)
            end.send(frames)
            done += len(frames)
        while end.receive(0.0) is not None:
            pass
    time.sleep(0.5)
    end.close(linger_ms=0)
    return done


def flood(target: Target, stop: threading.Event) -> int:
    """The insider sends as fast as it can, and reads no answer."""
    frames, done = pack(Beat()), 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.SNDHWM, 1000)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.ROUTING_ID, owned(target.insider.public, os.urandom(16)))
        sock.setsockopt(zmq.CURVE_SERVERKEY, target.hub)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, target.insider.public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, target.insider.secret)
        sock.connect(target.address)
        while not stop.is_set():
            with suppress(zmq.Again):
                sock.send_multipart(frames, zmq.NOBLOCK)
                done += 1
    return done


@dataclass(frozen=True)
class Kind:
    """One attack."""

    attack: Attack
    said: str
    """Words in the hub's log by which it is refused; "": nobody is."""
    seconds: float = 0.0
    """What it takes at least."""
    max_model_mb: float = 0.0
    """Memory that it may make the hub keep, see docs/explanation/security.md. Such an attack keeps
    two cores busy, whichever hub it is on."""


WAITS_S = HANDSHAKE_MS / 1000 + 2

CROWDED = "at a time, are ended"
CROWDS = ("1000 sockets", "slow loris")
"""They are too many for a hub with few descriptors, which does not wait for their handshakes."""
UNFINISHED = "no whole message; it is ended"

ATTACKS: dict[str, Kind] = {
    "nothing": Kind(nothing, "", WAITS_S),
    "unknown key": Kind(knocking(lambda target: new_pair()), "is not on the list"),
    "revoked key": Kind(knocking(lambda target: target.revoked), "is not on the list"),
    "replayed token": Kind(knocking(lambda target: target.used_token), "was used before"),
    "wrong hub key": Kind(wrong_hub_key, "its pinned key differs"),
    "no encryption": Kind(plain, ""),  # the member itself may notice first, and go
    "port scan": Kind(port_scan, ""),
    "1000 sockets": Kind(thousand_sockets, "did not say who it is", WAITS_S),
    "3500 sockets": Kind(thousands, CROWDED, WAITS_S),
    "slow loris": Kind(slow_loris, "did not say who it is", WAITS_S),
    "fuzzed streams": Kind(fuzzed_streams, "a connection: "),
    "fuzzed frames": Kind(fuzzed_frames, "the job's model is"),
    "insider's flood": Kind(flood, ""),
    "frames of a token": Kind(many_frames(lambda t: t.token, 1 << 20), UNFINISHED, 0.0, 64.0),
    "frames of a key": Kind(many_frames(lambda t: t.insider, 1 << 20), UNFINISHED, 0.0, 128.0),
    "tiny frames": Kind(many_frames(lambda t: t.insider, 0), UNFINISHED, 0.0, 128.0),
}
"""All of them, by name."""


# -- the attacked --------------------------------------------------------------------------------


class Hub:
    """The hub's process and what it says."""

    def __init__(self, folder: Path, *words: str, descriptors: int = 0) -> None:
        def limit() -> None:
            if descriptors:
                resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

        folder.mkdir(exist_ok=True)
        self.path = folder / "hub.log"
        with self.path.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "edgetrain", "hub", "strategy=local-sgd", "local_steps=1",
                 *(words or ("members=2", "lost_after_s=5")), "--any-job", "--keys",
                 str(folder / "keys"),
                 "--bind", "tcp://127.0.0.1:0", "--runs", str(folder / "runs")],
                stdout=said, stderr=subprocess.STDOUT, preexec_fn=limit,
            )  # fmt: skip
        self.address = self.wait_for("members join").split()[-1]
        self._usage = psutil.Process(self.process.pid)

    def wait_for(self, words: str) -> str:
        """The first line of its log with these words."""
        until = time.monotonic() + 60
        while time.monotonic() < until and self.process.poll() is None:
            for line in self.path.read_text().splitlines():
                if words in line:
                    return line
            time.sleep(0.05)
        raise AssertionError(f"the hub did not say '{words}':\n{self.path.read_text()}")

    def bytes(self) -> int:
        """Resident memory."""
        return int(self._usage.memory_info().rss)

    def descriptors(self) -> int:
        """Open files and sockets."""
        return self._usage.num_fds()

    def threads(self) -> int:
        """Of the process."""
        return self._usage.num_threads()


class Fleet:
    """The two honest members."""

    def __init__(self, address: str, folders: list[Path]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for number, folder in enumerate(folders):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=honest, args=(theirs, address, str(folder), f"h{number}"), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            if not pipe.poll(120) or pipe.recv() != "in":
                raise AssertionError("the honest members did not get in")

    def steps(self, word: str = "so far") -> list[float]:
        """Seconds of each step since the last call."""
        for pipe in self._pipes:
            pipe.send(word)
        found: list[float] = []
        for pipe in self._pipes:
            if not pipe.poll(60):
                raise AssertionError("an honest member is stuck")
            found += pipe.recv()
        return found

    def stop(self) -> None:
        """End them."""
        self.steps("stop")
        for process in self._processes:
            process.join(20)


def prepare(folder: Path) -> tuple[Keyring, list[Path], tuple[Pair, Pair, Pair, Pair]]:
    """The hub's keys, two honest devices; a token that was used, a revoked device, an insider, and
    a token that nobody has used."""
    ring = Keyring(folder / "keys")
    ring.init(new_pair)
    devices = []
    for number in range(2):
        devices.append(folder / f"device-{number}")
        ring.allow(Keyring(devices[-1]).init(new_pair).public, f"device-{number}")
    insider, revoked = new_pair(), new_pair()
    ring.allow(insider.public, "insider")
    _, secret = read_token(ring.issue_token("once", new_pair, time.time()))
    used = pair_of(secret)
    ring.redeem_token(used.public, revoked.public, time.time())
    _, secret = read_token(ring.issue_token("never", new_pair, time.time(), 600))
    return ring, devices, (used, revoked, insider, pair_of(secret))


def attack_all(
    folder: Path, chosen: list[str], frames: int, seconds: float, descriptors: int
) -> list[str]:
    """Attack hubs that may have this many descriptors (0: no limit of their own), print a table,
    and return what is not as promised. The insider sends this many damaged frames; each attack
    lasts this many seconds at least."""
    ring, devices, pairs = prepare(folder)
    hub = Hub(folder, descriptors=descriptors)
    for device in devices:
        Keyring(device).pin_hubs({hub.address: ring.pair().public})
    fleet = Fleet(hub.address, devices)
    ring.revoke(spell(pairs[1].public))
    target = Target(hub.address, ring.pair().public, frames, *pairs)
    shutil.copytree(folder / "keys", folder / "other" / "keys")
    another = Hub(folder / "other", "members=9", descriptors=descriptors)
    elsewhere = replace(target, address=another.address)
    time.sleep(3.0)
    fleet.steps()
    print(
        f"{'':16} {'done':>9} {'hub MB':>7} {'files':>6} {'step ms':>8} {'ratio':>6} {'beside':>6}"
    )
    # libzmq and the allocator keep what their first thousand connections took, for the next.
    for first in (thousand_sockets, slow_loris):
        under(first, target, fleet, WAITS_S)
    before = quiet(fleet, seconds)
    began, files = hub.bytes(), hub.descriptors()
    print(f"{'quiet':16} {'':9} {began / 1e6:7.1f} {files:6} {1000 * before:8.2f}")
    rows: list[dict[str, Any]] = []
    for name in chosen:
        kind = ATTACKS[name]
        done, during = under(kind.attack, target, fleet, max(seconds, kind.seconds))
        held_bytes, held_files = hub.bytes(), hub.descriptors()
        after = quiet(fleet, seconds)
        ratio, beside = during / statistics.mean((before, after)), 1.0
        if kind.max_model_mb:
            _, during_other = under(kind.attack, elsewhere, fleet, seconds)
            before, after = after, quiet(fleet, seconds)
            beside = during_other / statistics.mean((before, after))
        before = after
        rows.append(
            {"attack": name, "done": done, "hub_bytes": held_bytes, "ratio": ratio}
            | ({"beside": beside} if kind.max_model_mb else {})
        )
        print(
            f"{name:16} {done:9,} {held_bytes / 1e6:7.1f} {held_files:6} {1000 * during:8.2f} "
            f"{ratio:6.2f}" + (f" {beside:6.2f}" if kind.max_model_mb else ""),
            flush=True,
        )
    time.sleep(1.0)
    ended = hub.bytes()
    up = hub.process.poll() is None
    log = hub.path.read_text()
    fleet.stop()
    for each in (hub, another):
        each.process.terminate()
        each.process.wait(30)
    untold = [
        name
        for name in chosen
        if ATTACKS[name].said not in log and not (name in CROWDS and CROWDED in log)
    ]
    allowed = MOST_GROWTH * began + 1e6 * max(ATTACKS[name].max_model_mb for name in chosen)
    print(f"{'after':16} {'':9} {ended / 1e6:7.1f}   {ended / began - 1:+.1%}")
    print(f"hub's log: {len(log.splitlines())} lines, {log.count('refused')} of them refusals")
    slower = [
        row["attack"]
        for row in rows
        if row["ratio"] > MOST_SLOWER * max(1.0, row.get("beside", 1.0))
    ]
    return [
        *([] if up else ["the hub is down"]),
        *([] if ended <= allowed else [f"its memory grew by {ended / began - 1:.1%}"]),
        *([f"steps are slower under {', '.join(map(str, slower))}"] if slower else []),
        *([f"no line in the log for {', '.join(untold)}"] if untold else []),
    ]


def quiet(fleet: Fleet, seconds: float) -> float:
    """The median step while nothing happens."""
    fleet.steps()
    time.sleep(seconds)
    return statistics.median(fleet.steps())


def under(attack: Attack, target: Target, fleet: Fleet, seconds: float) -> tuple[int, float]:
    """(how much was done, the median step) while an attack goes on, in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run() -> None:
        stop = threading.Event()
        timer = threading.Timer(seconds, stop.set)
        timer.daemon = True
        timer.start()
        theirs.send(attack(target, stop))

    process = context.Process(target=run, daemon=True)
    fleet.steps()
    process.start()
    done = ours.recv()
    took = fleet.steps()
    process.join(20)
    return done, statistics.median(took)
