"""`--track` of run, hub and member: a process beside the run, which changes nothing in it."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest
from command_line import edgetrain, running, write_tiny
from hub_runs import free_port, hub_folder

from edgetrain.runs.folder import read_metrics, read_summary
from edgetrain.runs.tracking.trackers import Curves

pytestmark = pytest.mark.real

KEPT = """
import os, signal
from pathlib import Path


class Kept:
    def __init__(self, about):
        if about.project == "fails":
            raise RuntimeError("no account\\nand more")
        self.dies, self.path = about.project == "dies", Path(about.into) / about.name

    def write(self, points):
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        with self.path.open("a") as file:
            file.writelines(f"{p.tag} {p.member} {p.at} {p.value}\\n" for p in points)

    def close(self, ok):
        with self.path.open("a") as file:
            file.write(f"closed {ok}\\n")
"""


@pytest.fixture(autouse=True)
def _a_package_adds_a_tracker(tmp_path, monkeypatch):
    there = tmp_path / "packages"
    (there / "kept-1.0.dist-info").mkdir(parents=True)
    (there / "kept.py").write_text(KEPT)
    (there / "kept-1.0.dist-info" / "METADATA").write_text("Name: kept\nVersion: 1.0\n")
    entry = "[edgetrain.trackers]\nkept = kept:Kept\n"
    (there / "kept-1.0.dist-info" / "entry_points.txt").write_text(entry)
    monkeypatch.setenv("PYTHONPATH", str(there))
    (tmp_path / "into").mkdir()


def track(project="p"):
    return "--track", f"kept --into into --project {project}"


def simulated(tmp_path: Path, *words: str):
    """A run of the same job in a folder of its own: what it said, and its run folder."""
    job = write_tiny(
        tmp_path, fleet={"members": 2, "pace_s": 0.05}, train={"steps": 30},
        strategy={"name": "dga", "delay": 3},
    )  # fmt: skip
    done = edgetrain("simulate", job, *words, cwd=tmp_path)
    newest = max((tmp_path / "runs").iterdir(), key=lambda each: each.stat().st_mtime_ns)
    return done, newest


def kept_of(tmp_path: Path, folder: Path) -> list[str]:
    return (tmp_path / "into" / folder.name).read_text().splitlines()


def in_words(folder: Path) -> list[str]:
    return [f"{p.tag} {p.member} {p.at} {p.value}" for p in Curves(32).points(read_metrics(folder))]


def test_a_run_is_handed_to_a_tracker_to_its_last_line(tmp_path):
    done, folder = simulated(tmp_path, *track())
    assert done.returncode == 0, done.stderr
    assert sorted(kept_of(tmp_path, folder)) == sorted([*in_words(folder), "closed True"])


@pytest.mark.parametrize("how", ["dies", "fails"])
def test_a_tracker_that_is_killed_changes_nothing(tmp_path, how):
    calm, without = simulated(tmp_path)
    assert calm.returncode == 0, calm.stderr
    (tmp_path / "runs").rename(tmp_path / "before")
    done, folder = simulated(tmp_path, *track(how))
    assert done.returncode == 0, done.stderr
    model = "model.safetensors"
    before = (tmp_path / "before" / without.name / model).read_bytes()
    assert (folder / model).read_bytes() == before
    assert read_summary(folder)["status"] == "finished"
    said = [line for line in (done.stdout + done.stderr).splitlines() if "no account" in line]
    assert len(said) == (how == "fails")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nosuch", "no tracker 'nosuch'"),
        ("", "no tracker ''"),
        ("wandb", "--to wandb needs the package wandb (pip install -e "),
        ("kept --ofline", "unrecognized arguments: --ofline"),
        ("kept other", "unrecognized arguments: other"),
        ("'kept", "No closing quotation"),
    ],
)
def test_what_cannot_track_is_refused_before_anything_begins(tmp_path, words, said):
    done = edgetrain("run", "--track", words, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_hub_and_a_member_hand_over_their_own_folders(tmp_path):
    job = write_tiny(
        tmp_path, fleet={"members": 1, "pace_s": 0.002}, train={"steps": 20},
        strategy={"name": "dga", "local_steps": 2, "delay": 2}, hub={"fsync": "never"},
    )  # fmt: skip
    at = f"tcp://localhost:{free_port()}"
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(running("hub", job, "--bind", at, *track(), cwd=tmp_path))
        hub.until("members join")
        words = ("member", job, "--hub", at, "--index", "0", *track())
        member = stack.enter_context(running(*words, cwd=tmp_path))
        assert (member.finish(), hub.finish()) == (0, 0), member.said + hub.said
        folder = hub_folder(tmp_path)
        assert not hub.left_behind()
    (own,) = [each for each in (tmp_path / "runs").iterdir() if each != folder]
    for each in (folder, own):
        assert sorted(kept_of(tmp_path, each)) == sorted([*in_words(each), "closed True"])


def test_a_tracker_ends_with_its_run_however_that_ends(tmp_path):
    job = write_tiny(
        tmp_path, fleet={"members": 2, "pace_s": 0.002}, train={"steps": 1_000_000},
        strategy={"name": "dga"},
    )  # fmt: skip
    with running("run", job, *track(), cwd=tmp_path) as run:
        run.until("step")
        run.process.send_signal(signal.SIGKILL)
        run.finish()
        assert run.left_behind() == []
