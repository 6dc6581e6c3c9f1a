"""Running statistics of normalisation layers: the members' mean, or each member's own."""

from __future__ import annotations

import time
from pathlib import Path

import children
import numpy as np
import pytest
import torch
from command_line import write_tiny
from loopback import Loopback
from torch import nn

from edgetrain.__main__ import main
from edgetrain.errors import ConfigError
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.runs.folder import read_summary
from edgetrain.tasks.flat import FlatModel, with_parameters
from edgetrain.training.member.member import Member, bind

MEANS = (-4.0, 4.0)
"""Where the inputs of the two members lie: each alone measures statistics that suit only itself."""


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def statistics(model):
    return torch.cat([model[0].running_mean, model[0].running_var]).numpy().copy()


def batch(member, step):
    x, y = children.batch(member, step)
    return x + MEANS[member], y


# -- in the vector --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_behind_the_parameters(dtype):
    model = normalised()
    model[1].to(dtype)
    flat = FlatModel(model, statistics=True)
    assert flat.is_storage == (dtype is torch.float32)
    assert flat.elements - flat.trained == 12
    assert len(flat.layout) == 6
    assert flat.description.endswith(b"float32 6 0.running_mean\nfloat32 6 0.running_var\n")
    np.testing.assert_array_equal(flat.params[flat.trained :], [0.0] * 6 + [1.0] * 6)
    model[0](torch.randn(5, 6) + 3)
    flat.pull_params()
    np.testing.assert_array_equal(flat.params[flat.trained :], statistics(model))
    assert flat.params[flat.trained] != 0
    flat.gradient[flat.trained :] = 7  # of a strategy that pulls parameters to the round's start
    flat.pull_gradient()
    assert not flat.gradient[flat.trained :].any()
    flat.params[flat.trained :] = 2
    flat.push_params()
    assert set(statistics(model)) == {2.0}
    assert model[0].num_batches_tracked == 1


def test_a_look_shows_no_negative_variance_and_changes_nothing():
    model = normalised()
    flat = FlatModel(model, statistics=True)
    before, shown = statistics(model), flat.params.copy()
    shown[-12:] = -3
    with flat.holding(shown):
        assert set(model[0].running_mean.tolist()) == {-3.0}
        assert set(model[0].running_var.tolist()) == {0.0}
    np.testing.assert_array_equal(statistics(model), before)
    other = with_parameters(model, shown)
    assert set(other[0].running_mean.tolist()) == {-3.0}


def test_without_them_the_vector_is_what_it_was():
    flat = FlatModel(normalised())
    assert flat.elements == flat.trained
    assert b"running" not in flat.description


# -- a fleet --------------------------------------------------------------------------------------


def fleet(buffers, strategy="dga", steps=60, **how):
    """Two members of data that differ; each one's model at the end, the base, and its figures."""
    wires = Loopback()

    def train(index):
        model = normalised()
        optim = torch.optim.SGD(model.parameters(), 0.05)
        flat = bind(model, optim, buffers=buffers)
        link = Link(wires.connect(), time.monotonic)
        with Member.join(link, flat, optim, Request("", f"m{index}")) as member:
            for step in range(steps):
                optim.zero_grad()
                x, y = batch(index, step)
                nn.functional.cross_entropy(model(x), y).backward()
                member.step()
        return model, member

    with children.HubThread(wires, strategy, 2, **how).serving():
        return children.in_threads(lambda: train(0), lambda: train(1))


@pytest.mark.parametrize(
    ("strategy", "how"),
    [("fedavg", {"every": 2}), ("dga", {"every": 2, "delay": 5}), ("fedprox(0.1)", {"every": 3})],
)
def test_all_members_end_with_the_mean_of_what_they_measured(strategy, how):
    (one, a), (other, b) = fleet("mean", strategy, **how)
    assert children.flat(one).tobytes() == children.flat(other).tobytes()
    assert statistics(one).tobytes() == statistics(other).tobytes()
    assert a.half.base.tobytes() == b.half.base.tobytes()
    assert np.abs(statistics(one)[:6]).max() < 1.5, "the mean of -4 and 4"
    assert (statistics(one)[6:] > 0.2).all()


def test_local_statistics_are_each_members_own():
    (one, _), (other, _) = fleet("local", every=2, delay=5)
    assert children.flat(one).tobytes() == children.flat(other).tobytes()
    assert statistics(one)[:6].mean() < -3
    assert statistics(other)[:6].mean() > 3


def test_strategies_that_exchange_gradients_have_no_use_for_them():
    wires, model = Loopback(), normalised()
    optim = torch.optim.SGD(model.parameters(), 0.05)
    flat = bind(model, optim, buffers="mean")
    with children.HubThread(wires, "sync-sgd", 1).serving():
        link = Link(wires.connect(), time.monotonic)
        with pytest.raises(ConfigError, match=r"sync-sgd exchanges gradients.*buffers='local'"):
            Member.join(link, flat, optim, Request("", "m0"))
    with pytest.raises(ConfigError, match="allowed are mean and local"):
        bind(model, optim, buffers="some")


# -- a job ----------------------------------------------------------------------------------------

SKEWED = """
import torch
from tiny import Tiny as Even


class Tiny(Even):
    def model(self):
        return torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))

    def batches(self, member, members, batch, seed):
        for (x,) in super().batches(member, members, batch, seed):
            yield (x + 8.0 * member,)

    def evaluate(self, model):
        return {"loss": float(model[0].running_mean.mean())}
"""


@pytest.mark.real
def test_a_jobs_figures_are_with_the_mean_and_its_table_says_so(
    tmp_path, own_imports, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    Path("skewed.py").write_text(SKEWED)
    Path("job.toml").write_text('task = "skewed:Tiny"\n')
    words = ["run", "job.toml", "--simulate", "members=2", "steps=80", "pace_s=0.1", "lr=0.01"]
    found = {}
    for more in (["strategy=fedavg"], ["strategy=fedavg", "buffers=local"], ["strategy=sync-sgd"]):
        assert main([*words, *more]) == 0
        said = capsys.readouterr().out
        (run,) = Path("runs").iterdir()
        summary = read_summary(run)
        run.rename(" ".join(more))
        found[" ".join(more)] = summary["buffers"], summary["final"]["loss"], said
    how, figure, said = found["strategy=fedavg"]
    assert (how, round(figure)) == ("mean", 4)
    assert "fedavg: normalisation statistics are the members' mean" in said
    how, figure, said = found["strategy=fedavg buffers=local"]
    assert (how, round(figure)) == ("local", 0)
    assert "fedavg: normalisation statistics are each member's own" in said
    how, figure, said = found["strategy=sync-sgd"]
    assert (how, round(figure)) == ("local", 0)
