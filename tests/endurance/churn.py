"""A day of members that come and go, every minute: does the hub stay as it was?

    make test-endurance TESTS=tests/endurance/test_churn_long.py HOURS=24 JOINS=500

In virtual time: the real hub, its journal and the members' links, in one thread. There are eight
places. In every minute one member leaves or dies and another one joins; one loses its connection
until the hub gives it up, and comes back; a stranger is refused, and another one sends bytes that
are not a message. After each hour the table has what the process holds: resident memory; the part
of it that Python has allocated since the hub began (hub, members and links, in kB); descriptors;
threads; files and bytes of the journal. It is as promised if, without the first hour, a straight
line through either memory rises by less than 5 %, and the last sample has no more descriptors and
threads than the first half.

Over sockets: the same figures of an `edgetrain hub` process, after each tenth of the joins, while
members in threads of this process join over ZeroMQ, take part in two rounds and leave, or vanish.
The first three tenths are not judged: allocators keep their first memory.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgetrain import codecs
from edgetrain.errors import Refused
from edgetrain.exchange.hub.effects import Closed, Note, Observed
from edgetrain.exchange.hub.journal import Fsync, Journal, JournalSettings
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import CatchUp, Request, Submission
from edgetrain.exchange.zeromq.curve import new_pair
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.strategies import find
from edgetrain.strategies.merging.rule import Mean
from edgetrain.training.simulated.virtual import SECOND
from endurance.attacks import Hub as HubProcess
from endurance.room import Room, Trainee, Wire

PLACES = 8
ELEMENTS = 256
GONE_S = 5.0
MOST_RISE = 0.05


@dataclass(frozen=True)
class Sample:
    """What a hub holds at one moment."""

    at: float
    """Hours, or members so far."""
    rounds: int
    changes: int
    """Members that came or went so far."""
    memory_bytes: int
    traced_bytes: int
    """Allocated by Python since the hub began; 0: not known."""
    descriptors: int
    threads: int
    journal_files: int
    journal_bytes: int


def journal_size(folder: Path) -> tuple[int, int]:
    """Files and bytes."""
    files = [path for path in folder.iterdir() if path.is_file()]
    return len(files), sum(path.stat().st_size for path in files)


def resident() -> int:
    """Bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# -- in virtual time ------------------------------------------------------------------------------


class Churn:
    """The fleet, and what happens to it in a minute."""

    def __init__(self, folder: Path, pace_s: float) -> None:
        codec = codecs.Dense()
        hub = Hub(
            Terms(find("local-sgd"), 1),
            Policy(PLACES, 1, 30.0, GONE_S, 1.0, 60.0),
            Mean(), codec, codec,
        )  # fmt: skip
        self.folder, self._pace_s = folder, pace_s
        self._journal = Journal(folder, JournalSettings(Fsync(0)))
        self.events: dict[str, int] = {}
        self.rounds = 0
        self.room = Room(hub, self._observe, self._journal)
        self._numbers = itertools.count()
        self._there: list[Trainee] = []
        self._minute = 0
        for _ in range(PLACES):
            self._join()
        self.room.run(10.0)

    def _observe(self, effect: Observed) -> None:
        if isinstance(effect, Closed):
            self.rounds += 1
        elif isinstance(effect, Note):
            self.events[effect.event] = self.events.get(effect.event, 0) + 1

    def _join(self) -> None:
        number = next(self._numbers)
        trainee = Trainee(f"device-{number}", ELEMENTS, self._pace_s)
        trainee.start(self.room, Wire(self.room, b"connection-%d" % number))
        self._there.append(trainee)

    def minute(self) -> None:
        """One goes, one comes, one is away for a while, a stranger knocks."""
        room, number = self.room, self._minute
        self._minute += 1
        first = self._there.pop(0)
        if number % 2:
            first.leaving = True
        else:
            first.process.kill()
            first.wire.close()
        room.run(10.0)
        self._join()
        room.run(10.0)
        away = self._there[number % (PLACES - 1)]
        away.wire.close()
        away.process.hold(room.world.now + 20 * SECOND)
        room.run(10.0)
        if number % 10 == 9:  # somebody else takes the place: it cannot come back
            self._there.remove(away)
            self._join()
        room.run(15.0)
        stranger = b"stranger-%d" % number
        room.inbox.put((stranger, [b"Q", os.urandom(20)]))
        Trainee(f"knocks-{number}", ELEMENTS, 1.0).start(room, Wire(room, stranger))
        room.run(15.0)
        room.wires.pop(stranger, None)

    def sample(self, hours: float) -> Sample:
        """Now."""
        gc.collect()
        files, size = journal_size(self.folder)
        changes = sum(self.events.get(each, 0) for each in ("joined", "left", "gone", "back"))
        return Sample(
            hours,
            self.rounds,
            changes,
            resident(),
            tracemalloc.get_traced_memory()[0],
            len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            len(os.listdir("/proc/self/task")),  # noqa: PTH208
            files,
            size,
        )

    def close(self) -> None:
        """Let go."""
        self._journal.close()


def virtual(hours: int, pace_s: float) -> tuple[list[Sample], dict[str, int]]:
    """A sample for each hour, and what happened how often."""
    tracemalloc.start()
    with tempfile.TemporaryDirectory() as folder:
        churn = Churn(Path(folder), pace_s)
        samples = []
        for hour in range(1, hours + 1):
            for _ in range(60):
                churn.minute()
            samples.append(churn.sample(hour))
            print(line(samples[-1]), flush=True)
        churn.close()
        return samples, churn.events


# -- over sockets ---------------------------------------------------------------------------------


class Visitors:
    """Members in threads that come, take part in two rounds and go; two of them stay."""

    def __init__(self, address: str, keys: Sequence[Credentials]) -> None:
        """`keys`: of the two devices that stay, then of those that come one after the other, and
        again from the first."""
        self._address = address
        self._staying, self._coming = iter(keys[:2]), itertools.cycle(keys[2:])
        self._numbers = itertools.count()
        self.done = 0
        self.failed: list[str] = []
        self._over = threading.Event()
        self._lock = threading.Lock()

    def stay(self) -> None:
        """Train until it is over."""
        self._visit("stays", lambda rounds: self._over.is_set(), leave=True)

    def come_and_go(self) -> None:
        """One visit after the other."""
        while not self._over.is_set():
            number = next(self._numbers)
            failed = self._visit(f"v{number}", lambda rounds: rounds == 2, leave=number % 2 == 0)
            with self._lock:
                self.done += not failed
            if failed:
                time.sleep(0.1)

    def _visit(self, name: str, enough: Callable[[int], bool], leave: bool) -> bool:
        with self._lock:
            device = next(self._staying if name == "stays" else self._coming)
        transport = MemberSocket(self._address, credentials=device)
        try:
            link = Link(transport, time.monotonic)
            params = np.zeros(ELEMENTS, np.float32)
            start = link.join(Request("model", "" if name == "stays" else name), params, 0)
            own, rounds = np.ones(ELEMENTS, np.float32), 0
            applied, known, round = start.applied, start.checksum, start.round
            while not enough(rounds):
                time.sleep(0.02)
                link.submit(Submission(round, own, 1.0, applied, known))
                round, rounds = round + 1, rounds + 1
                while applied < round:
                    found = link.wait(applied)
                    if isinstance(found, CatchUp):
                        raise AssertionError("it was given up")
                    applied, known = found.round + 1, found.checksum
            (link.leave if leave else lambda reason: link.vanish())("done")
            return False
        except Refused as error:
            if error.code != "full":
                self.failed.append(f"{name}: {error}")
            return True
        except Exception as error:
            self.failed.append(f"{name}: {error!r}")
            return True
        finally:
            transport.close()

    def end(self) -> None:
        """Let them come to their end."""
        self._over.set()


def sockets(visits: int) -> tuple[list[Sample], dict[str, int]]:
    """A sample for each tenth of the visits, and how often each event is in the hub's log."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ring = Keyring(folder / "keys")
        hub_key = ring.init(new_pair).public
        devices = [new_pair() for _ in range(visits + PLACES)]
        for number, device in enumerate(devices):
            ring.allow(device.public, f"device-{number}")
        process = HubProcess(
            folder, f"members={PLACES}", "lost_after_s=0.5", "heartbeat_s=0.2", "hub.fsync=never"
        )
        keys = [Credentials(device, hub_key) for device in devices]
        visitors = Visitors(process.address, keys)
        targets = [visitors.stay] * 2 + [visitors.come_and_go] * (PLACES - 2)
        threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in threads:
            thread.start()
        samples: list[Sample] = []
        journal = next((folder / "runs").iterdir()) / "journal"
        while len(samples) < 10:
            wanted = visits * (len(samples) + 1) // 10
            while visitors.done < wanted and process.process.poll() is None and not visitors.failed:
                time.sleep(0.05)
            if visitors.failed or process.process.poll() is not None:
                raise AssertionError(f"{visitors.failed} {process.path.read_text()[-2000:]}")
            samples.append(sample_of(process, visitors.done, journal))
            print(line(samples[-1]), flush=True)
        visitors.end()
        for thread in threads:
            thread.join(30)
        time.sleep(2.0)
        print(line(sample_of(process, visitors.done, journal)), " when all have left")
        process.process.terminate()
        process.process.wait(30)
        words = ("joined", "left", "gone", "late", "refused")
        return samples, {word: process.path.read_text().count(f" {word}: ") for word in words}


def sample_of(process: HubProcess, visits: int, journal: Path) -> Sample:
    """The figures of a hub's process now."""
    log = process.path.read_text()
    files, size = journal_size(journal)
    return Sample(
        at=visits,
        rounds=0,
        changes=log.count(" joined: ") + log.count(" left: ") + log.count(" gone: "),
        memory_bytes=process.bytes(),
        traced_bytes=0,
        descriptors=process.descriptors(),
        threads=process.threads(),
        journal_files=files,
        journal_bytes=size,
    )


# -- the verdict ----------------------------------------------------------------------------------

HEADER = (
    f"{'':>6} {'rounds':>8} {'came, went':>10} {'MB':>7} {'kB':>8} {'files':>5} "
    f"{'threads':>7} {'journal':>8} {'MB':>6}"
)


def line(sample: Sample) -> str:
    """A row of the table."""
    return (
        f"{sample.at:6g} {sample.rounds:8,} {sample.changes:10,} {sample.memory_bytes / 1e6:7.2f} "
        f"{sample.traced_bytes / 1e3:8.1f} {sample.descriptors:5} {sample.threads:7} "
        f"{sample.journal_files:8} {sample.journal_bytes / 1e6:6.1f}"
    )


def rise(values: Sequence[float]) -> float:
    """Of a straight line through them: how much higher it ends than it begins, as a share."""
    if len(values) < 2:
        return 0.0
    slope, begin = statistics.linear_regression(range(len(values)), values)
    return slope * (len(values) - 1) / max(abs(begin), 1.0)


def verdict(samples: Sequence[Sample]) -> list[str]:
    """What is not as promised; prints what is."""
    wrong = []
    for what, values in (
        ("memory", [each.memory_bytes for each in samples]),
        ("memory of Python's", [each.traced_bytes for each in samples]),
    ):
        if not any(values):
            continue
        share = rise(values)
        print(f"{what}: {share:+.2%}")
        if share > MOST_RISE:
            wrong.append(f"{what} rose by {share:.1%}")
    for what, values in (
        ("descriptors", [each.descriptors for each in samples]),
        ("threads", [each.threads for each in samples]),
    ):
        print(f"{what}: {min(values)} to {max(values)}")
        if values[-1] > max(values[: len(values) // 2]):
            wrong.append(f"{max(values[: len(values) // 2])} {what} became {values[-1]}")
    return wrong


def judged(found: tuple[list[Sample], dict[str, int]], warm: int) -> list[str]:
    """What is not as promised of these samples, without the first `warm`."""
    samples, events = found
    print(", ".join(f"{count:,} {event}" for event, count in sorted(events.items())))
    return verdict(samples[warm:])


def day(hours: int) -> list[str]:
    """Hours of virtual time, in rounds of 0.7 s, as a table; what is not as promised."""
    print(HEADER)
    return judged(virtual(hours, 0.7), warm=1)


def crowd(visits: int) -> list[str]:
    """Encrypted joins over sockets, as a table; what is not as promised."""
    print(HEADER)
    return judged(sockets(visits), warm=3)
