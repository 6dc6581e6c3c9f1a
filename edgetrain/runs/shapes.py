"""The shapes of the values of a run folder: the type and the limits of each key that is read.

A folder may come from another machine, another version, a disk that tore a file, or from somebody
who means harm. What has the wrong shape is refused where it is read, so that nothing behind the
reader has to ask. Keys that are not named here are kept as they are, and null is always allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

LARGEST = 1e100
"""Largest number. Larger ones overflow where they are squared or added up."""
LONGEST_S = 1e12
"""Longest time: 30,000 years."""
MOST_COUNT = 1 << 62
MOST_TEXT = 10_000
"""Characters, and names in a list."""

Is = Callable[[Any], bool]
Shape = Mapping[str, "Is | Shape"]
"""The shapes of the keys of a table; a table in it has a Shape of its own."""


def number(value: Any) -> bool:
    """A number that is finite and not too large."""
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST


def seconds(value: Any) -> bool:
    """A time."""
    return type(value) in (int, float) and -LONGEST_S <= value <= LONGEST_S


def count(value: Any) -> bool:
    """A whole number, not negative."""
    return type(value) is int and 0 <= value <= MOST_COUNT


def size(value: Any) -> bool:
    """Bytes, joules, a part: a number, not negative."""
    return type(value) in (int, float) and 0 <= value <= MOST_COUNT


def flag(value: Any) -> bool:
    """True or false."""
    return isinstance(value, bool)


def text(value: Any) -> bool:
    """Text that is not too long."""
    return isinstance(value, str) and len(value) <= MOST_TEXT


def texts(value: Any) -> bool:
    """A list of texts."""
    return isinstance(value, list) and len(value) <= MOST_TEXT and all(map(text, value))


def text_or_texts(value: Any) -> bool:
    """A text, or a list of texts."""
    return text(value) or texts(value)


def count_or_text(value: Any) -> bool:
    """A whole number, or a word such as "auto"."""
    return count(value) or text(value)


def numbers(value: Any) -> bool:
    """Numbers, or null, by name."""
    return isinstance(value, dict) and all(
        text(name) and (each is None or number(each)) for name, each in value.items()
    )


def counts(value: Any) -> bool:
    """Two whole numbers, not negative."""
    return isinstance(value, list) and len(value) == 2 and all(map(count, value))


def cuts(value: Any) -> bool:
    """[name, share left out, reason] of each contribution."""
    return isinstance(value, list) and all(
        isinstance(each, list)
        and len(each) == 3
        and text(each[0])
        and number(each[1])
        and text(each[2])
        for each in value
    )


def wrong(table: Mapping[str, Any], shape: Shape, path: str = "") -> str:
    """The first value that has not its shape, in words; "" if all have."""
    for key, expected in shape.items():
        value = table.get(key)
        if value is None:
            continue
        if callable(expected):
            if not expected(value):
                return f"{path}{key} = {_short(value)} is not {_named(expected)}"
        elif not isinstance(value, dict):
            return f"{path}{key} = {_short(value)} is not a table"
        elif said := wrong(value, expected, f"{path}{key}."):
            return said
    return ""


def fits(table: Mapping[str, Any], shape: Mapping[str, Is]) -> bool:
    """Whether a table without tables in it fits. Quick: it is asked for each line of metrics."""
    for key, expected in shape.items():
        value = table.get(key)
        if value is not None and not expected(value):
            return False
    return True


def _short(value: Any) -> str:
    said = repr(value) if isinstance(value, str | float | bool) else f"a {type(value).__name__}"
    return said if len(said) <= 40 else said[:37] + "..."


def _named(shape: Is) -> str:
    """The name of a shape, from its docstring."""
    said = (shape.__doc__ or "").rstrip(".").partition(":")[0]
    return said[:1].lower() + said[1:]


_USED = {
    "sent_bytes": size, "received_bytes": size, "cpu_s": seconds, "peak_bytes": size,
}  # fmt: skip
PARTS = ("compute_s", "wait_s", "overhead_s", "eval_s", "end_s")
"""What the seconds of a step are made of."""
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
        "round": count, "every": count, "delay": count, "members": count, "submitted_t": seconds,
        "arrived_t": seconds, "submit_s": seconds, "decode_s": seconds, "apply_s": seconds,
    },
    "eval": {"step": count, "round": count, "eval_s": seconds},
    "round": _USED | {
        "round": count, "members": texts, "missing": texts, "weight": number, "close_s": seconds,
        "delay": count, "every": count, "cuts": cuts, "codec": text, "lands": flag,
        "above_sent_bytes": size, "above_received_bytes": size,
        "ages": counts, "slices": count, "copies": count, "wasted": count, "loss": number,
        "step_length": number,
    },
    "figure": {
        "about": text, "metric": text, "value": number, "better": text, "step": count,
        "at": seconds,
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
    "strategy": {"name": text, "every": count_or_text, "delay": count_or_text, "codec": text},
    "hub": {"status_s": seconds},
}  # fmt: skip
"""Keys of job.toml that are read without a job being made of it."""

SUMMARY: Shape = {
    **_USED, **_PARTS,
    "format": count, "name": text, "status": text, "began": text, "task": text, "strategy": text,
    "metric": text, "better": text, "target": number, "final": numbers, "members": count,
    "network": text_or_texts, "device": text_or_texts, "every": count_or_text,
    "delay": count_or_text, "codec": text, "joules_source": text, "buffers": text,
    "overrun": text, "steps": count, "rounds": count, "seconds": seconds,
    "seconds_per_step": seconds, "steps_per_second": number, "target_seconds": seconds,
    "target_steps": count, "joules": size, "members_lost": texts,
    "members_removed": texts, "errors": texts,
    "contributions_missed": count, "contributions_late": count, "contributions_cut": numbers,
    "corrections": numbers, "ages": counts,
    "least_waiting": text, "least_busy_s": seconds, "least_wait_s": seconds,
    "gateways": {"sent_bytes": size, "received_bytes": size},
    "hub": _USED | {"above_sent_bytes": size, "above_received_bytes": size},
    "emulation": {
        "backend": text, "trusted": flag, "late_ms_p99": number, "late_limit_ms": number,
        "ring_dropped": count,
    },
}  # fmt: skip
"""Keys of summary.json that runs have; comparisons, sweeps and plans have others besides."""

ENVIRONMENT: Shape = {"started": text, "command": text_or_texts}
