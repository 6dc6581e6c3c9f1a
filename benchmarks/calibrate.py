"""How far simulated runs are from emulated ones, on this machine.

    python benchmarks/calibrate.py                 eight jobs that cover the simulator: 5 minutes
    python benchmarks/calibrate.py job.toml
    python benchmarks/calibrate.py job.toml --strategies sync-sgd,dga --networks wan-200ms,4g-good

Runs every job twice, emulated (real processes, real TCP) and simulated (virtual time), and prints
how far the simulation is from the emulated run: seconds per step, waiting (in parts of a step),
bytes, final figure, and whether the parameters are the same bit for bit. Where packets are lost
or links have jitter, two runs of one job differ by luck: such a job is simulated --draws times with
other losses and delays each time; their mean is compared, and `by chance` says how far off one
emulated run may be for no other reason. `machine busy` is what this machine took longer for its
own work than the job says, in parts of a step: the simulator does not foretell that.

Each run is kept in the folder as it ends. benchmarks/links.py does the same for a grid of links.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import calibration
from calibration import CalibratedPair

from edgetrain.__main__ import carry_out
from edgetrain.cli import common, pictures, running
from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job
from edgetrain.runs.reports import units
from edgetrain.training.simulated import require_simulator

_BASIS = ("members=8", "pace_s=0.05", "steps=240", "optimizer={ name = 'sgd', lr = 0.2 }")

CASES: dict[str, tuple[str, ...]] = {
    "sync-sgd, 200 ms": ("strategy=sync-sgd", "delay=0", "network=wan-200ms", "steps=100"),
    "fedavg, 500 ms": ("strategy=fedavg", "delay=0", "network=wan-500ms"),
    "dga, 500 ms": ("strategy=dga", "delay=12", "network=wan-500ms"),
    "fedavg, shared uplink": (
        "strategy=fedavg", "delay=0", "network=ethernet", "fleet.sites=home-fixed: 0-7",
    ),
    "dga, shared uplink": (
        "strategy=dga", "delay=5", "network=ethernet",
        "fleet.sites=home-fixed: 0-3, 4g-medium: 4-7",
    ),
    "sync-sgd, 4g-good, loss": ("strategy=sync-sgd", "delay=0", "network=4g-good", "steps=160"),
    "fedavg, 4g-medium, loss": ("strategy=fedavg", "delay=0", "network=4g-medium"),
    "dga, wifi, loss": ("strategy=dga", "delay=5", "network=wifi"),
}  # fmt: skip
"""The jobs run if none is given: eight members with steps of 50 ms."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job(parser)
    parser.add_argument("--strategies", help="comma-separated; default: the job's own")
    parser.add_argument("--networks", help="comma-separated; default: the job's own")
    parser.add_argument(
        "--draws", type=int, default=8, metavar="N",
        help="simulated runs of a job whose links lose packets or have jitter (default 8)",
    )  # fmt: skip
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.draws <= 1000:
        raise ConfigError(f"--draws {arguments.draws}", "allowed are 1 to 1000")
    jobs, beside = jobs_of(arguments)
    require_simulator()
    checked = running.check_before_torch(arguments, jobs.values())
    from edgetrain.jobs.plan import with_task
    from edgetrain.runs.folder import create
    from edgetrain.training import emulated

    emulated.warm_up()
    checked = [running.with_host_pace(arguments, each, beside) for each in checked]
    planned = {name: with_task(each, beside) for name, each in zip(jobs, checked, strict=True)}
    folder = create(arguments.runs, "calibrate")
    pairs: list[CalibratedPair] = []
    told = _Progress(len(planned), time.monotonic)
    try:
        for name, each in planned.items():
            report = partial(told.begin, name)
            draws = arguments.draws
            pairs.append(calibration.run_both(name, each, folder, draws, report, time.monotonic))
    except BaseException:
        if pairs:
            _report(arguments, pairs, folder)
        raise
    whole = _report(arguments, pairs, folder)
    return int(not whole or any(each.incomplete for each in pairs))


def _report(arguments: argparse.Namespace, pairs: list[CalibratedPair], folder: Path) -> bool:
    """Say, draw and save how far off simulations were. Returns whether the folder is whole."""
    from edgetrain.runs.folder import write_summary

    if not arguments.json:
        common.say(calibration.text(pairs))
    picture = pictures.picture(folder / "calibration.png", calibration.draw_calibration, pairs)
    answer = calibration.as_json(pairs, picture)
    pictures.say_end(arguments, answer, [picture], folder)
    answer = {"name": folder.name, "calibration": answer}
    return running.saved(lambda: write_summary(folder, answer))


def jobs_of(arguments: argparse.Namespace) -> tuple[dict[str, Job], Path | None]:
    """Jobs by name (the given one's variants, or the built-in cases), and the job file's folder."""
    from dataclasses import replace

    from edgetrain.jobs.grid import variants
    from edgetrain.strategies.spelling import split_list

    if not arguments.job and not arguments.strategies and not arguments.networks:
        from edgetrain.jobs.reading import load

        return {name: load(None, [*_BASIS, *case]) for name, case in CASES.items()}, None
    job, beside = common.job_of(arguments, _BASIS)
    found = {}
    for variant in variants(job, split_list(arguments.strategies or job.strategy.name)):
        for network in (arguments.networks or job.fleet.network).split(","):
            name = f"{variant.strategy.name}, {network.strip()}"
            found[name] = replace(variant, fleet=replace(variant.fleet, network=network.strip()))
    return found, beside


class _Progress:
    """Reports which run begins, and about how long the others take."""

    def __init__(self, jobs: int, clock: Callable[[], float]) -> None:
        self._jobs, self._clock = jobs, clock
        self._begun: dict[str, int] = {}
        self._began = clock()

    def begin(self, name: str, how: str) -> None:
        number = self._begun.setdefault(name, len(self._begun) + 1)
        left = ""
        if number > 1:
            left_s = (self._clock() - self._began) / (number - 1) * (self._jobs - number + 1)
            left = f" about {units.duration(left_s)} left"
        common.warn(f"{number} of {self._jobs}: {name}, {how} …{left}")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(debug=False)
    add_arguments(parser)
    arguments = parser.parse_intermixed_args(words)
    return carry_out(lambda: run(arguments), arguments)


if __name__ == "__main__":
    sys.exit(main())
