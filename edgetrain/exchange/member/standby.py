"""A member's way to the replica of its hub: when it goes there, and what it agrees to.

`Ballot` is pure: two votes, which together keep hub and replica from closing the same round
(docs/decisions/041). `StandbyEnd` is a member's end of a connection around others: it takes out
what is said about the replica, so that link and session are as they were; and where the hub is
silent it goes to the replica, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edgetrain.errors import BadMessage, NetworkError
from edgetrain.exchange.messages import Agree, Join, Offer, Standby, pack, unpack
from edgetrain.exchange.transport import MemberTransport, Reconnecting, Traffic
from edgetrain.vectors.vector import Buffer

QUIET_BEATS = 2
"""Beats of silence, and a round trip, after which a member goes from the hub to its replica, or
from there to the hub."""


class Ballot:
    """What one member's process knows of the replica, and what it agreed to. No process votes
    before its hub has told it a position."""

    def __init__(self) -> None:
        self.link = 0
        """The newest position that the hub said the replica holds; 0: it said none."""
        self._taken_over = -1
        """The newest position at which this session may have agreed to a takeover, in this process
        or in one before it; -1: not known, up to the newest when the hub first tells one."""
        self._out = 0
        """The position since which the replica is out, as this member agreed or was told; 0: it is
        not."""

    @property
    def is_out(self) -> bool:
        return self._out > 0

    def begin_session(self) -> None:
        """This process is the session's first: none before it agreed to anything."""
        self._taken_over = max(self._taken_over, 0)

    def accept_standby(self, message: Standby) -> Agree | None:
        """The hub says how far its replica is; the answer, if it asks."""
        if self._taken_over < 0:
            self._taken_over = message.sent
        if not message.link:  # of a hub that was restored, and does not know
            return None
        self.link = max(self.link, message.link)
        if message.out:
            self._out = max(self._out, message.link)
        elif message.link > self._out:
            self._out = 0
        if not message.asks or message.link <= self._taken_over:
            return None
        self._out = max(self._out, message.link)
        return Agree(message.link, takes_over=False)

    def accept_offer(self, message: Offer) -> Agree | None:
        """The replica asks to take over; the answer, if this member agrees."""
        if not self.link or self._out or message.position < self.link:
            return None
        self._taken_over = max(self._taken_over, message.position)
        return Agree(message.position, takes_over=True)


Dial = Callable[[str, str], MemberTransport]
"""(address, its public key as spelled, or "") -> a new end of a connection to a replica."""


class StandbyEnd:
    """A MemberTransport, and Reconnecting, around the one to a hub that may have a replica.

    While it is at the replica it listens to the hub, too: once anything comes from there it goes
    back. Once the replica has taken over, it is the hub.
    """

    def __init__(self, hub: MemberTransport, dial: Dial, clock: Callable[[], float]) -> None:
        self.ballot = Ballot()
        """Only to be looked at."""
        self._hub, self._dial, self._clock = hub, dial, clock
        self._replica: MemberTransport | None = None
        self._end = hub
        self._told: Standby | None = None
        self._heard = clock()
        self._bytes = 0
        self._before = Traffic(0, 0, 0, 0.0)
        self._moves = 0
        self._has_moved = False
        """It went to another end, and nothing was sent there yet."""

    # -- going there and back -----------------------------------------------------------------

    def reconnect(self) -> None:
        """See Reconnecting. With a replica, it goes to the other one."""
        self._heard, self._has_moved = self._clock(), self._told is not None
        self._moves += 1
        if self._told is None:
            _renew(self._hub)
        elif self._end is self._hub:
            self._go_to_replica(self._told)
        else:
            _renew(self._hub)
            self._end = self._hub

    def _go_to_replica(self, told: Standby) -> None:
        _renew(self._hub)  # what it says from now on is a sign of life
        if self._replica is None:
            try:
                self._replica = self._dial(told.address, told.key)
            except NetworkError:  # its name cannot be resolved now
                return
        else:
            _renew(self._replica)
        self._end = self._replica

    def _stay(self) -> None:
        assert self._replica is not None
        self._before = self._hub.traffic().after(self._before)
        self._hub.close()
        self._hub, self._replica, self._told = self._replica, None, None

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        """See MemberTransport. None, before the time is over, where it went to another end."""
        until = self._clock() + timeout_s
        while not self._is_hub_back():
            left_s = max(0.0, until - self._clock())
            frames = self._end.receive(min(left_s, self._patience_s()))
            if frames is None:
                if self._told is not None and self._is_quiet():
                    self.reconnect()
                    return None
                if self._clock() >= until or self._told is None:
                    return None
                continue
            self._heard = self._clock()
            if (frames := self._read(frames)) is not None:
                return frames
        self.reconnect()
        return None

    def _is_hub_back(self) -> bool:
        """Whether it is at the replica, and the hub says something again."""
        return self._end is not self._hub and self._hub.receive(0.0) is not None

    def _patience_s(self) -> float:
        """How long to wait at most before looking at everything again."""
        return float("inf") if self._told is None else self._told.heartbeat_s / 4

    def _is_quiet(self) -> bool:
        assert self._told is not None
        if (received := self._end.received_bytes()) != self._bytes:
            self._bytes, self._heard = received, self._clock()
        patience_s = QUIET_BEATS * self._told.heartbeat_s + self._end.traffic().round_trip_s
        return self._clock() - self._heard >= patience_s

    def _read(self, frames: list[Buffer]) -> list[Buffer] | None:
        """Take out what is for the ballot, and answer it."""
        kind = bytes(frames[0]) if frames and memoryview(frames[0]).nbytes == 1 else b""
        if kind not in (Standby.kind, Offer.kind):
            if self._end is not self._hub:
                self._stay()
            return frames
        message = unpack(frames)
        if isinstance(message, Standby) and self._end is self._hub:
            self._told = message
            answer = self.ballot.accept_standby(message)
        elif isinstance(message, Offer) and self._end is not self._hub:
            answer = self.ballot.accept_offer(message)
        else:
            raise BadMessage(f"{type(message).__name__} came from the wrong end")
        if answer is not None:
            self._end.send(pack(answer))
        return None

    # -- as the end in use does ---------------------------------------------------------------

    def send(self, frames: Sequence[Buffer]) -> None:
        if frames[0] == Join.kind and self._told is None:
            self.ballot.begin_session()
        self._has_moved = False
        self._end.send(frames)

    @property
    def connections(self) -> int:
        """See Reconnecting. Another number below 0 each time that it goes to another end, until
        something was sent there: the link then knows that what it said before may be lost, also if
        this end came and went without one of its messages."""
        if self._has_moved:
            return -self._moves
        return self._end.connections if isinstance(self._end, Reconnecting) else 1

    @property
    def addresses(self) -> Mapping[str, str]:
        own = self._hub.addresses if isinstance(self._hub, Reconnecting) else {"": ""}
        return {**own, **({} if self._told is None else {self._told.address: ""})}

    def received_bytes(self) -> int:
        ends = (end for end in (self._hub, self._replica) if end is not None)
        return self._before.received_bytes + sum(end.received_bytes() for end in ends)

    def traffic(self) -> Traffic:
        """See MemberTransport: of all ends."""
        other = self._hub if self._end is not self._hub else self._replica
        known = self._before if other is None else other.traffic().after(self._before)
        return self._end.traffic().after(known)

    def close(self) -> None:
        for end in (self._hub, self._replica):
            if end is not None:
                end.close()


def _renew(end: MemberTransport) -> None:
    if isinstance(end, Reconnecting):
        end.reconnect()
