"""What privacy costs: accuracy on digits against epsilon, for examples and for members.

    python benchmarks/privacy.py                     a table of a large grid
    python benchmarks/privacy.py --picture docs/privacy.png
    python benchmarks/privacy.py --units example --noises 1,4 --steps 50 --json

Simulated fleets (the real hub, members and strategy, in virtual time), noise from seeds. In
`example` each of 8 members clips and noises its own examples' gradients; in `member` a hub that is
trusted clips and noises what each of 8, or of 256, members contributes in a round. The first line
of each has no privacy. Epsilon is at delta = 1e-5.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import parse
from edgetrain.runs.folder import create
from edgetrain.training.simulated import simulation

COMMON = ("device=raspberry-pi-4b", "strategy=dga", "every=5", "delay=5")

SETTINGS: dict[str, tuple[str, ...]] = {
    # One example's gradient is clipped; momentum only works on what was noised.
    "example": ("members=8", "batch=96", "privacy=example", "clip=1", "lr=0.1"),
    "member, 8": ("members=8", "batch=32", "privacy=member", "where=hub", "clip=0.5", "lr=0.1"),
    "member, 256": (
        "members=256", "data.partition=shared(64)", "batch=16", "privacy=member", "where=hub",
        "clip=0.5", "lr=0.1",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One run."""

    unit: str
    noise: float | None
    """None: no privacy."""
    epsilon: float | None
    accuracy: float


def train(unit: str, noise: float | None, steps: int, seed: int, more: Sequence[str]) -> Row:
    """One fleet; accuracy is that of the fleet's model at the end."""
    words = [*COMMON, *SETTINGS[unit], *more, f"steps={steps}", f"seed={seed}"]
    words.append("privacy=none" if noise is None else f"noise={noise}")
    job = parse({}, [*words, f"evaluate_every={steps}"])
    with tempfile.TemporaryDirectory() as folder:
        summary = simulation.run(plan(job), create(Path(folder), "run"))
    promise = summary["privacy"]
    return Row(unit, noise, promise and promise["epsilon"], summary["final"]["accuracy"])


def draw(rows: Sequence[Row], path: Path) -> None:
    """Accuracy over epsilon, a line a unit; what no privacy gives is a dashed line."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for number, unit in enumerate(dict.fromkeys(row.unit for row in rows)):
        colour = f"C{number}"
        private = sorted((r.epsilon, r.accuracy) for r in rows if r.unit == unit and r.epsilon)
        axes.plot(*zip(*private, strict=True), "o-", color=colour, label=unit)
        for plain in [r.accuracy for r in rows if r.unit == unit and r.noise is None]:
            axes.axhline(plain, color=colour, linestyle="--", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("epsilon at delta = 1e-5 (smaller is more private)")
    axes.set_ylabel("held-out accuracy, digits")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(alpha=0.3)
    axes.legend(title="unit, members")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--units", default=";".join(SETTINGS), help="separated by ';'")
    parser.add_argument("--noises", default="0.5,1,2,4,8")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("more", nargs="*", metavar="KEY=VALUE", help="for the jobs")
    arguments = parser.parse_args()
    rows: list[Row] = []
    if not arguments.json:
        print(f"{'unit':12} {'noise':>6} {'epsilon':>8}  accuracy")
    for unit in arguments.units.split(";"):
        for noise in [None, *map(float, arguments.noises.split(","))]:
            row = train(unit, noise, arguments.steps, arguments.seed, arguments.more)
            rows.append(row)
            if not arguments.json:
                told = ["none" if noise is None else f"{noise:g}",
                        "-" if row.epsilon is None else f"{row.epsilon:.1f}"]  # fmt: skip
                print(f"{unit:12} {told[0]:>6} {told[1]:>8}  {row.accuracy:8.1%}", flush=True)
    if arguments.picture:
        draw(rows, arguments.picture)
    if arguments.json:
        found: list[dict[str, Any]] = [vars(row) for row in rows]
        print(json.dumps(found))


if __name__ == "__main__":
    main()
