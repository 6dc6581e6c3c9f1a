"""Whole jobs whose members average among themselves, as processes."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create, read_metrics
from edgetrain.training import emulated
from edgetrain.training.simulated import simulation

WORDS = [
    "task=edgetrain.tasks:digits",
    "members=3",
    "strategy=fedavg",
    "every=5",
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


def test_a_process_that_is_killed_costs_the_others_one_attempt(tmp_path):
    folder = create(tmp_path, "killed")
    words = ["task=dying_task:dying", "backend=none", "gone_s=1", "beat_s=0.2", "topology=ring"]
    summary = emulated.run(plan(load(None, [*WORDS, *words])), folder)
    assert summary["status"] == "finished"
    found = ends(folder)
    assert sorted(found) == ["m0", "m2"]
    assert len({*found.values()}) == 1
    merged = [len(round["members"]) for round in read_metrics(folder, "round")]
    assert merged == [3, 2, 2, 2]
