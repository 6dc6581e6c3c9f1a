"""What the ways in weigh: modules and lines of edgetrain that they load, CPU seconds, memory.

    python benchmarks/weight.py [--elements 10000] [--starts 3]

Each row is measured in fresh interpreters, in turns with one that only imports torch and one that
does nothing; medians. CPU seconds and memory (the most that was resident) are what a row takes
beyond `import torch`, or beyond Python where it loads no torch. The first rows only import. Those
called "trained" are a hub and one member of a star, of task `sized` (a model of that size, no
data), over 20 steps with the default strategy: a member as it is after its last step, a hub at its
end. Start: seconds until the hub has let a member in.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fakes"))

from command_line import EDGETRAIN, environment, hub

REPORT = """
def report():
    import json, resource, sys
    files = {name: module.__file__ for name, module in list(sys.modules.items())
             if name.split(".")[0] == "edgetrain" and module.__file__}
    used = resource.getrusage(resource.RUSAGE_SELF)
    print("\\nweight", json.dumps({
        "names": sorted(files),
        "lines": sum(len(open(each).readlines()) for each in files.values()),
        "cpu_s": used.ru_utime + used.ru_stime, "mb": used.ru_maxrss * 1024e-6,
        "torch": "torch" in sys.modules}), flush=True)
"""
BASES = {"python": "", "import torch": "import torch"}
DOORS = {
    "import edgetrain": "import edgetrain",
    "help of edgetrain": "import edgetrain.__main__, contextlib, io\n"
    "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
    "    edgetrain.__main__.main(['--help'])",
    "edgetrain.join": "from edgetrain import join",
    "a member": "import edgetrain.cli.member, edgetrain.training.member.train",
    "a hub": "import edgetrain.cli.hub, edgetrain.training.hub",
}
"""What each loads before it knows a job."""
LOOP = """
import sys, torch, edgetrain
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
member = edgetrain.join(sys.argv[1], model, optimizer)
print("training as", member.name, flush=True)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
report()
member.close()
"""
MEMBER = """
import sys
from edgetrain.__main__ import main
from edgetrain.training.member.loop import Loop
run = Loop.run
def counted(loop):
    run(loop)
    report()
Loop.run = counted
assert main(sys.argv[1:]) == 0
"""
COMMAND = (
    "import sys\nfrom edgetrain.__main__ import main\nassert main(sys.argv[1:]) == 0\nreport()"
)

Weight = dict[str, Any]
NUMBERS = ("start_s", "lines", "cpu_s", "mb", "torch")


def weigh(program: str, *words: str, cwd: Path | None = None) -> Weight:
    """Run a program that calls `report` in an interpreter of its own; what that said, and the
    seconds until it said "training as"."""
    began, ready, found = time.monotonic(), 0.0, {}
    with subprocess.Popen(
        [sys.executable, "-c", REPORT + program, *words],
        cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if not ready and line.startswith("training as"):
                ready = time.monotonic() - began
            if line.startswith("weight "):
                found = json.loads(line.removeprefix("weight "))
    assert process.returncode == 0, "".join(said)
    return {"start_s": ready, **found}


def trained(elements: int, cwd: Path) -> Iterator[tuple[str, Weight]]:
    """The hub of a star and its one member; then that of a loop of one's own, and the loop."""
    job = ["members=1", "steps=20", "task=edgetrain.tasks:sized", f"data.elements={elements}"]
    program = (sys.executable, "-c", REPORT + COMMAND)
    with hub(*job, cwd=cwd, program=program) as (command, address):
        yield (
            "a member, trained",
            weigh(MEMBER, "member", *job, "--hub", address, "--index", "0", cwd=cwd),
        )
        command.finish()
        (said,) = (each for each in command.said.splitlines() if each.startswith("weight "))
        yield "a hub, trained", {"start_s": 0.0, **json.loads(said.removeprefix("weight "))}
    with hub("members=1", "--any-job", cwd=cwd, program=EDGETRAIN) as (command, address):
        yield "edgetrain.join, trained", weigh(LOOP, address, cwd=cwd)
        command.finish()


def measured(starts: int, elements: int) -> dict[str, Weight]:
    """All rows, each the medians of so many processes."""
    found: dict[str, list[Weight]] = {}
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CONFIG_HOME"] = name  # a machine without keys: no keyring is loaded
        for _ in range(starts):
            for what, code in {**BASES, **DOORS}.items():
                found.setdefault(what, []).append(weigh(f"{code}\nreport()"))
            for what, weight in trained(elements, Path(name)):
                found.setdefault(what, []).append(weight)
    return {
        what: {key: statistics.median(row[key] for row in rows) for key in NUMBERS}
        | {"names": rows[0]["names"]}
        for what, rows in found.items()
    }


def table(rows: dict[str, Weight]) -> str:
    """For people."""
    told = [f"{'':24} modules   lines  CPU seconds    memory   start"]
    for what, row in rows.items():
        base: Weight = {"cpu_s": 0.0, "mb": 0.0}
        if what not in BASES:
            base = rows["import torch" if row["torch"] else "python"]
        start = f"{row['start_s']:5.2f} s" if row["start_s"] else ""
        cpu_s, mb, modules = row["cpu_s"] - base["cpu_s"], row["mb"] - base["mb"], len(row["names"])
        told.append(
            f"{what:24} {modules:7} {row['lines']:7,.0f} {cpu_s:10.2f} s {mb:6.0f} MB {start}"
        )
    return "\n".join(each.rstrip() for each in told)


def main(words: Sequence[str] | None = None) -> None:
    """Measure in turns, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=10_000)
    parser.add_argument("--starts", type=int, default=3)
    args = parser.parse_args(words)
    print(table(measured(args.starts, args.elements)))


if __name__ == "__main__":
    main()
