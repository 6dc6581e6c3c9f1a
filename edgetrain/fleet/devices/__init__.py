"""Devices: their speed, their power, and the energy that members use.

The figures are data in `devices/*.toml` at the top level, each with its source. Importing this
package does not load torch or numpy.
"""

from edgetrain.fleet.devices.cost import measure_step as measure_step
from edgetrain.fleet.devices.energy import READ_EVERY_S as READ_EVERY_S
from edgetrain.fleet.devices.energy import Energy as Energy
from edgetrain.fleet.devices.energy import joules_source as joules_source
from edgetrain.fleet.devices.profile import HOST as HOST
from edgetrain.fleet.devices.profile import RANGES as RANGES
from edgetrain.fleet.devices.profile import SERVERS as SERVERS
from edgetrain.fleet.devices.profile import Device as Device
from edgetrain.fleet.devices.profile import here as here
from edgetrain.fleet.devices.profile import load as load
from edgetrain.fleet.devices.profile import measured_path as measured_path
from edgetrain.fleet.devices.profile import names as names
from edgetrain.fleet.devices.profile import parse as parse
from edgetrain.fleet.devices.sensors import PowerSensor as PowerSensor
from edgetrain.fleet.devices.sensors import find_sensor as find_sensor
from edgetrain.fleet.devices.speed import StepTimes as StepTimes
