"""Whole runs with several hubs have the bits of a run with one, simulated and emulated."""

from __future__ import annotations

import functools

import pytest

from edgetrain.fleet.networks.emulation import probe
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create, read_metrics
from edgetrain.training import emulated
from edgetrain.training.simulated import simulation

JOBS = {
    "fedavg": ("strategy=fedavg", "members=3", "steps=20", "network=wifi"),
    "dga": ("strategy=dga(paper)", "delay=8", "codec=topk(0.1)|q2", "members=3", "steps=32"),
    "diloco": ("strategy=diloco", "codec=int8", "members=2", "local_steps=5", "steps=20"),
    "batched": ("strategy=fedavg", "members=40", "local_steps=4", "steps=8", "network=wan-50ms"),
}


def job(hubs, *words):
    addresses = ", ".join(f"'tcp://hub-{number}:5555'" for number in range(hubs))
    return plan(load(None, ["ranges=16", f"hubs=[{addresses}]", "pace_s=0.02", *words]))


def bases(folder):
    """The checksums that members ended with."""
    ends = [str(event.get("reason")) for event in read_metrics(folder, "event")]
    return {end.split("base ")[1][:16] for end in ends if "base " in end}


@functools.cache
def simulated(tmp, name, hubs):
    folder = create(tmp, f"{name}-{hubs}")
    summary = simulation.run(job(hubs, *JOBS[name]), folder)
    assert summary["status"] == "finished"
    return frozenset(bases(folder))


@pytest.mark.parametrize("name", JOBS)
def test_hubs_share_the_vector_and_the_bits_stay(name, tmp_path):
    one = simulated(tmp_path, name, 1)
    assert len(one) == 1
    assert [simulated(tmp_path, name, hubs) for hubs in (2, 16)] == [one, one]


@pytest.mark.real
def test_an_emulated_run_has_the_bits_of_a_simulated_one(tmp_path):
    backend = "packet" if probe.packets_possible()[0] else "stream"
    folder = create(tmp_path, "emulated")
    summary = emulated.run(job(3, *JOBS["dga"], "network=rtt-20ms", f"backend={backend}"), folder)
    assert summary["status"] == "finished"
    assert bases(folder) == simulated(tmp_path, "dga", 1)
