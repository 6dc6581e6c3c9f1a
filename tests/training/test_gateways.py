"""Whole runs with a gateway at each site: simulated and emulated alike, and who adds up what."""

from __future__ import annotations

import pytest

from edgetrain.fleet.networks.emulation import probe
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create, read_metrics
from edgetrain.runs.reports import comparison
from edgetrain.runs.reports.comparison_table import text
from edgetrain.runs.reports.live.watch import FolderWatch
from edgetrain.runs.reports.page.document import document
from edgetrain.runs.reports.page.story import report_of
from edgetrain.training import emulated
from edgetrain.training.simulated import simulation

WORDS = (
    "strategy=dga(paper)", "delay=8", "codec=int8", "members=4", "steps=32", "pace_s=0.02",
    "network=ethernet", "sites=home-fixed: 0-1, home-fixed: 2-3", "final_sync=0",
)  # fmt: skip


def job(*words):
    return plan(load(None, [*WORDS, *words]))


def bases(folder):
    """The checksums that members ended with."""
    ends = [str(event.get("reason")) for event in read_metrics(folder, "event")]
    return {end.split("base ")[1][:16] for end in ends if "base " in end}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = create(tmp_path_factory.mktemp("runs"), "simulated")
    return folder, simulation.run(job("gateways=true"), folder)


@pytest.mark.real
def test_an_emulated_run_of_two_sites_has_the_bits_of_a_simulated_one(simulated, tmp_path):
    if not probe.packets_possible()[0]:
        pytest.skip(probe.packets_possible()[1])
    folder, theirs = simulated
    own = create(tmp_path, "emulated")
    summary = emulated.run(job("gateways=true"), own)
    assert summary["status"] == theirs["status"] == "finished"
    assert bases(own) == bases(folder)
    assert len(bases(own)) == 1
    for way in ("sent_bytes", "received_bytes"):
        assert summary["gateways"][way] == pytest.approx(theirs["gateways"][way], rel=0.1)
    up = summary["hub"]["received_bytes"]
    assert up == pytest.approx(theirs["hub"]["received_bytes"], rel=0.05)


def test_a_site_begins_with_its_own_members_whatever_the_job_begins_with(simulated, tmp_path):
    summary = simulation.run(job("gateways=true", "min_members=4"), create(tmp_path, "start"))
    assert summary["status"] == "finished"
    assert summary["final"] == simulated[1]["final"]


def test_who_adds_up_what_and_bytes_apart_are_shown(simulated):
    folder, summary = simulated
    told = "the hub: the sums of sites; gateway 0: 2 members; gateway 1: 2 members"
    watch = FolderWatch(folder)
    watch.read()
    assert watch.state().data.reducers == told
    page = document(report_of([folder]))
    assert "<h2>Who adds up what</h2>" in page
    assert "<td>gateway 1</td><td>2 members</td>" in page
    [row] = comparison.compare([summary]).rows
    assert row.wan_bytes == summary["hub"]["sent_bytes"] + summary["hub"]["received_bytes"]
    assert row.lan_bytes == sum(summary["gateways"].values()) > row.sent_bytes
    assert "LAN" in text(comparison.compare([summary]))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), ""),
        (
            ("hub.hubs=['tcp://a:1', 'tcp://b:1']", "ranges=4", "sites="),
            "hub 1: ranges 0 to 2 of 4; hub 2: ranges 2 to 4 of 4",
        ),
        (
            ("gateways=true", "members=5"),
            "the hub: the sums of sites and of 1 members; gateway 0: 2 members; "
            "gateway 1: 2 members",
        ),
    ],
)
def test_a_star_needs_no_words_and_others_do(words, told):
    assert job(*words).reducers_in_words() == told


def test_a_gateway_says_so_of_itself():
    assert job("gateways=true").reducers_in_words(2) == (
        "this gateway: 2 members; the hub above: the sums of sites"
    )
