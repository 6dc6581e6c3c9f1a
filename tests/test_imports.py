"""What may import what: light parts stay light, one module knows ZeroMQ, few know torch."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgetrain

pytestmark = pytest.mark.real

PACKAGE = Path(edgetrain.__file__).parent
HEAVY = ("torch", "zmq", "numpy", "matplotlib", "rich", "sklearn", "cryptography",
         "starlette", "uvicorn")  # fmt: skip

TORCH = ("tasks/", "training/")
"""Rooms that may import torch, at whatever place."""
TORCH_INSIDE_FUNCTIONS = {"fleet/devices/cost.py"}
DISTRIBUTED = re.compile(r"torch\.distributed|from torch import .*distributed")
"""One folder knows it."""
LAZY_ONLY = ("matplotlib", "rich", "sklearn", "dp_accounting", "starlette", "uvicorn", "onnx",
             "onnxruntime")  # fmt: skip
CRYPTOGRAPHY = ("cryptography",)
PRIMITIVES = "exchange/masks/primitives.py"
"""The one module that imports them. Nothing loads it before a job is secure."""


def loaded_by(*code: str) -> list[str]:
    """Which heavy modules a fresh interpreter has loaded after this."""
    report = f"import json, sys; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*code, report])], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LIGHT = ["errors", "fleet.catalog", "jobs.reading", "exchange.messages", "fleet.networks",
         "fleet.devices", "strategies", "exchange.addresses", "exchange.keys.keyring",
         "strategies.merging", "exchange.masks.terms", "jobs.privacy.promise", "jobs.bundles",
         "exchange.transport", "runs.reports.units", "runs.folder", "cli", "__main__"]  # fmt: skip


@pytest.fixture(scope="module")
def light():
    """What each light module loads, tried in one interpreter that forks for each."""
    code = f"""
import importlib, json, os, sys
for name in {["", *LIGHT]!r}:
    sys.stdout.flush()
    if not os.fork():
        importlib.import_module("edgetrain" + "." * bool(name) + name)
        print(json.dumps([name, [m for m in {HEAVY!r} if m in sys.modules]]), flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_light_modules_load_nothing_heavy(light):
    assert light == {name: [] for name in ["", *LIGHT]}


def test_help_and_light_verbs_load_nothing_heavy():
    code = """
import contextlib, io, sys
from edgetrain.__main__ import main
from edgetrain.cli.parser import VERBS
for words in ["--help"], ["--version"], *([verb, "--help"] for verb in VERBS), ["strategies"]:
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main(words)
    assert said.getvalue(), words
    heavy = [name for name in %r if name in sys.modules]
    assert not heavy, (words, heavy)
"""
    assert loaded_by(code % (HEAVY,)) == []


def test_the_whole_command_starts_within_a_second_of_processor_time():
    code = (
        "import time\nfrom edgetrain.cli.parser import parser\nparser()\nprint(time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.0


def test_the_first_line_on_a_terminal_comes_before_the_first_import():
    """Imports take seconds on a busy machine: until then the terminal must not be silent."""
    code = """
import sys
loaded = []
class Terminal:
    def isatty(self): return True
    def flush(self): pass
    def write(self, text):
        if not loaded: loaded.append(sorted(sys.modules))
out, sys.stdout = sys.stdout, Terminal()
from edgetrain.__main__ import main
assert main(["run", "strategy=nosuch"]) == 2
ours = {name for name in loaded[0] if name.startswith("edgetrain")}
print(*ours, *{"argparse", "numpy", "inspect"} & set(loaded[0]), file=out)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"edgetrain", "edgetrain.__main__"}
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("verb", ["run", "keys"])
def test_a_verb_imports_no_other_verb(verb):
    code = (
        "import contextlib, sys\nfrom edgetrain.__main__ import main\n"
        f"with contextlib.suppress(SystemExit):\n    main([{verb!r}, '--nosuch'])\n"
        "print(*[name for name in sys.modules if name.startswith('edgetrain.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {name.rpartition(".")[2] for name in done.stdout.split()}
    assert found - {"running"} == {verb, "common", "parser", "hints"}


def test_a_simulated_run_loads_no_compiler_and_pictures_only_at_its_end(tmp_path):
    words = ["simulate", "members=2", "steps=2", "device=raspberry-pi-4b", "--runs", "."]
    compilers = ("torch._dynamo", "torch._inductor", "sympy", "sklearn", "matplotlib.pyplot")
    code = f"""
import sys
from edgetrain.__main__ import main
from edgetrain.training.simulated.simulation import Simulation
verdict = Simulation.verdict
def trained(self):
    assert "matplotlib" not in sys.modules
    return verdict(self)
Simulation.verdict = trained
assert main({words!r}) == 0
print("loaded", *[name for name in {compilers!r} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded"


def test_a_hub_needs_no_torch():
    """And cryptography only if contributions are masked."""
    plain = (
        "import edgetrain.exchange.hub.serve, edgetrain.exchange.zeromq.frames\n"
        "import edgetrain.training.hub_recorder, edgetrain.exchange.member.link\n"
        "from edgetrain.jobs import building, plan, reading, rules\n"
        "building.hub_of(rules.resolve(reading.parse({}, {})))"
    )
    assert not {"torch", *CRYPTOGRAPHY} & set(loaded_by(plain))
    secure = loaded_by(plain.replace("{}, {}", "{}, ['secure=true']"))
    assert set(secure) >= set(CRYPTOGRAPHY)
    assert "torch" not in secure


def modules():
    return [(path.relative_to(PACKAGE).as_posix(), path) for path in sorted(PACKAGE.rglob("*.py"))]


def imports(path: Path) -> dict[str, bool]:
    """Top-level packages a module imports at run time: True where as soon as it is loaded."""
    found: dict[str, bool] = {}

    def visit(node: ast.AST, at_once: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom) and child.module:
                names = [child.module]
            for name in names:
                top = name.split(".")[0]
                found[top] = found.get(top, False) or at_once
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            visit(child, at_once and not inside)

    visit(ast.parse(path.read_text("utf-8")), True)
    return found


def forbidden(name: str, path: Path) -> Iterator[str]:
    """What a module imports and may not."""
    found = imports(path)
    if "zmq" in found and not name.startswith("exchange/zeromq/"):
        yield "zmq"
    if "greenlet" in found and not name.startswith("training/simulated/"):
        yield "greenlet"
    inside = name in TORCH_INSIDE_FUNCTIONS and not found.get("torch")
    if "torch" in found and not (name.startswith(TORCH) or inside):
        yield "torch"
    yield from (f"{lazy}, outside functions" for lazy in LAZY_ONLY if found.get(lazy))
    yield from (each for each in CRYPTOGRAPHY if each in found and name != PRIMITIVES)
    if "pickle" in found:
        yield "pickle"
    if not name.startswith("training/servers/") and DISTRIBUTED.search(path.read_text("utf-8")):
        yield "torch.distributed"


def test_a_module_imports_only_what_it_may():
    """One test for all: four hundred would take pytest longer than the modules."""
    found = [f"{name}: {what}" for name, path in modules() for what in forbidden(name, path)]
    assert not found, "\n".join(found)


PURE = [
    *(
        f"jobs/placement/{name}.py"
        for name in (
            "words",
            "formulas",
            "machines",
            "stages",
            "cutting",
            "search",
            "decision",
        )
    ),
    "tasks/layers.py",
    "exchange/messages.py",
    "strategies/merging/rule.py",
    "exchange/hub/protocol.py",
    "exchange/hub/membership.py",
    "exchange/hub/members.py",
    "exchange/hub/masked_rounds.py",
    "strategies/closing.py",
    "exchange/hub/admission.py",
    "exchange/hub/contributions.py",
    "exchange/hub/effects.py",
    "exchange/hub/rounds.py",
    "exchange/hub/merger.py",
    "exchange/hub/delay.py",
    "vectors/parts.py",
    "exchange/hub/replay.py",
    "exchange/hub/open_rounds.py",
    "exchange/hub/terms.py",
    "exchange/hub/base_transfer.py",
    "exchange/masks/fixed_point.py",
    "exchange/masks/payloads.py",
    "exchange/masks/aggregator.py",
    "exchange/masks/masker.py",
    "exchange/masks/primitives.py",
    "exchange/hub/final_sync.py",
    "vectors/ranges.py",
    "strategies/displacement.py",
    "strategies/gradient.py",
    "strategies/outer_rules.py",
    "strategies/variates.py",
    "strategies/streaming.py",
    "strategies/out_of_step.py",
]


def test_pure_modules_know_no_socket_no_clock_and_no_thread():
    unwanted = {"socket", "time", "threading", "zmq", "torch", "asyncio"}
    found = [
        f"{name}: {what}" for name in PURE for what in unwanted & imports(PACKAGE / name).keys()
    ]
    assert not found, "\n".join(found)


def test_what_the_package_exports_is_pinned():
    assert sorted(edgetrain.__all__) == [
        "EdgetrainError", "Keep", "Member", "Privacy", "Run", "Runs", "Sparing", "__version__",
        "compare", "export", "join", "load", "run", "simulate", "sweep", "task",
    ]  # fmt: skip
    assert dir(edgetrain) == sorted([*edgetrain.__all__, "integrations"])
    for name in edgetrain.__all__:
        assert getattr(edgetrain, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'jion'"):
        edgetrain.jion  # noqa: B018
