"""Defects of groups that are planted in ranks, to see whether the check finds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import odd_models as odd
import torch
from torch import nn

from edgetrain.errors import EdgetrainError
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.placement.words import parse
from edgetrain.training.servers import checking
from edgetrain.training.servers.checking import check_group
from edgetrain.training.servers.owned import local_part
from edgetrain.training.servers.rank import prepare_rank
from edgetrain.training.servers.steps import Passes


def _is_second():
    import torch.distributed as dist

    return dist.get_rank() == 1


def _buffer(name, change):
    """Change the last buffer of this name that a rank has."""

    def plant(rank):
        for module in rank.held.modules:
            found = [b for n, b in module.named_buffers() if n.endswith(name)]
            if found:
                change(found[-1])

    return plant


def _modules(kind, change):
    def plant(rank):
        for module in rank.held.modules:
            for each in module.modules():
                if isinstance(each, kind):
                    change(each)

    return plant


def _gradients(change):
    """Change the gradients that a rank has after the backward pass."""

    def plant(rank):
        real = rank.steps.try_batch

        def changed(*given):
            found = real(*given)
            for own in rank.held.own:
                for name, parameter in own.items():
                    change(name, parameter)
            return found

        rank.steps.try_batch = changed

    return plant


def _scaled(ending, factor):
    def change(name, parameter):
        if name.endswith(ending) and parameter.grad is not None:
            local_part(parameter.grad).mul_(factor)

    return change


def _scaled_on_the_second(ending):
    return lambda name, parameter: _is_second() and _scaled(ending, 1.01)(name, parameter)


def _gets_zeros(name, parameter):
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)


def _untied(rank):
    rank.held.add_tied_gradients = lambda: None


def _swapped(rank):
    """Each micro-batch is judged by the targets of another."""
    real = Passes.backward

    def backward(self, batch):
        return real(self, (batch[0], batch[1].flip(0)))

    rank.steps.schedule.backward = backward.__get__(rank.steps.schedule)


def _computes(loss):
    """The group computes the loss of another subject than one process does."""

    def plant(rank):
        rank.steps.schedule.task = odd.Odd(loss)

    return plant


def _zeroed_on_the_second(buffer):
    if _is_second():
        buffer.zero_()


def _scaled_where_drawn(rank):
    rank.steps.schedule.task = odd.Odd("random mask")
    _gradients(_scaled("", 1.01))(rank)


def _halved_again(module):
    module.register_full_backward_hook(lambda own, into, out: tuple(g * 0.5 for g in into))


def _nan(buffer):
    buffer.fill_(torch.nan)


DEFECTS = {
    "a mask that is noise": ("shared mask", "data=2", _buffer("mask", nn.init.normal_)),
    "a mask that is NaN": ("shared mask", "tensor=2", _buffer("mask", _nan)),
    "a mask of a stage": ("shared mask", "pipeline=2", _buffer("mask", torch.Tensor.zero_)),
    "a table of one rank": ("shared mask", "data=2", _buffer("mask", _zeroed_on_the_second)),
    "a running mean from elsewhere": (
        "running mean", "tensor=2", _buffer("mean", lambda buffer: buffer.add_(1e-3)),
    ),
    "a counter that counts twice": (
        "running mean", "pipeline=2", _modules(odd.Running, lambda module: (
            module.register_forward_hook(lambda own, given, found: own.calls.add_(1) and None)
        )),
    ),
    "a hook of a tensor that is lost": (
        "tensor hook", "data=2",
        _modules(odd.Hooked, lambda module: setattr(module, "between", lambda hidden: hidden)),
    ),
    "a gradient that is not reversed": (
        "gradient reversal", "data=2 shard=2 zero=3",
        _modules(odd.Reversed, lambda module: setattr(
            module, "between", lambda hidden: hidden + 0.3 * hidden
        )),
    ),
    "a gradient that does not go straight through": (
        "straight-through", "tensor=2",
        _modules(odd.Straight, lambda module: setattr(
            module, "between", lambda hidden: (hidden * 8).round() / 8 + 0 * hidden
        )),
    ),
    "a loss of experts that is lost": (
        "experts", "data=2",
        _modules(nn.Module, lambda module: hasattr(module, "balance") and setattr(
            module, "balance", 0.0
        )),
    ),
    "a hook of a module that runs twice": (
        "module hooks", "pipeline=2", _modules(odd.Block, _halved_again),
    ),
    "a parameter that decays unused": ("unused parameter", "data=2", _gradients(_gets_zeros)),
    "tied copies that are not added up": ("tied", "pipeline=2", _untied),
    "a gradient of a model that draws": ("random mask", "data=2", _scaled_where_drawn),
    "a gradient without its mean": ("plain", "data=2", _gradients(_scaled("", 2.0))),
    "a penalty that is left out": ("penalty", "data=2", _computes("plain")),
    "a mean over a rank's own tokens": ("counted tokens", "data=2", _computes("counted tokens")),
    "negatives of a rank's own samples": (
        "in-batch negatives", "data=2", _computes("in-batch negatives"),
    ),
    "labels that a slice loses": ("shifted labels", "sequence=2", _computes("shifted labels")),
    "targets of other samples": ("plain", "pipeline=2 microbatches=2", _swapped),
    "biases that drift apart": (
        "plain", "tensor=2", _gradients(_scaled_on_the_second("attended.bias")),
    ),
}  # fmt: skip
"""What is planted: a subject of odd_models, a placement of two ranks, and how."""


def checked(defect: str, plants: bool = True, precision: str = "fp32") -> str:
    """What the check says of a group with a defect; all ranks call it. `plants`: or without it."""
    subject, words, plant = DEFECTS[defect]
    # The planner refuses some of these jobs: ranks train what they are told to.
    job = odd.job_of(subject if subject not in odd.LOSSES else "plain")
    job = replace(job, servers=replace(job.servers, precision=precision))
    rank = prepare_rank(job, task_of(job), parse(words), torch.device("cpu"))
    task = odd.Odd(subject)
    if plants:
        plant(rank)
    else:
        rank.steps.schedule.task = task
    try:
        return check_group(job, task, rank)
    except EdgetrainError as error:
        return str(error)


def left_out(subject: str, share: float, words: str) -> str:
    """What the check says where it may take this share of main memory."""
    job = odd.job_of(subject if subject != "noise" else "plain")
    task: Any = task_of(job) if subject != "noise" else Noisy()
    rank = prepare_rank(job, task, parse(words), torch.device("cpu"))
    before, checking.SHARE = checking.SHARE, share
    try:
        return check_group(job, task, rank)
    finally:
        checking.SHARE = before


class Noisy(odd.Odd):
    """A task whose model adds noise in each block; half of its loss is drawn."""

    def model(self):
        found = super().model()
        for block in found.blocks:
            block.register_forward_hook(lambda own, given, out: out + torch.rand_like(out) * 0.1)
        return found

    def loss(self, model, batch):
        scores, targets = model(batch[0]).flatten(0, 1), batch[1].flatten()
        each = torch.nn.functional.cross_entropy(scores, targets, reduction="none")
        return each.mean() + (each * torch.rand(len(each), dtype=each.dtype)).mean()


class Mixed(odd.Odd):
    """A task whose model mixes positions where no rule of the planner looks."""

    def model(self):
        found = super().model()
        found.blocks[0].register_forward_hook(lambda own, given, out: out + out.roll(1, 1))
        return found
