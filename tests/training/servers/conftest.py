"""What tests of groups share: ranks that are forked once for each number of them."""

from __future__ import annotations

import pytest
import ranks


@pytest.fixture(scope="package")
def worlds():
    """`worlds(4)`: four ranks that wait for work, and have torch and what it remembers of layers
    from the tests before."""
    found = {}

    def world(count):
        if count not in found or found[count].is_over:
            found[count] = ranks.World(count)
        return found[count]

    yield world
    for each in found.values():
        each.close()
