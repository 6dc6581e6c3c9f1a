"""Sites, faults and congestion control of a job: planned, written down, and lived through."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path

import pytest
from command_line import edgetrain, write_tiny

from edgetrain.__main__ import main
from edgetrain.cli.init import commented
from edgetrain.errors import ConfigError
from edgetrain.files.toml import to_toml
from edgetrain.fleet.networks import Fault
from edgetrain.fleet.networks.emulation import probe
from edgetrain.jobs import reading
from edgetrain.jobs.job import Job
from edgetrain.jobs.plan import plan
from edgetrain.jobs.resolved import Resolved
from edgetrain.runs.folder import read_job, read_metrics, read_summary

PACKETS, WHY_NOT = probe.packets_possible()
needs_packets = pytest.mark.skipif(not PACKETS, reason=f"no emulated hosts: {WHY_NOT}")
EXAMPLE = Path(__file__).parents[2] / "examples" / "shared-uplink.toml"

pytestmark = pytest.mark.usefixtures("own_imports")


def planned(tmp_path: Path, *overrides: str, **tables: object) -> Resolved:
    write_tiny(tmp_path, **tables)
    return plan(reading.load(tmp_path / "job.toml", overrides), tmp_path)


def test_a_plan_carries_them_as_objects(tmp_path):
    plan = planned(
        tmp_path,
        "sites=home-fixed: 0-2, 4g-good: 3",
        "congestion=reno",
        faults=[{"kind": "rate", "at_s": 1, "for_s": 2, "members": [1], "share": 0.5}],
        fleet={"members": 5, "network": "wifi"},
    )
    assert [(site.uplink.name, site.members) for site in plan.sites] == [
        ("home-fixed", (0, 1, 2)),
        ("4g-good", (3,)),
    ]
    assert plan.faults == (Fault("rate", 1.0, 2.0, (1,), 0.5),)
    assert plan.congestion == "reno"
    plain = planned(tmp_path)
    assert (plain.sites, plain.faults, plain.congestion) == ((), (), "cubic")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("sites=home-fixd: 0-1", "'home-fixd'.*did you mean 'home-fixed'"),
        ("sites=home-fixed: 0-9", "members 0-9 are out of range.*0 to 3"),
        ("hub_network=home-fixd", "'home-fixd'.*did you mean 'home-fixed'"),
        ("hub_network=wifi:2", "fleet.hub_network names 2 hubs, the job has 1"),
        ("nat=0-9", "members 0-9 are out of range.*0 to 3"),
        ("faults=[{kind='down', at_s=1, for_s=1, hubs=[1]}]", r"hubs\[0\] = 1 \(allowed.* 0 to 0"),
        ("congestion=cubik", "no congestion control 'cubik'.*did you mean 'cubic'"),
        ("faults=[{kind='dwon', at_s=1, for_s=1}]", r"faults\[0\].kind.*did you mean 'down'"),
        ("faults=[{kind='down', at_s=1, fors=1}]", r"faults\[0\].fors.*did you mean 'for_s'"),
        ("faults=[{kind='down', at_s=1, for_s=1, members=[4]}]", r"s\[0\] = 4 \(.* 0 to 3"),
        (
            "faults=[{kind='rate', at_s=1, for_s=1, share=0.1}]",
            r"faults\[0\] is a share of the rate of m0, and network 'none' has no fixed rate",
        ),
    ],
)
def test_what_cannot_be_fails_before_anything_starts(override, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        planned(tmp_path, override)


@pytest.mark.parametrize("write", [lambda job: to_toml(job.to_dict()), commented])
def test_a_job_with_faults_reads_back(write):
    job = reading.load(EXAMPLE)
    assert len(job.faults) == 2
    assert reading.parse(tomllib.loads(write(job))) == job
    assert reading.parse(tomllib.loads(write(Job()))) == Job()


def test_init_explains_faults():
    text = commented(Job())
    example = "\n".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    below = example.partition("docs/reference/networks.md\n")[2]
    (fault,) = reading.parse(tomllib.loads(below)).faults
    assert fault == {"kind": "down", "at_s": 10, "for_s": 5, "members": [0]}


def test_the_example_plans():
    planned = plan(reading.load(EXAMPLE), EXAMPLE.parent)
    assert [site.members for site in planned.sites] == [(0, 1, 2), (3, 4, 5)]
    assert [fault.kind for fault in planned.faults] == ["partition", "rate"]


def trained(tmp_path: Path, *words: str) -> Path:
    """A run of the tiny task to its end; its folder."""
    done = edgetrain("run", write_tiny(tmp_path), *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


DOWN_S = 2.0


@pytest.mark.real
@needs_packets
def test_a_link_that_is_down_stops_nobody_else_and_its_member_comes_back(tmp_path):
    folder = trained(
        tmp_path,
        f"faults=[{{ kind = 'down', at_s = 1, for_s = {DOWN_S}, members = [2] }}]",
        *("network=rtt-20ms", "backend=packet", "congestion=reno", "members=3"),
        *(
            "pace_s=0.02",
            "steps=300",
            "local_steps=5",
            "delay=10",
            "deadline_s=0.2",
            "lost_after_s=30",
        ),
    )
    times = {"m0": [], "m1": [], "m2": []}
    for record in read_metrics(folder, "step"):
        times[record["member"]].append(record["t"])
    longest = {  # but for the last step, which ends when the hub has said what it has, in a beat
        name: max(later - sooner for sooner, later in itertools.pairwise(found[:-1]))
        for name, found in times.items()
    }
    struck = [r["t"] for r in read_metrics(folder, "event") if r["event"] == "fault"]
    assert len(struck) == 1
    assert struck[0] >= 1
    assert longest["m2"] > 0.8 * DOWN_S, "its replies could not reach it"
    assert max(longest["m0"], longest["m1"]) < 0.5 * DOWN_S, longest
    rounds = list(read_metrics(folder, "round"))
    without = [r["t"] for r in rounds if "m2" in r["missing"]]
    assert without
    assert 1 < min(without) < 1 + DOWN_S
    merged = [r["t"] for r in rounds if "m2" in r["members"]]
    assert max(merged) > 1 + DOWN_S, "what it learned counts again"
    assert len(times["m2"]) == 300
    summary = read_summary(folder)
    assert (summary["status"], summary["members_lost"]) == ("finished", [])
    assert summary["emulation"]["congestion"] == "reno"
    assert summary["emulation"]["kernel"]
    assert sum(summary["emulation"]["late_histogram_ms"].values()) > 100
    assert read_job(folder)["faults"][0]["for_s"] == DOWN_S


@pytest.mark.real
@needs_packets
def test_a_job_on_sites_runs(tmp_path):
    folder = trained(
        tmp_path, "network=wifi", "sites=home-fixed: 0-1", "members=3", "steps=20", "pace_s=0.01"
    )
    summary = read_summary(folder)
    assert summary["emulation"]["backend"] == "packet"
    assert read_job(folder)["fleet"]["sites"] == "home-fixed: 0-1"


@pytest.mark.real
def test_what_a_backend_lacks_is_an_error_and_not_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = write_tiny(tmp_path, fleet={"members": 2, "network": "wifi"})
    for words, says in (
        (("backend=none", "faults=[{kind='down', at_s=1, for_s=1}]"), "'none' has no sites, no"),
        (("backend=stream", "sites=home-fixed: 0-1"), "'stream' (asked for) has no shared uplinks"),
        (("backend=stream", "congestion=bbr"), "'bbr' has no model in the stream backend"),
    ):
        assert main(["run", job, *words]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
