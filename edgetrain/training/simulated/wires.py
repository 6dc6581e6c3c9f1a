"""Messages on emulated links in virtual time: the transports of simulated hubs and their members.

A hub listens on any node: its own, or that of a member which hosts a reducer. Any node may connect
to it. Each connection is one of TCP; each direction of it (`streams`, and `lossy` where packets are
lost) goes through the links between its two nodes (`networks.nodes`), which it shares with other
connections. The same link models as in the emulator.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from edgetrain.exchange.transport import SILENCE_S, Traffic
from edgetrain.fleet.networks import Direction, Fault, Profile, Site
from edgetrain.fleet.networks.faults import FaultSchedule
from edgetrain.fleet.networks.links.fluid import Way
from edgetrain.fleet.networks.links.loss_recovery import GREETING_TIMEOUT_NS
from edgetrain.fleet.networks.links.window import MSS
from edgetrain.fleet.networks.nodes import LEAD, NodeLinks, hub_node
from edgetrain.fleet.networks.profile import BARE
from edgetrain.training.simulated.lossy import LossyStream
from edgetrain.training.simulated.streams import Frames, Passage, Path, Stream, wire_bytes
from edgetrain.training.simulated.virtual import SECOND, Mailbox, World
from edgetrain.vectors.vector import Buffer

HANDSHAKES, HANDSHAKE_BYTES = 3, 64
"""Round trips of TCP's and ZMTP's handshakes before the first message, and bytes in each."""

TRAIN_SEGMENTS, COARSE_TRAIN_SEGMENTS, COARSE_FROM = 4, 16, 64
"""Segments that leave together if the congestion window is the limit. Fleets of COARSE_FROM members
or more use the coarse number: finer steps cost more time than they add precision."""


def stream(
    world: World, path: Path, back: Path, congestion: str, deliver: Callable[[Frames], None]
) -> Stream:
    """One direction of a connection, in the finer model if its path loses packets."""
    kind = LossyStream if path.loses or path.fine else Stream
    return kind(world, path, back, congestion, deliver)


class MemberWire:
    """A member's end of its connection to one hub: a MemberTransport in virtual time."""

    addresses: Mapping[str, str] = MappingProxyType({"": ""})

    def __init__(self, network: SimulatedNetwork, node: int, hub: HubWire) -> None:
        self.node, self.hub = node, hub
        self.on_arrival: Callable[[], None] = lambda: None
        """Called when a message has arrived."""
        self._network = network
        self._inbox: Mailbox[Frames] = Mailbox(network.world)
        self._before = Traffic(0, 0, 0, 0.0)
        self._hand: Callable[[bytes, Frames], None] | None = None
        self._open(network.new_name(node))

    def _open(self, name: bytes, *, at_once: bool = True) -> None:
        """Open a new connection under this name. `at_once`: the hub knows of it already."""
        self.name = name
        network, hub = self._network, self.hub
        reached = network.reaches(self.node, hub.node)
        self.connections = int(reached)
        up, down = network.paths(self.node, hub.node)
        self.passage = up.passage
        world, congestion = network.world, network.congestion
        self.up = stream(
            world, up, down, congestion, lambda frames: hub.accept_message(name, frames)
        )
        self.down = stream(world, down, up, congestion, self._accept)
        self.up.answers, self.down.answers = self.down, self.up
        if not reached:
            self.up.cut = self.down.cut = True  # what it sends waits for ever, as ZeroMQ's does
        elif at_once:
            network.add_connection(self)

    def reconnect(self) -> None:
        self._break()
        self._network.remove_connection(self)
        self._open(self._network.new_name(self.node))
        self.greet()

    def cut(self) -> None:
        """Break the connection, so that both ends notice; ZeroMQ reconnects under the same name.

        Messages on their way are lost, and messages that the hub had queued. Messages that this end
        had queued are sent over the new connection.
        """
        waiting, before = self.up.unbegun(), self.connections
        self._break()
        self.hub.remove_connection(self.name)
        self._open(self.name, at_once=False)
        self.connections = before
        delay = self.greet()
        for frames in waiting:
            self.up.send(frames, wire_bytes(frames))
        up, world = self.up, self._network.world
        world.at(world.now + delay, lambda: self._stands(up))

    def _stands(self, up: Stream) -> None:
        if up is self.up and not up.cut:
            self.connections += 1
            self._network.add_connection(self)

    def _break(self) -> None:
        self.up.cut = self.down.cut = True
        self._before = self.traffic()

    def greet(self) -> int:
        """Hold both directions until TCP's and ZMTP's handshakes are done; their nanoseconds."""
        window = self.up.window
        delay = sum(self._network.greetings(self, window.rtt, window.timeout))
        for stream in (self.up, self.down):
            stream.wait(delay)
        return delay

    def stand(self, before: Traffic, hand: Callable[[bytes, Frames], None]) -> None:
        """Be a connection that stood before anybody looked, with this traffic so far: what is sent
        first goes to `hand`, with the connection's name, and takes no time."""
        self._before, self._hand = before, hand

    def send(self, frames: Frames) -> None:
        self._network.tap(self, frames)
        if self._hand is not None:
            hand, self._hand = self._hand, None
            hand(self.name, frames)
        else:
            self.up.send(frames, wire_bytes(frames))

    def _accept(self, frames: Frames) -> None:
        self._inbox.put(frames)
        self.on_arrival()

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        """See MemberTransport; waits in virtual time."""
        frames = self._inbox.get(timeout_s)
        return None if frames is None else list(frames)

    def received_bytes(self) -> int:
        return self._before.received_bytes + self.down.received_bytes

    def traffic(self) -> Traffic:
        """Bytes at the socket, as MemberSocket counts them."""
        before = self._before
        return Traffic(
            before.sent_bytes + self.up.sent_bytes,
            before.received_bytes + self.down.received_bytes,
            before.retransmitted_bytes + self.up.repeated_bytes,
            self.up.window.rtt / SECOND,
        )

    def close(self) -> None:
        """See MemberTransport: what was sent still arrives."""

    def power_off(self) -> None:
        """The device has lost its power: nothing leaves or reaches it, and the hub is not told."""
        self.up.cut = self.down.cut = True
        self._network.lose_connection(self)


class HubWire:
    """A hub's end of all its connections: a HubTransport in virtual time, on `node`.

    The hub handles messages one after the other, each in `message_s` virtual seconds.

        state of a member's connection    event                 next state
        none                              `add_connection`      open
        open                              `remove_connection`   none: sending fails at once
        open                              `lose_connection`     dead: sending seems to work
        dead                              SILENCE_S have passed none: TCP has given up
        any                               `crash`               none
    """

    def __init__(self, world: World, message_s: float, node: int = LEAD) -> None:
        self.node = node
        self._world = world
        self._message_s = message_s
        self.down = False
        self.busy_s = 0.0
        """Virtual seconds that handling messages has taken."""
        self._inbox: Mailbox[tuple[bytes, Frames]] = Mailbox(world)
        self._members: dict[bytes, MemberWire] = {}
        self._dead: dict[bytes, int] = {}
        self._retired = [0, 0, 0]
        self._cached: tuple[Frames, int] | None = None

    def add_connection(self, wire: MemberWire) -> None:
        self._members[wire.name] = wire

    def remove_connection(self, name: bytes) -> None:
        self._members.pop(name, None)

    def retire_connection(self, name: bytes) -> None:
        """As `remove_connection`, of one whose bytes still count."""
        if wire := self._members.pop(name, None):
            of_it = wire.down.sent_bytes, wire.up.received_bytes, wire.down.repeated_bytes
            self._retired = [sum(pair) for pair in zip(self._retired, of_it, strict=True)]

    def accept_message(self, sender: bytes, frames: Frames) -> None:
        """A message has arrived. It is lost if the hub is not running."""
        if not self.down:
            self._inbox.put((sender, frames))

    def wake(self) -> None:
        """Let `poll` return, with nothing, if it waits."""
        self._inbox.wake()

    def crash(self) -> None:
        """The hub's process has died: its connections and unhandled messages are lost."""
        self.down = True
        self._inbox = Mailbox(self._world)
        self._members.clear()
        self._dead.clear()

    def restart(self) -> None:
        self.down = False

    def poll(self, timeout_s: float) -> Iterator[tuple[bytes, list[Buffer]]]:
        """See HubTransport; waits in virtual time."""
        found = self._inbox.get(timeout_s)
        while found is not None:
            if self._message_s:
                self.busy_s += self._message_s
                self._world.sleep(self._message_s)
            yield found[0], list(found[1])
            found = self._inbox.get(0.0)

    def send(self, to: bytes, frames: Frames) -> bool:
        """See HubTransport. A lost connection is noticed when TCP gives up on it."""
        wire = self._members.get(to)
        if wire is None:
            return False
        lost_at = self._dead.get(to)
        if lost_at is not None:
            if self._world.now - lost_at < SILENCE_S * SECOND:
                return True
            del self._members[to], self._dead[to]
            return False
        if self._cached is None or self._cached[0] is not frames:
            self._cached = frames, wire_bytes(frames)
        wire.down.send(frames, self._cached[1])
        return True

    def lose_connection(self, name: bytes) -> None:
        """A member has lost power."""
        self._dead.setdefault(name, self._world.now)

    def traffic(self) -> Traffic:
        """Sums over all connections, as HubSocket counts them."""
        wires, (sent, received, repeated) = self._members.values(), self._retired
        return Traffic(
            sent + sum(wire.down.sent_bytes for wire in wires),
            received + sum(wire.up.received_bytes for wire in wires),
            repeated + sum(wire.down.repeated_bytes for wire in wires),
            max((wire.down.window.rtt / SECOND for wire in wires), default=0.0),
        )

    def close(self) -> None:
        """See HubTransport."""


def _is_plain(profile: Profile) -> bool:
    return profile.up.is_plain and profile.down.is_plain


def _pair(profile: Profile, number: Iterator[int]) -> tuple[Way, Way]:
    up, down = profile.up, profile.down
    return Way.make(up, next(number), 0), Way.make(down, next(number), 0)


class _Access(Mapping[int, tuple[Way, Way]]):
    """The links of members, made when one is first looked at, and those of hubs that have some."""

    def __init__(
        self, profiles: Sequence[Profile], first: int, hubs: Mapping[int, tuple[Way, Way]]
    ) -> None:
        """`first`: the number of member 0's link up."""
        self._profiles, self._first, self._hubs = profiles, first, hubs
        self._made: dict[int, tuple[Way, Way]] = {}
        self._plain = {key for key, each in {id(p): p for p in profiles}.items() if _is_plain(each)}

    def __getitem__(self, node: int) -> tuple[Way, Way]:
        if node < 0:
            return self._hubs[node]
        if node not in self._made:
            number = itertools.count(self._first + 4 * node, 2)
            self._made[node] = _pair(self._profiles[node], number)
        return self._made[node]

    def __contains__(self, node: object) -> bool:
        """A plain link adds nothing to a way, and is not made."""
        if node in self._hubs:
            return True
        return isinstance(node, int) and node >= 0 and id(self._profiles[node]) not in self._plain

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(range(len(self._profiles)), self._hubs)

    def __len__(self) -> int:
        return len(self._profiles) + len(self._hubs)

    def forget(self, node: int) -> None:
        """Forget a departed member: if it comes again, its link is as at first."""
        self._made.pop(node, None)


class SimulatedNetwork:
    """All links of a fleet: member i is behind `profiles[i]`, hub k behind `hubs[k]`, each site
    behind a shared uplink.

    Loss and jitter are drawn with the same seeds as the emulator's, but per chunk and not per
    packet: the draws agree in distribution, not one by one.
    """

    def __init__(
        self,
        world: World,
        profiles: Sequence[Profile],
        *,
        message_s: float = 0.0,
        seed: int = 0,
        congestion: str = "cubic",
        sites: Sequence[Site] = (),
        faults: Sequence[Fault] = (),
        hubs: Sequence[Profile] = (BARE,),
    ) -> None:
        self.world = world
        self.congestion = congestion
        self.tap: Callable[[MemberWire, Frames], None] = lambda wire, frames: None
        """Called with (wire, frames) for each message that a member sends."""
        self.nat: Collection[int] = ()
        """Members to which nobody can connect."""
        first = seed * 1_000_000
        number = itertools.count(first + 4 * len(profiles), 2)
        coarse = len(profiles) >= COARSE_FROM
        self._fine = not coarse
        self._train_bytes = MSS * (COARSE_TRAIN_SEGMENTS if coarse else TRAIN_SEGMENTS)
        uplinks = [(site, _pair(site.uplink, number)) for site in sites]
        own = {
            hub_node(k): _pair(profile, number)
            for k, profile in enumerate(hubs)
            if not _is_plain(profile)
        }
        self._access = _Access(profiles, first, own)
        self._links = NodeLinks(self._access, uplinks)
        self._bare = Way.make(Direction(), next(number), 0)
        self._message_s = message_s
        self.hubs = [self.listen(hub_node(k)) for k in range(len(hubs))]
        """The wires of the hubs that have a machine of their own, the lead's first."""
        self._wires: dict[bytes, MemberWire] = {}
        self._schedule = FaultSchedule(faults)
        self._passages: dict[tuple[int, int], Passage] = {}
        self._joined = 0

    @property
    def hub(self) -> HubWire:
        return self.hubs[0]

    def listen(self, node: int) -> HubWire:
        """The wire of a hub on this node: of its own, or of a member that hosts a reducer. Each
        call makes another one."""
        return HubWire(self.world, self._message_s, node)

    def reaches(self, source: int, target: int) -> bool:
        """Whether `source` can open a connection to `target`, while no fault keeps them apart."""
        return source == target or target not in self.nat

    def paths(self, source: int, target: int = LEAD) -> tuple[Path, Path]:
        """The paths from one node to another, and back. Both have one passage."""
        passage = self._passage(source, target)
        return self._path(source, target, passage), self._path(target, source, passage)

    def _path(self, source: int, target: int, passage: Passage) -> Path:
        ways = tuple(self._links.way(source, target)) or (self._bare,)
        return Path(ways, self._train_bytes, self._fine, passage)

    def connect(
        self, node: int, hub: HubWire | None = None, *, at_once: bool = False
    ) -> MemberWire:
        """Open a connection of this node to a hub (None: the lead); returns after the round trips
        of the handshakes, or `at_once`: it stood before."""
        wire = MemberWire(self, node, hub or self.hub)
        if at_once and wire.up.at_once:
            return wire
        rtt = wire.up.window.rtt
        for number, trip in enumerate(self.greetings(wire, rtt, wire.up.window.timeout)):
            if number:  # the windows begin with the round trip of the first
                for window in (wire.up.window, wire.down.window):
                    window.sent(HANDSHAKE_BYTES, self.world.now)
                    window.acked(HANDSHAKE_BYTES, self.world.now + rtt, rtt)
            if not at_once:
                self.world.sleep(trip / SECOND)
        return wire

    def dial(self, node: int, hub: HubWire) -> MemberWire:
        """As `connect`, but messages wait for the handshakes in place of the caller."""
        wire = MemberWire(self, node, hub)
        wire.greet()
        return wire

    def greetings(self, wire: MemberWire, rtt: int, patience: int) -> list[int]:
        """Nanoseconds of a new connection's first round trips: TCP's, and two of ZMTP's. One that
        loses a segment takes a timeout longer."""
        paths = self.paths(wire.node, wire.hub.node)
        trips: list[int] = []
        for number in range(HANDSHAKES):
            now = self.world.now + sum(trips)
            timeout = patience if number else GREETING_TIMEOUT_NS
            late = sum(path.once(now, timeout) for path in paths if path.loses)
            trips.append(rtt + late)
        return trips

    def new_name(self, node: int) -> bytes:
        self._joined += 1
        return b"m%d-%d" % (node, self._joined)

    def add_connection(self, wire: MemberWire) -> None:
        self._wires[wire.name] = wire
        if not wire.hub.down:
            wire.hub.add_connection(wire)

    def remove_connection(self, wire: MemberWire) -> None:
        self._wires.pop(wire.name, None)
        wire.hub.remove_connection(wire.name)

    def retire_connection(self, wire: MemberWire) -> None:
        """A member is gone whose bytes still count."""
        self._wires.pop(wire.name, None)
        self._passages.pop((wire.node, wire.hub.node), None)
        self._access.forget(wire.node)
        wire.hub.retire_connection(wire.name)

    def lose_connection(self, wire: MemberWire) -> None:
        """A member has lost power."""
        self._wires.pop(wire.name, None)
        wire.hub.lose_connection(wire.name)

    def restart_hub(self, hub: HubWire | None = None) -> None:
        """A hub's process (None: the lead's) runs again: every member of it reconnects."""
        hub = hub or self.hub
        hub.restart()
        for wire in list(self._wires.values()):
            if wire.hub is hub:
                wire.cut()  # ZeroMQ reconnects under the same name; messages on their way are lost

    def strike(self, fault: Fault) -> None:
        """Let this fault begin now, for its `for_s`; its `at_s` is ignored."""
        self._change(fault, True)
        when = self.world.now + round(fault.for_s * SECOND)
        self.world.at(when, lambda: self._change(fault, False))

    def start_faults(self) -> None:
        """Start the clock of the job's scheduled faults: training begins."""
        start = self.world.now
        for seconds, fault, begins in self._schedule.changes():
            when = start + round(seconds * SECOND)
            self.world.at(when, lambda f=fault, b=begins: self._change(f, b))  # type: ignore[misc]

    def _change(self, fault: Fault, begins: bool) -> None:
        self._schedule.switch(fault, begins)
        for node, ways in self._links.access.items():
            for way in ways:
                way.model.set_rate(self._schedule.rate_share(node))
        for ends in sorted(self._passages):
            self._passages[ends].down = self._schedule.apart(*ends)
            self._follow_outage(self._passages[ends])

    def _passage(self, source: int, target: int) -> Passage:
        if (source, target) not in self._passages:
            passage = self._passages[source, target] = Passage(self._schedule.apart(source, target))
            self._follow_outage(passage)
        return self._passages[source, target]

    def _follow_outage(self, passage: Passage) -> None:
        """TCP retransmits what an outage took; after SILENCE_S both ends give up."""
        if passage.down and passage.since is None:
            began = passage.since = self.world.now
            self.world.at(began + SILENCE_S * SECOND, lambda: self._give_up(passage, began))
            for wire in self._wires_of(passage):
                wire.up.begin_outage()
                wire.down.begin_outage()
        elif not passage.down and passage.since is not None:
            outage = self.world.now - passage.since
            passage.since = None
            for wire in self._wires_of(passage):
                if outage >= SILENCE_S * SECOND:
                    wire.up.count_outage(outage)
                    wire.down.count_outage(outage)
                    wire.cut()
                else:
                    wire.up.recover(outage)
                    wire.down.recover(outage)

    def _give_up(self, passage: Passage, began: int) -> None:
        if passage.since == began:
            for wire in self._wires_of(passage):
                wire.hub.remove_connection(wire.name)

    def _wires_of(self, passage: Passage) -> list[MemberWire]:
        return [wire for wire in self._wires.values() if wire.passage is passage]
