"""Members in threads of one process that exchange directly: no hub, no codec, no network.

A `Direct` is where they meet; `connect` makes each member's `Exchange`. It is the simplest exchange
that is not a link, and passes the same tests (tests/exchange/test_exchanges.py).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgetrain import strategies
from edgetrain.errors import ConfigError, Diverged, Refused
from edgetrain.exchange.delay import Delay
from edgetrain.exchange.messages import NO_WEIGHT, Figure, Telemetry
from edgetrain.exchange.seam import CatchUp, Entry, Past, Request, RoundReply, Submission
from edgetrain.exchange.transport import Traffic
from edgetrain.strategies.arrivals import ArrivalTerms
from edgetrain.strategies.merging.rule import SliceRule
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import Buffer, Vector, checksum

_LOOK_S = 0.5
"""Seconds between two calls of `interrupt` while a member waits."""


@dataclass(frozen=True)
class _Given:
    """A contribution, as merge rules read it."""

    vector: Vector
    weight: float
    age: int = 0
    """Replies that its member lacked."""

    def read(self, out: Vector) -> None:
        out[:] = self.vector

    def add(self, weight: float, out: Vector) -> None:
        out += np.float32(weight) * self.vector


@dataclass
class _Seat:
    """A member that takes part."""

    name: str
    index: int
    next_round: int
    taken: int
    """Replies it has been given."""
    error: Diverged | None = None
    ends: int | None = None
    """Out of step: it gives nothing from this number on."""

    @property
    def is_done(self) -> bool:
        return self.ends is not None and self.next_round >= self.ends


class Direct:
    """Where the members of a job meet, in one process. Thread-safe.

    A round closes when every member has contributed to it; one that leaves is not waited for any
    more. All share one reply: the vector that the strategy's merge rule makes of the contributions.
    """

    def __init__(
        self,
        members: int,
        strategy: str = "local-sgd",
        local_steps: int = 1,
        delay: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Training starts with this many `members`. `local_steps` and `delay` are local steps.

        ConfigError for a strategy that is not known, or whose merge rule is no SliceRule.
        """
        self.members = members
        self.row = strategies.find(strategy)
        self.local_steps = local_steps if self.row.has_local_steps else 1
        self.delay = delay if self.row.delays else 0
        rule = self.row.merge_rule()
        self._arrivals: Any = None
        if not self.row.is_synchronous:
            self._arrivals = self.row.closing_rule(ArrivalTerms(members, self.local_steps, 60.0))
        if not isinstance(rule, SliceRule):
            raise ConfigError(f"{strategy} cannot be merged directly", "train over a hub")
        self._rule, self._outer, self._clock = rule, self.row.outer_rule(), clock
        self._changed = threading.Condition()
        self._model = ""
        self._base: Vector | None = None
        self._fixed: Buffer = b""
        """The values of the first member's fixed tensors."""
        self._started = False
        self._round = 0
        self._checksums: dict[int, int] = {}
        self._seats: dict[str, _Seat] = {}
        self._open: dict[int, dict[Any, _Given]] = {}
        """Contributions to rounds that are not closed, by members' names; out of step by
        (name, its own number)."""
        self._replies: dict[int, RoundReply] = {}
        self._complete = 0
        self._merged: dict[int, dict[str, int]] = defaultdict(dict)
        """Out of step: see RoundReply, by round and member's name."""

    def connect(self) -> DirectExchange:
        """A new member's exchange."""
        return DirectExchange(self)

    # what members' exchanges do

    def enter(
        self, request: Request, params: Vector, first: int, interrupt: Callable[[], None]
    ) -> Entry:
        """Take part, from parameters with the checksum `first`: see Exchange.join."""
        with self._changed:
            seat = self._seat_for(request, params)
            if self._base is None:
                self._base, self._checksums = params.copy(), {0: first}
                if self._outer is not None:
                    self._outer.start(params.size)
                self._fixed = request.fixed_tensors.read() if request.fixed_tensors else b""
            self._started = self._started or len(self._seats) == self.members
            self._changed.notify_all()
            try:
                self._wait_until(lambda: self._started, interrupt)
            except BaseException:
                self._remove(seat.name)
                raise
            params[:] = self._base
            if request.fixed_tensors is not None:
                request.fixed_tensors.write(self._fixed)
            return Entry(
                name=seat.name,
                index=seat.index,
                members=self.members,
                strategy=self.row.spelled,
                local_steps=self.local_steps,
                delay=Delay(self.delay),
                codec="fp32",
                is_masked=False,
                round=seat.next_round,
                applied=seat.taken,
                checksum=checksum(self._base),
                resend=0,
                is_exact=True,
            )

    def give(self, name: str, round: int, given: _Given, applied: int, base: int) -> None:
        """A contribution of a member whose base has the checksum `base`: see Exchange.submit."""
        with self._changed:
            seat = self._seats[name]
            known = self._checksums.get(applied, base)
            if base != known:
                seat.error = Diverged(
                    f"after {applied} replies the base has checksum {known:016x}, "
                    f"the member's {base:016x}"
                )
            if self._arrivals is None:
                self._open.setdefault(round, {})[name] = given
            else:
                number = round
                self._open.setdefault(self._round, {})[name, number] = replace(
                    given, age=self._round - applied
                )
            seat.next_round = round + 1
            self._close_rounds()

    def take(self, name: str, round: int, interrupt: Callable[[], None]) -> RoundReply:
        """The reply to a round, when it is there: see Exchange.wait."""
        with self._changed:
            seat = self._seats[name]
            self._wait_until(lambda: seat.error is not None or round in self._replies, interrupt)
            if seat.error is not None:
                raise seat.error
            seat.taken = round + 1
            reply = self._replies[round]
            self._drop_taken()
            return replace(reply, merged=self._merged[round].get(name, 0))

    def ready(self, name: str) -> int:
        """Replies before this one are there: see Exchange.ready."""
        with self._changed:
            return self._round

    def end(self, name: str, number: int) -> None:
        """A member gives nothing from this number on: see Exchange.end."""
        with self._changed:
            self._seats[name].ends = number
            self._close_rounds()

    def leave(self, name: str) -> None:
        """A member takes part no longer; what it gave counts. Works twice."""
        with self._changed:
            self._remove(name)

    # under the lock

    def _wait_until(self, true: Callable[[], bool], interrupt: Callable[[], None]) -> None:
        while not true():
            interrupt()
            self._changed.wait(_LOOK_S)

    def _seat_for(self, request: Request, params: Vector) -> _Seat:
        name = request.name or f"m{self._free_index()}"
        model = f"{request.model}, {params.size} elements"
        if self._seats and model != self._model:
            raise Refused("model", f"the job's model is {self._model}, the member's {model}")
        if name in self._seats:
            raise Refused("name", f"a member named '{name}' is there already")
        if len(self._seats) >= self.members:
            raise Refused("full", f"all {self.members} places are taken")
        if self._started and not self.row.allows_late_join:
            raise Refused("started", f"{self.row.spelled} is at round {self._round}")
        self._model = model
        ahead = max((seat.next_round for seat in self._seats.values()), default=0)
        seat = _Seat(name, self._free_index(), max(self._round, ahead), self._round)
        self._seats[name] = seat
        return seat

    def _free_index(self) -> int:
        taken = {seat.index for seat in self._seats.values()}
        return next(index for index in range(self.members + 1) if index not in taken)

    def _remove(self, name: str) -> None:
        if self._seats.pop(name, None) is not None:
            if not self._started and not self._seats:
                self._base = None
            self._close_rounds()
            self._drop_taken()

    def _close_rounds(self) -> None:
        """Close, in order, the rounds that nobody is waited for in."""
        if self._arrivals is not None:
            self._close_arrivals()
            return
        while self._round in self._open and all(
            seat.next_round > self._round for seat in self._seats.values()
        ):
            given = self._open.pop(self._round)
            self._close(self._round, [given[name] for name in sorted(given)])
            self._round += 1
        self._changed.notify_all()

    def _close_arrivals(self) -> None:
        while True:
            given = self._open.get(self._round, {})
            active = {name: s.next_round for name, s in self._seats.items() if not s.is_done}
            lowest = min(active.values(), default=0)
            present = len(active.keys() | {name for name, _ in given})
            view = SimpleNamespace(
                opened=self._clock(),
                contributions=len(given),
                lacks_nobody=active.keys() <= {name for name, _ in given},
                advances=lowest > self._complete,
            )
            if not self._arrivals.due(view, self._clock()):
                break
            self._open.pop(self._round, None)
            self._complete = max(self._complete, lowest)
            self._merged[self._round] = {name: number + 1 for name, number in sorted(given)}
            weigh = self._arrivals.weight
            weighed = [
                replace(each, weight=weigh(each.age, len(given), present))
                for _, each in sorted(given.items(), key=lambda item: item[0])
            ]
            self._close(self._round, weighed)
            self._round += 1
        self._changed.notify_all()

    def _close(self, round: int, given: list[_Given]) -> None:
        assert self._base is not None
        everyone, given = given, [each for each in given if each.weight > NO_WEIGHT]
        merged: Vector = np.zeros_like(self._base)
        if given:
            self._rule.merge(given, merged)
            if self._outer is not None:
                self._outer.step(merged, 0)
        known = 0
        if self.row.hub_keeps_base:
            self._base += merged
            known = self._checksums[round + 1] = checksum(self._base)
        self._replies[round] = RoundReply(
            round, len(everyone) if given else 0, self.delay, known, self._clock(), [merged],
            complete=self._complete,
        )  # fmt: skip

    def _drop_taken(self) -> None:
        oldest = min((seat.taken for seat in self._seats.values()), default=self._round)
        self._replies = {r: reply for r, reply in self._replies.items() if r >= oldest}
        self._checksums = {r: known for r, known in self._checksums.items() if r >= oldest}


class DirectExchange:
    """One member's end of a `Direct`: an Exchange. Nothing is left out of a contribution, and a
    member that vanished is not waited for."""

    session = 0
    memory: VectorPool

    def __init__(self, where: Direct) -> None:
        self._where = where
        self._name = ""
        self.interrupt: Callable[[], None] = lambda: None

    def join(
        self, request: Request, params: Vector, checksum: int, past: Past | None = None
    ) -> Entry:
        """See Exchange. No session outlives its process."""
        if past is not None:
            raise Refused("session", f"the session of '{past.name}' is not known here")
        entry = self._where.enter(request, params, checksum, self.interrupt)
        self._name, self.memory = entry.name, VectorPool(params.size)
        return entry

    def factors(self) -> None:
        """See Exchange."""

    def unsent(self) -> dict[str, Vector]:
        return {}

    def restore_unsent(self, unsent: Mapping[str, Vector]) -> None:
        if unsent:
            names = ", ".join(unsent)
            raise ConfigError(f"nothing is left unsent here, the checkpoint has {names}")

    def submit(self, submission: Submission) -> None:
        given = _Given(submission.vector, submission.weight)
        self._where.give(
            self._name, submission.round, given, submission.applied, submission.checksum
        )

    @property
    def sent_nearly_all(self) -> bool:
        return True

    def wait(self, round: int) -> RoundReply | CatchUp:
        return self._where.take(self._name, round, self.interrupt)

    @property
    def ready(self) -> int:
        return self._where.ready(self._name)

    def end(self, round: int) -> None:
        self._where.end(self._name, round)

    def settle(self) -> bool:
        """See Exchange: there is no journal."""
        return True

    def poll(self) -> None:
        """See Exchange: replies are noted when they are made."""

    def report(self, telemetry: Telemetry | Figure) -> None:
        """See Exchange: nobody looks at this fleet."""

    def traffic(self) -> Traffic:
        """See Exchange: there is no socket."""
        return Traffic(0, 0, 0, 0.0)

    def leave(self, reason: str) -> None:
        self._where.leave(self._name)

    def vanish(self) -> None:
        self._where.leave(self._name)
