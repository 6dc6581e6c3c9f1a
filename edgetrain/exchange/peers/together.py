"""A member's exchange where members average among themselves: an `Exchange` over its link to the
hub that counts rounds, and a `Circle`.

The hub gets votes: contributions without a vector. Once it says `Run` all members average what they
kept, and say that they have; its reply then says that the round counts. Runs happen while this
member waits, or looks for replies: strategies that wait for each round lose nothing by that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from edgetrain.errors import BadMessage, Refused
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.messages import Figure, Ran, Run, Telemetry, pack, unpack
from edgetrain.exchange.peers.circle import Circle, PeerLost, Turn
from edgetrain.exchange.peers.wrapped import WrappedEnd
from edgetrain.exchange.seam import CatchUp, Entry, Past, Request, RoundReply, Submission
from edgetrain.exchange.transport import MemberTransport, Traffic
from edgetrain.vectors import vector as vectors
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import Buffer, Vector, combine, tile_sum

if TYPE_CHECKING:
    from edgetrain.strategies.factored import Factors

NOTHING: Vector = np.zeros(0, np.float32)
"""What the hub gets of a contribution."""


class _Newer(Exception):
    """The hub has begun another turn."""

    def __init__(self, run: Run) -> None:
        self.run = run
        super().__init__()


class RunningEnd(WrappedEnd):
    """A member's end of its connection to the hub: takes `Run` out, runs, and answers.

    `own` gives what this member contributes to a run; `keep` takes the pieces of the mean.
    """

    def __init__(self, end: MemberTransport, circle: Callable[[], Circle]) -> None:
        """`circle` is called at each run: at the first one all others are known."""
        super().__init__(end)
        self._circle = circle
        self._put_by: deque[list[Buffer]] = deque()
        self.interrupt: Callable[[], None] = lambda: None
        self.own: Callable[[Run], Vector] = lambda run: NOTHING
        self.keep: Callable[[Run, list[Vector]], None] = lambda run, pieces: None

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        """See MemberTransport."""
        frames = self._put_by.popleft() if self._put_by else self._end.receive(timeout_s)
        if frames is None or frames[0] != Run.kind:
            return frames
        run: Run | None = _run_of(frames)
        while run is not None:
            run = self._take_part(run)
        return None

    def _take_part(self, run: Run) -> Run | None:
        """Run; returns the run that the hub has asked for meanwhile, in place of this one."""
        places, weights = zip(*run.places, strict=True)
        turn = Turn(run.round, run.attempt, run.topology, places, weights)
        try:
            pieces = self._circle().average(turn, self.own(run), self._look)
        except _Newer as newer:
            return newer.run
        except PeerLost as lost:
            self.send(pack(Ran(run.round, run.attempt, 0, lost.names[0])))
            return None
        self.keep(run, pieces)
        self.send(pack(Ran(run.round, run.attempt, sum_of(pieces), "")))
        return None

    def _look(self) -> None:
        """While others are waited for: what the hub says."""
        self.interrupt()
        if (frames := self._end.receive(0.0)) is None:
            return
        if frames[0] == Run.kind:
            raise _Newer(_run_of(frames))
        self._put_by.append(frames)


def _run_of(frames: Sequence[Buffer]) -> Run:
    run = unpack(frames)
    if not isinstance(run, Run) or not run.places:
        raise BadMessage("a run without a member")
    return run


def sum_of(pieces: Sequence[Vector]) -> int:
    """A checksum of consecutive pieces, which are cut alike on all members."""
    return combine(map(tile_sum, pieces))


class CollectiveExchange:
    """An `Exchange`; see there for who owns what. `end` is what `link` speaks over."""

    def __init__(self, link: Link, end: RunningEnd) -> None:
        self._link, self._end = link, end
        self._kept: dict[int, Vector] = {}
        """Contributions to rounds that do not count yet."""
        self._means: dict[int, list[Vector]] = {}
        self._params = NOTHING
        self.interrupt: Callable[[], None] = lambda: None
        link.interrupt = end.interrupt = self._pulse
        end.own, end.keep = self._own, self._keep

    def _pulse(self) -> None:
        self.interrupt()

    def _own(self, run: Run) -> Vector:
        if run.is_base:
            return self._params
        found = self._kept.get(run.round)
        return np.zeros_like(self._params) if found is None else found

    def _keep(self, run: Run, pieces: list[Vector]) -> None:
        if run.is_base:
            self._params[:] = np.concatenate(pieces)
        else:
            self._means[run.round] = pieces

    # -- see Exchange ------------------------------------------------------------------------------

    def join(
        self, request: Request, params: Vector, checksum: int, past: Past | None = None
    ) -> Entry:
        """See Exchange."""
        if past is not None:
            raise Refused("session", "members that average among themselves cannot go on", "")
        self._params = params
        self.memory = VectorPool(params.size)
        entry = self._link.join(request, params, checksum)
        return replace(entry, checksum=vectors.checksum(params))

    @property
    def session(self) -> int:
        """See Exchange."""
        return self._link.session

    def factors(self) -> Factors | None:
        """See Exchange."""
        return None

    def unsent(self) -> dict[str, Vector]:
        """See Exchange: everything is sent."""
        return {}

    def restore_unsent(self, unsent: Mapping[str, Vector]) -> None:
        """See Exchange."""

    def submit(self, submission: Submission) -> Vector | None:
        """See Exchange."""
        self._kept[submission.round] = submission.vector
        nothing = vectors.checksum(NOTHING)
        self._link.submit(replace(submission, vector=NOTHING, checksum=nothing))
        return None

    @property
    def sent_nearly_all(self) -> bool:
        """See Exchange."""
        return False

    def wait(self, round: int) -> RoundReply | CatchUp:
        """See Exchange."""
        reply = self._link.wait(round)
        if isinstance(reply, CatchUp):
            raise Refused(
                "started", "rounds went on without this member, and their means are gone", ""
            )
        self._kept.pop(round, None)
        pieces = self._means.pop(round, [])
        return replace(reply, pieces=pieces, checksum=0)

    @property
    def ready(self) -> int:
        """See Exchange."""
        return self._link.ready

    def end(self, round: int) -> None:
        """See Exchange: members are in step here."""

    def settle(self) -> bool:
        """See Exchange."""
        return self._link.settle()

    def poll(self) -> None:
        """See Exchange."""
        self._link.poll()

    def report(self, telemetry: Telemetry | Figure) -> None:
        """See Exchange."""
        self._link.report(telemetry)

    def traffic(self) -> Traffic:
        """See Exchange: with the hub."""
        return self._link.traffic()

    def leave(self, reason: str) -> None:
        """See Exchange."""
        self._link.leave(reason)

    def vanish(self) -> None:
        """See Exchange."""
        self._link.vanish()
