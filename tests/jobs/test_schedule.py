"""Learning rates over a job's steps: the spelling, and torch's schedules as the reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as schedules

from edgetrain.errors import ConfigError
from edgetrain.jobs.reading import parse as job_of
from edgetrain.jobs.rules import resolve
from edgetrain.jobs.schedule import parse
from edgetrain.tasks.work import Tuning, begin_at, tune


def rates_of(make, steps):
    """The learning rates that a schedule of torch gives an optimizer with the rate 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@given(st.integers(1, 60), st.floats(0.0, 0.9), st.integers(1, 60))
def test_the_shapes_are_torchs(steps, end, interval):
    interval = min(interval, steps)
    cases = {
        f"linear({end!r})": lambda o: schedules.LinearLR(o, 1.0, end, steps),
        f"cosine({end!r})": lambda o: schedules.CosineAnnealingLR(o, steps, end),
        f"step({end!r}, {interval})": lambda o: schedules.StepLR(o, interval, end),
    }
    for text, make in cases.items():
        schedule = parse(text, steps)
        found = [schedule.factor(step) for step in range(steps)]
        assert found == pytest.approx(rates_of(make, steps), abs=1e-6), text


@given(st.integers(2, 60), st.integers(1, 60))
def test_a_warm_up_rises_to_the_rate_and_the_rest_follows(steps, warmup):
    warmup = min(warmup, steps - 1)
    schedule = parse(f"warmup({warmup}) | cosine", steps)
    assert [schedule.factor(s) for s in range(warmup)] == pytest.approx(
        [(s + 1) / warmup for s in range(warmup)]
    )
    rest = parse("cosine", steps - warmup)
    assert [schedule.factor(s) for s in range(warmup, steps)] == pytest.approx(
        [rest.factor(s) for s in range(steps - warmup)]
    )
    assert parse(f"warmup({warmup})", steps).factor(steps - 1) == 1
    assert schedule.factor(steps + 99) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cosin", "no schedule 'cosin' (did you mean 'cosine'?)"),
        ("warmup(200)", "warmup with steps = 200 in a run of 100 steps (allowed are 1 to 100)"),
        ("step(0.5, 101)", "step with steps = 101 in a run of 100 steps (allowed are 1 to 100)"),
        ("step(0.5)", "step with arguments (0.5) (it reads step(factor, steps))"),
        ("linear(2)", "linear: end = 2 (allowed are 0 to less than 1)"),
        ("cosine | warmup(5)", "it reads as 'warmup(20) | cosine': warm-up first"),
        ("linear | cosine", "warm-up first"),
    ],
)
def test_a_schedule_that_cannot_be_is_one_clear_line(text, said):
    with pytest.raises(ConfigError) as refused:
        resolve(job_of({}, [f"schedule={text}", "steps=100"]))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_all_members_agree_on_it():
    plain = job_of({}, [])
    assert plain.digest() == job_of({}, ["schedule=", "train.clip=0"]).digest()
    digests = {
        job_of({}, [w]).digest() for w in ("schedule=cosine", "schedule=linear", "train.clip=1")
    }
    assert len(digests | {plain.digest()}) == 4


def test_steps_are_tuned_and_their_number_is_in_the_state():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    tune(optimizer, Tuning(lambda step: 1 / (1 + step), clip=1.0))
    begin_at(optimizer, 4)
    weight.grad = torch.tensor([30.0, 40.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), -0.1 * torch.tensor([0.6, 0.8]))
    assert optimizer.state_dict()["param_groups"][0]["step_of_job"] == 5
    weight.grad = torch.tensor([0.03, 0.04])
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 / 6)
    assert math.isclose(float(weight.detach()[0]), -0.06 - 0.03 * 0.5 / 6, rel_tol=1e-5)
