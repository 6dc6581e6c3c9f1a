"""Devices: their speed, their power, and the energy that members use.

The figures are data in `devices/*.toml` at the top level, each with its source. Importing this
package does not load torch or numpy. Here are profiles; what measures is loaded by its own name.
"""

from edgetrain.fleet.devices.profile import FIGURES as FIGURES
from edgetrain.fleet.devices.profile import HOST as HOST
from edgetrain.fleet.devices.profile import SERVERS as SERVERS
from edgetrain.fleet.devices.profile import Device as Device
from edgetrain.fleet.devices.profile import here as here
from edgetrain.fleet.devices.profile import load as load
from edgetrain.fleet.devices.profile import measured_path as measured_path
from edgetrain.fleet.devices.profile import names as names
from edgetrain.fleet.devices.profile import parse as parse
