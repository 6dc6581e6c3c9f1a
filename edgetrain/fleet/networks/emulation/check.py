"""Compare an emulated network with its profile, by real traffic: target, measured, error."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from edgetrain.fleet.networks.emulation.emulation import Emulation
from edgetrain.fleet.networks.emulation.measure import PAYLOAD_SHARE, Bench, line_mbit, one_way
from edgetrain.fleet.networks.emulation.start import emulate
from edgetrain.fleet.networks.links.model import jitter_period_s
from edgetrain.fleet.networks.profile import Direction, Profile

_LOSS_DATAGRAMS = 10_000
_PROBE_BYTES = {"rtt": 64 + 66, "echoes": 64 + 42}  # with headers, over TCP and UDP
_ACKNOWLEDGED = 2 * 1514 / 66  # bytes of segments for each byte of their acknowledgement


@dataclass(frozen=True, slots=True)
class Finding:
    """One measured figure of one profile, in `unit`. `good`: it is within tolerance, or cannot be
    held against the profile, as the note says, and so is not `judged`."""

    network: str
    figure: str
    target: float
    measured: float
    unit: str
    good: bool
    note: str = ""
    judged: bool = True

    @property
    def error(self) -> str:
        """The deviation as text: in ms for times, in percent of the target otherwise."""
        if self.unit == "ms":
            return f"{self.measured - self.target:+.3f} ms"
        if not self.target:
            return f"{self.measured:+.3g} {self.unit}"
        return f"{100 * (self.measured / self.target - 1):+.1f} %"


def check(profile: Profile, backend: str = "auto", seconds: float = 4.0) -> Iterator[Finding]:
    """Measure one profile on one backend of this machine, for about 4 * `seconds`.

    Yields findings as they are measured. The target of a round trip has the time that the probe's
    own bytes take on lines with a rate. `good` means: round trip within 0.3 ms, 2 % or 3 standard
    deviations of its median, rate within 2 % of the payload share, loss within 3 standard
    deviations, jitter within 2 % plus 3 standard deviations.
    Raises NetworkError if the profile or the backend cannot be used here.
    """
    seed = zlib.crc32(profile.name.encode()) % 1000  # different draws for each profile
    with emulate([profile], backend=backend, seed=seed) as net, Bench(net) as bench:
        yield round_trip(profile, net, bench)
        yield from rates(profile, net, bench, seconds)
        if net.backend != "stream":
            yield from _one_way(profile, bench, seconds)


def round_trip(profile: Profile, net: Emulation, bench: Bench) -> Finding:
    count = max(10, min(100, int(3000 / max(profile.rtt_ms, 1))))
    if net.backend in ("stream", "none"):
        verb, gap_s, note = "rtt", 0.005, "as a program sees it"
    else:
        verb, gap_s, note = "echoes", 0.02, "by the kernel's stamps"
    # A probe that waits for the one before would be measured with it.
    sent_ms = [_PROBE_BYTES[verb] * 0.008 / rate for rate in _rates(profile) if rate]
    gap_s = max(gap_s, 2 * max(sent_ms, default=0) / 1000)
    count = max(10, min(count, int(20 / gap_s)))
    seconds = bench.client.do(verb, count=count, gap_s=gap_s)
    target = profile.rtt_ms + sum(sent_ms)
    measured = statistics.median(seconds) if seconds else float("nan")
    spent = count * gap_s
    chance = math.hypot(*(median_deviation(way, spent) for way in (profile.up, profile.down)))
    allowed = max(0.3, 0.02 * target, 3 * chance)
    good = abs(measured - target) <= allowed
    if chance:
        note += f", ±{3 * chance:.2g} ms by chance"
    return Finding(profile.name, "round trip", target, measured, "ms", good, note)


def _rates(profile: Profile) -> tuple[float, float]:
    return profile.up.mean_rate_mbit, profile.down.mean_rate_mbit


def rates(profile: Profile, net: Emulation, bench: Bench, seconds: float) -> Iterator[Finding]:
    """Measure the rate of TCP each way. It is judged only where the line is what limits it."""
    up, down = profile.up, profile.down
    for name, way, back, verb in (("up", up, down, "push"), ("down", down, up, "pull")):
        rate = way.mean_rate_mbit
        if not rate:
            continue
        limits = (
            (way.mean_loss_percent, f"{net.request.congestion} over {way.mean_loss_percent:.2g} % "
             "loss"),
            (0 < back.mean_rate_mbit * _ACKNOWLEDGED < rate, "acknowledgements fill the way back"),
            (profile.rtt_ms * rate >= 20_000, "the window may be the limit"),
        )  # fmt: skip
        note = next((f"not measurable over TCP: {why}" for holds, why in limits if holds), "")
        duration = seconds + 12 * profile.rtt_ms / 1000 + 1.0 / rate
        measured = line_mbit(bench.client.do(verb, seconds=duration), skip=0.6)
        target = rate * PAYLOAD_SHARE
        near = abs(measured / target - 1) <= 0.02
        judged = near or not note
        yield Finding(
            profile.name, f"rate {name}", target, measured, "Mbit/s", near or not judged, note,
            judged,
        )  # fmt: skip


def _one_way(profile: Profile, bench: Bench, seconds: float) -> Iterator[Finding]:
    """Measure loss and jitter of the link up with numbered datagrams."""
    way = profile.up
    if not way.mean_loss_percent and not way.jitter_ms:
        return
    # Spread over the whole time, so that jitter is drawn often.
    gap = max(
        2 * seconds / _LOSS_DATAGRAMS,
        8 * 100 / 1e6 / (0.5 * way.mean_rate_mbit) if way.mean_rate_mbit else 0,
    )
    count = int(2 * seconds / gap)
    seen = one_way(bench, count, gap)
    if way.mean_loss_percent:
        target = way.mean_loss_percent
        allowed = 3 * loss_deviation(way, count)
        good = abs(seen.lost_percent - target) <= allowed
        yield Finding(
            profile.name,
            "loss up",
            target,
            seen.lost_percent,
            "%",
            good,
            f"±{allowed:.2g} by chance",
        )
    if way.jitter_ms:
        chance = jitter_deviation(way, 2 * seconds)
        good = abs(seen.deviation_ms / way.jitter_ms - 1) <= 0.02 + 3 * chance
        note = f"±{300 * chance:.2g} % by chance" + ("" if seen.in_order else ", order not kept")
        yield Finding(profile.name, "jitter up", way.jitter_ms, seen.deviation_ms, "ms", good, note)


def median_deviation(way: Direction, seconds: float) -> float:
    """Return the standard deviation, in ms, of the median of a delay measured for `seconds`.

    Draws vary more than the interpolated delay by sqrt(3/2), a median more than a mean by 1.25.
    """
    if not way.jitter_ms:
        return 0.0
    return 1.5 * way.jitter_ms / math.sqrt(max(seconds / jitter_period_s(way), 1))


def jitter_deviation(way: Direction, seconds: float) -> float:
    """Return the relative standard deviation of a jitter measured for `seconds`.

    For linear interpolation between normal draws: 0.75 / sqrt(draws); correlation widens it.
    """
    draws = max(seconds / jitter_period_s(way), 1)
    keep = way.jitter_correlation
    return float(0.75 * ((1 + keep) / (1 - keep) / draws) ** 0.5)


def loss_deviation(way: Direction, count: int) -> float:
    """Return the standard deviation, in percent, of the share lost among `count` packets.

    Bursts are not independent draws: the memory k of the chain widens it by (1 + k) / (1 - k).
    """
    share = way.mean_loss_percent / 100
    keep = 0.0
    if way.burst:
        keep = max(0.0, 1 - (way.burst.enter_percent + way.burst.leave_percent) / 100)
    variance = share * (1 - share) / count * (1 + keep) / (1 - keep)
    return float(100 * variance**0.5)


def as_json(finding: Finding) -> dict[str, Any]:
    return asdict(finding) | {"error": finding.error}
