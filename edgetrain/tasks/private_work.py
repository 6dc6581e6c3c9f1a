"""Privacy of single examples: take the gradient of each one, clip it, add them up, add noise.

The local work of a member under unit = "example". All that comes after the noised gradient
(optimizer, rounds, codecs, merging) works on that gradient only, and does not know about privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edgetrain.errors import ConfigError
from edgetrain.tasks.draws import figures_of
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.protocol import Batch, Picks, Task, batches_from
from edgetrain.tasks.vmapped import LossModule, batchable_attention
from edgetrain.tasks.work import Evaluation, Local
from edgetrain.vectors.noise import SHY, Doubles, Gaussian, Source, chosen, normal

FLOATS = 1 << 22
"""Floats of single examples' gradients held at a time: 16 MB, and two or three times that."""

NORMALISED = (nn.modules.batchnorm._BatchNorm,)
"""Layers that mix the examples of a batch: what one of them does cannot be bounded."""


@dataclass(frozen=True)
class Sampling:
    """The examples in a member's batches. `batch` is their number, or its mean."""

    member: int
    members: int
    batch: int
    seed: int
    """Seed of the task's own batches. Poisson sampling takes the noise's source instead."""
    poisson: bool
    """Each example is in a batch with the same probability, whatever the others are. Otherwise
    batches are the task's own: an example is in one of them in each pass."""

    def lots(self, task: Task, source: Source) -> Iterator[Batch | None]:
        """The batches; None: a batch without examples. ConfigError if the task cannot give them."""
        return _poisson(self, task, source) if self.poisson else _shuffled(self, task)


def work(
    task: Task,
    model: nn.Module,
    flat: FlatModel,
    sampling: Sampling,
    mechanism: Gaussian,
    source: Source,
) -> Local:
    """The private work of one member. ConfigError for a model or a task that does not allow it."""
    mixing = [name for name, layer in model.named_modules() if isinstance(layer, NORMALISED)]
    if mixing:
        raise ConfigError(
            f"privacy.unit = 'example': layer '{mixing[0]}' normalises over the batch, so that one "
            "example changes the gradients of the others",
            "use GroupNorm or LayerNorm, or unit = 'member'",
        )
    lots = sampling.lots(task, source)
    return PrivateWork(task, model, flat, lots, sampling.batch, mechanism, source)


def _poisson(sampling: Sampling, task: Task, source: Source) -> Iterator[Batch | None]:
    """Batches that have each example with probability batch / samples."""
    if not isinstance(task, Picks):
        raise ConfigError(
            f"privacy.sampling = 'poisson': task '{task.name}' has no method `pick`, which gives "
            "samples by their number",
            "write it (docs/how-to/tasks.md), or set sampling = 'shuffle', for more epsilon",
        )
    samples = task.samples(sampling.member, sampling.members)
    rate = min(1.0, sampling.batch / samples)
    rng = np.random.default_rng(int.from_bytes(source(16), "little"))

    def lots(picks: Picks) -> Iterator[Batch | None]:
        while True:
            places = chosen(samples, rate, source)
            found = len(places) > 0
            yield picks.pick(sampling.member, sampling.members, places, rng) if found else None

    return lots(task)


def _shuffled(sampling: Sampling, task: Task) -> Iterator[Batch | None]:
    samples = task.samples(sampling.member, sampling.members)
    if sampling.batch > samples:
        raise ConfigError(
            f"train.batch = {sampling.batch} of a shard of {samples}: an example would be in it "
            "twice",
            f"with sampling = 'shuffle' a batch is at most {samples}",
        )
    return batches_from(task, sampling.member, sampling.members, sampling.batch, sampling.seed)


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
        module = LossModule(task, model)
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
        with batchable_attention():
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

    def evaluate(self, by: Evaluation = figures_of) -> dict[str, Any]:
        return by(self._task, self._model)


def shares(rows: list[Tensor], clip: float) -> Tensor:
    """float64 [examples]: what each one's gradient, in pieces [examples, …], is multiplied with so
    that it is no longer than `clip`; 0 for one that is not finite."""
    squares = torch.stack([row.double().square().sum(1) for row in rows]).sum(0)
    lengths = squares.sqrt()
    scale = torch.where(lengths > clip, SHY * clip / lengths.clamp_min(1e-300), 1.0)
    return torch.where(lengths.isfinite(), scale, 0.0)
