"""Names of congestion controls: which a job may name, which are modelled, which this kernel has.

The algorithms themselves are the kernel's (`packet`, `tc`) or in `window` (`stream`, the
simulator).
"""

from __future__ import annotations

from pathlib import Path

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.fleet.networks.links.window import ALGORITHMS

_SETTINGS = Path("/proc/sys/net/ipv4")
#: All that Linux has ever had: to distinguish a misspelt name from one that this kernel lacks.
_LINUX = (
    *("bbr", "bic", "cdg", "cubic", "dctcp", "highspeed", "htcp", "hybla", "illinois", "lp"),
    *("nv", "reno", "scalable", "vegas", "veno", "westwood", "yeah"),
)


def parse_congestion(name: str) -> str:
    """Return `name`, if it is 'none' or any Linux has it.

    Raises ConfigError otherwise, with the closest known name. Whether this kernel has the
    algorithm is checked when the emulation starts.
    """
    known = {*_LINUX, *available(), "none"}
    if name not in known:
        raise ConfigError(f"no congestion control '{name}'", did_you_mean(name, known))
    return name


def require_model(name: str, whose: str) -> None:
    """Raise ConfigError if `whose` (a backend or the simulator) has no model of this algorithm."""
    if name not in (*ALGORITHMS, "none"):
        raise ConfigError(
            f"congestion '{name}' has no model in {whose}; allowed: {', '.join(ALGORITHMS)}, none",
            did_you_mean(name, ALGORITHMS),
        )


def available() -> tuple[str, ...]:
    return tuple(_setting("tcp_available_congestion_control").split())


def of_kernel() -> str:
    return _setting("tcp_congestion_control") or "unknown"


def _setting(name: str) -> str:
    try:
        return (_SETTINGS / name).read_text("ascii").strip()
    except OSError:
        return ""
