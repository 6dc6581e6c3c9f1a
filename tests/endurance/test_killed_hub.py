"""A hub that is SIGKILLed at random moments and resumed: are the bits those of a quiet run?

The hub is a process of its own, two members are threads here, over ZeroMQ. Some kills come while
members are still coming back. Then the same steps are run without a kill.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from chaos.hub import HubProcess, free_port
from chaos.standin import StandIn

from edgetrain.errors import EdgetrainError
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.records import Round
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import RoundReply
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.jobs.reading import load
from edgetrain.training.hub import HubRequest
from edgetrain.vectors.vector import Vector

KILLS = int(os.environ.get("KILLS", "20"))
SEED = int(os.environ.get("SEED", "0"))
ELEMENTS = 10_000
MEMBERS = 2
BEAT_S = 0.5
KEYS = (
    f"members={MEMBERS}", "strategy=dga", "local_steps=1", "delay=3", f"heartbeat_s={BEAT_S}",
    "lost_after_s=30", "hub.snapshot_every=1000000", "deadline_s=600",
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
        goes_on = next(line for _, line in hub.said if "resumed after" in line)
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


def test_a_hub_that_is_killed_again_and_again_loses_nothing(tmp_path, printed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # a hub is chaos.hub
    rng = random.Random(SEED)
    places = tmp_path / "killed", tmp_path / "unhurt"
    for place in places:
        place.mkdir()
    steps, hurt = run(places[0], ELEMENTS, 0, KILLS, rng)
    _, unhurt = run(places[1], ELEMENTS, steps, 0, rng)
    back = sorted(hurt["back"])
    within = sum(seconds <= 2 * BEAT_S for seconds in back)
    printed(
        print,
        f"{KILLS} kills in {steps} rounds, {hurt['answered']} contributions answered; members are "
        f"back after {statistics.median(back or [0.0]):.3f} s (median), "
        f"{max(back, default=0.0):.3f} s (longest of {len(back)}); a beat is {BEAT_S:g} s; "
        f"{within} of {len(back)} within two",
    )
    assert hurt["base"] == unhurt["base"], "other bits than without a kill"
    assert hurt["equal"]
    assert not hurt["twice"]
    assert not hurt["missing"], "answered, and not in the journal"
    assert not hurt["lost"], "answered rounds that were lost in a restart"
    assert within == len(back), "members that took more than two beats to come back"
