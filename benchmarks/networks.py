"""How well the emulated networks do what their profiles say, on this machine.

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
from collections.abc import Callable

from edgetrain import networks
from edgetrain.networks import Burst, Direction, Profile
from edgetrain.networks.measure import PAYLOAD_SHARE, Bench, line_mbit, one_way, steady_mbit


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
            client.begin("push", seconds=5)
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
        share = target / 100
        # Bursts are not independent draws: their variance is larger by the chain's correlation.
        keep = 1 - (burst.enter_percent + burst.leave_percent) / 100 if "burst" in name else 0.0
        sigma = 100 * math.sqrt(share * (1 - share) / count * (1 + keep) / (1 - keep))
        off = (seen.lost_percent - target) / sigma
        print(
            f"loss {backend:6} {name:10} target {target:.3f} %  measured {seen.lost_percent:.3f} %"
            f"  {off:+.2f} sigma",
            flush=True,
        )


def jitter(backend: str) -> None:
    """Mean and deviation of the one-way delay, and whether order was kept."""
    if backend == "stream":
        return
    for jitter_ms, seconds in ((1.0, 60), (2.0, 60)):
        profile = both(delay_ms=50, jitter_ms=jitter_ms)
        with networks.emulate([profile], backend=backend, seed=1) as net, Bench(net) as bench:
            seen = one_way(bench, int(seconds / 0.001), 0.001)
        draws = seconds / (5 * jitter_ms / 1000)
        print(
            f"jitter {backend:6} 50 ± {jitter_ms:g} ms  mean {seen.mean_ms:.3f} "
            f"({100 * (seen.mean_ms / 50 - 1):+.2f} %)  deviation {seen.deviation_ms:.3f} "
            f"({100 * (seen.deviation_ms / jitter_ms - 1):+.2f} %, chance alone "
            f"±{100 / math.sqrt(2 * draws):.1f} %)  order kept: {seen.in_order}",
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


#: Transfers that the stream backend's model was not tuned on: name, profile.
_HELD_OUT = ("wan-200ms", "home-fixed", "4g-good", "5g", "starlink", "dallas-washington")


def transfers(_: str, names: tuple[str, ...] = _HELD_OUT) -> None:
    """Messages over `stream` against the same over `packet`: seconds, ratio."""
    for name in _HELD_OUT:
        for size, fresh in ((1_000_000, True), (1_000_000, False), (8_000_000, False)):
            took: dict[str, float] = {}
            for backend in ("packet", "stream"):
                profile = networks.load(name)
                with networks.emulate([profile], backend=backend) as net, Bench(net) as bench:
                    found = bench.client.do("messages", size=size, count=5, fresh=fresh)
                took[backend] = statistics.median(found)
            ratio = took["stream"] / took["packet"]
            print(
                f"transfers {name:18} {size / 1e6:g} MB {'cold' if fresh else 'warm'}  packet "
                f"{took['packet']:.3f} s  stream {took['stream']:.3f} s  ratio {ratio:.2f}",
                flush=True,
            )


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
