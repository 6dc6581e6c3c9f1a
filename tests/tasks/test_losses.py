"""What a loss can be divided into is seen without its model, and without any word of its task."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import loss_cases as cases
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from edgetrain.errors import ConfigError, TaskError
from edgetrain.jobs.lookup import check_loss, rehearse, task_of
from edgetrain.jobs.placement.bars import of_loss
from edgetrain.jobs.placement.words import parse
from edgetrain.jobs.reading import parse as job_of
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


# -- batches that are computed in parts -----------------------------------------------------------


class Rare:
    """Of 20 samples one has a class, a weight, or a place that is left out, of its own."""

    name, metric, better, target = "rare", "loss", "lower", None

    def __init__(self, of):
        generator = torch.Generator().manual_seed(0)
        self.of, self.x = of, torch.randn(200, 4, generator=generator)
        self.y = (torch.arange(200) % 20 == 17).long()

    def model(self):
        return Scored() if self.of == "inside" else torch.nn.Linear(4, 2)

    def samples(self, member, members):
        return len(self.x)

    def batches(self, member, members, batch, seed):
        for i in itertools.count():
            rows = torch.arange(i * batch, (i + 1) * batch) % 200
            yield self.x[rows], self.y[rows]

    def pick(self, member, members, chosen, rng):
        return self.x[chosen], self.y[chosen]

    def loss(self, model, batch):
        x, y = batch
        if self.of == "inside":
            return model(x, y)
        each = F.cross_entropy(model(x), y, reduction="none")
        weights = 1.0 + 19 * y
        return {
            "plain": lambda: each.mean(),
            "weighed": lambda: (each * weights).mean(),  # a plain mean of other losses
            "squeezed": lambda: F.mse_loss(model(x)[:, :1].squeeze(), y.float()),
            "weights": lambda: F.cross_entropy(model(x), y, torch.tensor([1.0, 20.0])),
            "ignored": lambda: F.cross_entropy(model(x), y, ignore_index=1),
            "masked": lambda: (each * (1 - y)).sum() / (1 - y).sum(),
            "chosen": lambda: each[y == 0].mean(),
            "summed": lambda: each.sum(),
            "harmonic": lambda: 1 / (1 / (each + 1)).mean(),
            "spread": lambda: each.mean() + each.std(correction=0),
        }[self.of]()

    def evaluate(self, model):
        return {"loss": 0.0}


class Scored(torch.nn.Module):
    """A model that computes its own loss."""

    def __init__(self):
        super().__init__()
        self.scores = torch.nn.Linear(4, 2)

    def forward(self, x, y):
        return F.cross_entropy(self.scores(x), y, ignore_index=1)


class Inside(torch.nn.Module):
    """Computes its own loss of tokens, [samples, positions]; what is `padded` is left out."""

    def __init__(self, padded):
        super().__init__()
        self.scores, self.padded = torch.nn.Embedding(8, 8), padded
        self.config = SimpleNamespace(pad_token_id=7)

    def forward(self, tokens, mask, labels):
        labels = {"mask": labels.masked_fill(mask == 0, -100), "own": tokens.masked_fill(
            tokens == 7, -100), "labels": labels, "none": labels}[self.padded]  # fmt: skip
        each = F.cross_entropy(self.scores(tokens).mT, labels, reduction="none")
        return SimpleNamespace(loss=each.mean() if self.padded == "none" else (
            each.sum() / (labels != -100).sum()))  # fmt: skip


class Padded(Rare):
    """A model that computes its loss, and batches of which none is padded."""

    def model(self):
        return Inside(self.of)

    def batches(self, member, members, batch, seed):
        while True:
            found = torch.randint(0, 7, (2, batch, 6))
            yield found[0], torch.ones(batch, 6, dtype=torch.bool), found[1]

    def loss(self, model, batch):
        return model(*batch).loss


class CountedInside(Padded):
    def counted(self, batch):
        return (batch[2] != -100).sum()


@pytest.mark.parametrize(
    ("task", "found"),
    [(Padded("none"), ""), *((Padded(of), SAMPLES) for of in ("mask", "own", "labels")),
     (CountedInside("labels"), ""),
     (CountedInside("mask"), f"{SAMPLES} over what `counted` counts")],
)  # fmt: skip
def test_a_loss_that_a_model_computes_is_tried_with_labels_left_out(task, found, monkeypatch):
    batch = next(task.batches(0, 1, 8, 0))
    assert look_at(task, batch).samples.replace("its parts'", "its samples'") == found
    monkeypatch.setattr(losses, "SMALL", 0)
    said = look_at(task, batch).unknown
    assert bool(said) == (not isinstance(task, CountedInside))
    (bar,) = [b for b in of_loss(Look(unknown=said or "?")) if not b.is_known]
    assert not bar.hits(parse("data=2"))
    assert bar.note.startswith("not known to be right are data, microbatches: ")


class Weighing(Rare):
    def counted(self, batch):
        return (1.0 + 19 * batch[1]).sum() if self.of == "weights" else (batch[1] != 1).sum()


ANOTHER = [
    "weights", "ignored", "masked", "chosen", "summed", "harmonic", "spread", "inside",
]  # fmt: skip
PARTS = {
    "train.accumulate = 4": ["accumulate=4"],
    "privacy.unit = 'example'": ["privacy=example", "noise=1"],
    "lbfgs computes slices": ["strategy=lbfgs"],
}


@pytest.mark.parametrize("where", PARTS)
@pytest.mark.parametrize("of", ["plain", "weighed", *ANOTHER])
def test_a_loss_that_is_another_one_in_parts_is_refused_before_the_first_step(of, where):
    job = job_of({}, ["batch=2", *PARTS[where]])
    if of not in ANOTHER:
        check_loss(job, Rare(of))
        return
    with pytest.raises(ConfigError) as refused:
        check_loss(job, Rare(of))
    assert str(refused.value).startswith(where)
    assert "\n" not in str(refused.value)
    check_loss(job_of({}, ["batch=2"]), Rare(of))  # which computes it whole


@pytest.mark.parametrize("of", ["weights", "ignored", "masked", "inside"])
def test_a_loss_whose_task_counts_is_itself_in_batches_that_are_added_up(of):
    check_loss(job_of({}, ["batch=2", "accumulate=4"]), Weighing(of))
    for where in ("privacy.unit = 'example'", "lbfgs"):
        words = next(each for key, each in PARTS.items() if key.startswith(where))
        with pytest.raises(ConfigError, match="counts other things than"):
            rehearse(job_of({}, ["batch=2", *words]), Weighing(of))


def patient(x):
    while (drawn := torch.rand(())) < 0.9:
        pass
    return x * drawn


DRAWS = {
    "noise": lambda x: x + torch.randn_like(x),
    "dropped": F.dropout,
    "times": lambda x: x * torch.randint(1, 9, (len(x), 1)),
    "mixed": lambda x: x + x[torch.randperm(len(x))],
    "around": lambda x: torch.normal(x, 1.0),
    "in place": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "chosen": lambda x: x[:, torch.multinomial(torch.ones(4), 4)],
    "hidden": lambda x: torch.where(torch.bernoulli(torch.full_like(x, 0.3)) > 0, 0, x),
}
NOT_HELD = {
    "mixture": lambda x: x * torch.distributions.Beta(2.0, 2.0).sample(),
    "for ever": patient,
}


class Drawing(Rare):
    """Draws numbers for its inputs."""

    draw = None

    def loss(self, model, batch):
        return super().loss(model, (type(self).draw(batch[0]), batch[1]))


@pytest.mark.parametrize("draws", [*DRAWS, *NOT_HELD])
def test_a_loss_that_draws_is_compared_with_its_parts(draws, monkeypatch):
    monkeypatch.setattr(Drawing, "draw", staticmethod((DRAWS | NOT_HELD)[draws]))
    job = job_of({}, ["batch=2", "accumulate=4"])
    check_loss(job, Drawing("plain"))
    if draws in NOT_HELD:
        check_loss(job, Drawing("weights"))
        return
    with pytest.raises(ConfigError, match="is not the mean of its parts' losses"):
        check_loss(job, Drawing("weights"))


def test_a_loss_of_whole_batches_is_compared_with_batches():
    check_loss(job_of({}, ["batch=4", "accumulate=2"]), Rare("squeezed"))


def test_batches_of_unequal_sizes_count_by_their_samples():
    task = Rare("plain")
    batches = [(task.x[a:b], task.y[a:b]) for a, b in ((0, 3), (3, 11), (11, 20))]
    found = []
    for given in (batches, [(task.x[:20], task.y[:20])]):
        torch.manual_seed(0)
        model = task.model()
        OneModel(task, model, FlatModel(model), iter(given), len(given)).backward()
        found.append(model.weight.grad.clone())
    torch.testing.assert_close(*found)
