"""The steps of one member, and their record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from edgetrain.exchange.member.driver import Exchanged
from edgetrain.exchange.member.telemetry import Sums
from edgetrain.exchange.seam import Idle
from edgetrain.exchange.transport import Traffic
from edgetrain.jobs.job import Job
from edgetrain.runs.environment import Usage
from edgetrain.tasks.work import Evaluation, Local
from edgetrain.training.member.pacing import Pace

if TYPE_CHECKING:
    from edgetrain.fleet.devices.energy import Energy
    from edgetrain.runs.metrics.log import MetricsLog
    from edgetrain.tasks.own_data import FigureSums
    from edgetrain.training.member.drawn import InCohort

LINE_BYTES = 512
"""More than the line of a step has."""

EVALUATIONS = 50
"""Evaluations in a run unless the job says how often."""


@dataclass(frozen=True)
class Steps:
    """How many steps a member takes, and what is recorded of them."""

    steps: int
    evaluate_every: int = 0
    """Steps between two evaluations; 0: this member evaluates nothing."""
    stand_in_every: int = 0
    """The same for a member that evaluates once another cannot any more."""
    record_every: int = 1
    """Steps that share a line of metrics."""
    most_bytes: int = 0
    """How large the lines of this member may become in the whole run: steps share a line where it
    would be more. Events and evaluations are kept. 0: no limit."""

    @classmethod
    def of(cls, job: Job, index: int, record_every: int = 1) -> Steps:
        """Those of the member `index` of a job: the first member evaluates."""
        steps = job.train.steps
        every = job.train.evaluate_every or max(1, steps // EVALUATIONS)
        return cls(steps, every if index == 0 else 0, every, record_every)


class Progress(Protocol):
    @property
    def round(self) -> int:
        """Rounds submitted so far."""

    @property
    def checksum(self) -> int:
        """Checksum of the base."""

    def quiet_steps(self) -> int:
        """Steps to come that nobody looks between."""


class Trainee(Protocol):
    """The object driven by a loop: a Member, or a rank of a group."""

    @property
    def half(self) -> Progress:
        """How far it is."""

    @property
    def begins_at(self) -> int:
        """Steps of the job that are over."""

    @property
    def steps(self) -> int:
        """Local steps taken."""

    @property
    def wait_s(self) -> float:
        """Seconds that all steps so far waited."""

    @property
    def exchange_s(self) -> float:
        """Seconds that all steps so far spent on exchanges."""

    def step(self) -> None:
        """Step the optimizer, and exchange what is due."""

    def skip(self, steps: int) -> None:
        """This many steps have been taken elsewhere."""

    def drain(self, *, to_the_end: bool = False) -> None:
        """After the last step: see Driver."""

    def fleet_model(self) -> AbstractContextManager[None]:
        """Within: the model is that of all members."""

    def traffic(self) -> Traffic:
        """Bytes so far."""

    def observe_exchanges(self, observe: Callable[[Exchanged], None]) -> None:
        """Call `observe` after each exchange."""

    def account_with(self, sums: Callable[[], Sums]) -> None:
        """Ask `sums` where the time went."""


@dataclass
class Seconds:
    """Where a member's time went, in parts that add up to it. What an evaluation takes while a
    paced device would be computing is part of computing."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    overhead_s: float = 0.0
    eval_s: float = 0.0
    end_s: float = 0.0
    """Waiting for the last replies, when no step is left."""

    def add(self, other: Seconds) -> None:
        for name, seconds in vars(other).items():
            setattr(self, name, getattr(self, name) + seconds)


class Loop:
    def __init__(
        self,
        steps: Steps,
        local: Local,
        member: Trainee,
        log: MetricsLog,
        pace: Pace,
        usage: Usage,
        energy: Energy,
        clock: Callable[[], float],
    ) -> None:
        self._local = local
        self._member = member
        self._log = log
        self._pace = pace
        self._usage = usage
        self._energy = energy
        self._clock = clock
        self._steps = steps.steps
        self._evaluate_every, self._stand_in_every = steps.evaluate_every, steps.stand_in_every
        self.is_to_evaluate: Callable[[], bool] = lambda: False
        """Whether this member is to evaluate although that was another's part. Asked each step."""
        self.observe_figures: Callable[[Mapping[str, float], float], None] = lambda figures, at: (
            None
        )
        """Called with the figures of each evaluation, and when it began."""
        self.evaluate_own: Evaluation | None = None
        """Evaluates on data that this member holds out of its own; None: it has none."""
        self.observe_own: Callable[[FigureSums, int], None] = lambda sums, step: None
        """Called with what that finds, and the job's step."""
        self.is_idle = False
        """Whether the member goes, before the job's last step: it is in no round."""
        self.cohort: InCohort | None = None
        """Cohort of a member with a part in some rounds only."""
        self._record_every = steps.record_every
        self._most_bytes = steps.most_bytes
        self._unrecorded, self._idle_s = 0, 0.0
        self._seconds = Seconds()
        self._all_seconds = Seconds()
        """Seconds of all finished steps; `_seconds` are those without a line yet."""
        self._step, self._step_ended = 0, clock()
        self.before = member.traffic()
        """Bytes that do not count as training's."""
        member.account_with(self._sums)
        if self._record_every == 1 and not steps.most_bytes:
            member.observe_exchanges(self._log.add_exchange)

    @property
    def evaluates(self) -> bool:
        return self._evaluate_every > 0

    @property
    def _own_every(self) -> int:
        """Steps between two evaluations on data of its own."""
        return 0 if self.evaluate_own is None else self._stand_in_every

    def run(self) -> None:
        """All steps (of one that came late, what is left), the last replies, an evaluation."""
        if not self._member.begins_at:  # until the hub's word that training begins was here
            self._seconds.wait_s = max(0.0, self._log.elapsed_s)
        began = self._clock()
        if self.cohort is None:
            self._evaluate(self.evaluates)
        ended = self._clock()
        self._seconds.eval_s = ended - began if self._evaluate_every or self._own_every else 0.0
        self._all_seconds.add(self._seconds)
        half = self._member.half
        step = self._step = min(self._member.begins_at, self._steps)
        while step < self._steps:
            step += 1
            if self.cohort is None:
                self._stand_in()
                fleets = self._evaluate_every
            else:
                fleets = self._stand_in_every * self.cohort.is_first(half.round)
            every = fleets or self._own_every
            many = self._local.takes_many and not every
            began = self._clock()
            if every and (step > 1 or self.cohort) and (step - 1) % every == 0:
                self._evaluate(fleets > 0)  # while a paced device would still be computing
                if not self._pace.is_set:
                    evaluated = Seconds(eval_s=self._clock() - began)
                    self._seconds.add(evaluated)
                    self._all_seconds.add(evaluated)
                    ended += evaluated.eval_s
            ahead = min(half.quiet_steps(), self._steps - step)
            loss_of = self._local.backward(ahead)
            quiet = ahead if many else 0
            for _ in range(quiet):
                loss_of = self._local.backward()
            self._pace.hold(began, 1 + quiet)
            ended, step = self._end_step(step, quiet, ended, loss_of)
        if not self.is_idle:
            self._finish()

    def _end_step(
        self, step: int, quiet: int, ended: float, loss_of: Callable[[], float]
    ) -> tuple[float, int]:
        """Step and exchange, the step before having ended at `ended`. When this one has, and the
        number of the last step of the job that is over: rounds may have gone on without it."""
        waited, exchanged = self._member.wait_s, self._member.exchange_s
        self._member.skip(quiet)
        try:
            self._member.step()
        except Idle:
            self.is_idle = True
        step += quiet
        after = step if self.cohort is None else max(step, self.cohort.progress)
        seconds = Seconds(wait_s=self._member.wait_s - waited)
        if self.is_idle:
            after = self._steps
        elif after >= self._steps:
            # Out of step others may not be done: what is evaluated and kept has all of it.
            self._member.drain(to_the_end=self.evaluates or self._own_every > 0)
            seconds.end_s = self._member.wait_s - waited - seconds.wait_s
        now = self._clock()
        seconds.overhead_s = self._member.exchange_s - exchanged
        seconds.compute_s = now - ended - seconds.wait_s - seconds.end_s - seconds.overhead_s
        if self.cohort is not None:
            seconds.compute_s -= self.cohort.idle_s - self._idle_s
            self._idle_s = self.cohort.idle_s
        self._pace.end_step(seconds.compute_s)
        self._unrecorded += 1 + quiet
        self._seconds.add(seconds)
        self._all_seconds.add(seconds)
        self._step, self._step_ended = step, now
        self._record(step, loss_of, is_last=after >= self._steps)
        if self.cohort is not None and after > step and not self.is_idle:
            self.cohort.begin_at(after)
        return now, after

    def _stand_in(self) -> None:
        """Evaluate from now on, if that was another's part."""
        if not self._evaluate_every and self.is_to_evaluate():
            self._evaluate_every = self._stand_in_every

    def _finish(self) -> None:
        """After the last reply: the model is the fleet's, and is evaluated as such."""
        self._stand_in()
        self._evaluate(self.evaluates)
        if self._pace.overruns > self._steps // 100:
            self._log.event(
                "overrun",
                f"{self._pace.overruns} of {self._member.steps} steps took longer than the "
                f"{self._pace.seconds * 1000:.3g} ms of the emulated device",
            )
        # Equal on all members, and in every run of a job whose result no timing can change.
        base = self._member.half.checksum
        if self._member.steps:
            self._log.event("finished", f"{self._steps} steps, base {base:016x}")
        else:  # it came when others were already waiting for their last replies
            self._log.event("finished", "no steps were left")

    def _sums(self) -> Sums:
        seconds = self._all_seconds
        step = self._step if self.cohort is None else self._member.steps
        return Sums(
            step, self._member.half.round, self._step_ended - self._idle_s,
            seconds.wait_s, seconds.overhead_s, seconds.eval_s, seconds.end_s,
        )  # fmt: skip

    def _record(self, step: int, loss_of: Callable[[], float], is_last: bool) -> None:
        sums = self._seconds
        waits = self._unrecorded < self._record_every or not self._has_room(step)
        if waits and not is_last:
            return
        traffic = self._member.traffic()
        self._log.step(
            step=step,
            round=self._member.half.round,
            loss=loss_of(),
            wait_s=sums.wait_s,
            compute_s=sums.compute_s,
            overhead_s=sums.overhead_s,
            sent_bytes=traffic.sent_bytes - self.before.sent_bytes,
            received_bytes=traffic.received_bytes - self.before.received_bytes,
            cpu_s=self._usage.cpu_s,
            peak_bytes=self._usage.peak_bytes,
            joules=self._energy.joules(busy_s=sums.compute_s + sums.overhead_s),
            steps=self._unrecorded,
            eval_s=sums.eval_s,
            end_s=sums.end_s,
        )
        self._seconds = Seconds()
        self._unrecorded = 0

    def _has_room(self, step: int) -> bool:
        """Whether a line more leaves its share of the limit; the last line always has room."""
        if not self._most_bytes:
            return True
        share = (self._most_bytes - LINE_BYTES) * step / self._steps
        return self._log.written_bytes + LINE_BYTES <= share

    def _evaluate(self, fleets: bool) -> None:
        """The fleet's model: on the task's data if this member does so, and on data of its own."""
        if not (fleets or self._own_every):
            return
        began, round = self._clock(), self._member.half.round
        step = self._step if self.cohort is None else self.cohort.progress
        with self._member.fleet_model():
            figures = self._local.evaluate() if fleets else {}
            looked_s = self._clock() - began
            own = self._local.evaluate(self.evaluate_own) if self.evaluate_own else {}
        if figures:  # of a group only the leader has them
            self.observe_figures(figures, began)
            taken = self._member.steps if self.cohort is None else step
            self._log.evaluation(step=taken, round=round, figures=figures, eval_s=looked_s)
        if own:
            self.observe_own(own, step)
            seconds = self._clock() - began - looked_s
            self._log.own_evaluation(own, step=step, round=round, eval_s=seconds)
