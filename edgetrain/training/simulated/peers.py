"""Members of a simulation that connect to each other: listeners, connections and what they run
beside their steps, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from edgetrain.exchange.messages import CLIENT, Peer
from edgetrain.exchange.peers.beside import Flag
from edgetrain.exchange.peers.dialled import Dialled
from edgetrain.exchange.peers.direct import DirectExchange
from edgetrain.exchange.peers.listener import Listener
from edgetrain.exchange.peers.neighbours import Neighbours
from edgetrain.exchange.peers.peering import Peering
from edgetrain.exchange.peers.together import CollectiveExchange
from edgetrain.exchange.peers.wrapped import WrappedEnd
from edgetrain.exchange.transport import MemberTransport, Traffic
from edgetrain.jobs.job import COLLECTIVES
from edgetrain.jobs.resolved import Resolved
from edgetrain.training.member.direct import exchange_among
from edgetrain.training.simulated.virtual import Mailbox, Process, World
from edgetrain.training.simulated.wires import HubWire, MemberWire, SimulatedNetwork
from edgetrain.vectors.vector import Buffer

PAUSE_S = 0.01
"""Virtual seconds between two looks at whether a process has ended."""


@dataclass
class VirtualFlag:
    """A Flag of a world."""

    world: World
    _is_set: bool = False

    def __post_init__(self) -> None:
        self._waiting: Mailbox[None] = Mailbox(self.world)

    def set(self) -> None:
        self._is_set = True
        self._waiting.wake()

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float) -> bool:
        if not self._is_set:
            self._waiting.get(timeout)
        return self._is_set


class WireDoor:
    """A HubWire with ends on its own machine: see Listener."""

    def __init__(self, wire: HubWire, network: SimulatedNetwork) -> None:
        self._wire, self._network = wire, network

    def connect(self) -> MemberTransport:
        return self._network.dial(self._wire.node, self._wire)

    def poll(self, timeout_s: float) -> Iterator[tuple[bytes, list[Buffer]]]:
        return self._wire.poll(timeout_s)

    def send(self, to: bytes, frames: Sequence[Buffer]) -> bool:
        return self._wire.send(to, frames)

    def traffic(self) -> Traffic:
        return self._wire.traffic()

    def close(self) -> None:
        self._wire.crash()


class Copying(WrappedEnd):
    """A MemberTransport whose receiver gets memory of its own, as over a network: it adds to it."""

    def send(self, frames: Sequence[Buffer]) -> None:
        self._end.send([frames[0], *map(bytearray, frames[1:])])


class Nowhere:
    """A member's end of a connection that never stands."""

    def __init__(self, world: World) -> None:
        self._world = world

    def send(self, frames: Sequence[Buffer]) -> None:
        """See MemberTransport."""

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        self._world.sleep(max(timeout_s, 1e-3))
        return None

    def received_bytes(self) -> int:
        return 0

    def traffic(self) -> Traffic:
        return Traffic(0, 0, 0, 0.0)

    def close(self) -> None:
        """See MemberTransport."""


@dataclass
class SimulatedPeers:
    """The listening members of a simulation."""

    planned: Resolved
    world: World
    network: SimulatedNetwork
    listening: dict[str, HubWire] = field(default_factory=dict)
    """The wire at each address."""

    def exchange(
        self, index: int, wire: MemberWire
    ) -> tuple[DirectExchange | CollectiveExchange, str, SimulatedHost]:
        """The exchange of a member over its connection to the hub that all join, the address to
        join with, and what it hosts."""
        host = SimulatedHost(self, index)
        is_client = index in self.planned.nat
        listener, address = (None, CLIENT) if is_client else host.listen()
        clock = self.world.clock
        peering = Peering(listener, None, host.dial, clock, host)
        way = exchange_among(self.planned, wire, peering, host.listen, clock, beside=host)
        return way, address, host


class SimulatedHost:
    """What one member's machine hosts: Beside, in virtual time."""

    def __init__(self, peers: SimulatedPeers, index: int) -> None:
        self._peers, self._index = peers, index
        self._processes: list[Process] = []
        self._wires: list[HubWire] = []
        self._dialled: list[MemberWire] = []

    def listen(self) -> tuple[Listener, str]:
        peers = self._peers
        wire = peers.network.listen(self._index)
        address = f"tcp://10.0.0.1:{1024 + len(peers.listening)}"
        peers.listening[address] = wire
        self._wires.append(wire)
        return Listener(WireDoor(wire, peers.network)), address

    def dial(self, peer: Peer, neighbours: Neighbours) -> Dialled:
        peers, there = self._peers, self._peers.listening[peer.address]
        end: MemberTransport = Nowhere(peers.world)
        if peers.network.reaches(self._index, there.node):
            wire = peers.network.dial(self._index, there)
            self._dialled.append(wire)
            end = Copying(wire) if peers.planned.job.fleet.topology in COLLECTIVES else wire
        return Dialled(end, neighbours.hello_to(peer.name), peers.world.clock, sleep=self.sleep)

    def start(self, code: Callable[[], None]) -> Callable[[], None]:
        world = self._peers.world
        process = world.start(f"reducer of m{self._index}", code, world.now)
        self._processes.append(process)

        def join() -> None:
            for wire in self._wires:
                wire.wake()
            while not process.over:
                world.sleep(PAUSE_S)

        return join

    def flag(self) -> Flag:
        return VirtualFlag(self._peers.world)

    def sleep(self, seconds: float) -> None:
        self._peers.world.sleep(seconds)

    def end(self, *, power: bool) -> None:
        """The machine's processes end, without a word. `power`: it is off, too."""
        for connection in self._dialled if power else ():
            connection.power_off()
        for wire in self._wires:
            wire.crash()
        for process in self._processes:
            process.kill()
