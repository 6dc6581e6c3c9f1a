"""docs/reference/run-folder.md against folders that verbs leave: every key of a line or a summary
is on the page, and nothing on the page is in none of them."""

from __future__ import annotations

import contextlib
import io
import json
from collections import defaultdict
from typing import get_args

import pytest
from command_line import edgetrain, hub, write_tiny
from left_behind import Imports
from run_folder_page import PAGE, rows

from edgetrain.__main__ import main
from edgetrain.runs.folder import FORMAT, read_metrics, read_summary, runs_in
from edgetrain.runs.metrics.log import EventName

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("own_imports")]

KINDS = ("step", "exchange", "eval", "round", "status", "figure", "event")
RARE = {
    "line": {"cut": "a line of more than 4096 bytes"},
    "status": {
        "celsius": "a sensor",
        "throttled": "a Raspberry Pi's firmware",
        "under_voltage": "a Raspberry Pi's firmware",
        "mhz": "a processor that says its frequency",
        "wifi_dbm": "a Wi-Fi link",
    },
    "round": {
        "final_sync": "a run with a final sync: tests/strategies/test_final_sync_laws.py",
        "ages": "members out of step: tests/training/simulated/test_out_of_step_runs.py",
        "above_sent_bytes": "a gateway",
        "above_received_bytes": "a gateway",
        **dict.fromkeys(
            ("slices", "copies", "wasted", "loss", "step_length"),
            "a hub that hands out work: tests/training/simulated/test_lbfgs_runs.py",
        ),
    },
    "summary": {
        "ages": "members out of step, as above",
        "own_data": "data that members hold out: tests/training/test_own_evaluation.py",
        "pipeline": "a pipeline: tests/training/pipelined/test_pipeline_runs.py",
        "members_removed": "an order of people: tests/cli/test_control_cli.py",
        "gateways": "a run that plays gateways: tests/training/test_gateways.py",
    }
    | dict.fromkeys(
        ("placement", "attempts", "predicted_step_s", "measured_step_s", "predicted_bytes"),
        "a group: tests/cli/test_group_cli.py",
    ),
    "emulation": dict.fromkeys(
        (
            "rights",
            "packets",
            "bytes",
            "lost",
            "queue_dropped",
            "ring_dropped",
            "refused_by_kernel",
        ),
        "namespaces",
    )
    | {"carried_bytes": "a machine without them"},
}
"""On the page, and in none of the folders made here, for want of these."""
FIGURES = {"loss"}
"""What the task of these runs evaluates."""


def tiny(folder, **tables):
    folder.mkdir()
    return str(folder / write_tiny(folder, **({"train": {"steps": 12}} | tables)))


def answer(*words):
    """What a verb prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert main(list(words)) == 0
    return out.getvalue()


def simulated(folder):
    """Of so many members that a line stands for several steps, with a codec that is chosen; and of
    a few, one cut off."""
    strategy = {"name": "fedavg", "local_steps": 2, "codec": "auto"}
    job = tiny(folder / "many", fleet={"members": 128}, strategy=strategy)
    answer("simulate", job, "--runs", str(folder / "runs"))
    few = tiny(
        folder / "few",
        fleet={"members": 6, "device": "raspberry-pi-4b"},
        strategy={"name": "dga", "merge": "krum(1)", "local_steps": 2},
        faults=[{"kind": "down", "at_s": 0.001, "for_s": 0.001, "members": [0]}],
    )
    answer("simulate", few, "--runs", str(folder / "runs"))


def several(folder):
    """A sweep and a comparison."""
    job = tiny(folder / "several", fleet={"members": 2, "device": "raspberry-pi-4b"})
    answer("sweep", job, "--rtt", "0,50", "--runs", str(folder / "runs"))
    answer("compare", job, "--simulate", "--runs", str(folder / "runs"))
    told = answer("capacity", job, "--json", "--runs", str(folder / "runs"))
    (folder / "capacity.json").write_text(told)


def on_machines(folder):
    """A hub with keys, and its member."""
    place = folder / "machines"
    job = tiny(
        place, fleet={"members": 1, "device": "raspberry-pi-4b"}, train={"steps": 60},
        strategy={"local_steps": 2}, hub={"status_s": 0.05},
    )  # fmt: skip
    keys = {
        name: json.loads(answer("keys", "init", "--keys", str(place / name), "--json"))["public"]
        for name in ("hub", "pi")
    }
    answer("keys", "enroll", "pi", "--key", keys["pi"], "--keys", str(place / "hub"))
    runs = str(folder / "runs")
    with hub(job, "--keys", "hub", "--runs", runs, cwd=place) as (serving, address):
        words = ["--hub", address, "--hub-key", keys["hub"], "--keys", str(place / "pi")]
        answer("member", job, *words, "--index", "0", "--runs", runs)
        assert serving.finish() == 0, serving.said


def processes(folder):
    """A fleet over an emulated network."""
    job = tiny(folder / "processes", fleet={"members": 2, "network": "wan-50ms"})
    done = edgetrain("run", job, "--runs", str(folder / "runs"), cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where each verb that trains has left its folder."""
    folder, before = tmp_path_factory.mktemp("page"), Imports()
    for make in (simulated, several, on_machines, processes):
        make(folder)
    before.restore()
    return sorted((folder / "runs").iterdir())


@pytest.fixture(scope="module")
def runs(folders):
    """The run folders among them, and in those of several runs."""
    return [run for folder in folders if "-capacity-" not in folder.name for run in runs_in(folder)]


def assert_page(written, page, rare=()):
    """Keys that were written are those on the page, but for the `rare` ones."""
    assert sorted(written - page) == [], "not on the page"
    assert sorted(page - written - set(rare)) == [], "on the page, and in no folder"
    assert set(rare) <= page


def test_every_key_of_every_line_is_on_the_page(runs):
    found = defaultdict(set)
    for run in runs:
        for record in read_metrics(run):
            found[record["kind"]] |= set(record)
    assert sorted(found) == sorted(KINDS)
    line = rows("Every line has")
    assert_page(set.intersection(*found.values()), line, RARE["line"])
    for kind in KINDS:
        assert_page(
            found[kind] - line - (FIGURES if kind == "eval" else set()),
            rows(f"**{kind}**: ") - line - (FIGURES | {"accuracy"} if kind == "eval" else set()),
            RARE.get(kind, ()),
        )


def test_every_event_is_on_the_page():
    assert rows("**event**: ", 1) == set(get_args(EventName))


def test_every_key_of_a_summary_is_on_the_page(runs):
    summaries = [read_summary(run) for run in runs]
    assert_page(
        {key for each in summaries for key in each}, rows("## summary.json"), RARE["summary"]
    )
    emulations = [each["emulation"] or {} for each in summaries]
    assert_page(
        {key for each in emulations for key in each}, rows("`emulation` has"), RARE["emulation"]
    )


def test_every_key_of_a_summary_of_several_runs_is_on_the_page(folders):
    compared, swept = (
        next(read_summary(folder) for folder in folders if what in folder.name)
        for what in ("-compare-", "-sweep-")
    )
    of_a_run = rows("## summary.json")
    assert set(compared) == {"format", "name", "runs", "comparison"}
    comparison = compared["comparison"]
    keys = set(comparison) | set(comparison["runs"][0]) - of_a_run - {"label"}
    assert_page(keys - rows("`emulation` has"), rows("`comparison`:"))
    assert_page(set(swept) - {"format", "name", "metric", "runs"}, rows("The summary of a sweep"))
    assert {"low", "high", "mean", "runs", "failed"} <= set(swept["points"][0])


def test_a_capacity_plan_leaves_what_it_prints(folders):
    (planned,) = (folder for folder in folders if "-capacity-" in folder.name)
    told = json.loads((planned.parents[1] / "capacity.json").read_text("utf-8"))
    assert "`edgetrain capacity` leaves what it prints with" in " ".join(PAGE.split())
    assert read_summary(planned) == {"format": FORMAT, **told}


def test_every_key_of_the_environment_is_on_the_page(runs):
    found = [json.loads((run / "environment.json").read_text("utf-8")) for run in runs]
    assert_page({key for each in found for key in each}, rows("## environment.json"))


def test_every_file_of_a_folder_is_on_the_page(folders):
    for path in (path for folder in folders for path in folder.iterdir()):
        inside = path.is_dir() and (path / "metrics.jsonl").exists()
        assert inside or path.name in PAGE or path.suffix == ".png", path
