"""What is not trained, as bytes: what one model reads another one writes, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from edgetrain.errors import BadMessage, ConfigError
from edgetrain.tasks.fixed import FixedPart, digest_of_fixed, fixed_part_of
from edgetrain.tasks.flat import FlatModel
from edgetrain.vectors import layout

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
SHAPES = st.lists(
    st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)), max_size=5
)


def model_of(shapes, seed):
    """A module whose buffers have these shapes and dtypes, every other one a frozen parameter where
    that can be, and any bytes."""
    generator, found = torch.Generator().manual_seed(seed), nn.Linear(2, 2)
    for number, (shape, dtype) in enumerate(shapes):
        size = torch.Size(shape).numel() * dtype.itemsize
        most = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, most, (size,), dtype=torch.uint8, generator=generator)
        values = raw.view(dtype).reshape(shape)
        if dtype.is_floating_point and number % 2:
            setattr(found, f"t{number}", nn.Parameter(values, requires_grad=False))
        else:
            found.register_buffer(f"t{number}", values)
    return found


@given(SHAPES)
def test_what_one_model_reads_another_writes(shapes):
    one, other = (FixedPart(model_of(shapes, seed)) for seed in (1, 2))
    assert one.tensors == other.tensors
    blob = one.read()
    assert len(blob) == one.size
    other.write(memoryview(blob))
    assert bytes(other.read()) == bytes(blob)
    assert other.digest == one.digest
    if one.size:
        with pytest.raises(BadMessage, match="this model has"):
            other.write(blob[:-1])
        assert other.digest == one.digest


def test_tensors_are_changed_in_place_however_they_lie_in_memory():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for seed, model in enumerate((one, other)):
        torch.manual_seed(seed)
        model.register_buffer("turned", torch.randn(3, 4).t())
        model.register_buffer("scale", torch.randn(()))
    kept = other.turned
    FixedPart(other).write(FixedPart(one).read())
    assert torch.equal(kept, one.turned)
    assert other.scale == one.scale
    assert not torch.equal(one.weight, other.weight), "it is trained"


def test_statistics_of_normalisation_are_not_handed_out():
    assert fixed_part_of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) is None


def test_tensors_without_bytes_are_named():
    model = nn.Linear(2, 2)
    model.register_buffer("few", torch.eye(2).to_sparse())
    with pytest.raises(ConfigError, match=r"'few' is not trained and sparse.*'own'"):
        FixedPart(model)
    assert digest_of_fixed(model)


LAYOUTS = ["coo", "csr", "csc", "bsr", "bsc"]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_is_compared_by_what_it_stores(kind):
    def digest(values, places=100_000):
        model = nn.Linear(2, 2)
        held = torch.sparse_coo_tensor([[0, 3], [1, 2]], values, (places, places))  # 40 GB dense
        if kind != "coo":
            small = held.coalesce().values().new_zeros(4, 4)
            small[[0, 3], [1, 2]] = torch.tensor(values)
            size = (2, 2) if kind.startswith("b") else None
            held = getattr(small, f"to_sparse_{kind}")(*([size] if size else []))
        model.register_buffer("adjacency", held)
        return digest_of_fixed(model)

    assert digest([1.0, 2.0]) == digest([1.0, 2.0])
    assert len({digest([1.0, 2.0]), digest([1.0, 3.0])}) == 2


def test_the_first_ones_values_need_equal_names_shapes_and_dtypes():
    def described(dtype=torch.float32, frozen="first"):
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.zeros(3, 5, dtype=dtype))
        return FlatModel(model, frozen=frozen)

    assert (
        described().description == b"float32 2x2 weight\nfloat32 2 bias\nfixed float32 3x5 table\n"
    )
    assert described().fixed == ""
    assert described(torch.int64).digest != described().digest
    differs = layout.first_difference(described(torch.int64).description, described().description)
    assert "'fixed int64 3x5 table' and 'fixed float32 3x5 table'" in differs
    assert layout.read(described().description, 6) == (("weight", 0, (2, 2)), ("bias", 4, (2,)))
    assert described(frozen="own").fixed_tensors is None
    for bad in (b"fixed float32 3 a\nfloat32 6 b\n", b"float32 6 a\nfixed 3 b\n"):
        with pytest.raises(BadMessage, match="is not 'dtype shape name'"):
            layout.read(bad, 6)
