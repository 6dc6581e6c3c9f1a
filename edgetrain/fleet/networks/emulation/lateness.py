"""An emulator's lateness: a histogram, its percentiles, and the limit for trusting a run."""

from __future__ import annotations

from typing import Any

_STEP_NS = 16_384  # a power of two near 16 microseconds, so that a shift finds the bucket
_SHIFT = 14
_BUCKETS = 4096  # up to 67 ms; later deliveries fall into one more bucket


class Lateness:
    """Counts deliveries by how late they were. Early ones (by the timer's lead) are on time."""

    def __init__(self) -> None:
        self.counts = [0] * (_BUCKETS + 1)
        self.worst_ns = 0

    def add(self, late_ns: int) -> None:
        if late_ns > self.worst_ns:
            self.worst_ns = late_ns
        bucket = late_ns >> _SHIFT if late_ns > 0 else 0
        self.counts[bucket if bucket < _BUCKETS else _BUCKETS] += 1

    def percentile_ms(self, share: float) -> float:
        """Return the upper edge of the bucket that contains this share; 0 without deliveries."""
        total = sum(self.counts)
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if count and seen >= share * total:
                edge_ns = (bucket + 1) * _STEP_NS if bucket < _BUCKETS else self.worst_ns
                return min(edge_ns, self.worst_ns) / 1e6
        return 0.0

    def report(self) -> dict[str, Any]:
        """Return percentiles in ms and the histogram in octaves: {upper edge in ms: deliveries}."""
        octaves: dict[str, int] = {}
        edge, bucket = 1, 0
        while bucket < _BUCKETS:
            count = sum(self.counts[bucket:edge])
            if count:
                octaves[f"{edge * _STEP_NS / 1e6:.3g}"] = count
            bucket, edge = edge, edge * 2
        if self.counts[_BUCKETS]:
            octaves["inf"] = self.counts[_BUCKETS]
        return {
            "deliveries": sum(self.counts),
            "late_ms_p50": self.percentile_ms(0.5),
            "late_ms_p99": self.percentile_ms(0.99),
            "late_ms_max": self.worst_ns / 1e6,
            "late_histogram_ms": octaves,
        }


def limit_ms(smallest_delay_ms: float) -> float:
    """Return the largest 99th percentile of a trusted run: 1 ms, or 2 % of the delay if larger."""
    return max(1.0, 0.02 * smallest_delay_ms)
