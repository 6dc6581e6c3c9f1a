"""The process of backend `stream`: a TCP proxy in the place of each member's link to each hub.

`backends` runs this module through `worker`. It is for machines without namespaces and approximate:
it sees bytes, not packets. Each direction of a connection is

    read -> virtual congestion window -> queue and rate -> delay -> write

and a loss costs what it costs TCP: a smaller window and a stall of one round trip. One thread,
epoll and one timerfd. Does not import torch or zmq.
"""

from __future__ import annotations

import heapq
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgetrain.fleet.networks.emulation import linux
from edgetrain.fleet.networks.emulation.lateness import Lateness
from edgetrain.fleet.networks.emulation.travel import direction_from_json, faults_from_json
from edgetrain.fleet.networks.emulation.worker import Parent
from edgetrain.fleet.networks.faults import Fault, FaultSchedule
from edgetrain.fleet.networks.links.fluid import HEADERS, Way
from edgetrain.fleet.networks.links.window import MSS, Window, send_limit_bytes
from edgetrain.fleet.networks.nodes import LEAD

_RECEIVE_LIMIT = 16 << 20  # bytes that may wait for the receiver to read
_SOCKET_BUFFER = 1 << 20  # small enough that the window limits, large enough for gigabits
_CHUNKS_A_TURN = 4
_CONNECT_SECONDS = 0.2
_IDLE_SECONDS = 0.4
_now = time.monotonic_ns


class Pipe:
    """One direction of one connection: its congestion window, and the chunks in flight."""

    def __init__(self, ends: tuple[socket.socket, socket.socket], way: Way, back: Way) -> None:
        self.source, self.sink = ends
        self.way, self.back = way, back
        self.window: Window | None = None
        self.waiting = 0  # bytes read and not yet written
        self.queue: deque[tuple[int, memoryview | None]] = deque()
        # (when, bytes, when sent, time they took on the line)
        self.acks: deque[tuple[int, int, int, int]] = deque()
        self.last = 0
        self.reading = True
        self.blocked = False
        self.freed = 0  # when the receiver last became ready to read
        self.ended = False

    def room(self, now: int) -> int:
        """Return the bytes that may enter now; 0 means to wait for an acknowledgement."""
        window = self.window
        while window is not None and self.acks and self.acks[0][0] <= now:
            at, count, sent, spread = self.acks.popleft()
            window.acked(count, at, at - sent, spread)
        if self.waiting >= _RECEIVE_LIMIT:
            return 0
        if window is None:
            return _RECEIVE_LIMIT - self.waiting
        room = window.room(now)
        return room if room >= MSS or not window.in_flight else 0

    def enter(self, data: memoryview, now: int) -> int:
        """Send a chunk; return when it is due at the other end."""
        way, size = self.way, len(data)
        segments = -(-size // MSS)
        lost = way.losses.within(size, now)
        rate = way.model.rate
        overflow = rate is not None and rate.full(now)
        arrival = way.model.arrival(now, size + segments * HEADERS, segments)
        stall = 0
        if self.window is not None:
            self.window.sent(size, now)
            spread = int(max(size - MSS, 0) * way.ns_per_byte)
            self.acks.append((arrival + self.back.delay_ns(arrival), size, now, spread))
            if lost or overflow:
                stall = way.repair(self.window, lost, now)
        self.last = max(arrival + stall, self.last)
        self.queue.append((self.last, data))
        self.waiting += size
        return self.last

    def end(self, now: int) -> int:
        """Send the end of the stream, after all data; return when it is due at the other end."""
        self.ended = True
        self.last = max(now + self.way.mean_delay, self.last)
        self.queue.append((self.last, None))
        return self.last


class Poller:
    """epoll with an event mask and an owner per descriptor."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._masks: dict[int, int] = {}
        self.owners: dict[int, Any] = {}

    def watch(self, fd: int, bit: int, wanted: bool) -> None:
        """Set or clear one event of a descriptor; its first event registers it."""
        old = self._masks.get(fd, 0)
        new = old | bit if wanted else old & ~bit
        if new == old:
            return
        if fd not in self._masks:
            self._epoll.register(fd, new)
        else:
            self._epoll.modify(fd, new)
        self._masks[fd] = new

    def unregister(self, fd: int) -> None:
        if self._masks.pop(fd, None) is not None:
            self._epoll.unregister(fd)
        self.owners.pop(fd, None)

    def poll(self, seconds: float) -> list[tuple[int, int]]:
        return self._epoll.poll(seconds)


@dataclass(eq=False)
class Connection:
    """Both directions of one proxied connection."""

    up: Pipe
    down: Pipe
    member: int

    @property
    def sockets(self) -> tuple[socket.socket, socket.socket]:
        return self.up.source, self.up.sink


class Proxy:
    """All links of an emulation in one process."""

    def __init__(self, config: Mapping[str, Any], parent: Parent) -> None:
        self._parent = parent
        self._hubs = [(str(host), int(port)) for host, port in config["hubs"]]
        self._congestion = str(config["congestion"])
        self._limit = send_limit_bytes()
        self._poller = Poller()
        self._timer = linux.Timer()
        self._lead = linux.Lead(self._timer)
        self._heap: list[tuple[int, int, Callable[[int], None]]] = []
        self._serial = 0
        self._start = _now()
        made: list[tuple[Way, Way]] = []
        for number, link in enumerate(config["links"]):
            seed = int(config["seed"]) * 10_000 + 4 * number
            made.append(
                (
                    Way.make(direction_from_json(link["up"]), seed, self._start),
                    Way.make(direction_from_json(link["down"]), seed + 2, self._start),
                )
            )
        self._ways = made
        self._schedule = FaultSchedule(faults_from_json(config["faults"]))
        # Place p is where member p % members connects to hub p // members.
        self._listeners = [self._listen(p) for p in range(len(self._ways) * len(self._hubs))]
        self._connections: set[Connection] = set()
        self._lateness = Lateness()
        self._carried = 0
        self._rang = False  # the timer woke us: the next delivery corrects the lead
        self.addresses = [s.getsockname()[:2] for s in self._listeners]

    def _listen(self, place: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        listener.setblocking(False)
        self._poller.owners[listener.fileno()] = place
        self._poller.watch(listener.fileno(), select.EPOLLIN, True)
        return listener

    def run(self) -> None:
        """Carry traffic until the parent has gone."""
        poller, timer, heap = self._poller, self._timer, self._heap
        poller.watch(timer.fd, select.EPOLLIN, True)
        poller.watch(self._parent.fd, select.EPOLLIN, True)
        while not self._parent.gone():
            seconds = _IDLE_SECONDS
            if heap:
                timer.arm(heap[0][0] - self._lead.ns)
            self._rang = False
            for fd, events in poller.poll(seconds):
                if fd == timer.fd:
                    timer.clear()
                    self._rang = True
                elif fd == self._parent.fd:
                    self._answer_commands()
                else:
                    self._dispatch(fd, events)
            horizon = _now() + self._lead.ns
            while heap and heap[0][0] <= horizon:
                at, _, action = heapq.heappop(heap)
                action(at)
                horizon = _now() + self._lead.ns

    def _call_at(self, when: int, action: Callable[[int], None]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, action))

    def _answer_commands(self) -> None:
        for command in self._parent.commands():
            if command.startswith("start "):
                self._begin_faults(int(command.split()[1]))
            self._parent.answer(self.report())

    def report(self) -> dict[str, Any]:
        usage = time.process_time()
        return {**self._lateness.report(), "carried_bytes": self._carried, "cpu_s": usage}

    # -- connections ------------------------------------------------------------------------------

    def _dispatch(self, fd: int, events: int) -> None:
        owner = self._poller.owners.get(fd)
        if isinstance(owner, int):
            client, _ = self._listeners[owner].accept()
            up, down = self._ways[owner % len(self._ways)]
            now = _now()
            handshake = up.delay_ns(now) + down.delay_ns(now)
            self._call_at(now + handshake, lambda at: self._connect(client, owner, at))
        elif owner is not None:
            connection, reads, writes = owner
            if events & select.EPOLLOUT:
                writes.blocked, writes.freed = False, _now()
                self._poller.watch(fd, select.EPOLLOUT, False)
                self._deliver(connection, writes)
            if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._read(connection, reads, broken=bool(events & select.EPOLLERR))

    def _connect(self, client: socket.socket, place: int, at: int) -> None:
        hub, member = divmod(place, len(self._ways))
        up, down = self._ways[member]
        if up.model.down or down.model.down:
            self._call_at(at + 1_000_000_000, lambda later: self._connect(client, place, later))
            return
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
        server.settimeout(_CONNECT_SECONDS)  # a hub on this machine answers at once or never
        try:
            server.connect(self._hubs[hub])
        except OSError:
            client.close()
            server.close()
            return
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(
            self._pipe(client, server, up, down), self._pipe(server, client, down, up), member
        )
        self._connections.add(connection)
        owners = self._poller.owners
        owners[client.fileno()] = (connection, connection.up, connection.down)
        owners[server.fileno()] = (connection, connection.down, connection.up)
        for end in (client, server):
            self._poller.watch(end.fileno(), select.EPOLLIN, True)

    def _pipe(self, source: socket.socket, sink: socket.socket, way: Way, back: Way) -> Pipe:
        pipe = Pipe((source, sink), way, back)
        if self._congestion != "none":
            rtt = way.mean_delay + back.mean_delay
            restarts, first = way.figures.slow_start_after_idle, way.figures.first_window
            pipe.window = Window(self._congestion, rtt, self._limit, restarts, first)
        return pipe

    def _read(self, connection: Connection, pipe: Pipe, broken: bool = False) -> None:
        """Read what the window has room for; at most a few chunks, because others wait too."""
        for _ in range(_CHUNKS_A_TURN):
            if pipe.ended:
                return
            now = _now()
            room = pipe.room(now)
            if not room and not broken:
                self._pause(connection, pipe)
                return
            try:
                data = pipe.source.recv(min(max(room, 1), pipe.way.chunk))
            except BlockingIOError:
                return
            except OSError:
                self._drop(connection)
                return
            if not data:
                self._poller.watch(pipe.source.fileno(), select.EPOLLIN, False)
                due = pipe.end(now)
            else:
                due = pipe.enter(memoryview(data), now)
            self._call_at(due, lambda at: self._deliver(connection, pipe))

    def _pause(self, connection: Connection, pipe: Pipe) -> None:
        if pipe.reading:
            pipe.reading = False
            self._poller.watch(pipe.source.fileno(), select.EPOLLIN, False)
        if pipe.acks:
            self._call_at(pipe.acks[0][0], lambda at: self._resume(connection, pipe))

    def _resume(self, connection: Connection, pipe: Pipe) -> None:
        if connection not in self._connections or pipe.reading or pipe.ended:
            return
        if pipe.room(_now()):
            pipe.reading = True
            self._poller.watch(pipe.source.fileno(), select.EPOLLIN, True)
            self._read(connection, pipe)
        else:
            self._pause(connection, pipe)

    def _deliver(self, connection: Connection, pipe: Pipe) -> None:
        queue, horizon = pipe.queue, _now() + self._lead.ns
        while queue and queue[0][0] <= horizon and not pipe.blocked:
            if pipe.way.model.down:
                return
            due, data = queue[0]
            try:
                done = self._write(pipe, data)
            except OSError:
                self._drop(connection)
                return
            if done is not None:
                queue[0] = (due, done)
                pipe.blocked = True
                self._poller.watch(pipe.sink.fileno(), select.EPOLLOUT, True)
                return
            queue.popleft()
            horizon = _now()
            if due > pipe.freed:  # waiting for a slow receiver does not count as lateness
                self._lateness.add(horizon - due)
                if self._rang:
                    self._lead.learn(horizon - due)
                    self._rang = False
            horizon += self._lead.ns
        if not pipe.reading and not pipe.acks:
            self._resume(connection, pipe)
        up, down = connection.up, connection.down
        if up.ended and down.ended and not up.queue and not down.queue:
            self._drop(connection)

    def _write(self, pipe: Pipe, data: memoryview | None) -> memoryview | None:
        """Write data, or the end of the stream if it is None; return what is left, or None."""
        if data is None:
            pipe.sink.shutdown(socket.SHUT_WR)
            return None
        try:
            sent = pipe.sink.send(data)
        except BlockingIOError:
            return data
        pipe.waiting -= sent
        self._carried += sent
        return data[sent:] if sent < len(data) else None

    def _drop(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        for end in connection.sockets:
            self._poller.unregister(end.fileno())
            end.close()
        for pipe in (connection.up, connection.down):
            pipe.ended = True
            pipe.queue.clear()
            pipe.acks.clear()

    # -- faults -----------------------------------------------------------------------------------

    def _begin_faults(self, start: int) -> None:
        for seconds, fault, begins in self._schedule.changes():
            at = start + int(seconds * 1e9)
            self._call_at(at, lambda _, f=fault, b=begins: self._change(f, b))  # type: ignore[misc]

    def _change(self, fault: Fault, begins: bool) -> None:
        self._schedule.switch(fault, begins)
        for member, ways in enumerate(self._ways):
            for way in ways:
                way.model.down = self._schedule.apart(member, LEAD)
                way.model.set_rate(self._schedule.rate_share(member))
        if begins:
            return
        for connection in list(self._connections):
            for pipe in (connection.up, connection.down):
                self._recover(connection, pipe, fault)

    def _recover(self, connection: Connection, pipe: Pipe, fault: Fault) -> None:
        """Continue after an outage at TCP's next retransmission; each waits twice as long."""
        if pipe.way.model.down or not fault.stops_traffic:
            return
        timeout = pipe.window.timeout if pipe.window else 0
        outage = int(fault.for_s * 1e9)
        wait, at = timeout, timeout
        while wait and at < outage:
            wait *= 2
            at += wait
        if pipe.window and pipe.queue:
            pipe.window.collapse()
        when = _now() + max(at - outage, 0)
        self._call_at(when, lambda _: self._deliver(connection, pipe))


def main() -> None:
    linux.fine_timers()
    parent = Parent()
    config = parent.config()
    priority = linux.raise_priority()
    with parent.reporting("the stream proxy"):
        proxy = Proxy(config, parent)
    parent.answer({"addresses": proxy.addresses, "priority": priority})
    proxy.run()


if __name__ == "__main__":
    main()
