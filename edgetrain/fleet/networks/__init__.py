"""Emulated networks: profiles from `netem/*.toml`, and links that behave like them.

Does not load torch, zmq or numpy.
"""

from edgetrain.fleet.networks.congestion import parse_congestion as parse_congestion
from edgetrain.fleet.networks.emulation.emulation import Attachment as Attachment
from edgetrain.fleet.networks.emulation.emulation import Emulation as Emulation
from edgetrain.fleet.networks.emulation.start import emulate as emulate
from edgetrain.fleet.networks.faults import Fault as Fault
from edgetrain.fleet.networks.faults import parse_faults as parse_faults
from edgetrain.fleet.networks.faults import refuse_idle as refuse_idle
from edgetrain.fleet.networks.profile import Burst as Burst
from edgetrain.fleet.networks.profile import Direction as Direction
from edgetrain.fleet.networks.profile import Profile as Profile
from edgetrain.fleet.networks.profile import load as load
from edgetrain.fleet.networks.profile import names as names
from edgetrain.fleet.networks.profile import parse as parse
from edgetrain.fleet.networks.site import Site as Site
