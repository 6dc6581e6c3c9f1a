"""Decoding takes no more memory than the vector itself, and a fixed amount."""

import codec_cases as cases
import codec_memory as memory
import numpy as np
import pytest
from codec_mutations import mutate

from edgetrain.codecs import parse
from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.codecs.kernels import native

ELEMENTS = 100_000
LAYOUT = [*cases.layout_of(2000)]
LAYOUT += [
    (f"large{at}.w" if at % 8000 else f"large{at}.bias", at, (50, 40) if at % 8000 else (2000,))
    for at in range(2000, ELEMENTS, 2000)
]
"""Tensors of all shapes, and large ones: with a thousand small ones, Python took all the time."""
DENSER = ["topk(0.9)", "topk(0.8) | int8", "randk(1.0) | bf16"]
CHOICES = ["numpy", *native.instruction_sets()[-1:]]


@pytest.mark.parametrize("spec", [*cases.ALL, *DENSER])
def test_a_decoder_takes_no_more_than_the_vector(spec: str) -> None:
    rng = np.random.default_rng(len(spec))
    codec = parse(spec).bind(LAYOUT)
    payloads = [bytes(codec.encode(cases.make("normal", ELEMENTS, 1))[0])]
    payloads += [mutate(payloads[0], rng), payloads[0] + b"\0"]
    for choice in CHOICES:
        taken = memory.worst(codec, payloads, ELEMENTS, choice)
        assert taken <= 4 * ELEMENTS + memory.FIXED, (choice, taken / (4 * ELEMENTS))


@pytest.mark.parametrize("spec", ["int8", "q4", "sign", "topk(1.0) | q2", "topk(1.0) | int8"])
def test_checking_and_applying_takes_no_more_for_a_longer_vector(spec: str) -> None:
    codec = parse(spec).bind(LAYOUT)
    payload = bytes(codec.encode(cases.make("normal", ELEMENTS, 1))[0])
    out = np.zeros(ELEMENTS, np.float32)

    def work() -> None:
        codec.check(payload, ELEMENTS)  # type: ignore[attr-defined]
        codec.apply(payload, 0.5, out)  # type: ignore[attr-defined]

    for choice in CHOICES:
        memory.peak_of(choice, work)
        assert memory.peak_of(choice, work) < 2 * memory.FIXED


def test_what_is_kept_counts() -> None:
    def keep() -> None:
        kernels.current().threshold_of(np.zeros(ELEMENTS, np.float32), None, 1)

    for choice in CHOICES:
        assert memory.peak_of(choice, keep) >= 4 * ELEMENTS
