"""Where a pipeline over members is cut, how many micro-batches are under way, and what it takes.

The cuts are `jobs.placement`'s, with each member as a server of one rank: what a micro-batch takes
on the slowest stage counts M times, and the way through all stages once. Trips do not: they pass
while other micro-batches are computed, as long as memory holds as many as that takes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from edgetrain.errors import ConfigError
from edgetrain.exchange.pipeline.desk import window_of
from edgetrain.fleet.devices import Device
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.pipeline import ACTIVATIONS, StagePlan, pipeline_of, save_every
from edgetrain.jobs.placement.bars import bars_of, refuse
from edgetrain.jobs.placement.decision import kept_by
from edgetrain.jobs.placement.formulas import EDGE_PROCESS_BYTES, USABLE, RankLink
from edgetrain.jobs.placement.machines import Server, Servers
from edgetrain.jobs.placement.question import (
    LOOPBACK,
    NOMINAL_DISPATCH_S,
    NOMINAL_GFLOPS,
    model_of,
    slots_of,
)
from edgetrain.jobs.placement.search import Found, TooLarge, Work, evaluate
from edgetrain.jobs.placement.words import Placement
from edgetrain.jobs.resolved import Resolved
from edgetrain.tasks.layers import Model
from edgetrain.tasks.profiling import inputs_of
from edgetrain.tasks.protocol import Batch, Task
from edgetrain.training.servers.parts import Parts, cut
from edgetrain.training.servers.steps import batches_of

MOST_MICROBATCHES = 64
"""Tried where the job does not say how many."""


def plan_stages(
    found: Resolved, task: Task | None = None, trip_s: float | None = None
) -> StagePlan:
    """Cut the task's model over the members of a job that `plan.check` has looked up, if need be
    with its task. `trip_s`: seconds from a member through the hub to the next; None: as the job's
    links have it.

    ConfigError for a stage that does not fit, and for a task or a model that cannot be cut;
    TaskError.
    """
    job = found.job
    asked = pipeline_of(job)
    assert asked is not None
    task = task or task_of(job, found.beside)
    trip_s = _trip_s(found) if trip_s is None else trip_s
    model, _ = model_of(task, job)
    check_batch(job, asked)
    if asked.pipeline > len(model.layers):
        raise ConfigError(
            f"fleet.placement = '{job.fleet.placement}': {asked.pipeline} stages of a model with "
            f"{len(model.layers)} layers",
            f"at most {len(model.layers)} members",
        )
    # Each member draws the whole model's parameters once, to keep its stage's
    needs = EDGE_PROCESS_BYTES + 4.0 * model.parameters
    for name, device in found.device_profiles.items():
        if needs > USABLE * device.memory_bytes:
            raise ConfigError(
                f"fleet.placement = '{found.job.fleet.placement}': to begin, a member draws the "
                f"whole model and needs {needs / 1e9:.3g} GB, {name} has "
                f"{USABLE * device.memory_bytes / 1e9:.3g} GB",
                "a smaller model, or devices with more memory",
            )
    placement, result = _fastest(found, asked, model)
    refuse(placement, bars_of(job, task))
    parts = cut(task, placement, None) if _is_cut_by_name(task) else None
    if parts is None:
        raise ConfigError(
            f"fleet.placement = '{job.fleet.placement}': only torch's tracer could cut the model",
            "name its pieces (`pieces`, docs/how-to/gpu-servers.md)",
        )
    _check_shared(parts)
    shapes = shapes_of(job, task, placement, parts)
    times = [_times(found, model, placement, stage) for stage in range(placement.pipeline)]
    sizes = [math.prod(shape) * ACTIVATIONS[job.fleet.activations] for shape in shapes]
    names = [layer.name for layer in model.layers]
    return StagePlan(
        placement, windows_of(found, model, result, trip_s), shapes,
        result.seconds + 2 * (placement.pipeline - 1) * trip_s,
        tuple(_paces(found, placement.microbatches, times)),
        tuple(zip(result.bytes, result.usable_bytes, strict=True)),
        tuple(_spelled(names[i:j]) for i, j in result.ends),
        model.parameters, tuple(sizes), save_every(job),
    )  # fmt: skip


def _is_cut_by_name(task: Task) -> bool:
    from edgetrain.tasks.meta import outline_of
    from edgetrain.tasks.profiling import traced

    return not traced(outline_of(task).model)


def check_batch(job: Job, placement: Placement) -> None:
    """ConfigError for a batch that does not divide."""
    samples, count = job.fleet.members * job.train.batch, placement.microbatches
    if samples % count:
        near = max(each for each in range(1, count) if samples % each == 0)
        raise ConfigError(
            f"fleet.placement: microbatches={count} of a step's {samples} samples",
            f"microbatches={near}",
        )


def _check_shared(parts: Parts) -> None:
    for name, held in parts.holders.items():
        if len(held) > 1 and isinstance(parts.tensors(parts.whole)[name], torch.nn.Parameter):
            stages = " and ".join(map(str, held))
            raise ConfigError(
                f"fleet.placement: the parameter '{name}' is on stages {stages}, which would have "
                "to add its gradients up",
                "other cuts, or a model without tied parameters",
            )


def _fastest(found: Resolved, asked: Placement, model: Model) -> tuple[Placement, Found]:
    """The job's pipeline with the cuts, and the number of micro-batches if it says none, with which
    a step takes least."""
    job = found.job
    samples = job.fleet.members * job.train.batch
    counts = [asked.microbatches]
    if "microbatches" not in job.fleet.placement:
        counts = [m for m in range(1, min(samples, MOST_MICROBATCHES) + 1) if samples % m == 0]
    work = Work(job.fleet.members, job.train.batch, kept_by("fp32", slots_of(job), copied=True))
    servers = _members(found)
    results = [evaluate(model, servers, work, replace(asked, microbatches=m)) for m in counts]
    fitting = [each for each in results if isinstance(each, Found)]
    if not fitting:
        least = min(
            (each for each in results if isinstance(each, TooLarge)),
            key=lambda each: each.needs_bytes,
        )
        raise ConfigError(
            f"fleet.placement = '{job.fleet.placement}': a stage needs "
            f"{least.needs_bytes / 1e9:.3g} GB, its device has {least.usable_bytes / 1e9:.3g} GB",
            "more members and stages, more micro-batches, or devices with more memory",
        )
    best = min(fitting, key=lambda each: each.seconds)
    return best.placement, best


def _members(found: Resolved) -> Servers:
    """Each member as a server of one rank; between them only rates count, see above."""
    rates = [
        rate for link in found.links for way in (link.up, link.down) if (rate := way.mean_rate_mbit)
    ]
    between = RankLink(0.0, min(rates) * 1e6 / 8 if rates else LOOPBACK.beta)
    servers = []
    for index, name in enumerate(found.devices):
        device = found.device_profiles[name]
        rate, dispatch_s = _speed(device)
        servers.append(
            Server(f"m{index}", 1, device.memory_bytes, rate, dispatch_s, LOOPBACK, name)
        )
    return Servers(tuple(servers), between)


def _speed(device: Device) -> tuple[float, float]:
    """Flops a second, and seconds of a call."""
    rate, dispatch_s = device.train_gflops, device.dispatch_s
    return 1e9 * (rate or NOMINAL_GFLOPS), dispatch_s or NOMINAL_DISPATCH_S


def _trip_s(found: Resolved) -> float:
    """Seconds from a member through the hub to its neighbour, over the longest pair of links."""
    hub = found.hub_links[0].rtt_ms if found.hub_links else 0.0
    pairs = [
        one.up.mean_delay_ms + other.down.mean_delay_ms
        for a, b in itertools.pairwise(found.links)
        for one, other in ((a, b), (b, a))
    ]
    return (max(pairs) + hub) / 1e3


def _times(found: Resolved, model: Model, placement: Placement, stage: int) -> tuple[float, float]:
    edges = [0, *placement.cuts, len(model.layers)]
    layers = model.layers[edges[stage] : edges[stage + 1]]
    rate, dispatch_s = _speed(found.device_profiles[found.devices[stage]])
    job = found.job
    samples = job.fleet.members * job.train.batch / placement.microbatches
    forward = sum(x.flops for x in layers), sum(x.operators for x in layers)
    back = sum(x.backward_flops for x in layers), sum(x.backward_operators for x in layers)
    first, second = (
        flops * samples / rate + dispatch_s * calls for flops, calls in (forward, back)
    )
    return first, second


def _paces(
    found: Resolved, count: int, times: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """What a micro-batch is held to: as the device has it; `pace_s` is what one member's batch
    takes on all stages; a device that is this machine as it is is not held."""
    job = found.job
    if job.fleet.pace_s:
        factor = job.fleet.members * job.fleet.pace_s / (count * sum(map(sum, times)))
        return [(factor * first, factor * second) for first, second in times]
    known = [found.device_profiles[name] for name in found.devices]
    return [
        each if device.train_gflops and device.dispatch_s else (0.0, 0.0)
        for each, device in zip(times, known, strict=True)
    ]


def windows_of(found: Resolved, model: Model, result: Found, trip_s: float) -> tuple[int, ...]:
    """Micro-batches that each stage has out at once: as many as trips ask for, at most as many as
    its memory holds."""
    placement, job = result.placement, found.job
    stages, count = placement.pipeline, placement.microbatches
    slowest = max(sum(_times(found, model, placement, stage)) for stage in range(stages))
    samples = job.fleet.members * job.train.batch / count
    windows = []
    for stage, (first, end) in enumerate(result.ends):
        saved = samples * sum(layer.saved_bytes for layer in model.layers[first:end])
        room = result.usable_bytes[stage] - result.bytes[stage]
        most = min(count, stages - stage) + (math.floor(room / saved) if saved else count)
        windows.append(min(window_of(stage, stages, count, trip_s, slowest), most))
    return tuple(windows)


def shapes_of(
    job: Job, task: Task, placement: Placement, parts: Parts
) -> tuple[tuple[int, ...], ...]:
    """What goes over each cut for one micro-batch. ConfigError for anything but one float32
    tensor."""
    batch = next(batches_of(task, job, 1, 0))
    micro: Batch = tuple(tensor.tensor_split(placement.microbatches)[0] for tensor in batch)
    device = next(parts.whole.parameters()).device
    args, kwargs = inputs_of(task, micro)
    given = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(device), (args, kwargs))
    shapes = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for stage in range(placement.pipeline - 1):
            module = parts.build(stage)
            output = module(*given[0], **given[1])
            if not isinstance(output, Tensor) or output.dtype != torch.float32:
                what = output.dtype if isinstance(output, Tensor) else type(output).__name__
                raise ConfigError(
                    f"fleet.placement: stage {stage} passes on {what}",
                    "stages pass on one float32 tensor; other cuts, or other pieces",
                )
            shapes.append(tuple(output.shape))
            given = ((output,), {})
    return tuple(shapes)


def _spelled(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
