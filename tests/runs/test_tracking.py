"""Runs in trackers: each number of a line is a point once, and a tracker that fails ends nothing.
The trackers themselves: tests/trackers."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import extensions
from edgetrain.__main__ import main
from edgetrain.extensions import Extension
from edgetrain.runs import folder as folders
from edgetrain.runs.tracking.trackers import TABLE, Curves, Point, parameters

NUMBERS = st.one_of(st.none(), st.integers(0, 99), st.floats(0, 1e9))
MEMBERS = ("m0", "m1", "m2", "hub")


@st.composite
def records(draw):
    kind = draw(st.sampled_from(sorted(TABLE)))
    axis, keys = TABLE[kind]
    who = draw(st.sampled_from(MEMBERS[:3]))
    own = {"member": "hub", "about": who} if kind == "status" else {"member": who}
    own = {"member": "hub"} if kind == "round" else own
    found = {key: draw(NUMBERS) for key in draw(st.sets(st.sampled_from(sorted(keys))))}
    return {
        "kind": kind,
        "t": draw(st.floats(0, 1e6)),
        axis: draw(st.integers(0, 999)),
        **own,
        **found,
    }


@given(st.lists(records(), max_size=20))
def test_each_number_of_a_line_is_a_point_once_and_in_order(lines):
    found = list(Curves(most=9).points(lines))
    expected = []
    for line in lines:
        axis, keys = TABLE[line["kind"]]
        who = line.get("about", line["member"])
        expected += [
            Point(tag, "" if who == "hub" else who, axis, line[axis], line["t"], float(line[key]))
            for key, tag in keys.items()
            if line.get(key) is not None
        ]
    assert found == expected


@given(st.lists(records(), max_size=30), st.integers(0, 3))
def test_members_beyond_the_first_are_left_out_and_counted(lines, most):
    curves = Curves(most)
    taken = {point.member for point in curves.points(lines)} - {""}
    there = {line.get("about", line["member"]) for line in lines} - {"hub"}
    assert len(taken) <= most
    assert taken.isdisjoint(curves.left_out)
    assert len(curves.left_out) == max(0, len(there) - most)


def test_figures_are_the_fleets_whoever_evaluates_and_names_are_counted():
    lines = [
        {"kind": "eval", "t": 1.0, "member": "m1", "step": 5, "round": 1, "accuracy": 0.5,
         "loss": None, "eval_s": 0.1},
        {"kind": "figure", "t": 2.0, "member": "hub", "about": "m1", "metric": "accuracy",
         "value": 0.6, "better": "higher", "step": 9, "at": 1.5},
        {"kind": "round", "t": 2.0, "member": "hub", "round": 3, "members": ["m0", "m1"],
         "missing": []},
        {"kind": "later", "t": 2.0, "member": "hub", "round": 3},
    ]  # fmt: skip
    assert list(Curves(0).points(lines)) == [
        Point("eval/accuracy", "", "step", 5, 1.0, 0.5),
        Point("eval/accuracy", "", "step", 9, 1.5, 0.6),
        Point("round/members", "", "round", 3, 2.0, 2.0),
        Point("round/missing", "", "round", 3, 2.0, 0.0),
    ]


def test_a_job_is_a_table_of_texts():
    assert parameters({"a": 1, "b": {"c": [1, 2], "d": {"e": True}}}) == {
        "a": "1", "b.c": "[1, 2]", "b.d.e": "True",
    }  # fmt: skip


class Kept:
    """A tracker that keeps what it is given, and may fail."""

    made = ()
    fails_after = 10**9

    def __init__(self, about):
        self.about, self.points, self.closed = about, [], None
        Kept.made = (*Kept.made, self)

    def write(self, points):
        if len(self.points) >= Kept.fails_after:
            raise RuntimeError("the server is gone\nand more")
        self.points += points

    def close(self, ok):
        self.closed = ok


def called(monkeypatch, name, made):
    """As if an installed package had a tracker of this name."""
    monkeypatch.setitem(extensions.loaded, name, Extension(made, sys.modules[__name__], ""))


@pytest.fixture
def kept(monkeypatch):
    called(monkeypatch, "kept", Kept)
    monkeypatch.setattr(Kept, "made", ())
    return Kept


def a_run(path, steps):
    path.mkdir(parents=True, exist_ok=True)
    folders.write_job(path, {"name": "digits", "train": {"steps": 9}})
    with folders.metrics_path(path).open("a") as file:
        for step in steps:
            line = {
                "kind": "step",
                "t": float(step),
                "member": "m0",
                "step": step,
                "loss": 1 / step,
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    return path


def test_a_run_is_handed_over_while_it_goes_on_and_each_line_once(kept, tmp_path, monkeypatch):
    run = a_run(tmp_path / "run", range(1, 4))

    def ends():
        a_run(run, [6])
        folders.write_summary(run, {"status": "done"})

    pauses = iter([lambda: a_run(run, range(4, 6)), lambda: None, ends])
    paused = SimpleNamespace(is_set=lambda: False, wait=lambda _: next(pauses)())
    monkeypatch.setattr("edgetrain.cli.track.threading", SimpleNamespace(Event=lambda: paused))
    assert main(["track", str(run), "--to", "kept", "--follow", "--project", "p"]) == 0
    (tracker,) = kept.made
    assert [point.at for point in tracker.points] == [1, 2, 3, 4, 5, 6]
    assert tracker.closed is True
    assert (tracker.about.project, tracker.about.parameters["train.steps"]) == ("p", "9")


def test_several_runs_are_tracked_apart(kept, tmp_path, capsys):
    for name in ("a", "b"):
        a_run(tmp_path / "both" / name, [1, 2])
    assert main(["track", str(tmp_path / "both"), "--to", "kept", "--json"]) == 0
    assert [each.about.name for each in kept.made] == ["a", "b"]
    assert list(json.loads(capsys.readouterr().out).values()) == [2, 2]


@pytest.mark.parametrize(("words", "said"), [
    (["--to", "kept"], "kept took no more of RUN: the server is gone (the run goes on"),
    (["--to", "tensorbord"], "no tracker 'tensorbord' (did you mean 'tensorboard'?)"),
    (["--to", "absent"], "--to absent needs the package absent (pip install absent)"),
    (["--to", "kept", "--members", "-1"], "--members -1 (0 or more)"),
])  # fmt: skip
def test_what_goes_wrong_is_one_line(kept, tmp_path, monkeypatch, capsys, words, said):
    run = a_run(tmp_path / "run", [1, 2])
    monkeypatch.setattr(Kept, "fails_after", 0)

    def absent(about):
        raise ModuleNotFoundError("No module named 'absent'", name="absent")

    called(monkeypatch, "absent", absent)
    assert main(["track", str(run), *words]) != 0
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert said.replace("RUN", str(run)) in error[0]
