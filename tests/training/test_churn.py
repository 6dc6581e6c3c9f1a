"""Members that come and go: what a hub holds afterwards. The long run: benchmarks/churn.py."""

from __future__ import annotations

import gc
import importlib
from collections import Counter
from pathlib import Path

import pytest

from edgetrain.exchange.hub.members import AWAY, MemberRecord


@pytest.fixture
def benchmark(monkeypatch, own_imports):
    """The long run's program, which imports others beside it."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("churn")


def held():
    """Live objects by type."""
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())


def test_after_hours_of_churn_a_hub_holds_what_it_held_before(tmp_path, benchmark):
    others = held()["MemberRecord"]  # of fleets of other tests in this process
    churn = benchmark.Churn(tmp_path, pace_s=15.0)
    for _ in range(70):  # as many as it remembers of those that are gone, too
        churn.minute()
    before, files = held(), churn.sample(0).descriptors
    for _ in range(45):
        churn.minute()
    after = held()
    more = {kind: count - before[kind] for kind, count in after.items()}
    assert {kind: count for kind, count in more.items() if count > 30} == {}
    assert (
        after["MemberRecord"] - others
        <= (1 + AWAY + len(churn.room.hub.statistics().open_rounds)) * benchmark.PLACES
    )
    assert churn.sample(1).descriptors == files
    assert churn.events["joined"] > 80
    assert churn.events["back"] > 60
    assert len(list(churn.folder.iterdir())) < 20
    assert isinstance(next(iter(churn.room.hub.members)), MemberRecord)
    churn.close()
