"""Chaos with real processes: a schedule of `edgetrain chaos`, over loopback, in real time.

    python benchmarks/processes.py --schedules 50 --at-once 3
    python benchmarks/processes.py --schedules 1 --seed 7     # one of them again

A hub is a process of its own (`edgetrain hub`, encrypted, with a journal), and so is each of three
members, behind a forwarder of its own. What a schedule of the simulator says is done to them, in a
tenth of its time: SIGKILL and --resume, SIGSTOP, a disk that takes no byte more (RLIMIT_FSIZE),
forwarders that hold bytes back, break connections and flip bits. Then the laws of `edgetrain.chaos`
judge the journal, what members gave and how they ended. Clocks of real processes are left alone.
Each schedule has a process of its own, which ends what it started, also when it is interrupted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing.process
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
from recovery import HubProcess, Trainer, free_port

from edgetrain import chaos, sockets
from edgetrain.chaos import Ended, Happening, Witness
from edgetrain.checksum import checksum
from edgetrain.errors import HubUnreachable, Refused
from edgetrain.journal import Journal
from edgetrain.keys import Credentials, Keyring, Pair
from edgetrain.link import CatchUp, Link, Request
from edgetrain.merge import Mean
from edgetrain.processes import fork_server
from edgetrain.strategies.displacement import Displacement

MEMBERS, ELEMENTS, STEPS, PACE_S = 3, 2000, 350, 0.02
SECONDS = 4.0
"""In which things go wrong; then there is time to heal before the end."""
PATIENCE_S = 60.0
SHARE = 0.1
"""Of a simulated schedule's times."""
KINDS: tuple[chaos.Kind, ...] = tuple(kind for kind in chaos.KINDS if kind not in ("clock", "slow"))
KEYS = (
    f"members={MEMBERS}", "strategy=dga", "every=5", "delay=5", "beat_s=0.3", "gone_s=2",
    "snapshot_every=1000000",
)  # fmt: skip
_RESET = struct.pack("ii", 1, 0)


class Forwarder:
    """A way to the hub, on a port of its own, that can be cut, held and damaged."""

    def __init__(self, hub: int) -> None:
        self._hub = hub
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._open = threading.Event()
        self._open.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._damage: set[bool] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listening.accept()
            except OSError:
                return
            try:
                there = socket.create_connection(("127.0.0.1", self._hub), 1.0)
            except OSError:
                here.close()
                continue
            there.settimeout(None)
            self._pairs.append((here, there))
            for source, sink, up in ((here, there, True), (there, here, False)):
                threading.Thread(target=self._pump, args=(source, sink, up), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(65536)):
                self._open.wait()
                if up in self._damage and len(data) > 100:  # no greeting: something encrypted
                    self._damage.discard(up)
                    data[len(data) // 2] ^= 1
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Break what there is, at both ends."""
        pairs, self._pairs = self._pairs, []
        for each in (end for pair in pairs for end in pair):
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.shutdown(socket.SHUT_RDWR)
                each.close()

    def hold(self, seconds: float) -> None:
        """Let nothing pass for so long."""
        self._open.clear()
        timer = threading.Timer(seconds, self._open.set)
        timer.daemon = True
        timer.start()

    def damage(self, upwards: bool) -> None:
        """Flip a bit of the next message."""
        self._damage.add(upwards)

    def close(self) -> None:
        """Let go of everything."""
        self._open.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # so that accept returns
        self._listening.close()
        self.cut()


class Giving(Trainer):
    """A member that writes down what it gives before it gives it."""

    def _run(self, address: str, pace_s: float) -> None:
        link = Link(self.socket_of(address), time.monotonic)
        request = Request("model", f"m{self.index}")
        welcome, start = link.join(request, self.params, checksum(self.params))
        half = Displacement(self.params, welcome.every, start.delay, link.memory)
        half.start(start.applied, start.round)
        submit = link.submit

        def noted(round: int, own: np.ndarray, **other: object) -> object:
            self.gave.write(struct.pack("<q", round) + own.tobytes())
            return submit(round, own, **other)  # type: ignore[arg-type]

        link.submit = noted  # type: ignore[assignment, method-assign]
        while half.round * half.every < STEPS:
            noise = np.random.default_rng([self.index, self.steps]).standard_normal(
                ELEMENTS, np.float32
            )
            self.params -= np.float32(0.1) * (self.params - self.index) + np.float32(0.05) * noise
            self.steps += 1
            link.poll()
            self._exchange(link, half, half.after_step())
            time.sleep(pace_s)
        self._exchange(link, half, half.finish())
        self.ended = f"{half.applied} {half.checksum:016x}"
        link.leave("done")

    def _exchange(self, link: Link, half: Displacement, own: np.ndarray | None) -> None:
        if own is not None:
            link.submit(
                half.round - 1, own, weight=1.0, applied=half.applied, checksum=half.checksum,
                wanted_delay=0,
            )  # fmt: skip
        while (due := half.due()) is not None:
            found = link.wait(due)
            if isinstance(found, CatchUp):
                if found.base is not None:
                    half.rebase(found.base, found.applied)
                half.skip_to(found.round)
            else:
                half.apply(found.pieces)
                assert found.checksum == half.checksum


AGAIN = 75
"""How a member's process ends that did not get in, and is to be started again."""


def member(index: int, life: int, address: str, folder: Path, pair: Pair, hub: bytes) -> None:
    """A member's process."""
    trainer = Giving(index, ELEMENTS)
    trainer.socket_of = lambda to: sockets.MemberSocket(  # type: ignore[attr-defined]
        to, credentials=Credentials(pair, hub)
    )
    with (folder / f"m{index}.{life}.gave").open("ab", 0) as trainer.gave:  # type: ignore[attr-defined]
        trainer.run(address, PACE_S)
    taken = isinstance(trainer.error, Refused) and trainer.error.code == "name"
    lost = isinstance(trainer.error, HubUnreachable) and not trainer.steps
    if taken or lost:
        time.sleep(0.2)
        os._exit(AGAIN)  # and with it its connection, which might get in by itself
    said = repr(trainer.error) if trainer.error is not None else trainer.ended
    (folder / f"m{index}.ended").write_text(said)


class Trial:
    """One schedule: its processes from their start to their end."""

    def __init__(self, folder: Path, seed: int, happenings: Sequence[Happening]) -> None:
        self.folder, self.happenings = folder, happenings
        ring = Keyring(folder / "keys")
        self._hub_key = ring.init(sockets.new_pair).public
        self._pairs = [sockets.new_pair() for _ in range(MEMBERS)]
        for index, pair in enumerate(self._pairs):
            ring.allow(pair.public, f"device-{index}")
        self._port = free_port()
        self._bind = ("--bind", f"tcp://127.0.0.1:{self._port}", "--keys", str(folder / "keys"))
        # Forked from a process without threads: the forwarders' threads hold locks.
        self._context = fork_server(["__main__", "numpy.random"])
        self._ways = [Forwarder(self._port) for _ in range(MEMBERS)]
        self._members: list[multiprocessing.process.BaseProcess] = []
        self._hub = HubProcess(folder, *KEYS, "--any-job", *self._bind)
        self.killed: set[int] = set()
        self.rounds = 0
        self._lives = [0] * MEMBERS
        self._ending: list[tuple[float, Happening]] = []

    def run(self, patience_s: float) -> list[str]:
        """Broken laws. Nothing is left running."""
        try:
            self._hub.when("members join")
            self._members = [self._start(index) for index in range(MEMBERS)]
            self._hub.when("hub started")
            (self._run_folder,) = (self.folder / "runs").iterdir()
            self._live(patience_s)
        finally:
            for each in self._members:
                each.kill()
                each.join()
            self._hub.process.kill()
            self._hub.process.wait()
            for way in self._ways:
                way.close()
        return self._judged()

    def _start(self, index: int) -> multiprocessing.process.BaseProcess:
        address = f"tcp://127.0.0.1:{self._ways[index].port}"
        self._lives[index] += 1
        process = self._context.Process(
            target=member,
            args=(
                index,
                self._lives[index],
                address,
                self.folder,
                self._pairs[index],
                self._hub_key,
            ),
            daemon=True,
        )
        process.start()
        return process

    def _live(self, patience_s: float) -> None:
        began = time.monotonic()
        waiting = list(self.happenings)
        while self._ending or any(
            each.is_alive() or each.exitcode == AGAIN for each in self._members
        ):
            now = time.monotonic() - began
            if now > patience_s:
                return
            while waiting and waiting[0].at_s * SHARE <= now:
                happening = waiting.pop(0)
                self._begin(happening)
                self._ending.append((now + happening.for_s * SHARE, happening))
            for item in [item for item in self._ending if item[0] <= now]:
                self._ending.remove(item)
                self._end(item[1])
            self._mind_hub()
            self._mind_members()
            time.sleep(0.01)
        with suppress(subprocess.TimeoutExpired):
            self._hub.process.wait(10)

    def _mind_hub(self) -> None:
        """Start it again, as a service manager does, once nothing keeps it down. A disk that was
        full ends it some time later than the disk was."""
        kept_down = any(happening.kind in ("hub", "disk") for _, happening in self._ending)
        if self._hub.process.poll() and not kept_down:
            self._hub = HubProcess(self.folder, "--resume", str(self._run_folder), *self._bind)

    def _mind_members(self) -> None:
        for index, process in enumerate(self._members):
            if process.exitcode == AGAIN:
                self._members[index] = self._start(index)

    def _begin(self, happening: Happening) -> None:
        for index in happening.members:
            way, process = self._ways[index], self._members[index]
            match happening.kind:
                case "kill" | "power":
                    if process.is_alive():
                        self.killed.add(index)
                        process.kill()
                        process.join()
                case "pause":
                    with suppress(ProcessLookupError, TypeError):
                        os.kill(process.pid or 0, signal.SIGSTOP)
                case "link" | "partition":
                    way.hold(happening.for_s * SHARE)
                case "cut":
                    way.cut()
                case "corrupt-up" | "corrupt-down":
                    way.damage(upwards=happening.kind == "corrupt-up")
        if happening.kind == "hub":
            self._hub.process.kill()
            self._hub.process.wait()
        if happening.kind == "disk" and self._hub.process.poll() is None:
            logs = (self._run_folder / "journal").glob("*.log")
            room = max(log.stat().st_size for log in logs) + 5000
            resource.prlimit(
                self._hub.process.pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY)
            )

    def _end(self, happening: Happening) -> None:
        for index in happening.members:
            process = self._members[index]
            if happening.kind in ("kill", "power") and not process.is_alive():
                ended = (self.folder / f"m{index}.ended").exists()
                if not ended and self._hub_lives():
                    self._members[index] = self._start(index)
            if happening.kind == "pause":
                with suppress(ProcessLookupError, TypeError):
                    os.kill(process.pid or 0, signal.SIGCONT)
        if happening.kind == "disk" and self._hub.process.poll() is None:
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(self._hub.process.pid, resource.RLIMIT_FSIZE, unlimited)

    def _hub_lives(self) -> bool:
        return self._hub.process.poll() != 0

    def _judged(self) -> list[str]:
        witness, broken, ended = Witness(), [], {}
        for index in range(MEMBERS):
            for round, own in self._given(index):
                witness.saw(f"m{index}", round, 0, own)
            told = self.folder / f"m{index}.ended"
            text = told.read_text() if told.exists() else "never"
            if text[0].isdigit():
                applied, base = text.split()
                ended[f"m{index}"] = Ended(int(applied), base)
            elif index not in self.killed or not (text == "never" or "is over" in text):
                said = [line for _, line in self._hub.said[-3:]]
                broken.append(f"m{index} did not come to its end: {text[:200]}; the hub: {said}")
        with closing(Journal(self._run_folder / "journal")) as journal:
            rounds = list(journal.replies(0))
        self.rounds = len(rounds)
        steady = [f"m{index}" for index in range(MEMBERS) if index not in self.killed]
        initial = np.zeros(ELEMENTS, np.float32)
        return broken + chaos.judge(rounds, witness, Mean(), initial, ended, steady)

    def _given(self, index: int) -> Iterator[tuple[int, bytes]]:
        """(round, contribution) of all its lives, in order. The last of one that was killed may be
        torn; it was not handed over."""
        size = 8 + 4 * ELEMENTS
        for life in range(1, self._lives[index] + 1):
            path = self.folder / f"m{index}.{life}.gave"
            data = path.read_bytes() if path.exists() else b""
            for at in range(0, len(data) - size + 1, size):
                yield struct.unpack_from("<q", data, at)[0], data[at + 8 : at + size]


def one(seed: int, happenings: int) -> dict[str, object]:
    """What became of one schedule."""
    drawn = chaos.draw(seed, MEMBERS, SECONDS / SHARE, happenings, KINDS)
    with tempfile.TemporaryDirectory(prefix="edgetrain-processes-") as folder:
        trial = Trial(Path(folder), seed, drawn)
        laws = trial.run(PATIENCE_S)
    said = [str(each) for each in drawn]
    return {"seed": seed, "happenings": said, "rounds": trial.rounds, "broken": laws}


def each_in_a_process(
    seeds: Sequence[int], happenings: int, at_once: int
) -> Iterator[dict[str, object]]:
    """As they end. What is still running is ended when the caller stops asking."""
    waiting, running = list(seeds), {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                seed = waiting.pop(0)
                words = ["--one", str(seed), "--happenings", str(happenings)]
                running[seed] = subprocess.Popen(
                    [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True
                )
            for seed in [seed for seed, trial in running.items() if trial.poll() is not None]:
                said, _ = running.pop(seed).communicate()
                if not said:
                    raise SystemExit(f"seed {seed}: the schedule itself failed")
                yield json.loads(said)
            time.sleep(0.05)
    finally:
        for trial in running.values():
            trial.terminate()
        for trial in running.values():
            trial.communicate()


def main() -> None:
    """Run them, say which broke a law."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=50)
    parser.add_argument("--happenings", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--one", type=int, help="only this seed; answer in JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.one is not None:
        print(json.dumps(one(arguments.one, arguments.happenings)))
        return
    seeds = range(arguments.seed, arguments.seed + arguments.schedules)
    broken = rounds = happened = done = 0
    try:
        for found in each_in_a_process(seeds, arguments.happenings, arguments.at_once):
            done, rounds, happened = (
                done + 1, rounds + found["rounds"], happened + len(found["happenings"]),
            )  # fmt: skip
            if found["broken"]:
                broken += 1
                print(f"seed {found['seed']}:", *found["happenings"], sep="\n  ")
                print(*(f"  BROKEN: {law}" for law in found["broken"][:8]), sep="\n")
            print(f"{done} of {arguments.schedules}, {broken} broke a law", flush=True)
    except KeyboardInterrupt:
        print("interrupted", end=": ")
    verdict = f"{broken} broke a law" if broken else "every law held"
    print(f"{done} schedules, {happened} things went wrong, {rounds} rounds: {verdict}")
    sys.exit(bool(broken) or done < arguments.schedules)


if __name__ == "__main__":
    main()
