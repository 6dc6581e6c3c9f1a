"""A job on a group of processes: attempts, until one comes to its end.

One attempt is one placement on fresh processes with a store of its own. When a rank dies all of the
attempt is ended, and the next one goes on from the last snapshot; torchrun's restarts are not used.
When a server is lost, or one that was lost is back, the planner is asked again.

    state      event                              next state
    running    all ranks end well                 finished
    running    a rank reports an error            failed
    running    a rank is killed, or hangs         again, from the last snapshot
    running    a server is lost                   again, on the servers that are left
    running    a lost server is back, a snapshot  again, on all servers
    running    no memory at the start             again, once, with the next placement
    running    one process computes another step  failed, once a placement is found that does not
    again      MOST attempts, no progress         failed
    again      nothing fits the servers           failed
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from edgetrain.errors import EdgetrainError
from edgetrain.fleet.cluster import Cluster
from edgetrain.jobs.placement.decision import Question
from edgetrain.jobs.placement.replanning import Placed, nearest, place_again, ranks_of
from edgetrain.jobs.placement.search import Found
from edgetrain.jobs.resolved import Resolved
from edgetrain.runs.folder import metrics_path, read_metrics, write_job
from edgetrain.runs.metrics.log import EventName, MetricsLog
from edgetrain.training.outcome import recorded
from edgetrain.training.servers.attempt import Attempt, RankEnd
from edgetrain.training.servers.beats import LINE_S, SilentRanks
from edgetrain.training.servers.checking import DIFFERS
from edgetrain.training.servers.crew import Crew
from edgetrain.training.servers.mesh import open_store
from edgetrain.training.servers.process import name_of
from edgetrain.training.servers.snapshots import latest

MOST = 3
"""Attempts in a row that may end at the same snapshot."""
MOST_TRIED = 6
"""Placements that are tried in place of one that computes something else."""
_EVENTS: dict[str, EventName] = {"lost": "gone", "back": "back"}
_NO_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|can't allocate memory|bad_alloc"
)
_CONNECTION = re.compile(r"[Cc]onnection (closed|reset)|[Bb]roken pipe|Socket Timeout|timed out")


def run(
    planned: Resolved,
    chosen: Found,
    folder: Path,
    watch: Callable[[], None] = lambda: None,
    poll_s: float = 0.1,
    *,
    question: Question | None = None,
    cluster: Cluster | None = None,
) -> dict[str, Any]:
    """Run a planned job on a group of ranks, in `folder`; returns its summary.

    On this machine, or on the servers of `cluster`. `question` is what was planned: without it
    nothing is planned again. Goes on from the folder's last snapshot, if there is one. Raises the
    error of a rank. No process is left behind in any case.
    """
    with recorded(planned, folder) as outcome:
        outcome.network = {"backend": "none", "reason": "a group of processes on servers"}
        outcome.extra = {"strategy": "sync-sgd", "local_steps": 1}
        crew = Crew(cluster)
        group = _Group(planned, chosen, folder.resolve(), crew, watch, poll_s, question)
        try:
            outcome.status = group.run()
        finally:
            crew.close()
            found = group.found
            outcome.extra |= {
                "placement": str(found.placement),
                "predicted_step_s": found.seconds,
                "predicted_bytes": max(found.bytes),
                "attempts": group.attempts,
                "measured_step_s": _step_seconds(folder),
            }
    return outcome.summary


def _step_seconds(folder: Path) -> float | None:
    found = sorted(
        record["compute_s"]
        for record in read_metrics(folder, "step")
        if record["member"] == name_of(0)
    )
    return found[len(found) // 2] if found else None


@dataclass(frozen=True)
class _Verdict:
    """What an attempt came to: "finished", "killed", "lost", "back", "memory" or "differs", and of
    whom."""

    kind: str
    names: tuple[str, ...] = ()
    reason: str = ""


class _Group:
    """The attempts of one run."""

    def __init__(
        self,
        planned: Resolved,
        chosen: Found,
        folder: Path,
        crew: Crew,
        watch: Callable[[], None],
        poll_s: float,
        question: Question | None,
    ) -> None:
        self._planned, self._folder, self._crew = planned, folder, crew
        self._watch, self._poll_s, self._question = watch, poll_s, question
        whole = {0: tuple(range(chosen.placement.ranks))}
        servers = question.servers if question is not None else None
        self._placed = Placed(chosen, ranks_of(chosen, servers) if servers else whole)
        self._elapsed: tuple[float, float] | None = None
        """Seconds since training began, and when that was so; None: it has not."""
        self._hang_s = planned.job.servers.hang_s
        self._smaller_tried = False
        self.attempts = 0

    @property
    def found(self) -> Found:
        return self._placed.found

    def run(self) -> str:
        """Attempts, to the end of one; the status. Raises the error of a rank."""
        stuck = 0
        while True:
            before = latest(self._folder)
            self.attempts += 1
            verdict = self._attempt()
            if verdict.kind == "finished":
                return "finished"
            if verdict.kind == "differs":
                raise EdgetrainError(verdict.reason, self._what_holds())
            after = latest(self._folder)
            since = f"from step {after[0]}" if after else "from the beginning"
            if verdict.kind == "killed":
                stuck = stuck + 1 if after == before else 0
                self._record("error", verdict, f"{verdict.reason}; again, {since}")
                if stuck >= MOST:
                    raise EdgetrainError(
                        f"{verdict.names[0]} {verdict.reason} in {stuck} attempts that came no "
                        f"further than {since.removeprefix('from ')}",
                        "its machine sleeps, or it was stopped"
                        if "hung" in verdict.reason
                        else "out of memory? see the kernel's log, and what `edgetrain plan` says",
                    )
                continue
            assert self._question is not None
            below = max(self.found.bytes) if verdict.kind == "memory" else float("inf")
            placed = place_again(self._question, self._crew.lost, below)
            if placed is None:
                left = (
                    "a smaller placement"
                    if verdict.kind == "memory"
                    else "the servers that are left"
                )
                raise EdgetrainError(
                    f"{verdict.reason or verdict.names[0]}, and the job does not fit {left}",
                    f"edgetrain run --resume {self._folder} goes on, with more servers",
                )
            self._placed = placed
            said = f"again, {since}, with {self.found.placement}"
            event = _EVENTS.get(verdict.kind, "error")
            self._record(event, verdict, f"{verdict.reason}; {said}")

    def _what_holds(self) -> str:
        """The nearest placement that computes what one process does, found by trying."""
        off = "servers.check = 'off' trains all the same"
        if self._question is None:
            return off
        for found in islice(nearest(self._question, self.found.placement), MOST_TRIED):
            if self._holds(found):
                return f"servers.placement = '{found.placement}' computes the same as one; {off}"
        return off

    def _holds(self, found: Found) -> bool:
        """Whether the check before the first step holds with a placement."""
        assert self._question is not None
        assert self._question.servers is not None
        crew, placed = self._crew, Placed(found, ranks_of(found, self._question.servers))
        used = list(placed.ranks)
        if crew.lost & set(used):
            return False
        crew.wait_for(used, self._watch, self._poll_s, first=False)
        store, until = self._start(placed, is_trial=True), time.monotonic() + self._hang_s
        try:
            while not crew.gone(used) and time.monotonic() < until:
                ended = crew.ended(used)
                if len(ended) == found.placement.ranks or any(e.code for e in ended.values()):
                    return not any(end.code for end in ended.values())
                self._watch()
                crew.wait(used, self._poll_s)
            return False
        finally:
            crew.stop(used)
            del store

    def _record(self, event: EventName, verdict: _Verdict, reason: str) -> None:
        began = time.monotonic() - (self._elapsed_s or 0.0)
        about = verdict.names[0]
        if verdict.kind == "killed":
            reason = f"{', '.join(verdict.names)} {reason}"
        with MetricsLog(metrics_path(self._folder), "hub", time.monotonic, began) as log:
            log.event(event, reason, about=about)

    @property
    def _elapsed_s(self) -> float | None:
        if self._elapsed is None:
            return None
        elapsed, when = self._elapsed
        return elapsed + time.monotonic() - when

    # -- one attempt ---------------------------------------------------------------------------

    def _attempt(self) -> _Verdict:
        """Run all ranks until they have ended, or cannot go on."""
        crew, ranks = self._crew, self._placed.ranks
        crew.wait_for(list(ranks), self._watch, self._poll_s, first=self.attempts == 1)
        if missing := crew.gone(list(ranks)):
            return self._lost(missing)
        store = self._start(self._placed)
        try:
            silence = SilentRanks(store, self.found.placement.ranks, self._hang_s)
            return self._follow(list(ranks), silence)
        finally:
            crew.stop(list(ranks))
            del store

    def _start(self, placed: Placed, is_trial: bool = False) -> TCPStore:
        placement = placed.found.placement
        store = open_store(self._crew.address(list(placed.ranks)))
        attempt = Attempt(
            self.attempts, self._planned.job, self._beside, self._folder, str(placement),
            placement.ranks, store.host, store.port, self._elapsed_s, is_trial,
        )  # fmt: skip
        for server, each in placed.ranks.items():
            self._crew.side(server).start(attempt, each)
        return store

    @property
    def _beside(self) -> Path | None:
        beside = self._planned.beside
        return beside.resolve() if beside is not None else None

    def _follow(self, used: list[int], silence: SilentRanks) -> _Verdict:
        """Until all ranks have ended, one has ended badly (the others would wait for it) or hangs,
        a server is lost, or one that is back can be taken in."""
        crew, count = self._crew, self.found.placement.ranks
        before = latest(self._folder)
        while True:
            self._watch()
            ended, bad = crew.ended(used), {}
            if crew.elapsed_s is not None:
                if self._elapsed is None:  # only now no rank can refuse it any more
                    write_job(self._folder, self._planned.job.to_dict())
                self._elapsed = (crew.elapsed_s, time.monotonic())
            bad = {rank: end for rank, end in ended.items() if end.code}
            if not bad and len(ended) == count:
                self._watch()
                return _Verdict("finished")
            if missing := crew.gone(used):
                return self._lost(missing)
            if bad:
                # A rank that lost its peer may be about to say so; so may a server.
                crew.wait(used, self._poll_s)
                self._watch()
                missing = crew.gone(used)
                return self._lost(missing) if missing else self._verdict(crew.ended(used))
            if hanging := self._hanging(silence, ended):
                return hanging
            found = latest(self._folder)
            if found != before:
                before = found
                if verdict := self._taken_in():
                    return verdict
            crew.wait(used, self._poll_s)

    def _hanging(self, silence: SilentRanks, ended: Collection[int]) -> _Verdict | None:
        """Say who is silent; the verdict once that has been so for too long."""
        said_s = min(LINE_S, self._hang_s / 2)
        before = {rank for rank, seconds in silence.seconds.items() if seconds >= said_s}
        silence.look(ended)
        for rank, seconds in silence.seconds.items():
            if seconds >= self._hang_s:
                return _Verdict("killed", (name_of(rank),), f"hung for {seconds:.0f} s")
            if seconds >= said_s and rank not in before:
                said = (
                    f"no sign of life for {seconds:.0f} s: stopped? Training goes on from the last "
                    f"snapshot after {self._hang_s:g} s (servers.hang_s)"
                )
                self._record("stands", _Verdict("stands", (name_of(rank),)), said)
        return None

    def _lost(self, missing: list[int]) -> _Verdict:
        reasons = [self._crew.side(server).problem for server in missing]
        names = tuple(self._crew.name(server) for server in missing)
        if self._question is None:
            raise EdgetrainError("; ".join(reasons))
        self._crew.give_up(missing)
        return _Verdict("lost", names, "; ".join(reasons))

    def _taken_in(self) -> _Verdict | None:
        """Servers that are back, if the planner would use them."""
        names = self._crew.take_back()
        if not names or self._question is None:
            return None
        placed = place_again(self._question, self._crew.lost)
        if placed is None or placed.ranks == self._placed.ranks:
            return None
        return _Verdict("back", names, f"{', '.join(names)} is back")

    def _verdict(self, ended: dict[int, RankEnd]) -> _Verdict:
        killed = [rank for rank, end in ended.items() if end.code < 0]
        if killed:
            return _Verdict("killed", tuple(name_of(rank) for rank in killed), "was killed")
        told = {rank: end for rank, end in ended.items() if end.code and end.error}
        refused = {rank: end for rank, end in told.items() if end.code == 2}
        own = {rank: end for rank, end in told.items() if not _CONNECTION.search(end.first)}
        rank, end = next(iter((refused or own or told or ended).items()))
        first = end.first
        if DIFFERS in first:
            return _Verdict("differs", (name_of(rank),), first)
        hungry = [r for r, each in told.items() if _NO_MEMORY.search(each.error)]
        if hungry and not refused and self._may_shrink():
            self._smaller_tried = True
            said = f"{name_of(hungry[0])} has no memory for {self.found.placement}"
            return _Verdict("memory", (name_of(hungry[0]),), said)
        if not refused and not hungry and _CONNECTION.search(first):
            return _Verdict(
                "killed", (name_of(rank),), "was killed"
            )  # its peer is gone, and cannot say so
        self._record("error", _Verdict("failed", (name_of(rank),)), first)
        hint = ""
        if hungry and (smaller := self._smaller()):
            hint = f"{smaller.found.placement} takes {max(smaller.found.bytes) / 1e9:.3g} GB a rank"
        raise end.told(f"rank {name_of(rank)} of {self.found.placement}", self._folder, hint)

    def _may_shrink(self) -> bool:
        """Whether the next placement is tried: once, before the first snapshot, and only if the job
        leaves it to the planner."""
        if self._question is None or self._smaller_tried or latest(self._folder) is not None:
            return False
        return self._question.placement == "auto" and self._smaller() is not None

    def _smaller(self) -> Placed | None:
        if self._question is None:
            return None
        return place_again(self._question, self._crew.lost, max(self.found.bytes))
