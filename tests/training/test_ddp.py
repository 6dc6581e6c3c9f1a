"""sync-sgd is what DistributedDataParallel does, measured against the real one over gloo."""

from __future__ import annotations

import time

import children
import numpy as np
import pytest
import ranks
from loopback import Loopback
from torch import nn

from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.training.member.member import Member, bind

pytestmark = pytest.mark.real

STEPS = 12
NAMES = ["sgd", "adam"]
BRANCHES = ["adamw", "decay"]
"""Optimizers that move a parameter whose gradient is zero."""


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    with ranks.world(2) as world:
        world.run(children.with_ddp, str(folder / "params"), NAMES, STEPS)
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
