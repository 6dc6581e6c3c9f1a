"""A hub that has a group of servers step in for its devices while a job runs.

`exchange/hub/fallback.py` decides when. Here its decisions become events, and a process: the leader
of the group (`servers/stepping_in.py`), which starts the other ranks itself. It ends with the hub.

    state     event                            next state
    out       the rule: step in                running
    running   its process ends with an error   waiting: a line, and a pause twice as long as before
    running   its process is done              done
    running   the rule: step out               out: SIGTERM; it finishes its step and leaves
    waiting   the pause is over                running
    waiting   the rule: step out               out

Under `when-faster` nothing is decided before the planner has said, in a process like that, how fast
the group would be. One that trains reports how fast it is, which counts where that is less.

No torch.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from edgetrain.exchange.hub.effects import Note, Observed, Reported
from edgetrain.exchange.hub.fallback import Fallback, FleetPace, StepIn, StepOut
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.messages import Telemetry
from edgetrain.fleet import interpreters
from edgetrain.jobs.fallback import NAME, quorum_of, steps_in, watches_pace
from edgetrain.jobs.job import Job
from edgetrain.jobs.reading import parse

PAUSE_S, LONGEST_S = 5.0, 600.0
"""Pauses before a group is started again: the first, and the longest."""
LEAVE_S = 60.0
"""A group that has not left after this time is killed."""
PROGRAM = "edgetrain.training.servers.stepping_in"


@dataclass(frozen=True)
class Told:
    job: Job
    hub: str
    """Its address, from its own machine."""
    folder: Path
    """The run folder: it gets the group's lines of metrics, and in `servers/` its snapshots."""
    beside: Path | None
    """The folder of the job file."""
    keys: Path | None
    """The folder of the hub's keys; None: the usual one."""
    is_encrypted: bool
    missing: tuple[int, ...] = ()
    """The members that it stands in for."""
    began: float = 0.0
    """When training began, by `time.monotonic`."""
    asks: bool = False
    """Whether it is only asked how fast the group would be, in steps a second."""

    @property
    def own(self) -> Path:
        return self.folder / NAME

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "job": self.job.to_dict()}, default=str)

    @classmethod
    def of_json(cls, text: str) -> Self:
        table: dict[str, Any] = json.loads(text)
        paths = {
            name: Path(table[name])
            for name in ("folder", "beside", "keys")
            if table[name] is not None
        }
        missing, job = tuple(table["missing"]), parse(table["job"])
        return cls(**{**table, **paths, "job": job, "missing": missing})


class GroupProcess:
    """The process of a group's leader. It ends when this process does: its input ends."""

    def __init__(self, told: Told) -> None:
        self._log = told.own / "log.txt"
        told.own.mkdir(exist_ok=True)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM], stdin=subprocess.PIPE, stdout=log, stderr=log,
                env=interpreters.environment(), text=True, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: seen by `ended`
            self._process.stdin.write(f"{told.to_json()}\n")
            self._process.stdin.flush()

    def ended(self) -> str | None:
        """Why it has ended, "" if it is done; None: it runs."""
        code = self._process.poll()
        if not code:
            return None if code is None else ""
        return f"it was killed by signal {-code}" if code < 0 else self.said() or f"status {code}"

    def said(self) -> str:
        """The last line of its output."""
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def leave(self) -> None:
        """Have it finish its step and leave."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once, and wait for that. Works twice."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


class SteppingIn:
    """Observes what a hub does, hands it on to `observe`, and has a group step in and out, if
    the job asks for it."""

    def __init__(
        self,
        told: Told,
        clock: Callable[[], float],
        observe: Callable[[Observed], None],
        earlier_s: float = 0.0,
        start: Callable[[Told], GroupProcess] = GroupProcess,
    ) -> None:
        """`earlier_s`: seconds of training before the hub was restored. `start` starts a group."""
        job, servers = told.job, told.job.servers
        self._rule = Fallback(
            job.fleet.members, quorum_of(job), servers.after_s, servers.back_s
        ) if steps_in(job) else None  # fmt: skip
        self._told, self._clock, self._observe = told, clock, observe
        self._earlier_s, self._start = earlier_s, start
        self._began = 0.0
        self._missing: tuple[int, ...] = ()
        self._group: GroupProcess | None = None
        self._leaving: tuple[GroupProcess, float] | None = None
        self._pause_s, self._again_at = PAUSE_S, 0.0
        self._is_done = False
        self._asked: GroupProcess | None = None
        self._planned = self._rate = 0.0
        """Steps a second of the group, as the planner says, and as it is; 0: not known."""
        self._first: Telemetry | None = None
        """The first report of a group that trains."""

    def __call__(self, effect: Observed) -> None:
        if self._rule and isinstance(effect, Note) and effect.event == "left":
            self._rule.note_left(effect.member, effect.reason)
        if isinstance(effect, Note) and effect.event == "started" and effect.member == "hub":
            self._began = time.monotonic() - self._earlier_s
        if isinstance(effect, Reported) and effect.member == NAME and self._planned:
            self._note_speed(effect.telemetry)
        self._observe(effect)

    def _note_speed(self, newest: Telemetry) -> None:
        """Note how fast a group is while it need not wait."""
        first = self._first
        if first is None or newest.t_ms <= first.t_ms:  # another process than before
            self._first = newest
            return
        waited = newest.wait_ms - first.wait_ms + newest.eval_ms - first.eval_ms
        busy_ms = max(1, newest.t_ms - first.t_ms - waited)
        if newest.step > first.step:
            self._rate = min(self._planned, 1e3 * (newest.step - first.step) / busy_ms)

    def _knows_rate(self) -> bool:
        """Whether it is known how fast the group would be, if that matters; else, ask."""
        if self._rate or not watches_pace(self._told.job):
            return True
        if self._asked is None:
            everybody = tuple(range(self._told.job.fleet.members))
            told = {**vars(self._told), "missing": everybody, "asks": True}
            self._asked = self._start(Told(**told))
        if (why := self._asked.ended()) is None:
            return False
        said = why or self._asked.said()
        try:
            self._planned = self._rate = float(said)
        except ValueError:
            self._planned = self._rate = float("nan")
            self._say(f"only for members that go: the servers' speed is not known: {said}")
        self._asked.kill()
        return True

    def _pace(self, hub: Hub) -> FleetPace | None:
        """The pace of a job that is watched for it."""
        if not self._rate > 0 or hub.steering.stands:
            return None
        delay = hub.rounds.delay
        return FleetPace(delay.merged_steps, delay.local_steps, self._rate)

    def look(self, hub: Hub) -> None:
        """See what the hub sees, and do what follows. Call it a few times a second."""
        if self._rule is None or not hub.started or not self._knows_rate():
            return
        now = self._clock()
        here = [each.name for each in hub.members if each.unreachable_since is None]
        if NAME in here:
            self._pause_s = PAUSE_S
        match self._rule.look(here, now, self._pace(hub)):
            case StepIn(missing=missing, reason=reason):
                names = ", ".join(f"m{index}" for index in missing)
                self._say(f"in for {names}: {reason}")
                self._missing, self._again_at, self._pause_s = missing, now, PAUSE_S
                self._end_leaving()
                shutil.rmtree(self._told.own, ignore_errors=True)  # of the last time it was in
            case StepOut(reason=reason):
                self._say(f"out: {reason}")
                if self._group is not None:
                    self._group.leave()
                    self._leaving, self._group = (self._group, now + LEAVE_S), None
        if self._leaving is not None and (
            self._leaving[0].ended() is not None or now >= self._leaving[1]
        ):
            self._end_leaving()
        is_in = self._rule.is_in
        if self._group is not None and (why := self._group.ended()) is not None:
            self._group.kill()
            self._group, self._is_done = None, not why
            if why:
                self._say(f"the group ended; again in {self._pause_s:g} s: {why}")
            self._again_at = now + self._pause_s
            self._pause_s = min(LONGEST_S, 2 * self._pause_s)
        due = is_in and not self._is_done and now >= self._again_at
        if due and self._group is None:
            told = {**vars(self._told), "missing": self._missing, "began": self._began}
            self._group = self._start(Told(**told))

    def _say(self, reason: str) -> None:
        self._observe(Note("servers", "hub", reason))

    def _end_leaving(self) -> None:
        if self._leaving is not None:
            self._leaving[0].kill()
            self._leaving = None

    def close(self) -> None:
        """End the group; works twice."""
        self._end_leaving()
        for each in filter(None, (self._group, self._asked)):
            each.kill()
        self._group = None
