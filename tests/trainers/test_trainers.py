"""Loops that belong to trainers of other libraries: `join` and `close` are all that a fleet adds to
them, too (`make test-trainers`, in an environment of its own).

Each is compared with the same training as a plain loop, in the fleet of tests/fakes/naive_fleet.py.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import children
import numpy as np
import pytest
import torch
from command_line import running
from naive_fleet import PATIENT, NaiveMember, Table
from own_loop_page import TRAINERS
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from edgetrain.exchange.zeromq.hub_socket import HubSocket

pytestmark = pytest.mark.trainers

MEMBERS, BATCHES = 2, 13
STRATEGIES = {
    "fedavg": {"local_steps": 5},
    "dga": {"local_steps": 3, "delay": 4},
    "sync-sgd": {},
}


def plain(model, data, join, clip=None, gamma=0.5):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma)
    member = join(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
    member.close()


def clipped(model, data, join):
    plain(model, data, join, clip=0.5)


def unscheduled(model, data, join):
    plain(model, data, join, gamma=1.0)


def accumulating_but_the_last(model, data, join):
    accumulating(model, data[:-1], join)


def accumulating(model, data, join, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    member = join(model, optimizer)
    for number, (x, y) in enumerate(data, 1):
        (cross_entropy(model(x), y) / 2).backward()
        if number % 2 == 0 or number == len(data):
            optimizer.step()
            optimizer.zero_grad()
    member.close()


def accumulating_and_clipped(model, data, join):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    member = join(model, optimizer)
    for number, (x, y) in enumerate(data, 1):
        (cross_entropy(model(x), y) / 2).backward()
        if number % 2 == 0 or number == len(data):
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    member.close()


def two_optimizers(model, data, join):
    first = torch.optim.AdamW(model[0].parameters(), lr=0.01)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    member = join(model, [first, second])
    for x, y in data:
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        first.step()
        second.step()
    member.close()


PLAIN = {
    "accelerate": clipped,
    "accelerate_accumulates": accumulating,
    "lightning": plain,
    "lightning_accumulates": accumulating_and_clipped,
    "lightning_by_hand": two_optimizers,
    "opacus": unscheduled,
    "opacus_in_pieces": unscheduled,
    "ignite": plain,
    "ignite_accumulates": accumulating_but_the_last,
    "skorch": unscheduled,
}
"""Loops of trained.py, and what they train as a plain loop."""
FLEETS = [(loop, strategy) for loop in (*PLAIN, *TRAINERS) for strategy in STRATEGIES]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each member of each fleet ended with, in the order of FLEETS."""
    folder = tmp_path_factory.mktemp("trained")
    program = (sys.executable, str(Path(__file__).with_name("trained.py")))
    with contextlib.ExitStack() as stack:
        words = []
        for loop, strategy in FLEETS:
            wires = HubSocket("tcp://127.0.0.1:0")
            hub = children.HubThread(
                wires, strategy, MEMBERS, policy=PATIENT, **STRATEGIES[strategy]
            )
            stack.enter_context(hub.serving())
            words.append(f"{loop}={wires.address}")
        members = [
            stack.enter_context(
                running(str(index), str(folder), *words, cwd=folder, program=program)
            )
            for index in range(MEMBERS)
        ]
        for member in members:
            assert member.finish(240) == 0, member.said
    return [
        [np.load(folder / f"{number}-{index}.npy") for index in range(MEMBERS)]
        for number in range(len(FLEETS))
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loop", PLAIN)
def test_a_trainer_in_a_fleet_trains_what_the_plain_loop_does(loop, strategy, trained):
    table = Table(MEMBERS)

    def train(index):
        member = NaiveMember(table, index, strategy, weights=(1, 2), **STRATEGIES[strategy])
        model = children.model()
        PLAIN[loop](model, [children.batch(index, n) for n in range(BATCHES)], member.join)
        return children.flat(model)

    expected = children.in_threads(*[lambda i=i: train(i) for i in range(MEMBERS)])
    found = trained[FLEETS.index((loop, strategy))]
    assert found[0].tobytes() == found[1].tobytes()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("title", TRAINERS)
def test_a_loop_of_the_page_ends_with_one_model(title, strategy, trained):
    found = trained[FLEETS.index((title, strategy))]
    assert found[0].tobytes() == found[1].tobytes() != children.flat(children.model()).tobytes()
