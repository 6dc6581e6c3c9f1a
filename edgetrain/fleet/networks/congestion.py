"""Congestion control by name: what a job may ask for, which of them are modelled, what runs here.

Names only: the algorithms themselves are the kernel's (`packet`, `tc`) or `window`'s (`stream`, the
simulator).
"""

from __future__ import annotations

from pathlib import Path

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.fleet.networks.links.window import ALGORITHMS

_SETTINGS = Path("/proc/sys/net/ipv4")
#: What Linux has had, so that a misspelt name is told from one that this kernel merely lacks.
_LINUX = (
    *("bbr", "bic", "cdg", "cubic", "dctcp", "highspeed", "htcp", "hybla", "illinois", "lp"),
    *("nv", "reno", "scalable", "vegas", "veno", "westwood", "yeah"),
)


def parse_congestion(name: str) -> str:
    """`name`, where some Linux knows it or it is 'none'; else ConfigError with the near miss.

    Whether this machine's kernel has it shows when the emulation starts.
    """
    known = {*_LINUX, *available(), "none"}
    if name not in known:
        raise ConfigError(f"no congestion control '{name}'", did_you_mean(name, known))
    return name


def require_model(name: str, whose: str) -> None:
    """ConfigError where `whose` (a backend or the simulator) has no model of this algorithm."""
    if name not in (*ALGORITHMS, "none"):
        raise ConfigError(
            f"congestion '{name}' has no model in {whose}; allowed: {', '.join(ALGORITHMS)}, none",
            did_you_mean(name, ALGORITHMS),
        )


def available() -> tuple[str, ...]:
    """The algorithms that this kernel has loaded; empty where it does not tell."""
    return tuple(_setting("tcp_available_congestion_control").split())


def of_kernel() -> str:
    """What this kernel gives a connection that asks for nothing."""
    return _setting("tcp_congestion_control") or "unknown"


def _setting(name: str) -> str:
    try:
        return (_SETTINGS / name).read_text("ascii").strip()
    except OSError:
        return ""
