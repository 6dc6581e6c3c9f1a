"""The seam to the network, as protocols.

exchange/zeromq/ implements them over TCP, tests/fakes/loopback.py in memory, for threads of one
process. Both pass the same tests (tests/exchange/test_transport.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from edgetrain.exchange.keys.pairs import KEY_BYTES

if TYPE_CHECKING:
    from edgetrain.vectors.vector import Buffer

SILENCE_S = 10
"""A connection is closed if the other machine's kernel acknowledges nothing for this long.

The kernels' own timers measure it. A heartbeat of ZeroMQ would have to wait behind the frame that
is under way, and on a slow link would close the connection that carries it.
"""

_OWNED = b"k"


def owned(key: bytes, rest: bytes) -> bytes:
    """The name of a connection whose owner has proved to hold this key, [32]. `rest` tells the
    owner's connections apart."""
    return _OWNED + key + rest


def owner_of(sender: bytes) -> bytes:
    """The key that the owner of a connection with this name has proved to hold; b"" if none."""
    whole = sender.startswith(_OWNED) and len(sender) > KEY_BYTES
    return sender[1 : 1 + KEY_BYTES] if whole else b""


@dataclass(frozen=True)
class Traffic:
    """The kernel's counters of TCP connections since their beginning."""

    sent_bytes: int
    received_bytes: int
    retransmitted_bytes: int
    round_trip_s: float

    @classmethod
    def of_all(cls, each: Iterable[Traffic]) -> Traffic:
        """Sums, and the longest round trip."""
        found = [cls(0, 0, 0, 0.0), *each]
        return cls(
            sum(traffic.sent_bytes for traffic in found),
            sum(traffic.received_bytes for traffic in found),
            sum(traffic.retransmitted_bytes for traffic in found),
            max(traffic.round_trip_s for traffic in found),
        )

    def after(self, *past: Traffic) -> Traffic:
        """With what earlier connections carried: sums, and the round trip of this one."""
        return replace(Traffic.of_all([*past, self]), round_trip_s=self.round_trip_s)


class HubTransport(Protocol):
    """The hub's end."""

    def poll(self, timeout_s: float) -> Iterator[tuple[bytes, list[Buffer]]]:
        """(sender, frames) of what has arrived, after waiting for the first at most `timeout_s`."""

    def send(self, to: bytes, frames: Sequence[Buffer]) -> bool:
        """Queue a message for a peer; False if there is no connection to it.

        The buffers must not be written again.
        """

    def traffic(self) -> Traffic:
        """Traffic of all connections so far."""

    def close(self) -> None:
        """Close; works twice."""


class MemberTransport(Protocol):
    """A member's end."""

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queue a message for the hub. The buffers must not be written again."""

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        """The next message's frames, in the order sent; None after `timeout_s` without one."""

    def received_bytes(self) -> int:
        """Bytes so far, those of an incomplete message included: it grows while one arrives."""

    def traffic(self) -> Traffic:
        """Traffic of the connections so far."""

    def close(self) -> None:
        """Close; works twice."""


@runtime_checkable
class Reconnecting(Protocol):
    """A member's end that can drop its connection and make another."""

    @property
    def connections(self) -> int:
        """Connections that have stood since this end was made, or since `reconnect`. With more than
        one, the connection before broke, and messages on it may be lost."""

    @property
    def addresses(self) -> Mapping[str, str]:
        """The hub's, which `reconnect` tries in turn; by each why it is not the hub's, or ""."""

    def reconnect(self) -> None:
        """Drop the connection and what is queued on it, and make another.

        The hub knows it by the same name. What `traffic` has counted stays counted.
        """

    def traffic(self) -> Traffic:
        """See MemberTransport."""
