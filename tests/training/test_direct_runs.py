"""Whole runs whose members reduce have the bits of a star, simulated and emulated."""

from __future__ import annotations

import functools
import re

import pytest

from edgetrain.fleet.networks.emulation import probe
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create, read_metrics
from edgetrain.training import emulated
from edgetrain.training.simulated import simulation
from tests.training.test_several_hubs import bases

JOBS = {
    "fedavg": ("strategy=fedavg", "members=3", "steps=8", "network=wifi"),
    "dga": ("strategy=dga(paper)", "delay=8", "codec=topk(0.1)|q2", "members=8", "steps=12"),
    "diloco": ("strategy=diloco", "codec=int8", "members=3", "local_steps=5", "steps=10"),
    "batched": ("strategy=fedavg", "members=16", "local_steps=4", "steps=8", "network=wan-50ms"),
}


KINDS = ("map", "reducers")


def job(*words):
    return plan(load(None, ["ranges=16", "pace_s=0.02", *words]))


def maps(folder):
    """What the hub said of who reduces."""
    found = [e["reason"] for e in read_metrics(folder, "event") if e["event"] in KINDS]
    return [line for line in found if line.startswith(("direct: ", "star: "))]


@functools.cache
def simulated(tmp, name, *words):
    folder = create(tmp, f"{name}-{len(words)}{words[-1][-1]}")
    summary = simulation.run(job(*JOBS[name], *words), folder)
    assert summary["status"] == "finished"
    return frozenset(bases(folder)), folder


@pytest.mark.parametrize("name", JOBS)
def test_members_reduce_and_the_bits_stay(name, tmp_path):
    star, _ = simulated(tmp_path, name, "topology=star")
    direct, folder = simulated(tmp_path, name, "topology=direct")
    assert len(star) == 1
    assert direct == star
    (line,) = maps(folder)
    assert line.startswith("direct: m")
    assert line.endswith("reduce 16 ranges")


def test_clients_dial_and_the_bits_stay(tmp_path):
    star, _ = simulated(tmp_path, "dga", "topology=star")
    direct, folder = simulated(tmp_path, "dga", "topology=direct", "nat=1 4 6")
    assert direct == star
    (line,) = maps(folder)
    assert sorted(re.findall(r"m\d", line)) == ["m0", "m2", "m3", "m5", "m7"]
    alone, folder = simulated(tmp_path, "dga", "topology=direct", "nat=0-7")
    assert alone == star
    (line,) = maps(folder)
    assert line.startswith("star: the hub reduces")


@pytest.mark.real
def test_clients_dial_through_an_emulated_nat(tmp_path):
    if not probe.packets_possible()[0]:
        pytest.skip("NAT is emulated packet by packet, which is not possible here")
    words = (*JOBS["dga"], "topology=direct", "nat=1 4 6", "network=rtt-20ms")
    folder = create(tmp_path, "emulated")
    assert emulated.run(job(*words), folder)["status"] == "finished"
    assert maps(folder)[0].startswith("direct: ")
    assert bases(folder) == simulated(tmp_path, "dga", "topology=star")[0]


def test_a_delay_hides_the_averaging_at_200_ms(tmp_path):
    words = ("strategy=dga", "members=3", "steps=50", "local_steps=5", "pace_s=0.1", "final_sync=0")
    folder = create(tmp_path, "far")
    simulation.run(job(*words, "topology=direct", "network=wan-100ms"), folder)
    ends = [row["t"] for row in read_metrics(folder, "step") if row["member"] == "m2"]
    late = ends[len(ends) // 2 : -1]  # behind the last step is the end of the last round
    assert 0.1 * (len(late) - 1) / (late[-1] - late[0]) >= 0.99
