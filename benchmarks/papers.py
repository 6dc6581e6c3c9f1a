"""What three papers say of their strategies, in small: simulated, in minutes.

    python benchmarks/papers.py
    python benchmarks/papers.py streaming

    fedbuff     32 members whose steps differ tenfold (benchmarks/tenfold.toml): seconds to the
                target, at least twice fewer than of fedavg (Nguyen et al., AISTATS 2022)
    downpour    a learning rate that diverges where the hub adds what comes, and does not with
                Adagrad at the hub (Dean et al., NIPS 2012, section 4.1)
    streaming   the most that a member sends in any second of training: of diloco's 1/P, within
                10 %, at a loss of at most 0.02 more (Douillard et al., 2025)

Exit status 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgetrain.files.toml import read_toml
from edgetrain.jobs.job import Job
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load, parse
from edgetrain.runs.folder import create, read_metrics
from edgetrain.runs.metrics.lines import Record
from edgetrain.training.simulated import simulation

TENFOLD = Path(__file__).with_name("tenfold.toml")

DOWNPOUR = (
    "members=8", "network=rtt-200ms", "pace_s=0.05", "steps=150", "local_steps=5",
    "optimizer={ name = 'sgd', lr = 0.05, momentum = 0.9 }",
)  # fmt: skip

STREAMING = (
    "members=3", "device=raspberry-pi-4b", "pace_s=0.1", "network=wan-200ms", "steps=240",
    "local_steps=60", "evaluate_every=240", "optimizer={ name = 'sgd', lr = 0.05, momentum = 0.9 }",
)  # fmt: skip
FRAGMENTS = 5


def simulate(job: Job) -> tuple[dict[str, Any], list[Record]]:
    """The summary of a simulated run, and its exchanges."""
    with tempfile.TemporaryDirectory() as folder:
        inside = create(Path(folder), "papers")
        summary = simulation.run(plan(job), inside)
        return summary, list(read_metrics(inside, "exchange"))


def most_in_a_second(exchanges: list[Record], rounds: int) -> int:
    """Bytes of contributions that m0 hands over within any second of these rounds, at most. Behind
    them it sends what is left as fast as replies come."""
    own = [e for e in exchanges if e["member"] == "m0" and e["round"] < rounds]
    sent = sorted((e["submitted_t"], e["sent_bytes"]) for e in own)
    return max(sum(int(n) for at, n in sent if begins <= at < begins + 1) for begins, _ in sent)


def fedbuff() -> bool:
    """Print a line for each strategy; whether FedBuff is twice as soon at the target."""
    table = read_toml(TENFOLD)
    seconds = []
    for strategy in table["axes"]["strategy"]:
        summary, _ = simulate(parse(table["job"], [f"strategy={strategy}"]))
        seconds.append(summary["target_seconds"])
        shown = "never" if seconds[-1] is None else f"{seconds[-1]:.2f} s"
        print(f"  {strategy:24} {shown} to {100 * summary['target']:.0f} %")
    theirs, own = seconds
    if theirs is None or own is None:
        return False
    print(f"  {theirs / own:.1f} times sooner; at least 2 wanted")
    return bool(theirs >= 2 * own)


def downpour() -> bool:
    """Print a line for each outer rule; whether only Adagrad tolerates the rate."""
    finals = []
    for strategy in ("async-sgd(5)", "async-sgd(5) | sgd(1)"):
        summary, _ = simulate(load(None, [*DOWNPOUR, f"strategy={strategy}"]))
        finals.append(summary["final"])
        print(
            f"  {strategy:24} loss {finals[-1]['loss']:.3f}, {100 * finals[-1]['accuracy']:.1f} %"
        )
    chance = 0.2  # ten classes
    return finals[0]["accuracy"] > 0.9 and not finals[1]["accuracy"] > chance


def streaming() -> bool:
    """Print a line for each strategy; whether a second carries a fragment, at the same loss."""
    most, losses = [], []
    for strategy, count in (("diloco", 1), (f"streaming-diloco({FRAGMENTS}, 0.5)", FRAGMENTS)):
        words = [*STREAMING, f"strategy={strategy}", *(["delay=6"] if count > 1 else [])]
        summary, exchanges = simulate(load(None, words))
        most.append(most_in_a_second(exchanges, 4 * count))
        losses.append(summary["final"]["loss"])
        print(f"  {strategy:24} {most[-1]:,} bytes in a second, loss {losses[-1]:.3f}")
    share = most[1] * FRAGMENTS / most[0]
    print(f"  {share:.3f} of 1/{FRAGMENTS}; 0.9 to 1.1 wanted, and a loss of at most 0.02 more")
    return 0.9 <= share <= 1.1 and losses[1] <= losses[0] + 0.02


PARTS: dict[str, Callable[[], bool]] = {
    "fedbuff": fedbuff, "downpour": downpour, "streaming": streaming,
}  # fmt: skip


def main() -> int:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    short = 0
    for name in parser.parse_args().parts or PARTS:
        print(name, flush=True)
        holds = PARTS[name]()
        short += not holds
        print("  holds" if holds else "  DOES NOT HOLD", flush=True)
    return int(short > 0)


if __name__ == "__main__":
    sys.exit(main())
