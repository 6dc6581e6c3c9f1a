"""The task without data: a model of the size asked for, that trains."""

from __future__ import annotations

import pytest
import torch

from edgetrain.errors import TaskError
from edgetrain.tasks import Task, load_task


def test_the_model_has_the_elements_asked_for_and_the_loss_falls():
    task = load_task("edgetrain.tasks:sized", {"elements": 321}, defaults={"seed": 3})
    assert isinstance(task, Task)
    torch.manual_seed(0)
    model = task.model()
    assert sum(p.numel() for p in model.parameters()) == 321
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    before = task.evaluate(model)["loss"]
    for _, batch in zip(range(20), task.batches(0, 2, 4, seed=0), strict=False):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    assert task.evaluate(model)["loss"] < before


@pytest.mark.parametrize("elements", [0, -1, 1 << 40])
def test_a_size_out_of_range_is_refused_with_the_range(elements):
    with pytest.raises(TaskError, match=f"elements = {elements}") as refused:
        load_task("edgetrain.tasks:sized", {"elements": elements})
    assert "1 to 1073741824" in refused.value.hint
