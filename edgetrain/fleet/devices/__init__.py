"""Devices: their speed, their power, and the energy that members use.

The figures are data in `devices/*.toml` at the top level, each with its source. Importing this
package does not load torch or numpy.
"""

from edgetrain.fleet.devices.cost import measure_step
from edgetrain.fleet.devices.energy import READ_EVERY_S, Energy, joules_source
from edgetrain.fleet.devices.profile import (
    HOST,
    RANGES,
    SERVERS,
    Device,
    here,
    load,
    measured_path,
    names,
    parse,
)
from edgetrain.fleet.devices.sensors import PowerSensor, find_sensor
from edgetrain.fleet.devices.speed import StepTimes

__all__ = [
    "HOST",
    "RANGES",
    "READ_EVERY_S",
    "SERVERS",
    "Device",
    "Energy",
    "PowerSensor",
    "StepTimes",
    "find_sensor",
    "here",
    "joules_source",
    "load",
    "measure_step",
    "measured_path",
    "names",
    "parse",
]
