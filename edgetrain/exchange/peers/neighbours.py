"""The other members of a job, as one of them sees them. Pure values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from edgetrain.errors import BadMessage, NetworkError
from edgetrain.exchange.addresses import split_address
from edgetrain.exchange.further_messages import Hello
from edgetrain.exchange.keys.pairs import KEY_BYTES, Public, decode_base64url
from edgetrain.exchange.messages import Map, Peer


@dataclass(frozen=True)
class Neighbours:
    """A map that has been checked."""

    map: Map
    encrypted: bool
    """Whether every member has a key."""

    @classmethod
    def of(cls, map: Map, encrypted: bool) -> Neighbours:
        """A member may have a row of its own for each stretch that it took over. Raises BadMessage
        for a map that does not name its receiver, names a member or a range twice, gives out some
        ranges and not all (none: members average among themselves), has an address or a key that is
        none, gives ranges to a member without an address, or (`encrypted`) has a member without a
        key."""
        found = cls(map, encrypted)
        more = [peer.name for peer in map.peers[1:] if peer.first < peer.end]
        names = [peer.name for peer in map.peers]
        twice = {name for name in names if names.count(name) > 1}
        names = [*dict.fromkeys(names)] if twice <= set(more) else names
        if len(set(names)) < len(names) or map.name not in names:
            raise BadMessage(f"a map without {map.name!r}, or with a name twice: {names}"[:200])
        for peer in map.peers:
            found._check_peer(peer)
        spans = sorted(span for span in found._spans() if span[0] < span[1])
        follows = [first for first, _ in spans] == [0, *(end for _, end in spans)][:-1]
        if (spans and map.trying) or not follows:
            raise BadMessage(f"a map in which ranges have no reducer, or two: {spans}"[:200])
        return found

    def _check_peer(self, peer: Peer) -> None:
        if peer.address:
            try:
                split_address(peer.address)
            except NetworkError as error:
                raise BadMessage(f"a map in which {peer.name} is at {error.message}") from None
        elif peer.first < peer.end:
            raise BadMessage(f"a map in which {peer.name} reduces, and is at no address")
        key = decode_base64url(peer.key)
        if len(key) != (KEY_BYTES if self.encrypted else 0):
            raise BadMessage(f"a map in which {peer.name} has the key {peer.key!r}")

    def _spans(self) -> Iterator[tuple[int, int]]:
        yield self.map.first, self.map.end
        yield from ((peer.first, peer.end) for peer in self.map.peers)

    @property
    def name(self) -> str:
        return self.map.name

    @cached_property
    def by_name(self) -> Mapping[str, Peer]:
        return {peer.name: peer for peer in reversed(self.map.peers)}

    @cached_property
    def by_key(self) -> Mapping[Public, str]:
        """The members' names by their keys; empty if they are not encrypted."""
        return {decode_base64url(p.key): p.name for p in self.map.peers if self.encrypted}

    @property
    def own(self) -> Peer:
        return self.by_name[self.name]

    @property
    def others(self) -> tuple[Peer, ...]:
        """The members that this one can try to reach, in order."""
        return tuple(p for p in self.map.peers if p.address and p.name != self.name)

    @property
    def reducers(self) -> tuple[Peer, ...]:
        """The members that reduce ranges, in the order of these."""
        return tuple(sorted((p for p in self.map.peers if p.first < p.end), key=lambda p: p.first))

    def turn(self, count: int) -> int:
        """Which of `count` things is this member's to begin with, if each of the members begins
        with another one."""
        names = [*dict.fromkeys(peer.name for peer in self.map.peers)]
        return names.index(self.name) * count // len(names)

    def reducer_of(self, first: int) -> Peer | None:
        """The reducer of the stretch from this range; None: the hub."""
        return next((peer for peer in self.reducers if peer.first == first), None)

    def hello_to(self, peer: str) -> Hello:
        """This member's first message to another one."""
        return Hello(self.map.ticket, self.name, peer)

    def why_not(self, hello: Hello, key: Public) -> str:
        """Why a peer that has proved to hold this key (b"": none) is not heard; "": it is."""
        if hello.ticket != self.map.ticket:
            return "its ticket is not that of this job"
        if hello.to != self.name:
            return f"this is {self.name}, not {hello.to}"
        if hello.name not in self.by_name:
            return f"no member is named {hello.name}"
        if self.encrypted and self.by_key.get(key) != hello.name:
            return f"{hello.name} has another key"
        return ""
