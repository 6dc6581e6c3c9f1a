"""Speed of training against the round trip: sync-sgd, FedAvg (K = 5) and DGA.

    python benchmarks/latency.py                  the table, then accuracy at 500 ms: 15 minutes
    python benchmarks/latency.py --part table --rtt 0,200 --members 4

Members are real processes connected by emulated links. Steps are paced, so that the speed of the
machine does not matter unless it is too slow (steps that take longer than their pace are counted
and reported). The table gives steps per second relative to the same members without a network. The
steady rate leaves out the first quarter (TCP's slow start) and the wait for the last replies; the
whole rate includes both.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create, read_metrics
from edgetrain.runs.reports import plot
from edgetrain.training import emulated

STRATEGIES = ("sync-sgd", "fedavg", "dga")


def job_for(args: argparse.Namespace, strategy: str, rtt_ms: float, seed: int, steps: int) -> Any:
    """The digits job. DGA's delay covers the round trip, a tenth of it and one step more."""
    delay = math.ceil(1.1 * rtt_ms / 1000 / args.pace) + 1 if strategy == "dga" else 0
    return load(
        None,
        [
            f"members={args.members}",
            f"network={f'rtt-{rtt_ms:g}ms' if rtt_ms else 'none'}",
            f"backend={args.backend}",
            f"pace_s={args.pace}",
            f"steps={steps}",
            f"seed={seed}",
            f"optimizer={{ name = 'sgd', lr = {args.lr}, momentum = {args.momentum} }}",
            f"strategy={strategy}",
            f"every={0 if strategy == 'sync-sgd' else args.every}",
            f"delay={delay}",
        ],
    )


def run(job: Any, folder: Path) -> tuple[dict[str, Any], Path]:
    """One run; its summary and folder."""
    inside = create(folder, job.strategy.name)
    return emulated.run(plan(job), inside), inside


def steady_seconds(folder: Path, steps: int) -> float:
    """Median over members of the mean seconds of a step, between a quarter and the last but one."""
    times: dict[str, dict[int, float]] = {}
    for record in read_metrics(folder, "step"):
        times.setdefault(record["member"], {})[record["step"]] = record["t"]
    first, last = max(1, steps // 4), steps - 1
    return statistics.median((t[last] - t[first]) / (last - first) for t in times.values())


def table(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Rows of strategy, round trip and rates."""
    rows = []
    for strategy in STRATEGIES:
        for rtt in args.rtt:
            waits = {"sync-sgd": 1.0, "fedavg": 1 / args.every, "dga": 0.0}[strategy]
            step_s = args.pace + waits * rtt / 1000
            steps = max(40, min(args.steps, int(args.seconds / step_s)))
            summary, inside = run(job_for(args, strategy, rtt, 0, steps), folder)
            steady = steady_seconds(inside, steps)
            rows.append(
                {
                    "strategy": strategy,
                    "rtt_ms": rtt,
                    "steps": steps,
                    "steps_per_second": 1 / steady,
                    "whole_steps_per_second": summary["steps_per_second"],
                    "delay": summary["delay"],
                    "backend": summary["emulation"]["backend"],
                    "late_ms_p99": summary["emulation"]["late_ms_p99"],
                    "trusted": summary["emulation"]["trusted"],
                    "overrun": overruns(inside),
                }
            )
            say(args, f"  {strategy:9} rtt {rtt:5g} ms: {1 / steady:6.2f} steps/s")
    return rows


def overruns(folder: Path) -> int:
    """Members that could not keep their pace."""
    return sum(r["event"] == "overrun" for r in read_metrics(folder, "event"))


def table_text(rows: list[dict[str, Any]]) -> str:
    """The table as people read it: relative to round trip 0."""
    rtts = sorted({row["rtt_ms"] for row in rows})
    lines = ["steps per second relative to no network (steady; whole run in brackets)"]
    lines.append("strategy " + "".join(f"{f'{rtt:g} ms':>15}" for rtt in rtts))
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        cells = {row["rtt_ms"]: row for row in rows if row["strategy"] == strategy}
        first = cells[rtts[0]]
        line = f"{strategy:9}"
        for rtt in rtts:
            steady = cells[rtt]["steps_per_second"] / first["steps_per_second"]
            whole = cells[rtt]["whole_steps_per_second"] / first["whole_steps_per_second"]
            mark = "" if cells[rtt]["trusted"] and not cells[rtt]["overrun"] else "*"
            line += f"{f'{steady:.3f}{mark} ({whole:.3f})':>15}"
        lines.append(line)
    backends = ", ".join(sorted({row["backend"] for row in rows if row["rtt_ms"]}))
    lines.append(f"network emulated by {backends or 'no backend'}")
    if any(not row["trusted"] or row["overrun"] for row in rows):
        lines.append("* the emulation was late, or members could not keep their pace")
    return "\n".join(lines)


def accuracy(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Time to the target and final accuracy at one round trip, over seeds."""
    rows = []
    for seed in range(args.seeds):
        for strategy in ("sync-sgd", "dga"):
            summary, _ = run(job_for(args, strategy, args.at, seed, args.accuracy_steps), folder)
            rows.append(
                {
                    "seed": seed,
                    "strategy": strategy,
                    "target_seconds": summary["target_seconds"],
                    "target_steps": summary["target_steps"],
                    "final": summary["final"]["accuracy"],
                    "seconds": summary["seconds"],
                    "trusted": summary["emulation"]["trusted"],
                }
            )
            reached = summary["target_seconds"]
            say(
                args,
                f"  seed {seed} {strategy:9} 97 % at "
                f"{'-' if reached is None else f'{reached:.1f} s'}, "
                f"final {100 * summary['final']['accuracy']:.2f} %",
            )
    return rows


def accuracy_text(rows: list[dict[str, Any]], at: float) -> str:
    """The verdict: how much sooner, and how far apart in the end."""
    by = {s: [row for row in rows if row["strategy"] == s] for s in ("sync-sgd", "dga")}
    ratios = [
        sync["target_seconds"] / dga["target_seconds"]
        for sync, dga in zip(by["sync-sgd"], by["dga"], strict=True)
        if sync["target_seconds"] and dga["target_seconds"]
    ]
    finals = {s: 100 * statistics.mean(row["final"] for row in by[s]) for s in by}
    return (
        f"round trip {at:g} ms, {len(by['dga'])} seeds: dga reaches 97 % "
        f"{' / '.join(f'{r:.1f}' for r in ratios) or '-'} times sooner than sync-sgd; "
        f"final accuracy {finals['dga']:.2f} % against {finals['sync-sgd']:.2f} % "
        f"({finals['dga'] - finals['sync-sgd']:+.2f} points)"
    )


def say(args: argparse.Namespace, text: str) -> None:
    """Progress, out of the way of --json."""
    print(text, file=sys.stderr if args.json else sys.stdout, flush=True)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["table", "accuracy", "all"], default="all")
    parser.add_argument(
        "--rtt", type=lambda s: [float(x) for x in s.split(",")],
        default=[0.0, 50.0, 100.0, 200.0, 500.0, 1000.0], help="round trips in ms, first 0",
    )  # fmt: skip
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--every", type=int, default=5, help="K")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds a step takes")
    parser.add_argument("--steps", type=int, default=300, help="at most, in a cell of the table")
    parser.add_argument("--seconds", type=float, default=20.0, help="about, for a cell")
    parser.add_argument("--at", type=float, default=500.0, help="round trip of the accuracy part")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--accuracy-steps", type=int, default=280)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--backend", default="auto", help="auto, packet, stream")
    parser.add_argument("--picture", type=Path, default=Path("latency.png"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    emulated.warm_up()
    with tempfile.TemporaryDirectory() as folder:
        if args.part in ("table", "all"):
            found["table"] = table(args, Path(folder))
            title = f"digits, {args.members} members, steps of {1000 * args.pace:g} ms"
            plot.latency_figure(found["table"], args.picture, title)
            if not args.json:
                print(table_text(found["table"]), f"picture: {args.picture}", sep="\n", flush=True)
        if args.part in ("accuracy", "all"):
            found["accuracy"] = accuracy(args, Path(folder))
            if not args.json:
                print(accuracy_text(found["accuracy"], args.at), flush=True)
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
