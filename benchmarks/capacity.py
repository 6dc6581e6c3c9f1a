"""The timing-only plan against the simulator: seconds per step of the same jobs.

python benchmarks/capacity.py            the table of docs/simulation.md
python benchmarks/capacity.py --scaling  seconds that plans of 10 to 100,000 members take
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from edgetrain.jobs.capacity import estimate
from edgetrain.jobs.capacity.question import Options, question_of
from edgetrain.jobs.job import Job
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.resolved import look_up

BASIS = ("members=8", "pace_s=0.05", "steps=100", "optimizer={ name = 'sgd', lr = 0.2 }")
JOBS = {
    "sync-sgd, 200 ms": ("strategy=sync-sgd", "delay=0", "network=wan-200ms"),
    "fedavg, 500 ms": ("strategy=fedavg", "delay=0", "network=wan-500ms"),
    "dga, D = 12, 500 ms": ("strategy=dga", "delay=12", "network=wan-500ms"),
    "dga, D = 20, 200 ms": ("strategy=dga", "delay=20", "network=wan-200ms"),
    "fedavg, shared uplink": (
        "strategy=fedavg", "delay=0", "network=ethernet", "fleet.sites=home-fixed: 0-7",
    ),
    "fedavg, 4g-medium, loss": ("strategy=fedavg", "delay=0", "network=4g-medium"),
    "dga, D = 5, wifi, loss": ("strategy=dga", "delay=5", "network=wifi"),
    "fedavg, int8, 3g": ("strategy=fedavg", "delay=0", "network=3g", "codec=int8"),
}  # fmt: skip


def planned(job: Job, beside: Path | None = None) -> estimate.Answer:
    """The plan of a job, over as many rounds as it has.

    The simulator's hub has no port and merges in no time: only its messages cost.
    """
    rounds = job.train.steps // look_up(job).every
    options = Options(rounds=rounds, hub_rate_mbit=0, merge_bytes_per_s=0)
    return estimate.answer(question_of(job, options, beside))


def simulated(job: Job, beside: Path | None = None) -> float:
    """Seconds per step of the simulated job."""
    from edgetrain.training.simulated import simulation

    with tempfile.TemporaryDirectory() as folder:
        summary = simulation.run(plan(job, beside), Path(folder))
    return 1 / float(summary["steps_per_second"])


def compare() -> None:
    """Print the table."""
    print("| job | simulated | planned | difference |\n|---|---|---|---|")
    for name, changes in JOBS.items():
        job = load(None, [*BASIS, *changes])
        step_s, answer = simulated(job), planned(job)
        apart = 100 * (answer.seconds_per_step / step_s - 1)
        ours = 1000 * answer.seconds_per_step
        print(f"| {name} | {1000 * step_s:.1f} ms | {ours:.1f} ms | {apart:+.1f} % |", flush=True)


def scaling() -> None:
    """Print how long a plan takes."""
    job = load(None, ["device=raspberry-pi-4b", "network=wan-200ms", "delay=20"])
    for gateways in (0, 100):
        options = Options(parameters=11_000_000, step_s=0.4, shards=4, gateways=gateways)
        question = question_of(job, options)
        for members in estimate.COUNTS:
            began = time.perf_counter()
            estimate.answers(question, [members])
            print(f"{members:7,} members, {gateways:>3} gateways, 100 rounds: "
                  f"{time.perf_counter() - began:.2f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--scaling", action="store_true", help="time plans of many sizes")
    scaling() if arguments.parse_args().scaling else compare()
