"""The run folder: made atomically, written whole, summed up."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from enum import IntEnum
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import DGA, SYNC, Story, extra, write_comparison, write_run

import edgetrain
from edgetrain.errors import ConfigError
from edgetrain.files.toml import to_toml
from edgetrain.runs import environment
from edgetrain.runs.environment import Meter
from edgetrain.runs.folder import (
    FORMAT,
    create,
    create_inside,
    metrics_path,
    read_job,
    read_metrics,
    read_summary,
    runs_in,
    write_environment,
    write_summary,
)
from edgetrain.runs.summary import reached, summarise

NOW = time.struct_time((2026, 1, 31, 14, 25, 1, 5, 31, 0))


# --- making a folder ---


def test_a_folder_is_named_for_its_time_and_name(tmp_path: Path) -> None:
    folder = create(tmp_path / "runs", "digits dga/K=5", now=NOW)
    assert folder == tmp_path / "runs" / "20260131-142501-digits-dga-K-5"
    assert folder.is_dir()


@pytest.mark.parametrize("name", ["", "..", "../../etc", "/", ".hidden", "ä" * 300, "a\0b"])
def test_no_name_leads_out_of_the_root_or_hides(tmp_path: Path, name: str) -> None:
    folder = create(tmp_path, name, now=NOW)
    assert folder.parent == tmp_path
    assert folder.name.startswith("20260131-142501-")
    assert len(folder.name) < 120


def test_everyone_who_starts_in_the_same_second_gets_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(lambda _: create(tmp_path, "digits", now=NOW), range(40)))
    assert len(set(folders)) == 40
    assert {folder.name for folder in folders} == {
        "20260131-142501-digits" + (f"-{i}" if i > 1 else "") for i in range(1, 41)
    }


def test_a_root_that_is_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=r"runs is a file|Not a directory"):
        create(tmp_path / "runs", "digits")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_root_that_is_not_writable_is_one_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        create(tmp_path, "digits")


def test_a_place_where_nothing_can_be_made_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="choose another folder"):
        create("/proc/edgetrain", "digits")


def test_a_full_disk_is_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 4096})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"only 4096 bytes are left .*free some space"):
        create(tmp_path, "digits")
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_a_comparison_may_not_share_a_folder(tmp_path: Path) -> None:
    assert create_inside(tmp_path, "dga") == tmp_path / "dga"
    with pytest.raises(ConfigError, match="both be called 'dga'"):
        create_inside(tmp_path, "dga")


# --- its files ---


def test_a_summary_is_written_whole_and_leaves_no_draft(tmp_path: Path) -> None:
    write_summary(tmp_path, {"final": {"loss": math.nan, "accuracy": 0.5}, "places": (1, 2)})
    assert read_summary(tmp_path) == {
        "format": FORMAT,
        "final": {"loss": None, "accuracy": 0.5},
        "places": [1, 2],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_summary_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_summary(tmp_path, {"steps": 1})

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_summary(tmp_path, {"steps": 2})
    assert read_summary(tmp_path) == {"format": FORMAT, "steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{")
    (tmp_path / "job.toml").write_text("=")
    with pytest.raises(ConfigError, match=r"summary\.json is not JSON"):
        read_summary(tmp_path)
    with pytest.raises(ConfigError, match=r"job\.toml is not TOML"):
        read_job(tmp_path)
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no summary"):
        read_summary(tmp_path)


@pytest.mark.parametrize("made", [FORMAT + 1, "x", None])
def test_a_folder_of_a_newer_edgetrain_is_refused_in_one_line(tmp_path: Path, made: object) -> None:
    write_summary(tmp_path, {"steps": 1, "format": made})
    with pytest.raises(ConfigError, match=f"of format .*; this edgetrain reads up to {FORMAT}"):
        read_summary(tmp_path)


def test_a_folder_from_before_formats_had_numbers_is_read(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"steps": 1}')
    assert read_summary(tmp_path) == {"steps": 1}
    assert summarise(tmp_path)["format"] == FORMAT


def test_runs_of_a_comparison_come_in_its_order(tmp_path: Path) -> None:
    folders = write_comparison(tmp_path, replace(SYNC, steps=5), replace(DGA, steps=5))
    assert runs_in(tmp_path) == folders
    assert runs_in(folders[1]) == [folders[1]]
    (tmp_path / "summary.json").unlink()
    os.utime(folders[0] / "job.toml", (2e9, 2e9))
    assert runs_in(tmp_path) == folders[::-1]


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        runs_in(tmp_path)


@pytest.mark.real
def test_the_environment_says_what_is_known_without_loading_torch(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from edgetrain.runs.folder import write_environment\n"
        "write_environment(pathlib.Path(sys.argv[1]))\n"
        "print(sorted({'torch', 'zmq', 'numpy'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    found = json.loads((tmp_path / "environment.json").read_text())
    assert found["packages"]["torch"].startswith("2.")
    assert found["edgetrain"] == metadata.version("edgetrain")
    assert found["cores"] >= found["usable_cores"] >= 1
    assert found["memory_bytes"] > 1 << 28
    assert found["git"] is None or len(found["git"]["commit"]) == 40


def test_a_package_that_is_not_installed_says_its_own_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert environment.version() == edgetrain.__version__


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC 7R13\n", "AMD EPYC 7R13"),
        ("processor : 0\nBogoMIPS : 108\n\nModel : Raspberry Pi 4 B\n", "Raspberry Pi 4 B"),
        (
            "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd08\n",
            "ARM implementer 0x41 part 0xd08",
        ),
        ("", None),
    ],
)
def test_the_processor_has_a_name_on_each_architecture(cpuinfo: str, model: str | None) -> None:
    assert environment.cpu_model(cpuinfo) == model


def test_a_meter_counts_from_when_it_was_made() -> None:
    meter = Meter()
    before = meter.cpu_s
    assert before < 1.0
    sum(range(300_000))
    assert meter.cpu_s > before
    assert 1 << 20 < meter.peak_bytes < 1 << 40


@pytest.mark.real
def test_a_meter_does_not_inherit_the_peak_of_the_process_that_started_it() -> None:
    script = "from edgetrain.runs.environment import Meter; print(Meter().peak_bytes)"
    parent = f"import subprocess, sys; ballast = bytes(300_000_000)\nsubprocess.run({[sys.executable, '-c', script]!r})"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True)
    assert int(done.stdout) < 150_000_000


# --- TOML ---

plain = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(keys, values, max_size=6))
def test_toml_comes_back_as_it_went(table: dict[str, object]) -> None:
    assert tomllib.loads(to_toml(table)) == table


def test_toml_is_written_as_people_write_it() -> None:
    table = {
        "task": "edgetrain.tasks:digits",
        "note": None,
        "fleet": {"members": 8, "network": "wan-200ms", "paced": True},
        "train": {"lr": 1e-05, "optimizer": {"name": "sgd", "betas": (0.9, 0.95)}},
        "strategy": {},
        "faults": [{"kind": "down", "members": [0, 1]}, {"kind": "rate", "note": None}],
    }
    expected = """\
task = "edgetrain.tasks:digits"

[fleet]
members = 8
network = "wan-200ms"
paced = true

[train]
lr = 1e-05

[train.optimizer]
name = "sgd"
betas = [
    0.9,
    0.95,
]

[strategy]

[[faults]]
kind = "down"
members = [
    0,
    1,
]

[[faults]]
kind = "rate"
"""
    assert to_toml(table) == expected


def test_toml_spells_subclasses_of_numbers_as_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    level = IntEnum("level", ["LOW", "HIGH"])
    assert to_toml({"a": numpy.float64(0.5), "b": level.HIGH}) == "a = 0.5\nb = 2\n"


@pytest.mark.parametrize("value", [object(), [None], {"a": {1, 2}}, b"bytes"])
def test_what_toml_cannot_hold_is_named(value: object) -> None:
    with pytest.raises(ConfigError, match=r"train\.x.* cannot be written as TOML"):
        to_toml({"train": {"x": value}})


# --- summing up ---


def test_a_summary_adds_up(tmp_path: Path) -> None:
    story = Story(members=4, steps=100, wait_s=0.1, local_steps=5)
    summary = read_summary(write_run(tmp_path / "dga", story))
    assert summary is not None
    assert summary["strategy"] == "dga"
    assert summary["task"] == "edgetrain.tasks:digits"
    assert summary["members"] == 4
    assert summary["network"] == "wan-200ms"
    assert summary["device"] == "raspberry-pi-4b"
    assert (summary["local_steps"], summary["delay"]) == (5, 20)
    assert summary["steps"] == 100
    assert summary["rounds"] == 20
    assert summary["seconds"] == pytest.approx(100 * (0.05 + 0.002 + 0.02))
    assert summary["steps_per_second"] == pytest.approx(1 / 0.072)
    assert summary["compute_s"] == pytest.approx(0.05 * 1.015)
    assert summary["wait_s"] == pytest.approx(0.02)
    assert summary["overhead_s"] == pytest.approx(0.002)
    assert summary["sent_bytes"] == summary["received_bytes"] == 4 * 20 * 19_000
    assert summary["joules"] == pytest.approx(4 * 30.0)
    assert summary["cpu_s"] == pytest.approx(4 * 1.0)
    assert summary["peak_bytes"] == 263_000_000
    assert summary["hub"]["sent_bytes"] == 4 * 20 * 19_000
    assert summary["final"]["accuracy"] == pytest.approx(story.accuracy(100))
    assert summary["status"] == "finished"
    assert summary["members_lost"] == []


def test_the_target_time_is_that_of_the_first_evaluation_at_or_above_it(tmp_path: Path) -> None:
    story = Story(steps=200)
    summary = read_summary(write_run(tmp_path, story))
    assert summary is not None
    first = next(step for step in range(10, 201, 10) if story.accuracy(step) >= 0.97)
    assert summary["target_steps"] == first
    assert summary["target_seconds"] == pytest.approx(first * story.step_s)


def test_a_target_that_was_never_reached_is_null(tmp_path: Path) -> None:
    summary = summarise(write_run(tmp_path, Story(steps=20)), extra(DGA))
    assert summary["target_seconds"] is None
    assert summary["target_steps"] is None


def test_a_target_of_a_loss_is_reached_from_above(tmp_path: Path) -> None:
    folder = write_run(tmp_path, Story(steps=200))
    down = {"metric": "loss", "better": "lower", "target": 0.2}
    summary = summarise(folder, down)
    assert 0 < summary["target_steps"] < 200
    assert summarise(folder, {**down, "target": 1e-9})["target_steps"] is None


@pytest.mark.parametrize(
    ("value", "better", "yes"),
    [
        (0.97, "higher", True),
        (0.9699, "higher", False),
        (0.97, "lower", True),
        (0.98, "lower", False),
        (None, "higher", False),
    ],
)
def test_reached(value: float | None, better: str, yes: bool) -> None:
    assert reached(value, 0.97, better) is yes


def test_a_lost_member_is_named_and_the_run_is_still_finished(tmp_path: Path) -> None:
    summary = summarise(write_run(tmp_path, Story(steps=40, lost="m3")), extra(DGA))
    assert summary["members_lost"] == ["m3"]
    assert summary["status"] == "finished"
    assert summary["steps"] == 40
    assert summary["contributions_missed"] == 4


def test_in_a_finished_run_who_did_not_finish_is_lost_though_nobody_noticed(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path, Story(steps=20, members=3))
    lines = metrics_path(folder).read_text().splitlines(keepends=True)
    kept = (line for line in lines if '"finished"' not in line or '"m1"' not in line)
    metrics_path(folder).write_text("".join(kept))
    summary = summarise(folder, {"status": "finished"})
    assert summary["members_lost"] == ["m1"]
    assert summarise(folder)["status"] == "interrupted"


def test_an_interrupted_run_has_a_readable_summary(tmp_path: Path) -> None:
    folder = write_run(tmp_path, DGA, upto=37)
    with metrics_path(folder).open("ab") as file:
        file.write(b'{"kind":"step","t":9.9,"mem')
    summary = summarise(folder)
    assert summary["status"] == "interrupted"
    assert summary["steps"] == 37


def test_joules_of_some_members_only_are_not_a_sum(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "known", Story(steps=5, members=2))
    other = write_run(tmp_path / "unknown", Story(steps=5, members=1, joules=False))
    lines = metrics_path(other).read_text().replace('"m0"', '"m9"')
    with metrics_path(folder).open("a") as file:
        file.write(lines)
    assert summarise(folder)["joules"] is None


def test_what_the_driver_says_stands(tmp_path: Path) -> None:
    folder = write_run(tmp_path, Story(steps=5))
    summary = summarise(folder, {"status": "failed", "members": 99, "delay": 7})
    assert (summary["status"], summary["members"], summary["delay"]) == ("failed", 99, 7)


def test_every_key_is_documented(tmp_path: Path) -> None:
    folder = write_run(tmp_path, Story(steps=20, lost="m3"))
    write_environment(folder)
    page = (Path(__file__).parents[2] / "docs/reference/run-folder.md").read_text(encoding="utf-8")
    written = set(json.loads((folder / "environment.json").read_text()))
    written |= set(read_summary(folder) or {})
    written |= {key for record in read_metrics(folder) for key in record}
    assert [key for key in sorted(written) if f"`{key}`" not in page] == []


def test_an_empty_run_has_a_summary(tmp_path: Path) -> None:
    summary = summarise(tmp_path)
    assert summary["steps"] == summary["members"] == 0
    assert summary["steps_per_second"] is None
    assert summary["final"] == {}
    assert summary["status"] == "interrupted"
