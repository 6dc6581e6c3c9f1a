"""The state of a run while it trains, from the lines of its folder.

Pure but for reading the folder: no clock and no terminal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.runs.data import MemberData, RunData, mean_parts
from edgetrain.runs.folder import metrics_path, read_job, read_summary
from edgetrain.runs.metrics.lines import Follower, Record, figures
from edgetrain.runs.reports import units

_WINDOW_S = 10.0
"""The pace is that of this many seconds, so that a slow first step does not spoil it."""


@dataclass(frozen=True)
class RunState:
    """One run in a frame. Seconds are means per step over members; step is the members' mean."""

    name: str
    metric: str
    phase: str
    step: float
    steps: int | None
    loss: float | None
    figure: float | None
    compute_s: float
    wait_s: float
    overhead_s: float
    sent_bytes: float
    received_bytes: float
    left_s: float | None
    data: RunData
    """All else that is known; it goes on while the run does."""
    timing_ok: bool | None = None
    """Whether the emulated network kept its time; None until it is known."""
    untold: bool = False
    """Whether members do not report to this hub, as its job says."""
    seconds_per_step: float | None = None
    """Seconds per step since training began, as in the closing table."""

    @property
    def members(self) -> list[MemberData]:
        return list(self.data.members.values())

    @property
    def late(self) -> int:
        return sum(member.late for member in self.members)

    @property
    def done(self) -> float:
        """The part of the run that is done, 0 to 1; 0 if its end is not known."""
        if not self.steps:
            return 0.0
        return 1.0 if self.phase == "finished" else min(1.0, self.step / self.steps)


class FolderWatch:
    """Follows one run folder. The folder, its job and its metrics need not exist yet."""

    def __init__(
        self,
        folder: Path,
        metric: str = "accuracy",
        follower: Follower | None = None,
        data: RunData | None = None,
    ) -> None:
        """`data` takes in what is read; None: sums alone."""
        self.folder = folder
        # A folder is named for its time and name; the name is enough here.
        self.name = units.printable(re.sub(r"^\d{8}-\d{6}-(?=.)", "", folder.name))
        self._metric = metric
        self.data = data or RunData()
        self._follower = follower or Follower(metrics_path(folder))
        self.job: dict[str, Any] = {}
        """Its job; {} as long as there is none, or it is damaged."""
        self._verdict: bool | None = None
        # (seconds since training began, mean step), for the pace of the last few seconds
        self._pace: list[tuple[float, float]] = []

    def read(self) -> list[Record]:
        """Take in the records that are new since the last call, and return them."""
        records = self._follower.read()
        if records:
            self.data.add_all(records)
            self._pace.append((self.data.t, self._step()))
            while len(self._pace) > 2 and self._pace[1][0] < self.data.t - _WINDOW_S:
                del self._pace[0]
        if not self.job:
            self.job = self._read_job()
        return records

    def state(self) -> RunState:
        present = self._present()
        compute_s, wait_s, overhead_s, *_ = mean_parts(present)
        sent, received = self.data.traffic
        last = self.data.evaluations[-1] if self.data.evaluations else {}
        metric = self._metric_of(last)
        losses = [member.loss for member in present if member.loss is not None]
        return RunState(
            name=self.name,
            metric=metric,
            phase=self._phase(),
            step=self._step(),
            steps=self._steps(),
            loss=sum(losses) / len(losses) if losses else None,
            figure=last.get(metric),
            seconds_per_step=self._seconds_per_step(),
            compute_s=compute_s,
            wait_s=wait_s,
            overhead_s=overhead_s,
            sent_bytes=sent,
            received_bytes=received,
            left_s=self._left_s(),
            data=self.data,
            timing_ok=self._timing_ok(),
            untold=self._untold(),
        )

    def _metric_of(self, evaluation: Record) -> str:
        """The task's figure: the one that was named, or else the first one that it evaluates."""
        names = list(figures(evaluation)) if evaluation else []
        if not names or self._metric in names:
            return self._metric
        return next((name for name in names if name != "loss"), "loss")

    def _untold(self) -> bool:
        """Whether this is a hub's folder to which members write no lines and send no reports."""
        own = any(member.lines for member in self.data.members.values())
        return not own and self.job.get("hub", {}).get("status_s") == 0

    def _timing_ok(self) -> bool | None:
        """The emulator's own verdict. It is in the summary, which is read when the run is over."""
        if self._verdict is None and self._phase() in ("finished", "lost"):
            try:
                summary = read_summary(self.folder) or {}
            except ConfigError:
                return None
            self._verdict = (summary.get("emulation") or {}).get("timing_ok")
        return self._verdict

    def _read_job(self) -> dict[str, Any]:
        try:
            return read_job(self.folder)
        except ConfigError:  # a damaged job: the metrics can still be shown
            return {}

    def _present(self) -> list[MemberData]:
        lost = self.data.lost()
        return [m for name, m in self.data.members.items() if m.step and name not in lost]

    def _step(self) -> float:
        if turns := self.data.turns(self.job):
            return turns[0]
        went = ("left", "removed")  # before the end, as a group that stepped out does
        present = self._present()
        present = [m for m in present if m.standing not in went or m.reason == "done"] or present
        return sum(member.step for member in present) / len(present) if present else 0.0

    def _steps(self) -> int | None:
        """The job's; None if its members may run any, or if their own loops go on behind them."""
        steps = self.job.get("train", {}).get("steps") if "task" in self.job else None
        known = isinstance(steps, int) and steps > 0 and self._step() <= steps
        return steps if known else None

    def _phase(self) -> str:
        members = self.data.members
        if not members:
            return "waiting"
        lost = self.data.lost()
        others = [name for name in members if name not in lost]
        if not set(others) & set(self.data.unfinished()):
            if not others or not (self._present() or self.data.rounds):
                return "lost"
            return "incomplete" if self.data.failed() else "finished"
        running = "paused" if self.data.paused else "running"
        return running if any(member.step for member in members.values()) else "starting"

    def _seconds_per_step(self) -> float | None:
        """Seconds per step of a member since training began, as in the closing table."""
        if turns := self.data.turns(self.job):
            return turns[1] / turns[0] if turns[0] else None
        paces = [each for member in self._present() if (each := member.seconds_per_step)]
        return sum(paces) / len(paces) if paces else None

    def _recent_step_s(self) -> float | None:
        """Seconds per step lately, to predict the time that is left."""
        if not self._pace:
            return None
        (t0, step0), (t1, step1) = self._pace[0], self._pace[-1]
        if step1 > step0 and t1 > t0:
            return (t1 - t0) / (step1 - step0)
        return t1 / step1 if step1 else None

    def _left_s(self) -> float | None:
        steps, step_s = self._steps(), self._recent_step_s()
        if steps is None or step_s is None or self._phase() != "running":
            return None
        return max(0.0, steps - self._step()) * step_s
