"""From a job to the question where it runs. Loads the task, and builds no model in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError, EdgetrainError, quoted
from edgetrain.fleet import cluster as clusters
from edgetrain.fleet import devices
from edgetrain.fleet.assignment import devices_of
from edgetrain.fleet.devices import Device
from edgetrain.fleet.devices.cost import measure_step
from edgetrain.jobs.job import Job
from edgetrain.jobs.optimizers import check_optimizer
from edgetrain.jobs.placement.bars import bars_of
from edgetrain.jobs.placement.decision import Board, Question, kept_by
from edgetrain.jobs.placement.formulas import USABLE, Kept, RankLink, edge_bytes
from edgetrain.jobs.placement.machines import Server, Servers
from edgetrain.jobs.placement.replanning import ranks_of
from edgetrain.jobs.placement.search import Found, Work
from edgetrain.jobs.placement.words import EDGE, parse
from edgetrain.jobs.reading import placed
from edgetrain.jobs.resolved import Resolved
from edgetrain.tasks.layers import Model

if TYPE_CHECKING:
    from edgetrain.tasks.protocol import Task

SLOTS = {
    "adam": 2,
    "adamw": 2,
    "nadam": 2,
    "radam": 2,
    "adamax": 2,
    "adadelta": 2,
    "rprop": 2,
    "lamb": 2,
}
"""Values that optimizers keep of each parameter; others: 1."""
LOCAL = "local"
NOMINAL_GFLOPS, NOMINAL_DISPATCH_S = 24.0, 32e-6
"""Of a core of a machine without a profile: half of the reference machine's 48 Gflop/s of two cores
(benchmarks/steps.py). A plan for one machine compares placements on it: only ratios matter."""
LOOPBACK = RankLink(50e-6, 1.5e9)
"""Between processes of one machine over gloo: assumed, of the order of a memory copy."""


def question_of(found: Resolved, beside: Path | None = None) -> Question:
    """The question of a job. `beside` is the folder of the job file. ConfigError, TaskError,
    NetworkError for what cannot be anywhere."""
    from edgetrain.jobs.lookup import task_of

    job = found.job
    check_optimizer(job)
    task = task_of(job, beside)
    model, notes = model_of(task, job)
    named = sorted(set(devices_of(job.fleet.device)))
    boards, edge_problem = _boards(found, model, named, beside)
    others, _ = _boards(found, model, devices.names(), beside)
    slots = slots_of(job)
    servers = servers_of(job, beside)
    bars = bars_of(job, task) if servers is not None else ()
    kept = "gradient" if not found.strategy.moves_params else "waits"
    return Question(
        model=model,
        work=Work(
            job.fleet.members,
            job.train.batch,
            _kept(job, servers, slots),
            bars,
            job.train.accumulate,
        ),
        strategy=found.strategy.name,
        kept_on_edge="runs on" if found.strategy.delays else kept,
        boards=boards,
        others=tuple(each for each in others if each.name != "gpu-server"),
        placement=job.servers.placement,
        fallback=job.servers.fallback,
        servers=servers,
        edge_problem=edge_problem,
        group_problem=_group_problem(job),
        notes=(*notes, *(bar.note for bar in bars), *_measured(named)),
    )


def _measured(names: Sequence[str]) -> list[str]:
    found = {name: devices.load(name).measured for name in names}
    return [f"{name} as {said}" for name, said in found.items() if said]


def model_of(task: Task, job: Job) -> tuple[Model, tuple[str, ...]]:
    """The layers of the task's model, and notes."""
    from edgetrain.jobs.lookup import built
    from edgetrain.tasks.losses import scalar_of
    from edgetrain.tasks.meta import outline_of
    from edgetrain.tasks.profiling import layers_of, profile
    from edgetrain.tasks.protocol import batches_from

    batch = next(batches_from(task, 0, job.fleet.members, job.train.batch, job.seed))
    try:
        found = profile(task, batch)
    except EdgetrainError:
        raise
    except Exception as error:  # whatever a model's own code raises on tensors without numbers
        said = quoted(error)
        outline = outline_of(task)
        flops, operators = measure_step(
            built(task), batch, lambda model, batch: scalar_of(task, task.loss(model, batch))
        )
        found = layers_of(outline.model)
        for layer in found.layers:
            share = layer.parameters / max(1, found.parameters)
            layer.flops = share * flops / 3 / len(batch[0])
            layer.backward_flops = 2 * layer.flops
            layer.operators = round(share * operators / 3)
            layer.backward_operators = round(share * operators) - layer.operators
        note = f"measured by building it, activations left out: it fails on fake tensors ({said})"
        return found, (note,)
    names = [layer.name for layer in found.layers]
    return found, tuple(
        f"the tied parameters of {names[a]} and {names[b]} ({n:,}) are on both stages"
        for a, b, n in found.tied
    )


def _kept(job: Job, servers: Servers | None, slots: int) -> Kept:
    """What a rank keeps of each parameter. Snapshots of a GPU are copied into main memory."""
    own = servers is not None and not all(each.has_gpus for each in servers.servers)
    written = job.servers.snapshot_every <= job.train.steps
    return kept_by(job.servers.precision, slots, own and written and job.servers.async_snapshots)


def _group_problem(job: Job) -> str:
    if job.privacy.unit != "none":
        unit = job.privacy.unit
        return f"privacy.unit = '{unit}': a group clips and noises nothing (leave one of both out)"
    if job.strategy.secure:
        return "strategy.secure: a group has no contributions that could be masked"
    return ""


def slots_of(job: Job) -> int:
    name = str(job.train.optimizer.get("name", "")).lower()
    if name == "sgd":
        return 1 if job.train.optimizer.get("momentum") else 0
    return SLOTS.get(name, 1)


def wants_group(job: Job) -> bool:
    """Whether the job asks for servers at all, whatever it needs."""
    return job.servers.placement not in ("auto", EDGE) or job.servers.fallback != "never"


def may_not_fit(planned: Resolved) -> bool:
    """Whether parameters alone, without activations, are more than a device of the fleet holds."""
    kept = "waits" if planned.strategy.moves_params else "gradient"
    kind = "runs on" if planned.strategy.delays else kept
    needs = edge_bytes(planned.parameters, kind, slots_of(planned.job), 0.0)
    least = min(device.memory_bytes for device in planned.device_profiles.values())
    return needs > USABLE * least


def check_trust(found: Found, cluster: clusters.Cluster, servers: Servers) -> None:
    """ConfigError for a placement on several hosts whose network is not trusted: gloo and NCCL
    neither encrypt nor authenticate."""
    used = [cluster.servers[index] for index in ranks_of(found, servers)]
    hosts = {LOCAL if each.host in clusters.LOCAL_HOSTS else each.host for each in used}
    if len(hosts) > 1 and not cluster.trusted:
        raise ConfigError(
            f"{cluster.path}: {len(used)} servers and trusted = false: their ranks would talk "
            "without encryption or authentication",
            "say trusted = true if the network between them is your own",
        )


# -- devices --------------------------------------------------------------------------------------


def _boards(
    found: Resolved, model: Model, names: Sequence[str], beside: Path | None
) -> tuple[tuple[Board, ...], str]:
    boards, problem = [], ""
    for name in names:
        device = devices.load(name)
        train = found.job.train
        step_s = found.job.fleet.pace_s or train.accumulate * device.step_seconds(
            model.flops * train.batch, model.operators
        )
        seconds, said = _fleet_seconds(found, model, step_s, beside)
        problem = problem or said
        boards.append(Board(name, USABLE * device.memory_bytes, seconds))
    return tuple(boards), problem


def _fleet_seconds(
    found: Resolved, model: Model, step_s: float, beside: Path | None
) -> tuple[float | None, str]:
    """Seconds of a step of the fleet, if each of its devices takes `step_s` to compute one."""
    from edgetrain.errors import NetworkError
    from edgetrain.jobs.capacity.estimate import answer
    from edgetrain.jobs.capacity.question import Options, question_of

    if not step_s:
        return None, ""
    options = Options(rounds=20, parameters=model.parameters, step_s=step_s)
    try:
        return answer(question_of(found, options, beside)).seconds_per_step, ""
    except NetworkError as error:
        return None, error.message


# -- servers --------------------------------------------------------------------------------------


def servers_of(job: Job, beside: Path | None = None) -> Servers | None:
    """The servers of a job; without a cluster file this machine, if the job wants a group at all.

    ConfigError.
    """
    bf16, wanted = job.servers.precision == "bf16", job.train.accelerator
    if not job.servers.cluster:
        if not wants_group(job):
            return None
        here, words = _here(LOCAL, 0, wanted), job.servers.placement
        # Processes of one machine without GPUs may be more than its cores: to try a placement out.
        asked = 1 if words in ("auto", EDGE) else parse(words).ranks
        return Servers((_here(LOCAL, max(here.accelerators, asked), wanted),), LOOPBACK)
    cluster = cluster_of(job, beside)
    assert cluster is not None
    found = tuple(_server(each, bf16, wanted) for each in cluster.servers)
    between = cluster.between
    return Servers(found, RankLink(between.rtt_ms / 2e3, between.rate_mbit * 1e6 / 8))


def cluster_of(job: Job, beside: Path | None) -> clusters.Cluster | None:
    """The cluster file of a job; None: it names none. ConfigError."""
    if not job.servers.cluster:
        return None
    path = placed(job.servers.cluster, beside)
    cluster = clusters.load(path)
    if not cluster.servers:
        raise ConfigError(f"{path} has no [[server]]", "name, host and profile of each")
    return cluster


def _server(entry: clusters.ServerEntry, bf16: bool, wanted: str) -> Server:
    if not entry.profile:
        return _here(entry.name, entry.accelerators, wanted)
    device = devices.load(entry.profile)
    rate = device.bf16_gflops if bf16 and device.bf16_gflops else device.train_gflops
    if rate is None or device.dispatch_s is None:
        raise ConfigError(f"server '{entry.name}': the profile '{device.name}' has no speed")
    return Server(
        entry.name,
        entry.accelerators or device.accelerators or 1,
        device.memory_bytes,
        rate * 1e9,
        device.dispatch_s,
        _inside(device),
        device.name,
        bool(device.accelerators),
    )


def _inside(device: Device) -> RankLink:
    if device.inside_gbit is None or device.inside_s is None:
        return LOOPBACK
    return RankLink(device.inside_s, device.inside_gbit * 1e9 / 8)


def _here(name: str, accelerators: int, wanted: str) -> Server:
    """This machine: its GPUs if torch finds any and `train.accelerator` does not say "cpu", else a
    rank for each core. ConfigError for more accelerators than it has GPUs."""
    from edgetrain.runs.environment import usable_cores
    from edgetrain.tasks.meta import gpus

    found = gpus() if wanted != "cpu" else []
    if accelerators > len(found) > 0:
        raise ConfigError(
            f"{accelerators} ranks on a machine with {len(found)} GPU{'s'[: len(found) > 1]}",
            "a GPU takes one rank: a smaller placement, or train.accelerator = 'cpu'",
        )
    if found:
        like = devices.load("gpu-server")
        rate = like.train_gflops or NOMINAL_GFLOPS
        dispatch_s = like.dispatch_s or NOMINAL_DISPATCH_S
        count = accelerators or len(found)
        link = _inside(like)
        return Server(name, count, min(found), rate * 1e9, dispatch_s, link, has_gpus=True)
    count = accelerators or usable_cores()
    memory = devices.load(devices.HOST).memory_bytes / count
    return Server(name, count, memory, NOMINAL_GFLOPS * 1e9, NOMINAL_DISPATCH_S, LOOPBACK)
