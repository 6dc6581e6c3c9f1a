"""What libzmq reports of connections and their handshakes, and what follows from it at each end.

libzmq connects, encrypts and reconnects by itself. It reports each step as an event on a monitor
socket; a program that does not look there cannot tell a refused key from a dead network.

At a member: `MemberHandshake`. Once the hub has proved its key, a handshake that fails later means
a hub that restarts or bytes that were damaged, and not a wrong key. So there are three states:

    new       the hub has never proved its key to this member
    stands    it has, on the current socket
    away      it has, on an earlier socket; the current one is not connected yet

    event                    new                        away          stands
    handshake succeeded      -> stands                  -> stands     stands
    key not let in           raise Refused              the same      the same
    protocol error           raise HubUnreachable       "hang up"     "renew"
    handshake broken off     raise HubUnreachable (*)   "nothing"     "nothing"
    (a new socket)           new                        away          -> away

(*) after HANDSHAKES_TRIED of them, if this member encrypts. After a protocol error libzmq neither
reads the connection nor makes another. If it stood, damaged bytes arrived: the caller makes a new
socket at once ("renew"). If not, the caller sees that nothing more arrives, which would pass for a
sign of life ("hang up"), and the member's own timeout reconnects.

At an encrypted hub: `Newcomers`. If a connection fails before the gate is asked (another key
pinned, no encryption, not ZeroMQ), libzmq reports only that it was disconnected, as when a member
leaves. A connection is silent from its acceptance until its first message. Some events do not say
which connection they are about, so they are counted:

    event                    silent connections     counters
    accepted                 one more
    message received         one less               proved - 1
    handshake succeeded                             proved + 1
    refused by the gate                             refused + 1
    handshake broken off                            the next disconnect is explained
    disconnected             one less               refused - 1, or else proved - 1

A silent connection that is disconnected without an explanation, with both counters at 0, did not
prove itself. What cannot be matched is not reported: a failure may be missed, none is made up.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from edgetrain.errors import HubUnreachable, Refused

HANDSHAKE_FAILED: int = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Handshakes that failed, by their reason."""

PLAIN_HUB_EVENTS = HANDSHAKE_FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

MEMBER_EVENTS = HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED

ENCRYPTED_HUB_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
"""Without HANDSHAKE_FAILED_PROTOCOL, which an encrypted hub must not ask for. libzmq reports that
also for every message that it cannot decipher (curve_mechanism_base.cpp, 4.3.5), and reporting it
leaves EAGAIN in the errno by which libzmq then judges the connection: instead of closing it, it
never reads it again, and accepts for ever what is sent there. After one flipped bit the hub would
neither hear a member nor miss it."""

HANDSHAKES_TRIED = 5
"""After this many handshakes that broke off, and none that succeeded, the key is the reason."""


def next_event(monitor: zmq.Socket[bytes]) -> tuple[int, int] | None:
    """(event, value) that was reported next, or None. Does not wait."""
    if not int(monitor.get(zmq.EVENTS)) & zmq.POLLIN:
        return None
    try:
        found = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
    except (zmq.Again, RuntimeError):  # RuntimeError: not the two frames of an event
        return None
    return int(found["event"]), int(found["value"])


Remedy: TypeAlias = Literal["nothing", "renew", "hang up"]
"""The reaction of a member's end to an event."""


class MemberHandshake:
    """Whether the hub has proved to a member who it is: the states above."""

    def __init__(self, encrypted: bool) -> None:
        self.state: Literal["new", "stands", "away"] = "new"
        self.connections = 0
        """Handshakes that succeeded."""
        self._encrypted = encrypted
        self._broken_off = 0
        """Handshakes on the current socket that failed without a reason."""

    @property
    def proved(self) -> bool:
        """Whether the hub has ever proved its key, or (not encrypted) that it speaks ZeroMQ."""
        return self.state != "new"

    def socket_renewed(self) -> None:
        """Another socket takes the place of the current one."""
        self._broken_off = 0
        if self.state == "stands":
            self.state = "away"

    def record_event(self, event: int) -> Remedy:
        """Move on by one of MEMBER_EVENTS; returns what to do about it.

        Raises Refused if the hub does not let this machine's key in; HubUnreachable if the hub is
        not the one whose key is pinned, or one end encrypts and the other does not.
        """
        match event:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.state = "stands"
                self.connections += 1
                return "nothing"
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise Refused(
                    "key",
                    "the hub does not let this machine's key in",
                    "ask its owner for a token (edgetrain keys enroll NAME), then enroll here",
                )
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                if self.state == "new":
                    raise HubUnreachable(*_UNLIKE[self._encrypted], passing=False)
                return "renew" if self.state == "stands" else "hang up"
        self._broken_off += 1
        # A hub that was genuine once may be restarting behind a proxy.
        if self._encrypted and not self.proved and self._broken_off >= HANDSHAKES_TRIED:
            raise HubUnreachable(*_WRONG_KEY)
        return "nothing"


class Newcomers:
    """Connections of an encrypted hub that have not sent anything yet: the counters above."""

    def __init__(self) -> None:
        self._silent: set[int] = set()
        """Descriptors of connections without a message so far."""
        self._proved = self._refused = 0
        self._explained = False

    def message_came(self, descriptor: int) -> None:
        if descriptor in self._silent:
            self._silent.discard(descriptor)
            self._proved = max(0, self._proved - 1)

    def was_refused(self) -> None:
        """The gate refused a connection; that has been reported."""
        self._refused += 1

    def was_ended(self, descriptor: int) -> None:
        """The hub ends the connection with this descriptor; that has been reported."""
        self._silent.discard(descriptor)

    def record_event(self, event: int, value: int) -> bool:
        """Move on by one of ENCRYPTED_HUB_EVENTS; returns whether a connection ended that did not
        prove itself. `value` is what libzmq reports with it, a descriptor for most."""
        if event == zmq.EVENT_ACCEPTED:
            self._silent.add(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._proved += 1
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._explained = True
        elif event == zmq.EVENT_DISCONNECTED:
            explained, self._explained = self._explained, False
            if value in self._silent:
                self._silent.discard(value)
                return not explained and not self._account_for_one()
        return False

    def _account_for_one(self) -> bool:
        """Match a silent connection that ended with one that was counted, if there is one."""
        known = self._refused or self._proved
        if self._refused:
            self._refused -= 1
        elif self._proved:
            self._proved -= 1
        if not self._silent:
            self._refused = self._proved = 0
        return bool(known)


_WRONG_KEY = (
    "the hub breaks off when this machine proves that it knows the hub's key",
    "is it the hub whose key is pinned (`edgetrain keys list` there prints it), and was it started "
    "with its keys?",
)

_UNLIKE = {
    False: (
        "the hub encrypts, and this member was told not to",
        "give the hub's key: --hub-key, or `edgetrain keys enroll`",
    ),
    True: (
        "this member encrypts, and the hub does not",
        "start the hub with its keys, or, inside a network you trust, use --insecure here",
    ),
}
"""Messages by whether this member encrypts."""
