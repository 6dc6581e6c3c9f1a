"""Nobody outside the strategies asks which strategy it is: they ask for what they depend on."""

from __future__ import annotations

import ast
from pathlib import Path

import edgetrain
from edgetrain.strategies import TABLE

PACKAGE = Path(edgetrain.__file__).parent
KINDS = {"gradient", "displacement"}


def asked(tree: ast.AST) -> list[int]:
    """Lines that compare something with a strategy's name or kind."""
    places = [node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.MatchValue)]
    found = {
        node.lineno
        for node in places
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and part.value in KINDS | TABLE.keys()
    }
    return sorted(found)


def test_the_search_finds_what_it_is_for():
    for code in ("a.contributes == 'gradient'", "a.name in ('dga', 'fedavg')", "'dga' != name"):
        assert asked(ast.parse(code)) == [1]
    assert asked(ast.parse("strategy.hub_keeps_base is True")) == []


def test_no_other_room_compares_a_strategys_name_or_kind():
    assert not [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "strategies"
        for line in asked(ast.parse(path.read_text("utf-8")))
    ]
