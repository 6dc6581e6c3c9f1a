"""What does it cost if all members draw equal dropout masks? char-lm, equal draws and their own.

    python benchmarks/draws.py     # some ten minutes of an idle core

Simulated jobs: the char-lm of frontier.py, dropout 0.3, 8 members, batches of 8, 200 steps of 50 ms
over wan-200ms. Each row is tried at the rates of AdamW with the first seed, and run at the best of
them with the others. Columns: the learning rate; the loss on held-out text after all steps, mean of
the seeds, and each of them.

"equal": every member draws, in each step, what member 0 draws. A job cannot ask for that: this
script seeds the generators so. It is what members did before they had draws of their own.
"""

from __future__ import annotations

import statistics
from unittest import mock

from frontier import RATES, TASKS, simulate
from harness import machine, progress

from edgetrain.tasks import draws, work
from edgetrain.training.simulated import batched

STRATEGIES = ("sync-sgd", "dga")
SEEDS = range(3)
STEPS = 200


def seed_as_first(seed: int, member: int, step: int) -> None:
    """Seed the generators as member 0 does."""
    draws.seed_step(seed, 0, step)


def loss(strategy: str, is_equal: bool, rate: float, seed: int) -> float:
    """The held-out loss that one job ends with."""
    words = [
        "task=edgetrain.tasks:char_lm", f"data={{ dropout=0.3{TASKS['char_lm'].data} }}",
        "members=8", "batch=8", f"steps={STEPS}", f"evaluate_every={STEPS}", "network=wan-200ms",
        "pace_s=0.05", f"optimizer={{ name='adamw', lr={rate:g} }}", f"strategy={strategy}",
        f"seed={seed}",
    ]  # fmt: skip
    seeding = seed_as_first if is_equal else draws.seed_step
    with (
        mock.patch.object(work, "seed_step", seeding),
        mock.patch.object(batched, "seed_step", seeding),
    ):
        found = simulate(words)
    if "error" in found:
        raise SystemExit(f"{strategy}, lr {rate:g}, seed {seed}: {found['error']}")
    return float(found["final"])


def main() -> None:
    """The command."""
    print(machine())
    print(f"{'strategy':10}{'draws':8}{'rate':>7}{'loss':>8}   seeds {[*SEEDS]}")
    for strategy in STRATEGIES:
        seen = list[float]()
        for is_equal in (True, False):
            name = "equal" if is_equal else "own"
            progress(f"{strategy}, {name} …")
            tried = {
                rate: loss(strategy, is_equal, rate, SEEDS[0]) for rate in RATES["char_lm", "adamw"]
            }
            rate = min(tried, key=tried.__getitem__)
            found = [tried[rate], *(loss(strategy, is_equal, rate, seed) for seed in SEEDS[1:])]
            progress("")
            if found == seen:
                raise SystemExit("equal draws and own ones end alike: nothing was forced")
            seen = found
            each = "  ".join(f"{value:.3f}" for value in found)
            print(
                f"{strategy:10}{name:8}{rate:7g}{statistics.fmean(found):8.3f}   {each}", flush=True
            )


if __name__ == "__main__":
    main()
