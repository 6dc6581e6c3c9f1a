"""What `codec = "auto"` is worth: seconds of a step and the final figure on a slow and a fast link.

    python benchmarks/density.py                            digits: 2 links, 3 codecs
    python benchmarks/density.py --tasks digits,char-lm     a larger model, too

Simulated: real gradients, virtual time. DGA with an automatic delay, SGD with momentum 0.9
(char-lm: AdamW). Links have a round trip of 200 ms.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create
from edgetrain.training.simulated import simulation

CODECS = ("auto", "fp32", "topk(0.01) | q2")
OPTIMIZERS = {
    "digits": "{ name = 'sgd', lr = 0.05, momentum = 0.9 }",
    "char-lm": "{ name = 'adamw', lr = 0.002 }",
}
TASKS = {"digits": "edgetrain.tasks:digits", "char-lm": "edgetrain.tasks:char_lm"}


def network(folder: Path, rtt_ms: float, rate_mbit: float) -> Path:
    """A profile of a link with this round trip and this rate each way."""
    path = folder / f"link-{rate_mbit:g}.toml"
    path.write_text(f"[both]\ndelay_ms = {rtt_ms / 2:g}\nrate_mbit = {rate_mbit:g}\n")
    return path


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default="digits")
    parser.add_argument("--rates", default="1,100", help="Mbit/s")
    parser.add_argument("--rtt", type=float, default=200.0, help="milliseconds")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--steps", type=int, default=280)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds of a step")
    args = parser.parse_args()
    print(f"{'task':8} {'Mbit/s':>6}  {'codec':16} {'a step':>9}  {'K, D':>6}  final")
    with tempfile.TemporaryDirectory() as scratch:
        every = itertools.product(args.tasks.split(","), args.rates.split(","), CODECS)
        for number, (task, rate, codec) in enumerate(every):
            words = [
                f"task={TASKS[task]}",
                f"members={args.members}",
                f"steps={args.steps}",
                f"pace_s={args.pace}",
                f"network={network(Path(scratch), args.rtt, float(rate))}",
                f"optimizer={OPTIMIZERS[task]}",
                f"codec={codec}",
            ]
            folder = create(Path(scratch), f"run{number}")
            found = simulation.run(plan(load(None, words)), folder, batched=True)
            final = ", ".join(f"{name} {value:.4f}" for name, value in found["final"].items())
            ended = f" (ended on {found['codec']})" if codec == "auto" else ""
            print(
                f"{task:8} {rate:>6}  {codec:16} {1000 * found['seconds_per_step']:6.1f} ms  "
                f"{found['every']:3}, {found['delay']:<3} {final}{ended}",
                flush=True,
            )


if __name__ == "__main__":
    main()
