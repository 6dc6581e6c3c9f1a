"""Sweeps: the grid, resumption after any interruption, the rows, the table and the pictures.

Cells are run by a fake; nothing is trained.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import environment
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import errors
from edgetrain.__main__ import main
from edgetrain.errors import ConfigError, TaskError
from edgetrain.fleet import networks
from edgetrain.jobs import grid, reading
from edgetrain.jobs.grid import Sweep, is_sweep, load, resume, split, write
from edgetrain.runs.folder import write_summary
from edgetrain.runs.reports import plot, sweep_rows
from edgetrain.runs.reports.sweep_rows import relative, series, to_csv
from edgetrain.training import sweep

EXAMPLES = Path(__file__).parents[2] / "examples" / "paper"


class Fake:
    """Runs cells at once; remembers which, and can be told to fail or be interrupted."""

    def __init__(self, stop_at=None, fail=lambda job: False):
        self.jobs, self.stop_at, self.fail = [], stop_at, fail

    def __call__(self, job, folder, watch=lambda: None):
        if self.stop_at is not None and len(self.jobs) == self.stop_at:
            write_summary(folder, {"status": "interrupted"})
            raise KeyboardInterrupt
        self.jobs.append(job)
        if self.fail(job):
            raise TaskError("it did not work", "try another one")
        rtt = networks.load(job.fleet.network).rtt_ms / 1000
        hidden = isinstance(job.strategy.delay, int) and job.strategy.delay * 0.05 >= rtt
        step_s = 0.05 + (0 if hidden else rtt / 5)
        summary = {
            "status": "finished", "metric": "accuracy", "members": job.fleet.members,
            "steps": job.train.steps, "seconds": job.train.steps * step_s,
            "steps_per_second": 1 / step_s, "compute_s": 0.05, "wait_s": step_s - 0.05,
            "overhead_s": 0.0, "target_seconds": 3.0 + job.seed, "target_steps": 60,
            "sent_bytes": 1000 * job.fleet.members, "received_bytes": 10, "joules": None,
            "final": {"accuracy": 0.9 + 0.01 * job.seed, "loss": 0.1},
        }  # fmt: skip
        write_summary(folder, summary)
        return summary


def ticking():
    now = 0.0

    def clock():
        nonlocal now
        now += 1.0
        return now

    return clock


def made(*axes, seeds=1, **job):
    return Sweep(job, tuple(grid.axis(name, values) for name, values in axes), seeds)


LATENCY = made(("rtt", [0, 100, 400]), ("delay", [0, 4]), seeds=2)


def ran(chosen, folder, fake=None, tell=lambda progress: None):
    fake = fake or Fake()
    return sweep.run(chosen, folder, fake, tell, ticking()), fake


# -- the grid -------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_the_first_axis_slowest():
    cells = LATENCY.cells()
    assert [(*cell.labels, cell.job.seed) for cell in cells[:6]] == [
        ("0", "0", 0), ("0", "0", 1), ("0", "4", 0),
        ("0", "4", 1), ("100", "0", 0), ("100", "0", 1),
    ]  # fmt: skip
    assert len({cell.digest for cell in cells}) == len(cells) == 12
    assert [cell.job.fleet.network for cell in cells[::4]] == ["rtt-0ms", "rtt-100ms", "rtt-400ms"]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from(["fp32", "int8", "topk(0.01) | q2"]), min_size=1, unique=True),
    st.integers(1, 3),
)
def test_a_cells_digest_is_its_settings(members, codecs, seeds):
    chosen = made(("members", members), ("codec", codecs), seeds=seeds)
    cells = chosen.cells()
    assert len(cells) == len(members) * len(codecs) * seeds
    assert len({cell.digest for cell in cells}) == len(cells)
    assert [c.digest for c in cells] == [c.digest for c in chosen.cells()]
    alone = made(("codec", [cells[-1].labels[1]]), fleet={"members": members[-1]}, seed=seeds - 1)
    assert alone.cells()[0].digest == cells[-1].digest


def test_emulated_and_simulated_cells_are_not_the_same():
    from dataclasses import replace

    one = LATENCY.cells()[0].digest
    assert replace(LATENCY, how="emulated").cells()[0].digest != one


def test_settings_that_a_strategy_does_not_have_are_left_out():
    cells = made(
        ("strategy", ["sync-sgd", "dga"]), ("delay", [0, 20]), ("local_steps", [2])
    ).cells()
    sync, same, *dga = cells
    assert sync.digest == same.digest
    assert (sync.job.strategy.local_steps, sync.job.strategy.delay) == (0, 0)
    assert [(c.job.strategy.local_steps, c.job.strategy.delay) for c in dga] == [(2, 0), (2, 20)]


def test_a_value_can_be_several_keys_at_once():
    case = {
        "label": "K=10",
        "strategy": "fedavg",
        "local_steps": 10,
        "data.partition": "dirichlet(0.3)",
    }
    cell = made(("case", [case, {"strategy": "dga"}])).cells()[0]
    assert cell.labels == ("K=10",)
    assert (cell.job.strategy.name, cell.job.strategy.local_steps) == ("fedavg", 10)
    assert cell.job.data == {"partition": "dirichlet(0.3)"}


def test_any_key_can_be_an_axis():
    cells = made(("optimizer.lr", [0.1, 0.2]), ("partition", ["iid", "dirichlet(0.3)"])).cells()
    assert cells[3].job.train.optimizer["lr"] == 0.2
    assert cells[3].job.data == {"partition": "dirichlet(0.3)"}


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ([("membres", [1])], "no axis 'membres'.*did you mean 'members'"),
        ([("members", [])], "has the values none"),
        ([("members", [2, 2])], "has the values 2, 2"),
        ([("members", ["many"])], "fleet.members = 'many'"),
        ([], "a sweep needs an axis"),
        ([("members", list(range(1, 401))), ("delay", list(range(400)))], "160000 cells"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(axes, says):
    with pytest.raises(ConfigError, match=says):
        made(*axes).cells()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0,50, 100", ["0", "50", "100"]),
        ("fp32, topk(0.01, tensor) | q2", ["fp32", "topk(0.01, tensor) | q2"]),
        ("{ name = 'sgd', lr = 0.2 },adam", ["{ name = 'sgd', lr = 0.2 }", "adam"]),
        ("'a,b',c", ["'a,b'", "c"]),
        (" , ", []),
    ],
)
def test_a_list_is_cut_at_its_own_commas(text, values):
    assert split(text) == values


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_papers_figures_are_sweeps(path):
    chosen = load(path)
    assert is_sweep(path)
    assert chosen.title
    assert len(chosen.cells()) > 3


def test_the_papers_figures_are_these():
    names = {path.stem for path in EXAMPLES.glob("*.toml")}
    assert names == {"correction", "language", "latency", "scaling", "unequal", "vision"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[axis]\nrtt = [1]", "no key 'axis' in a sweep .*'axes'"),
        ("[axes]\nrtt = 5", "axes.rtt = 5"),
        ("seeds = 'a'\n[axes]\nrtt = [5]", "seeds = 'a'"),
        ("how = 'guessed'\n[axes]\nrtt = [5]", "simulated or emulated"),
        ("axes = 3", "'axes' and 'job' are tables"),
        ("=", "is not TOML"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused(text, says, tmp_path):
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load(tmp_path / "s.toml")


def test_a_sweep_can_name_its_job_file(tmp_path):
    (tmp_path / "job.toml").write_text("[fleet]\nmembers = 3\n")
    (tmp_path / "s.toml").write_text('job = "job.toml"\n[axes]\nrtt = [5]\n')
    chosen = load(tmp_path / "s.toml")
    assert chosen.cells()[0].job.fleet.members == 3
    assert chosen.beside == tmp_path


def test_a_sweep_comes_back_from_its_folder(tmp_path):
    for path in EXAMPLES.glob("*.toml"):
        chosen = load(path)
        write(tmp_path, chosen)
        assert resume(tmp_path) == chosen
    with pytest.raises(ConfigError, match="is no sweep"):
        resume(tmp_path / "elsewhere")


# -- running it -----------------------------------------------------------------------------------


def test_every_cell_is_run_once_into_its_own_folder(tmp_path):
    rows, fake = ran(LATENCY, tmp_path)
    assert len(fake.jobs) == len(rows) == 12
    assert {path.name for path in tmp_path.iterdir()} == {row["cell"] for row in rows}


def test_equal_cells_are_run_once_and_have_a_row_each(tmp_path):
    rows, fake = ran(made(("strategy", ["sync-sgd"]), ("delay", [0, 10, 20])), tmp_path)
    assert len(fake.jobs) == 1
    assert [row["delay"] for row in rows] == ["0", "10", "20"]
    assert len({row["cell"] for row in rows}) == 1


@given(stop_at=st.integers(0, 11))
def test_an_interrupted_sweep_goes_on_where_it_ended(stop_at, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.raises(KeyboardInterrupt):
        ran(LATENCY, folder, first := Fake(stop_at))
    rows, second = ran(LATENCY, folder)
    assert len(first.jobs) == stop_at
    assert len(second.jobs) == 12 - stop_at
    straight, _ = ran(LATENCY, tmp_path_factory.mktemp("straight"))
    assert rows == straight
    assert ran(LATENCY, folder)[1].jobs == []


def test_an_interrupted_cell_begins_in_an_empty_folder(tmp_path):
    digest = LATENCY.cells()[0].digest
    (tmp_path / digest).mkdir()
    (tmp_path / digest / "metrics.jsonl").write_text("half a run\n")
    (tmp_path / digest / "summary.json").write_text('{"status": "fini')
    ran(LATENCY, tmp_path)
    assert not (tmp_path / digest / "metrics.jsonl").exists()
    assert sweep.finished(tmp_path / digest)
    kept = tmp_path / f"{digest}.old-1"
    assert (kept / "metrics.jsonl").read_text() == "half a run\n", "it may have been a good run"


def test_a_cell_that_a_newer_edgetrain_finished_is_neither_run_again_nor_touched(tmp_path):
    digest = LATENCY.cells()[3].digest
    (tmp_path / digest).mkdir()
    newer = '{"format": 99, "status": "finished"}'
    (tmp_path / digest / "summary.json").write_text(newer)
    fake = Fake()
    with pytest.raises(ConfigError, match=r"format 99.*the edgetrain that wrote it"):
        ran(LATENCY, tmp_path, fake)
    assert fake.jobs == []
    assert [path.name for path in tmp_path.rglob("*")] == [digest, "summary.json"]
    assert (tmp_path / digest / "summary.json").read_text() == newer


def test_a_cell_that_fails_is_told_and_run_again(tmp_path):
    told = []
    broken = Fake(fail=lambda job: job.fleet.network == "rtt-100ms")
    rows, _ = ran(LATENCY, tmp_path, broken, told.append)
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(rows) == len(told) == 12
    assert {row["rtt"] for row in failed} == {"100"}
    assert failed[0]["error"] == "it did not work (try another one)"
    rows, again = ran(LATENCY, tmp_path)
    assert len(again.jobs) == 4
    assert {row["status"] for row in rows} == {"finished"}


def test_progress_says_how_much_is_done_and_left(tmp_path):
    told = []
    ran(made(("members", [1, 2, 4])), tmp_path, tell=told.append)
    assert [(p.done, p.total) for p in told] == [(1, 3), (2, 3), (3, 3)]
    assert told[0].left_s == pytest.approx(1.0 * 6)  # a second for one member, six are to come
    assert told[-1].left_s == 0


# -- what came of it ------------------------------------------------------------------------------


def test_points_are_medians_over_seeds(tmp_path):
    rows, _ = ran(made(("rtt", [0, 100]), seeds=3), tmp_path)
    points = sweep_rows.points(["rtt"], rows)
    assert [point["rtt"] for point in points] == ["0", "100"]
    assert points[0]["final"] == pytest.approx(0.91)
    assert (points[0]["low"], points[0]["high"]) == pytest.approx((0.9, 0.92))
    assert points[0]["target_seconds"] == 4.0
    rows[1] = rows[1] | {"target_seconds": None}
    assert sweep_rows.points(["rtt"], rows)[0]["target_seconds"] is None  # one seed never got there


def test_a_line_is_what_the_other_axes_say(tmp_path):
    rows, _ = ran(LATENCY, tmp_path)
    points = sweep_rows.points(["rtt", "delay"], rows)
    lines = series("rtt", ["rtt", "delay"], points)
    assert list(lines) == ["delay 0", "delay 4"]
    assert dict(relative(lines["delay 0"])) == pytest.approx(
        {"0": 1.0, "100": 50 / 70, "400": 50 / 130}
    )
    assert dict(relative(lines["delay 4"]))["100"] == pytest.approx(1.0)


def test_too_many_lines_are_cut_by_whole_axes(tmp_path):
    chosen = made(("rtt", [0, 100]), ("strategy", ["fedavg", "dga"]), ("members", [1, 2, 3, 4, 5]))
    rows, _ = ran(chosen, tmp_path)
    names = [axis.name for axis in chosen.axes]
    lines = series("rtt", names, sweep_rows.points(names, rows))
    assert list(lines) == ["fedavg", "dga"]
    assert {point["members"] for line in lines.values() for point in line.values()} == {"1"}


def test_the_csv_has_a_row_a_run(tmp_path):
    rows, _ = ran(LATENCY, tmp_path)
    read = list(csv.DictReader(to_csv(rows).splitlines()))
    assert len(read) == 12
    assert read[0].keys() >= {"rtt", "delay", "seed", "cell", "status", "final", "final_loss"}
    assert float(read[-1]["steps_per_second"]) == rows[-1]["steps_per_second"]


def test_pictures_are_drawn_for_numbers_and_names(tmp_path):
    pytest.importorskip("matplotlib")
    from figure_texts import check

    chosen = made(
        ("rtt", [0, 100, 400]), ("delay", [0, 4]), ("codec", ["fp32", "topk(0.01) | q2"]), seeds=2
    )
    rows, _ = ran(chosen, tmp_path)
    axes = {axis.name: axis.labels for axis in chosen.axes}
    points = sweep_rows.points(list(axes), rows)
    for axis, labels in axes.items():
        said = check(plot.draw_sweep(axis, axes, points, "accuracy", "a title $x$"))
        assert "final accuracy" in said
        assert set(labels) <= {text.replace("\\", "") for text in said}
    figure = plot.draw_sweep("rtt", axes, points, "accuracy")
    path = plot.save(lambda: figure, tmp_path / "rtt.png")
    assert path.stat().st_size > 10_000


def test_capacity_is_drawn_within_its_picture():
    pytest.importorskip("matplotlib")
    from figure_texts import check

    rows = [
        {"members": 10**n, "speed_up": 9.0**n, "compute_s": 0.4, "wait_s": 0.4 * n,
         "bottleneck": "gateways' ports, receiving: 99 % busy"}
        for n in range(1, 6)
    ]  # fmt: skip
    title = "100,000 members (raspberry-pi-4b, 400 ms a step, wifi), 100 gateways, 4 shards; dga"
    said = check(plot.draw_capacity(rows, title))
    assert "100,000" in said
    with pytest.raises(ConfigError, match="no fleet"):
        plot.draw_capacity([])


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def faked(monkeypatch, tmp_path):
    from edgetrain.cli import sweep as command

    fake = Fake()
    monkeypatch.setattr(command, "driver_of", lambda arguments, chosen: fake)
    monkeypatch.chdir(tmp_path)
    return fake


def test_the_command_prints_a_table_and_leaves_files(faked, capsys):
    assert main(["sweep", "--rtt", "0,400", "--delay", "0,8", "--seeds", "2", "steps=20"]) == 0
    said = capsys.readouterr().out
    assert "8 runs, simulated" in said
    assert "[8/8] rtt 400, delay 8, seed 1: accuracy 91.0 %" in said
    assert "steps a second of the fleet by rtt (delay 0): 0: 1.00x, 400: 0.38x" in said
    assert "steps a second of the fleet by rtt (delay 8): 0: 1.00x, 400: 1.00x" in said
    (folder,) = Path("runs").iterdir()
    assert {p.name for p in folder.iterdir() if p.is_file()} >= {
        "sweep.toml", "sweep.csv", "summary.json", "rtt.png", "delay.png",
    }  # fmt: skip
    assert len(json.loads((folder / "summary.json").read_text())["points"]) == 4


def test_without_matplotlib_the_command_prints_its_table_all_the_same(faked, capsys, monkeypatch):
    found = errors.find_spec
    hidden = {"matplotlib"}
    monkeypatch.setattr(errors, "find_spec", lambda n: None if n in hidden else found(n))
    assert main(["sweep", "--rtt", "0,400", "steps=20"]) == 0
    said = capsys.readouterr()
    assert "no picture: a picture needs matplotlib" in said.err
    assert "400: 0.38x" in said.out
    assert not list(Path("runs").glob("*/*.png"))


def test_the_command_resumes(faked, capsys):
    faked.stop_at = 3
    assert main(["sweep", "--rtt", "0,100,200,400", "--set", "optimizer.lr=0.1,0.2"]) == 130
    (folder,) = Path("runs").iterdir()
    assert f"edgetrain sweep --resume {folder}" in capsys.readouterr().err
    faked.stop_at = None
    assert main(["sweep", "--resume", str(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["rows"]) == 8
    assert len(faked.jobs) == 8
    assert main(["sweep", "--resume", str(folder), "--rtt", "0"]) == 2
    assert "leave the rest" in capsys.readouterr().err


def test_a_failed_cell_is_named_and_makes_the_status(faked, capsys):
    faked.fail = lambda job: job.fleet.members == 2
    assert main(["sweep", "--members", "1,2"]) == 1
    assert "failed: 2: it did not work (try another one)" in capsys.readouterr().out


def test_axes_of_the_command_line_win_over_those_of_the_file(faked, capsys):
    path = str(EXAMPLES / "scaling.toml")
    assert main(["sweep", path, "--members", "1,8", "--json", "steps=10", "--emulate"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["axes"]["members"] == ["1", "8"]
    assert answer["how"] == "emulated"
    assert {job.train.steps for job in faked.jobs} == {10}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rtt", "0", "--set", "lr"], "--set lr: no axis"),
        ([], "needs an axis"),
        (["nowhere.toml", "--rtt", "0"], "no file 'nowhere.toml'"),
        (["--resume", "nowhere"], "is no sweep"),
    ],
)
def test_what_cannot_be_swept_is_one_line(words, says, faked, capsys):
    assert main(["sweep", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_plan_that_fails_is_a_failed_cell(tmp_path):
    def run_cell(job, folder):
        raise ConfigError("no such thing")

    rows = sweep.run(made(("members", [1])), tmp_path, run_cell, lambda p: None, ticking())
    assert rows[0]["status"] == "failed"
    assert rows[0]["error"] == "no such thing"


@pytest.mark.real
def test_the_module_loads_nothing_heavy():
    heavy = ("torch", "numpy", "zmq", "matplotlib")
    code = f"import sys, edgetrain.training.sweep; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_sweep_of_the_built_in_job_is_simulatable():
    """Its device has a speed."""
    job = reading.load(None)
    assert job.fleet.device == "host"
    from edgetrain.jobs.defaults import SIMULATED

    assert any(word.startswith("device=") for word in SIMULATED)
