"""A million messages that are none, or wrong, or come at the wrong time: does the hub bear them?"""

from __future__ import annotations

import os

import pytest

from endurance import fuzz

FRAMES = int(os.environ.get("FRAMES", "1000000"))
SEED = int(os.environ.get("SEED", "0"))


def attacked(name, frames, seed):
    """Attack one kind of job; print a row; what is not as promised."""
    result = fuzz.attacked(name, frames, seed)
    print(fuzz.HEADER, fuzz.line(result), sep="\n", flush=True)
    return result.wrong


@pytest.mark.parametrize("name", fuzz.KINDS_OF_JOB)
def test_a_hub_bears_messages_that_are_none(name, alone):
    assert alone(attacked, name, -(-FRAMES // len(fuzz.KINDS_OF_JOB)), SEED) == []
