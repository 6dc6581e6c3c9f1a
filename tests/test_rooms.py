"""Rooms import only the rooms below them, and no files import each other in a cycle."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import edgetrain

PACKAGE = Path(edgetrain.__file__).parent
GROUND = {"errors", "extras", "files", "extensions"}
MAY = {
    "extras": set(),
    "errors": {"extras"},
    "extensions": {"errors"},
    "files": {"errors"},
    "vectors": GROUND,
    "fleet": GROUND,
    "runs": GROUND,
    "strategies": GROUND | {"vectors"},
    "tasks": GROUND | {"vectors"},
    "codecs": GROUND | {"vectors"},
    "exchange": GROUND | {"vectors", "codecs", "strategies"},
    "jobs": GROUND | {"vectors", "codecs", "fleet", "runs", "strategies", "tasks", "exchange"},
}
MAY["testing"] = GROUND | {"vectors", "codecs", "strategies"}
MAY["jobs"] |= {"testing"}
MAY["training"] = MAY["jobs"] | {"jobs"}
MAY["provisioning"] = GROUND | {"vectors", "fleet", "runs", "exchange", "jobs"}
MAY["cli"] = MAY["training"] | {"training", "provisioning", "api"}
FACES = {"__init__", "__main__", "api", "integrations"}
ROOT = {*MAY, *FACES, "py.typed"}
"""What stands at the root of the package: the rooms, and the faces."""


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def modules() -> dict[str, Path]:
    """Every module's dotted name and file."""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@functools.cache
def named(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [e for e in ast.walk(parsed(path)) if isinstance(e, ast.Import | ast.ImportFrom)]


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """All edgetrain modules it imports, inside functions and under TYPE_CHECKING as well."""
    found = set()
    for node in named(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in names}
    return (found & known.keys()) - {"edgetrain"}


def room(name: str) -> str:
    """The room that a module is in."""
    return name.split(".")[1] if "." in name else "__init__"


def test_rooms_import_only_what_they_may():
    known = modules()
    wrong = [
        f"{name} imports {other}"
        for name, path in known.items()
        for other in imported(path, known)
        if room(name) not in FACES | {room(other)} and room(other) not in MAY[room(name)]
    ]
    assert not wrong, "\n".join(sorted(wrong))


def doors(name: str) -> set[str]:
    """The modules that a room lists in its docstring: others may import them, and the room."""
    text = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text("utf-8"))) or ""
    listed = text.partition("Doors: ")[2].partition(".\n")[0].removesuffix(".")
    return {f"edgetrain.{name}.{each.strip()}" for each in listed.split(",") if each.strip()}


@pytest.mark.parametrize(
    "name", sorted(MAY.keys() - {"errors", "extras", "extensions", "testing", "cli"})
)
def test_other_rooms_come_through_the_doors(name):
    known = modules()
    entered = {
        other
        for module, path in known.items()
        for other in imported(path, known)
        if room(other) == name and room(module) != name and other != f"edgetrain.{name}"
    }
    assert entered == doors(name), "list what others import, and nothing else"


def test_no_import_cycles():
    known = modules()
    left = {name: imported(path, known) - {name} for name, path in known.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"in a cycle, or importing one: {sorted(left)}"


def test_the_root_holds_the_rooms_and_nothing_else():
    there = {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")
    }
    loose = {path.name for path in PACKAGE.iterdir() if path.is_file() and path.suffix != ".py"}
    assert there | loose == ROOT


STARTER = {"Task"}
"""What `edgetrain init --task` writes for a user to change has the names that the docs use."""


def test_a_public_class_has_a_name_of_its_own():
    """One name, one thing: who searches for it finds it."""
    homes: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    shared = {name: found for name, found in homes.items() if len(found) > 1}
    assert shared.keys() <= STARTER, shared
