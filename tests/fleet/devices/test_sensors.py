"""Power sensors, read from made-up kernel files."""

from __future__ import annotations

import struct

import pytest
from made_up_devices import Machine

from edgetrain.fleet.devices.sensors import Pmic, find_sensor


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_rapl_counters_are_added_up_and_wrap_round(machine):
    machine.rapl(999_000_000, 500_000_000)
    sensor = find_sensor(machine.root, now=0.0)
    machine.rapl(2_000_000, 504_000_000)
    assert sensor.name == "RAPL"
    assert sensor.joules(1.0) == pytest.approx(3 + 4)
    assert sensor.joules(2.0) == pytest.approx(7)


def test_only_packages_count_for_rapl(machine):
    machine.rapl(0)
    machine.write("sys/class/powercap/intel-rapl:1/name", "psys")
    machine.write("sys/class/powercap/intel-rapl:0:0/name", "core")
    assert find_sensor(machine.root, 0.0).joules(1.0) == 0


@pytest.mark.parametrize("kind", ["orin", "nano"])
def test_a_jetsons_power_is_summed_over_time(machine, kind):
    set_watts = {
        "orin": lambda watts: machine.orin(5000, round(watts * 200)),
        "nano": lambda watts: machine.nano(round(watts * 1000)),
    }[kind]
    set_watts(4)
    sensor = find_sensor(machine.root, now=10.0)
    assert sensor.name == "INA3221"
    assert sensor.joules(12.0) == pytest.approx(8)
    set_watts(8)
    assert sensor.joules(13.0) == pytest.approx(8 + 6)


def test_a_reading_that_is_no_number_is_one_that_could_not_be_read(machine):
    machine.rapl(0)
    sensor = find_sensor(machine.root, 0.0)
    machine.write("sys/class/powercap/intel-rapl:0/energy_uj", "")
    with pytest.raises(OSError, match="has no number"):
        sensor.joules(1.0)


def test_a_sensor_that_may_not_be_read_or_makes_no_sense_is_none(machine):
    assert find_sensor(machine.root, 0.0) is None
    machine.rapl(0)
    counter = machine.root / "sys/class/powercap/intel-rapl:0/energy_uj"
    counter.unlink()
    counter.mkdir()  # reading fails even for root, whom modes do not stop
    assert find_sensor(machine.root, 0.0) is None
    counter.rmdir()
    counter.write_text("much")
    assert find_sensor(machine.root, 0.0) is None
    machine.write("sys/class/hwmon/hwmon0/in1_label", "VDD_IN")
    machine.write("sys/class/hwmon/hwmon0/name", "another chip")
    assert find_sensor(machine.root, 0.0) is None


RAILS = {"VDD_CORE": (0.9, 10.0), "3V3_SYS": (3.3, 0.1), "HDMI": (5.07, 0.0)}
"""Volts and amperes."""


class Firmware:
    """A Pi 5's firmware: it answers `pmic_read_adc` as it does `vcgencmd`."""

    def __init__(self) -> None:
        self.error, self.rails = 0, dict(RAILS)

    def ioctl(self, file, request, message):
        size, code, tag, room, done = struct.unpack_from("=5I", message)
        assert (size, code, tag, room, done) == (len(message), 0, 0x00030080, 4096, 0)
        assert message[20:24] == bytes(4)
        assert message[24:].startswith(b"pmic_read_adc\0")
        lines = [
            f" {n}_A current({i})={a:.8f}A" for i, (n, (_, a)) in enumerate(self.rails.items())
        ]
        lines += [
            f" {n}_V volt({i})={v:.8f}V" for i, (n, (v, _)) in enumerate(self.rails.items(), 8)
        ]
        said = "\n".join([*lines, "  EXT5V_V volt(24)=5.06788000V", ""]).encode()
        message[:24] = struct.pack("=6I", size, 1 << 31, tag, room, 1 << 31 | len(said), self.error)
        message[24 : 24 + len(said) + 1] = said + b"\0"


def test_a_pi_5s_rails_are_corrected_to_what_the_board_takes(machine):
    machine.write("dev/vcio", "")
    firmware = Firmware()
    sensor = Pmic(machine.root, 0.0, firmware.ioctl)
    watts = 1.1451 * (0.9 * 10 + 3.3 * 0.1) + 0.5879
    assert sensor.joules(2.0) == pytest.approx(2 * watts)
    firmware.rails["VDD_CORE"] = (0.9, 0.0)
    idle = 1.1451 * 0.33 + 0.5879
    assert sensor.joules(4.0) == pytest.approx(2 * watts + watts + idle)
    firmware.error = 1
    with pytest.raises(OSError, match="no rails"):
        sensor.joules(5.0)
    firmware.error, firmware.rails = 0, {}
    with pytest.raises(OSError, match="no rails"):
        Pmic(machine.root, 0.0, firmware.ioctl)
