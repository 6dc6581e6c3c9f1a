"""Layers on fake tensors: the figures of a real step, and of models that no machine here holds."""

from __future__ import annotations

import time
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from edgetrain.errors import TaskError
from edgetrain.fleet.devices.cost import measure_step
from edgetrain.tasks import char_lm, digits
from edgetrain.tasks.profiling import (
    inputs_of,
    layers_of,
    loss_of,
    pieces_of,
    profile,
    tensor_plan,
)


def batch_of(task, size=8):
    return next(task.batches(0, 1, size, 0))


def saved_by(model, task, batch):
    """Bytes that a real step keeps for its backward pass, parameters left out."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held, kept = {}, []

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        task.loss(model, batch)
    return sum(held.values())


@pytest.mark.parametrize(
    "make",
    [digits, char_lm, lambda: char_lm(layers=3, tied=False)],
    ids=["digits", "char_lm", "char_lm not tied"],
)
def test_figures_are_those_of_a_real_step(make):
    task = make()
    batch = batch_of(task)
    found = profile(task, batch)
    model = task.model()
    flops, operators = measure_step(model, batch, task.loss)
    assert sum(x.flops + x.backward_flops for x in found.layers) * 8 == pytest.approx(flops)
    assert sum(x.operators + x.backward_operators for x in found.layers) == operators
    assert sum(x.saved_bytes for x in found.layers) * 8 == saved_by(model, task, batch)
    tied = sum(n for _, _, n in found.tied)
    assert sum(x.parameters for x in found.layers) - tied == sum(
        p.numel() for p in model.parameters()
    )


def test_equal_blocks_have_equal_figures_and_pass_on_what_they_compute():
    found = profile(char_lm(layers=4), batch_of(char_lm()))
    first, *blocks, _ = found.layers
    assert len({(x.parameters, x.flops, x.backward_flops, x.operators) for x in blocks}) == 1
    assert {x.passed_bytes for x in (first, *blocks)} == {64 * 64 * 4}
    assert all(0.9 < x.divided < 1 for x in blocks)
    assert found.tied == [(0, 5, 256 * 64)]
    assert found.heads == 4


def test_layers_of_any_model_are_found_by_structure():
    assert pieces_of(digits().model()) == [(str(i),) for i in range(6)]
    model = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2)] * 2), "b": nn.Linear(2, 2)})
    assert pieces_of(model) == [("a.0",), ("a.1",), ("b",)] or pieces_of(model)[0] == ("a.0",)


def test_a_task_is_taken_apart_without_its_model():
    task = char_lm()
    batch = batch_of(task)
    torch.manual_seed(0)
    model = task.model()
    args, kwargs = inputs_of(task, batch)
    assert torch.equal(args[0], batch[0])
    assert not kwargs
    assert torch.equal(loss_of(task, model(*args), batch), task.loss(model, batch))


def test_a_loss_that_calls_the_model_twice_is_refused():
    class Twice:
        name = "twice"

        def loss(self, model, batch):
            return F.mse_loss(model(batch[0]), model(batch[0]))

    with pytest.raises(TaskError, match="calls the model 2 times"):
        loss_of(Twice(), torch.zeros(2), (torch.zeros(2),))


def test_thirteen_billion_parameters_take_no_memory():
    process = psutil.Process()
    task = char_lm(width=5120, heads=40, layers=40, context=2048)
    batch = batch_of(task, 1)
    before, began = process.memory_info().rss, time.process_time()
    found = profile(task, batch)
    assert sum(x.parameters for x in found.layers) > 12.5e9
    assert time.process_time() - began < 10
    assert process.memory_info().rss - before < 1e9


def test_what_is_around_a_list_of_layers_is_looked_through_and_second_names_are_no_layers():
    class Around(nn.Module):
        def __init__(self, **children):
            super().__init__()
            for name, child in children.items():
                self.add_module(name, child)

    def layer():
        return Around(one=nn.Linear(2, 2), two=nn.Linear(2, 2))

    body = Around(bytes=nn.Embedding(4, 2), stack=Around(layers=nn.ModuleList([layer(), layer()])))
    inside = ["bytes", "stack.layers.0", "stack.layers.1"]
    model = Around(lm=Around(model=body, head=nn.Linear(2, 4)), again=body.bytes, last=layer())
    found = [name for (name,) in pieces_of(model)]
    assert found == [*(f"lm.model.{name}" for name in inside), "lm.head", "last"]
    assert pieces_of(nn.Sequential(body, layer())) == [("0",), ("1",)], "cut as a sequence"


class Configured(nn.Module):
    """As transformers' models: a plan in `config` counts from the one that a head is on."""

    base_model_prefix = "model"
    config = SimpleNamespace(num_key_value_heads=2, base_model_tp_plan={"layers.*.up": "colwise"})


class Answering(nn.Module):
    """As peft's models, for what they wrap."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


def test_a_plan_counts_from_the_model_that_a_head_is_on_wherever_that_is():
    base, head, around = Configured(), Configured(), nn.Module()
    base.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(2, 2)}) for _ in range(2))
    head.model, around.inside = base, head
    wrapped = Answering(head)
    prefixes = {base: "", head: "model.", around: "inside.model.", wrapped: "model.model."}
    for model, prefix in prefixes.items():
        assert tensor_plan(model) == {f"{prefix}layers.*.up": "colwise"}
        assert layers_of(model).heads == 2, prefix
    assert layers_of(head).is_divided
    more = {"num_key_value_heads": None, "num_attention_heads": 4}
    base.config = head.config = SimpleNamespace(
        base_model_tp_plan={"blocks.*.up": "colwise"}, **more
    )
    assert not layers_of(head).is_divided
    assert layers_of(head).heads == 4


def test_a_model_of_no_modules_is_one_layer():
    assert [each.parameters for each in layers_of(nn.Linear(2, 2)).layers] == [6]
