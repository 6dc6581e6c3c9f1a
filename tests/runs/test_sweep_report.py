"""A sweep as people read it: names, factors, ranges over seeds, the span of an axis."""

from __future__ import annotations

import pytest
from command_line import EDGETRAIN, edgetrain, write_tiny

from edgetrain.runs.reports import plot
from edgetrain.runs.reports.comparison import compare
from edgetrain.runs.reports.message import message
from edgetrain.runs.reports.page.document import document
from edgetrain.runs.reports.page.story import report_of
from edgetrain.runs.reports.plot.sweeps import seeds_in_words
from edgetrain.runs.reports.sweep_rows import points


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A sweep of two strategies over two networks, simulated."""
    folder = tmp_path_factory.mktemp("sweep")
    job = write_tiny(
        folder, fleet={"members": 2, "pace_s": 0.01},
        train={
            "steps": 24, "evaluate_every": 2, "target": 0.8,
            "optimizer": {"name": "sgd", "lr": 0.3},
        },
    )  # fmt: skip
    axes = ["--rtt", "0,200", "--strategy", "fedavg,dga"]
    done = edgetrain("sweep", job, *axes, cwd=folder, timeout=300, program=EDGETRAIN)
    assert done.returncode == 0, done.stderr
    (found,) = (folder / "runs").iterdir()
    return found


@pytest.mark.real
def test_a_report_names_the_runs_of_a_sweep_by_their_axes(sweep):
    stories = report_of([sweep])
    assert [story.label for story in stories] == [
        "rtt 0, fedavg", "rtt 0, dga", "rtt 200, fedavg", "rtt 200, dga",
    ]  # fmt: skip
    page = document(stories)
    assert "rtt 200, dga" in page
    assert "network" not in page.partition('<p class="about">')[2].partition("</p>")[0]
    assert stories[0].folder.name not in page.partition("Job and machine")[0]


@pytest.mark.real
def test_there_are_factors_only_where_nothing_but_the_strategy_differs(sweep):
    stories = report_of([sweep])
    labels, jobs = [s.label for s in stories], [s.job for s in stories]
    compared = compare([s.summary for s in stories], labels, jobs)
    assert [row.comparable for row in compared.rows] == [True, True, False, False]
    assert all(row.target_seconds for row in compared.rows), "all reach it"
    assert [row.speedup is not None for row in compared.rows] == [True, True, False, False]
    assert "times sooner" not in message(compared)
    assert message(compared).startswith("4 of 4 runs reach loss 0.8: rtt 0, fedavg: ")
    same = compare([s.summary for s in stories[:2]], labels[:2], jobs[:2])
    assert "reach" in message(same)
    faster = [{**job, "train": {**job["train"], "batch": 3}} for job in jobs]
    assert (
        not compare([s.summary for s in stories[:2]], labels[:2], [jobs[0], faster[1]])
        .rows[1]
        .comparable
    )


AXES = {"codec": ["fp32", "int8"], "strategy": ["fedavg", "dga"]}


def rows(finals, seeds=1):
    return [
        {"codec": codec, "strategy": strategy, "status": "finished", "seed": seed,
         "final": final - 0.01 * seed, "fleet_steps_per_second": 10.0 + seed,
         "target_seconds": 5.0 + seed, "sent_bytes": 1e6 * (1 + seed), "wait_s": 0.1}
        for (codec, strategy), final in finals.items()
        for seed in range(seeds)
    ]  # fmt: skip


FINALS = {
    ("fp32", "fedavg"): 0.90, ("fp32", "dga"): 0.9056, ("int8", "fedavg"): 0.901,
    ("int8", "dga"): 0.905,
}  # fmt: skip


def panels(found):
    figure = plot.draw_sweep("codec", AXES, points(list(AXES), found), "accuracy")
    return figure, {axes.get_title(loc="left").split(",")[0]: axes for axes in figure.axes}


def test_two_images_do_not_fill_a_panel():
    _, drawn = panels(rows(FINALS))
    low, high = drawn["final accuracy"].get_ylim()
    assert high - low > 0.0499
    assert low <= 0.90
    assert high >= 0.9056
    _, drawn = panels(rows(dict.fromkeys(FINALS, 1.0)))
    low, high = drawn["final accuracy"].get_ylim()
    assert high <= 1.006
    assert high - low > 0.0499


@pytest.mark.parametrize("seeds", [1, 3])
def test_seeds_are_drawn_as_ranges_and_one_seed_is_said(seeds):
    found = rows(FINALS, seeds)
    figure, drawn = panels(found)
    assert len(drawn) == 4
    for axes in drawn.values():
        bars = [line for line in axes.get_lines() if str(line.get_label()).startswith("_")]
        assert len(bars) == (4 if seeds > 1 else 0), axes.get_title(loc="left")
    said = seeds_in_words(points(list(AXES), found))
    assert said.startswith("one seed" if seeds == 1 else "medians of 3 seeds")
    assert any(said in text.get_text() for text in figure.texts)
