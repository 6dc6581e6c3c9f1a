"""ZeRO-1: each parameter's optimizer state is on one rank of several that hold the parameter.

torch's `ZeroRedundancyOptimizer` needs no DistributedDataParallel for it: it is given plain tensors
that share memory with this rank's parameters, and their gradients, once `fully_shard` has added
these up. The owner of a parameter steps it and broadcasts it.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

with warnings.catch_warnings():
    # torch scripts other optimizers of this folder, and warns of that itself.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


class OwnedOptimizer(ZeroRedundancyOptimizer):
    """An optimizer over the ranks of `group`, which all hold its parameters. `state_of` has what
    this rank owns of it."""

    def __init__(self, like: Optimizer, group: dist.ProcessGroup) -> None:
        """Of the class of `like`, with its parameters and the settings of its groups. All ranks of
        the group call it."""
        self._parameters = [p for each in like.param_groups for p in each["params"]]
        self._views = {p: nn.Parameter(local_part(p.detach())) for p in self._parameters}
        taken = inspect.signature(type(like)).parameters
        settings = {key: value for key, value in like.defaults.items() if key in taken}
        groups = [
            {**each, "params": [self._views[p] for p in each["params"]]}
            for each in like.param_groups
        ]
        super().__init__(groups, type(like), process_group=group, **settings)
        self.register_step_pre_hook(self._give_gradients)

    def _give_gradients(self, *unused: Any) -> None:
        for parameter, view in self._views.items():
            view.grad = None if parameter.grad is None else local_part(parameter.grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for parameter in self._parameters:
            parameter.grad = None

    def owned_state(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        """The state of a parameter; None: another rank owns it."""
        view = self._views[parameter]
        mine = (p for group in self.optim.param_groups for p in group["params"])
        if not any(each is view for each in mine):
            return None
        found: dict[str, Any] = self.optim.state[view]
        return found


def state_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any] | None:
    """What an optimizer keeps of a parameter on this rank; None: another rank has it."""
    if isinstance(optimizer, OwnedOptimizer):
        return optimizer.owned_state(parameter)
    found: dict[str, Any] = optimizer.state[parameter]
    return found


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(parameter: Tensor, part: Tensor) -> Tensor:
    """A value of the optimizer as the parameter itself is divided, sharing memory with `part`."""
    if isinstance(part, DTensor) or not isinstance(parameter, DTensor):
        return part
    if part.shape != parameter.to_local().shape:
        return part  # a number, or means of rows or columns, which all ranks have
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
