"""The formulas of memory and time, each in one place with its source. Bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# -- memory ---------------------------------------------------------------------------------------

EDGE_PROCESS_BYTES = 285e6
"""A training process before its model: Python, torch for CPUs, the exchange. Measured: the constant
of a straight line through peaks of members with MLPs of 1, 4 and 16 million parameters."""


def is_for_cuda() -> bool:
    """Whether the torch here is a build for CUDA, wherever it runs."""
    origin = getattr(find_spec("torch"), "origin", None)
    return origin is not None and (Path(origin).parent / "lib/libtorch_cuda.so").exists()


PROCESS_BYTES = EDGE_PROCESS_BYTES + (285e6 if is_for_cuda() else 0.0)
"""The same of a rank of a group, with the torch that is here: a build for CUDA takes as much again
(it imports with 507 MB, one for CPUs with 222)."""

EDGE_BYTES = {"gradient": 18.0, "waits": 25.0, "runs on": 42.0}
"""Bytes a parameter of a member with SGD and momentum, by what its strategy keeps: the gradient and
its copy on the way (sync-sgd); base, expected and own (fedavg); those of rounds in flight as well
(dga). The slopes of the same lines."""
WHOLE_BYTES = 4.0
"""Bytes a parameter of the whole model, which the rank that leads a group keeps in main memory."""
SLOT_BYTES = 4.0
"""A value that the optimizer keeps of each parameter: momentum has 1, Adam 2."""

USABLE = 0.85
"""The share of a machine's memory that a process can have. The rest is the system's, the driver's
and what an allocator cannot fill."""


def edge_bytes(parameters: float, kind: str, slots: int, activations: float) -> float:
    """A member on a device of its own; `kind` is a key of EDGE_BYTES."""
    of_each = EDGE_BYTES[kind] + SLOT_BYTES * (slots - 1)
    return EDGE_PROCESS_BYTES + of_each * parameters + activations


@dataclass(frozen=True)
class Kept:
    """What a rank keeps in memory, in bytes a parameter."""

    working: float
    """A weight as it is computed with."""
    slots: int
    """float32 values of the optimizer."""
    copied: bool = False
    """Whether a copy of weights and optimizer, for a snapshot that is written while training goes
    on, is in the same memory."""


def rank_bytes(
    held: float, largest: float, kept: Kept, shard: int, zero: int, accumulates: bool
) -> float:
    """Parameters, gradients and optimizer of a rank that holds `held` parameters, of which its
    largest layer has `largest`: torch's fully_shard keeps float32 masters, gradients and optimizer
    in shards, and gathers a layer's weights before it is computed with (ZeRO-3, the next one ahead)
    or all of them for the step (ZeRO-2). Zhao et al., PyTorch FSDP, VLDB 2023. A layer's gradient
    is whole until it has been divided; a rank that `accumulates` micro-batches keeps all of them
    whole."""
    weights, times = held / (shard if zero >= 2 else 1), 1.0 + kept.copied
    master = 4.0 * weights + times * (4.0 * weights + 4.0 * kept.slots * held / shard)
    gradients = 4.0 * (held if accumulates else largest)
    if shard == 1 or zero == 1:
        # One rank to a shard: a float32 weight is its own copy, but for the layer under way.
        gathered = kept.working * held if kept.working < 4 else 4.0 * largest
    else:
        gathered = kept.working * (2 * largest if zero >= 3 else held)
    return master + gathered + gradients


def in_flight(schedule: str, stage: int, stages: int, microbatches: int, looped: int = 1) -> float:
    """Micro-batches, in whole stages' worth, whose activations a rank keeps at most.

    GPipe all of them; 1F1B as many as there are stages from here to the end (Narayanan et al.,
    PipeDream, SOSP 2019); interleaved a little more (Narayanan et al., Megatron-LM, SC 2021).
    """
    if schedule in ("gpipe", "looped-bfs"):
        return microbatches
    if schedule in ("zbv", "dualpipev"):
        return min(microbatches, stages)
    if looped > 1:
        chunks = 2 * (stages - stage - 1) + (looped - 1) * stages + 1
        return min(microbatches, chunks / looped)
    return min(microbatches, stages - stage)


# -- time -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankLink:
    """Between two ranks: seconds before the first byte, and bytes a second (Hockney 1994)."""

    alpha: float
    beta: float

    def send(self, size: float) -> float:
        return self.alpha + size / self.beta

    def all_reduce(self, ranks: int, size: float) -> float:
        """Seconds of a ring: 2 (n - 1) messages of an n-th (Patarasuk and Yuan 2009)."""
        return 2 * self.gather(ranks, size)

    def gather(self, ranks: int, size: float) -> float:
        """Seconds until each has the parts of all, or its part of their sum: n - 1 messages."""
        return 0.0 if ranks == 1 else (ranks - 1) * (self.alpha + size / ranks / self.beta)


def bubble(stages: int, microbatches: int, looped: int = 1) -> float:
    """The share of a step in which a stage is idle: (K-1)/(M+K-1) (Huang et al., GPipe, 2019), and
    with `looped` stages a rank (K-1)/(vM+K-1) (Narayanan et al., Megatron-LM, SC 2021)."""
    return (stages - 1) / (looped * microbatches + stages - 1)


SHARE_OF_BUBBLE = {"zero-bubble": 1 / 3, "zbv": 1 / 3, "dualpipev": 1 / 3}
"""Of 1F1B's idle time: backward for weights fills two of its three parts. Qi et al., Zero Bubble
Pipeline Parallelism, ICLR 2024: (K-1)(f+b-w), with f = b = w."""


def weights_of(schedule: str, stages: int, microbatches: int, looped: int) -> tuple[float, float]:
    """(a, c): a step of a pipeline takes a * sum(t) + c * max(t) over the times t of its stages for
    one micro-batch, forward and backward. (1, M-1) for 1F1B and GPipe: Zheng et al., Alpa, OSDI
    2022, equation 2. Looped stages fill 1/v of the bubble, zero-bubble schedules two thirds."""
    if looped == 1 and schedule not in SHARE_OF_BUBBLE:
        return 1.0, microbatches - 1.0
    idle = SHARE_OF_BUBBLE.get(schedule, 1.0) * (stages - 1) / stages / looped
    return idle, float(looped * microbatches)
