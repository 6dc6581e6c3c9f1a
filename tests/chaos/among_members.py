"""One chaos schedule over members that reduce, in memory.

Drivers, links, listeners, reducers and the hub are real, a thread each; time is this machine's, so
that no law speaks of it. When something happens goes by steps, by how far a run without faults is.

    happening              what it does
    kill, power            a member dies, with what it reduces
    pause                  a member stands still before a step
    link, partition, cut   no connection that a member has dialled carries anything for a while
    hub                    the hub dies, and goes on from its journal
    disk                   the hub cannot write, and starts again

What is not for good is shorter than `gone_s`: rounds wait for one that lives.

The laws: every contribution counts once in each range, none of a member that lives is missing, and
those who live end equal, bit for bit.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chaos.laws import Outcome
from chaos.schedule import Happening, Kind
from edgetrain.errors import EdgetrainError
from edgetrain.exchange.hub.journal import Journal, JournalDisk, JournalSettings
from edgetrain.exchange.hub.terms import Policy
from edgetrain.exchange.peers.wrapped import WrappedEnd
from edgetrain.jobs.resolved import Resolved
from tests.fakes.direct_room import Died, DirectRoom

KINDS: tuple[Kind, ...] = (
    "hub", "kill", "power", "cut", "pause", "link", "partition", "disk",
)  # fmt: skip
GONE_S = 1.0
LONGEST_S = 0.4
"""Of what is not for good."""
CALM_S = 25.0
FEWEST = 2
"""Members that live."""
MOST_STEPS = 16


class ShakyEnd(WrappedEnd):
    """A member's end of a connection, that breaks when `is_down`, and is made again after that."""

    def __init__(self, end, is_down) -> None:
        super().__init__(end)
        self._is_down, self._was_down, self._count = is_down, False, 1

    @property
    def connections(self) -> int:
        self._look()
        return self._count

    def _look(self) -> bool:
        down = self._is_down()
        if down and not self._was_down:
            self._end.close()
        if self._was_down and not down:
            self._end.reconnect()
            self._count += 1
        self._was_down = down
        return down

    def send(self, frames) -> None:
        if not self._look():
            super().send(frames)

    def receive(self, timeout_s):
        if not self._look():
            return super().receive(timeout_s)
        time.sleep(min(timeout_s, 0.01))
        return None


class ShakyRoom(DirectRoom):
    """Members that host reducers. Some die before these steps: {member: step}; and `struck` says
    what else happens before a step of a member: {(member, step): [(kind, seconds)]}."""

    def __init__(self, deaths, struck, *args, **other) -> None:
        self.deaths, self.struck = deaths, struck
        self._until: dict[int, float] = {}
        self._is_full = False
        self._restarting = threading.Lock()
        super().__init__(*args, **other)

    def end_of(self, index, end):
        """A member's end of a connection."""
        return ShakyEnd(end, lambda: time.monotonic() < self._until.get(index, 0.0))

    def before_step(self, member, step) -> None:
        if self.deaths.get(member.index) == step:
            raise Died
        for kind, seconds in self.struck.get((member.index, step), ()):
            if kind == "pause":
                time.sleep(seconds)
            elif kind == "hub":
                with self._restarting:
                    self.crash_lead()
            elif kind == "disk":
                self._is_full = True
            else:
                self._until[member.index] = time.monotonic() + seconds

    def keep_journal(self, folder) -> None:
        """Where the next write finds the disk full, once for each such happening."""
        disk = JournalDisk(writev=self._writev)
        self.journal = Journal(folder, JournalSettings(), warnings.warn, disk)

    def _writev(self, file, parts) -> int:
        if self._is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.writev(file, parts)

    def serve_lead(self) -> None:
        while True:
            try:
                return super().serve_lead()
            except EdgetrainError:
                if not self._is_full:
                    raise
                self._is_full = False
                self.reopen()


def run(planned: Resolved, seed: int, happenings: Sequence[Happening], calm_s: float) -> Outcome:
    """Run a job through one schedule, and judge it: see `chaos.simulated`."""
    rounds, broken = _direct(planned, seed, [(each, each.at_s / calm_s) for each in happenings])
    return Outcome(seed, tuple(happenings), rounds, 0.0, tuple(broken))


def calm_seconds(planned: Resolved) -> float:
    """How long a run without faults is said to take."""
    return CALM_S


def _words(planned: Resolved) -> dict:
    table = planned.job.strategy
    return {
        "every": planned.every, "delay": planned.delay.steps, "codec": table.codec,
        "reply_codec": table.reply_codec, "clients": planned.nat,
    }  # fmt: skip


def _deaths(found: Sequence[tuple[Happening, float]], planned: Resolved) -> dict[int, float]:
    """When members die, as a share of a run; some live, and one that can be reached."""
    dead: dict[int, float] = {}
    members = planned.job.fleet.members
    for happening, share in found:
        for index in happening.members if happening.kind in ("kill", "power") else ():
            left = set(range(members)) - {*dead, index}
            if len(left) >= FEWEST and left - {*planned.nat}:
                dead.setdefault(index, share)
    return dead


def _steps(planned: Resolved) -> int:
    """Whole rounds of them."""
    rounds = min(planned.job.train.steps, MOST_STEPS) // planned.every
    return planned.every * max(1, rounds)


def _alive(room: DirectRoom) -> list:
    return [member for member in room.members if not isinstance(member.error, Died)]


def _unequal(alive: list) -> list[str]:
    if len({member.params.tobytes() for member in alive}) > 1:
        return ["members end with other parameters"]
    return []


def _direct(
    planned: Resolved, seed: int, found: Sequence[tuple[Happening, float]]
) -> tuple[int, list[str]]:
    members, steps = planned.job.fleet.members, _steps(planned)
    deaths = {index: int(share * steps) for index, share in _deaths(found, planned).items()}
    struck: dict[tuple[int, int], list[tuple[Kind, float]]] = {}
    for happening, share in found:
        seconds = min(LONGEST_S, happening.for_s / 20)
        for index in happening.members or (seed % members,):
            if happening.kind not in ("kill", "power"):
                key = index, int(share * steps)
                struck.setdefault(key, []).append((happening.kind, seconds))
    policy = Policy(members, beat_s=0.1, gone_s=GONE_S, return_s=10.0, deadline_s=120.0)
    room = ShakyRoom(deaths, struck, planned.job.strategy.name, members, steps, policy=policy,
                     ranges=planned.job.strategy.ranges, **_words(planned))  # fmt: skip
    try:
        with tempfile.TemporaryDirectory() as folder:
            room.keep_journal(Path(folder) / "journal")
            room.run()
    except (EdgetrainError, AssertionError) as error:
        return 0, [f"the run failed: {error!r}"]
    alive = _alive(room)
    broken, rounds = _unequal(alive), 0
    for span, hubs in room.histories().items():
        counted = Counter()
        for hub, following in zip(hubs, [*hubs[1:], None], strict=True):
            end = float("inf") if following is None else following.began_at
            counted.update(each for number, each in hub.counted if number < end)
        broken += [f"{span}: {key} counts {n} times" for key, n in counted.items() if n > 1]
        for member in alive:
            rounds = max(rounds, member.driver.half.round)
            wanted = {(member.name_, number) for number in range(member.driver.half.round)}
            if lost := sorted(wanted - counted.keys()):
                broken.append(f"{span}: contributions {lost[:3]} are lost")
    return rounds, broken
