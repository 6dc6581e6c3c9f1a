"""Stages that compute with torch: bit for bit one process, whatever dies; plans, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes import pipeline_task
from fakes.pipeline_room import PipelineRoom
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import BadMessage, BadPayload, ConfigError
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.resolved import Resolved
from edgetrain.training.pipelined.hub import terms_of
from edgetrain.training.pipelined.planning import plan_stages
from edgetrain.training.pipelined.stage import TorchStage, decode, encode, tree_of

ROWS = ("task=fakes.pipeline_task:rows", "members=4", "batch=6", "steps=5", "strategy=sync-sgd",
        "network=wan-100ms", "hub.snapshot_every=2")  # fmt: skip
WORDS = "fleet.placement=pipeline=4 microbatches=6"


def planned(*words: str, placement: str = WORDS) -> Resolved:
    found = plan(load(None, [*ROWS, placement, *words]))
    return replace(found, stages=plan_stages(found))


def room_of(found: Resolved, seed: int = 0) -> PipelineRoom:
    task = task_of(found.job)
    return PipelineRoom(
        terms_of(found.job),
        lambda stage: TorchStage(found.job, task, found.stages, stage, sleep=lambda s: None),
        list(found.stages.windows),
        seed,
        found.stages.placement.microbatches,
    )


def one_process(found: Resolved) -> dict[str, torch.Tensor]:
    return pipeline_task.one_process(found.job, found.stages.placement.microbatches)


def trained(room: PipelineRoom) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for state in room.relay.states:
        found |= tree_of(state)["tensors"]
    return found


def assert_equal_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("optimizer", ["optimizer.name=sgd", "optimizer={name='adamw', lr=0.01}"])
def test_four_stages_are_one_process_bit_for_bit(optimizer):
    found = planned(optimizer)
    room = room_of(found)
    room.run()
    assert_equal_bits(trained(room), one_process(found))


def test_clipped_gradients_are_those_of_one_process():
    found = planned("train.clip=0.05", "optimizer={name='sgd', lr=0.5, momentum=0.9}")
    room = room_of(found)
    room.run()
    clipped, expected = trained(room), one_process(found)
    unclipped = one_process(planned("optimizer={name='sgd', lr=0.5, momentum=0.9}"))
    for name, tensor in expected.items():
        assert torch.allclose(clipped[name], tensor, rtol=0, atol=1e-6), name
        assert not torch.allclose(unclipped[name], tensor, rtol=0, atol=1e-3), name


def test_a_stage_killed_at_twenty_instants_goes_on_with_the_right_bits():
    found = planned("optimizer={name='adamw', lr=0.01}")
    expected = one_process(found)
    whole = room_of(found)
    whole.run()
    for at in range(20):
        room = room_of(found, at)
        room.run({(at + 1) * whole.turns // 21: at % 4})
        assert room.relay.generation > 1
        assert_equal_bits(trained(room), expected)


@pytest.mark.parametrize(("word", "near"), [("bf16", 2e-2), ("int8", 6e-2)])
def test_fewer_bits_are_near_and_repeat_themselves(word, near):
    found = planned(f"fleet.activations={word}")
    rooms = [room_of(found, seed) for seed in range(2)]
    for room in rooms:
        room.run()
    first, second = map(trained, rooms)
    assert_equal_bits(first, second)
    exact = one_process(found)
    assert all(float((first[n] - exact[n]).abs().max()) < near for n in exact)
    assert any(not torch.equal(first[n], exact[n]) for n in exact)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_what_is_passed_on_comes_back(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    shape, largest = tuple(tensor.shape), float(tensor.abs().max())
    assert torch.equal(decode(encode(tensor, "float32"), shape, "float32"), tensor)
    bf16 = decode(encode(tensor, "bf16"), shape, "bf16")
    assert torch.equal(bf16, tensor.bfloat16().float())
    int8 = decode(encode(tensor, "int8"), shape, "int8")
    assert float((int8 - tensor).abs().max()) <= largest / 127 * 0.51 + 1e-30


@pytest.mark.parametrize("word", ["float32", "bf16", "int8"])
def test_activations_of_another_shape_are_refused(word):
    payload = encode(torch.ones(3, 4), word)
    with pytest.raises(BadPayload, match="2x4"):
        decode(payload, (2, 4), word)


@given(st.binary(max_size=80))
def test_bytes_that_are_no_state_are_refused(data):
    with pytest.raises(BadMessage):
        tree_of(data)


# -- plans -----------------------------------------------------------------------------------------


def test_slow_devices_get_fewer_layers():
    def cut(device: str) -> int:
        words = ("data.width=400", "members=2", f"device={device}")
        return planned(*words, placement="fleet.placement=pipeline=2").stages.placement.cuts[0]

    assert cut("raspberry-pi-4b, laptop") <= 2 < cut("laptop, raspberry-pi-4b")


def test_the_window_grows_with_the_link_and_ends_with_memory():
    near = planned("network=none", "device=raspberry-pi-4b").stages.windows
    far = planned("device=raspberry-pi-4b").stages.windows
    assert near == (4, 3, 2, 1)
    assert far == (6, 6, 6, 1)


@pytest.mark.parametrize(
    ("words", "placement", "said"),
    [
        (["data.odd=tied"], "pipeline=4", "'0.weight' is on stages 0 and 3"),
        (["data.odd=two"], "pipeline=4 cuts=1,2,3", "passes on tuple"),
        (["members=6"], "pipeline=6", "6 stages of a model with 5 layers"),
        ([], "pipeline=4 microbatches=5", "microbatches=5 of a step's 24 samples"),
        (["data.width=40000", "device=raspberry-pi-zero-2w"], "pipeline=4", "GB"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(words, placement, said):
    with pytest.raises(ConfigError, match=said):
        planned(*words, placement=f"fleet.placement={placement}")
