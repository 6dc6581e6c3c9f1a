"""The cost of a step: floating-point operations and operator calls."""

from __future__ import annotations

import torch
from torch import nn

from edgetrain.fleet.devices.cost import measure_step


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return model(batch[0]).square().mean()


def test_the_flops_of_a_linear_layer_are_counted():
    """Forward 2 n i o, backward as much for the weight; the input needs no gradient."""
    flops, operators = measure_step(nn.Linear(5, 7), (torch.ones(3, 5),), loss)
    assert flops == 2 * (2 * 3 * 5 * 7)
    assert 4 <= operators <= 20
    deeper = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7))
    assert measure_step(deeper, (torch.ones(3, 5),), loss)[1] > operators


def test_measuring_leaves_no_trace():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[0].weight.grad = torch.full((4, 4), 3.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    measure_step(model, (torch.rand(6, 4, generator=torch.Generator()),), loss)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.full((4, 4), 3.0))
    assert model[0].bias.grad is None
