"""An automatic delay in whole jobs, in virtual time."""

from __future__ import annotations

import pytest

from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.runs.data import RunData
from edgetrain.runs.folder import create, read_metrics
from edgetrain.runs.reports.comparison import compare
from edgetrain.runs.reports.comparison_table import text
from edgetrain.training.simulated import simulation


def simulated(folder, *words):
    inside = create(folder, "run")
    job = reading.load(None, ["device=raspberry-pi-4b", "strategy=dga", "delay=auto", *words])
    return simulation.run(plan(job), inside, batched=True), inside


def test_a_fleet_that_is_too_large_for_its_hub_trains(tmp_path):
    """A thousand members, smaller: a reply takes six times as long as the whole run."""
    summary, folder = simulated(
        tmp_path, "members=40", "batch=8", "steps=100", "network=4g-good", "message_s=0.05",
        "final_sync=0",
    )  # fmt: skip
    assert summary["final"]["accuracy"] > 0.75
    assert summary["final"]["loss"] < 1.5
    rounds = list(read_metrics(folder, "round"))
    assert max(line["local_steps"] + line["delay"] for line in rounds) <= 100 // 8
    assert (summary["local_steps"], summary["delay"]) == (
        rounds[-1]["local_steps"],
        rounds[-1]["delay"],
    )
    assert summary["local_steps"] > 5
    told = [e["reason"] for e in read_metrics(folder, "event") if e["event"] == "pace"]
    assert len(told) == 1
    assert "more or longer steps" in told[0]
    assert "steps," in text(compare([summary]))
    assert (RunData().add_all(read_metrics(folder)).local_steps) == summary["local_steps"]


@pytest.mark.parametrize("strategy", ["dga", "streaming-diloco(2, 0.5)"])
def test_a_run_that_ends_before_its_first_round_keeps_what_it_trained(tmp_path, strategy):
    """The only round begins after the last step, and what a lossy codec leaves out is no reason not
    to wait for its reply."""
    summary, folder = simulated(
        tmp_path, f"strategy={strategy}", "members=2", "steps=8", "local_steps=20", "final_sync=0",
        "network=rtt-120ms", "codec=topk(0.1)",
    )  # fmt: skip
    first = next(iter(read_metrics(folder, "eval")))
    assert summary["rounds"] >= 1
    assert summary["final"]["loss"] != first["loss"]


@pytest.mark.parametrize("words", [(), ("correction=predict",)])
def test_nobody_waits_longer_than_the_first_round_trips(tmp_path, words):
    _, folder = simulated(
        tmp_path, "members=4", "batch=8", "steps=200", "network=wan-200ms", "pace_s=0.05",
        "final_sync=0", *words,
    )  # fmt: skip
    first = next(iter(read_metrics(folder, "round")))
    assert first["delay"] == 5, "the round trip is known from joining: 200 ms are four steps"
    last = list(read_metrics(folder, "round"))[-1]
    assert 4 <= last["delay"] <= 6
    assert last["local_steps"] == (max(5, last["delay"]) if words else 5), (
        "drift: one round in flight"
    )
    waits = [line["wait_s"] for line in read_metrics(folder, "step")]
    assert sum(waits) / 4 < 4 * 0.2


@pytest.mark.parametrize(
    ("optimizer", "grows"),
    [
        ("{ name = 'SGD', lr = 0.05, momentum = 0.9 }", True),
        ("{ name = 'adamw', lr = 0.01 }", False),
        ("{ name = 'lamb', lr = 0.01 }", False),
    ],
)
def test_rounds_get_as_long_as_the_delay_with_sgd_only(tmp_path, optimizer, grows):
    """With AdamW and a delay of 12 steps, rounds as long ended 9 to 16 points lower than of 5."""
    _, folder = simulated(
        tmp_path, "members=2", "batch=8", "steps=240", "network=rtt-500ms", "pace_s=0.05",
        "correction=predict", f"optimizer={optimizer}", "codec=topk(0.01) | q2", "final_sync=0",
    )  # fmt: skip
    last = list(read_metrics(folder, "round"))[-1]
    assert last["delay"] >= 10
    assert last["local_steps"] == (last["delay"] if grows else 5)


def test_a_run_of_few_steps_is_never_further_from_its_fleet_than_an_eighth_of_them(tmp_path):
    """With rounds of five steps the delay and a round were a quarter of it."""
    summary, folder = simulated(
        tmp_path, "members=24", "batch=8", "steps=40", "network=geo-satellite", "pace_s=0.1"
    )
    rounds = list(read_metrics(folder, "round"))
    assert max(line["local_steps"] + line["delay"] for line in rounds) <= 40 // 8
    assert rounds[0]["local_steps"] == 40 // 16
    assert summary["final"]["accuracy"] > 0.65


def test_where_members_are_led_apart_a_round_and_the_delay_are_at_most_a_sixteenth(tmp_path):
    """A job that was drawn at random. With an eighth it ended at 44 %, FedAvg at 93 %."""
    summary, folder = simulated(
        tmp_path, "members=7", "batch=2", "steps=200", "network=wan-100ms", "seed=727",
        "device=raspberry-pi-5", "optimizer={ name = 'sgd', lr = 0.05, momentum = 0.9 }",
        "data={ partition = 'dirichlet(1)' }",
    )  # fmt: skip
    assert (
        max(line["local_steps"] + line["delay"] for line in read_metrics(folder, "round"))
        == 200 // 16
    )
    assert summary["final"]["accuracy"] > 0.8
