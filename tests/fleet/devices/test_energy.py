"""The joules of a member: measured by made-up sensors, or estimated."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_devices import BOARD, Machine

from edgetrain.fleet.devices.energy import Energy, joules_source


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_without_a_sensor_a_known_board_is_estimated(tmp_path):
    machine = Machine(tmp_path, "Raspberry Pi 4 Model B Rev 1.4")
    energy = machine.energy()
    assert energy.source == joules_source("host", tmp_path) == "estimated"
    machine.now += 10
    assert energy.joules(busy_s=4) == pytest.approx(2.7 * 10 + (6.4 - 2.7) * 4)


def test_an_unknown_machine_without_a_sensor_has_no_figure(machine):
    assert machine.energy().source is None
    assert machine.energy().joules(busy_s=1) is None
    assert joules_source("host", machine.root) is None


def test_an_emulated_board_is_estimated_whatever_sensor_the_machine_has(machine):
    machine.rapl(0)
    energy = machine.energy("raspberry-pi-3b")
    assert energy.source == joules_source("raspberry-pi-3b", machine.root) == "estimated"
    machine.now += 2
    assert energy.joules(busy_s=0) == pytest.approx(2.8)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=20))
def test_an_estimate_never_falls_and_stays_between_idle_and_load(steps):
    now, seen = [0.0], [0.0]
    energy = Energy(BOARD, lambda: now[0], Path("/nowhere"))
    for waited_s, busy_s in steps:
        now[0] += waited_s + busy_s
        seen.append(energy.joules(busy_s))
    assert seen == sorted(seen)
    assert 2.0 * now[0] - 1e-6 <= seen[-1] <= 6.0 * now[0] + 1e-6


def test_a_member_is_charged_its_share_of_the_machine(machine):
    machine.rapl(0)
    energy = machine.energy()
    assert energy.source == joules_source("host", machine.root) == "measured"
    machine.rapl(40_000_000)
    machine.now += 1
    machine.own_cpu_s += 0.5
    machine.cpu(2.0)
    assert energy.joules(busy_s=1) == pytest.approx(40 * 0.5 / 2)
    machine.rapl(60_000_000)
    machine.now += 0.1  # too soon to read again
    assert energy.joules(busy_s=0.1) == pytest.approx(10)
    machine.now += 1
    machine.own_cpu_s += 1.02  # CPU clocks tick apart: never more than the whole
    machine.cpu(3.0)
    assert energy.joules(busy_s=1) == pytest.approx(10 + 20)


def test_a_reading_that_fails_is_made_up_for_by_the_next(machine):
    machine.rapl(0)
    energy = machine.energy()
    counter = machine.root / "sys/class/powercap/intel-rapl:0/energy_uj"
    counter.unlink()
    machine.now += 1
    assert energy.joules(busy_s=1) == 0
    machine.rapl(5_000_000)
    machine.now += 1
    machine.own_cpu_s += 1
    machine.cpu(1.0)
    assert energy.joules(busy_s=1) == pytest.approx(5)


def test_a_board_under_its_own_name_is_measured_too(tmp_path):
    machine = Machine(tmp_path, "NVIDIA Jetson Orin Nano Developer Kit")
    machine.orin(5000, 1000)
    assert machine.energy("jetson-orin-nano").source == "measured"
    assert machine.energy("raspberry-pi-5").source == "estimated"
