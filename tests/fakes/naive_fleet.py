"""Fleets written from the papers alone: plain torch, one thread a member, nothing of edgetrain.

    fedavg      after every K steps: params = params at the round's start + weighted mean of what
                the members' optimizers did to theirs (McMahan et al., 2017, algorithm 1)
    dga         the same, but D steps later: params += mean_r - own_r (Zhu et al., NeurIPS 2021)
    sync-sgd    each member's optimizer steps with the mean of all members' gradients

`NaiveMember` stands where `edgetrain.join` stands in a loop.
"""

from __future__ import annotations

import functools
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

Tensors = list[torch.Tensor | None]
NOTHING = None
"""The contribution of a member whose scaler skipped the step."""


PATIENT = {"heartbeat_s": 1.0, "lost_after_s": 30.0}
"""Policy of a hub whose fleet is compared with one of these: on a busy machine it takes no member
for lost, which would go on without replies that the hub does not keep."""


class Table:
    """Where members lay down what they contribute, and wait for what the others do."""

    def __init__(self, members: int) -> None:
        self.members = members
        self._given: dict[int, dict[int, Tensors | None]] = defaultdict(dict)
        self._changed = threading.Condition()

    def give(self, exchange: int, member: int, tensors: Tensors | None) -> None:
        """Lay down the contribution of a member to an exchange."""
        with self._changed:
            self._given[exchange][member] = tensors
            self._changed.notify_all()

    def mean(self, exchange: int, weights: Sequence[float]) -> Tensors:
        """The weighted mean of an exchange, in float64; waits for all. A tensor that nobody gave
        is None, one that some gave is zeros for the others. []: all gave nothing."""
        with self._changed:
            is_whole = lambda: len(self._given[exchange]) == self.members  # noqa: E731
            assert self._changed.wait_for(is_whole, 60), f"exchange {exchange} lacks members"
            given = {m: t for m, t in self._given[exchange].items() if t is not NOTHING}
        total = sum(weights[m] for m in given)
        found: Tensors = []
        for each in zip(*given.values(), strict=True):
            parts = [
                weights[m] / total * t.double()
                for m, t in zip(given, each, strict=True)
                if t is not None
            ]
            found.append(torch.stack(parts).sum(0) if parts else None)
        return found


class NaiveMember:
    """One member: `join` it to a model and its optimizers, whose `step` it takes over."""

    def __init__(
        self,
        table: Table,
        index: int,
        strategy: str,
        *,
        local_steps: int = 1,
        delay: int = 0,
        weights: Sequence[float] = (),
    ) -> None:
        """`weights` are the members', for fedavg."""
        self.table, self.index, self.is_sync = table, index, strategy == "sync-sgd"
        self.local_steps, self.delay = local_steps, delay
        self.weights = weights if strategy == "fedavg" else [1.0] * table.members
        self.steps = self.exchanges = 0
        self.is_idle = False
        """Whether this round has none of this member's steps."""

    def join(self, model: torch.nn.Module, optimizer: Any) -> Self:
        """Stand between the loop and the optimizers' own steps."""
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self.own_steps = [each.step for each in self.optimizers]
        self.before = [p.detach().clone() for p in self.params]
        self.waiting: list[tuple[int, int, Tensors]] = []
        """(exchange, step after which its mean is due, own contribution)"""
        for number, each in enumerate(self.optimizers):
            each.step = types.MethodType(self._replace(number), each)
        return self

    def _replace(self, number: int) -> Callable[..., Any]:
        own_step = self.own_steps[number]

        @functools.wraps(own_step)  # a scheduler looks for its mark
        def step(optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            own = [p.grad for p in _params_of(optimizer)]
            self._step(number, NOTHING if self._unscale(optimizer) else own)
            return loss

        return step

    def skip(self) -> None:
        """A step that a scaler has left out: this member contributes nothing to it. With sync-sgd
        it steps as all others."""
        for number, _ in enumerate(self.optimizers):
            self._step(number, NOTHING)

    def _step(self, number: int, own: Tensors | None) -> None:
        optimizer = self.optimizers[number]
        if self.is_sync:
            self._average_gradients(optimizer, own)
        if self.is_sync or own is not NOTHING:
            self.own_steps[number]()
        if number == len(self.optimizers) - 1:
            self._end_step()

    @staticmethod
    def _unscale(optimizer: Any) -> bool:
        """Do what a GradScaler leaves to a fused optimizer; True: this step is to be skipped."""
        scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", 0)
        if scale is not None:
            for p in _params_of(optimizer):
                p.grad /= scale
            optimizer.grad_scale = optimizer.found_inf = None
        return bool(found)

    def _average_gradients(self, optimizer: torch.optim.Optimizer, own: Tensors | None) -> None:
        copies = NOTHING if own is NOTHING else [g if g is None else g.to_dense() + 0 for g in own]
        self.table.give(self.exchanges, self.index, copies)
        params = _params_of(optimizer)
        means = self.table.mean(self.exchanges, self.weights) or [None] * len(params)
        self.exchanges += 1
        for p, mean in zip(params, means, strict=True):
            p.grad = None if mean is None else mean.to(p.dtype)

    def _end_step(self) -> None:
        self.steps += 1
        if not self.is_sync:
            if self.steps % self.local_steps == 0:
                self._submit()
            while self.waiting and self.waiting[0][1] <= self.steps:
                self._correct()

    def stay(self, steps: int) -> None:
        """Take part without contributing until the fleet has taken this many steps. What is in no
        contribution yet is contributed first."""
        while self.steps < steps:
            self.is_idle = self.is_sync or self.is_idle or self.steps % self.local_steps == 0
            self.skip()

    @torch.no_grad()
    def _submit(self) -> None:
        own: Tensors = [p - before for p, before in zip(self.params, self.before, strict=True)]
        self.before = [p.clone() for p in self.params]
        self.table.give(self.exchanges, self.index, NOTHING if self.is_idle else own)
        self.waiting.append((self.exchanges, self.steps + self.delay, own))
        self.exchanges += 1

    @torch.no_grad()
    def _correct(self) -> None:
        exchange, _, owns = self.waiting.pop(0)
        means = self.table.mean(exchange, self.weights)
        for p, before, mean, own in zip(self.params, self.before, means, owns, strict=True):
            assert mean is not None
            assert own is not None
            p += mean - own
            before += mean - own

    def close(self) -> None:
        """Exchange what is left, and wait for every mean."""
        if not self.is_sync and self.steps % self.local_steps:
            self._submit()
        while self.waiting:
            self._correct()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()


class Alone:
    """What stands for a member where there is no fleet at all."""

    def join(self, model: torch.nn.Module, optimizer: Any) -> Self:
        """Nothing."""
        return self

    def close(self) -> None:
        """Nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing."""


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
