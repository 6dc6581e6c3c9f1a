"""LoRA's adapters of a transformers model, in a fleet: they alone travel (`make test-zoo`)."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torchvision_beside
from command_line import hub, running
from safetensors.numpy import load_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora.py"
SAID = r"([\d,]+) of ([\d,]+) parameters travel; sent ([\d,]+) kB; loss ([\d.]+)"

pytestmark = pytest.mark.zoo


def test_only_adapters_travel_and_are_saved(tmp_path):
    words = "members=4", "strategy=fedavg", "local_steps=10", "--any-job"
    example = sys.executable, torchvision_beside.__file__, str(EXAMPLE)
    with hub(*words, cwd=tmp_path) as (serving, address), ExitStack() as stack:
        members = [
            stack.enter_context(running(str(i), address, program=example, cwd=tmp_path))
            for i in range(4)
        ]
        assert [each.finish(240) for each in members] == [0] * 4, members[0].said
        assert serving.finish() == 0
    said = [re.search(SAID, each.said).groups() for each in members]
    assert len({loss for *_, loss in said}) == 1, "all end with the fleet's adapters"
    numbers = [[float(each.replace(",", "")) for each in one[:3]] for one in said]
    adapters, whole, sent = min(numbers)  # the first to join sends the base, too
    assert 6 * 4 * adapters < 1000 * sent < 7 * 4 * adapters < 4 * whole, "six rounds of float32"
    kept = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert all("lora_" in name for name in kept)
    assert sum(tensor.size for tensor in kept.values()) == adapters
