"""Trained models as files, and models without memory."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._pytree import tree_map

from edgetrain.errors import ConfigError
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.reading import load
from edgetrain.tasks import char_lm, digits, weights
from edgetrain.tasks.meta import outline_of

ONE = torch.tensor([0])


def changed(path, change):
    """The file again, with other values."""
    save_file({name: change(held) for name, held in load_file(path).items()}, path)


class Tied(nn.Module):
    """Tied parameters, a buffer that is kept and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inwards = nn.Linear(3, 3, bias=False)
        self.outwards = nn.Linear(3, 3, bias=False)
        self.outwards.weight = self.inwards.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("passing", torch.ones(2), persistent=False)


def test_a_model_comes_back_with_its_buffers_and_tied_parameters_once(tmp_path):
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    model.norm.running_mean += 3
    weights.save(model, tmp_path / weights.FILE)
    weights.load(other, tmp_path / weights.FILE)
    theirs = weights.tensors_of(other)
    assert all(torch.equal(t, theirs[name]) for name, t in weights.tensors_of(model).items())
    assert "outwards.weight" not in theirs
    assert "passing" not in theirs
    assert other.outwards.weight is other.inwards.weight


def test_a_buffer_that_grew_in_training_comes_back(tmp_path):
    model, other = Tied(), Tied()
    for each, rows in ((model, 5), (other, 0)):
        each.register_buffer("memory", torch.arange(3.0 * rows).reshape(rows, 3))
    weights.save(model, tmp_path / weights.FILE)
    weights.load(other.bfloat16(), tmp_path / weights.FILE)
    assert other.memory.dtype is torch.bfloat16
    assert other.memory.tolist() == model.memory.tolist()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "there is no such file"),
        (lambda path: path.write_bytes(b"no tensors at all"), "cannot be read"),
        (
            lambda path: weights.save(nn.Linear(3, 4), path),
            r"weight is \(4, 3\) there and \(2, 3\)",
        ),
        (lambda path: weights.save(nn.Linear(3, 2, bias=False), path), "has no 'bias'"),
        (lambda path: weights.save(nn.Bilinear(3, 2, 2), path), "weight is"),
        (lambda path: weights.save(Tied(), path), "has no 'bias'"),
        (lambda path: changed(path, lambda held: held.fill_(math.nan)), "has numbers that are no"),
        (lambda path: changed(path, lambda held: held.index_fill(-1, ONE, -math.inf)), "are none"),
        (
            lambda path: changed(path, lambda held: held.double() + 1e39),
            "has numbers that are none",
        ),
        (lambda path: changed(path, torch.Tensor.int), "torch.int32 there and torch.float32 in"),
        (lambda path: changed(path, torch.Tensor.bool), "torch.bool there and torch.float32 in"),
    ],
)
def test_a_file_of_another_model_is_refused_with_both_values(tmp_path, damage, said):
    path = tmp_path / weights.FILE
    weights.save(nn.Linear(3, 2), path)
    damage(path)
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=said):
        weights.load(model, path)


def test_a_file_in_half_precision_is_taken(tmp_path):
    path, model = tmp_path / weights.FILE, nn.Linear(3, 2)
    weights.save(model, path)
    changed(path, torch.Tensor.half)
    weights.load(model, path)
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight, load_file(path)["weight"].float())


def test_a_job_begins_from_a_file_beside_it(tmp_path):
    torch.manual_seed(5)
    model = digits().model()
    weights.save(model, tmp_path / weights.FILE)
    task = task_of(load(None, [f"start={weights.FILE}"]), tmp_path)
    assert all(map(torch.equal, task.model().parameters(), model.parameters()))
    assert task.samples(0, 1) == 1438


def test_an_outline_takes_no_memory_and_no_random_numbers():
    before = torch.get_rng_state()
    outline = outline_of(char_lm(width=4096, heads=32, layers=48))
    assert torch.equal(before, torch.get_rng_state())
    assert outline.parameters > 9e9
    assert not outline.problem


def test_a_model_that_cannot_be_outlined_is_built():
    class Stubborn:
        def model(self) -> nn.Module:
            found = nn.Linear(2, 2)
            if found.weight.device.type == "meta":
                raise RuntimeError("numbers, please")
            return found

    outline = outline_of(Stubborn())
    assert "numbers, please" in outline.problem
    assert outline.parameters == 6


@pytest.mark.parametrize("kept", [{"places": "tensor"}, ["tensor"], "tensor", "text"])
def test_a_model_that_keeps_tensors_without_a_name_is_built(kept):
    class Prompted(nn.Linear):
        """As peft's: tokens of a prompt are an entry of a dict."""

        def __init__(self):
            super().__init__(2, 2)
            self.kept = tree_map(lambda each: torch.arange(3) if each == "tensor" else each, kept)

    class Prompt:
        def model(self) -> nn.Module:
            return nn.Sequential(Prompted())

    outline = outline_of(Prompt())
    assert ("its '0.kept' is a list or dict with tensors" in outline.problem) == (
        not isinstance(kept, str)
    )
    assert outline.model[0].weight.is_meta == isinstance(kept, str)


def test_the_models_size_is_the_jobs():
    small, wide = char_lm().model(), char_lm(width=96, heads=6, layers=3, tied=False).model()
    text = torch.randint(0, 256, (2, 9))
    assert small(text).shape == wide(text).shape == (2, 9, 256)
    assert len(wide.blocks) == 3
    assert wide.scores.weight is not wide.bytes.weight
    wide.first_place = 55
    assert wide(text).shape == (2, 9, 256)


def test_pieces_of_a_transformer_are_the_whole():
    torch.manual_seed(0)
    whole = char_lm(layers=3).model()
    text = torch.randint(0, 256, (2, 9))
    hidden = text
    for piece in whole.pieces:
        part = char_lm(layers=3).model()
        part.load_state_dict(whole.state_dict())
        for used in whole.pieces:
            for name in used:
                if name not in piece:
                    parent, _, leaf = name.rpartition(".")
                    setattr(part.get_submodule(parent), leaf, None)
        hidden = part(hidden)
    assert torch.equal(hidden, whole(text))


def test_the_docs_lines_load_a_file_with_tied_parameters(tmp_path):
    page = (Path(__file__).parents[2] / "docs/reference/run-folder.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    trained = Tied()
    weights.save(trained, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="Missing key"):
        Tied().load_state_dict(load_file(tmp_path / "model.safetensors"))
    names = {"build_model": Tied}
    exec(code.replace("runs/20260131-142501-digits", str(tmp_path)), names)
    for mine, theirs in zip(names["model"].parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
