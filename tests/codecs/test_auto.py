"""The codec `auto`: payloads of every rung are read, and nothing is lost when the rung changes."""

from __future__ import annotations

import numpy as np
import pytest
from codec_cases import make, vectors
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.codecs import memory, parse
from edgetrain.codecs.auto import FLOOR, RUNGS, Auto, OnRungs, element_bytes, finest_rung, rung_of
from edgetrain.codecs.sparse import TopK
from edgetrain.errors import BadPayload, ConfigError

RUNG = st.integers(0, len(RUNGS) - 1)
FLOORS = st.floats(FLOOR, 1.0)


def share_of(rung: int) -> float:
    codec = RUNGS[rung]
    return codec.density if isinstance(codec, TopK) else 1.0


@given(st.integers(1, 10**9), st.floats(0, 1e12), st.floats(1, 1e6), FLOORS)
def test_more_bytes_never_lose_more_and_no_rung_is_below_the_floor(
    elements: int, room: float, times: float, floor: float
) -> None:
    rung = finest_rung(elements, room, floor)
    assert finest_rung(elements, room * times, floor) <= rung
    assert share_of(rung) >= floor
    lowest = finest_rung(elements, 0, floor)
    assert rung == lowest or elements * element_bytes(rung) <= room
    assert rung == 0 or elements * element_bytes(rung - 1) > room, "a finer one would not fit"


def test_rungs_become_shorter_and_are_as_long_as_they_say() -> None:
    vector = make("normal", 1 << 20, 0)
    sizes = [element_bytes(rung) for rung in range(len(RUNGS))]
    assert sizes == sorted(sizes, reverse=True)
    for rung, expected in enumerate(sizes):
        (payload,) = Auto().at(rung).encode(vector)
        assert len(payload) / vector.size == pytest.approx(expected, rel=0.1)


@given(vectors, st.lists(RUNG, min_size=1, max_size=8))
def test_what_was_sent_and_what_was_not_is_what_there_was_on_whatever_rungs(
    vector: np.ndarray, rungs: list[int]
) -> None:
    vector = np.clip(vector, -6e4, 6e4)
    feedback, sent = memory(Auto(), vector.size), np.zeros(vector.size, np.float64)
    assert isinstance(feedback, OnRungs)
    for rung in rungs:
        feedback.climb(rung)
        (payload,) = feedback.encode(vector)
        assert rung_of(payload) == rung
        decoded = np.empty_like(vector)
        parse("auto").decode(payload, decoded)
        sent += decoded
    wanted = len(rungs) * vector.astype(np.float64)
    scale = np.abs(wanted).max() + 1e-30
    assert np.abs(sent + feedback.residual - wanted).max() <= 1e-5 * scale


@given(vectors, st.lists(RUNG, min_size=2, max_size=5))
def test_messages_of_several_rungs_are_added_as_one_by_one(
    vector: np.ndarray, rungs: list[int]
) -> None:
    vector = np.clip(vector, -6e4, 6e4)
    payloads = [Auto().at(rung).encode(vector)[0] for rung in rungs]
    weights = [0.5 + i for i in range(len(rungs))]
    together, singly = np.zeros_like(vector), np.zeros_like(vector)
    Auto().add_many(payloads, weights, together)
    for payload, weight in zip(payloads, weights, strict=True):
        Auto().add(payload, weight, singly)
    assert together.tobytes() == singly.tobytes()


@pytest.mark.parametrize("payload", [b"", bytes([len(RUNGS)]), bytes([255]) + b"123"])
def test_a_rung_that_does_not_exist_is_refused(payload: bytes) -> None:
    out = np.ones(8, np.float32)
    with pytest.raises(BadPayload):
        Auto().decode(payload, out)
    with pytest.raises(BadPayload):
        Auto().add_many([Auto().at(0).encode(out)[0], payload], [1.0, 1.0], out)
    assert (out == 1).all()


def test_its_memory_goes_on_from_its_state() -> None:
    vector = make("normal", 500, 3)
    first = memory(Auto(0.05), vector.size)
    assert isinstance(first, OnRungs)
    first.climb(2)
    first.encode(vector)
    second = memory(Auto(0.05), vector.size)
    second.restore({name: array.copy() for name, array in first.state().items()})
    assert first.encode(vector) == second.encode(vector)


@pytest.mark.parametrize("text", ["auto(0.001)", "auto(2)", "auto(0)"])
def test_a_floor_that_cannot_be_is_refused_with_the_range(text: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.01 to 1 \(auto\(0\.05\)"):
        parse(text)


def test_it_codes_a_whole_vector_not_a_part_of_it() -> None:
    with pytest.raises(ConfigError, match="codes a whole vector"):
        parse("small(64): fp32; auto")
    with pytest.raises(ConfigError, match="cannot code values"):
        parse("topk(0.1) | auto")
