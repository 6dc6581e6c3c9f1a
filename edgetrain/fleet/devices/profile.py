"""Device profiles: read from `devices/*.toml` and checked; each figure has a source.

A profile measured by the user (`edgetrain devices bench --save`) replaces the catalog's. Measures
nothing. Does not import torch or numpy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.files.tables import key, ranged, read
from edgetrain.fleet import catalog

HOST = "host"
"""The name for the machine itself. Its steps are not paced."""
SERVERS = "servers"
"""The name of a group of processes on this machine, as one member: a job's [servers]."""
MEASURED = "measured: "
"""Beginning of a source written by `edgetrain devices bench`."""


def _text(value: str, where: str) -> None:
    if not value.strip():
        raise ConfigError(f"{where} = {value!r} is not a text")


_SOURCED = "every device specifies it, with its source"


def _figure(low: float, high: float, unit: str) -> Any:
    return ranged(MISSING, low, high, _SOURCED, unit)


@dataclass(frozen=True)
class Device:
    """One kind of machine. An unknown figure is None.

    `host` has no pace, and has watts only as a board of the catalog.
    """

    name: str
    title: str = key(check=_text)
    cores: int = ranged(MISSING, 1, 4096, _SOURCED)
    memory_bytes: int = ranged(MISSING, 1e6, 1e14, _SOURCED, "bytes")
    train_gflops: float | None = _figure(1e-3, 1e7, "Gflop/s")
    """Float32, sustained in a training step, all cores."""
    dispatch_s: float | None = _figure(1e-8, 0.1, "s")
    """Seconds of an operator call: Python, autograd, optimizer."""
    idle_watts: float | None = _figure(0, 1e5, "W")  # the whole board, at its power input
    load_watts: float | None = _figure(0, 1e5, "W")  # the same with all cores busy
    step_jitter: float | None = ranged(None, 0, 10)  # relative standard deviation of a step's time
    slow_chance: float | None = ranged(None, 0, 1)  # share of the steps delayed by other work
    slow_factor: float | None = ranged(None, 1, 1e4)  # how many times longer these take
    throttle_after_s: float | None = ranged(None, 0, 1e9, unit="s")
    """Seconds of computing until the board is hot."""
    throttle_factor: float | None = ranged(None, 1, 1e4)  # how many times a step takes then
    accelerators: int | None = ranged(None, 1, 1024)
    """Number in a server; memory and speed above are those of one."""
    bf16_gflops: float | None = ranged(None, 1e-3, 1e8, unit="Gflop/s")
    """As train_gflops, matrix products in bfloat16."""
    inside_gbit: float | None = ranged(None, 1e-3, 1e6, unit="Gbit/s")
    """Rate between two accelerators of the machine, each way."""
    inside_s: float | None = ranged(None, 0, 1, unit="s")  # before the first byte, between the same
    boards: tuple[str, ...] = key((), check=_text)
    """Beginnings of /proc/device-tree/model for this device."""
    source: Mapping[str, str] = field(
        default_factory=dict, compare=False, hash=False, metadata={"check": _text}
    )

    @property
    def measured(self) -> str:
        """Source of figures measured by the user, for people; "": none."""
        return next((s for s in self.source.values() if s.startswith(MEASURED)), "")

    def step_seconds(self, flops: float, operators: int) -> float:
        """Seconds of a step with this work; 0 if the device is not paced.

        Adds the times of calls and of arithmetic: right on a CPU, and on a GPU an upper bound for
        steps too small to keep it busy. `measure_step` counts both numbers.
        """
        if self.train_gflops is None or self.dispatch_s is None:
            return 0.0
        return operators * self.dispatch_s + flops / (self.train_gflops * 1e9)


FIGURES = tuple(each.name for each in fields(Device) if "low" in each.metadata)
"""Keys that have a source."""
_PAIRS = (("slow_chance", "slow_factor"), ("throttle_after_s", "throttle_factor"),
          ("inside_gbit", "inside_s"))  # fmt: skip


def load(name: str, root: Path = Path("/")) -> Device:
    """Read a device by its name or by the path of a .toml file; "host" is this machine, and
    "servers" processes of it.

    Raises ConfigError for an unknown device (with the closest known one) and for a bad key or value
    in the file. `root` is the folder that contains /proc, for "host".
    """
    if name == HOST:
        return _host(root)
    if name == SERVERS:
        return replace(_host(root), name=SERVERS, title="a job's [servers], as one member")
    if (found := catalog.own("devices", name, Device)) is not None:
        return replace(found, name=name)
    own = measured_path(name)
    is_own = not name.endswith(".toml") and own.exists()
    try:
        path, table = catalog.load("devices", str(own) if is_own else name)
    except ConfigError as error:
        if name.endswith(".toml") or name in names():
            raise
        raise ConfigError(error.message, did_you_mean(name, [*names(), HOST])) from None
    return parse(Path(name).stem if name.endswith(".toml") else name, table, path)


def measured_path(name: str) -> Path:
    """Path of the user's own measurement of a catalog device, if there is one."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "edgetrain" / "devices" / f"{Path(name).name}.toml"


def names() -> list[str]:
    return catalog.names("devices")


def parse(name: str, table: Mapping[str, Any], path: Path) -> Device:
    """Build a device from a TOML table; `path` is named in errors."""
    device = read(Device, table, str(path), name=name)
    for one, other in _PAIRS:
        if (one in table) != (other in table):
            raise ConfigError(f"{path}: {one} and {other} go together", "give both or none")
    if table["load_watts"] < table["idle_watts"]:
        raise ConfigError(
            f"{path}: load_watts = {device.load_watts:g} is less than idle_watts = "
            f"{device.idle_watts:g}"
        )
    for name in device.source:
        if name not in FIGURES:
            raise ConfigError(f"{path}: no key 'source.{name}'", did_you_mean(name, FIGURES))
    for name in FIGURES:
        if name in table and name not in device.source:
            raise ConfigError(
                f"{path}: source.{name} is missing",
                "write where the figure comes from, or 'estimated: …' and how",
            )
    return device


def here(root: Path = Path("/")) -> str:
    """This machine's name in the catalog; "" if not there. The longest board name wins."""
    model = _first_line(root / "proc/device-tree/model")
    if not model:
        return ""
    fits = [
        (len(begin), device.name)
        for device in map(load, names())
        for begin in device.boards
        if model.startswith(begin)
    ]
    return max(fits)[1] if fits else ""


def _host(root: Path) -> Device:
    """Describe this machine; its watts are those of its board, if that is in the catalog."""
    board = load(name) if (name := here(root)) else None
    return Device(
        name=HOST,
        title=_first_line(root / "proc/device-tree/model") or "this machine",
        cores=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        train_gflops=None,
        dispatch_s=None,
        idle_watts=board.idle_watts if board else None,
        load_watts=board.load_watts if board else None,
        source={"watts": f"devices/{board.name}.toml"} if board else {},
    )


def _first_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").partition("\0")[0].partition("\n")[0].strip()
    except OSError:
        return ""
