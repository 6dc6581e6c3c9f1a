"""The documentation's Python is run, and its table of keys is whole."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from edgetrain.fleet.networks import Direction

TEXT = (Path(__file__).parents[3] / "docs/reference/networks.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.real
@pytest.mark.parametrize("code", BLOCKS)
def test_the_code_runs(code: str) -> None:
    exec(compile(code, "docs/reference/networks.md", "exec"), {})


def test_every_key_is_described() -> None:
    for field in dataclasses.fields(Direction):
        assert f"`{field.name}`" in TEXT
