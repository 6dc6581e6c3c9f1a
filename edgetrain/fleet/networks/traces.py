"""Recorded traces: packet-delivery times (mahimahi's format) and a CSV of delays.

Reads and checks only; `model` plays traces. Files are read once and cached.
"""

from __future__ import annotations

import io
import itertools
from array import array
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.files.reading import open_regular

#: Bytes that one line of a packet-delivery trace can carry: one full frame of the recorder.
DELIVERY_BYTES = 1504
_MOST_MS = 2**32 - 1
_MOST_SECONDS, _NS = 1e9, 1_000_000_000


@lru_cache(maxsize=64)
def read_rate(file: str) -> array[int]:
    """Read delivery times in milliseconds, which never decrease; the last is the trace's length.

    The format is mahimahi's (mm-link): one integer per line, each an opportunity to deliver 1504
    bytes at that millisecond. The trace repeats after its last line. Takes 4 bytes a line, which
    no caller may change. Raises ConfigError, FileNotFoundError.
    """
    times, before = array("I"), 0
    for where, text in _lines(file):
        if not text.isdecimal() or len(text) > 10 or (now := int(text)) > _MOST_MS:
            raise ConfigError(
                f"{where}: '{text[:40]}' is not a whole millisecond from 0 to {_MOST_MS}"
            )
        if now < before:
            raise ConfigError(f"{where}: {text} ms is earlier than the line before")
        times.append(now)
        before = now
    if before < 1:
        raise ConfigError(f"{file}: no packet-delivery time of 1 ms or later")
    return times


@lru_cache(maxsize=64)
def read_delay(file: str) -> tuple[array[int], array[int]]:
    """Read points of a one-way delay: their times, which rise from 0, and delays, both in ns.

    Each line is `seconds,delay_ms`. No caller may change the arrays. Raises ConfigError,
    FileNotFoundError.
    """
    times, delays = array("q"), array("q")
    for where, text in _lines(file):
        if text.partition(",")[0].strip(' "') == "seconds":
            continue
        time, delay = _point(text, where)
        if not times and time:
            raise ConfigError(f"{where}: the first point is not at 0 seconds")
        if times and time <= times[-1]:
            raise ConfigError(f"{where}: seconds must rise from line to line")
        times.append(time)
        delays.append(delay)
    if len(times) < 2:
        raise ConfigError(f"{file}: a delay trace needs two points or more")
    return times, delays


def _lines(file: str) -> Iterator[tuple[str, str]]:
    """Yield (file and number, text) of each line that is neither empty nor a comment."""
    with io.TextIOWrapper(open_regular(Path(file)), "utf-8-sig", "surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            text, where = line.strip(), f"{file}:{number}"
            if not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text):
                raise ConfigError(f"{where}: not text in UTF-8", "save the trace as UTF-8")
            if text and not text.startswith("#"):
                yield where, text


def _point(text: str, where: str) -> tuple[int, int]:
    try:
        seconds, delay_ms = (float(cell.strip(' "')) for cell in text.split(","))
    except ValueError:
        raise ConfigError(f"{where}: not `seconds,delay_ms`: {text[:40]}") from None
    if not 0 <= seconds <= _MOST_SECONDS:
        raise ConfigError(f"{where}: seconds = {seconds:g} is out of range", "0 to 1e9 s")
    if not 0 <= delay_ms <= 60_000:
        raise ConfigError(f"{where}: delay_ms = {delay_ms:g} is out of range", "0 to 60000 ms")
    return int(seconds * _NS), int(delay_ms * _NS / 1000)


def mean_rate_mbit(file: str) -> float:
    times = read_rate(file)
    return len(times) * DELIVERY_BYTES * 8 / (times[-1] * 1000)


def mean_delay_ms(file: str) -> float:
    """Return the mean over time of a delay trace, interpolated linearly between its points."""
    times, delays = read_delay(file)
    spans = zip(itertools.pairwise(times), itertools.pairwise(delays), strict=True)
    area = sum((end - start) * (left + right) / 2 for (start, end), (left, right) in spans)
    return area / times[-1] / 1e6
