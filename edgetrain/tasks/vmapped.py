"""What taking many gradients at once with `torch.func.vmap` needs of a task and of torch."""

from __future__ import annotations

import contextlib

from torch import Tensor, nn

from edgetrain.tasks.protocol import Task


class LossModule(nn.Module):
    """The task's loss as a module, so that functional_call can put other parameters into it.

    The parameters' names begin with "model.".
    """

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, *batch: Tensor) -> Tensor:
        return self._task.loss(self.model, batch)


def batchable_attention() -> contextlib.AbstractContextManager[None]:
    """Within: attention as plain matrix products, as vmap has no rule for the fused kernels.

    Holds for the whole process: where several threads work, enter it once and not in each.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)
