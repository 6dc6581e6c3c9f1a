"""Network profiles: figures with units in their names, read from TOML and checked.

A profile has two directions: `up` is from a member to the hub, `down` is from the hub to a member.
This module does not open sockets and does not know backends. It does not clamp: a value out of
range is an error that names the file, the key and the range.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, did_you_mean, refuse_first
from edgetrain.fleet import catalog
from edgetrain.fleet.checks import Limits, known, number, text
from edgetrain.fleet.networks import traces
from edgetrain.fleet.networks.links.receive_window import first_offer
from edgetrain.fleet.networks.links.window import MSS

DISTRIBUTIONS = ("normal", "uniform", "pareto")


@dataclass(frozen=True, slots=True)
class Burst:
    """Loss in bursts: the two-state chain of Gilbert (1960) and Elliott (1963), stepped per packet.

    The four numbers are those of netem's `loss gemodel p r 1-h 1-k`, in percent.
    """

    enter_percent: float  # good to bad, p
    leave_percent: float  # bad to good, r
    lost_in_bad_percent: float = 100.0  # 1-h
    lost_in_good_percent: float = 0.0  # 1-k

    @property
    def mean_percent(self) -> float:
        """The loss of the stationary chain."""
        total = self.enter_percent + self.leave_percent
        bad = self.enter_percent / total
        return bad * self.lost_in_bad_percent + (1 - bad) * self.lost_in_good_percent


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction of a link. Zero means "unlimited" for a rate and "none" for all other keys."""

    delay_ms: float = 0.0  # propagation, one way
    jitter_ms: float = 0.0  # standard deviation of the delay
    jitter_period_ms: float = 0.0  # between draws; 0: 5 jitter_ms, 13 if pareto
    jitter_correlation: float = 0.0  # of neighbouring draws
    distribution: str = "normal"
    rate_mbit: float = 0.0  # on the wire: payload and headers
    queue_kb: float = 0.0  # drop-tail queue before the rate; 0: the larger of 64 kB and 100 ms
    loss_percent: float = 0.0  # independent, per packet
    burst: Burst | None = None  # instead of loss_percent
    reorder_percent: float = 0.0  # packets that skip the delay, as in netem's `reorder`
    duplicate_percent: float = 0.0
    corrupt_percent: float = 0.0  # one bit of the packet is flipped
    rate_trace: str = ""  # packet-delivery times in ms (mahimahi's format), repeated
    delay_trace: str = ""  # CSV of `seconds,delay_ms`, instead of delay and jitter, repeated
    slow_start_after_idle: bool = True  # of the sender's TCP, as Linux's sysctl of this name
    first_window: int = 0  # segments that the sender's TCP begins with; 0: ten, as Linux
    receive_kb: float = 0.0  # the receiver's first buffer (tcp_rmem); 0: 131, as Linux

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

RANGES: dict[str, Limits] = {
    "delay_ms": (0, 60_000, "ms"),
    "jitter_ms": (0, 10_000, "ms"),
    "jitter_period_ms": (0, 60_000, "ms"),
    "jitter_correlation": (0, 0.99, ""),
    "rate_mbit": (0, 100_000, "Mbit/s"),
    "queue_kb": (0, 1_000_000, "kB"),
    "loss_percent": (0, 100, "%"),
    "reorder_percent": (0, 100, "%"),
    "duplicate_percent": (0, 100, "%"),
    "corrupt_percent": (0, 100, "%"),
    "enter_percent": (0, 100, "%"),
    "leave_percent": (0.001, 100, "%"),
    "lost_in_bad_percent": (0, 100, "%"),
    "lost_in_good_percent": (0, 100, "%"),
    "first_window": (1, 1000, "segments"),
    "receive_kb": (131, 6000, "kB"),
}
_TOP = ("title", "both", "up", "down", "source")
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
        return _parametric(name)
    path, table = catalog.load("netem", name)
    return parse(Path(name).stem if name.endswith(".toml") else name, table, path)


def _parametric(name: str) -> Profile:
    match = _PARAMETRIC.fullmatch(name)
    if match is None or float(match[1]) > 2 * RANGES["delay_ms"][1]:
        raise ConfigError(
            f"network '{name}' is not a round trip from rtt-0ms to rtt-120000ms", "rtt-500ms"
        )
    way = Direction(delay_ms=float(match[1]) / 2)
    return Profile(name, f"a bare round trip of {match[1]} ms", way, way)


def names() -> list[str]:
    return sorted(catalog.names("netem"), key=lambda name: (load(name).rtt_ms, name))


def parse(name: str, table: Mapping[str, Any], path: Path) -> Profile:
    """Build a profile from a TOML table. Errors name `path`, traces are relative to it."""
    known(table, _TOP, f"{path}: ")
    both = _table(table, "both", path)
    ways = {
        way: _direction({**both, **_table(table, way, path)}, path, way) for way in ("up", "down")
    }
    source = {
        str(key): text(value, f"{path}: source.{key}")
        for key, value in _table(table, "source", path).items()
    }
    title = text(table.get("title", ""), f"{path}: title")
    return Profile(name, title, ways["up"], ways["down"], source)


def _direction(table: Mapping[str, Any], path: Path, way: str) -> Direction:
    known(table, (f.name for f in dataclasses.fields(Direction)), f"{path}: ", f"{way}.")
    values: dict[str, Any] = {}
    for key, value in table.items():
        where = f"{way}.{key}"
        if key == "burst":
            values[key] = _burst(value, path, where)
        elif key == "distribution":
            values[key] = _choice(value, DISTRIBUTIONS, path, where)
        elif key == "slow_start_after_idle":
            values[key] = _switch(value, path, where)
        elif key == "first_window":
            values[key] = int(number(value, RANGES[key], f"{path}: {where}", whole=True))
        elif key.endswith("_trace"):
            values[key] = _trace(key, value, path, where)
        else:
            values[key] = number(value, RANGES[key], f"{path}: {where}")
    made = Direction(**values)
    _consistent(made, path, way)
    return made


def _burst(table: Any, path: Path, where: str) -> Burst:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: {where} must be a table", "burst = { enter_percent = 1, … }")
    known(table, (f.name for f in dataclasses.fields(Burst)), f"{path}: ", f"{where}.")
    for key in ("enter_percent", "leave_percent"):
        if key not in table:
            raise ConfigError(f"{path}: {where}.{key} is missing", "percent per packet, 0 to 100")
    return Burst(**{k: number(v, RANGES[k], f"{path}: {where}.{k}") for k, v in table.items()})


def _consistent(way: Direction, path: Path, where: str) -> None:
    refuse_first(
        (way.burst and way.loss_percent,
         f"{path}: {where}.burst and {where}.loss_percent exclude each other", "drop one"),
        (way.rate_trace and way.rate_mbit,
         f"{path}: {where}.rate_trace and {where}.rate_mbit exclude each other", "drop one"),
        (way.delay_trace and (way.delay_ms or way.jitter_ms),
         f"{path}: {where}.delay_trace replaces delay_ms and jitter_ms", "drop them"),
        (way.reorder_percent and not (way.delay_ms or way.delay_trace),
         f"{path}: {where}.reorder_percent lets packets skip the delay, and there is none",
         f"set {where}.delay_ms, or drop it"),
    )  # fmt: skip
    offered = first_offer(way.receive_kb)
    refuse_first(
        (way.first_window * MSS > offered,
         f"{path}: {where}.first_window = {way.first_window}, and the receiver offers "
         f"{offered // 1000} kB at first: {offered // MSS} segments",
         f"fewer segments, or {where}.receive_kb = {2.1 * way.first_window * MSS / 1000:.0f}"),
        # A wider spread would need delays below zero, and clamping them would shift the mean.
        (way.jitter_ms > way.delay_ms / 4,
         f"{path}: {where}.jitter_ms = {way.jitter_ms:g} is out of range: "
         f"0 to {way.delay_ms / 4:g} ms (a quarter of delay_ms)",
         "a larger jitter would need delays below zero"),
    )  # fmt: skip


def _table(table: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: {key} must be a table", f"write [{key}]")
    return value


def _choice(value: Any, choices: tuple[str, ...], path: Path, where: str) -> str:
    chosen = text(value, f"{path}: {where}")
    if chosen not in choices:
        raise ConfigError(
            f"{path}: {where} = '{chosen}' is unknown; allowed: {', '.join(choices)}",
            did_you_mean(chosen, choices),
        )
    return chosen


def _switch(value: Any, path: Path, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: {where} = {value!r}: allowed are true and false")
    return value


def _trace(key: str, value: Any, path: Path, where: str) -> str:
    """Return the absolute path of a trace, after reading it once so that a bad file fails here."""
    file = (path.parent / text(value, f"{path}: {where}")).resolve()
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
