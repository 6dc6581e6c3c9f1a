"""How long messages take after pauses on a slow or long link: real Linux TCP beside the simulator.

    python benchmarks/messages_after_pauses.py                            five links, two minutes
    python benchmarks/messages_after_pauses.py --rtt 500 --rate 10 --kilobytes 400 --runs 3
    python benchmarks/messages_after_pauses.py --rtt 500 --rate 1 --kilobytes 40 --windows

A member sends a message over ZeroMQ, the hub answers with one of the same size, the member pauses:
a round of sync-sgd with one member. Real: the `packet` backend. Printed are milliseconds from the
first byte to the whole answer, message by message; with `--windows` also the member's congestion
window before each message, as Linux reports it (TCP_INFO) and as the simulator computes it, in
segments.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

import zmq

from edgetrain.exchange.zeromq.tcp_counters import connection_to
from edgetrain.fleet import networks
from edgetrain.fleet.networks import Direction, Profile
from edgetrain.fleet.networks.links.window import MSS
from edgetrain.training.simulated.virtual import SECOND, World
from edgetrain.training.simulated.wires import SimulatedNetwork

LINKS = ((100, 100, 400), (500, 100, 40), (500, 1, 40), (500, 10, 400), (500, 100, 400))
HEADER = bytes(40)
_WINDOW = struct.Struct("=I")  # tcpi_snd_cwnd, at 80


@dataclass
class Found:
    """What each message took, and the window of the member before it."""

    seconds: list[float] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)


def profile(rtt_ms: float, rate_mbit: float) -> Profile:
    """The same both ways."""
    both = Direction(delay_ms=rtt_ms / 2, rate_mbit=rate_mbit)
    return Profile("bench", up=both, down=both)


def _hub(attachment: Any, ready: Any, size: int, count: int) -> None:
    attachment.enter()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as end:
        end.bind(attachment.address)
        ready.set()
        for _ in range(count):
            sender, *_ = end.recv_multipart()
            end.send_multipart([sender, HEADER, bytes(size)], copy=False)


def _member(attachment: Any, answers: Any, size: int, count: int, pause_s: float) -> None:
    attachment.enter()
    found = Found()
    with zmq.Context() as context, context.socket(zmq.DEALER) as end:
        end.connect(attachment.address)
        port = int(attachment.address.rpartition(":")[2])
        while (connection := connection_to(port)) is None:
            time.sleep(0.01)
        time.sleep(1.5)
        for _ in range(count):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            found.windows.append(_WINDOW.unpack_from(info, 80)[0])
            began = time.monotonic()
            end.send_multipart([HEADER, bytes(size)], copy=False)
            end.recv_multipart()
            found.seconds.append(time.monotonic() - began)
            time.sleep(pause_s)
        connection.close()
    answers.put(found)


def real(link: Profile, size: int, count: int, pause_s: float) -> Found:
    """Messages over the packet backend."""
    spawn = multiprocessing.get_context("spawn")
    ready, answers = spawn.Event(), spawn.Queue()
    with networks.emulate([link], backend="packet") as net:
        hub = spawn.Process(target=_hub, args=(net.hub_attachment(), ready, size, count))
        hub.start()
        ready.wait(60)
        place = (net.attachment(0), answers, size, count, pause_s)
        member = spawn.Process(target=_member, args=place)
        member.start()
        found: Found = answers.get(timeout=600)
        for process in (member, hub):
            process.join(60)
    return found


def simulated(link: Profile, size: int, count: int, pause_s: float) -> Found:
    """The same in virtual time."""
    world, found, body = World(), Found(), bytes(size)
    network = SimulatedNetwork(world, [link])

    def member() -> None:
        wire = network.connect(0)
        world.sleep(1.5)
        for _ in range(count):
            wire.up.handle_acknowledgements()
            found.windows.append(int(wire.up.window.size) // MSS)
            began = world.now
            wire.send([HEADER, body])
            while wire.receive(3600.0) is None:
                pass
            found.seconds.append((world.now - began) / SECOND)
            world.sleep(pause_s)

    def hub() -> None:
        answered = 0
        while answered < count:
            for sender, _ in network.hub.poll(3600.0):
                answered += 1
                network.hub.send(sender, [HEADER, body])

    world.start("member", member)
    world.start("hub", hub)
    while world.step():
        pass
    return found


def _line(name: str, values: list[float] | list[int]) -> str:
    return f"  {name:18}" + "".join(f"{value:7.0f}" for value in values)


def main() -> None:
    """Measure, simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rtt", type=float, help="ms")
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s")
    parser.add_argument("--kilobytes", type=float, default=40.0)
    parser.add_argument("--count", type=int, default=10, help="messages")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds")
    parser.add_argument("--runs", type=int, default=1, help="real runs")
    parser.add_argument("--windows", action="store_true")
    args = parser.parse_args()
    links = LINKS if args.rtt is None else ((args.rtt, args.rate, args.kilobytes),)
    for rtt_ms, rate_mbit, kilobytes in links:
        case = (profile(rtt_ms, rate_mbit), int(kilobytes * 1000), args.count, args.pause)
        print(f"{rtt_ms:g} ms, {rate_mbit:g} Mbit/s, {kilobytes:g} kB", flush=True)
        rows = [(f"real {run + 1}", real(*case)) for run in range(args.runs)]
        for name, found in (*rows, ("simulated", simulated(*case))):
            print(_line(f"{name}, ms", [1000 * seconds for seconds in found.seconds]), flush=True)
            if args.windows:
                print(_line(f"{name}, window", found.windows), flush=True)


if __name__ == "__main__":
    main()
