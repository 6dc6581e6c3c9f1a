"""How accurately the emulated networks follow their profiles, on this machine.

    python benchmarks/networks.py                    everything, about eight minutes
    python benchmarks/networks.py round-trip rate    some of it
    python benchmarks/networks.py --backend packet

Every line is target, measured, error; nothing is kept from an earlier run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence

from edgetrain.fleet import networks
from edgetrain.fleet.networks import Burst, Direction, Profile
from edgetrain.fleet.networks.emulation.check import jitter_deviation, loss_deviation
from edgetrain.fleet.networks.emulation.measure import (
    PAYLOAD_SHARE,
    Bench,
    drawn_ms,
    line_mbit,
    one_way,
    one_ways,
    steady_mbit,
)
from edgetrain.fleet.networks.links.model import link_seeds


def both(**figures: object) -> Profile:
    way = Direction(**figures)  # type: ignore[arg-type]
    return Profile("bench", "", way, way)


def round_trip(backend: str) -> None:
    """Median round trip: of datagrams by the kernel's stamps, of TCP as a program sees it."""
    for rtt_ms in (1, 2, 10, 50, 200, 500, 1000):
        profile = both(delay_ms=rtt_ms / 2)
        with networks.emulate([profile], backend=backend) as net, Bench(net) as bench:
            count = 200 if rtt_ms < 100 else 40
            tcp = bench.client.do("rtt", count=count // 2, gap_s=0.003)
            if backend == "stream":
                link = tcp
            else:
                link = bench.client.do("echoes", count=count, gap_s=0.011)
            report = net.report()
        error = statistics.median(link) - rtt_ms
        print(
            f"round-trip {backend:6} target {rtt_ms:5} ms  link {rtt_ms + error:9.3f}  "
            f"error {error:+.3f} ms  TCP as a program sees it {statistics.median(tcp):9.3f} ms  "
            f"late p99 {report['late_ms_p99']:.3f}",
            flush=True,
        )


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


def rate(backend: str) -> None:
    """Payload rate against the rate that the profile gives, less headers."""
    for mbit in (1, 5, 20, 100, 200, 500):
        profile = both(delay_ms=10, rate_mbit=mbit)
        target = mbit * PAYLOAD_SHARE
        for way in ("push", "pull"):
            with networks.emulate([profile], backend=backend) as net, Bench(net) as bench:
                seen = bench.client.do(way, seconds=8 if mbit < 10 else 5)
            got = line_mbit(seen, skip=0.5)
            print(
                f"rate {backend:6} {way} {mbit:4} Mbit/s  payload target {target:8.3f}  "
                f"measured {got:8.3f}  error {100 * (got / target - 1):+.2f} %",
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


def loss(backend: str) -> None:
    """Datagrams lost, independent and in bursts, against the figure; in standard deviations."""
    if backend == "stream":
        return
    count = 20_000
    burst = Burst(1.0, 20.0)
    cases = [(f"{p} %", both(delay_ms=5, loss_percent=p), p) for p in (0.1, 1.0, 5.0)]
    cases.append(("burst 1/20", both(delay_ms=5, burst=burst), burst.mean_percent))
    for name, profile, target in cases:
        with networks.emulate([profile], backend=backend) as net, Bench(net) as bench:
            seen = one_way(bench, count, 0.0001)
        off = (seen.lost_percent - target) / loss_deviation(profile.up, count)
        print(
            f"loss {backend:6} {name:10} target {target:.3f} %  measured {seen.lost_percent:.3f} %"
            f"  {off:+.2f} sigma",
            flush=True,
        )


def jitter(backend: str) -> None:
    """Mean and deviation of the one-way delay over four links, and whether order was kept.

    The emulator's draws are repeated: their distance from the profile is chance, the distance of
    the measurement from them is the error of emulation and measurement.
    """
    if backend == "stream":
        return
    links, seconds = 4, 40
    for jitter_ms in (1.0, 2.0, 5.0):
        profile = both(delay_ms=50, jitter_ms=jitter_ms)
        emulation = networks.emulate([profile] * links, backend=backend, seed=1)
        with emulation as net, Bench(net, range(links)) as bench:
            seen = one_ways(bench, bench.clients, int(seconds / 0.001), 0.001)
        mean, deviation = spread([s.delays_ms for s in seen])
        line = (
            f"jitter {backend:6} 50 ± {jitter_ms:g} ms  mean {mean:.3f} "
            f"({100 * (mean / 50 - 1):+.2f} %)  deviation {deviation:.3f} "
            f"({100 * (deviation / jitter_ms - 1):+.2f} %, chance alone "
            f"±{100 * jitter_deviation(profile.up, links * seconds):.1f} %)"
        )
        if backend == "packet":
            seeds = (link_seeds(1, place)[0] for place in range(links))
            drawn = [
                drawn_ms(profile.up, drawn_by, s.sent_ns)
                for drawn_by, s in zip(seeds, seen, strict=True)
            ]
            _, ideal = spread(drawn)
            line += f"  of the {ideal:.3f} drawn: {100 * (deviation / ideal - 1):+.2f} %"
        print(f"{line}  order kept: {all(s.in_order for s in seen)}", flush=True)


def spread(links: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the mean, and the root mean square of each link's deviation from its own mean."""
    means = [statistics.fmean(delays) for delays in links]
    squares = [statistics.pvariance(delays) for delays in links]
    return statistics.fmean(means), math.sqrt(statistics.fmean(squares))


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
    "round-trip": round_trip,
    "throughput": throughput,
    "rate": rate,
    "crowd": crowd,
    "loss": loss,
    "jitter": jitter,
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
