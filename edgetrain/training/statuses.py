"""From what members report to lines of status: sums become the seconds of the steps in between."""

from __future__ import annotations

from collections.abc import Mapping

from edgetrain.exchange.member.telemetry import UNKNOWN_CELSIUS
from edgetrain.exchange.messages import Telemetry

MOST_NAMES = 1 << 14
"""Names to remember a report of. Members come and go under any number of them."""

_PARTS = ("wait", "overhead", "eval", "end")


class Statuses:
    """The newest report of each member."""

    def __init__(self) -> None:
        self._newest: dict[str, Telemetry] = {}

    def __len__(self) -> int:
        """Members with a report."""
        return len(self._newest)

    def keys_of(
        self, member: str, told: Telemetry
    ) -> Mapping[str, float | int | bool | str | None]:
        """The keys of a line of status: docs/run-folder.md. Takes in the report."""
        before = self._newest.pop(member, None)
        self._newest[member] = told
        while len(self._newest) > MOST_NAMES:
            del self._newest[next(iter(self._newest))]
        if before is None or _is_anew(before, told):
            # Of a process that has just begun, or that this hub has not heard of before: its sums
            # are of an unknown number of steps.
            before = Telemetry(told.step, told.round, told.t_ms) if told.versions else None
        steps = told.step - before.step if before else told.step
        parts = {
            f"{part}_s": (_ms(told, part) - (_ms(before, part) if before else 0)) / 1000
            for part in _PARTS
        }
        passed_s = (told.t_ms - (before.t_ms if before else 0)) / 1000
        return {
            "step": told.step,
            "round": told.round,
            "steps": steps,
            "at": told.t_ms / 1000,
            "pace_s": passed_s / steps if steps else None,
            "compute_s": max(0.0, passed_s - sum(parts.values())),
            **parts,
            "round_trip_s": told.round_trip_us100 / 1e4 or None,
            "sent_bytes": told.sent_bytes,
            "received_bytes": told.received_bytes,
            "peak_bytes": told.memory_mb << 20 or None,
            "celsius": None if told.celsius == UNKNOWN_CELSIUS else told.celsius,
            "throttled": None if told.throttled < 0 else bool(told.throttled),
            "joules": None if told.joules < 0 else told.joules,
            "versions": told.versions or None,
        }


def _ms(told: Telemetry, part: str) -> int:
    value: int = getattr(told, f"{part}_ms")
    return value


def _is_anew(before: Telemetry, told: Telemetry) -> bool:
    """Whether another process says this: its sums have begun again."""
    return min(told.step - before.step, told.t_ms - before.t_ms) < 0 or any(
        _ms(told, p) < _ms(before, p) for p in _PARTS
    )
