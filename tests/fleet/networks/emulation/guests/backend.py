"""Runs as root inside user-mode-linux: the `tc` backend, measured with real traffic."""

from __future__ import annotations

import statistics
import subprocess
import sys

from edgetrain.fleet.networks import Direction, Profile, emulate
from edgetrain.fleet.networks.emulation.measure import Bench, line_mbit


def main() -> None:
    figures = Profile("test", "", Direction(delay_ms=30, rate_mbit=4), Direction(delay_ms=10))
    with emulate([figures] * 2, backend="tc", congestion="reno") as net:
        with Bench(net, (0, 1)) as bench:
            found = [statistics.median(c.do("rtt", count=8, gap_s=0.01)) for c in bench.clients]
            mbit = line_mbit(bench.client.do("push", seconds=4))
        report = net.report()
    good = all(40 <= rtt < 60 for rtt in found)
    print("ok round trip" if good else f"FAILED round trip: {found} ms")
    paced = 3.4 < mbit < 4.0
    print("ok rate" if paced else f"FAILED rate: {mbit} Mbit/s")
    print(f"{found} ms, {mbit:.2f} Mbit/s, {report}")
    spaces = subprocess.run(
        ["sh", "-c", "ls -l /proc/*/ns/net 2>/dev/null | grep -o 'net:.*' | sort -u | wc -l"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    print("ok nothing left" if spaces == "1" else f"FAILED nothing left: {spaces} namespaces")
    sys.exit(not (good and paced and spaces == "1"))


if __name__ == "__main__":
    main()
