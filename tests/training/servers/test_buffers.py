"""Buffers of a group are those of one process: shared ones, plain attributes, and those that the
forward pass changes, in evaluation and snapshots as well."""

from __future__ import annotations

import buffer_cases as cases
import pytest
import torch

pytestmark = pytest.mark.real


def check(found, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("fixed", "data=2 shard=2 zero=3 recompute=yes"),
        ("fixed", "pipeline=2 microbatches=4"),
        *(("unordered", words) for words in ("data=2", "data=2 shard=2 zero=3", "pipeline=2")),
        ("running", "data=1"),
        ("running", "pipeline=2"),
    ],
)
def test_a_group_has_the_buffers_of_one_process(worlds, kind, words):
    count = 1 if words == "data=1" else 2
    check(worlds(count).run(cases.together, kind, words)[0], cases.alone(kind))


def test_buffers_that_change_are_in_snapshots(worlds, tmp_path):
    worlds(2).run(cases.together, "running", "pipeline=2", 2, tmp_path)
    found = worlds(1).run(cases.together, "running", "data=1", 5, tmp_path, 2)
    check(found[0], cases.alone("running", 5))
    assert int(found[0]["blocks.1.calls"]) == 5
