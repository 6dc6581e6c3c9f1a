"""What a task gives is looked at before training: batches, figures, samples, labels, the model."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from edgetrain.errors import EdgetrainError, TaskError
from edgetrain.jobs.lookup import rehearse, work_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import parse as job_of
from edgetrain.tasks import batches_from
from edgetrain.tasks.draws import figures_of
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.held import spelled
from edgetrain.tasks.partition import partition
from edgetrain.training.simulated import simulation
from edgetrain.vectors.noise import system

X = torch.arange(14.0).unsqueeze(1)
FOURS = [(X[i : i + 4],) for i in range(0, 14, 4)]
"""Three batches, and a rest."""


class Given:
    """A task of given batches, figures and samples."""

    name, metric, better, target = "given", "loss", "lower", None

    def __init__(self, batches=None, figures=None, samples=14):
        self.given, self.figures, self.held = batches, figures or {"loss": 0.0}, samples

    def model(self):
        return torch.nn.Linear(1, 1)

    def samples(self, member, members):
        return self.held if member else 14

    def batches(self, member, members, batch, seed):
        return itertools.cycle(FOURS[:3]) if self.given is None else self.given()

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

    def evaluate(self, model):
        return self.figures


WORDS = ["members=2", "batch=4", "steps=10", "strategy=sync-sgd", "optimizer=sgd", "lr=0.001"]


def simulated(task, folder, batched=None):
    planned = plan(job_of({"task": spelled(task)}, [*WORDS, "pace_s=0.01"]))
    return simulation.run(planned, folder, batched=batched)


def firsts(task, count, start=0):
    found = itertools.islice(batches_from(task, 0, 2, 4, 0, start), count)
    return [float(batch[0][0]) for batch in found]


def test_an_epoch_of_batches_begins_again_without_its_rest():
    loader = DataLoader(TensorDataset(X), batch_size=4)
    for given in (lambda: FOURS, lambda: loader, lambda: tuple(FOURS)):
        assert firsts(Given(given), 7) == [0, 4, 8, 0, 4, 8, 0]
        assert firsts(Given(given), 3, start=5) == [8, 0, 4]
        rehearse(job_of({}, WORDS), Given(given))


@pytest.mark.parametrize(("accumulate", "said"), [(1, "5 of 10"), (2, "2 of 10")])
def test_batches_that_end_say_after_how_many_steps(accumulate, said):
    job = job_of({}, [*WORDS, f"accumulate={accumulate}"])
    task = Given(lambda: iter([FOURS[0]] * 5))
    model = task.model()
    work = work_of(job, task, model, FlatModel(model), 0, system)
    with pytest.raises(TaskError, match=f"batches of task 'given' ended after {said} steps"):
        list(iter(work.backward, None))


@pytest.mark.parametrize("batched", [False, True])
def test_so_they_do_in_a_simulation(batched, tmp_path):
    with pytest.raises(EdgetrainError, match="task 'given' ended after 5 of 10 steps"):
        simulated(Given(lambda: iter([FOURS[0]] * 5)), tmp_path, batched)


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (lambda: iter([(X[:3],), *FOURS]), "gives a tuple of 3 samples, not 4"),
        (lambda: [(X[:3],)], "gives a tuple of 3 samples, not 4"),
        (lambda: iter([*FOURS[2:], *FOURS]), None),
        (lambda: None, "gives a NoneType of 0 samples"),
        (lambda: iter([{"x": X[:4]}]), "gives a dict"),
        (lambda: iter([(X[:4].numpy(),)]), "gives a tuple of 0 samples"),
        (lambda: iter([()]), "gives a tuple of 0 samples"),
        (lambda: iter([(torch.tensor(4.0),)]), "gives a tuple of 0 samples"),
        (lambda: [], "ended after 0 batches"),
        (lambda: iter([X[:4]]), None),
        (lambda: iter([[X[:4]]]), None),
    ],
)
def test_what_is_no_batch_is_a_line_before_training(batches, said):
    if said is None:
        rehearse(job_of({}, WORDS), Given(batches))
        return
    with pytest.raises(TaskError, match=f"task 'given'.*{said}") as refused:
        rehearse(job_of({}, WORDS), Given(batches))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ([0.5], "returns a list"),
        (0.5, "returns a float"),
        ({"accuracy": 1.0}, "'accuracy', and not its metric 'loss'"),
        ({"loss": "low"}, "'loss' = 'low'"),
        ({"loss": None}, "'loss' = None"),
        ({"loss": [1.0, 2.0]}, "'loss' = "),
        ({"loss": torch.ones(2)}, "'loss' = "),
        ({"loss": 1.0, "best": {}}, "'best' = "),
    ],
)
def test_figures_are_numbers_by_name(figures, said):
    with pytest.raises(TaskError, match=f"task 'given': evaluate.*{said}") as refused:
        figures_of(Given(figures=figures), torch.nn.Linear(1, 1))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "loss", [math.nan, 3, np.float32(1.5), torch.tensor(0.5), np.array(2.0), -1.0]
)
def test_what_is_a_number_is_taken(loss):
    assert (
        figures_of(Given(figures={"loss": loss}), torch.nn.Linear(1, 1)) == {"loss": loss}
        or loss != loss
    )


@pytest.mark.parametrize(
    ("figures", "said"), [({"accuracy": 1.0}, "not its metric"), ({"loss": math.inf}, "inf")]
)
def test_figures_are_looked_at_before_the_first_step(figures, said, tmp_path):
    task = Given(figures=figures)
    task.loss = lambda model, batch: pytest.fail("a step is taken")
    with pytest.raises(TaskError, match=said):
        simulated(task, tmp_path)


@pytest.mark.parametrize("samples", [0, -1, 0.0])
def test_a_member_without_samples_is_refused_by_the_name_of_what_says_so(samples):
    with pytest.raises(TaskError, match=rf"samples\(1, 2\) of task 'given' returns {samples!r}"):
        rehearse(job_of({}, WORDS), Given(samples=samples))


def test_a_lazy_layer_is_refused_before_training(tmp_path):
    task = Given()
    task.model = lambda: torch.nn.LazyLinear(1)
    with pytest.raises(TaskError, match="lazy layer: its tensor 'weight' has no shape yet"):
        simulated(task, tmp_path)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.eye(5)[np.arange(100) % 5], "have the shape (100, 5)"),
        (np.zeros((100, 1)), "have the shape (100, 1)"),
        (np.random.default_rng(0).normal(size=1000), "1000 values, which are no classes"),
        (np.arange(1000), "1000 values, which are no classes"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels, said):
    with pytest.raises(TaskError) as refused:
        partition("dirichlet(0.3)", labels, 4, 0)
    assert said in str(refused.value)
    shards = partition("iid", labels, 4, 0)
    assert sorted(np.concatenate(shards)) == list(range(len(labels)))


@pytest.mark.parametrize("labels", [np.arange(100) % 5 / 2, torch.arange(100) % 3, list("ab" * 50)])
def test_classes_of_any_type_are_dealt_out_once(labels):
    shards = partition("dirichlet(0.3)", labels, 4, 0)
    assert sorted(np.concatenate(shards)) == list(range(100))
