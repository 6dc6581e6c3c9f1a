"""Experiments from Python: they leave what the verbs leave, and raise what is wrong."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import re
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import environment

import edgetrain
from edgetrain.__main__ import main, parse_arguments
from edgetrain.codecs import dense
from edgetrain.errors import ConfigError, EdgetrainError, TaskError
from edgetrain.runs.folder import read_metrics
from edgetrain.runs.loaded import KINDS, columns_of
from edgetrain.training.hub_recorder import HubRecorder
from edgetrain.training.simulated import batched
from edgetrain.training.simulated.virtual import World

PAGE = Path(__file__).parents[1] / "docs/how-to/python.md"
NOTEBOOK = Path(__file__).parents[1] / "examples" / "dga.ipynb"
SMALL = {"members": 2, "steps": 6, "batch": 8}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return edgetrain.simulate(runs=tmp_path_factory.mktemp("runs"), progress=False, **SMALL)


@pytest.fixture
def quiet(tmp_path):
    return {"runs": tmp_path, "progress": False}


def test_a_run_is_that_of_the_command_line(run, tmp_path):
    words = [f"{key}={value}" for key, value in SMALL.items()]
    main(["simulate", "--runs", str(tmp_path), "--json", *words])
    (folder,) = tmp_path.iterdir()
    for name in ("model.safetensors", "job.toml"):
        assert (folder / name).read_bytes() == (run.folder / name).read_bytes()
    theirs = edgetrain.load(folder)
    assert theirs.summary["sent_bytes"] == run.summary["sent_bytes"]
    assert theirs.summary["final"] == run.summary["final"]


@pytest.mark.real
def test_real_processes_train_where_no_simulation_is_asked_for(quiet):
    one = edgetrain.run(network="none", **quiet, **SMALL)
    two = edgetrain.compare(strategies=["fedavg", "dga"], network="none", **quiet, **SMALL)
    backends = {each.summary["emulation"]["backend"] for each in (one, *two)}
    assert "simulated" not in backends
    assert {each.summary["status"] for each in (one, *two)} == {"finished"}


def test_compare_simulates_by_the_same_word_in_python_and_on_the_command_line():
    parameter = inspect.signature(edgetrain.compare).parameters["simulate"]
    assert parse_arguments(["compare"]).simulate is parameter.default is False
    assert parse_arguments(["compare", "--simulate"]).simulate is True
    assert parse_arguments(["simulate"]).simulate is True
    assert parse_arguments(["run"]).simulate is False


def test_a_comparison_without_a_job_is_that_of_the_command_line(quiet, capsys):
    runs = edgetrain.compare(strategies=["dga"], simulate=True, **quiet, steps=4)
    words = ["compare", "--simulate", "--strategies", "dga", "steps=4", "--json"]
    assert main([*words, "--runs", str(quiet["runs"] / "other")]) == 0
    other = edgetrain.load(json.loads(capsys.readouterr().out.splitlines()[-1])["folder"])
    jobs = [(each.folder / "job.toml").read_bytes() for each in (runs[0], other[0])]
    assert jobs[0] == jobs[1]


def test_columns_are_the_lines(run):
    for name, kind in KINDS.items():
        if name == "own_evaluations":  # rows of figures, not of lines; this run has none
            continue
        records, columns = list(read_metrics(run.folder, kind)), getattr(run, name)
        assert records
        assert {len(column) for column in columns.values()} == {len(records)}
        for key, column in columns.items():
            for record, value in zip(records, column, strict=True):
                told = record.get(key)
                assert np.isnan(value) if told is None and column.dtype == float else value == told


def test_columns_of_unlike_lines():
    columns = columns_of([{"a": 1, "b": True, "c": "x"}, {"a": None, "b": False, "d": [1]}])
    assert columns["a"].dtype == float
    assert np.isnan(columns["a"][1])
    assert columns["b"].dtype == bool
    assert columns["c"].tolist() == ["x", None]
    assert columns["d"].tolist() == [None, [1]]
    assert columns_of([]) == {}


def test_a_comparison_and_its_page(quiet):
    runs = edgetrain.compare(strategies=["fedavg", "dga"], simulate=True, **quiet, **SMALL)
    assert [run.folder.name for run in runs] == ["fedavg", "dga"]
    assert [row["strategy"] for row in runs.rows] == ["fedavg", "dga"]
    assert runs.summary["comparison"]["runs"][0]["label"] == "fedavg"
    shown = runs._repr_html_()
    assert 'sandbox="" ' in shown
    assert "&lt;svg" in shown
    assert runs.report().read_text().startswith("<!doctype html>")
    assert "2 runs in" in repr(edgetrain.load(runs.folder))


@pytest.mark.real
def test_cells_at_once_have_the_bits_of_cells_one_after_the_other(tmp_path, capsys):
    axes = {"rtt": [0, 200], "strategy": ["fedavg", "dga"]}
    one = edgetrain.sweep(axes=axes, runs=tmp_path / "one", progress=False, **SMALL)
    words = [f"--{name}={','.join(map(str, values))}" for name, values in axes.items()]
    words += [f"{key}={value}" for key, value in {**SMALL, "device": "raspberry-pi-4b"}.items()]
    assert main(["sweep", "--at-once", "2", "--runs", str(tmp_path / "two"), "--json", *words]) == 0
    many = edgetrain.load(json.loads(capsys.readouterr().out.splitlines()[-1])["folder"])
    assert one.rows == many.rows
    assert [(row["rtt"], row["strategy"]) for row in one.rows][:2] == [(0, "fedavg"), (0, "dga")]
    assert {run.folder.name for run in one} == {run.folder.name for run in many}
    for run in one:
        model = (many.folder / run.folder.name / "model.safetensors").read_bytes()
        assert model == (run.folder / "model.safetensors").read_bytes()


def test_an_executor_runs_the_cells(quiet):
    with ThreadPoolExecutor(1) as executor:
        runs = edgetrain.sweep(
            axes={"seed": [0, 1]}, task=Line, executor=executor, **quiet, **SMALL
        )
    assert [row["status"] for row in runs.rows] == ["finished"] * 2


def test_a_sweeps_file_says_its_axes_and_seeds(tmp_path, quiet, own_imports):
    file = tmp_path / "sweep.toml"
    file.write_text("job = { train = { steps = 3 } }\nseeds = 2\n[axes]\nmembers = [1]\n")
    runs = edgetrain.sweep(file, {"batch": [4, 8]}, task=Line, **quiet)
    assert [(row["batch"], row["seed"]) for row in runs.rows] == [(4, 0), (4, 1), (8, 0), (8, 1)]
    assert len(edgetrain.sweep(file, task=Line, seeds=1, **quiet).rows) == 1
    file.write_text(f"how = 'emulated'\n{file.read_text()}")
    with pytest.raises(ConfigError, match="how = 'emulated'"):
        edgetrain.sweep(file, task=Line, **quiet)


@pytest.mark.parametrize(
    "words", [["--emulate", "--at-once", "2"], ["--at-once", "0"], ["--dask", "tcp://127.0.0.1:1"]]
)
def test_what_no_sweep_can_do_at_once(words, tmp_path, capsys):
    assert main(["sweep", "--strategy", "dga", "--runs", str(tmp_path), *words]) == 2
    assert "--at-once" in (said := capsys.readouterr().err) or "--dask" in said


class Line:
    """A task of this module."""

    name, metric, better, target = "line", "loss", "lower", None

    def model(self):
        return torch.nn.Linear(1, 300)

    def samples(self, index, members):
        return 8

    def batches(self, index, members, batch, seed):
        while True:
            yield self.drawn(batch)

    def drawn(self, batch):
        return (torch.ones(batch, 1),)

    def loss(self, model, batch):
        return model(*batch).square().mean()

    def evaluate(self, model):
        return {"loss": model(torch.ones(1, 1)).square().mean().item()}


@pytest.mark.parametrize("task", [Line, Line(), lambda: Line()])
def test_a_task_may_be_any_object(task, quiet):
    run = edgetrain.simulate(task=task, **quiet, **SMALL)
    assert run.summary["task"] == "line"
    assert run.evaluations["loss"][-1] < run.evaluations["loss"][0]


def test_in_a_running_event_loop(quiet):
    async def notebook():
        return edgetrain.simulate(task=Line, **quiet, **SMALL)

    assert asyncio.run(notebook()).summary["status"] == "finished"


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda more: edgetrain.simulate(stepz=1, **more), "no key 'stepz'"),
        (lambda more: edgetrain.simulate(steps="many", **more), r"train\.steps"),
        (lambda more: edgetrain.simulate("nowhere.toml", **more), "no job file"),
        (lambda more: edgetrain.simulate({"fleet": 3}, **more), "fleet"),
        (lambda more: edgetrain.simulate(task=3, **more), "not a task"),
        (lambda more: edgetrain.simulate(task=SimpleNamespace(name="x"), **more), "lacks"),
        (lambda more: edgetrain.compare(strategies=["dgaa"], **more), "dgaa"),
        (lambda more: edgetrain.sweep(axes={"rt": [1]}, **more), "no axis 'rt'"),
        (lambda more: edgetrain.sweep(**more), "needs an axis"),
        (lambda more: edgetrain.simulate([1], **more), "a job is no list"),
        (lambda more: edgetrain.compare(strategies="dga", **more), "a list, as in"),
        (lambda more: edgetrain.compare(emulate=True, **more), "simulate=True"),
        (lambda more: edgetrain.compare(strategies=[], **more), "a list, as in"),
        (lambda more: edgetrain.sweep(axes={"steps": 5}, **more), "lists by key"),
        (lambda more: edgetrain.sweep(axes={"strategy": "dga"}, **more), "lists by key"),
        (lambda more: edgetrain.sweep(axes=["steps"], **more), "lists by key"),
        (lambda more: edgetrain.load(more["runs"]), "no run folder"),
        (lambda more: edgetrain.sweep(axes={"steps": [1]}, executor=5, **more), "executor = 5"),
        (lambda more: edgetrain.load("nowhere"), "does not exist"),
        (lambda more: edgetrain.load(None), "folder = None"),
    ],
)
def test_what_is_wrong_raises_and_leaves_nothing(call, match, quiet):
    with pytest.raises(EdgetrainError, match=match):
        call(quiet)
    assert not list(quiet["runs"].glob("*/*"))


@pytest.mark.parametrize("call", [edgetrain.simulate, partial(edgetrain.compare, simulate=True)])
@pytest.mark.parametrize(
    ("method", "answer", "match"),
    [
        ("model", partial(torch.nn.LazyLinear, 3), "tensor 'weight' has no shape yet .say the lay"),
        ("model", partial(torch.nn.LazyBatchNorm1d, affine=False), "tensor 'running_mean' has no"),
        ("model", lambda: None, "returns a NoneType"),
        ("batches", lambda *_: None, "gives a NoneType of 0 samples"),
        ("batches", lambda *_: [], "ended after 0 batches .let them go on"),
        ("evaluate", lambda _: {"accuracy": 1.0}, "returns 'accuracy', and not its metric 'loss'"),
    ],
)
def test_a_task_that_is_none_is_refused_before_training(method, answer, match, call, quiet):
    task = Line()
    setattr(task, method, answer)
    with pytest.raises(TaskError, match=match):
        call(task=task, **quiet, **SMALL)
    assert not list(quiet["runs"].iterdir())


def test_a_run_names_what_it_has(run):
    with pytest.raises(ConfigError, match=r"no columns 'step'.*steps, evaluations"):
        run.columns("step")
    with pytest.raises(TaskError):
        edgetrain.simulate(task="nowhere:task", runs=run.folder.parent, progress=False)


class Interrupts:
    """Counts the calls of what it is around; an interrupt comes at the one with number `at`."""

    def __init__(self, at=0):
        self.at, self.calls = at, 0

    def around(self, function):
        def counted(*arguments, **named):
            self.calls += 1
            if self.calls == self.at:
                raise KeyboardInterrupt
            return function(*arguments, **named)

        return counted


CALLS = {}
"""How often a whole call calls each of PLACES: (the call, the place) -> times."""


def interrupted(monkeypatch, where, quiet, call, part, same=None):
    """Interrupt `call` in the middle of it, `part` of its way; the folders that it leaves. Calls
    that are the `same` are counted once."""
    whole = getattr(*where)
    if (same, where) not in CALLS:
        counted = {place: (getattr(*place), Interrupts()) for place in PLACES}
        for place, (function, counts) in counted.items():
            monkeypatch.setattr(*place, counts.around(function))
        call(runs=quiet["runs"] / "whole")
        CALLS.update({(same, place): counts.calls for place, (_, counts) in counted.items()})
        for place, (function, _) in counted.items():
            monkeypatch.setattr(*place, function)
    ends = Interrupts(int(part * CALLS[same, where]))
    monkeypatch.setattr(*where, ends.around(whole))
    with pytest.raises(KeyboardInterrupt):
        call(runs=quiet["runs"] / "ended")
    # Nothing goes on: neither another member, nor this one, nor a process that was forgotten.
    gc.collect()
    assert ends.calls == ends.at
    return list((quiet["runs"] / "ended").iterdir())


DIRECT = {"fleet.topology": "direct", "ranges": 2}
PLACES = [
    (Line, "drawn"), (Line, "loss"), (Line, "evaluate"), (dense.Half, "write"),
    (dense.Half, "read"), (HubRecorder, "__call__"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("where", "more"),
    [
        *((place, {}) for place in PLACES),
        (PLACES[1], DIRECT),
        (PLACES[3], DIRECT),
        (PLACES[1], {"members": 40}),
    ],
    ids=lambda each: each[1] if isinstance(each, tuple) else str(list(each.values())),
)
def test_an_interrupt_ends_a_simulation_whose_folder_loads(where, more, quiet, monkeypatch):
    part = Random(f"{where}{more}").uniform(0.6, 1)
    keys = (
        SMALL
        | {"codec": "fp16", "strategy": "fedavg", "local_steps": 1, "evaluate_every": 1}
        | more
    )

    def call(runs):
        edgetrain.simulate(task=Line, runs=runs, progress=False, **keys)

    (folder,) = interrupted(monkeypatch, where, quiet, call, part, str(more))
    assert edgetrain.load(folder).summary["status"] == "interrupted"


def test_an_interrupt_ends_what_threads_compute_ahead(quiet, monkeypatch):
    class Interrupted(Future):
        def result(self, timeout=None):
            raise KeyboardInterrupt

    ahead, losses = 1000, Interrupts()
    monkeypatch.setattr(batched, "Future", Interrupted)
    monkeypatch.setattr(Line, "loss", losses.around(Line.loss))
    keys = {"members": 40, "steps": ahead, "local_steps": ahead, "strategy": "fedavg", "batch": 1}
    with pytest.raises(KeyboardInterrupt):
        edgetrain.simulate(task=Line, **quiet, **keys)
    assert losses.calls < ahead / 2


@pytest.mark.parametrize("part", [0.4, 0.9])
@pytest.mark.parametrize(
    "several",
    [
        partial(edgetrain.compare, strategies=["sync-sgd", "dga"], simulate=True),
        partial(edgetrain.sweep, axes={"seed": [0, 1]}),
    ],
    ids=["compare", "sweep"],
)
def test_an_interrupt_ends_several_runs(several, part, quiet, monkeypatch):
    def call(runs):
        several(task=Line, runs=runs, progress=False, **SMALL)

    (folder,) = interrupted(monkeypatch, (HubRecorder, "__call__"), quiet, call, part, several)
    found = edgetrain.load(folder)
    wanted = ["interrupted"] if part < 0.5 else ["finished", "interrupted"]
    assert [run.summary["status"] for run in found] == wanted
    assert [row["status"] for row in found.rows] == wanted


@pytest.mark.parametrize("call", [edgetrain.simulate, partial(edgetrain.compare, simulate=True)])
def test_an_interrupt_before_anything_began_leaves_nothing(call, quiet, monkeypatch):
    monkeypatch.setattr(World, "step", Interrupts(1).around(World.step))
    with pytest.raises(KeyboardInterrupt):
        call(task=Line, **quiet, **SMALL)
    assert not list(quiet["runs"].glob("*"))


def test_a_frame_is_made_of_the_columns(run, monkeypatch):
    frames = SimpleNamespace(DataFrame=dict)
    monkeypatch.setitem(sys.modules, "pandas", frames)
    assert run.frame("evaluations")["accuracy"] == run.evaluations["accuracy"].tolist()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        run.frame()


def test_every_block_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S):
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["run"].summary["task"] == "line"


@pytest.mark.real
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    assert "of it waiting" in capsys.readouterr().out
    assert len(names["far"]) == 6


@pytest.mark.real
def test_importing_the_functions_loads_neither_torch_nor_zmq():
    code = (
        "import sys, edgetrain\nedgetrain.simulate, edgetrain.load\n"
        "assert not {'torch', 'zmq'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=120)
