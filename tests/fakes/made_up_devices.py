"""A board of made-up figures, and a machine of made-up kernel files."""

from __future__ import annotations

from pathlib import Path

from edgetrain.fleet import devices
from edgetrain.fleet.devices import Device
from edgetrain.fleet.devices.energy import Energy

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


def unsteady(*keys: str, **other: float) -> Device:
    """BOARD with some of the UNSTEADY figures."""
    figures = {key: UNSTEADY[key] for key in keys} | other
    source = {**TABLE["source"], **dict.fromkeys(figures, "here")}
    return devices.parse("board", {**TABLE, **figures, "source": source}, Path("board.toml"))


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
        """Set the seconds for which all CPUs together were not idle."""
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
