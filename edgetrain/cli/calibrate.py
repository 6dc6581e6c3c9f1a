"""`edgetrain calibrate`: run the same jobs emulated and simulated; report the difference."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common
from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job
from edgetrain.jobs.link_grid import Axes, Point, axes_of, part_of, points
from edgetrain.runs.reports import units

if TYPE_CHECKING:
    from edgetrain.jobs.plan import Plan
    from edgetrain.runs.reports.calibration import Pair
    from edgetrain.training.finished import Finished

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

_EXAMPLES = """\
examples:
  edgetrain calibrate                              eight jobs that cover the simulator, 5 minutes
  edgetrain calibrate job.toml
  edgetrain calibrate job.toml --strategies sync-sgd,dga --networks wan-200ms,4g-good
  edgetrain calibrate --grid --rtt-ms 50,500 --rate-mbit 1,100 --strategies fedavg
  edgetrain calibrate --grid --part 1/4 --at-once 6      a quarter of the grid, evenly chosen
  edgetrain calibrate --grid --resume runs/20260131-142501-calibrate

Runs every job twice, emulated (real processes, real TCP) and simulated (virtual time), and prints
how far the simulation is from the emulated run: seconds per step, waiting (in parts of a step),
bytes, final figure, and whether the parameters are the same bit for bit. Where packets are lost
or links have jitter, two runs of one job differ by luck: such a job is simulated --draws times with
other losses and delays each time; their mean is compared, and `by chance` says how far off one
emulated run may be for no other reason. `machine busy` is what this machine took longer for its
own work than the job says, in parts of a step: the simulator does not foretell that.

--grid compares links instead: round trip times, rates, message sizes and jitter, two members, under
fedavg, dga and sync-sgd. The whole grid has 288 jobs and takes three hours, one after the other;
the flags choose a part. Emulated runs mostly sleep: --at-once runs several side by side, which
saves most of that time as long as no emulation is marked NO, late itself or dropping packets.
Below the jobs it says how many are within 5 % under each strategy and at each value of an axis,
and which five are the worst.

Each run is kept in the folder as it ends. After Ctrl-C or a power cut the same command with
--resume and that folder runs only what is missing; jobs with other settings, or of another version,
are run again.
"""


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = common.verb(
        subparsers,
        "calibrate",
        "how far simulated runs are from emulated ones, on this machine",
        "Run jobs emulated and simulated, and report the error of the simulation.",
        _EXAMPLES,
    )
    common.add_job(parser)
    parser.add_argument("--strategies", help="comma-separated; default: the job's own")
    parser.add_argument("--networks", help="comma-separated; default: the job's own")
    parser.add_argument(
        "--draws", type=int, default=8, metavar="N",
        help="simulated runs of a job whose links lose packets or have jitter (default 8)",
    )  # fmt: skip
    grid = parser.add_argument_group("a grid of links (--grid)")
    grid.add_argument("--grid", action="store_true", help="a job for each point of the grid")
    for name, default in vars(Axes()).items():
        values = ",".join(f"{value:g}" for value in default)
        grid.add_argument(f"--{name.replace('_', '-')}", metavar="N,N", help=f"default: {values}")
    grid.add_argument(
        "--part", metavar="K/N", help="the K-th of N parts of the grid, evenly chosen"
    )
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N",
        help="emulated runs side by side (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--resume", type=Path, metavar="FOLDER",
        help="go on with this calibration: only jobs that are not finished in it are run",
    )  # fmt: skip
    common.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan all jobs, run each both ways, print and draw the errors."""
    if not 1 <= arguments.draws <= 1000:
        raise ConfigError(f"--draws {arguments.draws}", "allowed are 1 to 1000")
    if not 1 <= arguments.at_once <= 64:
        raise ConfigError(f"--at-once {arguments.at_once}", "allowed are 1 to 64")
    grid = _grid_points(arguments)
    jobs, beside = ({}, None) if arguments.grid else jobs_of(arguments)
    common.require_simulator()
    common.check_before_torch(arguments, jobs.values())
    from edgetrain.jobs.plan import plan
    from edgetrain.runs.folder import create
    from edgetrain.training import emulated
    from edgetrain.training.finished import Finished, digest_of

    emulated.warm_up()
    jobs = {name: common.with_host_pace(arguments, job, beside) for name, job in jobs.items()}
    planned = {name: plan(job, beside) for name, job in jobs.items()}
    resumed = arguments.resume is not None
    folder = _resumed(arguments.resume) if resumed else create(arguments.runs, "calibrate")
    planned |= {name: plan(job) for name, job in _grid_jobs(grid, folder).items()}
    digests = {name: digest_of(name, each, arguments.draws) for name, each in planned.items()}
    with Finished(folder, digests, resumed=resumed) as finished:
        if resumed:
            common.warn(f"{len(finished)} of {len(planned)} jobs are finished in {folder}")
        return _run(arguments, planned, grid, folder, finished)


def _run(
    arguments: argparse.Namespace,
    planned: Mapping[str, Plan],
    grid: Sequence[Point],
    folder: Path,
    finished: Finished,
) -> int:
    """Run what is not finished, and report; the exit status."""
    from edgetrain.training import both_ways

    draws = arguments.draws
    pairs: list[Pair] = []
    told = _Progress(len(planned) - len(finished), time.monotonic)
    try:
        if arguments.at_once > 1:
            pairs.extend(
                both_ways.run_side_by_side(
                    planned, folder, draws, arguments.at_once, told.report, time.monotonic, finished
                )
            )
        else:
            for name, each in planned.items():
                report = partial(told.begin, name)
                pairs.append(
                    both_ways.run(name, each, folder, draws, report, time.monotonic, finished)
                )
    except BaseException as error:
        if pairs:
            _report(arguments, pairs, folder, grid)
        if isinstance(error, KeyboardInterrupt):
            common.warn(f"go on with: the same command and --resume {folder}")
        raise
    whole = _report(arguments, pairs, folder, grid)
    return int(not whole or any(each.incomplete for each in pairs))


def _report(
    arguments: argparse.Namespace, pairs: list[Pair], folder: Path, grid: Sequence[Point]
) -> bool:
    """Say and draw how far off the simulations were, and leave it in `folder`. Returns whether the
    folder is whole."""
    from edgetrain.runs.folder import write_summary
    from edgetrain.runs.reports import calibration
    from edgetrain.runs.reports.plot import calibration_figure, grid_figure

    points = list(zip(grid, pairs, strict=False))  # fewer pairs after Ctrl-C
    groups = calibration.groups_of(((*p.values, p.group), pair) for p, pair in points)
    if not arguments.json:
        common.say(calibration.text(pairs))
        if groups:
            common.say(calibration.summed_up(groups))
            common.say(calibration.worst(pairs))
    file = folder / "calibration.png"
    drawn = partial(grid_figure, [(p.place, pair) for p, pair in points], file)
    picture = common.picture(drawn if points else partial(calibration_figure, pairs, file))
    answer = calibration.as_json(pairs, picture)
    answer |= calibration.groups_as_json(groups) if groups else {}
    if arguments.json:
        common.say(json.dumps(answer | {"folder": str(folder)}))
    else:
        common.say_pictures([picture])
        common.say(f"run folder: {folder}")
    summary = {"name": folder.name, "calibration": answer}
    return common.saved(lambda: write_summary(folder, summary))


def jobs_of(arguments: argparse.Namespace) -> tuple[dict[str, Job], Path | None]:
    """Jobs by name, and the folder of the job file: the given job under each strategy and network,
    or the built-in cases."""
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


def _grid_points(arguments: argparse.Namespace) -> list[Point]:
    """The points of the grid; none without --grid."""
    from edgetrain import strategies
    from edgetrain.strategies.spelling import split_list

    axes = {name: getattr(arguments, name) for name in vars(Axes())}
    if not arguments.grid:
        if arguments.part or any(value is not None for value in axes.values()):
            raise ConfigError(
                "--rtt-ms, --rate-mbit, --kilobytes, --jitter-percent and --part need --grid"
            )
        return []
    if arguments.job or arguments.networks:
        raise ConfigError("--grid makes its own jobs", "leave out JOB, KEY=VALUE and --networks")
    names = split_list(arguments.strategies or "fedavg,dga,sync-sgd")
    for name in names:
        strategies.find(name)
    every = list(points(axes_of(axes), names))
    return part_of(arguments.part, every) if arguments.part else every


def _grid_jobs(grid: Sequence[Point], folder: Path) -> dict[str, Job]:
    """The jobs of these points by name. Their networks are written into `folder`."""
    from edgetrain.files.toml import to_toml
    from edgetrain.jobs.reading import load

    networks = folder / "networks"
    found = {}
    for point in grid:
        networks.mkdir(exist_ok=True)
        path = networks / f"{point.network}.toml"
        path.write_text(to_toml(point.profile()), "utf-8")
        found[point.name] = load(None, [*point.overrides(), f"network={path}"])
    return found


def _resumed(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"--resume {folder}: no such folder", "give one that calibrate made")
    return folder


class _Progress:
    """Reports how many runs are done, and about how long the others take. `jobs` are those that
    are still to be run."""

    def __init__(self, jobs: int, clock: Callable[[], float]) -> None:
        self._jobs, self._clock = jobs, clock
        self._done: Counter[str] = Counter()
        self._begun: dict[str, int] = {}
        self._began = clock()

    def begin(self, name: str, how: str) -> None:
        """A run of this kind begins, where one job follows the other."""
        number = self._begun.setdefault(name, len(self._begun) + 1)
        common.warn(f"{number} of {self._jobs}: {name}, {how} …{self._left(number - 1)}")

    def _left(self, done: int) -> str:
        if not done:
            return ""
        left_s = (self._clock() - self._began) / done * (self._jobs - done)
        return f" about {units.duration(left_s)} left"

    def report(self, name: str, how: str) -> None:
        """A run of this kind is done (emulated) or begins (simulated)."""
        self._done[how] += 1
        done = self._done[how]
        left = f",{self._left(done)}" if how == "emulated" else ""
        common.warn(f"{how} {done} of {self._jobs}: {name}{left}")
