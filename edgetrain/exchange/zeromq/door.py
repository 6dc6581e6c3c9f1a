"""Authentication at an encrypted hub: libzmq asks (ZAP, RFC 27), the gate answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from edgetrain.exchange.limits import Refusals

if TYPE_CHECKING:
    from edgetrain.exchange.keys.gate import Gatekeeper

DOORS_PER_POLL = 16
"""New connections authenticated per poll, so that a flood of them cannot starve connected members.
"""


class Door:
    """Answers libzmq's question whether a connection may carry messages.

    Only hubs with a Gate have one. `answer_requests` is called from the hub's own poll.
    `refusals` reports who was refused.
    """

    def __init__(
        self,
        sock: zmq.Socket[bytes],
        gate: Gatekeeper,
        refusals: Refusals,
        on_refusal: Callable[[], None],
    ) -> None:
        """`sock`: a REP socket of the hub's context, which stays the caller's to close.
        `on_refusal` is called before each refusal."""
        self.gate = gate
        self._on_refusal = on_refusal
        self._refusals = refusals
        self.socket = sock
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer_requests(self) -> None:
        """Admit or refuse the connections that wait, at most DOORS_PER_POLL of them."""
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
                self._on_refusal()
                kind = refused if "token" not in refused else "token"
                kind = "key" if refused.startswith("key ") else kind
                self._refusals.add(kind, f"{address.decode(errors='replace')}: {refused}")
            status = (b"400", b"refused") if refused else (b"200", b"")
            self.socket.send_multipart([version, request, *status, identity.encode(), b""])
