"""The exchange behind an optimizer's own step: a loop calls `optimizer.step()` as it always did.

torch calls hooks before and after every `Optimizer.step`. Whatever steps the optimizer (a loop, a
GradScaler, Accelerate, Lightning) therefore exchanges, and no line can be forgotten. Nothing here
knows a strategy, a message or a hub.

    what happens                        before the step                     after it
    `step()`                            `begin`                             `end` (the last one's)
    `step(closure)`                     the closure, then `begin`           `end`
    a GradScaler steps                  unscale, then `begin`               `end`
    a GradScaler skips the step         no gradients, `begin` adding none   `end`
    `exchange` was called               nothing more                        `end`
    a subclass calls `super().step()`   nothing: within another step        nothing
    an optimizer that did not join      nothing                             EdgetrainError, unless a
                                                                            step above was within it

A GradScaler leaves out the step of an optimizer whose gradients are not finite, so that no hook
would be called and this member would fall behind the others by a step. One that says of itself, as
torch's fused optimizers do, that it takes care of scales is always stepped; the hooks unscale for
it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from edgetrain.errors import Diverged, EdgetrainError, refuse_first
from edgetrain.training.member.optimizers import parameters_of

Optimizer = torch.optim.Optimizer

_SCALES = "_step_supports_amp_scaling"
"""torch's mark of an optimizer that a GradScaler steps in any case."""


class Begin(Protocol):
    """Hook before a step."""

    def __call__(self, optimizer: Optimizer, *, adds: bool) -> None:
        """The gradients of this optimizer's parameters are there. `adds` = False: there are none,
        because the step was skipped."""


class StepHooks:
    """Calls `begin` before the steps of these optimizers, and `end` after those of the last one.

    A loop steps its optimizers, or calls `step` of these hooks. With both there would be two steps
    for one batch: EdgetrainError. So is a step of any other optimizer on their parameters, which
    would be no step of the member: one that a loop made anew, for another rate.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], begin: Begin, end: Callable[[], None]
    ) -> None:
        self.optimizers = tuple(optimizers)
        self._joined = [len(parameters_of(each)) for each in self.optimizers]
        self._begin, self._end = _untraced(begin), _untraced(end)
        self._outer: FrameType | None = None
        """The step under way. One within it is part of it."""
        self._exchanged: dict[int, bool] = {}
        """Optimizers (by `id`) whose next step has begun already; whether their gradients were
        finite."""
        self._is_calling = self._is_paused = False
        self._call = ""
        """Which call the loop uses."""
        self._begun = self._begun_before = 0
        """Steps that began so far, and when the last step of an optimizer that did not join did."""
        self._removes: list[Callable[[], None]] = [functools.partial(_JOINED.discard, self)]
        _JOINED.add(self)
        for optimizer in self.optimizers:
            self._removes += [
                optimizer.register_step_pre_hook(self._before).remove,
                optimizer.register_step_post_hook(self._after).remove,
            ]
            if not getattr(optimizer, _SCALES, False):
                setattr(optimizer, _SCALES, True)
                self._removes.append(functools.partial(delattr, optimizer, _SCALES))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers; what the last one returns."""
        self._is_calling = True
        try:
            for optimizer in self.optimizers:
                loss = optimizer.step() if closure is None else optimizer.step(closure)
        finally:
            self._is_calling = False
        return loss

    @torch.no_grad()
    def exchange(self, optimizers: Sequence[Optimizer]) -> None:
        """Begin the next step of these optimizers now. Gradients that are not finite add nothing: a
        GradScaler leaves the step out. ConfigError for an optimizer that did not join, or whose
        gradients have been exchanged for this step."""
        for each in optimizers:
            refuse_first(
                (all(each is not joined for joined in self.optimizers),
                 f"this {type(each).__name__} did not join", "name one that did, or none"),
                (id(each) in self._exchanged, "the gradients of this step are exchanged already",
                 "call exchange_gradients() once a step, between the last backward() and step()"),
            )  # fmt: skip
            self._check_groups()
            found = (p.grad for p in parameters_of(each) if p.grad is not None)
            is_finite = all(bool(g.to_dense().isfinite().all()) for g in found)
            self._start(each, adds=is_finite)
            self._exchanged[id(each)] = is_finite

    def _has_begun(self, optimizer: Optimizer, is_early: bool = False, skips: bool = False) -> bool:
        """Whether `exchange` began this step. ConfigError where that `is_early`. Diverged for
        gradients that were not finite, unless a scaler `skips` the step, too."""
        is_finite = self._exchanged.pop(id(optimizer), None)
        if is_finite is None:
            return False
        refuse_first(
            (is_early, "gradients were exchanged before they were computed, or unscaled",
             "exchange_gradients() in the closure, or behind scaler.unscale_(optimizer)"),
        )  # fmt: skip
        if not (is_finite or skips):
            raise Diverged(
                "the gradient of this step is not finite",
                "training diverged on this member: lower the learning rate, or clip gradients",
            )
        return True

    def _start(self, optimizer: Optimizer, *, adds: bool) -> None:
        if not adds:
            for parameter in parameters_of(optimizer):
                parameter.grad = None
        self._begin(optimizer, adds=adds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within: steps are only steps."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def remove(self) -> None:
        """Leave the optimizers as they were. Works twice."""
        removes, self._removes = self._removes, []
        for remove in removes:
            remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._is_paused or self._is_within():
            return None
        self._check("member.step()" if self._is_calling else "optimizer.step()")
        self._check_groups()
        self._outer = sys._getframe(1)
        self._begun += 1
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        is_early = closure is not None or getattr(optimizer, "grad_scale", None) is not None
        skips = _skips(optimizer)
        if self._has_begun(optimizer, is_early, skips):
            return None
        if closure is None:
            self._start(optimizer, adds=not skips)
            return None

        def computed() -> Any:
            loss = closure()
            if not self._has_begun(optimizer):
                with torch.no_grad():
                    self._begin(optimizer, adds=True)
            return loss

        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], computed, *args[2:]), rest

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._outer is sys._getframe(1):
            self._outer = None
            if optimizer is self.optimizers[-1]:
                self._end()

    def before_other(self, optimizer: Optimizer) -> None:
        if self._is_stray(optimizer):
            self._begun_before = self._begun

    def after_other(self, optimizer: Optimizer) -> None:
        """Any optimizer of the process has stepped: EdgetrainError if it should have joined."""
        if self._begun == self._begun_before and self._is_stray(optimizer):
            raise EdgetrainError(
                f"a {type(optimizer).__name__} that did not join stepped this member's parameters: "
                "the fleet would not see the step",
                "change the rate of the one that joined (its param_groups, or a schedule); or "
                "close the member, and join with the new one",
            )

    def _is_stray(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that did not join steps parameters of those that did, and not as a
        part of their own step."""
        if self._is_paused or self._outer is not None:
            return False
        if any(optimizer is each for each in self.optimizers):
            return False
        joined = {id(p) for each in self.optimizers for p in parameters_of(each)}
        return any(id(p) in joined for p in parameters_of(optimizer))

    def _check(self, call: str) -> None:
        if self._call not in ("", call):
            raise EdgetrainError(
                f"this loop calls {self._call} and {call}: that is two steps for one batch",
                f"leave out one of them; {self._call} alone exchanges, too",
            )
        self._call = call

    def _check_groups(self) -> None:
        for optimizer, joined in zip(self.optimizers, self._joined, strict=True):
            if (now := len(parameters_of(optimizer))) > joined:
                raise EdgetrainError(
                    f"the optimizer has {now} parameters, and had {joined} when it joined: the "
                    "others would be trained on this member alone",
                    "close the member, and join again with the model as it is now",
                )

    def _is_within(self) -> bool:
        """Whether another step is under way. One that raised is over, and no hook was called."""
        frame: FrameType | None = sys._getframe(2)
        while self._outer is not None and frame is not None:
            if frame is self._outer:
                return True
            frame = frame.f_back
        self._outer = None
        return False


def _untraced(act: Callable[..., Any]) -> Callable[..., Any]:
    """An act that torch.compile leaves alone, where a loop compiles its step, and the hooks with
    it. Making an optimizer imports torch._dynamo; without it nothing is compiled."""
    if (dynamo := sys.modules.get("torch._dynamo")) is None:
        return act
    dynamo.trace_rules.add(__name__)
    return torch.compiler.disable(act)  # type: ignore[no-any-return, no-untyped-call]


_JOINED: set[StepHooks] = set()


def _before_any(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for hooks in tuple(_JOINED):
        hooks.before_other(optimizer)


def _after_any(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for hooks in tuple(_JOINED):
        hooks.after_other(optimizer)


# Once, not for each: torch goes through its hooks while another thread's member may come or go.
register_optimizer_step_pre_hook(_before_any)
register_optimizer_step_post_hook(_after_any)


def _skips(optimizer: Optimizer) -> bool:
    """Unscale gradients that a GradScaler has left to this optimizer. Whether it would not have
    stepped: a gradient is not finite."""
    found: Any = getattr(optimizer, "found_inf", None)
    scale: Any = getattr(optimizer, "grad_scale", None)
    if found is None:
        return False
    optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]
    if scale is not None:
        factor = scale.double().reciprocal().float()  # as GradScaler.unscale_ does
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device, parameter.grad.dtype))
    return bool(found)
