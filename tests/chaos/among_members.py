"""One chaos schedule over members that reduce, in memory.

Drivers, links, listeners, reducers and the hub are real; time is virtual, and a seed draws how long
each message takes. When something happens goes by the seconds of a run without faults.

    happening              what it does
    kill, power            a member dies, with what it reduces
    pause                  a member's machine stands still
    link, partition, cut   no connection that a member has dialled carries anything for a while, and
                           what was under way is lost
    hub                    the hub dies, and goes on from its journal
    disk                   the hub cannot write, and starts again

Some of that lasts longer than `lost_after_s`: then members are given up, and what they reduce is
given to others, while they live, and come back.

The laws: every contribution counts once in each range, and none of a member that comes to the end
is missing; those with the same number of replies have equal bits, and one has all there are. One
that was given up may be told by name that it has to join anew, or find the job over.
"""

from __future__ import annotations

import errno
import functools
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chaos.laws import Outcome
from chaos.schedule import Happening, Kind
from edgetrain.errors import EdgetrainError, HubUnreachable, Refused
from edgetrain.exchange.hub.journal import Journal, JournalDisk, JournalSettings
from edgetrain.exchange.hub.terms import Policy
from edgetrain.exchange.peers.wrapped import WrappedEnd
from edgetrain.jobs.resolved import Resolved
from edgetrain.training.simulated.virtual import SECOND
from tests.fakes.direct_room import Died, DirectRoom
from tests.fakes.scenes import VirtualTime

KINDS: tuple[Kind, ...] = (
    "hub", "kill", "power", "cut", "pause", "link", "partition", "disk",
)  # fmt: skip
GONE_S = 1.0
SHARE = 0.15
"""Of the time that a happening is drawn to last."""
STEP_S = 0.3
CALM_S = 25.0
FEWEST = 2
"""Members that live."""
MOST_STEPS = 16


class ShakyEnd(WrappedEnd):
    """A member's end of a connection, that breaks when `is_down`, and is made again after that."""

    def __init__(self, end, is_down, sleep) -> None:
        super().__init__(end)
        self._is_down, self._was_down, self._count, self._sleep = is_down, False, 0, sleep

    @property
    def connections(self) -> int:
        self._look()
        return self._count + self._end.connections

    def _look(self) -> bool:
        down = self._is_down()
        if down and not self._was_down:
            self._end.cut()
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
        self._sleep(min(timeout_s, 0.01))
        return None


class ShakyRoom(DirectRoom):
    """Members that host reducers, in virtual time. Once all train, `happenings` happen, each after
    its seconds: (seconds, kind, how long, indices of members)."""

    expected, patience_s = (Died, EdgetrainError), (30.0, 45.0)

    def __init__(self, happenings, *args, **other) -> None:
        self.happenings = happenings
        self._until: dict[int, float] = {}
        self._is_full = self._is_restarting = self._has_begun = False
        super().__init__(*args, **other)
        for member in self.members:
            _note_contributions(member)

    def end_of(self, index, end):
        """A member's end of a connection."""
        scene = self.scene
        return ShakyEnd(end, lambda: scene.clock() < self._until.get(index, 0.0), scene.sleep)

    def before_step(self, member, step) -> None:
        self._has_begun or self._begin()
        self.scene.sleep(STEP_S)

    def _begin(self) -> None:
        world = self.scene.world
        self._has_begun = all(hasattr(member, "driver") for member in self.members)
        for seconds, *happening in self.happenings if self._has_begun else ():
            when = world.now + round(seconds * SECOND)
            world.at(when, functools.partial(self._strike, *happening))

    def _strike(self, kind, seconds, members) -> None:
        until = self.scene.clock() + seconds
        match kind:
            case "hub" if not self._is_restarting:
                self.scene.task(self._restart).start()
            case "disk":
                self._is_full = True
        for member in (self.members[index] for index in members):
            match kind:
                case "kill" | "power":
                    member.task.throw(Died())
                case "pause":
                    member.task.hold(seconds)
                    member.machine.hold(seconds)
                case "link" | "partition" | "cut":
                    self._until[member.index] = max(until, self._until.get(member.index, 0.0))

    def _restart(self) -> None:
        self._is_restarting = True
        self.crash_lead()
        self._is_restarting = False

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


def _note_contributions(member) -> None:
    """`made`: the rounds that it contributes to."""
    submit, member.made = member.exchange.submit, []

    def noted(submission):
        member.made.append(submission.round)
        return submit(submission)

    member.exchange.submit = noted


def run(planned: Resolved, seed: int, happenings: Sequence[Happening], calm_s: float) -> Outcome:
    """Run a job through one schedule, and judge it: see `chaos.simulated`."""
    time = VirtualTime(seed)
    found = [(each, each.at_s / calm_s) for each in happenings]
    rounds, broken = _direct(planned, seed, found, time)
    return Outcome(seed, tuple(happenings), rounds, time.clock(), tuple(broken))


def calm_seconds(planned: Resolved) -> float:
    """How long a run without faults is said to take."""
    return CALM_S


def _words(planned: Resolved) -> dict:
    table = planned.job.strategy
    return {
        "local_steps": planned.local_steps, "delay": planned.delay.steps, "codec": table.codec,
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
    rounds = min(planned.job.train.steps, MOST_STEPS) // planned.local_steps
    return planned.local_steps * max(1, rounds)


def _alive(room: DirectRoom) -> list:
    return [member for member in room.members if not isinstance(member.error, Died)]


def _unequal(alive: list) -> list[str]:
    if len({member.params.tobytes() for member in alive}) > 1:
        return ["members end with other parameters"]
    return []


def _direct(
    planned: Resolved, seed: int, found: Sequence[tuple[Happening, float]], time: VirtualTime
) -> tuple[int, list[str]]:
    members, steps = planned.job.fleet.members, _steps(planned)
    dead, happenings = _deaths(found, planned), []
    for happening, share in found:
        struck = happening.members or (seed % members,)
        if happening.kind in ("kill", "power"):
            struck = tuple(index for index in struck if dead.get(index) == share)
        times = share * STEP_S * steps, happening.kind, SHARE * happening.for_s
        happenings.append((*times, struck))
    policy = Policy(members, heartbeat_s=0.1, lost_after_s=GONE_S, rejoin_s=10.0, deadline_s=120.0)
    room = ShakyRoom(happenings, planned.job.strategy.name, members, steps, policy=policy,
                     scene=time, ranges=planned.job.strategy.ranges,
                     **_words(planned))  # fmt: skip
    try:
        with tempfile.TemporaryDirectory() as folder:
            room.keep_journal(Path(folder) / "journal")
            room.run()
    except (EdgetrainError, AssertionError) as error:
        return 0, [f"the run failed: {error!r}"]
    return max(len(member.made) for member in room.members), _judged(room)


def _judged(room: ShakyRoom) -> list[str]:
    """The laws of members that reduce, which a run broke. One that was given up, and is told that
    it has to join anew, is lost."""
    given_up = {note.member for note in room.notes if note.event == "gone"}
    broken = [
        f"{member.name_} failed: {member.error!r}"
        for member in _alive(room)
        if member.error
        and not (isinstance(member.error, Refused | HubUnreachable) and member.name_ in given_up)
    ]
    ended = [member for member in room.members if member.error is None]
    if not ended:
        return [*broken, "nobody came to the end"]
    most = max(member.driver.half.applied for member in ended)
    for applied in {member.driver.half.applied for member in ended}:
        alike = [m for m in ended if m.driver.half.applied == applied]
        broken += _unequal(alike)
    for span, hubs in room.histories().items():
        counted = Counter()
        for hub, following in zip(hubs, [*hubs[1:], None], strict=True):
            end = float("inf") if following is None else following.part.began_at
            counted.update(each for number, each in hub.part.counted if number < end)
        broken += [f"{span}: {key} counts {n} times" for key, n in counted.items() if n > 1]
        if hubs[-1].round != most:
            broken.append(f"{span}: {hubs[-1].round} rounds, and the last to end has {most}")
        for member in ended:
            if lost := sorted({(member.name_, number) for number in member.made} - counted.keys()):
                broken.append(f"{span}: contributions {lost[:3]} are lost")
    return broken
