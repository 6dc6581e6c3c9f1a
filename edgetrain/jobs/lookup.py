"""What a job names, looked up: its task, its data, its local work, the pace of its devices.

Torch is loaded with the task.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain import strategies
from edgetrain.errors import ConfigError, TaskError
from edgetrain.fleet import devices
from edgetrain.jobs.job import Job
from edgetrain.jobs.reading import placed
from edgetrain.jobs.resolved import Resolved, load_own_of, look_beside
from edgetrain.jobs.shares import shares_of
from edgetrain.tasks.spelling import OWN

if TYPE_CHECKING:
    import torch

    from edgetrain.tasks.flat import FlatModel
    from edgetrain.tasks.protocol import Task
    from edgetrain.tasks.work import Local, Tuning
    from edgetrain.vectors.noise import Source


def task_of(job: Job, beside: Path | None = None, keys: Path | None = None) -> Task:
    """The job's task, its data read; `beside` is the folder of the job file, searched for modules.

    The job's seed partitions the data unless [data] has its own, and members hold out what
    `train.hold_out` says. Models begin from the file that
    the job's `start` names, and know which of their layers are personal. Raises TaskError, and
    ConfigError for a bundle that `keys`, the folder of this machine's keys, does not allow.
    """
    task = _loaded(job, beside, keys)
    if job.train.hold_out or hasattr(task, "shards"):
        from edgetrain.tasks.own_data import hold_out

        hold_out(task, job.train.hold_out)
    personal = job.strategy.personal
    if not (job.start or personal):
        return task
    from edgetrain.tasks.personal import Prepared

    start = placed(job.start, beside) if job.start else None
    found: Task = Prepared(task, start, personal)  # type: ignore[assignment]  # it passes on what it does not have
    return found


def task_on_servers(job: Job, beside: Path | None, keys: Path | None = None) -> Task:
    """The job's task with the options that differ on servers. What else the job names of a user's
    own is loaded, too: ranks look nothing up."""
    look_beside(beside, keys)
    load_own_of(job)
    return task_of(replace(job, data={**job.data, **job.servers.data}), beside, keys)


def _loaded(job: Job, beside: Path | None, keys: Path | None) -> Task:
    from edgetrain.tasks import load_task

    defaults = {"seed": job.seed}
    data = dict(job.data)
    if isinstance(data.get("folder"), str) and data["folder"]:
        folder = placed(data["folder"], beside)
        if job.task.startswith(OWN) and not data.get("download") and not folder.exists():
            raise ConfigError(
                f"data.folder = '{data['folder']}': no folder {folder}",
                "a relative one is looked for beside the job file",
            )
        data["folder"] = str(folder)
    if given := re.fullmatch(r"given\((.+)\)", str(data.get("partition", ""))):
        data["partition"] = f"given({placed(given[1], beside)})"
    if "#" not in job.task:  # or else it names a bundle
        return load_task(job.task, data, defaults=defaults, beside=beside)
    from edgetrain.exchange.keys.pairs import keys_folder
    from edgetrain.jobs import bundles

    bundle = bundles.named(job.task)
    assert bundle is not None
    within = bundles.opened(
        placed(bundle.path, beside), bundles.Allowed(keys_folder(keys)), bundle.pin
    )
    return load_task(bundle.inner, data, defaults=defaults, within=within, called=job.task)


def pace_of(job: Job, device: str, model: torch.nn.Module, task: Task) -> float:
    """Seconds that one step of this job takes on a device; 0 for the machine itself."""
    if job.fleet.pace_s:
        return job.fleet.pace_s
    if device in (devices.HOST, devices.here()):
        return 0.0
    from edgetrain.fleet.devices.cost import measure_step
    from edgetrain.tasks import batches_from

    batch = next(batches_from(task, 0, job.fleet.members, job.train.batch, job.seed))
    flops, operators = measure_step(model, batch, task.loss)
    model.zero_grad(set_to_none=True)
    return job.train.accumulate * devices.load(device).step_seconds(flops, operators)


def buffers_of(found: Resolved) -> str:
    """What becomes of running statistics: "mean" if the job says so and its strategy can, that is
    if it exchanges displacements and no examples are to be protected; otherwise "local"."""
    exchanges = found.strategy.moves_params and not found.strategy.deals
    can = exchanges and found.job.privacy.unit != "example"
    return found.job.strategy.buffers if can else "local"


def tuning_of(job: Job) -> Tuning:
    """Schedule, linear scaling and clipping before each step. Raises ConfigError."""
    from edgetrain.tasks.work import Tuning

    train, found = job.train, None
    if train.schedule:
        from edgetrain.jobs import schedule

        found = schedule.parse(train.schedule, train.steps)
    if not train.lr_reference_batch:
        return Tuning(None if found is None else found.factor, train.clip)
    scale = job.fleet.members * train.batch * train.accumulate / train.lr_reference_batch
    factor = (lambda step: scale) if found is None else (lambda step: scale * found.factor(step))
    return Tuning(factor, train.clip)


def samples_of(job: Job, task: Task) -> tuple[int, ...]:
    if job.privacy.unit != "example":
        return ()
    return tuple(shares_of(job, index).samples(task) for index in range(job.fleet.members))


def built(task: Task) -> torch.nn.Module:
    """The task's model, built to be measured. Raises ConfigError if its parameters and gradients do
    not fit this machine's memory: a system that promises more than it has ends the process later.
    """
    from edgetrain.runs.environment import free_memory
    from edgetrain.tasks.meta import outline_of

    outline = outline_of(task)
    needs, free = 8 * outline.parameters, free_memory()
    if needs > free:
        raise ConfigError(
            f"the model has {outline.parameters:,} parameters: with their gradients they take "
            f"{needs / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free here",
            "measure on a machine with more memory; `edgetrain capacity` takes the figures, too: "
            "--parameters N --step-seconds S",
        )
    return task.model()


def work_of(
    job: Job,
    task: Task,
    model: torch.nn.Module,
    flat: FlatModel,
    index: int,
    source: Source,
    taken: int = 0,
    begins_at: int = 0,
) -> Local:
    """The work of one member on a model of its own, after so many steps of its own, before this
    step of the job; private where examples are. ConfigError for a task or a model that cannot be
    trained so."""
    from edgetrain.tasks.work import OneModel, OwnDraws

    own = shares_of(job, index)
    if job.privacy.unit == "example":
        from edgetrain.tasks import private_work
        from edgetrain.vectors.noise import Gaussian

        table = job.privacy
        poisson = table.sampling == "poisson"
        sampling = private_work.Sampling(own.held[0], own.of, job.train.batch, job.seed, poisson)
        mechanism = Gaussian(table.clip, table.noise)
        private = private_work.work(task, model, flat, sampling, mechanism, source)
        return OwnDraws(private, job.seed, own.held[0], begins_at)
    strategy = strategies.find(job.strategy.name)
    if strategy.deals:
        from edgetrain.tasks.slices import Slices

        chunk, batch = job.train.batch, strategy.argument("batch")
        return Slices(task, model, flat, (own.held[0], own.of), batch, chunk, job.seed)
    from edgetrain.tasks import batches_from

    train = job.train
    batches = batches_from(
        task, own.held[0], own.of, train.batch, job.seed, taken * train.accumulate, train.steps,
        train.accumulate,
    )  # fmt: skip
    work = OneModel(task, model, flat, batches, train.accumulate)
    heads, local_steps = job.strategy.head_steps, job.strategy.local_steps or strategy.local_steps
    if not heads:
        return OwnDraws(work, job.seed, own.held[0], begins_at)

    def freeze(step: int) -> None:
        flat.freeze(personal=step % local_steps >= heads)

    return OwnDraws(work, job.seed, own.held[0], begins_at, freeze)


def target_of(job: Job, task: Task) -> float | None:
    """The figure at which a run counts as trained: the job's, or the task's, if any."""
    wanted = job.train.target
    if wanted > 1 and task.metric.endswith("accuracy"):
        raise ConfigError(
            f"train.target = {wanted:g}",
            f"{task.metric} is a share of 1: {wanted / 100:g} is {wanted:g} %",
        )
    return wanted or task.target


def check_loss(job: Job, task: Task) -> None:
    """ConfigError where a batch is computed in parts and its loss is not made of theirs."""
    train, is_private = job.train, job.privacy.unit == "example"
    if is_private:
        where = "privacy.unit = 'example'"
        way_out = "take the plain mean of its examples' losses, or unit = 'member'"
    elif strategies.find(job.strategy.name).deals:
        where, way_out = "lbfgs computes slices of a batch", "choose dga or sync-sgd"
    elif train.accumulate > 1:
        where = f"train.accumulate = {train.accumulate}"
        way_out = "say what it is a mean over (`counted`, docs/how-to/tasks.md), or accumulate = 1"
    else:
        return
    from edgetrain.tasks.losses import first_batches, look_at
    from edgetrain.tasks.protocol import is_counted

    said = "counts other things than examples"
    if not (is_private and is_counted(task)):
        batch = first_batches(task, job.fleet.members, train.batch, job.seed)
        said = look_at(task, batch, 1 if is_private else train.batch).samples
    if said:
        raise ConfigError(f"{where}: the loss of a batch of task '{task.name}' {said}", way_out)


def rehearse(job: Job, task: Task) -> None:
    """Look at samples, the first batch and the figures of a small model: what cannot be
    fails before anything starts. ConfigError, TaskError."""
    from edgetrain.tasks import batches_from
    from edgetrain.tasks.draws import figures_of, generators_kept
    from edgetrain.tasks.losses import is_small

    strategy, shares = strategies.find(job.strategy.name), shares_of(job, 0).of
    for index in range(job.fleet.members):
        shares_of(job, index).samples(task)
    next(batches_from(task, 0, shares, job.train.batch, job.seed))
    with generators_kept():
        figures = figures_of(task, task.model()) if is_small(task) else {}
    if math.inf in map(abs, figures.values()):
        said = f"task '{task.name}': evaluate(model) returns {figures} before training"
        raise TaskError(said, "finite numbers, or NaN for what is not known")
    check_loss(job, task)
    if strategy.deals:
        _check_same_data(job, task, strategy.argument("batch"))


def rehearse_private(found: Resolved, task: Task, index: int = 0) -> None:
    """Take two steps as a private job's member does: what cannot be, and what would leave without
    noise, fails before anything starts. ConfigError."""
    job = found.job
    if job.privacy.unit == "none":
        return
    from edgetrain.tasks.draws import generators_kept, model_of
    from edgetrain.tasks.flat import FlatModel
    from edgetrain.tasks.weights import unnoised_check
    from edgetrain.tasks.work import optimizer_for
    from edgetrain.vectors.noise import system

    if job.privacy.unit == "example" and job.privacy.sampling == "poisson":  # no empty batches
        job = replace(job, train=replace(job.train, batch=max(job.train.batch, 16)))
    with generators_kept():
        model, has_mean = model_of(task, job.seed), buffers_of(found) == "mean"
        flat = FlatModel(model, frozen="own", statistics=has_mean)
        optimizer = optimizer_for(model, job.train.optimizer, task)
        check = unnoised_check(model, has_mean, job.privacy.unit)
        work = work_of(job, task, model, flat, index, system)
        for _ in range(2):  # a teacher follows what the first one has moved
            work.backward()
            optimizer.step()
    check()


def _check_same_data(job: Job, task: Task, batch: int) -> None:
    """ConfigError unless the first two members hold the same data."""
    from edgetrain.tasks.slices import digest_of

    strategy, members = strategies.find(job.strategy.name), min(2, job.fleet.members)
    slices = strategy.argument("slices") * job.fleet.members
    samples = batch or task.samples(0, job.fleet.members)
    if slices > samples:
        raise ConfigError(
            f"{strategy.spelled} with {job.fleet.members} members cuts a batch into {slices} "
            f"slices, and it has {samples} samples",
            f"say slices = {max(1, samples // job.fleet.members)}, or less",
        )
    found = {digest_of(task, (index, job.fleet.members), batch) for index in range(members)}
    if len(found) > 1:
        raise ConfigError(
            f"data.partition = '{job.data.get('partition', 'iid')}': members hold other data, and "
            "lbfgs hands out slices of a batch that all of them hold",
            "say partition = 'shared(all)'",
        )
