"""How long the simulator takes as the fleet grows: digits, real gradients, the whole protocol.

    python benchmarks/simulator.py                        10, 100, 1,000 and 10,000 members
    python benchmarks/simulator.py --members 1000

Every member takes `--rounds` rounds of `--every` local steps (fedavg, plain SGD) behind a link of
its own; evaluations and metrics included. The time of a member's round stays the same where time
grows linearly. Seconds are this machine's; what the fleet would have taken is virtual.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create
from edgetrain.training.simulated import simulation


def measure(args: argparse.Namespace, members: int) -> dict[str, Any]:
    """Simulate one fleet; what it took."""
    rounds = min(args.rounds, max(1, args.most // members))
    job = load(
        None,
        [
            f"members={members}",
            "device=raspberry-pi-4b",
            f"network={args.network}",
            f"steps={rounds * args.every}",
            f"batch={args.batch}",
            "optimizer={ name = 'sgd', lr = 0.05 }",
            "strategy=fedavg",
            f"every={args.every}",
            "delay=0",
            "data.partition=shared(64)",
            f"message_s={args.message_s}",
        ],
    )
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        planned = plan(job)
        summary = simulation.run(planned, create(Path(folder), "simulator"))
    seconds = time.perf_counter() - began
    return {
        "members": members,
        "rounds": rounds,
        "seconds": seconds,
        "virtual_seconds": summary["seconds"],
        "us_per_member_round": 1e6 * seconds / members / rounds,
        "events": summary["emulation"]["events"],
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "final": summary["final"]["accuracy"],
        "how": summary["emulation"]["reason"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--members", type=lambda s: [int(x) for x in s.split(",")], default=[10, 100, 1000, 10_000]
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--most", type=int, default=100_000, help="members times rounds, at most")
    parser.add_argument("--every", type=int, default=5, help="local steps in a round")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--network", default="wan-200ms")
    parser.add_argument("--message-s", type=float, default=0.0002)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = []
    if not args.json:
        print("members  rounds  seconds  virtual  us a member's round   events  peak GB  accuracy")
    for members in args.members:
        row = measure(args, members)
        found.append(row)
        if not args.json:
            print(
                f"{row['members']:7,} {row['rounds']:7} {row['seconds']:8.1f} "
                f"{row['virtual_seconds']:8.1f} {row['us_per_member_round']:20.0f} "
                f"{row['events']:8,} {row['peak_gb']:8.1f} {100 * row['final']:8.1f} %",
                flush=True,
            )
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
