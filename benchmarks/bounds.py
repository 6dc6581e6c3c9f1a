"""Each figure beside its bound, measured in the same run: how close to the limit.

    python -m benchmarks                                  all rows, some ten minutes
    python benchmarks/bounds.py --only codecs,round       some of them
    python benchmarks/bounds.py --only codecs --kernels avx2
    python benchmarks/bounds.py --only round --docs       the same, written into the page

A row is the median of its repeats, the lowest and the highest, the load, and whether other work was
going on (then a figure in seconds says little). `--docs` replaces the rows that were measured in
the table of docs/reference/benchmarks.md, and leaves the others as they are. Nothing here is a
timed test: a goal that is missed is printed as missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Figure, Measured, machine, measure, spelled

PAGE = Path(__file__).parents[1] / "docs/reference/benchmarks.md"
HEAD = (
    "| what | bound | ratio | spread | to reach | | measured on |",
    "|---|---|---|---|---|---|---|",
)
ELEMENTS = 25_000_000
"""Of the codecs' vector."""
SIMULATED = ["--members", "1000", "--most", "1000000"]


@dataclass(frozen=True)
class Goal:
    """What a row compares, and the ratio that it is to reach."""

    bound: str
    reach: float
    at_most: bool = True

    def met(self, value: float) -> bool:
        """Whether a ratio is as good as it is to be."""
        return value <= self.reach if self.at_most else value >= self.reach

    @property
    def words(self) -> str:
        """The goal, as the table has it."""
        return f"{'<=' if self.at_most else '>='} {self.reach:g}"


STREAM = "the stream r += g"
INSTRUCTIONS = "plain C, -O3: instructions"


def goal_of(row: str, wide: bool) -> Goal:
    """The goal of a row. `wide`: with AVX-512 kernels."""
    goals = {
        "whole run of DGA, 200 ms": Goal("T / (T + one round trip)", 0.985, False),
        "whole run of DGA, 1000 ms": Goal("T / (T + one round trip)", 0.97, False),
        "dense round, seconds": Goal("a bare ZeroMQ star", 1.2),
        "dense round, CPU seconds": Goal("a bare ZeroMQ star", 1.2),
        "small round, seconds": Goal("a bare ZeroMQ star", 2.0),
        "a contribution, CPU seconds of the hub": Goal("a bare ROUTER with NumPy", 1.5),
        "whole encode, 0.1%": Goal(STREAM, 0.9 if wide else 0.8, False),
        "whole encode, 1.0%": Goal(STREAM, 0.8 if wide else 0.7, False),
        "whole encode, 10.0%": Goal(STREAM, 0.45 if wide else 0.4, False),
        "int8 encode + feedback": Goal(STREAM, 0.8, False),
        "sign encode + feedback": Goal(STREAM, 0.9, False),
        "hub: decode + add": Goal("adding the decoded entries", 3.0),
        "simulator, seconds": Goal("the gradients alone", 1.8),
        "simulator, CPU seconds": Goal("the gradients alone", 1.8),
        "a member's start": Goal("import torch", 1.5),
        "compare --simulate of one step, CPU seconds": Goal("import torch", 2.3),
    }
    known = goals.get(row.partition(" (")[0].partition(", first window")[0])
    return known or Goal(INSTRUCTIONS, 0.5)


# -- what is measured ------------------------------------------------------------------------------


def start() -> dict[str, float]:
    """A member from its command until the hub has let it in; three simulations of one step, with
    their table and picture."""
    from weight import COMMAND, weigh

    from command_line import EDGETRAIN, hub  # isort: skip  # weight has made it importable

    job = ["members=1", "steps=1", "task=edgetrain.tasks:sized", "data.elements=10000"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bare = weigh("import torch\nprint('training as nobody', flush=True)\nreport()")
        with hub(*job, cwd=folder, program=EDGETRAIN) as (command, address):
            words = ["member", *job, "--hub", address, "--index", "0"]
            member = weigh(COMMAND, *words, cwd=folder)
            command.finish()
        words = ["compare", "--simulate", "network=wan-500ms", "pace_s=0.05", "steps=1"]
        simulated = weigh(COMMAND, *words, cwd=folder)
    return {
        "a member's start": member["start_s"] / bare["start_s"],
        "compare --simulate of one step, CPU seconds": simulated["cpu_s"] / bare["cpu_s"],
    }


def codecs() -> dict[str, float]:
    """Encoding with feedback, and the hub's part, with the kernels in use."""
    import codecs_speed as speed

    from edgetrain.codecs import backend

    used, stage = backend(), speed.Stage(ELEMENTS, 5)
    some = speed.dense(stage, ("int8", "sign"))
    rows = itertools.chain(speed.selection(stage), some, speed.hub(stage))
    found = {row.what: row.value for row in rows}
    found["hub: decode + add"] = found.pop("hub: decode + add / the add alone")
    known = ("whole encode", "int8 encode + feedback", "sign encode + feedback", "hub: decode")
    kernels = used.instructions or used.name
    return {f"{what} ({kernels})": x for what, x in found.items() if what.startswith(known)}


def dense() -> dict[str, float]:
    """A round of dense averaging."""
    import round as rounds

    found = rounds.measure(rounds.parsed([]))["ours_to_star"]
    return {
        "dense round, seconds": found["seconds"],
        "dense round, CPU seconds": found["cpu_s"],
    }


def small() -> dict[str, float]:
    """A round of dense averaging of small models."""
    import round as rounds

    found = {}
    for thousand in (10, 100):
        words = ["--elements", f"{thousand}000", "--rounds", "300", "--block", "50"]
        ratio = rounds.measure(rounds.parsed(words))["ours_to_star"]
        found[f"small round, seconds ({thousand} k parameters)"] = ratio["seconds"]
    return found


def contribution() -> dict[str, float]:
    """What a hub of many small members does for each of their contributions."""
    import hub_cpu

    args, found = hub_cpu.parsed([]), {}
    for count in (8, 32, 128, 512):
        ratio = hub_cpu.measure(args, count)["ratio"]
        found[f"a contribution, CPU seconds of the hub ({count} members)"] = ratio
    return found


def simulator() -> dict[str, float]:
    """A simulated fleet."""
    import simulator as simulated

    args = simulated.parsed(SIMULATED)
    bare, whole = simulated.bare(args, 1000), simulated.measure(args, 1000)
    return {
        "simulator, seconds": whole["seconds"] / bare["seconds"],
        "simulator, CPU seconds": whole["cpu_seconds"] / bare["cpu_seconds"],
    }


def whole_run() -> dict[str, float]:
    """DGA over a long link, from the first step to the last reply, over real TCP."""
    from edgetrain.training import emulated

    return of_bound(emulated.run, "")


def predicted_run() -> dict[str, float]:
    """The same in virtual time."""
    from edgetrain.training.simulated import simulation

    return of_bound(simulation.run, " (simulated)")


def of_bound(how: Callable[..., dict[str, Any]], kind: str) -> dict[str, float]:
    """Speed of whole runs, over that of runs whose last reply travels and nothing else is late."""
    import latency

    def rate(rtt: int, first: int = 0) -> float:
        return float(latency.row("dga", rtt, how, first)["whole_steps_per_second"])

    bare, found = rate(0), {}
    for rtt, first in ((200, 0), (1000, 0), (200, 30), (1000, 30), (1000, 120)):
        begins = f", first window {first}" if first else ""
        late = rtt / 1000 * bare / latency.MOST_STEPS
        found[f"whole run of DGA, {rtt} ms{begins}{kind}"] = rate(rtt, first) / bare * (1 + late)
    return found


def neon() -> dict[str, float]:
    """Instructions of NEON code."""
    from neon import kernels

    return {f"NEON, {name}": ours / plain for name, ours, plain in kernels()}


PARTS: Mapping[str, tuple[Callable[[], Mapping[str, float]], int]] = {
    "start": (start, 5),
    "codecs": (codecs, 3),
    "round": (dense, 2),
    "small": (small, 1),
    "hub": (contribution, 1),
    "simulator": (simulator, 1),
    "run": (whole_run, 3),
    "predicted": (predicted_run, 1),
    "neon": (neon, 1),
}
"""What measures rows, and how often."""


# -- the table -------------------------------------------------------------------------------------


def rows_of(found: Measured) -> dict[str, str]:
    """A line of the table for each figure."""
    return {what: line(what, figure, found) for what, figure in found.figures.items()}


def line(what: str, figure: Figure, found: Measured) -> str:
    """A row of the table: its ratio, its goal, and what it was measured on."""
    goal = goal_of(what, "avx512" in what)
    spread = f"{spelled(figure.low)} to {spelled(figure.high)}" if found.repeats > 1 else "once"
    cpu = machine().partition(",")[0]
    where = f"{cpu}, load {found.load:.1f}" + (f", {found.beside}" if found.beside else "")
    if goal.bound == INSTRUCTIONS or "simulated" in what:
        where = "any machine"
    verdict = "met" if goal.met(figure.median) else "missed"
    cells = (what, goal.bound, spelled(figure.median), spread, goal.words, verdict, where)
    return f"| {' | '.join(cells)} |"


def with_rows(text: str, rows: Mapping[str, str]) -> str:
    """The page with these rows of its table replaced, or put at its end."""
    head = "\n".join(HEAD)
    before, found, after = text.partition(head)
    if not found:
        raise SystemExit(f"{PAGE}: no table of bounds")
    table = re.match(r"(?:\n\|.*)*", after)
    assert table is not None
    old = {each.split("|")[1].strip(): each for each in table[0].splitlines() if each}
    lines = "".join(f"\n{each}" for each in {**old, **rows}.values())
    return before + head + lines + after[table.end() :]


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", default=",".join(PARTS), metavar="NAMES", help=", ".join(PARTS))
    made.add_argument("--repeats", type=int, default=0, help="of each, in place of its own number")
    made.add_argument("--kernels", default="", help="of the codecs: avx2, avx512, neon, …")
    made.add_argument("--docs", action="store_true", help=f"write the rows into {PAGE.name}")
    made.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return made


def main() -> int:
    """Measure and print. Returns 0: a missed goal is no error."""
    from edgetrain.codecs.kernels import chosen as kernels

    arguments = parser().parse_args()
    names = arguments.only.split(",")
    if unknown := sorted({*names} - {*PARTS}):
        parser().error(f"--only {unknown[0]}: one of {', '.join(PARTS)}")
    everything: list[Measured] = []
    if not arguments.json:
        print("\n".join(HEAD), flush=True)
    with kernels.using(arguments.kernels) if arguments.kernels else nullcontext():
        for name in names:
            job, repeats = PARTS[name]
            found = measure(name, job, arguments.repeats or repeats)
            everything.append(found)
            rows = rows_of(found)
            if not arguments.json:
                print("\n".join(rows.values()), flush=True)
            if arguments.docs:
                PAGE.write_text(with_rows(PAGE.read_text("utf-8"), rows), "utf-8")
    if arguments.json:
        print(json.dumps([each.to_dict() for each in everything], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
