"""What CPUs cannot do: the docs say it in torch's words, and torch still says it."""

from __future__ import annotations

from pathlib import Path

import cpu_limits
import pytest
import ranks
import torch

pytestmark = pytest.mark.real

DOCS = Path(__file__).parents[3] / "docs/reference/placements.md"


@pytest.fixture(scope="module")
def world():
    with ranks.world(2) as found:
        yield found


@pytest.mark.skipif(torch.cuda.is_available(), reason="of torch without CUDA")
@pytest.mark.parametrize("place", range(len(cpu_limits.LIMITS)))
def test_the_docs_have_torchs_words(world, place):
    said = world.run(cpu_limits.words_of, place)[0]
    assert said, f"{cpu_limits.LIMITS[place].__name__} works: the docs say it does not"
    assert said in DOCS.read_text("utf-8")
