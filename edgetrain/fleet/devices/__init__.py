"""Devices: their speed, their power, and the energy that members use.

The figures are data in `devices/*.toml` at the top level, each with its source. Importing this
package does not load torch or numpy.
"""

from edgetrain.fleet.devices.cost import measure_step
from edgetrain.fleet.devices.energy import Energy, joules_source
from edgetrain.fleet.devices.profile import HOST, SERVERS, Device, here, load, names, parse
from edgetrain.fleet.devices.speed import StepTimes

__all__ = [
    "HOST",
    "SERVERS",
    "Device",
    "Energy",
    "StepTimes",
    "here",
    "joules_source",
    "load",
    "measure_step",
    "names",
    "parse",
]
