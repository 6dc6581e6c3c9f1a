"""Where the seconds of a whole run go at a round trip: its start, waits, its end, and what must go.

    python benchmarks/shares.py                             200 ms and 1 s, three codecs
    python benchmarks/shares.py --rtt 500 --steps 1000

Simulated, digits, links without a limit of their rate. The share is that of the same steps without
a network. A run must pay one and a half round trips: the start travels half of one from the hub,
whose clock counts, and the reply to the last contribution takes a whole one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create, read_metrics
from edgetrain.training.simulated import simulation

CODECS = ("fp32", "auto", "topk(0.01) | q2")


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rtt", default="200,1000", help="round trips in ms")
    parser.add_argument("--steps", type=int, default=280)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds of a step")
    args = parser.parse_args()
    print(f"{'rtt':>7}  {'codec':16} {'share':>5}  limit   start   waits     end   K, D")
    with tempfile.TemporaryDirectory() as scratch:
        for rtt in (float(each) for each in args.rtt.split(",")):
            for number, codec in enumerate(CODECS):
                words = [
                    f"network=rtt-{rtt:g}ms",
                    f"members={args.members}",
                    "batch=8",
                    f"steps={args.steps}",
                    f"pace_s={args.pace}",
                    f"evaluate_every={args.steps}",
                    "device=raspberry-pi-4b",
                    f"codec={codec}",
                ]
                folder = create(Path(scratch), f"run-{rtt:g}-{number}")
                found = simulation.run(plan(load(None, words)), folder, batched=True)
                computed = args.steps * args.pace
                steps = [r for r in read_metrics(folder, "step") if r["member"] == "m0"]
                start = sum(r["wait_s"] for r in steps if r["step"] == 1)
                waits = sum(r["wait_s"] for r in steps) - start
                end = found["end_s"] * args.steps
                print(
                    f"{rtt:4g} ms  {codec:16} {computed / found['seconds']:.3f}  "
                    f"{computed / (computed + 1.5e-3 * rtt):.3f} {start:6.2f} s {waits:6.2f} s "
                    f"{end:6.2f} s   {found['every']}, {found['delay']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
