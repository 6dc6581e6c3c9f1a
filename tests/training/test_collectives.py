"""Whole jobs whose members average among themselves, as processes."""

from __future__ import annotations

import time
from unittest import mock

import numpy as np
import pytest
from chaos.machines import kill
from safetensors.numpy import load_file

from edgetrain.exchange.hub.turns import Turns
from edgetrain.jobs.job import COLLECTIVES
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create, read_metrics
from edgetrain.training import emulated
from edgetrain.training.simulated import simulation

WORDS = [
    "task=edgetrain.tasks:digits",
    "members=3",
    "strategy=fedavg",
    "local_steps=5",
    "steps=20",
    "pace_s=0.01",
]


def job(topology, *words):
    return plan(load(None, [*WORDS, f"topology={topology}", "backend=none", *words]))


def model(folder):
    """Everything that was trained, as one vector."""
    tensors = load_file(folder / "model.safetensors")
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


def ends(folder):
    """The checksums of the base that members ended with, by member."""
    reasons = {e["member"]: str(e.get("reason")) for e in read_metrics(folder, "event")}
    return {who: end.split("base ")[1][:16] for who, end in reasons.items() if "base " in end}


@pytest.mark.real
@pytest.mark.parametrize(("topology", "strategy"), [("ring", "fedavg"), ("butterfly", "diloco")])
def test_processes_end_with_the_same_bits_close_to_those_of_a_star(topology, strategy, tmp_path):
    folder = create(tmp_path, "star")
    simulation.run(job("star", f"strategy={strategy}"), folder)
    star = model(folder)
    folder = create(tmp_path, "simulated")
    assert simulation.run(job(topology, f"strategy={strategy}"), folder)["status"] == "finished"
    simulated = model(folder)
    folder = create(tmp_path, topology)
    summary = emulated.run(job(topology, f"strategy={strategy}"), folder)
    assert summary["status"] == "finished"
    found = ends(folder)
    assert len(found) == 3
    assert len({*found.values()}) == 1
    assert np.array_equal(model(folder), simulated)
    assert np.linalg.norm(model(folder) - star) <= 1e-6 * np.linalg.norm(star)
    least = 4 * 2 * (3 - 1) * star.nbytes  # rounds, there and back, all but one
    assert least <= summary["sent_bytes"] < 2 * least, "bytes between members count"


@pytest.mark.parametrize("topology", COLLECTIVES)
def test_a_member_alone_trains_though_nobody_could_connect_to_it(topology, tmp_path):
    folder = create(tmp_path, "alone")
    summary = simulation.run(job(topology, "members=1", "nat='0'"), folder)
    assert summary["status"] == "finished"
    assert len(ends(folder)) == 1


class Bereft(simulation.Simulation):
    """A simulation in which m2 is killed for good this long after training began."""

    kill_s = None

    def begin(self, began):
        super().begin(began)
        if self.kill_s is not None:
            self.at(self.kill_s, lambda: kill(self.members[2], self.network, 1 << 62))


def closings(planned, folder, kill_s=None):
    """When rounds closed and, if m2 was killed, when it was given up: virtual seconds; and how many
    attempts there were."""
    real, counts = Turns.advance, []

    def advance(self, *args, **other):
        found = real(self, *args, **other)
        counts.append(self.count)
        return found

    with mock.patch.object(Turns, "advance", advance):
        return *run(planned, folder, kill_s), max(counts)


def run(planned, folder, kill_s):
    simulated = Bereft(planned, folder, False)
    simulated.kill_s = kill_s
    try:
        simulated.run(lambda: None, 1.0, time.monotonic)
        assert kill_s is None or simulated.verdict() == "finished"
    finally:
        simulated.close()
    gone = [e["t"] for e in read_metrics(folder, "event") if e["event"] == "gone"]
    return [round["t"] for round in read_metrics(folder, "round")], gone


@pytest.mark.parametrize("topology", ["ring", "butterfly", "tree"])
def test_a_lost_member_costs_the_wait_for_it_two_trips_and_the_transfer(topology, tmp_path):
    trip_s, steps_s, lost_after_s, heartbeat_s = 0.4, 5 * 0.4, 5.0, 1.0
    words = ["members=4", "network=wan-100ms", "hub_network=wan-100ms", "pace_s=0.4", "delay=0"]
    planned = job(topology, *words, f"lost_after_s={lost_after_s}", f"heartbeat_s={heartbeat_s}")
    calm, _, turns = closings(planned, create(tmp_path, "calm"))
    transfer_s = calm[1] - calm[0] - steps_s - 2 * trip_s
    for share in (0.2, 0.5, 0.8):  # of the attempt at the second round
        kill_s = calm[0] + steps_s + share * (2 * trip_s + transfer_s)
        closed, (gone,), more = closings(planned, create(tmp_path, f"killed-{share}"), kill_s)
        assert gone <= kill_s + lost_after_s + 1.5 * heartbeat_s
        assert closed[1] <= gone + 2 * trip_s + transfer_s
        assert more <= turns + 1


@pytest.mark.real
def test_a_process_that_is_killed_costs_the_others_one_attempt(tmp_path):
    folder = create(tmp_path, "killed")
    words = [
        "task=dying_task:dying",
        "backend=none",
        "lost_after_s=1",
        "heartbeat_s=0.2",
        "topology=ring",
    ]
    summary = emulated.run(plan(load(None, [*WORDS, *words])), folder)
    assert summary["status"] == "finished"
    found = ends(folder)
    assert sorted(found) == ["m0", "m2"]
    assert len({*found.values()}) == 1
    merged = [len(round["members"]) for round in read_metrics(folder, "round")]
    assert merged == [3, 2, 2, 2]
