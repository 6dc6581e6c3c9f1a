"""The list of codecs: its ratios are those of the payloads, and exact where it says so."""

import numpy as np
import pytest

from edgetrain.codecs import parse
from edgetrain.codecs.table import CHAIN, SAMPLE_LAYOUT, TABLE, CodecRow, ratio, sample


@pytest.mark.parametrize("row", [*TABLE.values(), CHAIN], ids=lambda row: row.example)
def test_a_ratio_is_exact_where_the_length_does_not_depend_on_values(row: CodecRow) -> None:
    codec = parse(row.example).bind(SAMPLE_LAYOUT)
    lengths = {
        len(codec.encode(vector)[0])
        for vector in (sample(), np.sort(sample()), np.repeat(sample()[:256], 256))
    }
    assert row.exact == (len(lengths) == 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp32", 1),
        ("bf16", 2),
        ("int8", 4 * 256 / 260),
        ("sign", 32 * 512 / (512 + 32)),
        ("randk(0.01)", 4 * 65536 / (4 + 2 + 4 * 655)),
        ("low-rank(4)", 65536 / (4 * 512)),
        ("powersgd(4)", 65536 / (4 * 512)),
    ],
)
def test_ratios(text: str, expected: float) -> None:
    assert ratio(parse(text)) == expected


def test_the_sample_is_the_same_everywhere() -> None:
    assert 60 < ratio(parse("topk(0.01)")) < 90
    assert 250 < ratio(parse("topk(0.01) | q2")) < 350
    assert sample().tobytes() == sample().tobytes()
