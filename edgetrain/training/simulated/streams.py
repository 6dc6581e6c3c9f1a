"""One direction of a connection in virtual time, over ways that lose nothing but to a full queue.

A fluid behind a congestion window (`links.fluid`, `links.window`) passes one link after the other.
`lossy` models ways that lose packets; `wires` has connections and their ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgetrain.fleet.networks.links.fluid import HEADERS, Way
from edgetrain.fleet.networks.links.loss_recovery import LONGEST_TIMEOUT_NS
from edgetrain.fleet.networks.links.window import MSS, Window
from edgetrain.training.simulated.virtual import World
from edgetrain.vectors.vector import Buffer

SEND_LIMIT_BYTES = 4 << 20
"""Unacknowledged bytes of one connection, at most: the default of Linux (tcp_wmem)."""

BATCH_BYTES = 8192
"""ZeroMQ gathers this much for its first write of a message; the rest is a second write."""

Frames = Sequence[Buffer]


def wire_bytes(frames: Frames) -> int:
    """Bytes of a message in the stream: its frames, each behind ZMTP 3.1's flags and length."""
    total = 0
    for frame in frames:
        size = memoryview(frame).nbytes
        total += size + (2 if size < 256 else 9)
    return total


@dataclass
class Queued:
    """A message to be sent, of which `left` bytes have not been put on the way yet."""

    frames: Frames
    left: int
    batch: int = 0
    """Rest of the first write."""

    def __post_init__(self) -> None:
        self.batch = min(self.left, BATCH_BYTES)

    @property
    def next_write(self) -> int:
        """Bytes to the end of the write under way. Its last segment is not filled up with the next
        write (TCP_NODELAY)."""
        return self.batch or self.left

    def take(self, size: int) -> None:
        """Record that `size` bytes have been put on the way."""
        self.left -= size
        self.batch = max(self.batch - size, 0)


@dataclass(eq=False)
class Passage:
    """Whether anything passes between two nodes now: a fault may keep them apart."""

    down: bool = False
    since: int | None = None
    """When the outage that goes on began; None: there is none."""


@dataclass(frozen=True)
class Path:
    """The ways that bytes pass, in order: an access link, uplinks of sites, an access link."""

    ways: tuple[Way, ...]
    train_bytes: int
    fine: bool = False
    """Model every acknowledgement, not trains of `train_bytes`."""
    passage: Passage = field(default_factory=Passage)

    @property
    def mean_delay(self) -> int:
        return sum(way.mean_delay for way in self.ways)

    @property
    def chunk(self) -> int:
        return min(way.chunk for way in self.ways)

    @property
    def loses(self) -> bool:
        """Whether packets may be lost on it other than to a full queue."""
        return any(way.model.loses for way in self.ways)

    @property
    def restarts(self) -> bool:
        """Whether a sender starts slowly after a pause: no link on its way says otherwise."""
        return all(way.figures.slow_start_after_idle for way in self.ways)

    @property
    def first_window(self) -> int:
        """Segments that a sender begins with: the most that a link on its way says."""
        return max(way.figures.first_window for way in self.ways)

    @property
    def receive_kb(self) -> float:
        """The receiver's first buffer: the most that a link on its way says."""
        return max(way.figures.receive_kb for way in self.ways)

    @property
    def down(self) -> bool:
        return self.passage.down

    @property
    def is_bare(self) -> bool:
        """Whether nothing on it takes any time, and nothing is drawn."""
        return all(way.model.passes for way in self.ways)

    def once(self, now: int, timeout: int) -> int:
        """Nanoseconds that losses add until one segment arrives. It is repeated after `timeout`,
        then after twice as long, and so on."""
        late = 0
        while any(way.losses.places(1, now + late) for way in self.ways):
            late += min(timeout, LONGEST_TIMEOUT_NS)
            timeout *= 2
        return late

    def ack_delay(self, now: int, size: int = 0) -> int:
        """When an acknowledgement arrives that leaves at `now`. Its `size` bytes keep the first
        line busy: give them at the time itself, not ahead of it. It reaches the lines behind later:
        what enters them until then must not queue behind it."""
        leaves, rate = now, self.ways[0].model.rate
        for way in self.ways:
            now += way.delay_ns(now)
        if size and rate is not None:
            rate.depart(leaves, size)
        return now


class Stream:
    """One direction of one connection: delivers the messages it was given, in order, later."""

    def __init__(
        self,
        world: World,
        path: Path,
        back: Path,
        congestion: str,
        deliver: Callable[[Frames], None],
    ) -> None:
        self.sent_bytes = self.received_bytes = self.repeated_bytes = 0
        self._world, self._path, self._back = world, path, back
        self._deliver = deliver
        self._chunk = path.chunk
        self._ns_per_byte = max(way.ns_per_byte for way in path.ways)
        self.at_once = path.is_bare and back.is_bare
        """No window ever is the limit: a message is there in the instant in which it is sent."""
        rtt = path.mean_delay + back.mean_delay
        self.window = Window(congestion, rtt, SEND_LIMIT_BYTES, path.restarts, path.first_window)
        self._backlog: deque[Queued] = deque()
        self._acks: deque[tuple[int, int, int, int]] = deque()
        self._last = 0
        self._opens = 0
        self._waits = False
        self._held: deque[tuple[Frames, int]] = deque()
        self.answers: Stream | None = None
        """The other direction of the connection."""
        self.cut = False
        self.on_damage: Callable[[], None] | None = None
        """Called instead of delivering the next message, whose bytes are damaged."""

    def send(self, frames: Frames, size: int) -> None:
        if self.at_once and not (self._backlog or self._waits or self.cut or self._path.down):
            self.sent_bytes += size
            self._world.at(self._world.now, lambda: self._arrive(frames, size))
            return
        self._backlog.append(Queued(frames, size))
        if not self._waits:
            self._pump()

    def wait(self, delay: int) -> None:
        """Send nothing for `delay` nanoseconds."""
        self._opens = self._world.now + delay
        self._waits = True
        self._world.at(self._opens, self._pump)

    @property
    def sends(self) -> bool:
        """Whether bytes wait here, or are on their way."""
        return bool(self._backlog) or self.window.in_flight > 0

    def handle_acknowledgements(self) -> None:
        """Handle those that have arrived: without a message to send nothing waits for them."""
        self._pump()

    def _pump(self) -> None:
        """Send as much as the window has room for."""
        now, window, acks = self._world.now, self.window, self._acks
        if now < self._opens:
            return
        while acks and acks[0][0] <= now:
            at, count, sent, spread = acks.popleft()
            window.acked(count, at, at - sent, spread)
        self._waits = False
        while self._backlog and not self.cut and not self._path.down:
            room = window.room(now)
            message = self._backlog[0]
            if room < MSS and window.in_flight:
                self._waits = True
                message.batch = 0  # while it waits, the next write fills up the last segment
                if acks:
                    self._world.at(acks[0][0], self._pump)
                return
            # Where the window is the limit, acknowledgements come and let go a few at a time.
            most = self._chunk if room >= message.left else self._path.train_bytes
            size = min(max(room - room % MSS, MSS), most, message.next_write)
            message.take(size)
            whole = message.frames if not message.left else None
            if whole is not None:
                self._backlog.popleft()
            self._enter(size, whole)

    def _enter(self, size: int, whole: Frames | None) -> None:
        now = self._world.now
        self.window.sent(-(-size // MSS) * MSS, now)  # TCP counts segments
        self.sent_bytes += size
        self._through(0, now, now, size, whole, 0)

    def _through(
        self, stage: int, now: int, sent: int, size: int, whole: Frames | None, stall: int
    ) -> None:
        """Let a chunk enter a way. Chunks enter shared ways in the order of time."""
        way = self._path.ways[stage]
        segments = -(-size // MSS)
        rate = way.model.rate
        overflow = rate is not None and rate.full(now)
        arrival = way.model.arrival(now, size + segments * HEADERS, segments)
        if overflow:
            stall = max(stall, way.repair(self.window, 0, now))
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
        self._acks.append((acked_at, segments * MSS, sent, spread))
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
        if self._holds():
            self._held.append((frames, size))
        else:
            self._hand_over(frames, size)

    def _holds(self) -> bool:
        """Whether what arrives waits until the link is up again, and for its turn."""
        return bool(self._held) or self._path.down

    def begin_outage(self) -> None:
        """The link goes down."""

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
        """The link is up again after an outage: TCP continues at its next retransmission. Each
        waits twice as long as the one before."""
        at = self.count_outage(outage_ns)
        self.window.collapse()
        self._world.at(self._world.now + max(at - outage_ns, 0), self._go_on)

    def count_outage(self, outage_ns: int) -> int:
        """Count what an outage took, which ends now: TCP sends into it what its window has room
        for, then one segment at each timeout, and all of that again afterwards.

        Returns nanoseconds from the outage's beginning to the first timeout that is not in it.
        """
        timeout = at = self.window.timeout
        timeouts = 0
        while at < outage_ns:
            timeout *= 2
            at += timeout
            timeouts += 1
        waiting = sum(message.left for message in self._backlog)
        lost = max(0, min(self.window.space(), waiting))
        again = lost + timeouts * min(MSS, lost)
        self.sent_bytes += again
        self.repeated_bytes += again
        return at

    def _go_on(self) -> None:
        while self._held and not self._path.down:
            self._hand_over(*self._held.popleft())
        self._pump()
