"""Runs as root in a guest: what a profile says, netem's words for it, and what its packets do.

Prints a line per figure, "ok" or "FAILED": the value in the profile, the words, what was measured.
"""

from __future__ import annotations

import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

from edgetrain.fleet.networks import Burst, Direction
from edgetrain.fleet.networks.emulation import linux, tc

HEADERS = 14 + 20 + 8
_TIMESTAMPNS, _RCVBUFFORCE = 35, 33
Seen = list[tuple[int, float]]
"""Number and delay in ms of each datagram that came."""


def wire() -> tuple[socket.socket, socket.socket]:
    """Sockets at both ends of a veth whose first end, d0, is here and is shaped."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    linux.unshare(linux.CLONE_NEWNET)
    there = os.open("/proc/self/ns/net", os.O_RDONLY)
    linux.setns(here, linux.CLONE_NEWNET)
    ip(f"link add d0 type veth peer name d1 netns /proc/{os.getpid()}/fd/{there}")
    ends = []
    for space, device, address in ((here, "d0", "10.9.0.1"), (there, "d1", "10.9.0.2")):
        linux.setns(space, linux.CLONE_NEWNET)
        ip(f"addr add {address}/24 dev {device}")
        ip(f"link set {device} up")
        end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        end.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, 64 << 20)
        end.setsockopt(socket.SOL_SOCKET, _TIMESTAMPNS, 1)
        end.bind((address, 9))
        ends.append(end)
    linux.setns(here, linux.CLONE_NEWNET)
    ends[0].connect(("10.9.0.2", 9))
    ends[0].send(b"")  # ARP, before anything is shaped
    ends[1].recv(1)
    return ends[0], ends[1]


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def send(ends: tuple[socket.socket, socket.socket], count: int, gap_s: float, size: int) -> Seen:
    """Send numbered datagrams of `size` bytes on the wire at a steady pace; return what came."""
    near, far = ends
    seen: Seen = []
    fill = bytes(size - HEADERS - 12)
    began = time.monotonic()
    for number in range(count):
        near.send(struct.pack("!Iq", number, time.time_ns()) + fill)
        while (left := began + (number + 1) * gap_s - time.monotonic()) > 0:
            if select.select([far], [], [], left)[0]:
                seen.append(take(far))
    while select.select([far], [], [], 12)[0]:
        seen.append(take(far))
    return seen


def take(far: socket.socket) -> tuple[int, float]:
    data, extra, _, _ = far.recvmsg(2048, 64)
    seconds, nanoseconds = struct.unpack("qq", extra[0][2])
    number, sent = struct.unpack_from("!Iq", data)
    return number, (seconds * 1_000_000_000 + nanoseconds - sent) / 1e6


@dataclass(frozen=True)
class Row:
    figure: str
    value: float
    way: Direction
    count: int = 2000
    gap_s: float = 0.002
    size: int = 64 + HEADERS


def delays(row: Row, seen: Seen) -> float:
    return statistics.fmean(delay for _, delay in seen)


def deviation(row: Row, seen: Seen) -> float:
    return statistics.pstdev(delay for _, delay in seen)


def rate(row: Row, seen: Seen) -> float:
    """Mbit/s of datagrams that were sent faster than the line is."""
    arrived = [number * row.gap_s * 1000 + delay for number, delay in seen]
    return (len(seen) - 1) * row.size * 8 / (arrived[-1] - arrived[0]) / 1000


def lost(row: Row, seen: Seen) -> float:
    return 100 * (1 - len({number for number, _ in seen}) / row.count)


def twice(row: Row, seen: Seen) -> float:
    return 100 * (len(seen) / len({number for number, _ in seen}) - 1)


def early(row: Row, seen: Seen) -> float:
    return 100 * sum(delay < row.way.delay_ms / 2 for _, delay in seen) / row.count


def rows() -> list[Row]:
    """Figures, each with enough packets that 3 % are three standard deviations or more."""
    table = [Row("delay", ms, Direction(delay_ms=ms), 20) for ms in (0.5, 100, 5000)]
    for distribution, count in (("normal", 8000), ("uniform", 4000), ("pareto", 20_000)):
        way = Direction(delay_ms=100, jitter_ms=20, distribution=distribution)
        table += [Row("jitter", 20, way, count), Row("mean", 100, way, count)]
    table += [
        Row("rate", mbit, Direction(rate_mbit=mbit), count, size / 1e6 / mbit, size)
        for mbit, count, size in ((0.0003, 4, 64), (0.0123, 20, 1514), (4, 200, 1514))
    ]
    burst = Burst(40, 40, 90, 10)
    return [
        *table,
        Row("loss", 50, Direction(loss_percent=50), 10_000),
        Row("loss", burst.mean_percent, Direction(burst=burst), 20_000),
        Row("duplicate", 50, Direction(duplicate_percent=50), 10_000),
        Row("corrupt", 50, Direction(corrupt_percent=50), 10_000, size=1400),
        Row("reorder", 50, Direction(delay_ms=50, reorder_percent=50), 10_000),
    ]


MEASURES = {"delay": delays, "mean": delays, "jitter": deviation, "rate": rate, "loss": lost,
            "corrupt": lost, "duplicate": twice, "reorder": early}  # fmt: skip


def main() -> None:
    ends = wire()
    failures, before, seen = 0, [[""]], Seen()
    for row in rows():
        words = tc.whole("d0", row.way)
        if words != before:
            if before[0][0]:  # what is not said again would stay as it was
                subprocess.run(["tc", "qdisc", "del", "dev", "d0", "root"], check=True)
            for command in words:
                subprocess.run(command, check=True)
            seen, before = send(ends, row.count, row.gap_s, row.size), words
        measured = MEASURES[row.figure](row, seen)
        off = 100 * (measured / row.value - 1)
        good = abs(off) <= 3
        failures += not good
        said = " ".join(words[0][6:])
        line = f"{row.figure} {row.value:g} | {said} | {measured:.5g} | {off:+.1f} %"
        print(f"ok {line}" if good else f"FAILED {line}", flush=True)
    sys.exit(failures)


if __name__ == "__main__":
    main()
