"""A member's exchange where members average among themselves: its link to the hub that counts
rounds, and a `Circle`.

The hub gets votes: contributions without a vector. Once it says `RunRound` all members average what
they kept, and say that they have; its reply then says that the round counts. The base is handed on
in the same way: to all before training begins, later from one member to one that comes. A run has a
thread of its own, so that it goes on while the member makes steps: it begins, and is answered, when
the member looks for replies, at the end of a step at the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from edgetrain.errors import BadMessage, Diverged, Refused
from edgetrain.exchange.further_messages import Ran, RunRound
from edgetrain.exchange.member.link import OUTAGE_S, PATIENCE_S, Link
from edgetrain.exchange.messages import NO_WEIGHT, pack, unpack
from edgetrain.exchange.peers.beside import THREADS, Beside
from edgetrain.exchange.peers.circle import Circle, PeerLost, Turn
from edgetrain.exchange.peers.dialled import Clock
from edgetrain.exchange.peers.peering import MappedEnd, Peering
from edgetrain.exchange.peers.wrapped import WrappedEnd
from edgetrain.exchange.seam import CatchUp, Entry, Past, Request, RoundReply, Submission
from edgetrain.exchange.transport import MemberTransport, Traffic
from edgetrain.strategies.outer_rules import MOST_MAGNITUDE, OuterRule
from edgetrain.vectors import layout as layouts
from edgetrain.vectors import vector as vectors
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import Buffer, Vector, combine, tile_sum

LOOK_S = 0.02
"""Seconds between two looks at what the hub says, while a run is waited for."""

NOTHING: Vector = np.zeros(0, np.float32)
"""A contribution as the hub gets it: empty."""

LOST_S = 30.0
"""Seconds of silence after which another member is lost. One that has died is given up by the hub
before that."""


class _Stopped(Exception):
    """The hub has begun another turn, or this member lets go."""


class _Attempt:
    """One turn, beside the member's steps. Only it uses the circle while it runs."""

    def __init__(self, run: RunRound, circle: Circle, own: Vector, beside: Beside) -> None:
        self.asked, self._circle, self._own = run, circle, own
        self.pieces: list[Vector] | None = None
        """Pieces of the mean, once this is done."""
        self.error: Exception | None = None
        self.done, self._stopped = beside.flag(), beside.flag()
        self._join = beside.start(self._run)

    def _run(self) -> None:
        run = self.asked
        try:
            places, weights = zip(*run.places, strict=True)
            turn = Turn(run.round, run.attempt, run.topology, places, weights)
            self.pieces = self._circle.average(turn, self._own, self._check)
        except Exception as error:
            self.error = error
        finally:
            self.done.set()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise _Stopped

    def stop(self) -> None:
        self._stopped.set()
        self._join()


class RunningEnd(WrappedEnd):
    """A member's end of its connection to the hub: takes `RunRound`s out, runs, and answers.

    `own` gives what this member contributes to a run; `keep` takes the pieces of the mean.
    """

    def __init__(self, end: MemberTransport, circle: Callable[[], Circle], beside: Beside) -> None:
        """`circle` is called at each run: at the first one all others are known. Runs are
        `beside` the member's steps."""
        super().__init__(end)
        self._circle, self._beside = circle, beside
        self._attempt: _Attempt | None = None
        self.own: Callable[[RunRound], Vector] = lambda run: NOTHING
        self.keep: Callable[[RunRound, list[Vector]], None] = lambda run, pieces: None

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        """See MemberTransport. Raises what ended a run, unless another member is the reason."""
        attempt = self._attempt
        if attempt is not None:
            if attempt.done.wait(min(timeout_s, LOOK_S)):
                self._finish(attempt)
            timeout_s = 0.0
        frames = self._end.receive(timeout_s)
        if frames is None or frames[0] != RunRound.kind:
            return frames
        run = unpack(frames)
        if not isinstance(run, RunRound) or not run.places:
            raise BadMessage("a run without a member")
        self.stop()
        self._attempt = _Attempt(run, self._circle(), self.own(run), self._beside)
        return None

    def _finish(self, attempt: _Attempt) -> None:
        run, self._attempt = attempt.asked, None
        if isinstance(attempt.error, PeerLost):
            lost = attempt.error
            self.send(pack(Ran(run.round, run.attempt, 0, lost.names[0], lost.silent)))
        elif attempt.error is not None:
            raise attempt.error
        elif attempt.pieces is not None:
            self.keep(run, attempt.pieces)
            self.send(pack(Ran(run.round, run.attempt, combine(map(tile_sum, attempt.pieces)), "")))

    @property
    def is_running(self) -> bool:
        return self._attempt is not None and not self._attempt.done.is_set()

    def stop(self) -> None:
        """End a run that is going on. Works twice."""
        if self._attempt is not None:
            self._attempt.stop()
            self._attempt = None


def _stepped(outer: OuterRule, pieces: Sequence[Vector], trained: int) -> Vector:
    """What an outer rule makes of a mean whose first elements are `trained`. Diverged for one that
    it cannot take."""
    step = np.concatenate(pieces)
    largest = float(np.abs(step).max(initial=0.0))
    if not largest <= MOST_MAGNITUDE:
        raise Diverged(f"an element of {largest:g} in the mean is more than outer rules can take")
    outer.step(step[:trained], 0)
    return step


class CollectiveExchange(Link):
    """The `Exchange` of a member whose fleet averages among itself; a Link to the hub if that adds
    up, because members cannot connect to each other as they would have to."""

    def __init__(
        self,
        end: MemberTransport,
        peering: Peering,
        clock: Clock,
        patience_s: float = PATIENCE_S,
        hub_timeout_s: float = OUTAGE_S,
        lost_s: float = LOST_S,
        outer: OuterRule | None = None,
        beside: Beside = THREADS,
    ) -> None:
        """Owns `end`, the connection to the hub, and `peering`, which has not begun. `lost_s`:
        seconds of silence after which another member is lost. `outer`: fresh; all members make the
        same step with it, of the same mean. `beside` runs what goes on beside its steps."""
        self._running = RunningEnd(MappedEnd(end, peering), self._ready_circle, beside)
        super().__init__(self._running, clock, patience_s, hub_timeout_s)
        self._running.own, self._running.keep = self._own, self._keep
        self._peering, self._lost_s, self._outer = peering, lost_s, outer
        self._circle: Circle | None = None
        self._kept: dict[int, Vector] = {}
        """Contributions to rounds that do not count yet."""
        self._means: dict[int, list[Vector]] = {}
        self._elements, self._trained, self._has_begun = 0, 0, False
        self._params = NOTHING
        """Until training begins here."""
        self.base_of: Callable[[], tuple[int, Vector | None]] = lambda: (0, None)
        """How many replies the member's base has, and the base: to be set before the first step."""

    @property
    def is_star(self) -> bool:
        """Since the hub has let this member in: whether the hub adds up."""
        return self.stretch.first < self.stretch.end

    # -- runs --------------------------------------------------------------------------------------

    def _ready_circle(self) -> Circle:
        neighbours, listener = self._peering.neighbours, self._peering.release()
        if neighbours is None or listener is None:
            raise BadMessage("a run where this member cannot be reached, or without a map")
        if self._circle is None:
            self._circle = Circle(listener, self._peering.dial, self._clock, self._lost_s)
        self._circle.accept(neighbours)
        return self._circle

    def _own(self, run: RunRound) -> Vector:
        if run.is_base and dict(run.places)[self.name] <= NO_WEIGHT:
            return np.full(self._elements, -0.0, np.float32)  # x + -0.0 is x, of each x
        if run.is_base:
            return self._base_after(run.round) if self._has_begun else self._params
        found = self._kept.get(run.round)
        return np.zeros(self._elements, np.float32) if found is None else found

    def _base_after(self, round: int) -> Vector:
        """The base after the replies to all rounds before this one, which count."""
        applied, base = self.base_of()
        if base is None:
            raise Refused("session", "the base is wanted of a member that has none", "")
        base = base.copy()
        for missing in range(applied, round):
            base += np.concatenate(self._means[missing])
        return base

    def _keep(self, run: RunRound, pieces: list[Vector]) -> None:
        if not run.is_base:
            self._means[run.round] = pieces
        elif not self._has_begun:
            self._params[:] = np.concatenate(pieces)

    # -- see Exchange ------------------------------------------------------------------------------

    def join(
        self, request: Request, params: Vector, checksum: int, past: Past | None = None
    ) -> Entry:
        if past is not None:
            raise Refused("session", "members that average among themselves cannot go on", "")
        self._params, self._elements = params, params.size
        entry = super().join(request, params, checksum)
        self._params, self._has_begun = NOTHING, True
        if self.is_star:
            self._peering.close()
            return entry
        self.memory = VectorPool(params.size)
        if self._outer is not None:
            self._outer.start(params.size)
            layout = layouts.read(request.layout, params.size) if request.layout else ()
            self._trained = layouts.trained_elements(layout, params.size)
        return replace(entry, checksum=vectors.checksum(params))

    def submit(self, submission: Submission) -> Vector | None:
        """See Exchange. The hub gets a vote."""
        if self.is_star:
            return super().submit(submission)
        self._kept[submission.round] = submission.vector
        super().submit(replace(submission, vector=NOTHING, checksum=vectors.checksum(NOTHING)))
        return None

    @property
    def sent_nearly_all(self) -> bool:
        return self.is_star and super().sent_nearly_all

    def wait(self, round: int) -> RoundReply | CatchUp:
        reply = super().wait(round)
        if self.is_star:
            return reply
        pieces = self._means.pop(round, None)
        self._kept.pop(round, None)
        if isinstance(reply, CatchUp) or pieces is None:
            raise Refused("started", "rounds went on without this member, whose mean it lacks", "")
        if reply.members and self._outer is not None:
            pieces = [_stepped(self._outer, pieces, self._trained)]
        return replace(reply, pieces=pieces, checksum=0)

    def traffic(self) -> Traffic:
        """See Exchange: with the hub, and with other members."""
        circle = self._circle
        if circle is None:
            return super().traffic()
        # What an attempt sent last leaves the socket after its end.
        among = circle.carried if self._running.is_running else circle.traffic()
        return Traffic.of_all([super().traffic(), among])

    def vanish(self) -> None:
        self._running.stop()
        super().vanish()
        if self._circle is not None:
            self._circle.close()
        self._peering.close()
