"""The tables of docs/reference/run-folder.md."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/reference/run-folder.md").read_text("utf-8")


def rows(after, table=0):
    """The names in the first column of a table: the first one, or a later one, after this text."""
    assert PAGE.count(after) == 1, after
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.partition(after)[2], re.MULTILINE)
    return {
        name
        for line in tables[table].splitlines()[2:]
        for name in re.findall(r"`(\w+)`", line.split(" | ")[0])
    }
