"""A placement, and how it is spelled: "data=2 pipeline=2 schedule=1f1b microbatches=8"."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from edgetrain.errors import ConfigError, did_you_mean

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
"""What a `shard` divides: nothing; the optimizer; gradients and optimizer; the parameters too."""

NORMS = ("whole", "split")
COUNTS = (
    "data",
    "shard",
    "pipeline",
    "tensor",
    "sequence",
    "ulysses",
    "experts",
    "stages",
    "microbatches",
)
_MOST = 4096


@dataclass(frozen=True)
class Placement:
    """How a group of ranks holds one model together. The mesh is pipeline x data x sequence x
    tensor, in this order: the ranks of a stage are neighbours."""

    data: int = 1
    """Ranks that each have a part of the batch."""
    shard: int = 1
    """Of these, ranks that share one copy of parameters and optimizer; 1: each has its own."""
    zero: int = 0
    """What they share: see ZEROS."""
    pipeline: int = 1
    """Ranks in a row that each hold a part of the layers."""
    tensor: int = 1
    """Ranks that each hold a part of every large layer."""
    norms: str = "whole"
    """"whole" on each of these ranks, or "split": each has a part of the sequence there."""
    sequence: int = 1
    """Ranks that each have a slice of every sequence."""
    ulysses: int = 1
    """Of these, neighbours that exchange heads; their groups form rings."""
    experts: int = 1
    """Of the data ranks, neighbours that each have a part of every layer's experts."""
    schedule: str = "1f1b"
    stages: int = 1
    """Stages that each rank of the pipeline holds."""
    microbatches: int = 1
    """Parts that a rank's batch is computed in."""
    recompute: bool | tuple[int, ...] = False
    """Whether activations are computed again in the backward pass, and not kept: of all layers, of
    none, or of these."""
    cuts: tuple[int, ...] = ()
    """Where each stage but the first begins, in layers; (): by their number alone."""

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
        if self.zero not in ZEROS:
            raise ConfigError(f"placement: zero={self.zero}", "0, 1, 2 or 3")
        if self.data % self.shard:
            near = math.gcd(self.data, self.shard)
            raise ConfigError(
                f"placement: shard={self.shard} does not divide data={self.data}", f"shard={near}"
            )
        if (self.shard > 1) != (self.zero > 0):
            raise ConfigError(
                f"placement: shard={self.shard} with zero={self.zero}",
                "shard=2 zero=3 divides the parameters among two ranks; leave both out otherwise",
            )
        if self.data % self.experts:
            near = math.gcd(self.data, self.experts)
            raise ConfigError(
                f"placement: experts={self.experts} does not divide data={self.data}",
                f"experts={near}",
            )
        if self.experts > 1 and self.zero == 1:
            raise ConfigError(
                f"placement: experts={self.experts} with zero=1, whose ranks hold the same layers",
                "zero=2",
            )
        self._check_sequence()
        self._check_schedule()
        if self.cuts and (
            len(self.cuts) != self.all_stages - 1 or list(self.cuts) != sorted(set(self.cuts))
        ):
            raise ConfigError(
                f"placement: cuts={_joined(self.cuts)} for {self.all_stages} stages",
                f"{self.all_stages - 1} places that increase",
            )

    def _check_sequence(self) -> None:
        if self.sequence % self.ulysses:
            near = math.gcd(self.sequence, self.ulysses)
            raise ConfigError(
                f"placement: ulysses={self.ulysses} does not divide sequence={self.sequence}",
                f"ulysses={near}",
            )
        if self.norms not in NORMS:
            raise ConfigError(f"placement: norms={self.norms}", did_you_mean(self.norms, NORMS))
        if self.norms == "split" and self.tensor == 1:
            raise ConfigError(
                "placement: norms=split with tensor=1", "tensor=2, whose ranks share the norms"
            )

    def _check_schedule(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                f"placement: schedule={self.schedule}", did_you_mean(self.schedule, SCHEDULES)
            )
        if self.pipeline == 1 and self.stages > 1:
            raise ConfigError(
                f"placement: stages={self.stages} with pipeline=1", "leave stages out"
            )
        if self.pipeline == 1:
            return
        looped, v = self.schedule in LOOPED, self.schedule in V_SHAPED
        if (looped and self.stages < 2) or (v and self.stages != 2):
            raise ConfigError(
                f"placement: schedule={self.schedule} with stages={self.stages}", "stages=2"
            )
        if not (looped or v) and self.stages != 1:
            raise ConfigError(
                f"placement: schedule={self.schedule} with stages={self.stages}",
                "leave stages out, or schedule=interleaved",
            )
        if self.zero == 3 and self.schedule in SPLIT:
            raise ConfigError(
                f"placement: zero=3 with schedule={self.schedule}: torch's gradients are wrong",
                "zero=2, or schedule=interleaved",
            )
        least = self.all_stages if self.schedule == "dualpipev" else 1
        if self.microbatches < least:
            raise ConfigError(
                f"placement: schedule={self.schedule} with microbatches={self.microbatches}",
                f"at least {least}",
            )
        if self.schedule == "interleaved" and self.microbatches % self.pipeline:
            near = self.pipeline * max(1, round(self.microbatches / self.pipeline))
            raise ConfigError(
                f"placement: interleaved turns of {self.pipeline} ranks with "
                f"microbatches={self.microbatches}",
                f"microbatches={near}",
            )

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
        raise ConfigError(f"placement: {name}={text}", "a whole number from 1") from None
