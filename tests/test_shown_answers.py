"""What a page shows below a command whose answer no machine changes is what the command prints."""

from __future__ import annotations

import re
import shlex

import pytest
from documented_commands import PAGES, ROOT

from edgetrain.__main__ import main

SAME_EVERYWHERE = ("edgetrain privacy --", "edgetrain simulate examples/slow-links.toml")
"""Worked out, or in virtual time, of files that are here."""


def shown():
    """(page, command, the lines below it) of every console block."""
    for path in PAGES:
        for block in re.findall(r"^```console\n(.*?)^```", path.read_text("utf-8"), re.S | re.M):
            for part in re.split(r"^\$ ", re.sub(r"\s*\\\n\s*", " ", block), flags=re.M):
                line, *below = part.splitlines() or [""]
                if below and line.startswith(SAME_EVERYWHERE):
                    yield pytest.param(line, below, id=f"{path.name}: {line}")


CASES = [*shown()]


def test_every_kind_is_on_a_page():
    lines = [case.values[0] for case in CASES]
    assert all(any(line.startswith(kind) for line in lines) for kind in SAME_EVERYWHERE)


@pytest.mark.parametrize(("line", "below"), CASES)
def test_a_page_shows_what_is_printed(line, below, tmp_path, monkeypatch, capsys):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(shlex.split(line)[1:]) == 0
    printed = [" ".join(each.split()) for each in capsys.readouterr().out.splitlines()]
    assert [each for each in below if " ".join(each.split()) not in printed] == []
