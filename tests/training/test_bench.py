"""What a machine is measured to be: the fit, and the profile that is made of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.__main__ import main
from edgetrain.errors import ConfigError
from edgetrain.files.toml import parse_toml, to_toml
from edgetrain.fleet import devices
from edgetrain.training.bench import MeasuredSpeed, fit, measure, profile

WORK = ((1e6, 30), (1e7, 30), (2e8, 30), (2e9, 30))
MEASURED = MeasuredSpeed(2e-4, 5.0, 3.0, 2.0, 6.0)


@given(st.floats(1e-6, 1e-3), st.floats(0.5, 1000.0))
def test_the_times_of_a_device_give_its_figures_back(dispatch_s, gflops):
    rows = [(flops, calls, calls * dispatch_s + flops / gflops / 1e9) for flops, calls in WORK]
    assert fit(rows) == pytest.approx((dispatch_s, gflops), rel=1e-3)


def test_times_that_fit_no_device_are_refused():
    with pytest.raises(ConfigError, match="nothing else running"):
        fit([(1e6, 30, 1.0), (1e9, 30, 0.001)])


@pytest.mark.real
def test_this_machine_is_measured_in_a_moment():
    found = measure(0.0)
    assert 1e-7 < found.dispatch_s < 1e-2
    assert found.train_gflops > 0.1
    assert found.memory_gbyte_s > 0.1


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The user's own folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def test_what_was_measured_is_taken_in_place_of_the_catalogs(own, capsys):
    base = devices.load("raspberry-pi-4b")
    speeds = [MeasuredSpeed(f * 2e-4, f * 5.0, 3.0, None, None) for f in (1, 0.5, 3)]
    text = to_toml(profile(base, speeds, "pi-0, pi-1, pi-2, today"))
    path = devices.measured_path("raspberry-pi-4b")
    assert path.is_relative_to(own)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = devices.load("raspberry-pi-4b")
    assert (found.dispatch_s, found.train_gflops) == (2e-4, 5.0), "the medians"
    assert (found.load_watts, found.boards) == (base.load_watts, base.boards)
    assert found.measured == "measured: edgetrain devices bench, pi-0, pi-1, pi-2, today"
    assert (base.measured, devices.load("raspberry-pi-5").measured) == ("", "")
    words = ["device=raspberry-pi-4b", "network=none", "members=2", "steps=2"]
    assert main(["plan", *words]) == 0
    said = "raspberry-pi-4b as measured: edgetrain devices bench, pi-0, pi-1, pi-2, today"
    assert said in capsys.readouterr().out
    assert main(["simulate", *words, "--runs", str(own / "runs")]) == 0
    told = capsys.readouterr()
    assert said in told.out + told.err


SSH = """#!/bin/sh
for word in "$@"; do line="$word"; done
case "$*" in *10.0.0.2*) exit 255;; *10.0.0.3*) export STATE=ActiveState=active;; esac
exec sh -c "$line"
"""
PYTHON = """#!/bin/sh
case "$*" in *"devices bench --json --seconds 5"*) echo '{}';; *) exit 1;; esac
"""


@pytest.mark.real
def test_devices_are_measured_over_ssh_and_one_that_trains_is_not(own, monkeypatch, capsys):
    programs = {
        "ssh": SSH,
        "python3": PYTHON.replace("{}", json.dumps(vars(MEASURED))),
        "systemctl": "#!/bin/sh\necho $STATE\n",
    }
    for name, text in programs.items():
        (own / "bin").mkdir(exist_ok=True)
        (own / "bin" / name).write_text(text)
        (own / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{own / 'bin'}:{os.environ['PATH']}")
    path = Path(own, "cluster.toml")
    path.write_text(
        '[ssh]\nuser = "fleet"\nkeys = ["id.pub"]\n'
        + "".join(
            f'[[device]]\nname = "pi-{i}"\nprofile = "raspberry-pi-4b"\naddress = "10.0.0.{i}/24"\n'
            for i in (1, 2, 3)
        )
    )
    words = ["devices", "bench", str(path), "--keys", str(own / "keys"), "--seconds", "5"]
    assert main([*words, "--save"]) == 1
    lines = capsys.readouterr().out.splitlines()
    told = " ".join(lines[0].split())
    assert told == "pi-1 200 us a call 5.0 Gflop/s 3.0 GB/s 2.0 W idle 6.0 W busy"
    assert "FAILED   connection lost" in lines[1]
    assert "its member or hub is at work" in lines[2]
    assert "measured figures are taken in place of the catalog's" in lines[3]
    found = devices.load("raspberry-pi-4b")
    assert (found.idle_watts, found.load_watts) == (2.0, 6.0)
    assert "pi-1, " in found.measured
    assert parse_toml(devices.measured_path("raspberry-pi-4b").read_text())["cores"] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "0"], "allowed are 1 to 3600"),
        (["--save"], "not a board of the catalog"),
        (["none.toml"], "no cluster file"),
    ],
)
def test_what_cannot_be_measured_is_one_line(own, capsys, words, said):
    assert main(["devices", "bench", *words]) == 2
    assert said in capsys.readouterr().err
