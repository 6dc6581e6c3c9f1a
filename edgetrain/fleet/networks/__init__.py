"""Emulated networks: profiles from `netem/*.toml`, and links that behave like them.

Does not load torch, zmq or numpy.
"""

from edgetrain.fleet.networks.congestion import parse_congestion
from edgetrain.fleet.networks.emulation.emulation import Attachment, Emulation
from edgetrain.fleet.networks.emulation.start import emulate
from edgetrain.fleet.networks.faults import Fault, parse_faults, refuse_idle
from edgetrain.fleet.networks.profile import Burst, Direction, Profile, load, names, parse
from edgetrain.fleet.networks.site import Site

__all__ = [
    "Attachment",
    "Burst",
    "Direction",
    "Emulation",
    "Fault",
    "Profile",
    "Site",
    "emulate",
    "load",
    "names",
    "parse",
    "parse_congestion",
    "parse_faults",
    "refuse_idle",
]
