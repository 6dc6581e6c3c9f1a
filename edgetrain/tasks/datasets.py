"""`edgetrain.task`: a task from what people have already, a model, two data sets and a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from edgetrain.errors import TaskError
from edgetrain.tasks.own_data import FigureSums, quotients
from edgetrain.tasks.partition import Sharded, Shards, parse_partition
from edgetrain.tasks.protocol import Batch, device_of, evaluating


def task(
    model: Callable[[], nn.Module] | nn.Module,
    *,
    train: Any,
    test: Any,
    loss: Callable[..., Tensor] = F.cross_entropy,
    metric: str | Callable[[Tensor, Tensor], Any] = "accuracy",
    better: str = "higher",
    label: str = "label",
    columns: Mapping[str, Sequence[Any]] | None = None,
    partition: str = "iid",
    seed: int = 0,
    name: str = "task",
) -> DataTask:
    """Make a task (`edgetrain.tasks.Task`) from a model, two data sets and a loss.

    `model`: a module, copied for each member, or a function making one. `train` and `test`: tuples
    of arrays or tensors, the targets last; or torch Datasets of such tuples, or of dictionaries
    (Hugging Face), with the target under the key `label`. `loss(outputs, targets)`: a mean over the
    batch. `metric`: "accuracy", "loss", or a function of outputs and targets, averaged over the
    samples of the test set. `partition` and `seed` divide `train` among members
    (docs/how-to/tasks.md); "by(writer)" uses `columns["writer"]`, or the data set's own column.
    Raises TaskError.
    """
    return DataTask(
        name, model, (_dataset(train), _dataset(test)), loss, metric, better, label,
        columns or {}, partition, seed,
    )  # fmt: skip


def _dataset(data: Any) -> Any:
    if isinstance(data, tuple | list) and not isinstance(data[0], tuple | dict):
        lengths = [len(each) for each in data]
        if len({*lengths}) > 1 or len(data) < 2:
            raise TaskError(f"arrays of {lengths} rows", "inputs and targets, as many of each")
        data = TensorDataset(*map(torch.as_tensor, data))
    if not len(data):
        raise TaskError("a data set without samples", "one or more")
    return data


class DataTask(Sharded):
    """See `task`. Batches are inputs, then targets."""

    target, held_out_batch = None, 256

    def __init__(
        self,
        name: str,
        model: Callable[[], nn.Module] | nn.Module,
        data: tuple[Any, Any],
        loss: Callable[..., Tensor],
        metric: str | Callable[[Tensor, Tensor], Any],
        *rest: Any,
    ) -> None:
        self.better, self._label, columns, partition, seed = rest
        self.name, self._model, self._loss, self._measure = name, model, loss, metric
        self._train, self._test = data
        self.metric = metric if isinstance(metric, str) else metric.__name__
        if self.metric == "loss":
            self.better = "lower"
        elif self.metric != "accuracy" and isinstance(metric, str):
            raise TaskError(f"metric = {metric!r}", "'accuracy', 'loss', or a function")
        chosen, labels = parse_partition(partition), np.zeros(len(self._train), np.int64)
        if chosen.name not in ("iid", "shared", "given", "by") or chosen.argument == "label":
            labels = self._labels()
        elif chosen.name == "by" and chosen.argument not in columns:
            own = _column(self._train, chosen.argument)
            columns = columns if own is None else {chosen.argument: own}
        self.shards = Shards(labels, partition, seed, columns)

    def _labels(self) -> NDArray[np.int64]:
        """The target of each training sample. Reads them all where the data set does not say."""
        data = self._train
        if isinstance(data, TensorDataset):
            return np.asarray(data.tensors[-1])
        for name in ("targets", "labels", self._label):
            if (found := _column(data, name)) is not None:
                return np.asarray(found)
        return np.array([int(_gather(data, [i], self._label)[-1]) for i in range(len(data))])

    def model(self) -> nn.Module:
        made = self._model
        return copy.deepcopy(made) if isinstance(made, nn.Module) else made()

    def batch_of(self, draw: Any) -> Batch:
        return _gather(self._train, draw, self._label)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        device = device_of(model)
        *inputs, targets = (each.to(device) for each in batch)
        return self._loss(model(*inputs), targets)

    def measure(self, model: nn.Module, batch: Batch) -> FigureSums:
        """See protocol.Measures."""
        device = device_of(model)
        *inputs, targets = (each.to(device) for each in batch)
        outputs, count = model(*inputs), float(len(targets))
        sums = {"loss": float(self._loss(outputs, targets)) * count}
        if callable(self._measure):
            sums[self.metric] = float(self._measure(outputs, targets)) * count
        elif self.metric == "accuracy":
            sums["accuracy"] = float((outputs.argmax(1) == targets).sum())
        return {name: (value, count) for name, value in sums.items()}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            everything = self.in_chunks(
                np.arange(len(self._test)), lambda each: _gather(self._test, each, self._label)
            )
            return quotients(self.measure(model, batch) for batch in everything)


def _column(data: Any, name: str) -> Any:
    """An attribute of a data set, or a column, as Hugging Face's have; None: neither."""
    if name in getattr(data, "column_names", ()):
        return data[name]
    return getattr(data, name, None) if name.isidentifier() else None


def _gather(data: Any, indices: Any, label: str) -> Batch:
    """Inputs, then targets, of these samples, as tensors of their own."""
    if isinstance(data, TensorDataset):
        return tuple(each[torch.as_tensor(indices)] for each in data.tensors)
    samples = [data[int(index)] for index in indices]
    if isinstance(samples[0], Mapping):
        names = [key for key, value in samples[0].items() if not isinstance(value, str)]
        if label not in names:
            raise TaskError(
                f"samples have {', '.join(names)}", f"label = one of them, not '{label}'"
            )
        names.sort(key=lambda key: key == label)  # it comes last
        samples = [tuple(np.asarray(each[key]) for key in names) for each in samples]
    return tuple(default_collate(samples))
