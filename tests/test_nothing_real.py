"""`make test` says the same on a busy machine: what waits for real time is marked or named here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import nothing_real
import pytest
from nothing_real import OTHERS, Real

TESTS = Path(__file__).parent
CLOCKS = {"sleep", "monotonic", "time", "perf_counter"}
CHAOS, ON_DEMAND = "fleets of processes: test_real_processes.py is real", "its users are marked"
FILES = {
    "chaos/clock.py": CHAOS,
    "chaos/command.py": CHAOS,
    "chaos/fleet.py": CHAOS,
    "chaos/forwarder.py": CHAOS,
    "chaos/hub.py": CHAOS,
    "chaos/member.py": CHAOS,
    "chaos/trials.py": CHAOS,
    "cli/test_keys_cli.py": "issues a token, which is good for hours",
    "fakes/boot_card.py": ON_DEMAND,
    "fakes/command_line.py": ON_DEMAND,
    "fakes/costs.py": "measures what tests cost",
    "fakes/first_boots.py": ON_DEMAND,
    "fakes/hub_runs.py": ON_DEMAND,
    "fakes/network_spaces.py": ON_DEMAND,
    "fakes/patience.py": "measures the machine",
    "fakes/raw_member.py": ON_DEMAND,
    "fakes/remote_laws.py": ON_DEMAND,
    "fakes/ssh_fleet.py": ON_DEMAND,
    "fakes/tc_qemu.py": ON_DEMAND,
    "fakes/twin_root.py": ON_DEMAND,
    "fakes/unit_runner.py": ON_DEMAND,
    "fakes/user_mode_linux.py": ON_DEMAND,
    "fleet/networks/emulation/guests/guard.py": "runs in a guest of test_uml.py",
    "fleet/networks/emulation/guests/words.py": "runs in a guest of test_uml.py",
    "test_nothing_real.py": "sleeps where that is refused",
    "training/test_fixed_first.py": "hands a restored hub its clock's reading",
    "training/test_old_checkpoints.py": "hands a restored hub its clock's reading",
}
"""Files that look at the clock, and why that decides over no test of `make test`."""


def looks(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where code sleeps, asks the real clock, or bounds something in seconds."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if (name.startswith("time.") and name[5:] in CLOCKS) or name.endswith(".settimeout"):
            yield node.lineno, name
        if name == "pytest.mark.timeout":
            yield node.lineno, name
        for each in node.keywords:
            if each.arg == "timeout":
                yield node.lineno, f"{name}(timeout=)"


def marks(nodes: list[ast.expr]) -> set[str]:
    return {part for node in nodes for part in ast.unparse(node).replace("(", ".").split(".")}


def names(node: ast.AST) -> set[str]:
    """What a function or a class may call: names, and fixtures by its arguments."""
    inner = list(ast.walk(node))
    fixtures = {each.arg for each in inner if isinstance(each, ast.arg)}
    return fixtures | {each.id for each in inner if isinstance(each, ast.Name)}


def in_make_test(path: Path) -> Iterator[str]:
    """The places in a file that a test of `make test` may come to: what its tests use of the file,
    and all of a file without tests."""
    body = ast.parse(path.read_text("utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            values = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            if marks(values) & OTHERS:
                return
    named = {name: node for node in body if (name := getattr(node, "name", ""))}
    begin = [node for node in body if not getattr(node, "name", "")]
    for name, node in named.items():
        is_test = name.startswith("test_") or name.startswith("Test")
        if not path.name.startswith("test_") or is_test or "autouse" in ast.unparse(node):
            begin += [] if marks(getattr(node, "decorator_list", [])) & OTHERS else [node]
    seen: list[ast.stmt] = []
    while begin:
        node = begin.pop()
        if node in seen:
            continue
        seen.append(node)
        used = names(node) if getattr(node, "name", "") else set()
        begin += [named[each] for each in used & named.keys()]
        for line, what in looks(node):
            yield f"{path.relative_to(TESTS)}:{line} {what}"


def test_no_test_depends_on_how_busy_the_machine_is():
    found = [
        place
        for path in sorted(TESTS.rglob("*.py"))
        if path.relative_to(TESTS).as_posix() not in FILES
        and path.relative_to(TESTS).parts[0]
        not in ("endurance", "trainers", "trackers", "notebook")
        for place in in_make_test(path)
    ]
    assert not found, "mark these tests `real`, or pass a clock in:\n" + "\n".join(found)


def test_files_that_look_at_the_clock_are_there_and_do():
    assert all((TESTS / name).exists() and list(in_make_test(TESTS / name)) for name in FILES)
    assert all(FILES.values())
    assert all((TESTS.parent / name).exists() and why for name, why in nothing_real.ALLOWED.items())


@pytest.mark.parametrize("code", ["time.sleep(0)", "end.settimeout(3)", "run(['x'], timeout=3)",
                                  "assert time.monotonic() - began < 5"])  # fmt: skip
def test_what_waits_is_seen(code, tmp_path):
    assert list(looks(ast.parse(code)))


def test_what_is_real_is_refused_where_it_would_start():
    import subprocess
    import time

    with pytest.raises(Real, match="mark the test `real`"):
        time.sleep(0)
    with pytest.raises(Real, match=r"subprocess.Popen \('true'"):
        subprocess.run(["true"])
