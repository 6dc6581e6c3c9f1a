"""A group as a member of an emulated fleet: ranks that are killed, and what is refused."""

from __future__ import annotations

import joined_runs
import pytest

from edgetrain.__main__ import main
from edgetrain.errors import ConfigError
from edgetrain.jobs.plan import check
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import read_metrics
from edgetrain.training.servers.snapshots import latest
from edgetrain.training.simulated import simulation

pytestmark = pytest.mark.usefixtures("own_imports")


@pytest.mark.real
def test_a_group_comes_back_after_a_rank_was_killed(tmp_path):
    out = joined_runs.run(tmp_path, "data.killed=1", "steps=80")
    assert (tmp_path / "mark1").exists()
    events = read_metrics(out, "event")
    assert len(joined_runs.bases(events)) == 1, "replicas are equal bit for bit"
    said = [each["event"] for each in events if each.get("about") == "m2"]
    assert said == ["joined", "left", "joined", "left"], "under the same name"
    assert latest(out / "m2") is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fleet.device=host:2, servers"], "the job has no [servers]"),
        (["fleet.device=host:2, servers", "servers.hang_s=5"], "does not say how many processes"),
        (["fleet.device=host:2, servers", "servers.placement=data=3", "batch=32"], "data=2"),
        (["fleet.device=host:2, servers", "servers.placement=data=3", "servers.shares=2"],
         "data=2"),
        (["members=3", "servers.shares=2"], "no member is a group"),
        (["fleet.device=host:2, servers", "servers.placement=data=2", "servers.shares=4"],
         "the job has only 3 members"),
        (["strategy=fedbuff(2, 0.5)", "strategy.weighting=shares"], "says itself"),
        (["strategy.weighting=share"], "did you mean"),
        (["fleet.device=host:2, servers", "servers.placement=data=2", "servers.cluster=c.toml"],
         "on its own machine"),
        (["fleet.device=host:2, servers", "servers.placement=data=2",
          "train.lr_reference_batch=64"],
         "ranks or stages are not members"),
        (["fleet.device=host:2, servers", "servers.placement=data=2", "privacy=example",
          "noise=1"], "a group clips no examples"),
        (["fleet.device=host:2, servers", "servers.placement=data=2", "fallback=when-needed"],
         "it is there"),
        (["fleet.device=host:2, servers", "servers.placement=data=2", "topology=ring",
          "strategy=fedavg"], "joins one hub yet"),
        (["fleet.device=host:2, servers", "servers.placement=data=2", "topology=direct",
          "strategy.ranges=4"], "joins one hub yet"),
        (["fleet.device=host:2, servers", "servers.placement=data=2", "gateways=true"],
         "joins one hub yet"),
    ],
)  # fmt: skip
def test_what_a_group_in_a_fleet_cannot_have_is_refused_in_a_line(words, said):
    with pytest.raises(ConfigError) as refused:
        check(load(None, words))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_group_is_not_simulated(tmp_path):
    job = load(None, ["fleet.device=host:2, servers", "servers.placement=data=2"])
    with pytest.raises(ConfigError, match="whose speed is not known"):
        simulation.run(check(job), tmp_path)


def test_a_list_of_devices_says_how_many_members_a_real_fleet_has(capsys):
    words = ["fleet.device=host:2, servers", "servers.placement=data=2"]
    assert main(["member", *words, "--hub", "tcp://127.0.0.1:1", "--index", "3"]) == 2
    assert "allowed are 0 to 2" in capsys.readouterr().err
