"""`python -m benchmarks [NAME…]`: each figure beside its bound (`bounds`), or benchmarks by name.

    python -m benchmarks                     docs/reference/benchmarks.md begins with this table
    python -m benchmarks page                all that docs/reference/benchmarks.md shows: hours
    python -m benchmarks --list              what there is
    python -m benchmarks report checkpoint   some of it
    python -m benchmarks report --json       for programs

A NAME is a file of this folder: a module that measures, a script that also runs by itself (`python
benchmarks/round.py --help` has its flags), or a sweep (`edgetrain sweep benchmarks/density.toml`).
Each of several runs in a process of its own.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import runpy
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from harness import Measured, machine  # noqa: E402

from edgetrain.errors import did_you_mean  # noqa: E402

PAGE: dict[str, tuple[str, ...]] = {
    "bounds": (),
    "latency": (), "networks": (), "peers": (), "simulations": (), "round": (), "checkpoint": (),
    "codecs_speed": ("--repeats", "5"), "untouched": (), "whole_job": (), "flash": (),
    "placements": (), "memory": (), "report": (), "draws": (),
}  # fmt: skip
"""What docs/reference/benchmarks.md shows, in its order, with the flags that it names."""
PARTS = (
    "harness", "__main__", "peer", "environments", "processes", "flower_simulation", "cohort_jobs",
    "kept-500ms", "calibration", "lab",
)  # fmt: skip
"""Modules, a tool and a network profile that are no benchmark."""


def names() -> dict[str, Path]:
    """The file of each benchmark; those of the page first."""
    found = {path.stem: path for path in sorted(HERE.iterdir()) if path.suffix in (".py", ".toml")}
    order = [*(name for name in PAGE if name in found), *sorted(found)]
    return {name: found[name] for name in order if name not in PARTS}


def about(path: Path) -> str:
    """A benchmark's first line."""
    text = path.read_text("utf-8")
    if path.suffix == ".toml":
        return text.partition("\n")[0].lstrip("# ")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def run(path: Path, as_json: bool) -> int:
    """Run one benchmark here; its exit status."""
    flags = ["--json"] if as_json else []
    if path.suffix == ".toml":
        from edgetrain.__main__ import main as edgetrain

        return edgetrain(["sweep", str(path), *flags])
    if "def measured(" not in (text := path.read_text("utf-8")):
        if as_json and '"--json"' not in text:
            raise SystemExit(f"benchmarks: {path.stem} prints no JSON")
        sys.argv = [str(path), *PAGE.get(path.stem, ()), *flags]
        runpy.run_path(str(path), run_name="__main__")
        return 0
    module = importlib.import_module(path.stem)
    found: list[Measured] = []
    for each in module.measured():
        found.append(each)
        if not as_json:
            print(each.text(), flush=True)
    if as_json:
        print(json.dumps([each.to_dict() for each in found], indent=2))
    return 0


def several(paths: list[Path], as_json: bool) -> int:
    """Run each in a process of its own; the first exit status that is not 0."""
    status, answers = 0, {}
    for path in paths:
        words = [sys.executable, "-m", "benchmarks", path.stem]
        if as_json:
            done = subprocess.run([*words, "--json"], cwd=HERE.parent, stdout=subprocess.PIPE)
            answers[path.stem] = json.loads(done.stdout) if done.stdout.strip() else None
        else:
            print(f"\n{path.stem}: {about(path)}", flush=True)
            done = subprocess.run(words, cwd=HERE.parent)
        status = status or done.returncode
    if as_json:
        print(json.dumps({"machine": machine()} | answers, indent=2))
    return status


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="see --list; default: bounds")
    parser.add_argument("--list", action="store_true", help="say what there is, run nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args()
    known = names()
    wanted = [*PAGE] if arguments.names == ["page"] else arguments.names or ["bounds"]
    for name in wanted:
        if name not in known:
            parser.error(f"no benchmark '{name}': {did_you_mean(name, known)}")
    if arguments.list:
        width = max(map(len, known))
        for name, path in known.items():
            print(f"{'*' if name in PAGE else ' '} {name:{width}}  {about(path)}")
        print("* docs/reference/benchmarks.md shows it: `page` runs all of these")
        return 0
    chosen = [known[name] for name in wanted]
    if len(chosen) == 1:
        if not arguments.json:
            print(machine(), flush=True)
        return run(chosen[0], arguments.json)
    return several(chosen, arguments.json)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
