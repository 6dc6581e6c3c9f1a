"""Does DGA hold where members have unequal data? Against FedAvg, at equal steps and in equal time.

    python benchmarks/unequal.py --rates 0.2          # plain SGD, 200 and 500 ms
    python benchmarks/unequal.py --optimizers sgd,momentum,adamw --partitions iid,1,0.3,0.1
    python benchmarks/unequal.py --places 200@50,500@50,200@20,500@20 --keep places.jsonl
    python benchmarks/unequal.py --task char-lm --optimizers momentum,adamw --partitions iid
    python benchmarks/unequal.py --drawn 200 --keep drawn.jsonl   # 200 jobs drawn at random

Digits, 8 members, simulated (real gradients, virtual seconds): FedAvg with K = 5, DGA and
dga(drift) with D = what hides the round trip, K = 5 and K = D, other lengths with --lengths; with
--best `dga` with K = 5 and `dga(drift)` with K = D only. Final accuracy after equal steps: mean
over seeds, and the range. `time` is how many times sooner than FedAvg a run reaches --target,
median over seeds (-: not in half of them, or FedAvg not). 500 ms at 50 ms a step and 200 at 20 are
both D = 12, and differ in time only. The rate that is best for FedAvg is searched at the first
place. With --keep FILE each run is kept, and a second start goes on where the first was ended.

With --task char-lm: a Transformer of one layer of width 32 and 32 bytes of context on 200 kB of
text, 4 members with batches of 8, against sync-sgd at its best rate of the grid; final loss.
With --own-rates the others run at each rate of the grid; --strategies may name fedavg as well.

With --drawn: jobs of 2 to 1,000 members over networks of the catalogue, boards, batches
and partitions are run twice, with FedAvg and with DGA and an automatic delay, whose rounds are as
long as the job's defaults make them. Large fleets take fewer steps: 40, 60, 100 or 200, as far as
all members together take at most MOST_STEPS, but at least 40. It fails if DGA diverges where FedAvg
trains (its loss is above 10, or its accuracy below half of FedAvg's, which is above 50 %), or if
K + D is ever more than the share of the steps that it may have: an eighth on equal data
with batches of 8 or more, a sixteenth elsewhere, or two rounds. --keep FILE keeps each job's line.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgetrain.errors import EdgetrainError
from edgetrain.fleet import catalog
from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.jobs.resolved import look_up
from edgetrain.runs.folder import create, read_metrics
from edgetrain.training.simulated import simulation

OPTIMIZERS = {
    "sgd": "{ name = 'sgd', lr = %s }",
    "momentum": "{ name = 'sgd', lr = %s, momentum = 0.9 }",
    "adamw": "{ name = 'adamw', lr = %s }",
}
GRID = {
    "digits": {
        "sgd": ["0.1", "0.2", "0.4"],
        "momentum": ["0.02", "0.05", "0.1"],
        "adamw": ["0.005", "0.01", "0.02"],
    },
    "char-lm": {
        "sgd": ["0.2", "0.5", "1.0"],
        "momentum": ["0.05", "0.1", "0.2"],
        "adamw": ["0.002", "0.005", "0.01"],
    },
}
"""Learning rates of which each optimizer has the one that is best for the reference."""

CHAR_LM = "context = 32, limit_bytes = 200_000, width = 32, heads = 4, layers = 1"

MOST_STEPS = 6000
"""Of all members of a drawn job together, where that leaves each at least 40."""

BOARDS = ("raspberry-pi-3b", "raspberry-pi-4b", "raspberry-pi-5")


@dataclass(frozen=True)
class Run:
    """What one simulated run came to."""

    final: float
    """Accuracy in percent."""
    loss: float
    seconds: float
    reached_s: float | None
    """When the target was reached."""
    most: int
    """The largest K + D."""
    steady_ms: float
    """Per step, in the second half."""


def simulate(words: list[str], target: float) -> Run:
    """Run a job, and forget its folder."""
    folder = Path(tempfile.mkdtemp(prefix="unequal-"))
    try:
        inside = create(folder, "run")
        summary = simulation.run(plan(reading.load(None, words)), inside, batched=True)
        evaluations = list(read_metrics(inside, "eval"))
        reached = (line["t"] for line in evaluations if 100 * line.get("accuracy", 0.0) >= target)
        rounds = list(read_metrics(inside, "round"))
        steps = [line for line in read_metrics(inside, "step") if line["member"] == "m0"]
        half = [line for line in steps if line["step"] >= summary["steps"] // 2][:-1]
        lasted = half[-1]["t"] - half[0]["t"] if len(half) > 1 else math.nan
        taken = half[-1]["step"] - half[0]["step"] if len(half) > 1 else 1
        return Run(
            final=100 * summary["final"].get("accuracy", 0.0),
            loss=float(summary["final"].get("loss") or math.inf),
            seconds=summary["seconds"],
            reached_s=next(reached, None),
            most=max((line["every"] + line["delay"] for line in rounds), default=0),
            steady_ms=1000 * lasted / taken,
        )
    finally:
        shutil.rmtree(folder)


def partition_of(name: str, more: str = "") -> str:
    """The override for "iid" or for a Dirichlet distribution's number."""
    kind = "iid" if name == "iid" else f"dirichlet({name})"
    return f"data={{ partition = '{kind}'{more and ', ' + more} }}"


class Runs:
    """Runs of this comparison, and of earlier ones in the file `--keep`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._keep = args, Path(args.keep) if args.keep else None
        self._done: dict[str, Run] = {}
        self._began = time.monotonic()
        if self._keep is not None and self._keep.exists():
            for line in map(json.loads, self._keep.read_text().splitlines()):
                self._done[line["job"]] = Run(**line["run"])

    def several(self, words: list[str]) -> list[Run]:
        """The same job with each seed."""
        return [self._one([*words, f"seed={seed}"]) for seed in range(self._args.seeds)]

    def _one(self, words: list[str]) -> Run:
        job = f"{' '.join(words)} target={self._args.target:g}"
        if job not in self._done:
            run = self._done[job] = simulate(words, self._args.target)
            if self._keep is not None:
                with self._keep.open("a") as file:
                    file.write(json.dumps({"job": job, "run": asdict(run)}) + "\n")
            if sys.stderr.isatty():
                said = f"{len(self._done)} runs, {time.monotonic() - self._began:.0f} s"
                print(f"\r{said}", end="\r", file=sys.stderr, flush=True)
        return self._done[job]


def report(label: str, runs: list[Run], reference: list[Run], figure: str) -> None:
    """Print a line of the table: `figure` is "final", the accuracy, or "loss"."""
    finals = [getattr(run, figure) for run in runs]
    times = [run.reached_s for run in runs if run.reached_s]
    others = [run.reached_s for run in reference if run.reached_s]
    sooner = "-"
    if 2 * len(times) > len(runs) and 2 * len(others) > len(reference):
        sooner = f"{statistics.median(others) / statistics.median(times):.1f}x"
    mean = statistics.fmean(finals)
    more = mean - statistics.fmean(getattr(run, figure) for run in reference)
    digits = 1 if figure == "final" else 3
    least, most = (f"{found:.{digits}f}" for found in (min(finals), max(finals)))
    print(
        f"  {label:32} {mean:6.{digits + 1}f} ({least} to {most}) {more:+6.{digits + 1}f}"
        f"  {runs[0].seconds:6.1f} s {runs[0].steady_ms:6.1f} ms  time {sooner}",
        flush=True,
    )


def table(args: argparse.Namespace) -> None:
    """Print the comparison."""
    runs = Runs(args)
    for optimizer in args.optimizers.split(","):
        for partition in args.partitions.split(","):
            grid = args.rates.split(",") if args.rates else GRID[args.task][optimizer]
            best: list[str] = []
            for place in args.places.split(","):
                at = (int(place.partition("@")[0]), int(place.partition("@")[2]))
                best = [compare(args, runs, optimizer, partition, at, best or grid)]


def job_of(args: argparse.Namespace, partition: str) -> list[str]:
    """The overrides that all runs of a partition share."""
    if args.task == "char-lm":
        size = ["task=edgetrain.tasks:char_lm", "members=4", "batch=8"]
        data = partition_of(partition, CHAR_LM)
    else:
        size, data = ["members=8", "batch=16"], partition_of(partition)
    every = max(7, args.steps // 40)
    rest = [f"steps={args.steps}", f"evaluate_every={every}", "device=raspberry-pi-4b"]
    return [*size, *rest, data, *args.also]


def lengths_of(spelled: str, delay: int) -> list[int]:
    """The lengths of rounds that `--lengths` names, in steps."""
    named = {"D": delay, "D/2": math.ceil(delay / 2)}
    return [named[name] if name in named else int(name) for name in spelled.split(",")]


def compare(
    args: argparse.Namespace, runs: Runs, optimizer: str, partition: str, place: tuple[int, int],
    grid: list[str],
) -> str:  # fmt: skip
    """The reference with its best rate of the grid, which is returned, and the others with that."""
    (rtt, step), is_text = place, args.task == "char-lm"
    delay = math.ceil(1.1 * rtt / step) + 1
    common = [*job_of(args, partition), f"network=rtt-{rtt}ms", f"pace_s={step / 1000}"]
    name, words = "fedavg K=5", ["strategy=fedavg", "every=5"]
    if is_text:
        name, words = "sync-sgd", ["strategy=sync-sgd"]
    figure = "loss" if is_text else "final"
    found = {}
    for rate in grid:
        spelled = f"optimizer={OPTIMIZERS[optimizer] % rate}"
        found[rate] = runs.several([*common, spelled, *words])
    order = [statistics.fmean(getattr(run, figure) for run in found[rate]) for rate in grid]
    best = grid[order.index(min(order) if is_text else max(order))]
    spelled, reference = f"optimizer={OPTIMIZERS[optimizer] % best}", found[best]
    print(
        f"{optimizer}, lr {best} of {', '.join(grid)}; {partition}; {rtt} ms at {step} ms a step; "
        f"{args.steps} steps, {args.seeds} seeds"
    )
    report(name, reference, reference, figure)
    for strategy in args.strategies.split(","):
        lengths = dict.fromkeys(lengths_of(args.lengths, delay))
        if args.best:
            lengths = {delay if "drift" in strategy else 5: None}
        for every in lengths:
            words = [f"strategy={strategy}", f"every={every}"]
            label = f"{strategy} K={every}"
            if "dga" in strategy:
                words, label = [*words, f"delay={delay}"], f"{label} D={delay}"
            if args.codec:
                words.append(f"codec={args.codec}")
            for rate in grid if args.own_rates else [best]:
                rated = f"optimizer={OPTIMIZERS[optimizer] % rate}"
                one = runs.several([*common, rated, *words])
                at = f" lr {rate}" if args.own_rates else ""
                report(label + at, one, reference, figure)
            if args.equal_time:
                longer = round(args.steps * reference[0].seconds / one[0].seconds)
                again = runs.several([*common, spelled, *words, f"steps={longer}"])
                report(f"{strategy} K={every}, {longer} steps", again, reference, figure)
    return best


def drawn_job(seed: int, number: int) -> list[str]:
    """A job that somebody might run; the same for the same numbers."""
    rng = random.Random(f"{seed}/{number}")
    names = catalog.names("netem")
    members = round(2 * 500 ** rng.random())
    allowed = [steps for steps in (60, 100, 200) if members * steps <= MOST_STEPS] or [40]
    return [
        f"members={members}", f"batch={rng.choice((2, 4, 8, 16))}",
        f"steps={rng.choice([40, *allowed])}", f"network={rng.choice(names)}",
        f"device={rng.choice(BOARDS)}", f"seed={rng.randrange(1000)}",
        f"optimizer={OPTIMIZERS['momentum'] % rng.choice(('0.01', '0.02', '0.05'))}",
        partition_of(rng.choice(("iid", "1", "0.3"))), "evaluate_every=50",
    ]  # fmt: skip


def drawn_line(number: int, words: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Run one drawn job both ways; what to print of it, and whether it broke a law."""
    try:
        fedavg = simulate([*words, "strategy=fedavg"], args.target)
        dga = simulate([*words, f"strategy={args.strategies.split(',')[0]}"], args.target)
    except EdgetrainError as error:
        return {"number": number, "words": words, "broken": True, "text": str(error)}
    found = look_up(reading.load(None, [*words, "strategy=dga"]))
    bound = max(2 * found.every, found.job.train.steps // found.share)
    diverged = fedavg.final > 50 and not (dga.loss < 10 and dga.final > 0.5 * fedavg.final)
    text = (
        f"fedavg {fedavg.final:.1f} % in {fedavg.seconds:.0f} s, dga {dga.final:.1f} % (loss "
        f"{dga.loss:.2g}) in {dga.seconds:.0f} s, K + D up to {dga.most} of {bound}"
    )
    return {
        "number": number, "words": words, "broken": diverged or dga.most > bound, "text": text,
        "fedavg": fedavg.final, "dga": dga.final,
    }  # fmt: skip


def drawn(args: argparse.Namespace) -> int:
    """Run jobs drawn at random; how many broke a law."""
    keep = Path(args.keep) if args.keep else None
    kept = (
        [json.loads(line) for line in keep.read_text().splitlines()]
        if keep and keep.exists()
        else []
    )
    done = {(line["number"], *line["words"]): line for line in kept}
    lines, began = [], time.monotonic()
    for number in range(args.drawn):
        words = drawn_job(args.seed, number)
        line = done.get((number, *words))
        if line is None:
            line = drawn_line(number, words, args)
            if keep is not None:
                with keep.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        lines.append(line)
        said = f"{number}: {' '.join(words[:5])} {words[7]}: {line['text']}"
        print(f"{'BROKEN ' if line['broken'] else ''}{said}", flush=True)
    broken = sum(bool(line["broken"]) for line in lines)
    behind: list[float] = [x["fedavg"] - x["dga"] for x in lines if x.get("fedavg", 0) > 50]
    if behind:
        print(
            f"of {len(behind)} that FedAvg trains, DGA ends {statistics.median(behind):.1f} points "
            f"lower in the median, {max(behind):.1f} at most"
        )
    print(f"{args.drawn} jobs, {broken} broke a law, {time.monotonic() - began:.0f} s")
    return broken


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=["digits", "char-lm"], default="digits")
    parser.add_argument("--partitions", default="iid,1,0.3,0.1")
    parser.add_argument("--optimizers", default="sgd")
    parser.add_argument("--rates", default="", help="instead of the grid")
    parser.add_argument("--places", default="200@50,500@50", help="round trip @ step, in ms")
    parser.add_argument("--strategies", default="dga,dga(drift)")
    parser.add_argument("--lengths", default="5,D", help="of rounds, in steps: numbers, D, D/2")
    parser.add_argument("--steps", type=int, default=280)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=95.0, help="percent")
    parser.add_argument("--own-rates", action="store_true", help="each at every rate of the grid")
    parser.add_argument("--codec", default="", help="of all but the reference")
    parser.add_argument("--also", nargs="*", default=[], help="keys of all jobs, as batch=32")
    parser.add_argument("--best", action="store_true", help="each with its best rounds only")
    parser.add_argument("--equal-time", action="store_true", help="and in FedAvg's time")
    parser.add_argument("--drawn", type=int, default=0, help="draw this many jobs instead")
    parser.add_argument("--keep", default="", help="file of what is done, to go on with")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn jobs")
    args = parser.parse_args()
    if args.drawn:
        return 1 if drawn(args) else 0
    table(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
