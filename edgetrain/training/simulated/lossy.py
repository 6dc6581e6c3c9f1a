"""One direction of a connection in virtual time, acknowledgement by acknowledgement.

For ways that lose packets, and for all ways of a small fleet. What a loss costs depends
on the segment: the segments behind it report one in the middle; nothing reports the last one. So a
loss splits what was sent together into pieces, each piece that arrives is acknowledged separately,
and `links.loss_recovery` decides what is sent again, and when. A full queue loses segments, too. In
a `fine` path a piece is what one acknowledgement is for, so that the window grows, slow start ends
and a receiver opens its window when they do in Linux.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edgetrain.fleet.networks.links.fluid import HEADERS, Way
from edgetrain.fleet.networks.links.loss_recovery import NEVER, Received, Recovery, Segments
from edgetrain.fleet.networks.links.model import ETHERNET_BYTES
from edgetrain.fleet.networks.links.receive_window import ReceiveWindow
from edgetrain.fleet.networks.links.window import MOST_BURST, MSS, TURN_BYTES, WholeWindow
from edgetrain.training.simulated.streams import SEND_LIMIT_BYTES, Frames, Path, Stream
from edgetrain.training.simulated.virtual import World

QUICK_ACKS = 16
"""The first segments of a connection are acknowledged one by one: TCP_MAX_QUICKACKS."""

SUPER_PACKET_NS = 1_000_000
"""Of a sender's pacing, in a super-packet (sk_pacing_shift); and of the line's time, where the
emulation cuts them."""

PIECES = 512
"""A longer message, with more pieces than this, is cut into coarser ones."""

ACKNOWLEDGEMENT_BYTES = HEADERS + ETHERNET_BYTES
"""Bytes of an acknowledgement without data."""

_FULL_FRAME = MSS + HEADERS + ETHERNET_BYTES


@dataclass(slots=True, eq=False)
class Acknowledgement:
    """The receiver's acknowledgement of a piece."""

    leaves: int
    """When, in nanoseconds."""
    piece: Segments
    spread: int
    """Nanoseconds between the first and the last acknowledgement of this piece."""
    offered: int
    """The first byte that may not be sent."""
    below: int
    """All bytes before this one have arrived."""
    at: int = 0
    """When it comes back to the sender."""


class LossyStream(Stream):
    """A Stream of pieces, which may be lost, by the link or by a full queue, and are sent again."""

    def __init__(
        self,
        world: World,
        path: Path,
        back: Path,
        congestion: str,
        deliver: Callable[[Frames], None],
    ) -> None:
        super().__init__(world, path, back, congestion, deliver)
        window = WholeWindow(
            congestion, self.window.rtt, SEND_LIMIT_BYTES, path.restarts, path.first_window
        )
        self.fine = path.fine
        self._coarse = 0
        line = SUPER_PACKET_NS / self._ns_per_byte if self._ns_per_byte else MOST_BURST
        self._burst = min(line, MOST_BURST)
        self._packet = max(int(self._burst) // MSS, 1) * MSS
        self.window = window
        self._recovery = Recovery(window)
        self._arrived = Received()
        self._ends: deque[tuple[int, Frames]] = deque()
        self._heard: deque[Acknowledgement] = deque()
        self._leaving = 0  # acknowledgements that have not entered the way back yet
        self._rides = False
        self._wakes_at = NEVER
        self._receiver = ReceiveWindow(self.window.rtt, SEND_LIMIT_BYTES, path.receive_kb)
        self._offered = self._receiver.offer  # the first byte that may not be sent
        self._quick = QUICK_ACKS

    def send(self, frames: Frames, size: int) -> None:
        self._coarse = size // PIECES // MSS * MSS
        super().send(frames, size)

    def _pump(self) -> None:
        """Handle acknowledgements and timeouts that are due, then send what may be sent."""
        now, recovery, heard = self._world.now, self._recovery, self._heard
        if now < self._opens:
            return
        shut = self.cut or (self._path.down and not self.fine)
        while heard and heard[0].at <= now:
            told = heard.popleft()
            recovery.cover(told.below)
            recovery.acked(told.piece, told.at, told.spread)
            self._offered = max(self._offered, told.offered)
            # Each that was waited for lets go what it has room for: what a loss cuts is what is
            # under way by then. Of the others, heard long ago, the last may end in a pause.
            if told.at == now and not shut:
                self._send_all(now)
        self._waits = False
        if shut:
            return
        while recovery.missing and recovery.deadline <= now:
            recovery.expire(now)
            self._probe(now)
        self._send_all(now)
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Wake up when there may be room, an acknowledgement, or a timeout."""
        if self._waits or self._recovery.missing:
            at = self._recovery.deadline if self._recovery.missing else NEVER
            if self._heard:
                at = min(at, self._heard[0].at)
            if at < self._wakes_at:
                self._wakes_at = at
                self._world.at(at, lambda: self._wake(at))

    def _wake(self, at: int) -> None:
        if at == self._wakes_at:
            self._wakes_at = NEVER
            self._pump()

    def _send_all(self, now: int) -> None:
        before = self.sent_bytes
        while self._send_some(now):
            if self.fine and self.sent_bytes - before >= TURN_BYTES:
                self._world.at(now, self._pump)
                return
        if self.sent_bytes > before:
            self._recovery.window.validate(now)

    def _send_some(self, now: int) -> bool:
        """Send one piece, lost ones first; False if none may be sent."""
        recovery, window = self._recovery, self.window
        if not self._backlog and not recovery.lost:
            return False
        room = window.room(now) if recovery.idle else window.space()
        if room < MSS and window.in_flight:
            return self._blocked()
        if recovery.lost:
            self._repeat(recovery.resend(min(room, self._unit()), now), now)
            return True
        message = self._backlog[0]
        offered = self._offered - recovery.end
        if offered < min(MSS, message.next_write) and window.in_flight:
            return self._blocked()
        if self.fine:
            self._send_new(min(room, self._unit(), max(offered, MSS)), now)
        else:
            most = self._chunk if room >= message.left else self._path.train_bytes
            self._send_new(min(room, most), now)
        return True

    def _blocked(self) -> bool:
        self._waits = True
        if self._backlog:
            # While it waits, the next write fills up the last segment.
            self._backlog[0].batch = 0
        return False

    def _unit(self) -> int:
        """Return the bytes of segments that leave, and are acknowledged, together."""
        if not self.fine:
            return self._path.train_bytes
        return max(self._together(), self._coarse)

    def _together(self) -> int:
        """Return what one acknowledgement is for: two segments, or a super-packet. Linux makes
        super-packets of a millisecond of its pacing; a slower line cuts them."""
        window = self.window
        pace = (2 if window.size < window.threshold / 2 else 1.2) * window.size / window.rtt
        burst = min(pace * SUPER_PACKET_NS, self._burst)
        return max(int(burst) // MSS, 2) * MSS

    def _send_new(self, most: int, now: int) -> None:
        """Send the next bytes of the first message: whole segments, except at a write's end."""
        message = self._backlog[0]
        write = message.next_write if self.fine else message.left
        size = write if write <= most else max(most // MSS, 1) * MSS
        size = min(size, write)
        first = message.batch > 0
        message.take(size)
        if not message.left:
            self._backlog.popleft()
            self._ends.append((self._recovery.end + size, message.frames))
        self.sent_bytes += size
        self._through(0, now, self._recovery.send(size, now))
        if first and not message.batch:
            self._recovery.window.validate(now)

    def _repeat(self, piece: Segments, now: int) -> None:
        size = piece.end - piece.start
        self.sent_bytes += size
        self.repeated_bytes += size
        self._through(0, now, piece)

    def _probe(self, now: int) -> None:
        """Send a tail loss probe if one is due, whatever the window says."""
        if not self._recovery.probing:
            return
        if self._backlog:
            self._send_new(MSS, now)
            return
        piece = self._recovery.probe(now)
        if piece is not None:
            self._repeat(piece, now)

    def _through(self, stage: int, now: int, piece: Segments) -> None:  # type: ignore[override]
        """Let a piece enter a way. Pieces enter shared ways in the order of time."""
        way = self._path.ways[stage]
        if self.fine and not stage and self._path.down:
            self._recovery.vanish(piece)
            self._look_ahead()
            return
        for part in self._sift(way, now, piece):
            size, segments = part.end - part.start, part.count
            arrival = way.model.arrival(now, size + segments * HEADERS, segments)
            if stage + 1 == len(self._path.ways):
                self._reach(part, arrival)
            else:
                self._enter_next(stage + 1, arrival, part)

    def _enter_next(self, stage: int, at: int, piece: Segments) -> None:
        self._world.at(at, lambda: self._through(stage, at, piece))

    def _sift(self, way: Way, now: int, piece: Segments) -> Iterator[Segments]:
        """Split a piece into the parts that enter a way: others are lost, or the queue is full."""
        segments, rate = piece.count, way.model.rate
        losses = way.losses.places(segments, now)
        room = segments if rate is None else rate.room(now, _FULL_FRAME)
        if not losses and room >= segments:
            yield piece
            return
        kept = _kept(segments, losses, room)
        begins = [place for place in range(1, segments) if kept[place] != kept[place - 1]]
        parts = self._recovery.split(piece, [piece.start + place * MSS for place in begins])
        for part, place in zip(parts, [0, *begins], strict=True):
            if not kept[place]:
                self._recovery.vanish(part)
        self._look_ahead()
        yield from (part for part, place in zip(parts, [0, *begins], strict=True) if kept[place])

    def _reach(self, piece: Segments, arrival: int) -> None:
        """A piece arrives at `arrival`: deliver messages that are whole, and acknowledge it."""
        start, end, arrived = piece.start, piece.end, self._arrived
        if self.fine and self._is_quick() and end - start > self._packet:
            behind = range(start + self._packet, end, self._packet)
            for part in self._recovery.split(piece, list(behind)):
                self._reach(part, arrival - int((end - part.end) * self._ns_per_byte))
            return
        together = self._together() if self.fine else MSS
        spread = int(max(end - start - together, 0) * self._ns_per_byte)
        before = arrived.next
        advanced = arrived.add_range(start, end)
        self._receiver.received(arrived.next - before, arrival)
        self._quick -= 1
        offered = arrived.next + self._receiver.offer
        told = Acknowledgement(arrival, piece, spread, offered, arrived.next)
        if self._leaving or self._meets_data():
            self._leaving += 1
            self._world.at(arrival, lambda: self._enter_way_back(told))
        else:
            self._hear(told)
        self._last = max(arrival, self._last)
        if advanced:
            self._deliver_whole(before, self._last)

    def _meets_data(self) -> bool:
        """Whether the other end is sending as well, so that acknowledgements queue behind its data,
        as the queue is when they enter it."""
        other = self.answers
        return self.fine and other is not None and other.sends

    def _enter_way_back(self, told: Acknowledgement) -> None:
        """An acknowledgement leaves while the other end sends: it takes its place on the line,
        unless it rides on a segment of data, as about every second one does."""
        self._leaving -= 1
        if self.cut:
            return
        if self._path.down:
            self._recovery.vanish(told.piece)
            self._look_ahead()
            return
        self._rides = not self._rides
        self._hear(told, 0 if self._rides else ACKNOWLEDGEMENT_BYTES)

    def _hear(self, told: Acknowledgement, size: int = 0) -> None:
        """Let the sender hear of it once it has come back."""
        told.at = self._back.ack_delay(told.leaves, size)
        if self._heard:  # acknowledgements do not overtake each other
            told.at = max(told.at, self._heard[-1].at)
        self._heard.append(told)
        if len(self._heard) == 1:
            self._look_ahead()

    def _is_quick(self) -> bool:
        """Whether every packet is acknowledged at once: while the offered window grows, before
        this end has answered."""
        if self.answers is not None and self.answers.sent_bytes > MSS:
            return False
        return self._quick > 0 or self._receiver.grows

    def _deliver_whole(self, before: int, at: int) -> None:
        """Deliver messages whose last byte is there now; `before`: the next byte missing before."""
        ends = self._ends
        while ends and ends[0][0] <= self._arrived.next:
            end, frames = ends.popleft()
            self._arrive_at(at, frames, end - before)
            before = end
        self.received_bytes += self._arrived.next - before

    def _arrive_at(self, at: int, frames: Frames, size: int) -> None:
        self._world.at(at, lambda: self._arrive(frames, size))

    def begin_outage(self) -> None:
        """The link goes down. What is on its way arrives; its acknowledgements do not leave."""
        if not self.fine:
            return
        for told in self._heard:
            if told.leaves > self._world.now:
                self._world.at(told.leaves, lambda told=told: self._lose_acknowledgement(told))  # type: ignore[misc]

    def _lose_acknowledgement(self, told: Acknowledgement) -> None:
        if not self._path.down or self.cut or told not in self._heard:
            return
        self._heard.remove(told)
        self._recovery.vanish(told.piece)
        self._look_ahead()

    def recover(self, outage_ns: int) -> None:
        """See Stream. What a fine path loses in an outage its sender finds out by its timers."""
        if not self.fine:
            super().recover(outage_ns)

    def count_outage(self, outage_ns: int) -> int:
        """See Stream. A fine path has counted it."""
        return 0 if self.fine else super().count_outage(outage_ns)

    def _holds(self) -> bool:
        return False if self.fine else super()._holds()

    def _go_on(self) -> None:
        """The link is up again: retransmit what the outage took, one segment first."""
        if self._recovery.missing and not self._path.down:
            self._recovery.time_out(self._world.now)
        super()._go_on()


def _kept(segments: int, losses: list[int], room: int) -> list[bool]:
    """For each segment, whether it enters: it is not lost, and the queue has room for it."""
    kept = [True] * segments
    for place in losses:
        kept[place] = False
    for place in range(segments):
        if kept[place]:
            room -= 1
            kept[place] = room >= 0
    return kept
