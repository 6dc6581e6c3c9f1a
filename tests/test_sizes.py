"""What a reader can hold in the head: classes, constructors and functions have a largest size."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import edgetrain

PACKAGE = Path(edgetrain.__file__).parent
CLASS_LINES, FUNCTION_LINES, ARGUMENTS = 350, 90, 8
ONE_NUMERIC_IDEA = {"codecs/kernels/numpy_twin.py:NumpyTwin", "codecs/kernels/native.py:Native"}
"""Tables of kernels, one method each: longer, and simple all the same."""
SMALL = {
    "exchange/member/link.py:Link": 300,
    "exchange/hub/protocol.py:Hub": 300,
    "training/member/member.py:Member": 300,
}
"""The classes that everything goes through stay smaller than others."""


@functools.cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Every class and function of the package, with the place where it stands."""
    return [
        (f"{path.relative_to(PACKAGE).as_posix()}:{node.name}", node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first to the last of its code, docstring included."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_no_class_is_too_long():
    assert not [
        f"{where}: {lines(node)} lines"
        for where, node in nodes()
        if isinstance(node, ast.ClassDef)
        and where not in ONE_NUMERIC_IDEA
        and lines(node) > SMALL.get(where, CLASS_LINES)
    ]


def test_no_function_is_too_long():
    assert not [
        f"{where}: {lines(node)} lines"
        for where, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines(node) > FUNCTION_LINES
    ]


def constructors() -> Iterator[tuple[str, int]]:
    """Every constructor that is written out, and how many arguments it takes."""
    for where, node in nodes():
        for method in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                arguments = method.args
                yield where, len(arguments.args) + len(arguments.kwonlyargs) - 1


def test_no_constructor_takes_too_many_arguments():
    assert not [
        f"{where}: {count} arguments" for where, count in constructors() if count > ARGUMENTS
    ]


def test_the_classes_that_must_stay_small_are_still_there():
    there = {where for where, node in nodes() if isinstance(node, ast.ClassDef)}
    assert there >= {*SMALL, *ONE_NUMERIC_IDEA}
