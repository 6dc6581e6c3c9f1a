"""A member's end of a connection to another member, and trying which of them can be reached."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from edgetrain.errors import NetworkError, Refused
from edgetrain.exchange.further_messages import Hello
from edgetrain.exchange.keys.pairs import Credentials, Pair, decode_base64url
from edgetrain.exchange.messages import Beat, Join, Peer, Refuse, Resume, pack, unpack
from edgetrain.exchange.peers.neighbours import Neighbours
from edgetrain.exchange.peers.wrapped import WrappedEnd
from edgetrain.exchange.transport import MemberTransport
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.vectors.vector import Buffer

TRY_S = 6.0
"""Seconds that a member has to answer when it is tried."""

TRIES = 16
"""Members that are tried at a time: each takes a connection and two threads of libzmq."""

AGAIN_S = 0.1
"""Seconds until a member is asked again that has not got the same map yet."""

PATIENCE_S = 30.0
"""Seconds that a member may take to get the map that names this one: it may be computing."""

CUT_S = 0.02
"""Longest wait for a message where there is no peer: its successor is told over another link."""

Clock = Callable[[], float]


class Dialled(WrappedEnd):
    """A member's end of a connection to another member.

    Says `hello` before each question (`Join`, `Resume`), which may be the first on a new
    connection; answers to that stay here. A peer that does not know this member may not have the
    map yet that names it: until it answers it is asked again, for `patience_s`.
    """

    def __init__(
        self,
        end: MemberTransport,
        hello: Hello,
        clock: Clock = time.monotonic,
        patience_s: float = PATIENCE_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`end`: as to a hub at the other member's address."""
        super().__init__(end)
        self._hello, self._clock = pack(hello), clock
        self._patience_s, self._sleep = patience_s, sleep
        self._until = self._again = math.inf
        self._question: Sequence[Buffer] | None = None
        """The question, repeated until an answer comes; () is a Hello alone."""
        self._is_cut = False
        """Whether nothing goes either way, until `redirect`."""
        self._is_shut = False
        """The peer did not let this member's key in."""
        self._was_heard = False
        self.greeted = 0
        """Answers to Hello so far."""

    def send(self, frames: Sequence[Buffer]) -> None:
        if self._is_cut:
            return
        if frames[0] in (Join.kind, Resume.kind):
            self._ask(frames)
        else:
            self._end.send(frames)

    def greet(self) -> None:
        self._ask(())

    def _ask(self, question: Sequence[Buffer]) -> None:
        self._question, self._again = question, math.inf
        self._until = self._clock() + self._patience_s
        self._say_again()

    def _say_again(self) -> None:
        self._again = math.inf
        if self._is_shut:
            self.reconnect()
        self._is_shut = False
        try:
            self._end.send(self._hello)
            if self._question:
                self._end.send(self._question)
        except Refused as refused:
            self._ask_later(refused)

    def _ask_later(self, refused: Refused) -> None:
        """This member's key is in none of the peer's maps: libzmq makes no other connection."""
        if self._question is None or self._clock() >= self._until:
            raise refused
        self._is_shut, self._again = True, self._clock() + AGAIN_S

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        if self._is_cut:
            self._sleep(min(timeout_s, CUT_S))
            return None
        if self._clock() >= self._again:
            self._say_again()
        try:
            frames = self._end.receive(min(timeout_s, max(0.0, self._again - self._clock())))
        except Refused as refused:
            self._ask_later(refused)
            return None
        if frames is None:
            return None
        self._was_heard = True
        if frames[0] == Hello.kind:
            self.greeted += 1
            self._question = None if self._question == () else self._question
            return None
        if self._question is not None and self._may_not_know(frames):
            self._again = min(self._again, self._clock() + AGAIN_S)
            return None
        if frames[0] != Beat.kind:  # that is no answer
            self._question, self._again = None, math.inf
        return frames

    def hang_up(self) -> None:
        """Take nothing more from this peer, and send it nothing, until `redirect`."""
        self.close()
        self._question, self._again, self._is_cut = None, math.inf, True

    def redirect(self, other: Dialled) -> None:
        """Go on over the connection to another peer, in place of this one."""
        if not self._is_cut:
            self.close()
        self._use(other._end)
        self._hello = other._hello
        self._question, self._again = None, math.inf
        self._is_cut = self._is_shut = self._was_heard = False

    def close(self) -> None:
        """See MemberTransport. A peer that has never answered is not waited for."""
        if not self._was_heard and isinstance(self._end, MemberSocket):
            self._end.close(linger_ms=0)
        self._end.close()

    def reconnect(self) -> None:
        if not self._is_cut:
            super().reconnect()

    def _may_not_know(self, frames: Sequence[Buffer]) -> bool:
        """Whether this is a peer's answer that it does not know this member (yet)."""
        if frames[0] != Refuse.kind or self._clock() >= self._until:
            return False
        refuse = unpack(frames)
        return isinstance(refuse, Refuse) and refuse.code == "unknown"


Dial = Callable[[Peer, Neighbours], Dialled]
"""Makes a connection to another member."""


def dialling(pair: Pair | None, clock: Clock = time.monotonic) -> Dial:
    """Connects to other members at their addresses, in the background; with a `pair` encrypted,
    under the keys that the map has of them."""

    def dial(peer: Peer, neighbours: Neighbours) -> Dialled:
        credentials = None if pair is None else Credentials(pair, decode_base64url(peer.key))
        end = MemberSocket(peer.address, credentials=credentials)
        return Dialled(end, neighbours.hello_to(peer.name), clock)

    return dial


def try_all(
    neighbours: Neighbours, dial: Dial, clock: Clock, most_s: float = TRY_S
) -> tuple[tuple[str, int], ...]:
    """Try to reach each of the others once, TRIES at a time and for `most_s` seconds each. Returns
    the name of each that answered, and the round trip in units of 100 microseconds.

    A member that answers is greeted once more: the first answer takes the handshake's trips, too.
    """
    reached: list[tuple[str, int]] = []
    for at in range(0, len(neighbours.others), TRIES):
        peers = neighbours.others[at : at + TRIES]
        attempts = [_Attempt(peer.name, dial(peer, neighbours), clock) for peer in peers]
        until = clock() + most_s
        try:
            while not all(attempt.is_over for attempt in attempts) and clock() < until:
                for attempt in attempts:
                    attempt.poll(0.02 / len(attempts))
        finally:
            for attempt in attempts:
                attempt.close()
        reached += [(a.name, math.ceil(1e4 * a.trip_s)) for a in attempts if a.trip_s is not None]
    return tuple(reached)


class _Attempt:
    """One member that is tried: greeted twice."""

    def __init__(self, name: str, end: Dialled, clock: Clock) -> None:
        self.name, self._end, self._clock = name, end, clock
        self.trip_s: float | None = None
        """Seconds of a round trip, once it has answered both times."""
        self.is_over = False
        self._greeted_again = 0.0
        end.greet()

    def poll(self, timeout_s: float) -> None:
        if self.is_over:
            return
        before = self._end.greeted
        try:
            self._end.receive(timeout_s)
        except (NetworkError, Refused):  # another machine is there, or it never learns of this one
            self.is_over = True
        if self._end.greeted == before:
            return
        if before:
            self.trip_s, self.is_over = self._clock() - self._greeted_again, True
        else:
            self._greeted_again = self._clock()
            self._end.greet()

    def close(self) -> None:
        self._end.close()
