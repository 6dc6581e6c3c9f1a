"""What a killed hub costs, and what the journal costs while nobody is killed.

    python benchmarks/recovery.py --kills 200    # about 6 minutes
    python benchmarks/recovery.py --kills 0      # only the journal's price

A hub is a process of its own, two members are threads here, over ZeroMQ. The
hub is SIGKILLed at random instants, some of them while members are still coming back, and resumed.
Then the same steps are run without a kill. Verdicts: the base has the same bits; every contribution
that was answered is in the journal, once; no answered round is missing after a restart; the seconds
from the moment the hub listens again until every member is back. The journal's price is a ratio of
runs that take turns, because the machine is not alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgetrain import codecs
from edgetrain.errors import EdgetrainError
from edgetrain.exchange.hub.journal import Fsync, Journal, Settings
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.records import Round
from edgetrain.exchange.hub.serve import serve
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.member.driver import Driver, FlatVectors
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request, RoundReply
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.jobs.reading import load
from edgetrain.strategies.merging.rule import Mean

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from chaos.hub import HubProcess, free_port
from chaos.standin import MODEL, StandIn

from edgetrain.training.hub import HubRequest
from edgetrain.vectors.vector import Vector

MEMBERS = 2
BEAT_S = 0.5
KEYS = (
    f"members={MEMBERS}", "strategy=dga", "every=1", "delay=3", f"beat_s={BEAT_S}", "gone_s=30",
    "snapshot_every=1000000", "deadline_s=600",
)  # fmt: skip


class Trainer(StandIn):
    """A member that remembers what was answered, in a thread; it never misses a reply."""

    def __init__(self, index: int, elements: int) -> None:
        super().__init__(index, elements)
        self.next = 0
        self.last = 10**9
        self.answers: list[int] = []
        self.error: BaseException | None = None

    def run(self, address: str, pace_s: float) -> None:
        """Train until `last`; leave."""
        try:
            self._run(address, pace_s)
        except BaseException as error:
            self.error = error

    def _run(self, address: str, pace_s: float) -> None:
        driver = self.join(WatchedLink(address, self))
        while self.steps < self.last:
            driver.step()
            time.sleep(pace_s)
        driver.drain()
        driver.leave("done")


class WatchedLink(Link):
    """A link that tells its trainer of every reply."""

    def __init__(self, address: str, trainer: Trainer) -> None:
        super().__init__(MemberSocket(address), time.monotonic)
        self._trainer = trainer

    def wait(self, round: int) -> RoundReply:
        """See Exchange; a reply that is missed for good fails."""
        found = super().wait(round)
        assert isinstance(found, RoundReply), "the journal did not have the replies"
        self._trainer.answers.append(round)
        self._trainer.next = round + 1
        return found


class Nudge:
    """An optimizer that does next to nothing."""

    def __init__(self, params: Vector) -> None:
        self._params = params

    def step(self) -> None:
        """Change the parameters a little."""
        self._params -= np.float32(0.001)


def read(folder: Path) -> tuple[int, list[tuple[str, int]]]:
    """Checksum of the base, and all (member, round) that were counted."""
    journal = Journal(folder / "journal")
    rounds = [record for record in journal.records() if isinstance(record, Round)]
    journal.close()
    return rounds[-1].checksum, [(c.member, c.meant_for) for r in rounds for c in r.counted]


def run(
    cwd: Path, elements: int, steps: int, kills: int, rng: random.Random
) -> tuple[int, dict[str, Any]]:
    """One run; how many steps it took, and what there is to say."""
    address = f"tcp://localhost:{free_port()}"
    request = HubRequest(load(None, KEYS), address, any_job=True, runs=cwd / "runs")
    hub = HubProcess(cwd, request)
    hub.when("members join")
    trainers = [Trainer(i, elements) for i in range(MEMBERS)]
    for trainer in trainers:
        trainer.last = steps or trainer.last
    pace_s = 0.004 if kills else 0.0
    threads = [
        threading.Thread(target=t.run, args=(address, pace_s), daemon=True) for t in trainers
    ]
    for thread in threads:
        thread.start()
    hub.when("hub started")
    (folder,) = (cwd / "runs").iterdir()
    back: list[float] = []
    lost = 0
    for _ in range(kills):
        time.sleep(rng.uniform(0.0, 0.4))
        hub.kill()
        answered = max(trainer.next for trainer in trainers)
        hub = HubProcess(cwd, replace(request, resume=folder))
        listening = hub.when("members join")
        goes_on = next(line for _, line in hub.said if "goes on after" in line)
        lost += max(0, answered - int(goes_on.split()[3]))
        if rng.random() < 0.8:  # else it is killed while they come back
            try:
                back.append(max(hub.when(f"m{i} back") for i in range(MEMBERS)) - listening)
            except EdgetrainError as error:
                said = [repr(trainer.error) for trainer in trainers]
                raise AssertionError(f"{error}; members: {said}") from None
        for trainer in trainers:
            if trainer.error is not None:
                raise trainer.error
    if not steps:
        last = max(trainer.steps for trainer in trainers) + 100
        for trainer in trainers:
            trainer.last = last
        steps = last
    for thread in threads:
        thread.join(120)
    for trainer in trainers:
        if trainer.error is not None:
            raise trainer.error
    hub.process.wait(60)
    base, counted = read(folder)
    answers = {(f"m{t.index}", round) for t in trainers for round in t.answers}
    return steps, {
        "base": base,
        "equal": len({t.params.tobytes() for t in trainers}) == 1,
        "twice": len(counted) - len(set(counted)),
        "missing": len(answers - set(counted)),
        "answered": len(answers),
        "lost": lost,
        "back": back,
    }


def price(elements: int, rounds: int, fsync: str | None) -> float:
    """Median seconds of a round of two members over ZeroMQ, with a journal or without."""
    codec = codecs.Dense()
    hub = Hub(Terms("local-sgd", 1, 0), Policy(2), Mean(), codec, codec)
    transport = HubSocket("tcp://127.0.0.1:0")
    closed: list[float] = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        journal = Journal(Path(folder), Settings(Fsync.parse(fsync))) if fsync else None
        serving = threading.Thread(
            target=serve,
            args=(hub, transport, time.monotonic, lambda effect: closed.append(time.monotonic())),
            kwargs={"journal": journal},
        )
        serving.start()
        trainers = [Trainer(i, elements) for i in range(2)]
        threads = []
        for trainer in trainers:
            trainer.last = rounds
            threads.append(threading.Thread(target=_plain, args=(trainer, transport.address)))
            threads[-1].start()
        for thread in [*threads, serving]:
            thread.join()
        transport.close()
        if journal is not None:
            journal.close()
    return statistics.median(np.diff(closed[10:-5]))


def _plain(trainer: Trainer, address: str) -> None:
    """Rounds and nothing else."""
    link = Link(MemberSocket(address), time.monotonic)
    flat, request = FlatVectors(trainer.params), Request(MODEL, trainer.name)
    driver = Driver.join(link, flat, Nudge(trainer.params), request, time.monotonic)
    for _ in range(trainer.last):
        driver.step()
    driver.leave("done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--elements", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", type=int, default=5, help="of the journal's price; 0: skip it")
    arguments = parser.parse_args()
    policies = ("never", "round-every 20", "always")
    for elements in (10_000, 1_000_000) if arguments.turns else ():
        bare: list[float] = []
        ratios: dict[str, list[float]] = {fsync: [] for fsync in policies}
        for _ in range(arguments.turns):
            for fsync in policies:
                bare.append(price(elements, 60, None))
                ratios[fsync].append(price(elements, 60, fsync) / bare[-1])
        print(f"{elements:,} floats: {statistics.median(bare) * 1e3:.2f} ms a round;", end=" ")
        found = [f"{fsync} {statistics.median(ratios[fsync]):.2f}" for fsync in policies]
        print("with a journal, times that:", ", ".join(found), flush=True)
    if not arguments.kills:
        return
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        steps, hurt = run(Path(a), arguments.elements, 0, arguments.kills, rng)
        _, unhurt = run(Path(b), arguments.elements, steps, 0, rng)
    back = sorted(hurt["back"])
    within = sum(seconds <= 2 * BEAT_S for seconds in back)
    verdicts = {
        "the base has the bits of the run without a kill": hurt["base"] == unhurt["base"],
        "both members have it": hurt["equal"],
        "no contribution counts twice": not hurt["twice"],
        "every contribution that was answered is in the journal": not hurt["missing"],
        "no answered round was lost in a restart": not hurt["lost"],
        "members are back within two beats of the hub": within == len(back),
    }
    print(f"{arguments.kills} kills in {steps} rounds, {hurt['answered']} contributions answered")
    for text, holds in verdicts.items():
        print(f"  {'yes' if holds else 'NO '}  {text}")
    if back:
        print(
            f"back after {statistics.median(back):.3f} s (median), {back[-1]:.3f} s (longest of "
            f"{len(back)}); a beat is {BEAT_S:g} s; {within} of {len(back)} within two"
        )
    sys.exit(not all(verdicts.values()))


if __name__ == "__main__":
    main()
