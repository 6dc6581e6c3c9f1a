"""What the emulated networks carry on this machine, and how real TCP fares on them.

    python benchmarks/networks.py                    everything, about five minutes
    python benchmarks/networks.py crowd mathis       some of it
    python benchmarks/networks.py --backend packet

How accurately links follow their profiles is for `edgetrain networks check` to say.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence

from edgetrain.fleet import networks
from edgetrain.fleet.networks import Direction, Profile
from edgetrain.fleet.networks.emulation.measure import PAYLOAD_SHARE, Bench


def both(**figures: object) -> Profile:
    way = Direction(**figures)  # type: ignore[arg-type]
    return Profile("bench", "", way, way)


def steady_mbit(seen: Sequence[Sequence[int]], skip: float = 0.4) -> float:
    """The mean payload Mbit/s of a transfer, [(ns, bytes so far)], without this share of its time
    at the beginning (slow start)."""
    first, last = seen[0][0], seen[-1][0]
    rest = [each for each in seen if each[0] >= first + skip * (last - first)]
    if len(rest) < 2 or rest[-1][0] == rest[0][0]:
        return 0.0
    return (rest[-1][1] - rest[0][1]) * 8000 / (rest[-1][0] - rest[0][0])


def throughput(backend: str) -> None:
    """One TCP connection over a link without a rate, at a round trip of 20 ms."""
    with networks.emulate([both(delay_ms=10)], backend=backend) as net, Bench(net) as bench:
        before = net.report()["cpu_s"]
        began = time.monotonic()
        mbit = steady_mbit(bench.client.do("push", seconds=5))
        share = (net.report()["cpu_s"] - before) / (time.monotonic() - began)
        report = net.report()
    print(
        f"throughput {backend:6} rtt 20 ms, no rate: {mbit / 1000:.2f} Gbit/s, emulator "
        f"{share:.2f} of a core, ring dropped {report.get('ring_dropped', 0)}",
        flush=True,
    )


def crowd(backend: str) -> None:
    """Sixteen members at 100 Mbit/s each, all sending to the hub."""
    members = 16
    profile = both(delay_ms=10, rate_mbit=100)
    emulation = networks.emulate([profile] * members, backend=backend)
    with emulation as net, Bench(net, range(members)) as bench:
        before = net.report()["cpu_s"]
        began = time.monotonic()
        for client in bench.clients:
            client.begin("push", seconds=5, greedy=True)
        seen = [client.result() for client in bench.clients]
        seconds = time.monotonic() - began
        report = net.report()
    total = sum(steady_mbit(s, skip=0.5) for s in seen)
    share = (report["cpu_s"] - before) / seconds
    print(
        f"crowd {backend:6} {members} members x 100 Mbit/s: {total:.0f} Mbit/s payload of "
        f"{members * 100 * PAYLOAD_SHARE:.0f}, emulator {share:.2f} of a core, late p99 "
        f"{report['late_ms_p99']:.3f} ms, ring dropped {report.get('ring_dropped', 0)}",
        flush=True,
    )


def mathis(backend: str) -> None:
    """Reno's throughput against Mathis: MSS/RTT * sqrt(3/2)/sqrt(p)."""
    for percent in (0.1, 0.5, 1.0, 2.0):
        profile = both(delay_ms=25, loss_percent=percent)
        emulation = networks.emulate([profile], backend=backend, congestion="reno")
        with emulation as net, Bench(net) as bench:
            mbit = steady_mbit(bench.client.do("push", seconds=12), skip=0.3)
        law = 1448 * 8 / 0.05 * math.sqrt(1.5) / math.sqrt(percent / 100) / 1e6
        print(
            f"mathis {backend:6} reno, rtt 50 ms, loss {percent} %: {mbit:.2f} Mbit/s, the law "
            f"says {law:.2f}, ratio {mbit / law:.2f}",
            flush=True,
        )


#: Profiles on which the model of the stream backend was not tuned, and one on which it was.
_HELD_OUT = ("wan-200ms", "home-fixed", "5g", "starlink", "dallas-washington")
_TUNED_ON = ("4g-good",)


def transfers(_: str) -> None:
    """Messages over `stream` against the same over `packet`: mean seconds, ratio, its error.

    If packets are lost, a message takes 1.4 s or 4 s by chance, which also affects later messages:
    the error is that of the mean of twelve links with independent draws.
    """
    for name in (*_HELD_OUT, *_TUNED_ON):
        lossy = networks.load(name).has_loss
        for size, fresh in ((1_000_000, True), (1_000_000, False), (8_000_000, False)):
            links, count = (12, 20 if size < 2_000_000 else 4) if lossy else (2, 8)
            took = {
                backend: _messages(name, backend, links, size, count, fresh)
                for backend in ("packet", "stream")
            }
            (packet, its), (stream, other) = took["packet"], took["stream"]
            ratio = stream / packet
            error = ratio * math.hypot(its / packet, other / stream)
            print(
                f"transfers {name:18} {size / 1e6:g} MB {'cold' if fresh else 'warm'}  packet "
                f"{packet:.3f} s  stream {stream:.3f} s  ratio {ratio:.2f} ± {error:.2f}"
                f"{'  (tuned on)' if name in _TUNED_ON else ''}",
                flush=True,
            )


def _messages(
    name: str, backend: str, links: int, size: int, count: int, fresh: bool
) -> tuple[float, float]:
    """Return the mean seconds of a message and its standard error, without a warm-up message."""
    emulation = networks.emulate([networks.load(name)] * links, backend=backend, seed=2)
    with emulation as net, Bench(net, range(links)) as bench:
        for client in bench.clients:
            client.begin("messages", size=size, count=count + (not fresh), fresh=fresh)
        found = [statistics.fmean(c.result()[0 if fresh else 1 :]) for c in bench.clients]
    return statistics.fmean(found), statistics.stdev(found) / math.sqrt(len(found))


PARTS: dict[str, Callable[[str], None]] = {
    "throughput": throughput,
    "crowd": crowd,
    "mathis": mathis,
    "transfers": transfers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--backend", default="packet", help="packet, stream or tc")
    arguments = parser.parse_args()
    for part in arguments.parts or PARTS:
        PARTS[part](arguments.backend)


if __name__ == "__main__":
    main()
