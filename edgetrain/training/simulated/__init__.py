"""The parts of the simulator: virtual time, links in it, and many members' gradients at once.

`simulation` puts them together. Not for use on a device: needs greenlet
(pip install edgetrain[lab]).
"""

from importlib.util import find_spec

from edgetrain.errors import ConfigError


def require_simulator() -> None:
    """ConfigError if the simulator cannot run because a library is not installed."""
    if find_spec("greenlet") is None:
        raise ConfigError("the simulator needs greenlet", "pip install 'edgetrain[lab]'")
