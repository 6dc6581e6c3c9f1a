"""Large simulated cohorts, whose members are there in rounds of their own only."""

from __future__ import annotations

import gc
import weakref

import pytest
from safetensors.numpy import load_file

from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.runs.folder import create, read_metrics
from edgetrain.strategies import Strategy
from edgetrain.training.simulated import simulation, streams
from edgetrain.training.simulated.simulation import Simulation, may_go

WORDS = (
    "members=12", "pace_s=0.02", "network=wan-200ms", "batch=4", "strategy=fedavg", "local_steps=3",
    "steps=36", "cohort=3", "evaluate_every=9", "optimizer={ name = 'sgd', lr = 0.1 }",
)  # fmt: skip


def run(folder, monkeypatch, goes, *words, batched=None):
    """The summary, the run's folder and the final model."""
    monkeypatch.setattr(simulation, "COME_AND_GO_FROM", 2 if goes else 1000)
    inside = create(folder, "run")
    planned = plan(reading.load(None, [*WORDS, *words]))
    summary = simulation.run(planned, inside, batched=batched)
    return summary, inside, load_file(inside / "model.safetensors")


@pytest.mark.parametrize("sampling", ["uniform", "poisson"])
def test_a_run_has_the_bits_that_it_has_if_all_stay(tmp_path, monkeypatch, sampling):
    word = f"strategy.sampling={sampling}"
    stayed, at_home, one = run(tmp_path, monkeypatch, False, word)
    summary, went, other = run(tmp_path, monkeypatch, True, word)
    assert all((one[key] == other[key]).all() for key in one)
    rosters = [[each["members"] for each in read_metrics(at, "round")] for at in (at_home, went)]
    assert rosters[0] == rosters[1]
    assert len({*map(tuple, rosters[0])}) > 6
    assert summary["final"] == stayed["final"]
    assert summary["status"] == stayed["status"] == "finished"
    assert summary["steps"] == stayed["steps"] == 36
    assert sum(each.get("steps", 1) for each in read_metrics(went, "step")) == sum(
        each.get("steps", 1) for each in read_metrics(at_home, "step")
    )


def test_what_members_sent_and_got_adds_up_however_often_it_came(tmp_path, monkeypatch):
    stayed, at_home, _ = run(tmp_path, monkeypatch, False)
    summary, went, _ = run(tmp_path, monkeypatch, True)
    assert summary["sent_bytes"] == stayed["sent_bytes"]
    # A member that comes for the first time is welcomed before it gets the base.
    welcomes = 200 * len({each["member"] for each in read_metrics(went, "step")})
    assert 0 <= summary["received_bytes"] - stayed["received_bytes"] < welcomes
    assert summary["wait_s"] == pytest.approx(stayed["wait_s"], rel=0.05)
    assert summary["seconds"] == pytest.approx(stayed["seconds"], rel=0.05)
    drawn = {name for each in read_metrics(went, "round") for name in each["members"]}
    assert {each["member"] for each in read_metrics(went, "step")} == drawn
    assert len([*read_metrics(at_home, "event")]) > 0


def test_batched_members_come_and_go_as_well(tmp_path, monkeypatch):
    words = "members=40", "cohort=7", "steps=60"
    _, _, one = run(tmp_path, monkeypatch, False, *words)
    _, _, other = run(tmp_path, monkeypatch, True, *words)
    for key in one:
        assert other[key] == pytest.approx(one[key], abs=1e-6)


def test_only_those_in_a_round_are_there(tmp_path):
    planned = plan(reading.load(None, [*WORDS, "members=300"]))
    inside = create(tmp_path, "run")
    driven = Simulation(planned, inside, goes=True)
    most = []
    try:
        driven.run(lambda: most.append(len(driven.members)), 0.0, iter(range(10**9)).__next__)
        assert driven.verdict() == "finished"
    finally:
        driven.close()
    assert len(most) > 3
    assert max(most) <= 2 * 3 + 1
    assert len({each["member"] for each in read_metrics(inside, "step")}) > 20


@pytest.mark.parametrize(
    "word",
    [
        "optimizer={ name = 'sgd', lr = 0.1, momentum = 0.5 }",
        "optimizer={ name = 'adamw', lr = 0.1 }",
        "codec=topk(0.1)",
        "strategy=scaffold",
        "personal=*.bias",
        "secure=true",
        "strategy.sampling=weighted",
        "absences=[{at_s=1, for_s=1, members=[7]}]",
        "cohort=0",
    ],
)
def test_members_with_which_something_waits_stay(word):
    assert may_go(plan(reading.load(None, WORDS)))
    assert not may_go(plan(reading.load(None, [*WORDS, word])))


def test_what_a_member_held_is_freed_when_it_goes(tmp_path, monkeypatch):
    """Its vectors wait for no garbage collection: a round of a large model has dozens of them."""
    real, halves = Strategy.member_half, list[weakref.ref]()

    def member_half(self, setting):
        halves.append(weakref.ref(made := real(self, setting)))
        return made

    def alive(self):
        bases.append(sum(half() is not None and hasattr(half(), "params") for half in halves))
        return verdict(self)

    verdict, bases = Simulation.verdict, list[int]()
    monkeypatch.setattr(Strategy, "member_half", member_half)
    monkeypatch.setattr(Simulation, "verdict", alive)
    gc.disable()
    try:
        run(tmp_path, monkeypatch, True)
    finally:
        gc.enable()
    assert len(halves) > 20
    assert bases[0] <= 4  # of the last round, and of the member that evaluates


@pytest.mark.parametrize("words", [(), ("cohort=0",)])
def test_links_without_a_network_take_no_tcp_and_give_the_same(tmp_path, monkeypatch, words):
    """Of a fleet from which on links are modelled coarsely."""
    found = []
    for bare in (True, False):
        if not bare:
            monkeypatch.setattr(streams.Path, "is_bare", False)
        summary, folder, model = run(
            tmp_path / str(bare), monkeypatch, True, "members=70", "network=none", "steps=9", *words
        )
        rounds = [each["t"] for each in read_metrics(folder, "round")]
        keys = "sent_bytes", "received_bytes", "seconds", "final"
        found.append(
            (rounds, [summary[key] for key in keys], {k: v.tobytes() for k, v in model.items()})
        )
    assert found[0] == found[1]
