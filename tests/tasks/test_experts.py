"""A mixture of experts is what GShard says, position by position."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from edgetrain.errors import TaskError
from edgetrain.tasks import char_lm
from edgetrain.tasks.draws import model_of
from edgetrain.tasks.experts import MixtureOfExperts, set_share


def mixture(capacity=1.0, balance=0.0, seed=0):
    torch.manual_seed(seed)
    return MixtureOfExperts(4, 3, 8, capacity, balance).double()


def expected(layer, hidden, room):
    """The same with loops, and how many choices found no room."""
    output, left_out = torch.zeros_like(hidden), 0
    for sample, positions in enumerate(hidden):
        gates = layer.gate(positions).softmax(-1)
        weights, chosen = gates.topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        taken = [0] * 3
        for turn in range(2):
            for at, position in enumerate(positions):
                expert = int(chosen[at, turn])
                taken[expert] += 1
                if taken[expert] > room:
                    left_out += 1
                    continue
                own = layer.layers
                inner = position @ own.first[expert] + own.first_bias[expert, 0]
                found = functional.gelu(inner) @ own.second[expert] + own.second_bias[expert, 0]
                output[sample, at] += weights[at, turn] * found
    return output, left_out


@pytest.mark.parametrize(("capacity", "room", "drops"), [(1.0, 2, True), (3.0, 6, False)])
def test_each_position_uses_two_experts_that_have_room(capacity, room, drops):
    layer = mixture(capacity)
    hidden = torch.randn(5, 6, 4, dtype=torch.float64, requires_grad=True)
    wanted, left_out = expected(layer, hidden, room)
    found = layer(hidden)
    torch.testing.assert_close(found, wanted)
    assert (left_out > 0) == drops
    weights = torch.randn_like(found)
    gradients = [
        torch.autograd.grad((each * weights).sum(), [hidden, *layer.parameters()])
        for each in (found, wanted)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_samples_do_not_know_of_each_other():
    layer, hidden = mixture(), torch.randn(5, 6, 4, dtype=torch.float64)
    one_by_one = torch.cat([layer(each[None]) for each in hidden])
    torch.testing.assert_close(layer(hidden), one_by_one)


def test_the_loss_that_evens_choices_out_is_in_the_gradient():
    layer, hidden = mixture(balance=0.5), torch.randn(5, 6, 4, dtype=torch.float64)
    found = layer(hidden)
    torch.testing.assert_close(found, mixture()(hidden), msg="the output does not have it")
    for share in (1.0, 0.25):
        set_share(layer, share)
        (mine,) = torch.autograd.grad(layer(hidden).sum() * 0, layer.gate.weight)
        gates = layer.gate(hidden).softmax(-1)
        taken = functional.one_hot(gates.argmax(-1), 3).double().mean(1)
        loss = 3 * (gates.mean(1) * taken).sum(-1).mean() * 0.5 * share
        (theirs,) = torch.autograd.grad(loss, layer.gate.weight)
        torch.testing.assert_close(mine, theirs)
        assert mine.abs().max() > 1e-4


def test_char_lm_has_experts_in_every_second_block():
    model = char_lm(limit_bytes=20000, width=16, layers=4, experts=4).model()
    assert [isinstance(each.layers, MixtureOfExperts) for each in model.blocks] == [
        False, True, False, True,
    ]  # fmt: skip
    text = torch.randint(256, (2, 64))
    model(text).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_char_lm_drops_a_share_in_training_only():
    plain, dropping = (
        model_of(char_lm(limit_bytes=20000, width=16, dropout=share), 0) for share in (0, 0.5)
    )
    text = torch.randint(256, (2, 64))
    assert torch.equal(plain(text), plain(text))
    assert not torch.equal(dropping(text), dropping(text))
    assert torch.equal(plain.eval()(text), dropping.eval()(text))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"experts": 1}, "0, or 2"), ({"experts": True}, "0, or 2"),
     ({"experts": 4, "layers": 1}, "every second block has experts"),
     ({"dropout": 1.0}, "below 1"), ({"dropout": True}, "below 1")],
)  # fmt: skip
def test_what_cannot_have_experts_is_one_line(options, said):
    with pytest.raises(TaskError, match=said):
        char_lm(limit_bytes=20000, **options)
