"""The loops of docs/your-own-loop.md run as they are, each in a fleet of two members."""

from __future__ import annotations

import children
import pytest
from naive_fleet import PATIENT
from own_loop_page import BLOCKS, TRAINERS, run_block

from edgetrain.exchange.zeromq.hub_socket import HubSocket

HERE = [title for title in BLOCKS if title not in TRAINERS]


def test_every_section_with_code_is_found():
    assert len(HERE) >= 7
    assert set(TRAINERS) < set(BLOCKS)


@pytest.mark.parametrize("strategy", ["dga", "sync-sgd"])
@pytest.mark.parametrize("title", HERE)
def test_a_loop_of_the_page_ends_with_one_model(title, strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wires = HubSocket("tcp://127.0.0.1:0")
    rounds = {"every": 3, "delay": 4} if strategy == "dga" else {}
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
