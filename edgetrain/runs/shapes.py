"""The shapes of the values of a run folder: the type and the limits of each key that is read.

A folder may come from another machine, another version, a disk that tore a file, or from somebody
who means harm. What has the wrong shape is refused where it is read, so that nothing behind the
reader has to ask. Keys that are not named here are kept as they are, and null is always allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LARGEST = 1e100
"""Largest number. Larger ones overflow where they are squared or added up."""
LONGEST_S = 1e12
"""Longest time: 30,000 years."""
MOST_COUNT = 1 << 62
MOST_TEXT = 10_000
"""Characters, and names in a list."""


class Is(NamedTuple):
    """Allowed values, in words and as a check."""

    said: str
    fits: Callable[[Any], bool]


Shape = Mapping[str, "Is | Shape"]
"""The shapes of the keys of a table; a table in it has a Shape of its own."""


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _list(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, list) and len(v) <= MOST_TEXT and all(map(fits, v))


number = Is("a number that is finite and not too large", _number(-LARGEST, LARGEST))
seconds = Is("a time", _number(-LONGEST_S, LONGEST_S))
size = Is("a number, not negative", _number(0, MOST_COUNT))
"""Bytes, joules, a part."""
count = Is(
    "a whole number, not negative", lambda value: type(value) is int and 0 <= value <= MOST_COUNT
)
flag = Is("true or false", lambda value: isinstance(value, bool))
text = Is(
    "text that is not too long", lambda value: isinstance(value, str) and len(value) <= MOST_TEXT
)
texts = Is("a list of texts", _list(text.fits))
text_or_texts = Is(
    "a text, or a list of texts", lambda value: text.fits(value) or texts.fits(value)
)
count_or_text = Is(
    'a whole number, or a word such as "auto"', lambda value: count.fits(value) or text.fits(value)
)
numbers = Is(
    "numbers, or null, by name",
    lambda value: (
        isinstance(value, dict)
        and all(text.fits(k) and (v is None or number.fits(v)) for k, v in value.items())
    ),
)
counts = Is(
    "two whole numbers, not negative", lambda value: _list(count.fits)(value) and len(value) == 2
)


def _rows(*cells: Is) -> Callable[[Any], bool]:
    return _list(
        lambda row: (
            isinstance(row, list)
            and len(row) == len(cells)
            and all(is_.fits(cell) for is_, cell in zip(cells, row, strict=True))
        )
    )


tables = Is(
    "tables of numbers, by name",
    lambda value: isinstance(value, dict) and all(map(numbers.fits, value.values())),
)
cuts = Is("[name, share left out, reason] of each contribution", _rows(text, number, text))
sums = Is("[name, sum, count] of each figure", _rows(text, number, size))


def wrong(table: Mapping[str, Any], shape: Shape, path: str = "") -> str:
    """The first value that has not its shape, in words; "" if all have."""
    for key, expected in shape.items():
        value = table.get(key)
        if value is None:
            continue
        if isinstance(expected, Is):
            if not expected.fits(value):
                return f"{path}{key} = {_short(value)} is not {expected.said}"
        elif not isinstance(value, dict):
            return f"{path}{key} = {_short(value)} is not a table"
        elif said := wrong(value, expected, f"{path}{key}."):
            return said
    return ""


def fits(table: Mapping[str, Any], shape: Mapping[str, Is]) -> bool:
    """Whether a table without tables in it fits. Quick: it is asked for each line of metrics."""
    for key, (_, is_fit) in shape.items():
        value = table.get(key)
        if value is not None and not is_fit(value):
            return False
    return True


def _short(value: Any) -> str:
    said = repr(value) if isinstance(value, str | float | bool) else f"a {type(value).__name__}"
    return said if len(said) <= 40 else said[:37] + "..."


_USED = {
    "sent_bytes": size, "received_bytes": size, "cpu_s": seconds, "peak_bytes": size,
}  # fmt: skip
PARTS = ("compute_s", "wait_s", "overhead_s", "eval_s", "end_s")
"""Parts of a step's seconds."""
_PARTS = dict.fromkeys(PARTS, seconds)
_STEP: dict[str, Is] = {
    **_USED, **_PARTS, "step": count, "steps": count, "round": count, "loss": number,
    "joules": size,
}  # fmt: skip

LINES: dict[str, dict[str, Is]] = {
    "step": _STEP,
    "status": _STEP | {
        "about": text, "name": text, "at": seconds, "pace_s": seconds, "round_trip_s": seconds,
        "celsius": number, "throttled": flag, "disk_free_bytes": size, "swap_bytes": size,
        "mhz": count, "under_voltage": flag, "wifi_dbm": number, "clock_s": seconds,
        "versions": text,
    },
    "exchange": _USED | {
        "round": count, "local_steps": count, "delay": count, "members": count,
        "submitted_t": seconds,
        "arrived_t": seconds, "submit_s": seconds, "decode_s": seconds, "apply_s": seconds,
    },
    "eval": {"step": count, "round": count, "eval_s": seconds},
    "round": _USED | {
        "round": count, "members": texts, "missing": texts, "weight": number, "close_s": seconds,
        "delay": count, "local_steps": count, "cuts": cuts, "codec": text, "final_sync": flag,
        "above_sent_bytes": size, "above_received_bytes": size,
        "ages": counts, "slices": count, "copies": count, "wasted": count, "loss": number,
        "step_length": number,
    },
    "figure": {
        "about": text, "metric": text, "value": number, "better": text, "step": count,
        "at": seconds,
    },
    "own_eval": {
        "about": text, "step": count, "round": count, "eval_s": seconds, "sums": sums,
    },
    "event": {"event": text, "reason": text, "about": text},
}  # fmt: skip
"""The keys of a line of metrics, by its kind."""

JOB: Shape = {
    "task": text,
    "fleet": {
        "members": count, "network": text_or_texts, "device": text_or_texts,
        "devices": text_or_texts,
    },
    "train": {"steps": count, "target": number},
    "strategy": {"name": text, "local_steps": count_or_text, "delay": count_or_text, "codec": text},
    "hub": {"status_s": seconds},
}  # fmt: skip
"""Keys of job.toml that are read without a job being made of it."""

SUMMARY: Shape = {
    **_USED, **_PARTS,
    "format": count, "name": text, "status": text, "began": text, "task": text, "strategy": text,
    "metric": text, "better": text, "target": number, "final": numbers, "members": count,
    "network": text_or_texts, "device": text_or_texts, "local_steps": count_or_text,
    "delay": count_or_text, "codec": text, "joules_source": text, "buffers": text,
    "overrun": text, "steps": count, "rounds": count, "seconds": seconds,
    "wall_seconds": seconds,
    "seconds_per_step": seconds, "steps_per_second": number, "target_seconds": seconds,
    "target_steps": count, "joules": size, "members_lost": texts,
    "members_removed": texts, "errors": texts,
    "contributions_missed": count, "contributions_late": count, "contributions_cut": numbers,
    "corrections": numbers, "ages": counts,
    "least_waiting": text, "least_busy_s": seconds, "least_wait_s": seconds,
    "own_data": {"step": count, "figures": tables},
    "gateways": {"sent_bytes": size, "received_bytes": size},
    "hub": _USED | {"above_sent_bytes": size, "above_received_bytes": size},
    "emulation": {
        "backend": text, "timing_ok": flag, "late_ms_p99": number, "late_limit_ms": number,
        "ring_dropped": count,
    },
}  # fmt: skip
"""Keys of summary.json that runs have; comparisons, sweeps and plans have others besides."""

ENVIRONMENT: Shape = {"started": text, "command": text_or_texts}
