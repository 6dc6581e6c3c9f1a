"""Power sensors, read from made-up kernel files."""

from __future__ import annotations

import pytest
from made_up_devices import Machine

from edgetrain.fleet.devices.sensors import find_sensor


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
