"""Device profiles: the catalog, files of one's own, and refusals that name file and key."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_devices import BOARD, TABLE, UNSTEADY, Machine

from edgetrain.errors import ConfigError
from edgetrain.fleet import devices

OF_SERVERS = ("accelerators", "bf16_gflops", "inside_gbit", "inside_s")


@pytest.mark.parametrize("name", devices.names())
def test_every_device_of_the_catalog_is_valid_and_says_where_its_figures_come_from(name):
    device = devices.load(name)
    assert device.name == name
    assert set(device.source) - set(UNSTEADY) - set(OF_SERVERS) == set(TABLE["source"])
    assert all(key in device.source for key in UNSTEADY if getattr(device, key) is not None)
    assert 1e-5 < device.step_seconds(8.2e6, 21) < 0.02  # a step of digits


def test_the_catalog_has_the_boards_people_have():
    assert {*devices.names()} >= {
        "raspberry-pi-3b",
        "raspberry-pi-3b-plus",
        "raspberry-pi-4b",
        "raspberry-pi-cm4",
        "raspberry-pi-5",
        "raspberry-pi-cm5",
        "raspberry-pi-zero-2w",
        "jetson-nano",
        "jetson-orin-nano",
        "jetson-orin-nx",
        "jetson-agx-orin",
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
        ({**TABLE, "train_gflop": 1}, "no key 'train_gflop' .*'train_gflops'"),
        (without("cores"), "cores is missing"),
        (without("source"), "source.cores is missing"),
        ({**TABLE, "cores": 0}, "cores = 0 .*from 1 to 4096"),
        ({**TABLE, "cores": 1.5}, "cores = 1.5 .*an integer from 1 to 4096"),
        ({**TABLE, "dispatch_s": "1e-4"}, "dispatch_s = '1e-4' .*a number from 1e-08 to 0.1 s"),
        ({**TABLE, "dispatch_s": True}, "dispatch_s = True .*a number"),
        ({**TABLE, "train_gflops": float("nan")}, "train_gflops = nan .*a number from"),
        ({**TABLE, "idle_watts": 7.0}, "load_watts = 6 is less than idle_watts = 7"),
        ({**TABLE, "title": ""}, "title = '' is not a text"),
        ({**TABLE, "boards": "A Board"}, "boards = 'A Board' .*a list of texts"),
        ({**TABLE, "source": "here"}, "source = 'here' .*a table"),
        ({**TABLE, "source": {**TABLE["source"], "core": "x"}}, "no key 'source.core' "),
        ({**TABLE, "source": {"cores": "x"}}, "source.memory_bytes is missing"),
        ({**TABLE, "source": {**TABLE["source"], "cores": 3}}, "source.cores = 3 .*is text"),
        ({**TABLE, "step_jiter": 0.1}, "no key 'step_jiter' .*'step_jitter'"),
        ({**TABLE, "step_jitter": -0.1}, "step_jitter = -0.1 .*from 0 to 10"),
        ({**TABLE, "slow_chance": 0.1}, "slow_chance and slow_factor go together"),
        ({**TABLE, "slow_factor": 2}, "slow_chance and slow_factor go together"),
        ({**TABLE, "throttle_after_s": 60}, "throttle_after_s and throttle_factor go together"),
        (
            {**TABLE, "slow_chance": 1.5, "slow_factor": 2},
            "slow_chance = 1.5 .*from 0 to 1",
        ),
        (
            {**TABLE, "throttle_after_s": 60, "throttle_factor": 0.5},
            "throttle_factor = 0.5 .*from 1 to 10000",
        ),
        ({**TABLE, "step_jitter": 0.1}, "source.step_jitter is missing"),
    ],
)
def test_a_bad_profile_is_refused_with_file_and_key(table, says):
    with pytest.raises(ConfigError, match=f"board.toml: {says}"):
        devices.parse("board", table, Path("board.toml"))


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


@pytest.mark.real
def test_devices_load_neither_torch_nor_numpy():
    code = (
        "import sys; from edgetrain.fleet import devices; devices.load('host'); devices.names();"
        "print(sorted({'torch', 'numpy', 'zmq'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


def test_a_board_is_recognised(tmp_path):
    assert devices.here(tmp_path) == ""
    for model, name in (
        ("Raspberry Pi 4 Model B Rev 1.4", "raspberry-pi-4b"),
        ("Raspberry Pi 3 Model B Rev 1.2", "raspberry-pi-3b"),
        ("Raspberry Pi 3 Model B Plus Rev 1.3", "raspberry-pi-3b-plus"),
        ("Raspberry Pi Compute Module 4 Rev 1.1", "raspberry-pi-cm4"),
        ("Raspberry Pi Compute Module 5 Rev 1.0", "raspberry-pi-cm5"),
        ("Raspberry Pi Zero 2 W Rev 1.0", "raspberry-pi-zero-2w"),
        ("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit", "jetson-orin-nano"),
        ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit", "jetson-orin-nx"),
        ("NVIDIA Jetson AGX Orin Developer Kit", "jetson-agx-orin"),
        ("NVIDIA Jetson Nano Developer Kit", "jetson-nano"),
        ("Another Board", ""),
    ):
        Machine(tmp_path, model)
        assert devices.here(tmp_path) == name
    host = devices.load("host", tmp_path)
    assert host.idle_watts is None
