"""Experiments from Python: what the verbs `run`, `simulate`, `compare` and `sweep` do.

    run = edgetrain.simulate(members=40, network="4g-good", strategy="dga", steps=60)
    run.steps["wait_s"]                   # metrics.jsonl as columns
    edgetrain.compare("job.toml", ["sync-sgd", "dga"]).frame()

Each leaves the run folder that its verb leaves, with the same bits, and returns it read
(`runs/loaded.py`). They raise EdgetrainError and never exit; an interrupted run can be loaded.
`run_one` and `run_several` are what the verbs and these functions share: whose folders are made and
removed, and what is left of an interrupted comparison. Thin: what a job means, how it runs and what
is written of it is elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from edgetrain.errors import ConfigError
from edgetrain.jobs import choosing
from edgetrain.jobs.defaults import DEMO, SIMULATED
from edgetrain.jobs.grid import Sweep, axis, text_of, variants
from edgetrain.jobs.grid import load as load_sweep
from edgetrain.jobs.grid import write as write_sweep
from edgetrain.jobs.job import Job
from edgetrain.jobs.plan import check, check_names, with_task
from edgetrain.jobs.reading import load, parse
from edgetrain.jobs.resolved import look_beside
from edgetrain.jobs.rules import refuse_gateways
from edgetrain.runs.folder import create, create_inside, remove_unbegun, write_job, write_summary
from edgetrain.runs.loaded import Run, Runs
from edgetrain.runs.summary import interrupted
from edgetrain.training.host_pace import paced
from edgetrain.training.simulated import require_simulator

if TYPE_CHECKING:
    from edgetrain.jobs.resolved import Resolved

log = logging.getLogger("edgetrain")

T = TypeVar("T")

JobLike = str | Path | Mapping[str, Any] | None
"""A job file, a job as a dictionary of its tables, or None: the built-in digits job."""

STRATEGIES = ("sync-sgd", "fedavg", "dga")


def run(
    job: JobLike = None,
    *,
    task: object = None,
    runs: str | Path = "runs",
    progress: bool = True,
    **keys: Any,
) -> Run:
    """Train a job as `edgetrain run`: real processes of this machine, emulated links, in real time.

    A job that is placed on a group of processes on servers is for the verb. A script that calls
    this needs `if __name__ == "__main__":`, as everything does that starts processes. The rest as
    in `simulate`.
    """
    return _run(job, (), task, runs, progress, keys, simulated=False)


def simulate(
    job: JobLike = None,
    *,
    task: object = None,
    runs: str | Path = "runs",
    progress: bool = True,
    **keys: Any,
) -> Run:
    """Train a job in virtual time, as `edgetrain simulate`, in a new folder in `runs`.

    `keys` are keys of the job, which win over it: `steps=60`, `network="wan-500ms"`,
    `**{"optimizer.lr": 0.1}`. `task` is a task, its class or factory, defined anywhere; or its name
    as in a job file. `progress` shows the live table, on stderr. Raises ConfigError, NetworkError,
    TaskError; KeyboardInterrupt leaves a folder that `load` reads.
    """
    return _run(job, SIMULATED, task, runs, progress, keys, simulated=True)


def _run(
    job: JobLike,
    defaults: Sequence[str],
    task: object,
    runs: str | Path,
    progress: bool,
    keys: Mapping[str, Any],
    *,
    simulated: bool,
) -> Run:
    found, beside = _job(job, task, defaults, keys)
    planned = _planned(found, beside, simulated=simulated)
    runner = _runner(simulated=simulated)
    folder = create(runs, planned.job.name)
    view = partial(_view, planned=planned, progress=progress, simulated=simulated)
    run_one(planned, folder, runner, view)
    return Run(folder)


def compare(
    job: JobLike = None,
    strategies: Sequence[str] = STRATEGIES,
    *,
    task: object = None,
    simulate: bool = False,
    runs: str | Path = "runs",
    progress: bool = True,
    **keys: Any,
) -> Runs:
    """The same job under several strategies, as `edgetrain compare`; the others are compared with
    the first. `simulate`: in virtual time, as the function `simulate`; else as `run`. Without a
    job: that of `make demo`. The rest as in `simulate`."""
    if "emulate" in keys:
        raise ConfigError("compare emulates where it is not asked to simulate", "simulate=True")
    if isinstance(strategies, str) or not strategies:
        raise ConfigError(f"strategies = {strategies!r}", 'a list, as in ["sync-sgd", "dga"]')
    found, beside = _job(job, task, DEMO, keys)
    jobs = variants(found, strategies)
    planned = [_planned(each, beside, simulated=simulate) for each in jobs]
    names = [each.job.strategy.name for each in planned]
    view = partial(_view, planned=planned[0], progress=progress, simulated=simulate)
    from edgetrain.runs.reports.comparison import compare as compared

    def leave(folder: Path, folders: Sequence[Path], summaries: Sequence[dict[str, Any]]) -> Path:
        summary: dict[str, Any] = {"name": folder.name, "runs": [each.name for each in folders]}
        if summaries:
            summary["comparison"] = compared(summaries).as_json()
        write_summary(folder, summary)
        return folder

    runner = _runner(simulated=simulate)
    return Runs(run_several(found, planned, names, runs, runner, view, leave))


def sweep(
    job: JobLike = None,
    axes: Mapping[str, Sequence[Any]] | None = None,
    *,
    task: object = None,
    seeds: int | None = None,
    executor: Executor | None = None,
    runs: str | Path = "runs",
    progress: bool = True,
    **keys: Any,
) -> Runs:
    """A job, simulated for every combination of values, as `edgetrain sweep`.

    `axes` are keys of the job, and "rtt", with their values; `seeds` runs of each cell (None: 1).
    `job` may be the file of a simulated sweep, whose axes and seeds these join.

    An `executor` (a ProcessPoolExecutor, Dask's `client.get_executor()`) runs cells at once where
    its workers are, which need `runs` at the same path, and a task that can be imported there;
    None: one after the other, here. The bits are the same. The rest as in `simulate`.
    """
    from edgetrain.jobs.grid import is_sweep

    file = job if isinstance(job, str | Path) else None
    if file is not None and is_sweep(Path(file)):
        chosen = load_sweep(Path(file))
        if chosen.how != "simulated":
            raise ConfigError(f"{file}: how = '{chosen.how}'", f"edgetrain sweep {file}")
        table, beside = parse(chosen.job, _words(keys, task)), chosen.beside
    else:
        chosen = Sweep({}, ())
        table, beside = _job(job, task, SIMULATED, keys)
    if not isinstance(executor, Executor | None):
        raise ConfigError(f"executor = {executor!r}", "an Executor, as a ProcessPoolExecutor is")
    axes = {} if axes is None else axes
    if not isinstance(axes, Mapping) or not all(map(_is_list, axes.values())):
        raise ConfigError(f"axes = {axes!r}", 'lists by key, as in {"rtt": [0, 200]}')
    more = [axis(name, list(values)) for name, values in axes.items()]
    chosen = replace(chosen.joined(table, more, seeds), beside=beside)
    chosen.cells()  # ConfigError before there is a folder
    for each in chosen.samples():
        check_names(each)
    return _swept(chosen, create(runs, f"sweep-{chosen.called}"), executor, progress)


def _swept(chosen: Sweep, folder: Path, executor: Executor | None, progress: bool) -> Runs:
    from edgetrain.files.writing import write_text
    from edgetrain.runs.reports.sweep_rows import CSV, to_csv
    from edgetrain.training import sweep as sweeping

    require_simulator()
    write_sweep(folder, chosen)

    def tell(done: sweeping.SweepProgress) -> None:
        if progress:
            print(f"[{done.done}/{done.total}] {', '.join(done.cell.labels)}", file=sys.stderr)

    run_cell = partial(sweeping.simulate_cell, chosen.beside)
    rows = sweeping.run(chosen, folder.resolve(), run_cell, tell, time.monotonic, executor)
    write_text(folder / CSV, to_csv(rows))
    write_summary(folder, sweeping.results_of(chosen, folder, rows))
    return Runs(folder)


# -- shared with the verbs -------------------------------------------------------------------------

Runner = Callable[[Any, Path, Callable[[], None]], dict[str, Any]]
"""Runs a planned job in a folder, calling what it is given now and then; returns its summary."""

View = Callable[[Sequence[Path]], contextlib.AbstractContextManager[Callable[[], None]]]
"""Shows what is in these folders while they are run; its value is to be called now and then."""

Leave = Callable[[Path, Sequence[Path], Sequence[dict[str, Any]]], T]
"""Given the folder of several runs, theirs, and the summaries there are: leaves the comparison."""


def run_one(
    planned: Resolved, folder: Path, run: Runner, view: View, *, keep: bool = False
) -> dict[str, Any]:
    """Run a job in its folder; its summary. One in which nothing began goes, unless `keep`."""
    try:
        with view([folder]) as watch:
            return run(planned, folder, watch)
    except BaseException:
        if not keep:
            remove_unbegun(folder)
        raise


def run_several(
    job: Job,
    planned: Sequence[Resolved],
    names: Sequence[str],
    runs: str | Path,
    run: Runner,
    view: View,
    leave: Leave[T],
) -> T:
    """Run jobs one after the other, each in a folder with its name, in a new one that keeps the
    `job` that they come from. Returns what `leave` makes of them. After Ctrl-C, and after an error
    once something has begun, `leave` is called with what there is, and the error raised again."""
    folder = create(runs, f"compare-{planned[0].job.name}")
    write_job(folder, job.to_dict())
    folders = [create_inside(folder, name) for name in names]
    summaries: list[dict[str, Any]] = []
    try:
        with view(folders) as watch:
            for each, inside in zip(planned, folders, strict=True):
                summaries.append(run(each, inside, watch))
    except BaseException as error:
        if not summaries:
            for unbegun in (*folders, folder):
                remove_unbegun(unbegun)
        if folder.exists():
            if isinstance(error, KeyboardInterrupt) and len(summaries) < len(folders):
                summaries.append(interrupted(folders[len(summaries)]))
            leave(folder, folders, summaries)
        raise
    return leave(folder, folders, summaries)


# -- from what a caller gives to a planned job ----------------------------------------------------


def _job(
    job: JobLike, task: object, defaults: Sequence[str], keys: Mapping[str, Any]
) -> tuple[Job, Path]:
    """The job, and the folder where the modules of its task may be."""
    words, beside = _words(keys, task), Path.cwd()
    if isinstance(job, str | Path):
        found, beside = load(job, words), Path(job).resolve().parent
    elif job is None:
        found = load(None, [*defaults, *words])
    elif isinstance(job, Mapping):
        found = parse(job, words)
    else:
        raise ConfigError(f"a job is no {type(job).__name__}", "a file, a dictionary, or None")
    look_beside(beside)
    found, why = choosing.named(found)
    if why:
        log.info("%s", why)
    return found, beside


def _words(keys: Mapping[str, Any], task: object) -> list[str]:
    words = [f"{key}={text_of(value)}" for key, value in keys.items()]
    return words if task is None else [*words, f"task={_spelled(task)}"]


def _is_list(values: object) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, str)


def _spelled(task: object) -> str:
    """A task as a job names it. One that has no name of a module's is kept in this process."""
    from edgetrain.tasks import held

    return task if isinstance(task, str) else held.spelled(task)


def _planned(job: Job, beside: Path | None, *, simulated: bool) -> Resolved:
    found = check(job)
    refuse_gateways(found.job)
    return with_task(paced(found, beside) if simulated else found, beside)


def _runner(*, simulated: bool) -> Runner:
    if simulated:
        require_simulator()
        from edgetrain.training.simulated import simulation

        return simulation.run
    from edgetrain.training import emulated

    emulated.warm_up()
    return emulated.run


@contextlib.contextmanager
def _view(
    folders: Sequence[Path], planned: Resolved, progress: bool, *, simulated: bool
) -> Iterator[Callable[[], None]]:
    """What to call while these runs are under way."""
    if not progress:
        yield lambda: None
        return
    from edgetrain.runs.reports.live.view import LiveView

    fleet = planned.job.fleet
    view = LiveView(
        folders,
        clock=time.monotonic,
        heading=f"{planned.name}: {fleet.members} members, network {fleet.network}, "
        f"{planned.job.train.steps} steps",
        metric=planned.metric,
        out=sys.stderr,
        simulated=simulated,
    )
    with view:
        yield view.refresh
