"""A half that adjusts gradients is never skipped: batched members step as one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgetrain import strategies
from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.runs.folder import create, read_metrics
from edgetrain.strategies.displacement import Displacement
from edgetrain.training.simulated import simulation

WORDS = (
    "members=8", "device=raspberry-pi-4b", "steps=15", "batch=4", "local_steps=5",
    "evaluate_every=5", "optimizer={ name = 'sgd', lr = 0.1, momentum = 0.5 }",
)  # fmt: skip
STEPS = 8 * 15


class Pulled(Displacement):
    """Fedavg on loss + |params - 1|^2 / 2: adds the term's gradient before each step."""

    adjusts_gradient = True
    calls = 0

    def __init__(self, setting):
        super().__init__(setting.params, setting.local_steps, setting.delay, setting.memory)
        self._gradient = setting.gradient

    def before_step(self):
        Pulled.calls += 1
        self._gradient += np.float32(0.1) * (self.params - 1)

    def quiet_steps(self):
        return 0


@pytest.fixture(autouse=True)
def _in_the_table(monkeypatch):
    monkeypatch.setattr(Pulled, "calls", 0)
    row = replace(strategies.find("fedavg"), name="pulled", build=Pulled, adjusts_gradient=True)
    monkeypatch.setitem(strategies.TABLE, "pulled", row)


def trained(folder, name, *words, batched):
    job = reading.load(None, [*WORDS, f"strategy={name}", *words])
    inside = create(folder, name)
    summary = simulation.run(plan(job), inside, batched=batched)
    ends = {r["reason"] for r in read_metrics(inside, "event") if r["event"] == "finished"}
    assert len(ends) == 1, "all replicas have one base"
    return summary


@pytest.mark.parametrize(
    "words", [(), ("optimizer={ name = 'adamw', lr = 0.002 }",)], ids=["sgd", "adamw"]
)
def test_batched_members_step_with_the_adjusted_gradient_as_one_by_one(tmp_path, words):
    one = trained(tmp_path, "pulled", *words, batched=False)
    assert Pulled.calls == STEPS
    many = trained(tmp_path, "pulled", *words, batched=True)
    assert Pulled.calls == 2 * STEPS
    assert "vmap" in many["emulation"]["reason"]
    assert many["final"]["loss"] == pytest.approx(one["final"]["loss"], rel=1e-3)
    assert many["seconds"] == pytest.approx(one["seconds"], abs=1e-6)
    plain = trained(tmp_path, "fedavg", *words, batched=True)
    assert abs(plain["final"]["loss"] / many["final"]["loss"] - 1) > 0.01, "the term is felt"
