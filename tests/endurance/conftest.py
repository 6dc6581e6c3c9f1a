"""What all runs here share: they are marked, may take hours, and print while they run."""

from __future__ import annotations

import functools
import multiprocessing
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LONGEST_S = 8 * 3600


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("endurance")
            item.add_marker(pytest.mark.timeout(LONGEST_S))


@pytest.fixture
def printed(capsys):
    """Call something, and let all see what it prints."""

    def call(work, *given):
        with capsys.disabled():
            print()
            return work(*given)

    return call


@pytest.fixture
def alone(printed):
    """Call something in a new process: the memory it looks at is then its own."""

    def in_a_new_process(work, *given):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(work, given)

    return functools.partial(printed, in_a_new_process)
