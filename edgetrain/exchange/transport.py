"""The seam to the network, as protocols, and an in-memory transport that keeps the same promises.

`sockets` implements these over ZeroMQ. `Loopback` is the public fake: threads of one process join
a hub through queues. Both pass the same conformance suite (tests/test_transport.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from edgetrain.vectors.vector import Buffer

SILENCE_S = 10
"""A connection over which the other machine's kernel acknowledges nothing for so long is closed.

The kernels' own timers: a heartbeat of ZeroMQ would have to wait behind the frame that is under
way, and on a slow link close the connection that carries it.
"""


KEY_BYTES = 32
_OWNED = b"k"


def owned(key: bytes, rest: bytes) -> bytes:
    """The name of a connection of whoever holds this key, [32]: a transport that says so has seen
    the proof of it."""
    return _OWNED + key + rest


def owner_of(sender: bytes) -> bytes:
    """The key that a connection of this name was proved with; b"" where nothing was proved."""
    whole = sender.startswith(_OWNED) and len(sender) > KEY_BYTES
    return sender[1 : 1 + KEY_BYTES] if whole else b""


@dataclass(frozen=True)
class Traffic:
    """What the kernel counted on a member's TCP connection since it was made."""

    sent_bytes: int
    received_bytes: int
    retransmitted_bytes: int
    round_trip_s: float


class HubTransport(Protocol):
    """The hub's end."""

    def poll(self, timeout_s: float) -> Iterator[tuple[bytes, list[Buffer]]]:
        """(sender, frames) of what has arrived, after waiting for the first at most `timeout_s`."""

    def send(self, to: bytes, frames: Sequence[Buffer]) -> bool:
        """Queue a message for a peer; False when there is no connection to it."""

    def close(self) -> None:
        """Let go; works twice."""


class MemberTransport(Protocol):
    """A member's end."""

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queue a message for the hub. The buffers must not be written again."""

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        """The next message's frames, in the order sent; None after `timeout_s` without one."""

    def received_bytes(self) -> int:
        """Bytes so far, those of a message that is not whole yet too: it grows while one comes."""

    def traffic(self) -> Traffic:
        """What the connection has carried so far."""

    def close(self) -> None:
        """Let go; works twice."""


@runtime_checkable
class Reconnecting(Protocol):
    """A member's end that can be made anew after a silence."""

    @property
    def connections(self) -> int:
        """How many connections have stood since it was made, or made anew. More than one: the one
        before broke, and what was under way on it may be lost."""

    def reconnect(self) -> None:
        """Let go of the connection and of what is queued on it, and make another. The hub knows it
        by the same name. What `traffic` has counted stays counted."""

    def traffic(self) -> Traffic:
        """As of MemberTransport."""
