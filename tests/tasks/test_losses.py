"""What a loss can be divided into is seen without its model, and without any word of its task."""

from __future__ import annotations

import loss_cases as cases
import pytest
import torch

from edgetrain.errors import TaskError
from edgetrain.jobs.lookup import task_of
from edgetrain.tasks import losses
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.losses import Look, look_at
from edgetrain.tasks.work import OneModel

SAMPLES, SLICES = "is not the mean of its samples' losses", "is not the mean of its slices' losses"


def look(of, says=False):
    task = task_of(cases.job_of(of, says=says))
    return look_at(task, next(task.batches(0, 1, 8, 0)))


@pytest.mark.parametrize(
    ("of", "found"),
    [
        ("plain", Look()),
        ("counted", Look(SAMPLES, SLICES)),
        ("masked", Look(SAMPLES, SLICES)),
        ("summed", Look(SAMPLES, SLICES)),
        ("negatives", Look(SAMPLES, SLICES)),
        ("shifted", Look("", SLICES)),
        ("penalised", Look(parameters="after")),
        ("penalised_first", Look(parameters="before")),
        ("two_calls", Look("calls the model with other than its samples' part", "",
                           "calls the model 3 times")),
        ("drawn", Look()),
        ("by_hand", Look(draws="passes a generator of its own to rand")),
    ],
)  # fmt: skip
def test_a_look_at_a_loss_finds_what_it_is_made_of(of, found):
    assert look(of) == found


def test_what_a_loss_asks_of_its_model_besides_is_named():
    assert "no attribute 'norm'" in look("inside").apart


@pytest.mark.parametrize("of", ["counted", "masked"])
def test_a_task_that_counts_can_be_divided(of):
    assert look(of, says=True) == Look()


def test_a_task_that_counts_something_else_is_found_out():
    assert look("negatives", says=True).samples == f"{SAMPLES} over what `counted` counts"


def test_a_large_model_is_looked_at_without_its_numbers(monkeypatch):
    monkeypatch.setattr(losses, "SMALL", 0)
    assert look("counted") == Look(SAMPLES, SLICES)


def test_a_few_positions_of_long_outputs_are_looked_at(monkeypatch):
    monkeypatch.setattr(losses, "MOST_ELEMENTS", 2 * 16 * 256)
    batch = next(task_of(cases.job_of("counted", "data.context=64")).batches(0, 1, 4, 0))
    for of, found in (("counted", Look(SAMPLES, SLICES)), ("plain", Look())):
        seen = []
        task = task_of(cases.job_of(of, "data.context=64"))
        task.loss = lambda model, batch, of=of, seen=seen: (
            seen.append(batch[0].shape), getattr(cases, of)(model, batch))[1]  # fmt: skip
        assert look_at(task, batch) == found
        assert seen[1:3] == [(4, 16), (2, 16)]


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ("elsewhere", "a scalar on meta"),
        ("a_number", "returns a float"),
        ("a_row", "a tensor of shape (8,)"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(of, said):
    with pytest.raises(TaskError) as refused:
        look(of)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("of", ["counted", "masked"])
def test_batches_that_are_added_up_count_as_much_as_a_task_counts(of):
    """Of a member: the gradient of three batches is that of one with all of their samples."""
    task = task_of(cases.job_of(of, says=True))
    drawn = task.batches(0, 1, 2, 0)
    batches = [next(drawn) for _ in range(3)]
    batches[1] = (batches[1][0], torch.zeros_like(batches[1][1]))  # of which nothing counts
    found = []
    for given in (batches, [tuple(torch.cat(each) for each in zip(*batches, strict=True))]):
        torch.manual_seed(0)
        model = task.model()
        flat = FlatModel(model)
        loss = OneModel(task, model, flat, iter(given), len(given)).backward()()
        flat.pull_gradient()
        found.append((loss, torch.from_numpy(flat.gradient.copy())))
    (loss, gradient), (whole, expected) = found
    assert loss == pytest.approx(whole, rel=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
