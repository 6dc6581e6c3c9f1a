"""A member's end of a connection around another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgetrain.exchange.transport import MemberTransport, Reconnecting, Traffic
from edgetrain.vectors.vector import Buffer


class WrappedEnd:
    """A MemberTransport, and Reconnecting, that does as `end` does. For subclasses."""

    def __init__(self, end: MemberTransport) -> None:
        self._use(end)

    def _use(self, end: MemberTransport) -> None:
        self._end = end
        # Checked once: isinstance of a Protocol is slow, and messages are many.
        self._reconnecting = end if isinstance(end, Reconnecting) else None

    def send(self, frames: Sequence[Buffer]) -> None:
        self._end.send(frames)

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        return self._end.receive(timeout_s)

    @property
    def connections(self) -> int:
        return 1 if self._reconnecting is None else self._reconnecting.connections

    @property
    def addresses(self) -> Mapping[str, str]:
        return {} if self._reconnecting is None else self._reconnecting.addresses

    def reconnect(self) -> None:
        if self._reconnecting is not None:
            self._reconnecting.reconnect()

    def received_bytes(self) -> int:
        return self._end.received_bytes()

    def traffic(self) -> Traffic:
        return self._end.traffic()

    def close(self) -> None:
        self._end.close()
