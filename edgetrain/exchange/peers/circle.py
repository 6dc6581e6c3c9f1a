"""Members that average among themselves: one member's connections to the others, and an attempt at
a collective over them.

It sends to others over connections that it has dialled, and hears them at its listener, so all that
a member needs is to reach those that it sends to. Which round is attempted, by whom, and whether
the outcome counts, is decided by the hub that all have joined.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from edgetrain.errors import BadMessage, NetworkError, Refused
from edgetrain.exchange.further_messages import Segment
from edgetrain.exchange.messages import Refuse, pack, unpack
from edgetrain.exchange.peers.dialled import Clock, Dial, Dialled
from edgetrain.exchange.peers.listener import Listener
from edgetrain.exchange.peers.neighbours import Neighbours
from edgetrain.exchange.peers.schedules import SumOrder
from edgetrain.exchange.peers.summing import Portions, Summing
from edgetrain.exchange.transport import Traffic
from edgetrain.vectors.vector import Vector

POLL_S = 0.1
"""Seconds between two looks at the connections to others, and at what else waits."""

VECTORS_WAITING = 2
"""Vectors of one member's that may wait to be used, at most: it may have begun another attempt."""


@dataclass(frozen=True)
class Turn:
    """One attempt at averaging a round's contributions, the same at all that take part."""

    round: int
    number: int
    """From 0, of the round."""
    topology: str
    places: tuple[str, ...]
    """The member at each place."""
    weights: tuple[float, ...]
    """Samples behind the contribution of each place."""

    def is_before(self, segment: Segment) -> bool:
        return (segment.round, segment.attempt) > (self.round, self.number)

    def has(self, segment: Segment) -> bool:
        return (segment.round, segment.attempt) == (self.round, self.number)


class PeerLost(NetworkError):
    """Nothing came from the members at `names`, and an attempt cannot go on.

    `silent`: they were only silent, once this many segments, less one, had come: so are all that
    wait for who waits for them. 0: a connection to them is lost.
    """

    def __init__(self, names: Iterable[str], reason: str, silent: int = 0) -> None:
        self.names, self.silent = tuple(names), silent
        super().__init__(f"{', '.join(self.names)}: {reason}")


class Circle:
    """One member's part. Owns the connections that it dials, not the listener. One thread uses it.

    A contribution is only read, and stays the caller's: after PeerLost the next attempt may begin
    from it.
    """

    def __init__(self, listener: Listener, dial: Dial, clock: Clock, patience_s: float) -> None:
        """`patience_s`: seconds without anything from the member that is waited for until it is
        lost."""
        self._listener, self._dial, self._clock = listener, dial, clock
        self._patience_s = patience_s
        self._neighbours: Neighbours | None = None
        self._ends: dict[str, Dialled] = {}
        self._waiting: defaultdict[str, deque[Segment]] = defaultdict(deque)
        self._most_bytes = 0
        self._received = 0
        """Segments of this attempt that have come."""
        self.carried = Traffic.of_all([])
        """Bytes to and from other members, as of the last attempt's end."""
        self._earlier = Traffic.of_all([])
        """Over connections that are closed."""

    def accept(self, neighbours: Neighbours) -> None:
        """Take over the others' current places."""
        before, self._neighbours = self._neighbours or neighbours, neighbours
        for name in [*self._ends]:
            same = before.by_name.get(name) == neighbours.by_name.get(name)
            if not same or before.map.ticket != neighbours.map.ticket:
                self._hang_up(name)
            elif before.map.number != neighbours.map.number:
                self._ends[name].greet()  # it may be another process by now, at the same address

    def average(
        self, turn: Turn, own: Vector, interrupt: Callable[[], None] = lambda: None
    ) -> list[Vector]:
        """Take part in an attempt with the contribution `own`, float32 [elements]. Returns the
        consecutive pieces of the mean, to be read only.

        `interrupt` is called while this waits, and what it raises ends the attempt. Raises
        PeerLost; BadMessage, BadPayload for what cannot come from a member that does its part.
        """
        if self._neighbours is None:
            raise BadMessage("there is no map yet")
        self._most_bytes = VECTORS_WAITING * own.nbytes + (1 << 20)
        place = turn.places.index(self._neighbours.map.name)
        try:
            order = SumOrder(turn.topology, len(turn.places), own.size)
            summing = Summing(order, place, own, Portions(turn.weights))
            self._received = 0
            self._greet({turn.places[a.place] for a in order.actions(place) if a.sends}, interrupt)
            heard = looked = self._clock()
            self._advance(turn, summing)
            while (wanted := summing.wanted) is not None:
                came = self._receive(POLL_S, lambda: self._advance(turn, summing))
                now = self._clock()
                heard = now if came else heard
                if came and now - looked < POLL_S:
                    continue
                looked = now
                interrupt()
                self._look_at_ends()
                if now - heard > self._patience_s:
                    name, why = turn.places[wanted.place], f"silent for {self._patience_s:g} s"
                    raise PeerLost([name], f"{why} in a {turn.topology}", self._received + 1)
            return summing.pieces()
        finally:
            self.carried = self.traffic()

    def traffic(self) -> Traffic:
        """Bytes to and from other members so far. Not while an attempt is going on in another
        thread: then `carried`."""
        ends = [end.traffic() for end in self._ends.values()]
        return Traffic.of_all([self._earlier, self._listener.traffic(), *ends])

    def close(self) -> None:
        """Hang up. Works twice."""
        for name in [*self._ends]:
            self._hang_up(name)

    def _hang_up(self, name: str) -> None:
        end = self._ends.pop(name)
        self._earlier = Traffic.of_all([self._earlier, end.traffic()])
        end.close()

    def _greet(self, names: set[str], interrupt: Callable[[], None]) -> None:
        """Connect to these, and wait until each has said who it is."""
        neighbours, until = self._neighbours, self._clock() + self._patience_s
        assert neighbours is not None
        for name in sorted(names - self._ends.keys()):
            peer = neighbours.by_name.get(name)
            if peer is None or not peer.address:
                raise PeerLost([name], "other members cannot connect to it")
            self._ends[name] = self._dial(peer, neighbours)
            self._ends[name].greet()
        while missing := sorted(name for name in names if not self._ends[name].greeted):
            self._look_at_ends()
            self._receive(0.001, lambda: None)
            interrupt()
            if self._clock() > until:
                raise PeerLost(missing, f"no answer for {self._patience_s:g} s", 1)

    def _look_at_ends(self) -> None:
        """Let connections to others handle what has come over them: answers, and refusals."""
        for name, end in [*self._ends.items()]:
            try:
                frames = end.receive(0.0)
            except (NetworkError, Refused) as error:
                self._hang_up(name)
                raise PeerLost([name], str(error)) from None
            if frames is not None and frames[0] == Refuse.kind:
                self._hang_up(name)
                raise PeerLost([name], "it has lost this member's connection")

    def _receive(self, timeout_s: float, then: Callable[[], None]) -> bool:
        """File what has come from others, and do `then` after each; whether anything has."""
        came = False
        for sender, frames in self._listener.poll(timeout_s):
            try:
                segment = unpack(frames)
            except BadMessage:
                continue
            waiting = self._waiting[self._listener.name_of(sender)]
            size = sum(memoryview(each.payload).nbytes for each in waiting)
            if isinstance(segment, Segment) and size <= self._most_bytes:
                waiting.append(segment)
                came = True
                then()
        return came

    def _advance(self, turn: Turn, summing: Summing) -> None:
        while True:
            for action, payload in summing.sendable():
                segment = Segment(turn.round, turn.number, action.segment, action.adds, payload)
                self._ends[turn.places[action.place]].send(pack(segment))
            wanted = summing.wanted
            if wanted is None:
                return
            found = self._next(turn, turn.places[wanted.place])
            if found is None:
                return
            if (found.number, found.adds) != (wanted.segment, wanted.adds):
                # What came before is lost with the connection that it was sent over.
                why = f"segment {found.number} came where {wanted.segment} comes next"
                raise PeerLost([turn.places[wanted.place]], why)
            summing.accept(found.payload)
            self._received += 1

    def _next(self, turn: Turn, name: str) -> Segment | None:
        """What a member sent next in this attempt; what it sent in earlier ones is dropped."""
        waiting = self._waiting[name]
        while waiting and not turn.is_before(waiting[0]):
            segment = waiting.popleft()
            if turn.has(segment):
                return segment
        return None
