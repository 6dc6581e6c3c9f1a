"""sync-sgd is what DistributedDataParallel does, measured against the real one over gloo."""

from __future__ import annotations

import time

import children
import numpy as np
import pytest
from loopback import Loopback
from torch import nn

from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.training import processes
from edgetrain.training.member.member import Member, bind

STEPS = 12
NAMES = ["sgd", "adam"]
BRANCHES = ["adamw", "decay"]
"""Optimizers that move a parameter whose gradient is zero."""


def trained_by_ddp(folder):
    """Whether both ranks came to their end. They are ended in any case."""
    context = processes.fork_server(["torch", "edgetrain.training.member.member"])
    ranks = [
        processes.start(
            context, f"rank{rank}", children.with_ddp,
            str(folder / "store"), str(folder / "params"), rank, NAMES, STEPS,
        )
        for rank in range(2)
    ]  # fmt: skip
    for child in ranks:
        child.process.join(60)
    codes = [child.exit_code for child in ranks]
    for child in ranks:
        child.stop()
    assert all(code in (0, None) for code in codes), [child.error for child in ranks]
    return codes == [0, 0]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    # The reference itself, two gloo processes that meet in a file, has been seen to hang.
    tries = (tmp_path_factory.mktemp("ddp") for _ in range(2))
    folder = next(folder for folder in tries if trained_by_ddp(folder))
    return {
        (name, rank): np.load(folder / f"params-{name}-{rank}.npy")
        for name in NAMES + BRANCHES
        for rank in range(2)
    }


def fleet_of_two(name, make, loss):
    """What two members of a sync-sgd fleet end with, on the batches of the two ranks."""
    wires = Loopback()

    def train(index, transport):
        model = make()
        optimizer = children.optimizer(name, model)
        link = Link(transport, time.monotonic)
        with Member.join(
            link, bind(model, optimizer), optimizer, Request("", f"m{index}")
        ) as member:
            for step in range(STEPS):
                optimizer.zero_grad()
                loss(model, index, step).backward()
                member.step()
        return children.flat(model)

    with children.HubThread(wires, "sync-sgd").serving() as hub:
        ends = [wires.connect() for _ in range(2)]
        found = children.in_threads(*[lambda i=i: train(i, ends[i]) for i in range(2)])
    assert len(hub.closed) == STEPS
    assert found[0].tobytes() == found[1].tobytes()
    assert np.abs(found[0] - children.flat(make())).max() > 0.01, "it has trained"
    return found


@pytest.mark.parametrize("name", NAMES)
def test_two_members_end_where_two_ranks_of_ddp_end(ddp, name):
    def loss(model, index, step):
        x, y = children.batch(index, step)
        return nn.functional.cross_entropy(model(x), y)

    found = fleet_of_two(name, lambda: children.model(0), loss)
    for rank in range(2):
        np.testing.assert_allclose(found[rank], ddp[name, rank], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", BRANCHES)
def test_layers_that_nobody_used_are_left_alone_as_ddp_does(ddp, name):
    def loss(model, index, step):
        x, y = children.batch(index, step)
        return nn.functional.cross_entropy(model(x, index, step), y)

    found = fleet_of_two(name, children.Branches, loss)
    for rank in range(2):
        np.testing.assert_allclose(found[rank], ddp[name, rank], rtol=0, atol=1e-6)
    never = children.flat(children.Branches().layers["never"])
    assert never.tobytes() in found[0].tobytes()
