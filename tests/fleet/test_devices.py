"""Device profiles, the cost of a step, and energy from made-up sensors."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from edgetrain.errors import ConfigError
from edgetrain.fleet import devices
from edgetrain.fleet.assignment import devices_of
from edgetrain.fleet.devices import Device, Energy, StepTimes, joules_source, measure_step
from edgetrain.fleet.devices.sensors import find_sensor

TABLE = {
    "title": "a board",
    "cores": 4,
    "memory_bytes": 10**9,
    "train_gflops": 10.0,
    "dispatch_s": 1e-4,
    "idle_watts": 2.0,
    "load_watts": 6.0,
    "boards": ["A Board"],
    "source": dict.fromkeys(
        ("cores", "memory_bytes", "train_gflops", "dispatch_s", "idle_watts", "load_watts"), "here"
    ),
}
UNSTEADY = {
    "step_jitter": 0.2,
    "slow_chance": 0.1,
    "slow_factor": 5.0,
    "throttle_after_s": 30.0,
    "throttle_factor": 2.0,
}
BOARD = devices.parse("board", TABLE, Path("board.toml"))


@pytest.mark.parametrize("name", devices.names())
def test_every_device_of_the_catalog_is_valid_and_says_where_its_figures_come_from(name):
    device = devices.load(name)
    assert device.name == name
    assert set(device.source) - set(UNSTEADY) == set(TABLE["source"])
    assert all(key in device.source for key in UNSTEADY if getattr(device, key) is not None)
    assert 1e-5 < device.step_seconds(8.2e6, 21) < 0.02  # a step of digits


def test_the_catalog_has_the_boards_people_have():
    assert {*devices.names()} >= {
        "raspberry-pi-3b",
        "raspberry-pi-4b",
        "raspberry-pi-5",
        "raspberry-pi-zero-2w",
        "jetson-nano",
        "jetson-orin-nano",
        "laptop",
        "gpu-server",
    }


def test_a_step_takes_its_calls_and_its_arithmetic():
    assert BOARD.step_seconds(flops=2e9, operators=30) == pytest.approx(30e-4 + 0.2)
    assert devices.load("host").step_seconds(2e9, 30) == 0


def test_a_file_of_ones_own_is_a_device(tmp_path):
    path = tmp_path / "mine.toml"
    figures = "\n".join(
        f"{key} = {value!r}" for key, value in TABLE.items() if key not in ("title", "source")
    )
    sources = "\n".join(f"{key} = 'here'" for key in TABLE["source"])
    path.write_text(f"title = 'a board'\n{figures}\n[source]\n{sources}\n")
    assert devices.load(str(path)) == dataclasses.replace(BOARD, name="mine")


def without(key: str) -> dict:
    return {name: value for name, value in TABLE.items() if name != key}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({**TABLE, "train_gflop": 1}, "unknown key train_gflop .*'train_gflops'"),
        (without("cores"), "cores is missing"),
        (without("source"), "source is missing"),
        ({**TABLE, "cores": 0}, "cores = 0 is out of range .*allowed: 1 to 4096"),
        ({**TABLE, "cores": 1.5}, "cores = 1.5 is not a whole number"),
        ({**TABLE, "dispatch_s": "1e-4"}, "dispatch_s = '1e-4' is not a number"),
        ({**TABLE, "dispatch_s": True}, "dispatch_s = True is not a number"),
        ({**TABLE, "train_gflops": float("nan")}, "train_gflops = nan is out of range"),
        ({**TABLE, "idle_watts": 7.0}, "load_watts = 6 is less than idle_watts = 7"),
        ({**TABLE, "title": ""}, "title = '' is not a text"),
        ({**TABLE, "boards": "A Board"}, "boards = 'A Board' is not a list"),
        ({**TABLE, "source": "here"}, "source must be a table"),
        ({**TABLE, "source": {**TABLE["source"], "core": "x"}}, "unknown key source.core "),
        ({**TABLE, "source": {"cores": "x"}}, "source.memory_bytes is missing"),
        ({**TABLE, "source": {**TABLE["source"], "cores": 3}}, "source.cores = 3 is not a text"),
        ({**TABLE, "step_jiter": 0.1}, "unknown key step_jiter .*'step_jitter'"),
        ({**TABLE, "step_jitter": -0.1}, "step_jitter = -0.1 is out of range .*allowed: 0 to 10"),
        ({**TABLE, "slow_chance": 0.1}, "slow_chance and slow_factor go together"),
        ({**TABLE, "slow_factor": 2}, "slow_chance and slow_factor go together"),
        ({**TABLE, "throttle_after_s": 60}, "throttle_after_s and throttle_factor go together"),
        (
            {**TABLE, "slow_chance": 1.5, "slow_factor": 2},
            "slow_chance = 1.5 is out of range .*allowed: 0 to 1",
        ),
        (
            {**TABLE, "throttle_after_s": 60, "throttle_factor": 0.5},
            "throttle_factor = 0.5 is out of range .*allowed: 1 to 10000",
        ),
        ({**TABLE, "step_jitter": 0.1}, "source.step_jitter is missing"),
    ],
)
def test_a_bad_profile_is_refused_with_file_and_key(table, says):
    with pytest.raises(ConfigError, match=f"board.toml: {says}"):
        devices.parse("board", table, Path("board.toml"))


def unsteady(*keys: str, **other: float) -> Device:
    """BOARD with some of the UNSTEADY figures."""
    figures = {key: UNSTEADY[key] for key in keys} | other
    source = {**TABLE["source"], **dict.fromkeys(figures, "here")}
    return devices.parse("board", {**TABLE, **figures, "source": source}, Path("board.toml"))


def times(device: Device, count: int, seconds: float = 0.1, seed: int = 0, member: int = 0):
    """The first steps of one member."""
    step_times = StepTimes(device, seconds, seed, member)
    return [step_times(step) for step in range(count)]


def test_a_steady_device_takes_the_same_for_every_step():
    assert times(BOARD, 5) == [0.1] * 5
    assert times(devices.load("host"), 2) == [0.1] * 2


def test_jitter_has_the_mean_and_the_spread_that_are_asked_for():
    found = times(unsteady("step_jitter"), 20_000)
    assert statistics.fmean(found) == pytest.approx(0.1, rel=0.01)
    assert statistics.pstdev(found) == pytest.approx(0.2 * 0.1, rel=0.05)
    assert min(found) > 0
    assert statistics.median(found) < statistics.fmean(found), "the tail is to the right"


def test_slow_steps_are_as_many_and_as_slow_as_said():
    found = times(unsteady("slow_chance", "slow_factor"), 10_000)
    assert {round(seconds, 9) for seconds in found} == {0.1, 0.5}
    assert found.count(0.1) / 10_000 == pytest.approx(0.9, abs=0.01)


def test_a_hot_board_slows_down_after_so_many_seconds_of_computing():
    found = times(unsteady("throttle_after_s", "throttle_factor"), 400)
    hot = found.index(0.2)
    assert sum(found[:hot]) == pytest.approx(30, abs=0.11)
    assert set(found[hot:]) == {0.2}, "and stays slow"


def test_step_times_are_the_members_own_and_come_again():
    device = unsteady(*UNSTEADY)
    found = times(device, 50, seed=3, member=1)
    assert found == times(device, 50, seed=3, member=1)
    assert found != times(device, 50, seed=3, member=2)
    assert found != times(device, 50, seed=4, member=1)
    assert times(device, 20, seed=3, member=1) == found[:20]


def test_the_3b_throttles_and_the_sources_say_why_others_do_not():
    hot = devices.load("raspberry-pi-3b")
    assert (hot.throttle_after_s, hot.throttle_factor) == (160, 1.1)
    assert "left out" in devices.load("raspberry-pi-4b").source["throttle_after_s"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raspberry-pi-4", "no device profile 'raspberry-pi-4' .*did you mean 'raspberry-pi-4b'"),
        ("hots", "did you mean 'host'"),
        ("nowhere.toml", "no device profile 'nowhere.toml'"),
    ],
)
def test_an_unknown_device_names_the_near_miss(name, says):
    with pytest.raises(ConfigError, match=says):
        devices.load(name)


def test_a_fleet_is_a_list_of_devices():
    assert devices_of("laptop") == ["laptop"]
    assert devices_of(" jetson-nano:2 , host ") == ["jetson-nano", "jetson-nano", "host"]


@pytest.mark.parametrize("text", ["", "laptop:", "laptop:0", "laptop:two", "laptop,,host", ":2"])
def test_a_bad_fleet_is_refused(text):
    with pytest.raises(ConfigError, match="NAME or NAME:COUNT"):
        devices_of(text)


def test_devices_load_neither_torch_nor_numpy():
    code = (
        "import sys; from edgetrain.fleet import devices; devices.load('host'); devices.names();"
        "print(sorted({'torch', 'numpy', 'zmq'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return model(batch[0]).square().mean()


def test_the_flops_of_a_linear_layer_are_counted():
    """Forward 2 n i o, backward as much for the weight; the input needs no gradient."""
    flops, operators = measure_step(nn.Linear(5, 7), (torch.ones(3, 5),), loss)
    assert flops == 2 * (2 * 3 * 5 * 7)
    assert 4 <= operators <= 20
    deeper = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7))
    assert measure_step(deeper, (torch.ones(3, 5),), loss)[1] > operators


def test_measuring_leaves_no_trace():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[0].weight.grad = torch.full((4, 4), 3.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    measure_step(model, (torch.rand(6, 4, generator=torch.Generator()),), loss)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.full((4, 4), 3.0))
    assert model[0].bias.grad is None


class Machine:
    """A made-up machine: a tree of kernel files, a clock, and a process that spends CPU time."""

    def __init__(self, root: Path, model: str = "") -> None:
        self.root, self.now, self.own_cpu_s = root, 100.0, 7.0
        self.cpu(0.0)
        if model:
            self.write("proc/device-tree/model", model + "\0")

    def write(self, path: str, text: object) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def cpu(self, busy_s: float) -> None:
        """All CPUs together have been busy so long; the rest of the line is idling."""
        self.write("proc/stat", f"cpu  {round(busy_s * 100)} 0 0 999 888 0 0 0 0 0\ncpu0 1")

    def rapl(self, *microjoules: int, span: int = 1000_000_000) -> None:
        for number, counter in enumerate(microjoules):
            zone = f"sys/class/powercap/intel-rapl:{number}"
            self.write(f"{zone}/name", f"package-{number}")
            self.write(f"{zone}/energy_uj", counter)
            self.write(f"{zone}/max_energy_range_uj", span)

    def orin(self, millivolts: int, milliamperes: int) -> None:
        chip = "sys/class/hwmon/hwmon1"
        self.write(f"{chip}/name", "ina3221")
        for number, label in ((1, "VDD_IN"), (2, "VDD_CPU_GPU_CV")):
            self.write(f"{chip}/in{number}_label", label)
            self.write(f"{chip}/in{number}_input", millivolts)
            self.write(f"{chip}/curr{number}_input", milliamperes if number == 1 else 1)

    def nano(self, milliwatts: int) -> None:
        device = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
        self.write(f"{device}/rail_name_0", "POM_5V_IN")
        self.write(f"{device}/in_power0_input", milliwatts)

    def energy(self, device: str = "host") -> Energy:
        profile = devices.load(device, self.root)
        return Energy(profile, lambda: self.now, self.root, lambda: self.own_cpu_s)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_a_board_is_recognised(tmp_path):
    assert devices.here(tmp_path) == ""
    for model, name in (
        ("Raspberry Pi 4 Model B Rev 1.4", "raspberry-pi-4b"),
        ("Raspberry Pi Zero 2 W Rev 1.0", "raspberry-pi-zero-2w"),
        ("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit", "jetson-orin-nano"),
        ("NVIDIA Jetson Nano Developer Kit", "jetson-nano"),
        ("Another Board", ""),
    ):
        Machine(tmp_path, model)
        assert devices.here(tmp_path) == name
    host = devices.load("host", tmp_path)
    assert host.idle_watts is None


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
