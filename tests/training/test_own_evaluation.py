"""Evaluation on members' own data, in whole runs: the fleet's figures are those over all of it."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

import edgetrain
from edgetrain.errors import ConfigError
from edgetrain.exchange.messages import Figure
from edgetrain.jobs import reading
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.plan import plan
from edgetrain.runs.folder import create, read_metrics, read_summary
from edgetrain.tasks import weights
from edgetrain.tasks.own_data import evaluation_of
from edgetrain.training import emulated
from edgetrain.training.simulated import simulation

MEMBERS = 5
JOB = [
    "members=5", "steps=12", "batch=4", "data.partition=dirichlet(0.3)", "train.hold_out=0.2",
    "train.evaluate_every=4", "strategy=fedavg", "local_steps=3", "device=raspberry-pi-4b",
    "optimizer={name='sgd', lr=0.1}",
]  # fmt: skip


def simulated(tmp_path, *more):
    planned = plan(reading.load(None, [*JOB, *more]))
    folder = create(tmp_path, "job")
    simulation.run(planned, folder)
    return planned, folder


def found_in(folder):
    """By step and member: what its lines say."""
    found = {}
    for record in read_metrics(folder, "own_eval"):
        at = record["step"], record.get("about") or record["member"]
        found.setdefault(at, {}).update({name: (v, c) for name, v, c in record["sums"]})
    return found


def final(planned, folder):
    """Figures of the run's model on the held-out data of each member."""
    task = task_of(planned.job)
    model = task.model()
    weights.load(model, folder / weights.FILE)
    members = planned.job.fleet.members
    return [evaluation_of(task, [m], members)(task, model) for m in range(members)]


@pytest.mark.parametrize("more", [
    (), ("strategy=sync-sgd", "local_steps=1"), ("strategy=dga", "delay=2"), ("strategy=scaffold",),
    ("strategy=fedbuff(2,0.5)",), ("codec=int8",), ("strategy.cohort=2",),
    ("strategy.cohort=0.4", "strategy.sampling=weighted"),
])  # fmt: skip
def test_figures_at_the_end_are_those_of_the_model_over_all_members_data(tmp_path, more):
    planned, folder = simulated(tmp_path, *more)
    expected, found = final(planned, folder), found_in(folder)
    for member, sums in enumerate(expected):
        told = found[12, f"m{member}"]
        assert told.keys() == sums.keys()
        for name, (value, count) in sums.items():
            assert told[name] == (pytest.approx(value, rel=1e-5, abs=1e-6), count)
    own = read_summary(folder)["own_data"]
    assert own["step"] == 12
    for name, spread in own["figures"].items():
        total = sum(each[name][0] for each in expected)
        count = sum(each[name][1] for each in expected)
        assert spread["mean"] == pytest.approx(total / count, rel=1e-5)
        assert (spread["members"], spread["count"]) == (MEMBERS, count)


def test_members_that_are_not_drawn_evaluate_nothing_until_the_end(tmp_path):
    planned, folder = simulated(tmp_path, "strategy.cohort=2")
    for step in (0, 4, 8):
        drawn = {f"m{each}" for each in planned.job.cohort.drawn(step // 3)}
        there = {member for at, member in found_in(folder) if at == step}
        assert there <= drawn
        assert there or step % 3
    assert len([member for at, member in found_in(folder) if at == 12]) == MEMBERS


def test_batched_members_find_what_those_one_by_one_do(tmp_path):
    planned = plan(reading.load(None, JOB))
    found = []
    for batched in (True, False):
        folder = create(tmp_path / str(batched), "job")
        simulation.run(planned, folder, batched=batched)
        found.append(found_in(folder))
    assert found[0].keys() == found[1].keys()
    for at, sums in found[0].items():
        assert sums["loss"] == pytest.approx(found[1][at]["loss"], rel=1e-3)


def test_nothing_is_trained_on_that_is_held_out():
    job = reading.load(None, [*JOB, "batch=1"])
    task = task_of(job)
    task.train.pixels[task.shards.held_out(0, MEMBERS)] = 255
    batches = task.batches(0, MEMBERS, 1, 0)
    assert not any((next(batches)[0] == batches_white(task)).all() for _ in range(200))


def batches_white(task):
    return next(task.held_out(0, MEMBERS))[0][0]


def test_a_member_evaluates_its_own_personal_layers(tmp_path):
    planned, folder = simulated(tmp_path, "strategy.personal=5.*")
    task = task_of(planned.job)
    for member in range(MEMBERS):
        model = task.model()
        weights.load(model, folder / weights.FILE)
        own = load_file(folder / "personal" / f"m{member}.safetensors")
        model.load_state_dict(own, strict=False)
        sums = evaluation_of(task, [member], MEMBERS)(task, model)
        assert found_in(folder)[12, f"m{member}"] == {
            name: (pytest.approx(v, rel=1e-5), c) for name, (v, c) in sums.items()
        }


def test_a_run_without_held_out_data_says_nothing_of_them(tmp_path):
    planned = plan(reading.load(None, [each for each in JOB if "hold_out" not in each]))
    folder = create(tmp_path, "job")
    simulation.run(planned, folder)
    assert found_in(folder) == {}
    assert "own_data" not in read_summary(folder)
    assert not len(edgetrain.load(folder).own_evaluations)


def test_python_has_a_row_for_each_figure(tmp_path):
    _, folder = simulated(tmp_path)
    rows = edgetrain.load(folder).own_evaluations
    assert {*rows} == {"t", "step", "round", "member", "figure", "sum", "count", "value"}
    assert len(rows["value"]) == 2 * len(found_in(folder))
    assert rows["value"] == pytest.approx(rows["sum"] / rows["count"])


def test_page_table_and_picture_show_them(tmp_path):
    from edgetrain.runs.reports.comparison import compare
    from edgetrain.runs.reports.comparison_table import text
    from edgetrain.runs.reports.page.document import document
    from edgetrain.runs.reports.page.story import report_of
    from edgetrain.runs.reports.plot.runs import draw_comparison

    _, folder = simulated(tmp_path)
    figure = read_summary(folder)["own_data"]["figures"]["accuracy"]
    table = text(compare([read_summary(folder)]))
    assert "on members'" in table
    assert f"{100 * figure['mean']:.1f} %" in table
    assert f"{100 * figure['worst_tenth']:.1f} %" in table
    page = document(report_of([folder]))
    assert "On data that members hold out of their own" in page
    titles = {axes.get_title(loc="left") for axes in draw_comparison([folder]).axes}
    assert {"accuracy on members' own data", "members at the end"} <= titles


def test_a_hubs_folder_and_its_members_are_one_report(tmp_path):
    """As a fleet on several machines leaves them, whose hub was told nothing."""
    from edgetrain.runs.reports.page.document import document
    from edgetrain.runs.reports.page.story import report_of

    _, folder = simulated(tmp_path)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    apart = {}
    for line in lines:
        apart.setdefault(json.loads(line)["member"], []).append(line)
    assert len(apart) == MEMBERS + 1
    for name, some in apart.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(some))
        for file in ("job.toml", "environment.json"):
            if (folder / file).exists():
                (tmp_path / name / file).write_bytes((folder / file).read_bytes())
    (story,) = report_of([tmp_path / name for name in sorted(apart)])
    assert story.summary["own_data"] == read_summary(folder)["own_data"]
    assert "On data that members hold out of their own" in document([story])


def test_what_a_member_finds_on_its_own_data_is_no_figure_of_the_fleet():
    own = (("loss", 1.0, 1.0),)
    assert not Figure(own=own).is_fleets
    assert Figure().is_fleets
    assert Figure(metric="loss", own=own).is_fleets


@pytest.mark.parametrize(("more", "said"), [
    (("strategy=lbfgs", "local_steps=0", "data.partition=shared(all)"), r"train\.hold_out = 0\.2"),
    (("strategy=sync-sgd", "local_steps=0", "fleet.placement=pipeline=5"),
     r"train\.hold_out = 0\.2"),
    (("task=edgetrain.tasks:sized",), r"has no held_out\(member, members\)"),
    (("train.hold_out=0.95",), r"train\.hold_out"),
    (("train.hold_out=-0.1",), r"train\.hold_out"),
])  # fmt: skip
def test_what_cannot_hold_out_is_refused(more, said):
    own = [each for each in JOB if "partition" not in each]
    with pytest.raises(ConfigError, match=said):
        task_of(plan(reading.load(None, [*own, *more])).job)


@pytest.mark.real
@pytest.mark.parametrize(("more", "is_told"), [
    ((), True), (("strategy.secure=true",), False),
    (("privacy.unit=example", "privacy.noise=1.0", "strategy=sync-sgd", "local_steps=1"), False),
])  # fmt: skip
def test_a_hub_is_told_unless_sums_alone_may_leave(tmp_path, more, is_told):
    planned = plan(reading.load(None, [
        *JOB, "device=host", "fleet.network=none", "hub.lost_after_s=60", "hub.status_s=0.1", *more,
    ]))  # fmt: skip
    folder = create(tmp_path, "job")
    emulated.run(planned, folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    own = [line for line in lines if line["kind"] == "own_eval"]
    told = {(line["about"], line["step"]): line["sums"] for line in own if "about" in line}
    said = {(line["member"], line["step"]): line["sums"] for line in own if "about" not in line}
    assert len({member for member, step in said if step == 12}) == MEMBERS
    assert bool(told) == is_told
    if is_told:
        assert {member for member, step in told if step == 12} == {f"m{n}" for n in range(MEMBERS)}
        assert all(said[at] == sums for at, sums in told.items())
