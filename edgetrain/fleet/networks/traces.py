"""Recorded traces: packet-delivery times (mahimahi's format) and a CSV of delays.

Reads and checks only; `model` plays traces. Files are read once and cached.
"""

from __future__ import annotations

import csv
import itertools
from functools import lru_cache
from pathlib import Path

from edgetrain.errors import ConfigError

#: Bytes that one line of a packet-delivery trace can carry: one full frame of the recorder.
DELIVERY_BYTES = 1504


@lru_cache(maxsize=64)
def read_rate(file: str) -> tuple[int, ...]:
    """Read delivery times in milliseconds, which never decrease; the last is the trace's length.

    The format is mahimahi's (mm-link): one integer per line, each an opportunity to deliver 1504
    bytes at that millisecond. The trace repeats after its last line. Raises ConfigError, OSError.
    """
    times: list[int] = []
    for line_number, line in enumerate(Path(file).read_text("utf-8").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not text.isdecimal():
            raise ConfigError(f"{file}:{line_number}: '{text[:40]}' is not a whole millisecond")
        if times and int(text) < times[-1]:
            raise ConfigError(f"{file}:{line_number}: {text} ms is earlier than the line before")
        times.append(int(text))
    if not times or times[-1] < 1:
        raise ConfigError(f"{file}: no packet-delivery time of 1 ms or later")
    return tuple(times)


@lru_cache(maxsize=64)
def read_delay(file: str) -> tuple[tuple[float, float], ...]:
    """Read points (seconds, one-way delay in ms), seconds rising from 0. ConfigError, OSError."""
    points: list[tuple[float, float]] = []
    with Path(file).open(encoding="utf-8", newline="") as lines:
        for line_number, row in enumerate(csv.reader(lines), 1):
            if not row or row[0].lstrip().startswith("#") or row[0].strip() == "seconds":
                continue
            points.append(_point(row, f"{file}:{line_number}"))
            if len(points) > 1 and points[-1][0] <= points[-2][0]:
                raise ConfigError(f"{file}:{line_number}: seconds must rise from line to line")
    if len(points) < 2 or points[0][0] != 0:
        raise ConfigError(f"{file}: a delay trace needs two points or more, the first at 0 seconds")
    return tuple(points)


def _point(row: list[str], where: str) -> tuple[float, float]:
    try:
        seconds, delay_ms = (float(cell) for cell in row)
    except ValueError:
        raise ConfigError(f"{where}: not `seconds,delay_ms`: {','.join(row)[:40]}") from None
    if not 0 <= delay_ms <= 60_000:
        raise ConfigError(f"{where}: delay_ms = {delay_ms:g} is out of range", "0 to 60000 ms")
    return seconds, delay_ms


def mean_rate_mbit(file: str) -> float:
    times = read_rate(file)
    return len(times) * DELIVERY_BYTES * 8 / (times[-1] * 1000)


def mean_delay_ms(file: str) -> float:
    """Return the mean over time of a delay trace, interpolated linearly between its points."""
    points = read_delay(file)
    area = sum(
        (right[0] - left[0]) * (left[1] + right[1]) / 2
        for left, right in itertools.pairwise(points)
    )
    return area / points[-1][0]
