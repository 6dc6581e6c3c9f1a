"""Network profiles: figures with units in their names, read from TOML and checked.

A profile has two directions: `up` is from a member to the hub, `down` is from the hub to a member.
This module does not open sockets and does not know backends. It does not clamp: a value out of
range is an error that names the file, the key and the range.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, refuse_first
from edgetrain.files.tables import key, ranged, read
from edgetrain.fleet import catalog
from edgetrain.fleet.networks import traces
from edgetrain.fleet.networks.links.receive_window import first_offer
from edgetrain.fleet.networks.links.window import MSS

DISTRIBUTIONS = ("normal", "uniform", "pareto")
MOST_DELAY_MS = 60_000


def _percent(default: Any, low: float = 0) -> Any:
    return ranged(default, low, 100, "percent per packet, 0 to 100", "%")


@dataclass(frozen=True, slots=True)
class Burst:
    """Loss in bursts: the two-state chain of Gilbert (1960) and Elliott (1963), stepped per packet.

    The four numbers are those of netem's `loss gemodel p r 1-h 1-k`, in percent.
    """

    enter_percent: float = _percent(MISSING)  # good to bad, p
    leave_percent: float = _percent(MISSING, 0.001)  # bad to good, r
    lost_in_bad_percent: float = _percent(100.0)  # 1-h
    lost_in_good_percent: float = _percent(0.0)  # 1-k

    @property
    def mean_percent(self) -> float:
        """The loss of the stationary chain."""
        total = self.enter_percent + self.leave_percent
        bad = self.enter_percent / total
        return bad * self.lost_in_bad_percent + (1 - bad) * self.lost_in_good_percent


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction of a link. Zero means "unlimited" for a rate and "none" for all other keys."""

    delay_ms: float = ranged(0.0, 0, MOST_DELAY_MS, unit="ms")  # propagation, one way
    jitter_ms: float = ranged(0.0, 0, 10_000, unit="ms")  # standard deviation of the delay
    jitter_period_ms: float = ranged(0.0, 0, 60_000, unit="ms")
    """Period between draws; 0: 5 jitter_ms, 13 if pareto."""
    jitter_correlation: float = ranged(0.0, 0, 0.99)  # of neighbouring draws
    distribution: str = key("normal", choices=DISTRIBUTIONS)
    rate_mbit: float = ranged(0.0, 0, 100_000, unit="Mbit/s")  # on the wire: payload and headers
    queue_kb: float = ranged(0.0, 0, 1_000_000, unit="kB")
    """Drop-tail queue before the rate; 0: the larger of 64 kB and 100 ms."""
    loss_percent: float = _percent(0.0)  # independent, per packet
    burst: Burst | None = None  # instead of loss_percent
    reorder_percent: float = _percent(0.0)  # packets without the delay, as in netem's `reorder`
    duplicate_percent: float = _percent(0.0)
    corrupt_percent: float = _percent(0.0)  # one bit of the packet is flipped
    rate_trace: str = ""  # packet-delivery times in ms (mahimahi's format), repeated
    delay_trace: str = ""  # CSV of `seconds,delay_ms`, instead of delay and jitter, repeated
    slow_start_after_idle: bool = True  # of the sender's TCP, as Linux's sysctl of this name
    first_window: int = ranged(0, 1, 1000, unit="segments")
    """Initial window of the sender's TCP; 0: ten, as Linux."""
    receive_kb: float = ranged(0.0, 131, 6000, unit="kB")
    """The receiver's first buffer (tcp_rmem); 0: 131, as Linux."""

    @property
    def queue_bytes(self) -> int:
        """The queue in bytes, with its default computed; 0 if there is no rate."""
        if not self.rate_mbit and not self.rate_trace:
            return 0
        if self.queue_kb:
            return int(self.queue_kb * 1000)
        return max(64_000, int(self.mean_rate_mbit * 1e6 / 8 * 0.1))

    @property
    def mean_rate_mbit(self) -> float:
        return traces.mean_rate_mbit(self.rate_trace) if self.rate_trace else self.rate_mbit

    @property
    def mean_loss_percent(self) -> float:
        return self.burst.mean_percent if self.burst else self.loss_percent

    @property
    def mean_delay_ms(self) -> float:
        return traces.mean_delay_ms(self.delay_trace) if self.delay_trace else self.delay_ms

    @property
    def is_plain(self) -> bool:
        """Whether this direction does not change traffic at all."""
        return self == Direction(
            jitter_period_ms=self.jitter_period_ms,
            jitter_correlation=self.jitter_correlation,
            distribution=self.distribution,
            queue_kb=self.queue_kb,
            slow_start_after_idle=self.slow_start_after_idle,
            first_window=self.first_window,
            receive_kb=self.receive_kb,
        )


@dataclass(frozen=True)
class Profile:
    """The network of one member: its link up to the hub and its link down."""

    name: str
    title: str = ""
    up: Direction = Direction()
    down: Direction = Direction()
    source: Mapping[str, str] = field(default_factory=dict, compare=False, hash=False)

    @property
    def rtt_ms(self) -> float:
        """The round trip without load: the sum of both mean delays."""
        return self.up.mean_delay_ms + self.down.mean_delay_ms

    @property
    def has_loss(self) -> bool:
        return bool(self.up.mean_loss_percent or self.down.mean_loss_percent)


BARE = Profile("none")
"""No link: traffic is not changed."""


@dataclass(frozen=True)
class _File:
    title: str = ""
    both: dict[str, Any] = key(dict)
    up: dict[str, Any] = key(dict)
    down: dict[str, Any] = key(dict)
    source: dict[str, str] = key(dict)


_PARAMETRIC = re.compile(r"rtt-(\d+(?:\.\d+)?)ms")


def load(name: str) -> Profile:
    """Read a profile by its name, by the path of a .toml file, or by a parametric name.

    `rtt-500ms` is a bare round trip of 500 ms without rate and loss; `none` does not change
    traffic. Raises ConfigError for an unknown profile (with the closest known one), and for a bad
    key or value in the file.
    """
    if name == "none":
        return Profile(name, "no emulation")
    if name.startswith("rtt-"):
        match = _PARAMETRIC.fullmatch(name)
        if match is None or float(match[1]) > 2 * MOST_DELAY_MS:
            raise ConfigError(
                f"network '{name}' is not a round trip from rtt-0ms to rtt-120000ms",
                "milliseconds: rtt=500, or network=rtt-500ms",
            )
        way = Direction(delay_ms=float(match[1]) / 2)
        return Profile(name, f"a bare round trip of {match[1]} ms", way, way)
    if (own := catalog.own("netem", name, Profile)) is not None:
        return replace(own, name=name)
    path, table = catalog.load("netem", name)
    return parse(Path(name).stem if name.endswith(".toml") else name, table, path)


def names() -> list[str]:
    return sorted(catalog.names("netem"), key=lambda name: (load(name).rtt_ms, name))


def parse(name: str, table: Mapping[str, Any], path: Path) -> Profile:
    """Build a profile from a TOML table. Errors name `path`, traces are relative to it."""
    file = read(_File, table, str(path))
    up = _direction({**file.both, **file.up}, path, "up")
    down = _direction({**file.both, **file.down}, path, "down")
    return Profile(name, file.title, up, down, file.source)


def _direction(table: Mapping[str, Any], path: Path, way: str) -> Direction:
    found = read(Direction, table, str(path), f"{way}.")
    refuse_first(
        (found.burst and found.loss_percent,
         f"{path}: {way}.burst and {way}.loss_percent exclude each other", "drop one"),
        (found.rate_trace and found.rate_mbit,
         f"{path}: {way}.rate_trace and {way}.rate_mbit exclude each other", "drop one"),
        (found.delay_trace and (found.delay_ms or found.jitter_ms),
         f"{path}: {way}.delay_trace replaces delay_ms and jitter_ms", "drop them"),
        (found.reorder_percent and not (found.delay_ms or found.delay_trace),
         f"{path}: {way}.reorder_percent lets packets skip the delay, and there is none",
         f"set {way}.delay_ms, or drop it"),
    )  # fmt: skip
    offered = first_offer(found.receive_kb)
    refuse_first(
        (found.first_window * MSS > offered,
         f"{path}: {way}.first_window = {found.first_window}, and the receiver offers "
         f"{offered // 1000} kB at first: {offered // MSS} segments",
         f"fewer segments, or {way}.receive_kb = {2.1 * found.first_window * MSS / 1000:.0f}"),
        # A wider spread would need delays below zero, and clamping them would shift the mean.
        (found.jitter_ms > found.delay_ms / 4,
         f"{path}: {way}.jitter_ms = {found.jitter_ms:g} is out of range: "
         f"0 to {found.delay_ms / 4:g} ms (a quarter of delay_ms)",
         "a larger jitter would need delays below zero"),
    )  # fmt: skip
    given = {"rate_trace": found.rate_trace, "delay_trace": found.delay_trace}
    traced: Any = {k: _trace(k, v, path, f"{way}.{k}") for k, v in given.items() if v}
    return dataclasses.replace(found, **traced)


def _trace(key: str, value: str, path: Path, where: str) -> str:
    """Return the absolute path of a trace, after reading it once so that a bad file fails here."""
    file = (path.parent / value).resolve()
    reader = traces.read_rate if key == "rate_trace" else traces.read_delay
    try:
        reader(str(file))
    except OSError as error:
        raise ConfigError(
            f"{path}: {where} = '{value}' cannot be read: {error.strerror}",
            "the path is relative to the profile's file",
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {where}: {error.message}", error.hint) from None
    return str(file)
