"""Who stands before an encrypted socket, and what became of their handshakes."""

from __future__ import annotations

import zmq

from edgetrain.exchange.keys.gate import Gate
from edgetrain.exchange.limits import Refusals

DOORS_PER_POLL = 16
"""New connections that are judged at a time, so that a crowd at the door keeps nobody inside."""


class _Door:
    """Judges who comes in: ZeroMQ asks it (ZAP, RFC 27) before a connection carries messages.

    Only sockets with a Gate have one. `answer` is called from the hub's own poll.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], gate: Gate) -> None:
        self.gate = gate
        self.refusals: Refusals
        self.callers = _Callers()
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Let in or turn away whoever stands there."""
        for _ in range(DOORS_PER_POLL):
            try:
                version, request, _, address, _, mechanism, *proved = self.socket.recv_multipart(
                    zmq.NOBLOCK
                )
            except (zmq.Again, ValueError):
                return
            identity, refused = "", "it has no key"
            if mechanism == b"CURVE" and len(proved) == 1:
                identity, refused = self.gate.admit(proved[0])
            if refused:
                self.callers.turned_away()
                kind = refused if "token" not in refused else "token"
                kind = "key" if refused.startswith("key ") else kind
                self.refusals.add(kind, f"{address.decode(errors='replace')}: {refused}")
            status = (b"400", b"refused") if refused else (b"200", b"")
            self.socket.send_multipart([version, request, *status, identity.encode(), b""])


_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


_AT_THE_DOOR = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
"""An encrypted hub must not ask for HANDSHAKE_FAILED_PROTOCOL. libzmq tells that of every message
that cannot be deciphered, too (curve_mechanism_base.cpp, 4.3.5), and the telling leaves EAGAIN in
the errno by which it then judges the connection: instead of closing it, it never reads it again,
and takes for ever what is sent there. One flipped bit, and a member is neither heard nor missed."""


class _Callers:
    """Who went away from an encrypted hub without having proved itself, by what libzmq tells of all
    connections. What it cannot match it does not count: a refusal may go untold, none is made up.
    """

    def __init__(self) -> None:
        self._silent: set[int] = set()
        """Descriptors of connections that have said nothing yet."""
        self._proved = self._turned_away = 0
        """Of those: how many may do so, and how many may not."""
        self._explained = False

    def heard(self, descriptor: int) -> None:
        """A message came over this connection."""
        if descriptor in self._silent:
            self._silent.discard(descriptor)
            self._proved = max(0, self._proved - 1)

    def turned_away(self) -> None:
        """The door refused one, and said so."""
        self._turned_away += 1

    def tell(self, event: int, value: int) -> bool:
        """Whether this event is the end of one that could not prove itself."""
        if event == zmq.EVENT_ACCEPTED:
            self._silent.add(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._proved += 1
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._explained = True  # and its DISCONNECTED follows
        elif event == zmq.EVENT_DISCONNECTED:
            explained, self._explained = self._explained, False
            if value in self._silent:
                self._silent.discard(value)
                return not explained and self._is_unknown()
        return False

    def _is_unknown(self) -> bool:
        known = self._turned_away or self._proved
        if self._turned_away:
            self._turned_away -= 1
        elif self._proved:
            self._proved -= 1
        if not self._silent:
            self._turned_away = self._proved = 0
        return not known


_UNPROVED = (
    "it could not prove itself: its pinned key differs, it does not encrypt as this hub does, or "
    "it does not speak ZeroMQ"
)


def _watch(sock: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Where libzmq tells of connections."""
    monitor = sock.get_monitor_socket(events)
    monitor.setsockopt(zmq.LINGER, 0)
    return monitor


_PROTOCOL: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it encrypts, and this hub does not",
}
