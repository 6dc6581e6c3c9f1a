"""Format quantities for people: short, with their unit, in ASCII.

Tables, plain lines and pictures all use these functions, so that a number looks the same
everywhere. Data (--json, summary.json) stays in seconds, bytes and fractions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ABSENT = "-"


def size(count: float | None) -> str:
    """Bytes in decimal units, as links are sold. 1_234_567 is "1.23 MB"."""
    if count is not None and abs(count) < 999.5:
        return f"{count:.0f} B"
    return _scaled(count, ("B", "kB", "MB", "GB"))


def duration(seconds: float | None) -> str:
    """Seconds as a duration, from milliseconds to days. 75 is "1m15s", 0.0123 is "12.3 ms"."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1000)} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole / 86400:.1f} days"


def pace(local_steps: int | None, delay: int | None) -> str:
    """Steps in a round, and steps that a reply may take: "5, 12"; the second only if it is one."""
    if not local_steps:
        return ABSENT
    return f"{local_steps}, {delay}" if delay else str(local_steps)


def share(fraction: float | None) -> str:
    """A fraction in percent. 0.664 is "66 %"."""
    return ABSENT if fraction is None else f"{fraction * 100:.0f} %"


def figure(metric: str, value: float | None) -> str:
    """The value of a metric: an accuracy in percent, any other with three decimals. Large values,
    as of a model that diverges, are short: 1.23e+31."""
    if not isinstance(value, int | float):
        return ABSENT
    if abs(value) >= 1e6:
        return f"{value:.2e}"
    return f"{value * 100:.1f} %" if is_fraction(metric) else f"{value:.3f}"


def goal(metric: str, target: float) -> str:
    """A target: "97 %" for an accuracy of 0.97, "loss 0.2" for a loss."""
    return f"{target * 100:.4g} %" if is_fraction(metric) else f"{metric} {target:.4g}"


def is_fraction(metric: str) -> bool:
    """Whether a metric is shown in percent, as accuracies are."""
    return metric.endswith("accuracy")


def times(factor: float | None) -> str:
    """A speed-up. 7.84 is "7.8x"."""
    return ABSENT if factor is None else f"{_two_digits(factor)}x"


def energy(joules: float | None) -> str:
    return _scaled(joules, ("J", "kJ", "MJ"))


def natural(name: str) -> tuple[int, str]:
    digits = "".join(char for char in name if char.isdigit())
    return int(digits[:9] or 0), name


def beside(name: str, enrolled: str) -> str:
    return f"{name} {enrolled}" if enrolled not in ("", name) else name


def printable(text: str) -> str:
    """The text without control characters: other machines send names and reasons."""
    return "".join(char if char.isprintable() else " " for char in text)


def printable_lines(text: str) -> str:
    """The text without control characters but line ends."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def _scaled(value: float | None, names: Sequence[str]) -> str:
    """A value in the largest of these units, each 1000 of the one before, that leaves 1 or more."""
    if value is None:
        return ABSENT
    place = 0
    while abs(value) >= 999.5 and place < len(names) - 1:
        value, place = value / 1000, place + 1
    return f"{_three_digits(value)} {names[place]}"


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}"
