"""Privacy of single examples: each one's gradient is taken, clipped and summed, and noise is added.

The local work of a member under unit = "example". Nothing here knows strategies or messages: all
that comes after the noised gradient (optimizer, rounds, codecs, merging) only works on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.protocol import Batch, Picks, Task
from edgetrain.tasks.work import Local
from edgetrain.vectors.noise import SHY, Doubles, Gaussian, Source, chosen, normal

FLOATS = 1 << 22
"""Of gradients of single examples that are held at a time: 16 MB, and two or three times that."""

NORMALISED = (nn.modules.batchnorm._BatchNorm,)
"""Layers that mix the examples of a batch: what one of them does cannot be bounded."""


def work(
    job: Job, task: Task, model: nn.Module, flat: FlatModel, index: int, source: Source
) -> Local:
    """The private work of one member. ConfigError for a model or a task that does not allow it."""
    mixing = [name for name, layer in model.named_modules() if isinstance(layer, NORMALISED)]
    if mixing:
        raise ConfigError(
            f"privacy.unit = 'example': layer '{mixing[0]}' normalises over the batch, so that one "
            "example changes the gradients of the others",
            "use GroupNorm or LayerNorm, or unit = 'member'",
        )
    table = job.privacy
    lots = _poisson if table.sampling == "poisson" else _shuffled
    return PrivateWork(
        task,
        model,
        flat,
        lots(job, task, index, source),
        job.train.batch,
        Gaussian(table.clip, table.noise),
        source,
    )


def _poisson(job: Job, task: Task, index: int, source: Source) -> Iterator[Batch | None]:
    """Batches in which each example of the shard is with probability batch / samples, whatever the
    others are: what the accountant counts with. None: nobody is in this one."""
    if not isinstance(task, Picks):
        raise ConfigError(
            f"privacy.sampling = 'poisson': task '{job.task}' has no method `pick`, which gives "
            "samples by their number",
            "write it (docs/tasks.md), or say sampling = 'shuffle', which costs more epsilon",
        )
    members = job.fleet.members
    samples = task.samples(index, members)
    rate = min(1.0, job.train.batch / samples)
    rng = np.random.default_rng(int.from_bytes(source(16), "little"))

    def lots(picks: Picks) -> Iterator[Batch | None]:
        while True:
            places = chosen(samples, rate, source)
            yield picks.pick(index, members, places, rng) if len(places) else None

    return lots(task)


def _shuffled(job: Job, task: Task, index: int, source: Source) -> Iterator[Batch | None]:
    """The task's own batches, in which an example is once in a pass over the shard."""
    members, batch = job.fleet.members, job.train.batch
    samples = task.samples(index, members)
    if batch > samples:
        raise ConfigError(
            f"train.batch = {batch} of a shard of {samples}: an example would be in it twice",
            f"with sampling = 'shuffle' a batch is at most {samples}",
        )
    return task.batches(index, members, batch, job.seed)


class _Loss(nn.Module):
    """The task's loss as a module, so that functional_call can put other parameters into it."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, *batch: Tensor) -> Tensor:
        return self._task.loss(self.model, batch)


class PrivateWork:
    """A `Local` whose gradient is (sum of clipped gradients of examples + noise) / lot.

    DP-SGD (Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, algorithm 1): one
    clip over all parameters together, a noise of standard deviation noise x clip on the sum. `lot`
    is the expected size of a batch: dividing by the true one would tell it. An example whose
    gradient is not finite counts as none. The sum is made in float64.
    """

    takes_many = False

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        flat: FlatModel,
        lots: Iterator[Batch | None],
        lot: int,
        mechanism: Gaussian,
        source: Source,
    ) -> None:
        self._task, self._model, self._flat = task, model, flat
        self._lots, self._lot, self._mechanism, self._source = lots, lot, mechanism, source
        module = _Loss(task, model)
        self._module = module

        def loss(parameters: dict[str, Tensor], example: Batch) -> tuple[Tensor, Tensor]:
            one = tuple(part.unsqueeze(0) for part in example)
            found: Tensor = torch.func.functional_call(module, parameters, one)
            return found, found.detach()

        self._each = torch.func.vmap(
            torch.func.grad(loss, has_aux=True), in_dims=(None, 0), randomness="different"
        )

    def backward(self, ahead: int = 0) -> Callable[[], float]:
        """See Local. The loss is not noised: it is for this device only."""
        lot = next(self._lots)
        total = np.zeros(self._flat.elements)
        losses: list[float] = []
        if lot is not None:
            per = max(1, FLOATS // self._flat.elements)
            for start in range(0, len(lot[0]), per):
                losses += self._add(tuple(part[start : start + per] for part in lot), total)
        if self._mechanism.deviation:
            total += self._mechanism.deviation * normal(total.size, self._source)
        total /= self._lot
        self._flat.zero_grad()
        self._flat.gradient[:] = total
        self._flat.push_gradient()
        mean = float(np.mean(losses)) if losses else 0.0
        return lambda: mean

    def _add(self, batch: Batch, total: Doubles) -> list[float]:
        """total += the clipped gradients of these examples; their losses."""
        leaves = {
            f"model.{name}": parameter.detach()
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }
        with _batchable_attention():
            try:
                grads, losses = self._each(leaves, batch)
            except RuntimeError as error:
                raise ConfigError(
                    "privacy.unit = 'example': the gradients of single examples cannot be taken of "
                    f"this model: {' '.join(str(error).split())[:160]}",
                    "unit = 'member' asks nothing of the model",
                ) from None
        count = len(batch[0])
        rows = {name: grads[f"model.{name}"].reshape(count, -1) for name, _, _ in self._flat.layout}
        scale = shares(list(rows.values()), self._mechanism.clip)
        for name, start, _ in self._flat.layout:
            row = rows[name].double()
            row = torch.where(scale[:, None] > 0, row, 0.0)  # 0 x nan is not 0
            summed = scale @ row
            total[start : start + summed.numel()] += summed.cpu().numpy()
        return [float(loss) for loss in losses if torch.isfinite(loss)]

    def evaluate(self) -> dict[str, float]:
        """See Local."""
        return self._task.evaluate(self._model)


def shares(rows: list[Tensor], clip: float) -> Tensor:
    """float64 [examples]: what each one's gradient, in pieces [examples, …], is multiplied with so
    that it is no longer than `clip`; 0 for one that is not finite."""
    squares = torch.stack([row.double().square().sum(1) for row in rows]).sum(0)
    lengths = squares.sqrt()
    scale = torch.where(lengths > clip, SHY * clip / lengths.clamp_min(1e-300), 1.0)
    return torch.where(lengths.isfinite(), scale, 0.0)


def _batchable_attention() -> contextlib.AbstractContextManager[None]:
    """Attention as plain matrix products: vmap has no rule for the fused kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)
