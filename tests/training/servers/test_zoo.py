"""Models of other people's libraries in six ways (`make test-zoo`): each trains what torch alone
does, or is refused in words of edgetrain; docs/reference/placements.md has the table that this
prints."""

from __future__ import annotations

import time
from pathlib import Path

import odd_models as odd
import pytest
import ranks
import zoo_models as zoo
from patience import measure, patience

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore"),  # of the libraries
    pytest.mark.usefixtures("own_imports"),
]

LONGEST_S = 60.0
"""Of a cell, on an idle machine."""
PAGE = Path(__file__).parents[3] / "docs/reference/placements.md"


@pytest.fixture(scope="module")
def table():
    """The table, and its rows so far."""
    found, rows = odd.Table(zoo.WAYS), list[str]()
    print(f"\n{measure()}\n\n{found.head}", flush=True)
    yield found, rows
    print(f"\n{found.reasons}", flush=True)


@pytest.fixture(autouse=True)
def as_patient_as_a_cell(table, monkeypatch):
    """With ranks: what takes too long is over its time, and no silence."""
    monkeypatch.setattr(ranks.World, "patience_s", patience(LONGEST_S))


@pytest.mark.parametrize("subject", zoo.ZOO)
def test_a_model_is_trained_as_torch_does_or_refused_in_words_of_ours(worlds, table, subject):
    found, slow = {}, {}
    for way in zoo.WAYS.values():
        began = time.monotonic()
        found[way] = zoo.judge(worlds, subject, way)
        if (taken := time.monotonic() - began) > patience(LONGEST_S):
            slow[way] = taken
    table[1].append(table[0].row(subject, found))
    print(table[1][-1], flush=True)
    bad = {way: each for way, each in found.items() if each.kind in ("wrong", "failed")}
    assert not bad
    assert not slow


def test_the_page_has_this_table(table):
    found, rows = table
    if len(rows) == len(zoo.ZOO):
        assert "\n".join([found.head, *rows, "", found.reasons]) in PAGE.read_text("utf-8")
