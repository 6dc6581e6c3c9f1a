"""A member's part in a job whose members connect to each other: it knows the map, answers it,
listens, and hosts a reducer in a thread of its own.

A reducer is a `Hub` of a stretch of the vector, served over the member's listener. It keeps no
journal: every member has the base.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from edgetrain.errors import EdgetrainError
from edgetrain.exchange.further_messages import Reached, Takeover
from edgetrain.exchange.hub.effects import Note, Observed
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.serve import Observer, serve
from edgetrain.exchange.keys.pairs import Pair
from edgetrain.exchange.messages import Map, Peer, Refuse, pack, unpack
from edgetrain.exchange.peers.beside import THREADS, Beside
from edgetrain.exchange.peers.dialled import Clock, Dial, Dialled, dialling, try_all
from edgetrain.exchange.peers.listener import Listener
from edgetrain.exchange.peers.neighbours import Neighbours
from edgetrain.exchange.peers.wrapped import WrappedEnd
from edgetrain.exchange.transport import MemberTransport
from edgetrain.vectors.vector import Buffer

log = logging.getLogger("edgetrain")

IDLE_S = 0.05
"""Longest wait of the thread while there is no reducer to serve."""

NOTHING_HERE = "this member reduces nothing (yet)"


def log_note(effect: Observed) -> None:
    """Log what people want to know of a reducer, and is not said at the hub that all join."""
    if isinstance(effect, Note):
        log.debug("as a reducer: %s %s: %s", effect.member, effect.event, effect.reason)


class Peering:
    """One member's part. `neighbours` is the newest map, checked; None before the first.

    With a `listener` others can connect, and a thread answers them from now on; without, this is a
    client. Owns the listeners. `on_map` is called with each new map, `on_takeover` with what is
    said about reducers that are lost; it returns the answer.
    """

    def __init__(
        self,
        listener: Listener | None,
        pair: Pair | None,
        dial: Dial | None = None,
        clock: Clock = time.monotonic,
        beside: Beside = THREADS,
    ) -> None:
        """`pair`: of this member, where the job is encrypted; `dial`: None: over ZeroMQ. `beside`
        runs what this member hosts."""
        self.neighbours: Neighbours | None = None
        self.on_map: Callable[[Neighbours], None] = lambda neighbours: None
        self.on_takeover: Callable[[Takeover], Takeover | None] = lambda message: None
        self._dial = dial or dialling(pair, clock)
        self._encrypted, self._clock, self._listener = pair is not None, clock, listener
        self._beside = beside
        self._hosting = None if listener is None else _Hosting(listener, clock, beside)
        self._more: dict[str, tuple[Listener, _Hosting]] = {}
        """Reducers taken over, by their own addresses."""
        self._reached = -1, Reached(0, ())
        """The number of the last map that asked to try, and the answer."""

    @property
    def is_client(self) -> bool:
        return self._listener is None

    def accept(self, map: Map) -> Reached | None:
        """Where the others are from now on. Where the map asks to try, returns the answer, after
        some seconds. Maps that are older than the last one count for nothing. Raises BadMessage for
        one that cannot be."""
        number = -1 if self.neighbours is None else self.neighbours.map.number
        if map.number < number:
            return None
        if map.number > number:
            self.neighbours = neighbours = Neighbours.of(map, self._encrypted)
            for listener in (self._listener, *(each for each, _ in self._more.values())):
                if listener is not None:
                    listener.let_in(neighbours)
            if map.trying:
                self.host(None)
                reached = try_all(neighbours, self._dial, self._clock)
                self._reached = map.number, Reached(map.number, reached)
            self.on_map(neighbours)
        return self._reached[1] if self._reached[0] == map.number else None

    def dial(self, peer: Peer, neighbours: Neighbours) -> Dialled:
        """A connection to a member; to a reducer of this one's own within this process."""
        at = {address: listener for address, (listener, _) in self._more.items()}
        listener = at.get(peer.address, self._listener)
        if peer.name != neighbours.name or listener is None:
            return self._dial(peer, neighbours)
        hello, sleep = neighbours.hello_to(peer.name), self._beside.sleep
        return Dialled(listener.connect(), hello, self._clock, sleep=sleep)

    # -- hosting a reducer --------------------------------------------------------------------

    @property
    def hosted(self) -> Hub | None:
        """The reducer, which the thread has; None: none."""
        return None if self._hosting is None else self._hosting.hub

    def host(self, reducer: Hub | None, observe: Observer = log_note) -> None:
        """Serve this reducer from now on, and not the one before; None: none. Raises EdgetrainError
        if serving the one before has failed."""
        if self._hosting is not None:
            self._hosting.serve(reducer, observe)

    def host_more(
        self, address: str, listener: Listener, reducer: Hub, observe: Observer = log_note
    ) -> None:
        """Serve another reducer, over a listener of its own at this address."""
        if self.neighbours is not None:
            listener.let_in(self.neighbours)
        hosting = _Hosting(listener, self._clock, self._beside)
        hosting.serve(reducer, observe)
        self._more[address] = listener, hosting

    def host_no_more(self, first: int) -> None:
        """Serve no reducer of the stretch that begins with this range."""
        for hosting in (self._hosting, *(each for _, each in self._more.values())):
            if hosting is not None and hosting.hub and hosting.hub.terms.stretch.first == first:
                hosting.serve(None, log_note)

    def release(self) -> Listener | None:
        """Stop the thread; the listener is the caller's to poll, until `close`."""
        if self._hosting is not None:
            self._hosting.stop()
            self._hosting = None
        return self._listener

    def wait_for_end(self, patience_s: float) -> bool:
        """Wait until all members have left the reducer, for at most `patience_s`; returns whether
        they have. A client has none."""
        every = [hosting for _, hosting in self._more.values()]
        if self._hosting is not None:
            every.append(self._hosting)
        ended = [hosting.wait_for_end(patience_s) for hosting in every]
        return all(ended)

    def close(self) -> None:
        """Stop serving, and hang up. Works twice."""
        for more, hosting in self._more.values():
            hosting.stop()
            more.close()
        self._more = {}
        listener = self.release()
        if listener is not None:
            listener.close()


class _Hosting:
    """What answers other members, and serves the reducer `hub`, beside the member's training."""

    def __init__(self, listener: Listener, clock: Clock, beside: Beside) -> None:
        self.hub: Hub | None = None
        self._listener, self._clock = listener, clock
        self._observe: Observer = log_note
        self._stopped, self._ended = beside.flag(), beside.flag()
        self._ended.set()
        self._error: EdgetrainError | None = None
        self._join = beside.start(self._run)

    def serve(self, hub: Hub | None, observe: Observer) -> None:
        if self._error is not None:
            raise self._error
        (self._ended.set if hub is None else self._ended.clear)()
        self._observe = observe
        self.hub = hub

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                hub = self.hub
                if hub is None or hub.finished:
                    self._ended.set()
                    for sender, _ in self._listener.poll(IDLE_S):
                        self._listener.send(sender, pack(Refuse("unknown", NOTHING_HERE)))
                    continue
                serve(hub, self._listener, self._clock, self._observe, partial(self._is_over, hub))
        except EdgetrainError as error:
            self._error = error
            log.warning("this member reduces nothing any more: %s", error)
        finally:
            self._ended.set()

    def _is_over(self, hub: Hub) -> bool:
        return self._stopped.is_set() or self.hub is not hub

    def wait_for_end(self, patience_s: float) -> bool:
        return self._ended.wait(patience_s)

    def stop(self) -> None:
        self._stopped.set()
        self._join()


class MappedEnd(WrappedEnd):
    """A member's end of its connection to the hub that all join. Maps that come over it go to
    `peering`, and what that answers goes back."""

    def __init__(self, end: MemberTransport, peering: Peering) -> None:
        super().__init__(end)
        self._peering = peering

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        frames = self._end.receive(timeout_s)
        if frames is None or frames[0] not in (Map.kind, Takeover.kind):
            return frames
        answer: Reached | Takeover | None = None
        match unpack(frames):
            case Map() as map:
                answer = self._peering.accept(map)
            case Takeover() as takeover:
                answer = self._peering.on_takeover(takeover)
        if answer is not None:
            self._end.send(pack(answer))
        return None
