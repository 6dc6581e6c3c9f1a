"""A placement, and how it is spelled: "data=2 pipeline=2 schedule=1f1b microbatches=8"."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from edgetrain.errors import ConfigError, did_you_mean, refuse_first
from edgetrain.jobs.job import Job, ServersTable

EDGE = "edge"
"""On the fleet's own devices, each of which holds the whole model."""

SCHEDULES: dict[str, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""How a pipeline's stages take turns, and torch's name for it."""
LOOPED = ("interleaved", "looped-bfs", "zero-bubble")
"""Schedules in which a rank holds several stages: 0, K, 2K …"""
V_SHAPED = ("zbv", "dualpipev")
"""Schedules in which a rank holds two stages: one from the front, one from the back."""
SPLIT = ("zero-bubble", *V_SHAPED)
"""Schedules that compute the gradients of weights apart. torch 2.13 gets them wrong, without an
error, where the weights are divided again after the forward pass (zero=3)."""
ZEROS = (0, 1, 2, 3)
"""Contents of a `shard`: nothing; the optimizer; gradients and optimizer; the parameters too."""

NORMS = ("whole", "split")
COUNTS = (
    "data", "shard", "pipeline", "tensor", "sequence", "ulysses", "experts", "stages",
    "microbatches",
)  # fmt: skip
_MOST = 4096


@dataclass(frozen=True)
class Placement:
    """How a group of ranks holds one model together. The mesh is pipeline x data x sequence x
    tensor, in this order: the ranks of a stage are neighbours."""

    data: int = 1
    """Ranks that each have a part of the batch."""
    shard: int = 1
    """Ranks with one shared copy of parameters and optimizer; 1: each has its own."""
    zero: int = 0
    """Contents of a shard: see ZEROS."""
    pipeline: int = 1
    """Ranks in a row that each hold a part of the layers."""
    tensor: int = 1
    """Ranks that each hold a part of every large layer."""
    norms: str = "whole"
    """"whole" on each of these ranks, or "split": each has a part of the sequence there."""
    sequence: int = 1
    """Ranks that each have a slice of every sequence."""
    ulysses: int = 1
    """Neighbours that exchange heads; their groups form rings."""
    experts: int = 1
    """Neighbours of the data ranks, each with a part of every layer's experts."""
    schedule: str = "1f1b"
    stages: int = 1
    """Stages that each rank of the pipeline holds."""
    microbatches: int = 1
    """Parts that a rank's batch is computed in."""
    recompute: bool | tuple[int, ...] = False
    """Whether activations are computed again in the backward pass, and not kept: of all layers, of
    none, or of these."""
    cuts: tuple[int, ...] = ()
    """First layer of each stage but the first; (): by their number alone."""

    @property
    def ranks(self) -> int:
        """Processes, one for each accelerator."""
        return self.width * self.pipeline

    @property
    def width(self) -> int:
        return self.data * self.sequence * self.tensor

    @property
    def parts(self) -> frozenset[str]:
        """The words by which anything is divided or computed again: counts above 1, zero=1, 2 or
        3, norms=split and recompute."""
        words = {name for name in COUNTS if getattr(self, name) > 1}
        words |= {f"zero={self.zero}"} if self.zero else set()
        words |= {"norms=split"} if self.norms == "split" else set()
        return frozenset(words | ({"recompute"} if self.recompute else set()))

    @property
    def divided(self) -> int:
        """Ranks that each keep a part of every gradient and parameter."""
        return self.shard if self.zero >= 2 else 1

    @property
    def ring(self) -> int:
        """Ranks around which keys and values go."""
        return self.sequence // self.ulysses

    def recomputes(self, layer: int) -> bool:
        return self.recompute if isinstance(self.recompute, bool) else layer in self.recompute

    @property
    def all_stages(self) -> int:
        """Parts that the model is cut into."""
        return self.pipeline * self.stages

    def stages_of(self, rank: int) -> list[int]:
        """The stages that one rank of the pipeline holds, from the front."""
        if self.schedule in V_SHAPED and self.stages == 2:
            return [rank, self.all_stages - 1 - rank]
        return list(range(rank, self.all_stages, self.pipeline))

    def check(self) -> None:
        """ConfigError for a placement that contradicts itself."""
        for name in COUNTS:
            value = getattr(self, name)
            if not 1 <= value <= _MOST:
                raise ConfigError(f"placement: {name}={value}", f"1 to {_MOST}")
        data, shard, experts, zero = self.data, self.shard, self.experts, self.zero
        refuse_first(
            (zero not in ZEROS, f"placement: zero={zero}", "0, 1, 2 or 3"),
            (data % shard, f"placement: shard={shard} does not divide data={data}",
             f"shard={math.gcd(data, shard)}"),
            ((shard > 1) != (zero > 0), f"placement: shard={shard} with zero={zero}",
             "shard=2 zero=3 divides the parameters among two ranks; leave both out otherwise"),
            (data % experts, f"placement: experts={experts} does not divide data={data}",
             f"experts={math.gcd(data, experts)}"),
            (experts > 1 and zero == 1,
             f"placement: experts={experts} with zero=1, whose ranks hold the same layers",
             "zero=2"),
        )  # fmt: skip
        refuse_first(
            (self.sequence % self.ulysses,
             f"placement: ulysses={self.ulysses} does not divide sequence={self.sequence}",
             f"ulysses={math.gcd(self.sequence, self.ulysses)}"),
            (self.norms not in NORMS, f"placement: norms={self.norms}",
             did_you_mean(self.norms, NORMS)),
            (self.norms == "split" and self.tensor == 1, "placement: norms=split with tensor=1",
             "tensor=2, whose ranks share the norms"),
        )  # fmt: skip
        self._check_schedule()
        if self.cuts and (
            len(self.cuts) != self.all_stages - 1 or list(self.cuts) != sorted(set(self.cuts))
        ):
            raise ConfigError(
                f"placement: cuts={_joined(self.cuts)} for {self.all_stages} stages",
                f"{self.all_stages - 1} places that increase",
            )

    def _check_schedule(self) -> None:
        name, stages, ranks, micro = self.schedule, self.stages, self.pipeline, self.microbatches
        refuse_first(
            (name not in SCHEDULES, f"placement: schedule={name}", did_you_mean(name, SCHEDULES)),
            (ranks == 1 and stages > 1, f"placement: stages={stages} with pipeline=1",
             "leave stages out"),
        )  # fmt: skip
        if ranks == 1:
            return
        looped, v = name in LOOPED, name in V_SHAPED
        least = self.all_stages if name == "dualpipev" else 1
        both = f"placement: schedule={name} with stages={stages}"
        refuse_first(
            ((looped and stages < 2) or (v and stages != 2), both, "stages=2"),
            (not (looped or v) and stages != 1, both, "leave stages out, or schedule=interleaved"),
            (self.zero == 3 and name in SPLIT,
             f"placement: zero=3 with schedule={name}: torch's gradients are wrong",
             "zero=2, or schedule=interleaved"),
            (micro < least, f"placement: schedule={name} with microbatches={micro}",
             f"at least {least}"),
            (name == "interleaved" and micro % ranks,
             f"placement: interleaved turns of {ranks} ranks with microbatches={micro}",
             f"microbatches={ranks * max(1, round(micro / ranks))}"),
        )  # fmt: skip

    def __str__(self) -> str:
        plain = Placement()
        words = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value == getattr(plain, each.name) or (
                each.name == "schedule" and self.pipeline == 1
            ):
                continue
            text = _joined(value) if each.name == "cuts" else str(value)
            if each.name == "recompute":
                text = "yes" if value is True else _ranges(value)
            words.append(f"{each.name}={text}")
        if self.pipeline > 1 and self.schedule == plain.schedule:
            words.insert(len(words) - bool(self.cuts), f"schedule={self.schedule}")
        return " ".join(words) or "data=1"


def _joined(cuts: tuple[int, ...]) -> str:
    return ",".join(map(str, cuts))


def _ranges(layers: tuple[int, ...]) -> str:
    """Layers as they are written: 0-3,7."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _layers(text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not 0 <= int(first) <= int(last or first) <= _MOST:
            raise ValueError(part)
        found |= set(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def parse(text: str) -> Placement:
    """A placement from its words. ConfigError names the word and what is allowed.

    >>> parse("data=2 pipeline=2").ranks
    4
    """
    known = {each.name: each.type for each in fields(Placement)}
    given: dict[str, object] = {}
    if not text.strip():
        raise ConfigError("placement: it is empty", "auto, edge, or words as in data=2 pipeline=2")
    for word in text.split():
        name, equals, value = word.partition("=")
        if name not in known or not equals:
            raise ConfigError(
                f"placement: '{word}'",
                did_you_mean(name, known) if equals else "it reads data=2 pipeline=2",
            )
        if name in given:
            raise ConfigError(f"placement: {name} is there twice")
        given[name] = _value(name, value)
    if "zero" not in given and int(str(given.get("shard", 1))) > 1:
        given["zero"] = 3
    schedule = given.get("schedule")
    if "stages" not in given and schedule in (*LOOPED, *V_SHAPED):
        given["stages"] = 2
    found = Placement(**given)  # type: ignore[arg-type]  # _value made what each field takes
    found.check()
    return found


def _value(name: str, text: str) -> object:
    if name in ("schedule", "norms"):
        return text.lower()
    if name == "recompute":
        if text in ("yes", "no"):
            return text == "yes"
        try:
            return _layers(text)
        except ValueError:
            raise ConfigError(
                f"placement: recompute={text}", "yes or no, or layers as in 0-3,7"
            ) from None
    try:
        if name == "cuts":
            return tuple(int(part) for part in text.split(","))
        return int(text)
    except ValueError:
        raise ConfigError(
            f"placement: {name}={text}", 'a whole number from 1, as in "data=2 pipeline=2"'
        ) from None


def check_group_beside(job: Job) -> None:
    """ConfigError for what a group that is one member of the fleet cannot have."""
    servers = job.servers
    what = f"fleet.device = '{job.fleet.device}'"
    if servers.placement in ("auto", EDGE):
        table = "the job has no [servers]" if servers == ServersTable() else (
            f"servers.placement = '{servers.placement}' does not say how many processes it is"
        )  # fmt: skip
        raise ConfigError(f"{what}, and {table}", "as in [servers] placement = 'data=2'")
    data, shares = parse(servers.placement).data, servers.shares
    if not _divide(data, shares, job.train.batch):
        near = max(d for d in range(1, data) if _divide(d, shares, job.train.batch))
        raise ConfigError(
            f"servers.placement: data={data} ranks have {shares} "
            f"{'batch' if shares == 1 else 'batches'} of train.batch = {job.train.batch} samples "
            "in a step, and cannot have equal parts of them",
            f"data={near}",
        )
    refused = (
        (servers.cluster, "servers.cluster: ranks of a member run on its own machine yet"),
        (servers.fallback != "never", f"servers.fallback = '{servers.fallback}': it is there"),
        (job.privacy.unit == "example", "privacy.unit = 'example': a group clips no examples"),
    )
    refuse_first(
        *((holds, f"{what}, and {why}", "leave one of both out") for holds, why in refused)
    )


def _divide(data: int, shares: int, batch: int) -> bool:
    """Whether data ranks have whole batches of as many shares, or equal parts of one."""
    return shares % data == 0 or (data % shares == 0 and batch % (data // shares) == 0)
