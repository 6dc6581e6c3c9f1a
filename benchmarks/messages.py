"""How long single messages take: real Linux TCP beside the simulator, after pauses and losses.

    python benchmarks/messages.py loss                          all of it, 25 minutes
    python benchmarks/messages.py loss --rtt 40 --loss 1 --size 10000,40000
    python benchmarks/messages.py pauses --rtt 500 --rate 1 --size 40000 --runs 2
    python benchmarks/messages.py pauses --rtt 1000 --size 40000,1000000 --first 30 --count 5

`loss`: a member sends a message over its warm connection, the hub answers with one byte, and the
member sends the next. Losses are on the way up, several links at once. Times are milliseconds from
the first byte to the answer; `chance` is the standard error of both means, in parts of the real
one. 4 MB at 200 ms and 3 % are left out: the measuring socket gives up after a minute.

`pauses`: the hub answers with a message of the same size, and the member pauses: a round of
sync-sgd with one member. Message by message, and the member's congestion window before each, as
Linux reports it (TCP_INFO) and as the simulator computes it, in segments.

Real is the `packet` backend.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import socket
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import zmq

from edgetrain.exchange.zeromq.tcp_counters import connection_to
from edgetrain.fleet import networks
from edgetrain.fleet.networks import Burst, Direction, Profile
from edgetrain.fleet.networks.emulation.measure import Bench
from edgetrain.fleet.networks.links.window import MSS
from edgetrain.training.simulated.virtual import SECOND, World
from edgetrain.training.simulated.wires import MemberWire, SimulatedNetwork

BURST = Direction(burst=Burst(enter_percent=0.1, leave_percent=20.0), rate_mbit=12.0)
"""As in netem/4g-medium.toml: 0.5 % in bursts of five, on a line of 12 Mbit/s."""
HEADER = bytes(40)
LINKS, DRAWS = 16, 4
"""Real ones at a time, and simulated messages for each real one."""

Times = list[list[float]]
"""Seconds of each message, link by link."""


def numbers(text: str) -> list[float]:
    """Of a comma-separated list."""
    return [float(each) for each in text.split(",")]


def simulated(
    links: list[Profile],
    seed: int,
    count: int,
    member: Callable[[int, MemberWire, World], None],
    answer: list[bytes],
) -> None:
    """Let the member of each link send `count` messages, which a hub answers, in virtual time."""
    world = World()
    network = SimulatedNetwork(world, links, seed=seed)

    def hub() -> None:
        answers = 0
        while answers < len(links) * count:
            for sender, _ in network.hub.poll(3600.0):
                answers += 1
                network.hub.send(sender, answer)

    for number in range(len(links)):
        live = partial(_live, network, world, member, number)
        world.start(f"m{number}", live)
    world.start("hub", hub)
    while world.step():
        pass


def _live(
    network: SimulatedNetwork,
    world: World,
    member: Callable[[int, MemberWire, World], None],
    number: int,
) -> None:
    member(number, network.connect(number), world)


def exchange(wire: MemberWire, world: World, frames: list[bytes]) -> float:
    """Send a message; the seconds until its answer is there."""
    began = world.now
    wire.send(frames)
    while wire.receive(3600.0) is None:
        pass
    return (world.now - began) / SECOND


# -- losses ---------------------------------------------------------------------------------------


def lossy(rtt_ms: float, loss: str) -> Profile:
    """A link that loses packets on the way up, where messages go: percent, or "burst"."""
    up = BURST if loss == "burst" else Direction(loss_percent=float(loss))
    down = Direction(delay_ms=rtt_ms / 2)
    return Profile("bench", up=replace(up, delay_ms=rtt_ms / 2), down=down)


def messages(link: Profile, size: int, seconds: float) -> int:
    """Messages of a link that take about this long: slow start, or the law of Mathis."""
    trips = 1 + math.log2(1 + size / (10 * MSS))
    share = max(link.up.mean_loss_percent / 100, 1e-6)
    each_s = link.rtt_ms / 1000 * max(trips, size / (1.2 * MSS / math.sqrt(share)))
    return max(1, min(600, int(seconds / each_s)))


def real_times(link: Profile, size: int, count: int) -> Times:
    """Seconds of each message over the packet backend."""
    emulation = networks.emulate([link] * LINKS, backend="packet", seed=3)
    with emulation as net, Bench(net, range(LINKS)) as bench:
        for client in bench.clients:
            client.begin("messages", size=size, count=count, fresh=False)
        return [client.result() for client in bench.clients]


def simulated_times(link: Profile, size: int, count: int, seed: int) -> Times:
    """The same in virtual time."""
    times: Times = [[] for _ in range(LINKS)]

    def member(number: int, wire: MemberWire, world: World) -> None:
        for _ in range(count):
            times[number].append(exchange(wire, world, [bytes(size)]))

    simulated([link] * LINKS, seed, count, member, [b"y"])
    return times


def quantiles(times: Times) -> list[float]:
    """Mean, p50, p90, p99, in ms."""
    every = sorted(1000 * t for link in times for t in link)
    at = [every[min(int(share * len(every)), len(every) - 1)] for share in (0.5, 0.9, 0.99)]
    return [statistics.fmean(every), *at]


def error_of_mean(times: Times) -> float:
    """Standard error of the mean in ms: links are independent, messages of one link are not."""
    means = [1000 * statistics.fmean(link) for link in times]
    return statistics.stdev(means) / math.sqrt(len(means))


def losses(args: argparse.Namespace) -> None:
    """Print a line for each round trip, loss and size."""
    print(" " * 30 + "|" + "real Linux TCP, ms".center(33) + "|" + "simulated, ms".center(33) + "|")
    four = "    mean     p50     p90     p99 |"
    print(f"  rtt   loss    bytes  messages |{four}{four}   mean  chance", flush=True)
    for rtt, loss, size in itertools.product(args.rtt, args.loss.split(","), args.size):
        link, size = lossy(rtt, loss), int(size)
        count = messages(link, size, args.seconds)
        real = real_times(link, size, count)
        drawn = [each for d in range(DRAWS) for each in simulated_times(link, size, count, d)]
        found, model = quantiles(real), quantiles(drawn)
        chance = math.hypot(error_of_mean(real), error_of_mean(drawn)) / found[0]
        name = loss if loss == "burst" else f"{loss} %"
        both = " | ".join(" ".join(f"{value:7.0f}" for value in each) for each in (found, model))
        print(
            f"{rtt:5g} {name:>6} {size:8} {sum(map(len, real)):9} | {both} | "
            f"{100 * (model[0] / found[0] - 1):+5.1f} % {100 * chance:5.1f} %",
            flush=True,
        )


# -- pauses ---------------------------------------------------------------------------------------


@dataclass
class Course:
    """What each message took, and the window of the member before it."""

    seconds: list[float] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)


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
    course, window = Course(), struct.Struct("=I")  # tcpi_snd_cwnd, at 80
    with zmq.Context() as context, context.socket(zmq.DEALER) as end:
        end.connect(attachment.address)
        port = int(attachment.address.rpartition(":")[2])
        while (connection := connection_to(port)) is None:
            time.sleep(0.01)
        time.sleep(1.5)
        for _ in range(count):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            course.windows.append(window.unpack_from(info, 80)[0])
            began = time.monotonic()
            end.send_multipart([HEADER, bytes(size)], copy=False)
            end.recv_multipart()
            course.seconds.append(time.monotonic() - began)
            time.sleep(pause_s)
        connection.close()
    answers.put(course)


def real_course(link: Profile, size: int, count: int, pause_s: float) -> Course:
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
        course: Course = answers.get(timeout=600)
        for process in (member, hub):
            process.join(60)
    return course


def simulated_course(link: Profile, size: int, count: int, pause_s: float) -> Course:
    """The same in virtual time."""
    course, body = Course(), bytes(size)

    def member(_: int, wire: MemberWire, world: World) -> None:
        world.sleep(1.5)
        for _ in range(count):
            wire.up.handle_acknowledgements()
            course.windows.append(int(wire.up.window.size) // MSS)
            course.seconds.append(exchange(wire, world, [HEADER, body]))
            world.sleep(pause_s)

    simulated([link], 0, count, member, [HEADER, body])
    return course


def pauses(args: argparse.Namespace) -> None:
    """Print two lines for each run, real and simulated."""
    for rtt, size in itertools.product(args.rtt, args.size):
        both = Direction(
            delay_ms=rtt / 2, rate_mbit=args.rate, first_window=args.first,
            receive_kb=args.receive_kb,
        )  # fmt: skip
        case = (Profile("bench", up=both, down=both), int(size), args.count, args.pause)
        print(f"{rtt:g} ms, {args.rate:g} Mbit/s, {size / 1000:g} kB", flush=True)
        rows = [(f"real {run + 1}", real_course(*case)) for run in range(args.runs)]
        for name, course in (*rows, ("simulated", simulated_course(*case))):
            ms = "".join(f"{1000 * seconds:7.0f}" for seconds in course.seconds)
            windows = "".join(f"{segments:7}" for segments in course.windows)
            print(f"  {f'{name}, ms':18}{ms}\n  {f'{name}, window':18}{windows}", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("loss", "pauses"), default="loss")
    parser.add_argument("--rtt", type=numbers, default=[40.0, 200.0], help="ms")
    parser.add_argument("--size", type=numbers, default=[1400, 10e3, 40e3, 400e3, 4e6])
    parser.add_argument("--loss", default="0.1,1,3,burst", help="percent")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a line, about")
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s, of pauses")
    parser.add_argument("--count", type=int, default=10, help="messages, of pauses")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds")
    parser.add_argument("--first", type=int, default=0, help="segments of the first window")
    parser.add_argument("--receive-kb", type=float, default=0.0, help="first receive buffer")
    parser.add_argument("--runs", type=int, default=1, help="real runs, of pauses")
    args = parser.parse_args()
    (losses if args.what == "loss" else pauses)(args)


if __name__ == "__main__":
    main()
