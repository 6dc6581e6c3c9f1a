"""The loops of docs/how-to/your-own-loop.md run as they are, each in a fleet of two members."""

from __future__ import annotations

from types import SimpleNamespace

import children
import pytest
import torch
from naive_fleet import PATIENT
from own_loop_page import BLOCKS, TRAINERS, run_block
from torch.nn.functional import cross_entropy

import edgetrain
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.integrations import TrainerCallback

HERE = [title for title in BLOCKS if title not in TRAINERS]


def test_every_section_with_code_is_found():
    assert len(HERE) >= 7
    assert set(TRAINERS) < set(BLOCKS)


class Trainer:
    """Calls its callbacks as Hugging Face's does: every event of each, by name."""

    def __init__(self, model, batches, callback):
        self.model, self.batches, self.callback = model, batches, callback
        self.optimizer = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    def call(self, event):
        more = {"processing_class": None, "train_dataloader": self.batches, "lr_scheduler": None}
        call = getattr(self.callback, event)
        assert (
            call("args", "state", "control", model=self.model, optimizer=self.optimizer, **more)
            is None
        )

    def train(self):
        self.call("on_train_begin")
        for x, y in self.batches:
            self.call("on_step_begin")
            self.optimizer.optimizer.zero_grad()
            cross_entropy(self.model(x), y).backward()
            self.optimizer.optimizer.step()
            self.call("on_an_event_of_a_later_release")
        self.call("on_train_end")


def test_a_callback_joins_and_closes_with_the_trainer():
    wires = HubSocket("tcp://127.0.0.1:0")
    hub = children.HubThread(wires, "fedavg", 2, policy=PATIENT, local_steps=3)
    models = [children.model(index) for index in range(2)]
    callbacks = [TrainerCallback(wires.address, name=f"m{index}") for index in range(2)]

    def train(index):
        batches = [children.batch(index, number) for number in range(12)]
        Trainer(models[index], batches, callbacks[index]).train()

    with hub.serving():
        children.in_threads(*[lambda i=i: train(i) for i in range(2)])
    assert len({children.flat(model).tobytes() for model in models}) == 1
    assert [callback.member.steps for callback in callbacks] == [12, 12]
    assert [sorted(closed.members) for closed in hub.closed] == [["m0", "m1"]] * 4
    assert edgetrain.integrations.TrainerCallback is TrainerCallback
    TrainerCallback("tcp://nowhere:1").on_train_end()  # a trainer that failed before it began
    with pytest.raises(AttributeError):
        callbacks[0].state_dict()


@pytest.mark.parametrize("strategy", ["dga", "sync-sgd"])
@pytest.mark.parametrize("title", HERE)
def test_a_loop_of_the_page_ends_with_one_model(title, strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wires = HubSocket("tcp://127.0.0.1:0")
    rounds = {"local_steps": 3, "delay": 4} if strategy == "dga" else {}
    models = [children.model(index) for index in range(2)]

    def train(index):
        batches = [children.batch(index, number) for number in range(12)]
        run_block(title, wires.address, models[index], batches)

    hub = children.HubThread(wires, strategy, 2, policy=PATIENT, **rounds)
    with hub.serving():
        children.in_threads(*[lambda i=i: train(i) for i in range(2)])
    ends = [children.flat(model) for model in models]
    assert ends[0].tobytes() == ends[1].tobytes()
    assert all(len(closed.members) == 2 for closed in hub.closed)
