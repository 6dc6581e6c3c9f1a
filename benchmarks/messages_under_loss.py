"""How long one message takes over a link that loses packets: real Linux TCP beside the simulator.

    python benchmarks/messages_under_loss.py                        all of it, 25 minutes
    python benchmarks/messages_under_loss.py --rtt 40 --loss 1 --size 10000,40000
    python benchmarks/messages_under_loss.py --save real.json       keep the measurements
    python benchmarks/messages_under_loss.py --real real.json       … and simulate it again

A member sends a message over its warm connection, the hub answers with one byte, and the member
sends the next. Losses are on the way up. Real: the `packet` backend, several links at once.
Simulated: the same messages on as many links, `--more` times over. Times are milliseconds from the
first byte to the answer; `chance` is the standard error of both means, in parts of the real one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgetrain.fleet import networks
from edgetrain.fleet.networks import Burst, Direction, Profile
from edgetrain.fleet.networks.emulation.measure import Bench
from edgetrain.fleet.networks.links.window import MSS
from edgetrain.training.simulated.virtual import SECOND, World
from edgetrain.training.simulated.wires import MemberWire, SimulatedNetwork

SIZES = (1_400, 10_000, 40_000, 400_000, 4_000_000)
BURST = Burst(enter_percent=0.1, leave_percent=20.0)
"""As in netem/4g-medium.toml: 0.5 % in bursts of five, on a line of 12 Mbit/s."""
BURST_MBIT = 12.0
INITIAL = 10 * MSS

Times = list[list[float]]
"""Seconds of each message, link by link."""


@dataclass(frozen=True)
class Cell:
    """One size of message over one kind of link."""

    rtt_ms: float
    loss: str
    """Percent, or "burst"."""
    size: int

    @property
    def key(self) -> str:
        return f"{self.rtt_ms:g} {self.loss} {self.size}"

    @property
    def profile(self) -> Profile:
        """A link that loses packets on the way up only, the direction of the message."""
        delay = self.rtt_ms / 2
        up = (
            Direction(delay_ms=delay, burst=BURST, rate_mbit=BURST_MBIT)
            if self.loss == "burst"
            else Direction(delay_ms=delay, loss_percent=float(self.loss))
        )
        return Profile("bench", up=up, down=Direction(delay_ms=delay))

    def expected_s(self) -> float:
        """About how long a message takes: slow start, or the law of Mathis. Plans the counts."""
        trips = 1 + math.log2(1 + self.size / INITIAL)
        share = max(self.profile.up.mean_loss_percent / 100, 1e-6)
        return self.rtt_ms / 1000 * max(trips, self.size / (1.2 * MSS / math.sqrt(share)))

    def count(self, seconds: float) -> int:
        """Messages a link."""
        return max(1, min(600, int(seconds / self.expected_s())))


def real(cell: Cell, links: int, count: int) -> Times:
    """Seconds of each message over the packet backend."""
    emulation = networks.emulate([cell.profile] * links, backend="packet", seed=3)
    with emulation as net, Bench(net, range(links)) as bench:
        for client in bench.clients:
            client.begin("messages", size=cell.size, count=count, fresh=False)
        return [client.result() for client in bench.clients]


def simulated(cell: Cell, links: int, count: int, seed: int = 0) -> Times:
    """The same in virtual time."""
    world = World()
    network = SimulatedNetwork(world, [cell.profile] * links, seed=seed)
    times: Times = [[] for _ in range(links)]
    body = bytes(cell.size)

    def member(number: int) -> None:
        wire: MemberWire = network.connect(number)
        for _ in range(count):
            began = world.now
            wire.send([body])
            while wire.receive(3600.0) is None:
                pass
            times[number].append((world.now - began) / SECOND)

    def hub() -> None:
        answers = 0
        while answers < links * count:
            for sender, _ in network.hub.poll(3600.0):
                answers += 1
                network.hub.send(sender, [b"y"])

    for number in range(links):
        world.start(f"m{number}", _call(member, number))
    world.start("hub", hub)
    while world.step():
        pass
    return times


def _call(code: Callable[[int], None], number: int) -> Callable[[], None]:
    return lambda: code(number)


def quantiles(times: Times) -> tuple[float, float, float, float]:
    """Mean, p50, p90, p99, in ms."""
    every = sorted(1000 * t for link in times for t in link)

    def at(share: float) -> float:
        return every[min(int(share * len(every)), len(every) - 1)]

    return statistics.fmean(every), at(0.5), at(0.9), at(0.99)


def error_of_mean(times: Times) -> float:
    """Standard error of the mean in ms: links are independent, messages of one link are not."""
    means = [1000 * statistics.fmean(link) for link in times]
    return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0


HEAD = (
    "  rtt   loss    bytes  messages |    mean     p50     p90     p99 |"
    "    mean     p50     p90     p99 |   mean  chance"
)


def row(cell: Cell, measured: Times, modelled: Times) -> str:
    """A line of the table."""
    found, model = quantiles(measured), quantiles(modelled)
    chance = math.hypot(error_of_mean(measured), error_of_mean(modelled)) / found[0]
    loss = cell.loss if cell.loss == "burst" else f"{cell.loss} %"
    return (
        f"{cell.rtt_ms:5g} {loss:>6} {cell.size:8} {sum(map(len, measured)):9} | "
        + " ".join(f"{value:7.0f}" for value in found)
        + " | "
        + " ".join(f"{value:7.0f}" for value in model)
        + f" | {100 * (model[0] / found[0] - 1):+5.1f} % {100 * chance:5.1f} %"
    )


def cells(args: argparse.Namespace) -> list[Cell]:
    return [Cell(rtt, loss, size) for rtt in args.rtt for loss in args.loss for size in args.size]


def main() -> None:
    """Measure, simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rtt", type=_numbers, default=[40.0, 200.0])
    parser.add_argument("--loss", type=lambda s: s.split(","), default=["0.1", "1", "3", "burst"])
    parser.add_argument("--size", type=lambda s: [int(x) for x in s.split(",")], default=SIZES)
    parser.add_argument("--links", type=int, default=16)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="approximate time for each line"
    )
    parser.add_argument("--more", type=int, default=4, help="simulated messages for each real one")
    parser.add_argument("--save", type=Path, help="write the measurements to this file")
    parser.add_argument(
        "--real", type=Path, help="a file of --save: measure nothing, simulate again"
    )
    args = parser.parse_args()
    known: dict[str, Times] = json.loads(args.real.read_text()) if args.real else {}
    kept: dict[str, Times] = {}
    print(" " * 30 + "|" + "real Linux TCP, ms".center(33) + "|" + "simulated, ms".center(33) + "|")
    print(HEAD, flush=True)
    for cell in cells(args):
        if args.real and cell.key not in known:
            continue
        measured = known.get(cell.key) or real(cell, args.links, cell.count(args.seconds))
        kept[cell.key] = measured
        if args.save:
            args.save.write_text(json.dumps(kept))
        modelled = [
            link
            for seed in range(args.more)
            for link in simulated(cell, len(measured), len(measured[0]), seed)
        ]
        print(row(cell, measured, modelled), flush=True)


def _numbers(text: str) -> list[float]:
    return [float(x) for x in text.split(",")]


if __name__ == "__main__":
    main()
