"""Groups of parameters, as a job or a task says them."""

from __future__ import annotations

import optimizer_cases as cases
import pytest
import torch
from torch import nn

from edgetrain.errors import ConfigError
from edgetrain.jobs.reading import load
from edgetrain.tasks.work import optimizer_for


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def sizes(optimizer):
    return [
        (len(group["params"]), group["weight_decay"], group["lr"])
        for group in optimizer.param_groups
    ]


def test_the_first_group_that_matches_takes_a_parameter():
    table = load(None, [
        "optimizer={ name = 'adamw', lr = 0.1, weight_decay = 0.3, groups = ["
        "{ parameters = ['vectors'], weight_decay = 0.0 }, { parameters = ['2.*'], lr = 0.2 }] }"
    ]).train.optimizer  # fmt: skip
    assert sizes(optimizer_for(model(), table)) == [(1, 0.3, 0.1), (4, 0.0, 0.1), (1, 0.3, 0.2)]


def test_a_tasks_groups_hold_where_the_job_says_none():
    task = cases.grouped(limit_bytes=20000, context=8, width=16, layers=1)
    table = {"name": "adamw", "weight_decay": 0.3}
    found = optimizer_for(task.model(), table, task).param_groups
    assert [group["weight_decay"] for group in found] == [0.3, 0.0]
    assert {p.dim() for p in found[0]["params"]} == {2}
    assert {p.dim() for p in found[1]["params"]} == {1}
    assert len(optimizer_for(task.model(), {**table, "groups": []}, task).param_groups) == 1


def test_a_part_of_a_model_has_the_groups_that_it_has():
    part = [("0.weight", nn.Parameter(torch.zeros(2, 2)))]
    groups = [{"parameters": ["vectors"], "weight_decay": 0.0}]
    assert sizes(optimizer_for(part, {"name": "sgd", "lr": 1.0, "groups": groups})) == [(1, 0, 1.0)]


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"weight_decay": 0.0}, "a group is {'weight_decay': 0.0} (as in { parameters ="),
        ({"parameters": "vectors"}, "a group is"),
        ({"parameters": ["norm"]}, "no parameter of the model is in the group ['norm']"),
        ({"parameters": ["*"], "wait_decay": 0.0}, "did you mean 'weight_decay'?"),
        ({"parameters": ["*"], "lr": "high"}, "lr = 'high'"),
        (3, "a group is 3"),
    ],
)
def test_a_group_that_cannot_be_is_one_line(group, said):
    with pytest.raises(ConfigError) as refused:
        optimizer_for(model(), {"name": "adamw", "groups": [group]})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad", "rmsprop", "lbfgs"])
def test_an_optimizer_steps_saves_and_calls_hooks_as_torchs_own_does(name):
    kind = {cls.lower(): cls for cls in vars(torch.optim)}
    models, called = [nn.Linear(3, 2) for _ in range(2)], []
    models[1].load_state_dict(models[0].state_dict())
    theirs = getattr(torch.optim, kind[name])(models[0].parameters(), lr=0.1)
    ours = optimizer_for(models[1], {"name": name, "lr": 0.1})
    ours.register_step_pre_hook(lambda *_: called.append("before"))
    ours.register_step_post_hook(lambda *_: called.append("after"))
    x = torch.randn(5, 3)
    for _ in range(3):
        for model, optimizer in zip(models, (theirs, ours), strict=True):

            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        ours.load_state_dict(ours.state_dict())
    assert called == ["before", "after"] * 3
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert str(theirs.state_dict()) == str(ours.state_dict())
