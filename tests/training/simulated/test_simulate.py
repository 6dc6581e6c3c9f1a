"""Whole jobs in virtual time: the bits of real runs, the times of the profiles, the same twice."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from command_line import write_tiny
from safetensors.numpy import load_file

from edgetrain import extensions
from edgetrain.__main__ import main
from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.extensions import Extension
from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.runs.folder import create, metrics_path, read_metrics
from edgetrain.training import emulated
from edgetrain.training.simulated import simulation
from edgetrain.vectors.vector import checksum

DIGITS = (
    "members=8", "device=raspberry-pi-4b", "steps=15", "batch=4", "evaluate_every=5",
    "optimizer={ name = 'sgd', lr = 0.1, momentum = 0.5 }",
)  # fmt: skip
PACED = ("members=4", "pace_s=0.01", "steps=120", "batch=2", "message_s=0")

pytestmark = pytest.mark.usefixtures("own_imports")


def simulated(folder, *words, batched=None, beside=None, path=None):
    job = reading.load(path, words)
    inside = create(folder, "run")
    return simulation.run(plan(job, beside), inside, batched=batched), inside


def bases(folder):
    reasons = (str(each.get("reason")) for each in read_metrics(folder, "event"))
    return {reason.rpartition("base ")[2] for reason in reasons if "base " in reason}


@pytest.mark.real
@pytest.mark.parametrize(
    "strategy", [("sync-sgd", 0), ("fedavg", 0), ("dga", 7)], ids=lambda s: s[0]
)
def test_a_simulated_run_ends_with_the_bits_of_an_emulated_one(tmp_path, strategy):
    words = [*DIGITS, f"strategy={strategy[0]}", f"delay={strategy[1]}"]
    inside = create(tmp_path, "emulated")
    real = emulated.run(plan(reading.load(None, [*words, "pace_s=0.001"])), inside)
    virtual, folder = simulated(tmp_path, *words, "network=wan-200ms")
    assert len(bases(inside)) == 1
    assert bases(folder) == bases(inside)
    assert virtual["final"] == real["final"]
    # A busy machine makes real members send again, and count what is left of the first base.
    assert virtual["sent_bytes"] <= 1.01 * real["sent_bytes"]
    assert virtual["seconds"] > 1.0  # of which the test took none


@pytest.mark.real
@pytest.mark.parametrize(
    "word", ["strategy.sampling=uniform", "strategy.sampling=available", "secure=true"]
)
def test_a_cohort_is_drawn_alike_emulated_and_simulated(tmp_path, word):
    words = [*DIGITS, "steps=30", "strategy=fedavg", "local_steps=3", "cohort=3", word]
    inside = create(tmp_path, "emulated")
    real = emulated.run(plan(reading.load(None, [*words, "pace_s=0.001"])), inside)
    virtual, folder = simulated(tmp_path, *words, "network=wan-200ms")
    rosters = [[each["members"] for each in read_metrics(at, "round")] for at in (inside, folder)]
    assert rosters[0] == rosters[1]
    assert [len(each) for each in rosters[0]] == [3] * 10
    assert len(bases(inside)) == 1
    assert bases(folder) == bases(inside)
    assert virtual["final"] == real["final"]
    steps = [each["step"] for each in read_metrics(folder, "eval")]
    assert sorted(steps) == [0, 5, 10, 15, 20, 25, 30]
    assert len([*read_metrics(inside, "eval")]) == 7


def test_a_function_of_ones_own_draws_of_those_that_are_there(tmp_path, monkeypatch):
    asked = {}

    def last_two(round, members, weights, size, seed):
        asked[round] = members, weights, size, seed
        return members[-2:]

    monkeypatch.setitem(extensions.loaded, "own:last_two", Extension(last_two, sys, ""))
    words = [*DIGITS, "strategy=local-sgd", "steps=20", "local_steps=2", "cohort=2", "pace_s=1"]
    words += ["strategy.sampling=own:last_two", "absences=[{at_s=9.5, for_s=100, members=[7]}]"]
    _, folder = simulated(tmp_path, *words, "hub.deadline_s=1", "hub.lost_after_s=1")
    rosters = [each["members"] for each in read_metrics(folder, "round")]
    assert asked[0] == (tuple(range(8)), (1.0,) * 8, 2, 0)
    assert asked[9][0] == tuple(range(7))
    assert rosters[0] == ["m6", "m7"]
    assert rosters[-1] == ["m5", "m6"]
    evaluated = {each["member"]: each["step"] for each in read_metrics(folder, "eval")}
    assert evaluated.keys() == {"m6", "m5", "m0"}, "the first of those drawn, in the end of all"
    assert evaluated["m0"] == 20


def lines(folder):
    return sorted(metrics_path(folder).read_text().splitlines())


@pytest.mark.parametrize("batched", [False, True])
def test_the_same_job_gives_the_same_lines_twice(tmp_path, batched):
    words = [*DIGITS, "strategy=dga", "network=4g-good:4, wifi:4", "codec=topk(0.05) | q2"]
    found = [lines(simulated(tmp_path, *words, batched=batched)[1]) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0] != lines(simulated(tmp_path, *words, "seed=1", batched=batched)[1])


def test_batched_and_single_members_end_alike(tmp_path):
    words = [*DIGITS, "strategy=fedavg", "network=wan-50ms"]
    one, _ = simulated(tmp_path, *words, batched=False)
    many, folder = simulated(tmp_path, *words, batched=True)
    assert many["final"]["loss"] == pytest.approx(one["final"]["loss"], rel=1e-3)
    assert many["seconds"] == pytest.approx(one["seconds"], abs=1e-6)
    assert len(bases(folder)) == 1


@pytest.mark.parametrize(
    ("words", "step_s"),
    [
        # A round trip and a step; a fifth of one; the step alone; and the hub's own time.
        (("strategy=sync-sgd",), 0.110),
        (("strategy=fedavg", "local_steps=5"), 0.010 + 0.100 / 5),
        (("strategy=dga", "local_steps=5", "delay=15", "final_sync=0"), 0.010),
        (("strategy=sync-sgd", "message_s=0.005"), 0.110 + 4 * 0.005),
    ],
)
def test_steps_take_what_device_network_and_hub_take(tmp_path, words, step_s):
    _, folder = simulated(tmp_path, *PACED, "network=rtt-100ms", "delay=0", *words)
    ends = {r["step"]: r["t"] for r in read_metrics(folder, "step") if r["member"] == "m1"}
    # Between rounds in the steady state: slow start is over.
    assert (ends[110] - ends[80]) / 30 == pytest.approx(step_s, rel=0.02)


def test_slower_devices_hold_a_synchronous_fleet_up(tmp_path):
    words = ["batch=2", "steps=6", "strategy=sync-sgd", "message_s=0"]
    slow, folder = simulated(tmp_path, *words, "device=raspberry-pi-5:3, raspberry-pi-zero-2w:1")
    alone, _ = simulated(tmp_path, *words, "device=raspberry-pi-zero-2w", "members=2")
    assert slow["seconds"] == pytest.approx(alone["seconds"], rel=0.05)
    waits = {r["member"]: r["wait_s"] for r in read_metrics(folder, "step")}
    assert waits["m0"] > 10 * waits["m3"]


def test_a_device_that_comes_back_takes_what_steps_are_left(tmp_path):
    job = write_tiny(
        tmp_path,
        fleet={"members": 4, "pace_s": 0.1, "network": "wan-50ms"},
        train={"steps": 600},
        strategy={"name": "dga", "local_steps": 5, "delay": 5},
        absences=[{"at_s": 5.0, "for_s": 30.0, "members": [1, 2]}],
    )
    summary, folder = simulated(tmp_path, path=tmp_path / job, beside=tmp_path)
    assert summary["status"] == "finished"
    events = [(r["event"], r.get("about")) for r in read_metrics(folder, "event")]
    assert events.count(("joined", "m1")) == 2
    absences = [r for r in read_metrics(folder, "event") if r["event"] == "absence"]
    assert [(r["about"], r["t"], r["reason"]) for r in absences] == [
        ("m1", 5.0, "off for 30 s"), ("m2", 5.0, "off for 30 s"),
    ]  # fmt: skip
    assert len(bases(folder)) == 1
    steps = [r["step"] for r in read_metrics(folder, "step") if r["member"] == "m2"]
    assert max(steps) == 600
    assert sorted(set(steps)) == steps  # what was done is not done again
    assert len(steps) < 600


def test_a_device_that_is_off_at_first_joins_those_that_began_without_it(tmp_path):
    tables = {
        "fleet": {"members": 4, "pace_s": 0.1, "network": "wan-50ms"},
        "train": {"steps": 400},
        "strategy": {"name": "dga", "local_steps": 5, "delay": 5},
        "hub": {"min_members": 2, "start_after_s": 7.0},
        "absences": [{"at_s": 0.0, "for_s": 20.0, "members": [0, 3]}],
    }
    job = write_tiny(tmp_path, **tables)
    summary, folder = simulated(tmp_path, path=tmp_path / job, beside=tmp_path)
    assert summary["status"] == "finished"
    joined = {r["about"]: r["t"] for r in read_metrics(folder, "event") if r["event"] == "joined"}
    assert joined["m1"] <= 0 < 20 < joined["m0"] < 25
    (started,) = [r for r in read_metrics(folder, "event") if r["event"] == "started"]
    assert started["reason"] == "2 of 4 members"
    assert len(bases(folder)) == 1
    for name in ("m0", "m3"):
        steps = [r["step"] for r in read_metrics(folder, "step") if r["member"] == name]
        assert 0 < len(steps) < 400
        assert max(steps) == 400


@pytest.mark.parametrize(
    "more",
    [{}, {"hub": {"min_members": 2, "start_after_s": 0.0}}, {"fleet": {"topology": "ring"}}],
)
def test_what_is_kept_and_evaluated_is_the_fleet_s_where_the_first_device_is_gone(tmp_path, more):
    """It goes while it trains, or is not there at all, and comes back when the job is over."""
    at_s = 0.0 if "hub" in more else 1.0
    job = write_tiny(
        tmp_path,
        fleet={"members": 3, "pace_s": 0.1, "network": "wan-50ms"} | more.get("fleet", {}),
        train={"steps": 200},
        strategy={"name": "fedavg", "local_steps": 5},
        hub=more.get("hub", {}),
        absences=[{"at_s": at_s, "for_s": 10_000.0, "members": [0]}],
    )
    summary, folder = simulated(tmp_path, path=tmp_path / job, beside=tmp_path)
    assert summary["status"] == "finished"
    kept = load_file(folder / "model.safetensors")["weight"]
    assert summary["final"]["loss"] == pytest.approx(float((kept**2).sum()), rel=1e-5)
    last = max(read_metrics(folder, "eval"), key=lambda line: line["t"])
    assert (last["member"], last["step"]) == ("m1", 200)


def test_what_is_kept_is_the_base_of_those_that_ended_last(tmp_path):
    job = write_tiny(
        tmp_path,
        fleet={"members": 4, "pace_s": 0.1, "network": "wan-200ms"},
        train={"steps": 120},
        strategy={"name": "dga"},
        hub={"heartbeat_s": 0.3, "quorum": 1},
        faults=[{"kind": "down", "members": [2, 3], "at_s": 9.0, "for_s": 9.0}],
    )
    _, folder = simulated(tmp_path, path=tmp_path / job, beside=tmp_path)
    ended = [line for line in read_metrics(folder, "event") if line["event"] == "finished"]
    first, last = (choose(ended, key=lambda line: line["t"])["reason"] for choose in (min, max))
    kept = load_file(folder / "model.safetensors")
    base = checksum(np.concatenate([kept[name].ravel() for name in ("weight", "bias")]))
    assert first != last
    assert last.endswith(f"base {base:016x}")


def test_members_that_are_all_here_begin_with_the_same_bits_whatever_start_with_says(tmp_path):
    words = [*DIGITS, "strategy=dga", "delay=7", "network=wan-200ms"]
    plain, first = simulated(tmp_path, *words)
    few, second = simulated(tmp_path, *words, "min_members=3", "start_after_s=1000")
    assert lines(first) == lines(second)
    assert plain["sent_bytes"] == few["sent_bytes"]


def test_a_simulation_that_could_never_begin_is_refused():
    words = ("members=4", "min_members=3", "absences=[{at_s = 0, for_s = 9, members = [0, 1]}]")
    with pytest.raises(ConfigError, match="2 devices are there at first, and"):
        plan(reading.load(None, words))


def test_faults_are_in_the_run_folder_as_they_strike(tmp_path):
    job = write_tiny(
        tmp_path,
        fleet={"members": 3, "pace_s": 0.1, "network": "wan-50ms"},
        train={"steps": 40},
        faults=[
            {"kind": "down", "at_s": 1.5, "for_s": 0.5, "members": [1]},
            {"kind": "down", "at_s": 60.0, "for_s": 1.0, "members": [0]},
        ],
    )
    summary, folder = simulated(tmp_path, path=tmp_path / job, beside=tmp_path)
    assert summary["seconds"] < 60, "the second one would strike after the end"
    faults = [r for r in read_metrics(folder, "event") if r["event"] == "fault"]
    assert [(r["t"], r["reason"]) for r in faults] == [(1.5, "link of m1: down for 0.5 s")]
    assert not list(read_metrics(folder, "status")), "they tell their hub nothing"


@pytest.mark.real
def test_devices_that_come_and_go_by_chance_end_with_one_base(tmp_path):
    job = write_tiny(
        tmp_path,
        fleet={
            "members": 12, "pace_s": 0.1, "network": "wan-50ms", "online_s": 60.0,
            "offline_s": 20.0,
        },
        train={"steps": 1500},
        strategy={"name": "dga", "local_steps": 5, "delay": 5},
    )  # fmt: skip
    summary, folder = simulated(tmp_path, path=tmp_path / job, beside=tmp_path)
    assert summary["status"] == "finished"
    gone = [r for r in read_metrics(folder, "event") if r["event"] == "gone"]
    assert len(gone) >= 5
    assert len(bases(folder)) == 1


def test_a_model_that_diverges_says_so(tmp_path):
    with pytest.raises(EdgetrainError, match="not finite"):
        simulated(tmp_path, *PACED, "optimizer={ name = 'sgd', lr = 1e30 }")


def test_a_task_that_fails_is_not_called_a_lost_member(tmp_path):
    job = write_tiny(tmp_path, fleet={"members": 2, "pace_s": 0.01})
    text = (tmp_path / "tiny.py").read_text()
    (tmp_path / "failing.py").write_text(text.replace("return model(", "return modell("))
    table = (tmp_path / job).read_text().replace("tiny:Tiny", "failing:Tiny")
    (tmp_path / job).write_text(table.replace("[fleet]", "[fleet]\ndevice = 'host'"))
    with pytest.raises(NameError, match="modell"):
        simulated(tmp_path, path=tmp_path / job, beside=tmp_path)


def test_nobody_waits_for_a_member_that_is_refused_before_training(tmp_path):
    job = write_tiny(tmp_path, fleet={"members": 3, "pace_s": 0.01})
    text = (tmp_path / "tiny.py").read_text()
    unequal = text.replace(
        "        return torch.nn.Linear(3, self.width)",
        "        model = torch.nn.Linear(3, self.width)\n"
        "        Tiny.made = getattr(Tiny, 'made', 0) + 1\n"
        "        model.register_buffer('offset', torch.tensor(float(Tiny.made)))\n"
        "        return model",
    )
    (tmp_path / "unequal.py").write_text(unequal)
    table = (tmp_path / job).read_text().replace("tiny:Tiny", "unequal:Tiny")
    (tmp_path / job).write_text(table)
    with pytest.raises(EdgetrainError, match="has other values than the first member's"):
        simulated(tmp_path, path=tmp_path / job, beside=tmp_path, batched=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["device=host"], "device 'host' has no speed .*pace_s=0.02"),
        (["strategy=sync-sgd", "delay=0", "online_s=5"], "a device that comes back cannot join"),
    ],
)
def test_what_cannot_be_simulated_is_said_before_it_begins(tmp_path, words, says):
    with pytest.raises(EdgetrainError, match=says):
        simulated(tmp_path, *words)


def test_absences_are_not_emulated_in_silence(tmp_path):
    planned = plan(reading.load(None, ["online_s=5"]))
    with pytest.raises(ConfigError, match="`edgetrain simulate` does it"):
        emulated.run(planned, tmp_path)


# -- the command line -----------------------------------------------------------------------------


@pytest.mark.real
def test_run_simulate_says_what_came_of_it(tmp_path, capsys):
    words = ["simulate", "--json", "--runs", str(tmp_path), "members=40", "steps=10"]
    assert main([*words, "batch=2"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["emulation"]["backend"] == "simulated"
    assert "torch.func.vmap" in summary["emulation"]["reason"]
    assert summary["status"] == "finished"


@pytest.mark.real
def test_compare_simulate_compares(tmp_path, capsys):
    words = ["compare", "--simulate", "--runs", str(tmp_path), "members=3", "steps=20"]
    assert main([*words, "network=wan-500ms"]) == 0
    text = capsys.readouterr().out
    assert "sync-sgd" in text
    assert "simulated" in text
    assert (next(tmp_path.iterdir()) / "compare.png").stat().st_size > 10_000


def test_one_site_behind_a_gateway_has_the_bits_of_a_star_and_a_share_of_its_bytes(tmp_path):
    words = [*DIGITS, "steps=30", "local_steps=3", "strategy=dga", "delay=6", "network=ethernet"]
    words += ["sites=home-fixed: 0-7", "final_sync=0"]
    (star, one), (site, other) = (
        simulated(tmp_path, *words, f"gateways={each}") for each in ("false", "true")
    )
    assert bases(other) == bases(one)
    assert len(bases(one)) == 1
    assert site["hub"]["sent_bytes"] <= 1.02 * star["hub"]["sent_bytes"] / 8
