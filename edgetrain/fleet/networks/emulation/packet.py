"""The process of backend `packet`: real TCP over packets that this process delays.

`backends` runs this module through `worker`. Each member and each hub has a network namespace
(`fabric`), connected to this process (`ring`). A packet goes up the link of its sender, through the
shared uplinks of sites if there are any, and down the link of its receiver (`networks.nodes`,
`model`). One thread, epoll and one timerfd. Does not import torch or zmq.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import itertools
import select
import time
from collections.abc import Mapping, Sequence
from typing import Any

from edgetrain.fleet.networks.emulation import fabric, gso, linux
from edgetrain.fleet.networks.emulation.lateness import Lateness
from edgetrain.fleet.networks.emulation.ring import Port
from edgetrain.fleet.networks.emulation.travel import direction_from_json, faults_from_json
from edgetrain.fleet.networks.emulation.worker import Parent
from edgetrain.fleet.networks.faults import Fault, FaultSchedule
from edgetrain.fleet.networks.links.model import LinkModel, link_seeds
from edgetrain.fleet.networks.nodes import NodeLinks, hub_node
from edgetrain.fleet.networks.profile import BARE, Direction
from edgetrain.fleet.networks.site import Site

_IDLE_SECONDS = 0.4
_PACKETS_A_TURN = 64
# Packets that a receive ring holds, 32 kB each. A message that leaves at once comes in packets of
# two segments if its path is long: 400 kB fill 140 of them before this process can read any.
_HUB_FRAMES, _MEMBER_FRAMES, _FEWEST_FRAMES = 512, 8192, 128
_SLICE_NS = 1_000_000  # of the line's time: super-packets are cut to this size
_WHOLE = 1 << 30
# With this many packets in flight, all that are due within 0.1 ms are sent together.
_BUSY, _BATCH_NS = 64, 100_000
_now = time.monotonic_ns


class Stage:
    """One direction of a link: its model, and the size to which it cuts super-packets."""

    __slots__ = ("harmless", "model", "slice_bytes")

    def __init__(self, way: Direction, seed: int, start: int) -> None:
        self.model = LinkModel(way, seed, start)
        self.harmless = not (self.model.loses or self.model.corrupts or self.model.duplicates)
        rate = way.mean_rate_mbit
        self.slice_bytes = max(int(rate * 1e6 / 8 * _SLICE_NS / 1e9), 1) if rate else _WHOLE


Path = tuple[Stage, ...]


class Network:
    """The links of all hosts, and the stages between any two of them. Host 0 is the lead, host
    i + 1 is member i; other hubs follow."""

    def __init__(self, config: Mapping[str, Any], start: int) -> None:
        seeds = (link_seeds(int(config["seed"]), place) for place in itertools.count())

        def pair(link: Mapping[str, Any]) -> tuple[Stage, Stage]:
            up, down = (direction_from_json(link[way]) for way in ("up", "down"))
            seed_up, seed_down = next(seeds)
            return Stage(up, seed_up, start), Stage(down, seed_down, start)

        self.members = len(config["links"])
        self.access = {member: pair(link) for member, link in enumerate(config["links"])}
        sites = [
            (Site(BARE, tuple(site["members"]), tuple(site["hubs"])), pair(site["uplink"]))
            for site in config["sites"]
        ]
        self.access |= {hub_node(hub): pair(link) for hub, link in enumerate(config["hubs"])}
        self.uplinks = [uplink for _, uplink in sites]
        self._links = NodeLinks(self.access, sites)

    def node(self, host: int) -> int:
        return host - 1 if host <= self.members else hub_node(host - self.members)

    def path(self, source: int, target: int) -> Path:
        return tuple(s for s in self._links.way(source, target) if not s.model.passes)


def member_frames(members: int) -> int:
    """Return the packets that the receive ring of one of this many members holds.

    All rings together take up to 256 MB, and more only if each member's takes its least, 4 MB.
    """
    return min(max(_MEMBER_FRAMES // members, _FEWEST_FRAMES), _HUB_FRAMES)


class Emulator:
    """Receives packets, holds them, and sends them when they are due."""

    def __init__(self, config: Mapping[str, Any], parent: Parent) -> None:
        self._parent = parent
        self.rights = fabric.become_able()
        self.hosts = fabric.build_for(config)
        self._network = Network(config, _now())
        self._schedule = FaultSchedule(faults_from_json(config["faults"]))
        frames = member_frames(len(config["links"]))
        self._ports = [
            Port(host.port, frames if self._network.node(host.number) >= 0 else _HUB_FRAMES)
            for host in self.hosts
        ]
        self._nat = {member + 1 for member in config["nat"]}
        """Hosts to which nobody can connect."""
        self._numbers = {
            bytes(int(part) for part in host.address.split(".")): host.number for host in self.hosts
        }
        self._sends = [port.send for port in self._ports]
        self._paths: dict[tuple[int, int], Path | None] = {}
        # (due, serial, stages still ahead, target host, packet)
        self._heap: list[tuple[int, int, Path, int, bytes]] = []
        self._fault_times: list[tuple[int, int, Fault, bool]] = []
        self._serial = 0
        self._timer = linux.Timer()
        self._lead = linux.Lead(self._timer)
        self._lateness = Lateness()
        self._packets = self._bytes = self._lost = self._refused = self._overrun = 0

    def run(self) -> None:
        """Carry traffic until the parent has gone."""
        ports = {port.fileno(): (number, port) for number, port in enumerate(self._ports)}
        timer, heap = self._timer, self._heap
        with select.epoll() as epoll, contextlib.ExitStack() as closing:
            for port in self._ports:
                closing.enter_context(port)
            for fd in (*ports, self._parent.fd):
                epoll.register(fd, select.EPOLLIN)
            # Edge-triggered: an expiry is reported once and need not be read.
            epoll.register(timer.fd, select.EPOLLIN | select.EPOLLET)
            turns = 0
            while turns & 255 or not self._parent.gone():
                turns += 1
                if heap or self._fault_times:
                    times = [queue[0][0] for queue in (heap, self._fault_times) if queue]
                    timer.arm(min(times) - self._lead.ns)
                rang = False
                ready = epoll.poll(_IDLE_SECONDS)
                if not ready:
                    turns = 0
                for fd, _ in ready:
                    if fd in ports:
                        self._take_packets(*ports[fd])
                    elif fd == timer.fd:
                        timer.fired()
                        rang = True
                    else:
                        self._answer_commands()
                        turns = 0
                self._flush(rang)

    def _take_packets(self, source: int, port: Port) -> None:
        paths, numbers = self._paths, self._numbers
        address, end = gso.IP + 16, gso.IP + 20
        for arrived, packet in port.take_packets(_PACKETS_A_TURN):
            target = numbers.get(packet[address:end])
            if target is None or (target in self._nat and gso.opens_connection(packet)):
                continue
            key = (source, target)
            path = paths[key] if key in paths else self._find_path(key)
            if path is not None:
                self._forward(path, arrived, target, packet)

    def _find_path(self, key: tuple[int, int]) -> Path | None:
        ends = self._network.node(key[0]), self._network.node(key[1])
        apart = self._schedule.apart(*ends)
        self._paths[key] = None if apart else self._network.path(*ends)
        return self._paths[key]

    def _forward(self, path: Path, now: int, target: int, packet: bytes) -> None:
        if not path:
            self._send(target, packet)
            return
        stage, rest = path[0], path[1:]
        if stage.harmless and not packet[1]:  # a single segment: the common case
            due = stage.model.due(now, len(packet) - gso.IP)
            if due is not None:
                self._push(due, rest, target, packet)
            return
        stage.model.pause(now)
        for piece, count, headers in self._pieces(stage, packet):
            length = len(piece) - gso.IP + (count - 1) * headers
            due = stage.model.due(now, length, count)
            if due is None:
                continue
            self._push(due, rest, target, piece)
            if stage.model.duplicates and stage.model.duplicated():
                self._push(due, rest, target, piece)

    def _push(self, due: int, rest: Path, target: int, packet: bytes) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (due, self._serial, rest, target, packet))

    def _pieces(self, stage: Stage, packet: bytes) -> Sequence[tuple[bytes, int, int]]:
        """Return the parts of a packet that go on.

        Each is (packet, number of segments, header bytes of a segment).
        """
        count, size, headers = gso.segments(packet)
        model = stage.model
        most = max(stage.slice_bytes // size, 1) if size else 1
        if not model.loses and not model.corrupts:
            if count <= most:
                return ((packet, count, headers),)
            kept = [True] * count
        else:
            lost, corrupts = model.lost, model.corrupts
            kept = [not lost() for _ in range(count)] if model.loses else [True] * count
            self._lost += count - sum(kept)
            if corrupts:
                most = 1
        if count == 1:
            pieces = [(packet, 1, headers)] if kept[0] else []
        elif count <= most and all(kept):
            return ((packet, count, headers),)
        else:
            ranges = gso.runs(kept, most)
            pieces = [
                (piece, last - first, headers)
                for piece, (first, last) in zip(gso.cut(packet, ranges), ranges, strict=True)
            ]
        if model.corrupts:
            return [(self._damage(model, piece), n, h) for piece, n, h in pieces]
        return pieces

    def _damage(self, model: LinkModel, packet: bytes) -> bytes:
        if not model.corrupted():
            return packet
        return gso.corrupt(packet, model.choose(8 * len(packet)))

    def _flush(self, rang: bool) -> None:
        """Send packets that are due.

        A further stage begins at the ideal time, so that lateness does not add up.
        `rang`: the timer woke us, so the first delivery corrects the lead.
        """
        heap, pop = self._heap, heapq.heappop
        late = self._lateness.add
        ahead = self._lead.ns + (_BATCH_NS if len(heap) > _BUSY else 0)
        while self._fault_times and self._fault_times[0][0] <= _now():
            _, _, fault, begins = self._fault_times.pop(0)
            self._schedule.switch(fault, begins)
            self._paths.clear()
            for node, stages in self._network.access.items():
                for stage in stages:
                    stage.model.set_rate(self._schedule.rate_share(node))
        now = _now()
        while heap and heap[0][0] <= now + ahead:
            due, _, rest, target, packet = pop(heap)
            if rest:
                self._forward(rest, due, target, packet)
                continue
            self._send(target, packet)
            now = _now()
            late(now - due)
            if rang:
                self._lead.learn(now - due)
                rang = False

    def _send(self, target: int, packet: bytes) -> None:
        try:
            self._sends[target](packet)
        except OSError:
            self._refused += 1
            return
        self._packets += 1
        self._bytes += len(packet)

    # -- the parent -------------------------------------------------------------------------------

    def _answer_commands(self) -> None:
        for command in self._parent.commands():
            if command.startswith("start "):
                start = int(command.split()[1])
                self._fault_times = [
                    (start + int(seconds * 1e9), number, fault, begins)
                    for number, (seconds, fault, begins) in enumerate(self._schedule.changes())
                ]
            elif command == "evict":
                fabric.end_inhabitants(self.hosts)
            self._parent.answer(self.report())

    def report(self) -> dict[str, Any]:
        """Return lateness, counts of packets, and the CPU seconds of this process."""
        self._overrun += sum(port.take_dropped() for port in self._ports)
        pairs = (*self._network.access.values(), *self._network.uplinks)
        return {
            **self._lateness.report(),
            "packets": self._packets,
            "bytes": self._bytes,
            "lost": self._lost,
            "queue_dropped": sum(stage.model.dropped for pair in pairs for stage in pair),
            "ring_dropped": self._overrun,
            "refused_by_kernel": self._refused,
            "cpu_s": time.process_time(),
        }

    # -- faults -----------------------------------------------------------------------------------


def main() -> None:
    linux.fine_timers()
    parent = Parent()
    config = parent.config()
    priority = linux.raise_priority()
    with parent.reporting("the packet emulator"):
        emulator = Emulator(config, parent)
    # The loop does not create cycles; a garbage collection would delay packets by milliseconds.
    gc.freeze()
    gc.disable()
    hosts = fabric.hosts_to_json(emulator.hosts)
    parent.answer({"hosts": hosts, "priority": priority, "rights": emulator.rights})
    emulator.run()
    if parent.died():
        fabric.end_inhabitants(emulator.hosts)


if __name__ == "__main__":
    main()
