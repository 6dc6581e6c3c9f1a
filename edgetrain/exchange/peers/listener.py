"""A member's end that other members connect to: a HubTransport for those that its map names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from edgetrain.errors import BadMessage
from edgetrain.exchange.further_messages import Hello
from edgetrain.exchange.keys.pairs import Pair, Public, short, spell
from edgetrain.exchange.limits import CONNECTIONS_REMEMBERED, Refusals
from edgetrain.exchange.messages import Join, Leave, Refuse, Resume, pack, unpack
from edgetrain.exchange.peers.neighbours import Neighbours
from edgetrain.exchange.transport import HubTransport, MemberTransport, Traffic, owner_of
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.vectors.vector import Buffer

GONE = "it has left the job, or was removed from it"
"""The reason of members that a new map does not name any more."""


class Doorway(HubTransport, Protocol):
    """A HubTransport with ends in its own process, too."""

    def connect(self) -> MemberTransport:
        """A new one. May be called by another thread."""


class MapGate:
    """Admits the keys of the newest map, and nobody before there is one: a Gatekeeper. Maps come
    from another thread than the socket's."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._names: Mapping[Public, str] = {}

    def let_in(self, names: Mapping[Public, str]) -> None:
        """From now on these keys, and no others; connections of others are ended."""
        self._names = names

    def admit(self, key: Public) -> tuple[str, str]:
        if key in self._names:
            return f"member {spell(key)}", ""
        return "", f"key {short(key)}… is not that of a member of this job"

    def knows(self, identity: str) -> bool:
        return any(identity == f"member {spell(key)}" for key in self._names)

    def allowed(self) -> Mapping[Public, str]:
        return self._names

    def enrol(self, identity: str, frames: Sequence[bytes]) -> tuple[list[bytes], str]:
        """See Gatekeeper. Nobody is enrolled at a member."""
        raise AssertionError("a gate that admits no tokens was asked to redeem one")


class Listener:
    """Listens for other members, and hears only those that have said who they are.

    `socket` does the work; `gate` is its gate, where it has one. Answers `Hello` by itself. Used by
    one thread, but for `let_in`.
    """

    def __init__(self, socket: Doorway, gate: MapGate | None = None) -> None:
        self._socket, self._gate = socket, gate
        self._neighbours: Neighbours | None = None
        self._names: dict[bytes, str] = {}
        self._named_by: Neighbours | None = None
        self.refusals = Refusals()

    def let_in(self, neighbours: Neighbours) -> None:
        """From now on these may connect. May be called by another thread."""
        if self._gate is not None:
            self._gate.let_in(neighbours.by_key)
        self._neighbours = neighbours

    def connect(self) -> MemberTransport:
        """An end for the member itself, in this process. May be called by another thread."""
        return self._socket.connect()

    def name_of(self, sender: bytes) -> str:
        """The member at a connection, which has said so; "" if none has."""
        return self._names.get(sender, "")

    def poll(self, timeout_s: float) -> Iterator[tuple[bytes, list[Buffer]]]:
        """See HubTransport: messages of members that have said who they are; of one that the map
        does not name any more, as if it had left."""
        for sender, frames in self._socket.poll(timeout_s):
            yield from self._forget_others()
            kind = bytes(frames[0][:2]) if frames else b""
            if kind == Hello.kind:
                self._answer(sender, frames)
            elif sender not in self._names:
                self._refuse(sender, "unknown", "say who you are")
            elif kind in (Join.kind, Resume.kind) and (why_not := self._why_not(sender, frames)):
                self._refuse(sender, "name", why_not)
            else:
                yield sender, frames
        yield from self._forget_others()

    def _forget_others(self) -> Iterator[tuple[bytes, list[Buffer]]]:
        """Once there is another map: forget those that it does not name, and let them leave."""
        if self._named_by is not self._neighbours and self._neighbours is not None:
            self._named_by = neighbours = self._neighbours
            keys = {name: key for key, name in neighbours.by_key.items()}
            gone = [
                sender
                for sender, name in self._names.items()
                if name not in neighbours.by_name or keys.get(name, b"") != owner_of(sender)
            ]
            for sender in gone:
                del self._names[sender]
                yield sender, pack(Leave(GONE))

    def _answer(self, sender: bytes, frames: Sequence[Buffer]) -> None:
        try:
            hello = unpack(frames)
        except BadMessage:
            return
        assert isinstance(hello, Hello)
        neighbours = self._neighbours
        why_not = "there is no map yet" if neighbours is None else ""
        if neighbours is not None:
            why_not = neighbours.why_not(hello, owner_of(sender))
        if why_not or neighbours is None:
            self.refusals.add("hello", f"{hello.name}: {why_not}")
            self._refuse(sender, "unknown", why_not)
            return
        self._names.pop(sender, None)
        self._names[sender] = hello.name
        while len(self._names) > CONNECTIONS_REMEMBERED:
            del self._names[next(iter(self._names))]
        self.send(sender, pack(neighbours.hello_to(hello.name)))

    def _why_not(self, sender: bytes, frames: Sequence[Buffer]) -> str:
        """Why what asks to join, or come back, cannot be: it goes by another's name."""
        try:
            asked = unpack(frames)
        except BadMessage:
            return ""  # whoever serves the members says what is wrong with it
        name = asked.name if isinstance(asked, Join | Resume) else ""
        own = self._names[sender]
        return "" if name == own else f"{own} cannot join as '{name}'"

    def _refuse(self, sender: bytes, code: str, reason: str) -> None:
        self.send(sender, pack(Refuse(code, reason[:512])))

    def send(self, to: bytes, frames: Sequence[Buffer]) -> bool:
        return self._socket.send(to, frames)

    def traffic(self) -> Traffic:
        return self._socket.traffic()

    def close(self) -> None:
        self._socket.close()


def listen(address: str, pair: Pair | None, max_message_bytes: int = -1) -> tuple[Listener, str]:
    """Listen at `address`, "tcp://HOST:PORT" (port 0: any), encrypted if there is a `pair`. Returns
    the listener and where it listens. Raises NetworkError."""
    gate = None if pair is None else MapGate(pair)
    socket = HubSocket(address, max_message_bytes, gate)
    return Listener(socket, gate), socket.address
