"""A member's end of a connection around another one."""

from __future__ import annotations

from collections.abc import Sequence

from edgetrain.exchange.transport import MemberTransport, Reconnecting, Traffic
from edgetrain.vectors.vector import Buffer


class WrappedEnd:
    """A MemberTransport, and Reconnecting, that does as `end` does. For subclasses."""

    def __init__(self, end: MemberTransport) -> None:
        self._end = end

    def send(self, frames: Sequence[Buffer]) -> None:
        """See MemberTransport."""
        self._end.send(frames)

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        """See MemberTransport."""
        return self._end.receive(timeout_s)

    @property
    def connections(self) -> int:
        """See Reconnecting."""
        return self._end.connections if isinstance(self._end, Reconnecting) else 1

    @property
    def addresses(self) -> int:
        """See Reconnecting."""
        return self._end.addresses if isinstance(self._end, Reconnecting) else 1

    def reconnect(self) -> None:
        """See Reconnecting."""
        if isinstance(self._end, Reconnecting):
            self._end.reconnect()

    def received_bytes(self) -> int:
        """See MemberTransport."""
        return self._end.received_bytes()

    def traffic(self) -> Traffic:
        """See MemberTransport."""
        return self._end.traffic()

    def close(self) -> None:
        """See MemberTransport."""
        self._end.close()
