"""`codec = "auto"` in whole jobs, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgetrain.codecs.auto import RUNGS
from edgetrain.errors import ConfigError
from edgetrain.jobs import reading
from edgetrain.jobs.capacity.question import Options, question_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.rules import resolve
from edgetrain.runs.folder import create, read_metrics
from edgetrain.runs.reports.comparison import compare
from edgetrain.runs.reports.comparison_table import text
from edgetrain.training.simulated import simulation

EXAMPLE = Path(__file__).parents[3] / "examples" / "slow-links.toml"


def network(folder, rate_mbit):
    path = folder / f"net{rate_mbit}.toml"
    path.write_text(f"[both]\ndelay_ms = 100\nrate_mbit = {rate_mbit}\n")
    return f"network={path}"


def simulated(folder, *words, batched=True):
    inside = create(folder, "run")
    fleet = ["members=2", "batch=8", "pace_s=0.05", "device=raspberry-pi-4b"]
    job = reading.load(None, [*fleet, "codec=auto", *words])
    return simulation.run(plan(job), inside, batched=batched), inside


@pytest.mark.parametrize("batched", [True, False])
def test_a_fast_link_gets_dense_messages_and_waits_for_none(tmp_path, batched):
    words = (network(tmp_path, 100), "steps=120", "final_sync=0")
    summary, folder = simulated(tmp_path, *words, batched=batched)
    codecs = [line["codec"] for line in read_metrics(folder, "round")]
    assert codecs[0] == RUNGS[-1].name
    assert codecs[-1] == summary["codec"] == "fp16"
    told = [e["reason"] for e in read_metrics(folder, "event") if e["event"] == "codec"]
    assert "the slowest member, take" in told[-1]
    assert "fp16" in text(compare([summary]), width=200)
    assert summary["seconds"] < 1.15 * 120 * 0.05


def test_the_example_is_as_dense_as_its_slow_member_allows(tmp_path):
    folder = create(tmp_path, "run")
    summary = simulation.run(plan(reading.load(EXAMPLE, ["steps=200"])), folder, batched=True)
    codecs = {line["codec"] for line in read_metrics(folder, "round")}
    assert {"topk(0.01) | q2", "int4"} <= codecs
    assert "fp16" not in codecs, "the member on 3G would be waited for"
    assert summary["codec"] in ("int8", "int4")
    assert summary["seconds"] < 1.15 * 200 * 0.03
    told = [e["reason"] for e in read_metrics(folder, "event") if e["event"] == "codec"]
    assert " m3, the slowest member, " in told[-1]


@pytest.mark.parametrize("words", [(), ("strategy=fedavg",), ("delay=8",)])
def test_a_slow_link_gets_what_it_carries(tmp_path, words):
    summary, folder = simulated(tmp_path, network(tmp_path, 0.2), "steps=120", *words)
    names = [codec.name for codec in RUNGS]
    assert 0 < names.index(summary["codec"]) < len(names) - 1
    told = [e["reason"] for e in read_metrics(folder, "event") if e["event"] == "codec"]
    assert any("would take" in line for line in told)
    assert json.dumps(summary["codec"]) in (folder / "summary.json").read_text()


def test_a_device_that_comes_back_goes_on_at_the_density_of_the_others(tmp_path):
    summary, _ = simulated(
        tmp_path, network(tmp_path, 10), "members=3", "steps=100",
        "absences=[{ members = [1], at_s = 2, for_s = 1.5 }]",
    )  # fmt: skip
    assert summary["status"] == "finished"
    assert summary["codec"] in ("fp16", "int8", "int4")
    assert summary["final"]["accuracy"] > 0.5
    assert not summary["errors"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["strategy=sync-sgd"], "waits for each reply"),
        (["reply_codec=fp32"], "leave reply_codec out"),
        (["codec=fp32", "reply_codec=auto"], "leave reply_codec out"),
        (["secure=true", "members=3"], "follows rounds that all"),
        (["merge=median"], "few elements"),
    ],
)
def test_what_it_does_not_go_with_is_one_line(words, why):
    with pytest.raises(ConfigError, match=why) as caught:
        resolve(reading.load(None, ["codec=auto", *words]))
    assert "\n" not in str(caught.value)


def test_capacity_settles_on_the_rung_that_links_carry(tmp_path):
    def rung(rate, parameters):
        job = reading.load(
            None, ["codec=auto", "pace_s=0.05", "members=4", network(tmp_path, rate)]
        )
        options = Options(parameters=parameters, hub_rate_mbit=0.0)
        return question_of(resolve(job), options).exchange.codec.rung

    rates = [0.01, 0.1, 1, 10, 100, 1000]
    found = [rung(rate, 100_000) for rate in rates]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (len(RUNGS) - 1, 0)
    assert rung(1, 100_000) <= rung(1, 10_000_000)
