"""The parts of the simulator: virtual time, links in it, and many members' gradients at once.

`simulation` puts them together. Not for use on a device: needs greenlet
(the extra "lab").
"""

from edgetrain.errors import require


def require_simulator() -> None:
    """ConfigError if the simulator cannot run because a library is not installed."""
    require("the simulator", "lab", "greenlet")
