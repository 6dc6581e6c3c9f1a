"""Memory comes back when its last view is gone, and never before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.strategies.displacement import Displacement
from edgetrain.vectors.pool import VectorPool


def address(vector) -> int:
    return vector.__array_interface__["data"][0]


def test_a_vector_nobody_looks_at_is_used_again():
    vectors = VectorPool(1000)
    first = vectors.borrow_vector()
    where = address(first)
    assert (first.size, first.dtype, first.flags.writeable) == (1000, np.float32, True)
    assert address(vectors.borrow_vector()) != where
    del first
    assert where in {address(one) for one in [vectors.borrow_vector(), vectors.borrow_vector()]}


@pytest.mark.parametrize(
    "look",
    [
        lambda vector: vector,
        lambda vector: vector[3:5],
        lambda vector: vector[10:].view(np.uint8)[4:].data,
        lambda vector: memoryview(vector).cast("B")[8:],
        lambda vector: [memoryview(vector[5:6]).cast("B")],
        lambda vector: np.frombuffer(memoryview(vector)[:7], np.float32),
    ],
)
def test_any_view_keeps_the_memory_from_being_used_again(look):
    vectors = VectorPool(1000)
    vector = vectors.borrow_vector()
    where = address(vector)
    held = look(vector)
    del vector
    taken = [vectors.borrow_vector() for _ in range(3)]
    assert where not in {address(one) for one in taken}
    del held
    assert address(vectors.borrow_vector()) == where


@given(st.lists(st.integers(0, 5), max_size=60))
def test_no_two_living_vectors_share_memory_and_none_is_made_without_need(slots):
    vectors = VectorPool(16)
    held: dict[int, object] = {}
    seen = set()
    most = 0
    for slot in slots:
        if slot in held:
            del held[slot]
            continue
        vector = vectors.borrow_vector()
        seen.add(address(vector))
        held[slot] = vector[2:4].data
        del vector
        most = max(most, len(held))
        places = [
            np.frombuffer(view, np.float32).__array_interface__["data"][0] for view in held.values()
        ]
        assert len(set(places)) == len(places)
    assert len(seen) <= most


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_contribution_that_is_still_being_sent_is_never_written(delay):
    half = Displacement(np.zeros(100, np.float32), local_steps=1, delay=delay)
    sending = []
    for step in range(8):
        half.params += step + 1
        own = half.after_step()
        sending.append((own[10:90].data, own[10:90].tobytes()))
        while half.due() is not None:
            half.apply([np.full(100, 0.5, np.float32)])
        assert all(view.tobytes() == then for view, then in sending)


def test_a_spare_vector_takes_no_new_memory():
    vectors = VectorPool(10)
    assert vectors.borrow_spare() is None
    first = vectors.borrow_vector()
    where = address(first)
    assert vectors.borrow_spare() is None
    del first
    again = vectors.borrow_spare()
    assert again is not None
    assert address(again) == where
