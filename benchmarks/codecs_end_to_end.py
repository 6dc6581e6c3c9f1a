"""What a codec costs a whole job, and saves: the same job dense and coded, bytes at the socket.

    python benchmarks/codecs_end_to_end.py
    python benchmarks/codecs_end_to_end.py --task edgetrain.tasks:char_lm --every 1 --delay 2 \\
        --batch 4 --steps 1500 --rate 0.1 --momentum 0.9 --seeds 1

Hub and members are processes that talk over TCP, without an emulated network; the delay is fixed,
so the result does not depend on how fast the machine is. Bytes are those the kernel counted on the
members' connections, both ways together: headers, the base that the first member uploads, all of
it. `--sync` runs dense synchronous SGD too, what people would do without edgetrain.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from edgetrain.jobs.job import Job
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create
from edgetrain.training import emulated


def job_for(args: argparse.Namespace, strategy: str, codec: str, seed: int) -> Job:
    """One of the jobs that are compared."""
    delays = strategy == "dga"
    return load(
        None,
        [
            f"task={args.task}",
            f"members={args.members}",
            f"steps={args.steps}",
            f"batch={args.batch}",
            f"seed={seed}",
            f"evaluate_every={args.steps}",
            f"optimizer={{ name = 'sgd', lr = {args.rate}, momentum = {args.momentum} }}",
            f"strategy={strategy}",
            f"every={args.every if delays else 0}",
            f"delay={args.delay if delays else 0}",
            f"codec={codec}",
        ],
    )


def run(job: Job) -> dict[str, Any]:
    """The summary of one run."""
    with tempfile.TemporaryDirectory() as folder:
        return emulated.run(plan(job), create(Path(folder), "run"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="edgetrain.tasks:digits")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--delay", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--codec", default="topk(0.01) | q2")
    parser.add_argument("--sync", action="store_true", help="dense synchronous SGD too")
    args = parser.parse_args()
    rounds = f"every {args.every}, delay {args.delay}"
    print(f"{args.task}, {args.members} members, {rounds}, {args.steps} steps, {args.seeds} seeds")
    variants = [("sync-sgd", "fp32")] * args.sync + [("dga", "fp32"), ("dga", args.codec)]
    sizes = []
    for strategy, codec in variants:
        found = [run(job_for(args, strategy, codec, seed)) for seed in range(args.seeds)]
        sizes.append(statistics.mean(s["sent_bytes"] + s["received_bytes"] for s in found))
        words = []
        for key in found[0]["final"]:
            figures = [summary["final"][key] for summary in found]
            spread = statistics.stdev(figures) if len(figures) > 1 else 0.0
            words.append(f"{key} {statistics.mean(figures):.4f} ± {spread:.4f}")
        print(f"{strategy:9}{codec:<18}{', '.join(words)}, {sizes[-1] / 1e6:.3f} MB", flush=True)
    for (strategy, codec), size in zip(variants[:-1], sizes[:-1], strict=True):
        print(f"{size / sizes[-1]:.0f} times fewer bytes than {strategy} with {codec}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
