"""What a run says that failed in part, was interrupted, or could not draw or write its results."""

from __future__ import annotations

import errno
import io
import json
import re
from pathlib import Path

import pytest
from command_line import edgetrain, write_tiny

from edgetrain import errors
from edgetrain.__main__ import main
from edgetrain.cli import pictures
from edgetrain.files import writing
from edgetrain.runs import folder
from edgetrain.runs.folder import read_summary
from edgetrain.runs.reports.live.view import LiveView

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("own_imports")]

# Members from `bad` on diverge at their fourth batch.
UNEVEN = """
from tiny import Tiny as Even


class Tiny(Even):
    def __init__(self, bad=1, worse=1e30, **settings):
        super().__init__(**settings)
        self.bad, self.worse = bad, worse

    def batches(self, member, members, batch, seed):
        for step, (x,) in enumerate(super().batches(member, members, batch, seed)):
            yield (x * self.worse if step >= 3 and member in self.bad else x,)
"""


def write_uneven(path: Path, bad: list[int], **tables: object) -> str:
    """A job whose members `bad` diverge; the name of its file."""
    write_tiny(path)
    (path / "uneven.py").write_text(UNEVEN)
    (path / "job.toml").write_text(
        f'task = "uneven:Tiny"\n[data]\nbad = {bad}\n[strategy]\nname = "fedavg"\nlocal_steps = 2\n'
    )
    return "job.toml"


def the_run(path: Path) -> Path:
    (found,) = (path / "runs").iterdir()
    return found


# -- members that fail ----------------------------------------------------------------------------


def test_a_member_that_fails_makes_an_emulated_run_incomplete(tmp_path):
    job = write_uneven(tmp_path, bad=[1])
    done = edgetrain("run", job, "members=3", "steps=12", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    _, _, below = done.stdout.partition("\n\n")
    assert "fedavg is incomplete: m1: " in below
    assert "fedavg lost m1\n" in below
    summary = read_summary(the_run(tmp_path))
    assert (summary["status"], summary["members_lost"]) == ("incomplete", ["m1"])
    assert summary["final"]["loss"] < 10
    assert not re.search(r"\d{12}", done.stdout), "a loss with all its digits"


def test_members_that_fail_make_a_simulated_run_incomplete(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = write_uneven(tmp_path, bad=[0, 3, 4, 5, 7])
    words = ["simulate", job, "members=9", "steps=12", "pace_s=0.1", "evaluate_every=100"]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "fedavg lost m0, m3, m4, m5 and 1 more" in said
    summary = read_summary(the_run(tmp_path))
    assert summary["status"] == "incomplete"
    assert summary["members_lost"] == ["m0", "m3", "m4", "m5", "m7"]
    # The evaluator was among them: what is known is the figure from before the first step.
    assert summary["final"] == {"loss": None}
    assert main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "incomplete"


def test_a_comparison_with_an_incomplete_run_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = write_uneven(tmp_path, bad=[2])
    words = ["compare", job, "--simulate", "members=3", "steps=12", "pace_s=0.1"]
    assert main([*words, "--strategies", "fedavg,local-sgd"]) == 1
    said = capsys.readouterr().out
    assert "fedavg is incomplete: m2: " in said
    assert "local-sgd lost m2" in said


# -- pictures and files that cannot be made -------------------------------------------------------


def without_matplotlib(monkeypatch):
    found, hidden = errors.find_spec, {"matplotlib"}
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name in hidden else found(name))


def with_a_broken_matplotlib(monkeypatch):
    from matplotlib.figure import Figure

    def fail(*_, **__):
        raise ImportError("libfreetype.so.6: cannot open shared object file")

    monkeypatch.setattr(Figure, "savefig", fail)


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def without_room_for_pictures(monkeypatch):
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", full)


SMALL = ("members=2", "steps=10", "pace_s=0.1")
VERBS = {
    "simulate": ("simulate", *SMALL),
    "compare": ("compare", "--simulate", *SMALL, "--strategies", "fedavg,dga"),
    "sweep": ("sweep", "--members", "1,2", "steps=10", "pace_s=0.1"),
    "capacity": ("capacity", "--members", "10", "--rounds", "5", "--parameters", "1000",
                 "--step-seconds", "0.1"),
}  # fmt: skip


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs a verb in a folder of its own, on a task that steps in microseconds."""
    from edgetrain.training import emulated

    monkeypatch.setattr(emulated, "warm_up", lambda: None)
    monkeypatch.chdir(tmp_path)
    job = write_tiny(tmp_path)

    def run(verb, *more):
        first, *words = VERBS[verb]
        words = words if verb == "capacity" else [job, *words]
        status = main([first, *words, *more])
        return status, capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (without_matplotlib, "no picture: a picture needs matplotlib (pip install"),
        (with_a_broken_matplotlib, "no picture: ImportError: libfreetype.so.6"),
        (without_room_for_pictures, "No space left on device"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "simulate"])
def test_without_a_picture_there_is_the_table_and_the_folder(
    verb, broken, says, command, monkeypatch
):
    broken(monkeypatch)
    status, said = command(verb)
    assert status == 0, said.err
    pictures = [line for line in said.err.splitlines() if line.startswith("no picture: ")]
    assert [says in line for line in pictures] == [True]
    assert "time" in said.out
    assert "waiting" in said.out
    assert "picture: " not in said.out
    assert str(the_run(Path())) in said.out


def test_a_run_leaves_its_page_which_needs_no_matplotlib(command, monkeypatch):
    without_matplotlib(monkeypatch)
    status, said = command("simulate")
    page = the_run(Path()) / "report.html"
    assert (status, said.err) == (0, "")
    assert f"page: {page}\n" in said.out
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("verb", VERBS)
def test_on_a_full_disk_there_is_the_table_and_status_1(verb, command, monkeypatch):
    write, broken = writing.write_text, ("summary.json", "sweep.csv")

    def write_some(path, text):
        return full() if path.name in broken else write(path, text)

    without_room_for_pictures(monkeypatch)
    monkeypatch.setattr(writing, "write_text", write_some)
    monkeypatch.setattr(folder, "write_text", write_some)
    status, said = command(verb)
    assert status == 1, said.err
    assert "waiting" in said.out
    assert "No space left on device" in said.out + said.err
    assert "Traceback" not in said.err


# -- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.fixture
def ctrl_c(monkeypatch):
    """Presses it, once, when a second run has taken its steps; or the first, with `runs` 1."""
    refresh = LiveView.refresh
    found = {"runs": 1, "pressed": False}

    def press(view, **how):
        refresh(view, at_once=True)
        trained = sum(bool(watch.state().step) for watch in view.watches)
        if trained == found["runs"] and not found["pressed"]:
            found["pressed"] = True
            raise KeyboardInterrupt

    monkeypatch.setattr(LiveView, "refresh", press)
    return found


@pytest.mark.parametrize("how", [(), ("--json",)])
@pytest.mark.parametrize("verb", ["simulate", "compare"])
def test_after_ctrl_c_there_is_what_there_is(verb, how, command, ctrl_c):
    ctrl_c["runs"] = 2 if verb == "compare" else 1
    status, said = command(verb, *how)
    assert status == 130
    assert said.err.endswith("edgetrain: interrupted\n")
    run = the_run(Path())
    if how:
        answer = json.loads(said.out)
        assert answer["folder"] == str(run)
    else:
        assert "dga was interrupted\n" in said.out
        assert f"folder: {run}" in said.out
        assert ("page: " if verb == "simulate" else "picture: ") in said.out
    assert [*run.glob("*.png"), *run.glob("report.html")]
    assert (run / "summary.json").exists()


def test_after_ctrl_c_a_sweep_shows_the_cells_it_has(command, monkeypatch):
    from edgetrain.training.simulated import simulation

    ran, whole = [], simulation.run

    def run(planned, inside, **how):
        if ran:
            raise KeyboardInterrupt
        ran.append(inside)
        return whole(planned, inside, **how)

    monkeypatch.setattr(simulation, "run", run)
    status, said = command("sweep")
    assert status == 130
    assert "continue with: edgetrain sweep --resume" in said.err
    assert "waiting" in said.out
    (path,) = Path().glob("runs/*/sweep.csv")
    assert len(path.read_text().splitlines()) == 2


def test_after_ctrl_c_a_plan_shows_the_sizes_it_has(command, monkeypatch):
    from edgetrain.jobs.capacity import estimate

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(estimate, "answers", interrupted)
    # The fleet asked for is the first of the sizes.
    status, said = command("capacity")
    assert status == 130
    assert "bottleneck" in said.out
    assert (the_run(Path()) / "summary.json").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_a_terminal_is_told_that_a_picture_is_drawn_and_the_line_is_wiped(monkeypatch, fails):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def draw():
        assert terminal.getvalue() == "drawing the picture …"
        if fails:
            raise OSError("no room")

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("edgetrain.runs.reports.plot.save", lambda draw, path: draw() or path)
    assert pictures.picture(Path("run.png"), draw) == (None if fails else Path("run.png"))
    told = "no picture: OSError: no room\n" if fails else ""
    assert terminal.getvalue() == "drawing the picture …\r\x1b[K" + told
