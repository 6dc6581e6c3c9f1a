"""Messages on emulated links in virtual time: the transports of a simulated hub and its members.

Each member has one TCP connection to the hub; each direction of it is a fluid behind a congestion
window (`networks.fluid`), which goes through the member's access link and, at a site, through the
uplink that it shares with others. The same link models as in the emulator, and no packets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edgetrain.messages import Buffer
from edgetrain.networks import Fault, Profile, Site
from edgetrain.networks.faults import Schedule
from edgetrain.networks.fluid import HEADERS, Way
from edgetrain.networks.window import MSS, Window
from edgetrain.simulator.virtual import SECOND, Mailbox, World
from edgetrain.transport import SILENCE_S, Traffic

SEND_LIMIT_BYTES = 4 << 20
"""The most that one connection has unacknowledged: what Linux allows by default (tcp_wmem)."""

HANDSHAKES, HANDSHAKE_BYTES = 3, 64
"""Round trips of TCP's and ZMTP's greetings before the first message, and bytes in each."""

TRAIN_SEGMENTS, COARSE_TRAIN_SEGMENTS, COARSE_FROM = 4, 16, 64
"""Segments that leave at once where the congestion window is the limit; so many more from so many
members on, where each costs more time than it tells."""

Frames = Sequence[Buffer]


def wire_bytes(frames: Frames) -> int:
    """What a message takes in the byte stream: its frames behind ZMTP 3.1's flags and lengths."""
    total = 0
    for frame in frames:
        size = memoryview(frame).nbytes
        total += size + (2 if size < 256 else 9)
    return total


@dataclass
class _Message:
    frames: Frames
    left: int


@dataclass(frozen=True)
class _Path:
    """The ways that bytes go, in order: the access link and a site's uplink, or back."""

    ways: tuple[Way, ...]
    train_bytes: int

    @property
    def mean_delay(self) -> int:
        return sum(way.mean_delay for way in self.ways)

    @property
    def chunk(self) -> int:
        return min(way.chunk for way in self.ways)

    @property
    def down(self) -> bool:
        """A fault takes the access link away: the first way up, the last way down."""
        return self.ways[0].model.down or self.ways[-1].model.down

    def ack_delay(self, now: int) -> int:
        for way in self.ways:
            now += way.delay_ns(now)
        return now


class _Stream:
    """One direction of one connection: messages in, the same messages out, later."""

    def __init__(
        self,
        world: World,
        path: _Path,
        back: _Path,
        congestion: str,
        deliver: Callable[[Frames], None],
    ) -> None:
        self.sent_bytes = self.received_bytes = self.repeated_bytes = 0
        self._world, self._path, self._back = world, path, back
        self._deliver = deliver
        self._chunk = path.chunk
        self._ns_per_byte = max(way.ns_per_byte for way in path.ways)
        self.window = Window(congestion, path.mean_delay + back.mean_delay, SEND_LIMIT_BYTES)
        self._backlog: deque[_Message] = deque()
        self._acks: deque[tuple[int, int, int, int]] = deque()
        self._last = 0
        self._opens = 0
        self._waits = False
        self._held: deque[tuple[Frames, int]] = deque()
        self.cut = False
        self.on_damage: Callable[[], None] | None = None
        """Called in place of the next delivery, whose bytes are damaged."""

    def send(self, frames: Frames, size: int) -> None:
        """Queue a message."""
        self._backlog.append(_Message(frames, size))
        if not self._waits:
            self._pump()

    def wait(self, delay: int) -> None:
        """Send nothing for so long."""
        self._opens = self._world.now + delay
        self._waits = True
        self._world.at(self._opens, self._pump)

    def _pump(self) -> None:
        """Put on the way what the window has room for."""
        now, window, acks = self._world.now, self.window, self._acks
        if now < self._opens:
            return
        while acks and acks[0][0] <= now:
            at, count, sent, spread = acks.popleft()
            window.acked(count, at, at - sent, spread)
        self._waits = False
        while self._backlog and not self.cut and not self._path.down:
            room = window.room(now)
            if room < MSS and window.in_flight:
                self._waits = True
                if acks:
                    self._world.at(acks[0][0], self._pump)
                return
            message = self._backlog[0]
            # Where the window is the limit, acknowledgements come and let go a few at a time.
            most = self._chunk if room >= message.left else self._path.train_bytes
            size = min(room, most, message.left)
            message.left -= size
            whole = message.frames if not message.left else None
            if whole is not None:
                self._backlog.popleft()
            self._enter(size, whole)

    def _enter(self, size: int, whole: Frames | None) -> None:
        now = self._world.now
        self.window.sent(size, now)
        self.sent_bytes += size
        self._through(0, now, now, size, whole, 0)

    def _through(
        self, stage: int, now: int, sent: int, size: int, whole: Frames | None, stall: int
    ) -> None:
        """A chunk is at the entry of a way. Shared ways are entered in the order of time."""
        way = self._path.ways[stage]
        segments = -(-size // MSS)
        lost = way.losses.within(size, now)
        rate = way.model.rate
        overflow = rate is not None and rate.full(now)
        arrival = way.model.arrival(now, size + segments * HEADERS, segments)
        if lost or overflow:
            stall = max(stall, way.repair(self.window, lost, now))
            self.repeated_bytes += lost * MSS
            self.sent_bytes += lost * MSS
        if stage + 1 < len(self._path.ways):
            self._world.at(
                arrival,
                lambda: self._through(stage + 1, arrival, sent, size, whole, stall),
            )
            return
        spread = int(max(size - MSS, 0) * self._ns_per_byte)
        acked_at = self._back.ack_delay(arrival)
        if self._acks:  # acknowledgements do not overtake each other
            acked_at = max(acked_at, self._acks[-1][0])
        self._acks.append((acked_at, size, sent, spread))
        if self._waits and len(self._acks) == 1:
            self._world.at(acked_at, self._pump)
        self._last = max(arrival + stall, self._last)
        if whole is not None:
            self._world.at(self._last, lambda: self._arrive(whole, size))
        else:
            self.received_bytes += size

    def _arrive(self, frames: Frames, size: int) -> None:
        if self.cut:
            return
        if self._held or self._path.down:  # goes on when the link is up again, in its turn
            self._held.append((frames, size))
        else:
            self._hand_over(frames, size)

    def _hand_over(self, frames: Frames, size: int) -> None:
        self.received_bytes += size
        if self.on_damage is None:
            self._deliver(frames)
        elif not self.cut:
            self.on_damage()

    def unbegun(self) -> list[Frames]:
        """Messages of which nothing has left yet."""
        return [m.frames for m in self._backlog if m.left == wire_bytes(m.frames)]

    def recover(self, outage_ns: int) -> None:
        """The link is up again: TCP goes on at its next retransmission, each twice as late."""
        timeout = at = self.window.timeout
        while at < outage_ns:
            timeout *= 2
            at += timeout
        self.window.collapse()
        self._world.at(self._world.now + max(at - outage_ns, 0), self._go_on)

    def _go_on(self) -> None:
        while self._held and not self._path.down:
            self._hand_over(*self._held.popleft())
        self._pump()


class MemberWire:
    """A member's end of its connection: a MemberTransport in virtual time."""

    def __init__(self, network: SimulatedNetwork, member: int, name: bytes) -> None:
        self.member = member
        self._network = network
        self._inbox: Mailbox[Frames] = Mailbox(network.world)
        self._before = Traffic(0, 0, 0, 0.0)
        self._open(name)

    def _open(self, name: bytes, *, at_once: bool = True) -> None:
        """A new connection, under this name; the hub knows of it `at_once`."""
        self.name = name
        self.connections = 1
        """As of Reconnecting."""
        up, down = self._network.paths(self.member)
        world, congestion = self._network.world, self._network.congestion
        hub = self._network.hub
        self.up = _Stream(world, up, down, congestion, lambda frames: hub.take(name, frames))
        self.down = _Stream(world, down, up, congestion, self._inbox.put)
        if at_once:
            self._network.add(self)

    def reconnect(self) -> None:
        """See Reconnecting."""
        self._break()
        self._network.forget(self.name)
        self._open(self._network.new_name(self.member))
        self._greet()

    def hub_is_back(self) -> None:
        """The hub's machine has started again: ZeroMQ connects anew, under the same name. What was
        under way is lost."""
        self.cut()

    def cut(self) -> None:
        """The connection breaks off, and both ends know it; ZeroMQ makes another under the same
        name. What was under way is lost, and what the hub had queued; what was queued here is
        not."""
        waiting, before = self.up.unbegun(), self.connections
        self._break()
        self._network.hub.forget(self.name)
        self._open(self.name, at_once=False)
        self.connections = before
        self._greet()
        for frames in waiting:
            self.up.send(frames, wire_bytes(frames))
        up, world = self.up, self._network.world
        world.at(world.now + HANDSHAKES * up.window.rtt, lambda: self._stands(up))

    def _stands(self, up: _Stream) -> None:
        if up is self.up and not up.cut:
            self.connections += 1
            self._network.add(self)

    def damage(self, upwards: bool) -> None:
        """The next message on this way arrives damaged, and whoever gets it breaks off. A hub
        closes its connection, and ZeroMQ makes another; a member's ZeroMQ gives up, and it takes
        the member's own patience to connect again."""
        if upwards:
            self.up.on_damage = self.cut
        else:
            self.down.on_damage = self._give_up

    def _give_up(self) -> None:
        self.up.cut = self.down.cut = True
        self._network.hub.forget(self.name)

    def _break(self) -> None:
        self.up.cut = self.down.cut = True
        self._before = self.traffic()

    def _greet(self) -> None:
        """Nothing leaves before the greetings of TCP and ZMTP have gone to and fro."""
        for stream in (self.up, self.down):
            stream.wait(HANDSHAKES * self.up.window.rtt)

    def send(self, frames: Frames) -> None:
        """See MemberTransport."""
        self._network.tap(self.member, frames)
        self.up.send(frames, wire_bytes(frames))

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        """See MemberTransport; waits in virtual time."""
        frames = self._inbox.get(timeout_s)
        return None if frames is None else list(frames)

    def received_bytes(self) -> int:
        """See MemberTransport."""
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
        """The device is gone without a word: nothing more leaves or reaches it."""
        self.up.cut = self.down.cut = True
        self._network.lose(self.name)

    def die(self) -> None:
        """The process is gone, and its machine's kernel closes the connection."""
        self.up.cut = self.down.cut = True
        self._network.forget(self.name)


class HubWire:
    """The hub's end of all connections: a HubTransport in virtual time.

    The hub takes messages one after the other, and `message_s` for each.
    """

    def __init__(self, world: World, message_s: float) -> None:
        self._world = world
        self._message_s = message_s
        self.down = False
        self.busy_s = 0.0
        """Seconds that taking messages has cost."""
        self._inbox: Mailbox[tuple[bytes, Frames]] = Mailbox(world)
        self._members: dict[bytes, MemberWire] = {}
        self._dead: dict[bytes, int] = {}
        self._cached: tuple[Frames, int] | None = None

    def add(self, wire: MemberWire) -> None:
        """A member has connected."""
        self._members[wire.name] = wire

    def forget(self, name: bytes) -> None:
        """A member has closed its connection."""
        self._members.pop(name, None)

    def take(self, sender: bytes, frames: Frames) -> None:
        """A message has arrived; nobody takes it where the hub is not running."""
        if not self.down:
            self._inbox.put((sender, frames))

    def crash(self) -> None:
        """The hub's process is gone, and with it what had arrived and its connections."""
        self.down = True
        self._inbox = Mailbox(self._world)
        self._members.clear()
        self._dead.clear()

    def restart(self) -> None:
        """It is there again."""
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

    def lose(self, name: bytes) -> None:
        """A member has lost power."""
        self._dead.setdefault(name, self._world.now)

    def traffic(self) -> Traffic:
        """Sums over all connections, as HubSocket counts them."""
        wires = self._members.values()
        return Traffic(
            sum(wire.down.sent_bytes for wire in wires),
            sum(wire.up.received_bytes for wire in wires),
            sum(wire.down.repeated_bytes for wire in wires),
            max((wire.down.window.rtt / SECOND for wire in wires), default=0.0),
        )

    def close(self) -> None:
        """See HubTransport."""


class SimulatedNetwork:
    """All links of a fleet: member i behind `profiles[i]`, sites behind a shared uplink each.

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
    ) -> None:
        self.world = world
        self.congestion = congestion
        self.hub = HubWire(world, message_s)
        self.tap: Callable[[int, Frames], None] = lambda member, frames: None
        """Called with each message that a member hands over."""
        number = iter(range(seed * 1_000_000, seed * 1_000_000 + 1_000_000, 2))
        coarse = len(profiles) >= COARSE_FROM
        self._train_bytes = MSS * (COARSE_TRAIN_SEGMENTS if coarse else TRAIN_SEGMENTS)
        self._access = [self._pair(profile, number) for profile in profiles]
        uplinks = [(site, self._pair(site.uplink, number)) for site in sites]
        self._uplink = {member: pair for site, pair in uplinks for member in site.members}
        self._wires: dict[bytes, MemberWire] = {}
        self._schedule = Schedule(faults)
        self._down_since: dict[int, int] = {}
        self._joined = 0

    @staticmethod
    def _pair(profile: Profile, number: Iterator[int]) -> tuple[Way, Way]:
        profile.refuse_training()
        up, down = profile.up, profile.down
        return Way.make(up, next(number), 0), Way.make(down, next(number), 0)

    def paths(self, member: int) -> tuple[_Path, _Path]:
        """Up and down, between a member and the hub."""
        up, down = self._access[member]
        shared = self._uplink.get(member)
        if shared is None:
            return _Path((up,), self._train_bytes), _Path((down,), self._train_bytes)
        ways_up, ways_down = (up, shared[0]), (shared[1], down)
        return _Path(ways_up, self._train_bytes), _Path(ways_down, self._train_bytes)

    def connect(self, member: int) -> MemberWire:
        """A new connection of this member, after the round trips that TCP and ZMTP need."""
        wire = MemberWire(self, member, self.new_name(member))
        up, down = self.paths(member)
        rtt = up.mean_delay + down.mean_delay
        for _ in range(HANDSHAKES):
            for window in (wire.up.window, wire.down.window):
                window.sent(HANDSHAKE_BYTES, self.world.now)
                window.acked(HANDSHAKE_BYTES, self.world.now + rtt, rtt)
            self.world.sleep(rtt / SECOND)
        return wire

    def new_name(self, member: int) -> bytes:
        """What a new connection of this member is called."""
        self._joined += 1
        return b"m%d-%d" % (member, self._joined)

    def add(self, wire: MemberWire) -> None:
        """A connection has been opened."""
        self._wires[wire.name] = wire
        if not self.hub.down:
            self.hub.add(wire)

    def forget(self, name: bytes) -> None:
        """A connection has been closed."""
        self._wires.pop(name, None)
        self.hub.forget(name)

    def lose(self, name: bytes) -> None:
        """A member has lost power."""
        self._wires.pop(name, None)
        self.hub.lose(name)

    def restart_hub(self) -> None:
        """The hub's machine is up again: everyone's connection is made anew."""
        self.hub.restart()
        for wire in list(self._wires.values()):
            wire.hub_is_back()

    def strike(self, fault: Fault) -> None:
        """Let something go wrong from now on, for as long as the fault says."""
        self._change(fault, True)
        when = self.world.now + round(fault.for_s * SECOND)
        self.world.at(when, lambda: self._change(fault, False))

    def start_faults(self) -> None:
        """Training begins: the clock of the faults' schedule starts."""
        start = self.world.now
        for seconds, fault, begins in self._schedule.changes():
            when = start + round(seconds * SECOND)
            self.world.at(when, lambda f=fault, b=begins: self._change(f, b))  # type: ignore[misc]

    def _change(self, fault: Fault, begins: bool) -> None:
        self._schedule.switch(fault, begins)
        for member, ways in enumerate(self._access):
            for way in ways:
                way.model.down = self._schedule.cut_off(member)
                way.model.set_rate(self._schedule.rate_share(member))
            self._mind_outage(member, ways[0].model.down)

    def _mind_outage(self, member: int, down: bool) -> None:
        """TCP repeats what an outage took, and after SILENCE_S gives up at both ends."""
        since = self._down_since.get(member)
        if down and since is None:
            began = self._down_since[member] = self.world.now
            when = began + SILENCE_S * SECOND
            self.world.at(when, lambda: self._give_up(member, began))
        elif not down and since is not None:
            del self._down_since[member]
            outage = self.world.now - since
            for wire in self._wires_of(member):
                if outage >= SILENCE_S * SECOND:
                    wire.cut()
                else:
                    wire.up.recover(outage)
                    wire.down.recover(outage)

    def _give_up(self, member: int, began: int) -> None:
        if self._down_since.get(member) == began:
            for wire in self._wires_of(member):
                self.hub.forget(wire.name)

    def _wires_of(self, member: int) -> list[MemberWire]:
        return [wire for wire in self._wires.values() if wire.member == member]
