"""A model as one flat vector: views that hold, mirrors that keep bits, and clear errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edgetrain.errors import ConfigError
from edgetrain.tasks.flat import FlatModel

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def backward(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p = next(model.parameters())
    x = torch.randn(8, 3, generator=generator).to(p)
    model(x).square().mean().backward()


def test_the_vector_is_the_model():
    model = small()
    before = [p.detach().clone() for p in model.parameters()]
    flat = FlatModel(model)
    assert flat.is_storage
    assert flat.elements == 3 * 4 + 4 + 4 * 2 + 2
    assert np.array_equal(flat.params, torch.cat([p.flatten() for p in before]).numpy())
    flat.params[:] = 7
    assert all(bool((p == 7).all()) for p in model.parameters())
    with torch.no_grad():
        model[0].weight.fill_(3)
    assert (flat.params[:12] == 3).all()
    assert flat.layout[1] == ("0.bias", 12, (4,))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_views_survive_zero_grad_and_training_is_torchs(set_to_none):
    plain, bound = small(), small()
    flat = FlatModel(bound)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (plain, bound)]
    for step in range(4):
        for model, optimizer in zip((plain, bound), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(model, step)
            if model is bound:
                flat.pull_gradient()
                grads = torch.cat([p.grad.flatten() for p in plain.parameters()])
                np.testing.assert_array_equal(flat.gradient, grads.numpy())
                flat.push_gradient()
            optimizer.step()
        flat.pull_params()
    for p, q in zip(plain.parameters(), bound.parameters(), strict=True):
        assert torch.equal(p, q)


def test_what_is_written_to_the_gradient_is_what_the_optimizer_steps_with():
    model = small()
    flat = FlatModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    optimizer.zero_grad(set_to_none=True)
    backward(model)
    flat.pull_gradient()
    before = flat.params.copy()
    flat.gradient[:] = 2
    flat.push_gradient()
    optimizer.step()
    np.testing.assert_array_equal(flat.params, before - 2)


def test_a_parameter_without_a_gradient_counts_as_zero():
    model = small()
    flat = FlatModel(model)
    flat.gradient[:] = 9
    for p in model.parameters():
        p.grad = None
    flat.pull_gradient()
    assert not flat.gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gradient_of_zeros_is_not_taken_for_none(dtype):
    model = small().to(dtype)
    flat = FlatModel(model)
    first, *others = list(model.parameters())
    first.grad = torch.zeros_like(first)
    for p in others:
        p.grad = None
    flat.pull_gradient()
    assert 0 < flat.gradient.max() < 1e-29
    flat.gradient[:] /= 1000  # a mean over members
    flat.push_gradient(zeros_are_none=True)
    assert first.grad is not None
    assert not first.grad.any()
    assert [p.grad for p in others] == [None] * 3
    flat.pull_gradient()
    flat.gradient[12:16] = 2  # another member had one
    flat.push_gradient(zeros_are_none=True)
    sums = [None if p.grad is None else float(p.grad.sum()) for p in model.parameters()]
    assert sums == [0, 8, None, None]


def test_parameters_that_a_backward_pass_did_not_reach_have_no_gradient():
    model = small()
    model.idle = nn.Linear(2, 2)
    flat = FlatModel(model)
    flat.note_used()
    for used in (True, False, True):
        flat.zero_grad()
        x = torch.ones(1, 3)
        out = model[2](model[1](model[0](x)))
        (model.idle(out) if used else out).sum().backward()
        flat.drop_unused()
        grads = [p.grad is not None for p in model.parameters()]
        assert grads == [True] * 4 + [used] * 2
        assert model[0].weight.grad.data_ptr() == torch.from_numpy(flat.gradient).data_ptr()


def test_zero_grad_keeps_the_views():
    model = small()
    flat = FlatModel(model)
    backward(model)
    flat.pull_gradient()
    assert flat.gradient.any()
    flat.zero_grad()
    assert not flat.gradient.any()
    backward(model)
    assert flat.gradient.any(), "backward accumulates into the vector"


def test_gradients_from_before_binding_are_kept():
    model = small()
    backward(model)
    grads = torch.cat([p.grad.flatten() for p in model.parameters()]).numpy().copy()
    flat = FlatModel(model)
    np.testing.assert_array_equal(flat.gradient, grads)


def test_tied_parameters_are_one():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    flat = FlatModel(model)
    assert flat.elements == 9
    flat.params[:] = 5
    assert bool((model["b"].weight == 5).all())
    assert model["b"].weight is model["a"].weight


def test_frozen_parameters_and_buffers_are_left_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    pointer = model[0].weight.data_ptr()
    flat = FlatModel(model)
    assert [name for name, _, _ in flat.layout] == ["1.weight", "1.bias", "2.weight", "2.bias"]
    model(torch.randn(4, 3))
    mean = model[1].running_mean.clone()
    flat.params[:] = 0
    flat.pull_params()
    assert torch.equal(model[0].weight, frozen)
    assert model[0].weight.data_ptr() == pointer
    assert torch.equal(model[1].running_mean, mean)
    assert mean.any()


def mixed():
    model = small()
    model[2].to(torch.bfloat16)
    return model


def test_several_dtypes_keep_the_masters_bits():
    model = mixed()
    flat = FlatModel(model)
    assert not flat.is_storage
    assert [(name, start) for name, start, _ in flat.layout] == [
        ("0.weight", 0), ("0.bias", 12), ("2.weight", 16), ("2.bias", 24),
    ]  # fmt: skip
    # Far less than bfloat16 can hold beside 1: the model cannot show it, the vector keeps it.
    flat.params[:] = 1
    for _ in range(8):
        flat.params += np.float32(2**-12)
        flat.push_params()
        flat.pull_params()
    np.testing.assert_array_equal(flat.params, np.float32(1 + 8 * 2**-12))
    assert bool((model[2].weight == 1).all())
    assert bool((model[0].weight == 1 + 8 * 2**-12).all())
    # What the optimizer changes in the model is added to what the vector kept.
    with torch.no_grad():
        model[2].weight += 1
        model[0].weight += 1
    flat.pull_params()
    np.testing.assert_array_equal(flat.params[:12], np.float32(2 + 8 * 2**-12))
    np.testing.assert_array_equal(flat.params[16:24], np.float32(2 + 8 * 2**-12))
    np.testing.assert_array_equal(flat.params[24:], np.float32(1 + 8 * 2**-12))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_dtypes_go_there_and_back(dtype):
    model = small().to(dtype)
    flat = FlatModel(model)
    backward(model)
    flat.pull_gradient()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).float().numpy()
    assert expected.any()
    np.testing.assert_array_equal(flat.gradient, expected)
    flat.gradient[:] = 0.5
    flat.push_gradient()
    assert all(bool((p.grad == 0.5).all()) for p in model.parameters())


def test_what_is_no_real_float_is_refused_by_name():
    model = small()
    model.odd = nn.Parameter(torch.zeros(2, dtype=torch.complex64), requires_grad=False)
    FlatModel(model)
    model.odd.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"'odd' is torch.complex64.*float32"):
        FlatModel(model)


def test_nothing_to_train_is_refused():
    for model in (nn.ReLU(), small().requires_grad_(False)):
        with pytest.raises(ConfigError, match="nothing to train"):
            FlatModel(model)


@pytest.mark.parametrize("start", [small, mixed])
def test_moving_the_model_after_binding_is_noticed(start):
    model = start()
    flat = FlatModel(model)
    flat.pull_params()
    model.to("cpu")
    flat.pull_params()  # nothing moved
    model.to(torch.float64)
    with pytest.raises(ConfigError, match=r"left the flat vector.*model.to.*before joining"):
        flat.pull_params()


def test_loading_weights_in_place_is_fine():
    model, other = small(), small()
    flat = FlatModel(model)
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(4)
    model.load_state_dict(other.state_dict())
    flat.pull_params()
    assert (flat.params == 4).all()


def test_sparse_gradients_are_gathered():
    model = nn.Embedding(6, 2, sparse=True)
    flat = FlatModel(model)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(torch.tensor([1, 4, 4])).sum().backward()
        assert model.weight.grad.is_sparse
        flat.pull_gradient()
        rows = flat.gradient.reshape(6, 2)
        assert rows[:, 0].tolist() == [0, 1, 0, 0, 2, 0]
    torch.optim.SGD(model.parameters(), 1.0).step()
    flat.pull_params()


def test_parameters_in_other_memory_formats_are_kept():
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    flat = FlatModel(model)
    assert torch.equal(model.weight, before)
    np.testing.assert_array_equal(flat.params[:54], before.contiguous().flatten().numpy())


def test_empty_and_scalar_parameters():
    model = small()
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.none = nn.Parameter(torch.empty(0))
    flat = FlatModel(model)
    flat.pull_params()
    assert flat.elements == 26 + 1
    # Its own parameters come before those of its children.
    assert flat.params[0] == 2


def test_a_digest_is_equal_where_vectors_can_be_added():
    one = FlatModel(small()).digest
    assert one == FlatModel(small()).digest
    others = [
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
        mixed(),
        small().requires_grad_(False)[2].requires_grad_(True),
    ]
    assert len({one, *(FlatModel(model).digest for model in others)}) == 5


def test_what_is_not_exchanged_has_a_digest():
    def fixed(change=lambda model: None, **how):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        torch.manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape))
        model[0].requires_grad_(False)
        model.register_buffer("table", torch.arange(4.0))
        change(model)
        return FlatModel(model, **how).fixed

    assert len(fixed()) == 24
    assert fixed(lambda m: m[2].weight.data.fill_(1)) == fixed(), "it is exchanged"
    assert fixed(lambda m: m[1].running_mean.fill_(1)) == fixed(), "each member has its own"
    assert fixed(lambda m: m.half()) != fixed()
    assert fixed(lambda m: m[0].weight.data[0, 0].add_(1e-3)) != fixed()
    assert fixed(lambda m: m.table[3].add_(1)) != fixed()
    assert fixed(frozen="own") == ""
    assert FlatModel(small()).fixed == ""


@cuda
def test_a_model_on_a_gpu_has_a_mirror_in_main_memory():
    model = small().cuda()
    flat = FlatModel(model)
    assert not flat.is_storage
    backward(model)
    flat.pull_gradient()
    assert flat.gradient.any()
    flat.params[:] = 3
    flat.push_params()
    assert all(bool((p == 3).all()) for p in model.parameters())
    with torch.no_grad():
        model[0].weight += 1
    flat.pull_params()
    assert (flat.params[:12] == 4).all()


@cuda
def test_a_model_cut_over_devices_has_another_order_and_digest():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    whole = FlatModel(model).digest
    model[1].cuda()
    assert FlatModel(model).digest != whole
