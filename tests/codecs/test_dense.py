"""fp32, fp16, bf16 and error feedback around them."""

import numpy as np
import pytest

from edgetrain import codecs
from edgetrain.errors import BadPayload, ConfigError
from edgetrain.vectors.vector import Vector


def round_trip(codec: codecs.Codec, vector: Vector) -> Vector:
    out = np.full_like(vector, np.nan)
    step = codec.part_elements
    for i, payload in enumerate(codec.encode(vector)):
        codec.decode(payload, out[i * step : (i + 1) * step])
    return out


def test_fp32_copies_nothing_and_loses_nothing() -> None:
    vector = np.random.default_rng(0).standard_normal(2**20 + 5).astype(np.float32)
    payloads = codecs.parse("fp32").encode(vector)
    assert [len(p) for p in payloads] == [2**22, 20]
    assert np.shares_memory(np.frombuffer(payloads[0], np.float32), vector)
    assert (round_trip(codecs.Dense(), vector) == vector).all()


@pytest.mark.parametrize(
    ("name", "relative", "absolute"), [("fp16", 2**-11, 2**-25), ("bf16", 2**-8, 0)]
)
def test_halves_are_within_their_bound(name: str, relative: float, absolute: float) -> None:
    rng = np.random.default_rng(1)
    vector = (rng.standard_normal(9999) * 10.0 ** rng.integers(-9, 4, 9999)).astype(np.float32)
    error = np.abs(round_trip(codecs.parse(name), vector) - vector)
    assert (error <= relative * np.abs(vector) + absolute).all()


def test_fp16_saturates() -> None:
    vector = np.array([1e9, -1e9, 65504], np.float32)
    assert round_trip(codecs.parse("fp16"), vector).tolist() == [65504, -65504, 65504]


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_add_and_wrong_length(name: str) -> None:
    codec = codecs.parse(name)
    out = np.ones(4, np.float32)
    (payload,) = codec.encode(np.array([1, 2, 4, 8], np.float32))
    codec.add(payload, 0.5, out)
    assert out.tolist() == [1.5, 2, 3, 5]
    for bad in (b"", bytes(payload)[:-1], bytes(payload) + b"\0"):
        with pytest.raises(BadPayload, match="bytes where"):
            codec.add_many([payload, bad], [1.0, 1.0], out)
    assert out.tolist() == [1.5, 2, 3, 5]


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_feedback_sends_everything_in_the_end(name: str) -> None:
    codec = codecs.parse(name)
    feedback = codecs.Feedback(codec, 1000)
    rng = np.random.default_rng(2)
    sent, given = np.zeros(1000), np.zeros(1000)
    for _ in range(50):
        vector = rng.standard_normal(1000).astype(np.float32)
        decoded = np.empty_like(vector)
        codec.decode(feedback.encode(vector)[0], decoded)
        sent += decoded
        given += vector
    assert np.abs(sent + (feedback.residual if feedback.residual.size else 0) - given).max() < 1e-5


def test_unknown_name_and_wrong_vector() -> None:
    with pytest.raises(ConfigError, match="did you mean 'bf16'"):
        codecs.parse("bf61")
    with pytest.raises(ConfigError, match="flat contiguous float32"):
        codecs.Dense().encode(np.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="1000 elements"):
        codecs.Feedback(codecs.Dense(), 1000).encode(np.zeros(3, np.float32))
