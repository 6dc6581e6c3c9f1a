"""What the documents promise is shown by tests: those that they name are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGE = re.compile(r"(?<![\w./])docs/[a-z-]+/[\w-]+\.md")
NAMED = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")
OF_PROMISES = (
    "docs/explanation/failures.md",
    "docs/explanation/security.md",
    "docs/how-to/recovery.md",
    "docs/reference/journal.md",
)
"""Pages whose sections promise something, all of them."""


@cache
def found_in(path: Path) -> frozenset[str]:
    """The names of the functions at the top of a test file."""
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def named_tests() -> list[tuple[str, str, str]]:
    """(page, file, test) of every test that a document names; test is "" for a whole file."""
    return [
        (page.relative_to(ROOT).as_posix(), *found)
        for page in PAGES
        for found in NAMED.findall(page.read_text("utf-8"))
    ]


def test_every_test_that_a_document_names_is_there():
    named = named_tests()
    assert len(named) > 50
    missing = [
        f"{page}: {file}::{test}"
        for page, file, test in named
        if not (ROOT / file).is_file() or (test and test not in found_in(ROOT / file))
    ]
    assert not missing


def test_every_threat_to_a_hub_names_the_test_that_shows_what_happens():
    text = (ROOT / "docs/explanation/security.md").read_text("utf-8")
    first = text.index("| no key, or one that is not on the list |")
    rows = text[first : text.index("\n\n", first)].splitlines()
    assert len(rows) > 8
    assert [row for row in rows if not NAMED.search(row)] == []


@pytest.mark.parametrize("page", OF_PROMISES)
def test_every_section_of_promises_names_a_test(page):
    text = (ROOT / page).read_text("utf-8")
    sections = re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]
    assert [each.partition("\n")[0] for each in sections if not NAMED.search(each)] == []


def test_a_release_has_a_page_in_the_changelog():
    """What a user finds, not what was done: say it in a line that is there, or in one more."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert sections
    assert [section.split("\n")[0] for section in sections if section.count("\n") > 80] == []


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_to_open_are_there(page):
    """In the package, where no other folder is named."""
    text = (ROOT / page).read_text("utf-8")
    named = re.findall(r"`((?:[\w.-]+/)+[\w-]+\.\w+|[\w-]+\.py)`", text)
    assert len(named) > 5
    homes = (ROOT, ROOT / "edgetrain", ROOT / "edgetrain" / "codecs")
    assert [name for name in named if not any((home / name).exists() for home in homes)] == []


def texts_of(path: Path) -> str:
    """All texts in a module, those of f-strings in pieces."""
    tree = ast.parse(path.read_text("utf-8"))
    nodes = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(value for value in nodes if isinstance(value, str))


def test_every_message_that_symptoms_names_is_printed():
    page = (ROOT / "docs/how-to/symptoms.md").read_text("utf-8")
    firsts = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    messages = [m for first in firsts for m in re.findall("`([^`]+)`", first) if " " in m]
    assert len(messages) > 15
    printed = "\n".join(texts_of(path) for path in sorted((ROOT / "edgetrain").rglob("*.py")))
    pieces = [piece.strip(" :'") for message in messages for piece in message.split("…")]
    assert not [piece for piece in pieces if piece not in printed]


def test_every_page_that_code_names_is_there():
    folders = [ROOT / name for name in ("edgetrain", "examples", "benchmarks", "tests", "devices")]
    files = [path for folder in folders for path in sorted(folder.rglob("*.*"))]
    named = {
        page
        for path in files
        if path.suffix in (".py", ".toml", ".c")
        for page in PAGE.findall(path.read_text("utf-8"))
    }
    assert len(named) > 20
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []
