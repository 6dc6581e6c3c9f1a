"""Tests see of the package what its users see: no test reaches for a private name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PRIVATE = re.compile(r"_[a-z]\w*$", re.IGNORECASE)
OWN = {"self", "cls"}
OF_OTHERS = {
    "_exit": "os: a public function",
    "_replace": "named tuples: a public method",
    "_actions": "argparse: no public way to list a parser's verbs",
    "_SubParsersAction": "argparse: the same",
    "_orders": "dp-accounting: no public way to its divergences",
    "_rdp": "dp-accounting: the same",
    "_execute_child": "subprocess: what starts a process, and is another for a forked one",
    "_internal_poll": "subprocess: the same, of what asks for its end",
    "_wait": "subprocess: the same, of what waits for its end",
    "_assign_work_unit": "pytest-xdist: its schedulers share it with those made of them",
    "_reschedule": "pytest-xdist: the same",
    "_repr_html_": "IPython: what it asks an object for, to show it in a notebook",
}
"""Names of other packages, each with the reason. There are none of edgetrain."""


def private(name: str) -> bool:
    """Whether a name is private; names with two underscores on both sides are Python's."""
    return PRIVATE.match(name) is not None and not name.startswith("__")


def reaches(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, what it says) of each private name of something else than `self`: as an attribute, in
    an import, and as the second argument of setattr, getattr or delattr."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            if ast.unparse(node.value) not in OWN and node.attr not in OF_OTHERS:
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, alias.name) for alias in node.names if private(alias.name)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
            for argument in node.args[:2]:
                value = argument.value if isinstance(argument, ast.Constant) else ""
                if isinstance(value, str) and private(value.rsplit(".", 1)[-1]):
                    found.append((node.lineno, ast.unparse(node)))
    return found


def test_no_test_reaches_for_a_private_name():
    assert not [
        f"{path.relative_to(TESTS)}:{line}: {what}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, what in reaches(ast.parse(path.read_text("utf-8")))
    ]


def test_a_reach_is_found_in_every_form():
    source = """
import a
from a import _b
a._c
a.b()._d
monkeypatch.setattr(a, "_e", 1)
monkeypatch.setattr("a._f", 1)
self._g
a.__doc__
"""
    assert [line for line, _ in reaches(ast.parse(source))] == [3, 4, 5, 6, 7]
