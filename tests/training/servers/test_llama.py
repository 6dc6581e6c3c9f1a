"""The Llama of the examples on every kind of placement; skipped without transformers."""

from __future__ import annotations

from pathlib import Path

import group_cases as cases
import numpy as np
import pytest

pytest.importorskip("transformers", reason="an example of its own, no dependency of the package")
EXAMPLES = Path(__file__).parents[3] / "examples"
JOB = cases.job_of("task=llama:llama", "data.limit_bytes=20000", "data.context=8", "data.width=16",
                   "data.layers=2")  # fmt: skip


@pytest.fixture(scope="module")
def reference():
    return cases.alone(JOB, beside=EXAMPLES)


@pytest.mark.parametrize(
    "words",
    ["data=2 shard=2 zero=3", "pipeline=2 microbatches=4", "tensor=2", "tensor=2 norms=split",
     "sequence=2", "sequence=2 ulysses=2 recompute=yes"],
)  # fmt: skip
def test_a_llama_trains_what_one_process_trains(worlds, reference, words):
    found = worlds(2).run(cases.train, JOB, words, True, cases.STEPS, EXAMPLES)
    np.testing.assert_allclose(found[0][0], reference[0], rtol=0, atol=1e-9)
