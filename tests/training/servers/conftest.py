"""What tests of groups share: ranks that are forked once for each number of them."""

from __future__ import annotations

import inspect

import pytest
import ranks
from torch.distributed.fsdp import fully_shard


@pytest.fixture(scope="package")
def worlds():
    """`worlds(4)`: four ranks that wait for work, and have torch and what it remembers of layers
    from the tests before."""
    if "ignored_params" not in inspect.signature(fully_shard).parameters:
        pytest.skip("groups are refused with this torch")
    found = {}

    def world(count):
        if count not in found or found[count].is_over:
            found[count] = ranks.World(count)
        return found[count]

    yield world
    for each in found.values():
        each.close()
