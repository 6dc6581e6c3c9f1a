"""Documents in plain sentences and in the field's terms: few relative clauses, no former names."""

from __future__ import annotations

import re

import pytest
from documented_commands import ROOT

from edgetrain.errors import RENAMED

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "findings/README.md")
)
PRONOUNS = {"that", "which", "who", "what", "whose", "whom"}
MOST = 20.0
"""Relative pronouns in 1,000 words of a page. Other projects of this field have 12 to 20."""
FORMER = re.compile(
    r"\b(?:strategy|hub|train|fleet)\.(?:KEYS)\b|\bdga\((?:own|leave|drift)\)"
    r"|edgetrain tell\b".replace("KEYS", "|".join(each for each in RENAMED if each.isidentifier()))
)


def prose(page: str) -> list[str]:
    """The words of a page in order, without blocks and pieces of code."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    return re.findall(r"[A-Za-z][A-Za-z'-]*", re.sub(r"`[^`]*`", " x ", text))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_few_relative_clauses(page):
    words = prose(page)
    share = 1000 * sum(word.lower() in PRONOUNS for word in words) / max(len(words), 1)
    assert share <= MOST


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_former_names(page):
    assert FORMER.findall((ROOT / page).read_text("utf-8")) == []


def test_the_measure_counts_prose_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("test_prose.ROOT", tmp_path)
    (tmp_path / "page.md").write_text("What `that` counts, which is this:\n```\nwho\n```\n")
    assert prose("page.md") == ["What", "x", "counts", "which", "is", "this"]
