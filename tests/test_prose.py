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
MOST = 22.0
"""Relative pronouns in 1,000 words of a page. Other projects of this field have 12 to 20."""
ABOVE = {
    "CHANGELOG.md": 23.9,
    "docs/decisions/001-base-is-kept-apart.md": 32.4,
    "docs/decisions/002-buffers-stay-local.md": 42.6,
    "docs/decisions/003-numpy-halves-and-a-hub-without-torch.md": 30.5,
    "docs/decisions/004-automatic-delay.md": 32.3,
    "docs/decisions/011-sparse-payload.md": 25.4,
    "docs/decisions/012-residual-in-parameters.md": 26.8,
    "docs/decisions/013-tokens-are-keys.md": 32.5,
    "docs/decisions/016-what-a-checkpoint-leaves-out.md": 36.5,
    "docs/decisions/021-connections-named-by-key.md": 38.3,
    "docs/decisions/022-eleven-rooms.md": 42.9,
    "docs/decisions/024-completion-scripts.md": 36.9,
    "docs/decisions/025-codec-auto.md": 44.1,
    "docs/decisions/027-which-correction.md": 29.3,
    "docs/decisions/030-gpu-servers.md": 34.4,
    "docs/decisions/037-where-control-variates-act.md": 33.1,
    "docs/decisions/040-a-reducer-is-a-hub-of-a-stretch.md": 33.7,
    "docs/decisions/045-slots.md": 36.0,
    "docs/decisions/046-a-search-by-numbers.md": 32.3,
    "docs/decisions/047-a-fields-type-says-what-it-may-hold.md": 43.1,
    "docs/decisions/049-closed-forms-stay-for-now.md": 40.0,
}
"""Pages that still have more, and how many they may have: rewrite one, and take it out."""
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
    assert share <= ABOVE.get(page, MOST)


def test_pages_in_plain_sentences_stay_so():
    """A page that came below the bound is held to it."""
    assert ABOVE.keys() <= set(PAGES)
    for page in ABOVE:
        words = prose(page)
        assert 1000 * sum(word.lower() in PRONOUNS for word in words) > MOST * len(words), page


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_former_names(page):
    assert FORMER.findall((ROOT / page).read_text("utf-8")) == []


def test_the_measure_counts_prose_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("test_prose.ROOT", tmp_path)
    (tmp_path / "page.md").write_text("What `that` counts, which is this:\n```\nwho\n```\n")
    assert prose("page.md") == ["What", "x", "counts", "which", "is", "this"]
