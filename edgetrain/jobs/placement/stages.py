"""What a stage costs: seconds for one micro-batch, and bytes, for every run of layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from edgetrain.jobs.placement.cutting import Array
from edgetrain.jobs.placement.formulas import (
    PROCESS_BYTES,
    Kept,
    RankLink,
    in_flight,
    rank_bytes,
)
from edgetrain.jobs.placement.keeping import Activations, chosen_again, least_again, no_less_again
from edgetrain.jobs.placement.machines import Slot
from edgetrain.tasks.layers import Model

_Pick = Callable[[Array], Array]


@dataclass(frozen=True)
class Shape:
    """Values equal for all stages of a placement."""

    data: int
    """Ranks that add their gradients up: those of the batch times those of the sequence."""
    shard: int
    zero: int
    tensor: int
    schedule: str
    pipeline: int
    looped: int
    microbatches: int
    samples: float
    """In a micro-batch of one rank."""
    recompute: bool | tuple[int, ...]
    """Layers that are computed again in the backward pass: all, none, or these."""
    ring: int = 1
    ulysses: int = 1
    split_norms: bool = False
    experts: int = 1
    whole_bytes: float = 0.0
    """Bytes of the whole model on the leader, one of the first stage's ranks."""


class LayerSums:
    """Sums over every run of layers [i, j) of a model, [layers + 1, layers + 1] each."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.layers, self.parameters = len(model.layers), model.parameters
        self._by_tensor: dict[tuple[int, int], Divided] = {}
        places = np.arange(self.layers + 1)
        self.first, self.end = places[:, None], places[None, :]
        self.allowed = self.end > self.first
        passed = np.array([layer.passed_bytes for layer in model.layers])
        self.leaving = np.append(0.0, passed)[None, :]  # what a run that ends there passes on
        self.saved = self._sum([layer.saved_bytes for layer in model.layers])
        self.operators = self._sum([float(layer.operators) for layer in model.layers])
        self.attentions = self._sum([float(x.attentions) for x in model.layers])
        self.attended = self._sum([x.passed_bytes * x.attentions for x in model.layers])
        self.routings = self._sum([float(x.expert > 0) for x in model.layers])
        self.routed = self._sum([x.routed_bytes for x in model.layers])
        self.back_operators = self._sum([float(x.backward_operators) for x in model.layers])
        self.boundary = self._sum(
            [0.0, *(layer.passed_bytes for layer in model.layers[:-1])]  # what enters each layer
        )
        self.largest_saved = self._most([layer.saved_bytes for layer in model.layers])

    def only(self, chosen: bool | tuple[int, ...], values: Array) -> Array:
        """Of sums over runs of layers, what the chosen layers have in them."""
        if isinstance(chosen, bool):
            return values if chosen else np.zeros((1, 1))
        mask = np.zeros(self.layers)
        mask[list(chosen)] = 1.0
        found: Array = self._sum(list(mask * np.diagonal(values, 1)))
        return found

    def most_of(self, chosen: bool | tuple[int, ...], values: Array) -> Array:
        """The largest value of the chosen layers in each run; `values` are largest ones."""
        if isinstance(chosen, bool):
            return values if chosen else np.zeros((1, 1))
        mask = np.zeros(self.layers)
        mask[list(chosen)] = 1.0
        return self._most(list(mask * np.diagonal(values, 1)))

    def _sum(self, values: list[float]) -> Array:
        total = np.concatenate([[0.0], np.cumsum(np.array(values, float))])
        found: Array = total[None, :] - total[:, None]
        return found

    def _most(self, values: list[float]) -> Array:
        found = np.zeros((self.layers + 1, self.layers + 1))
        for i in range(self.layers):
            found[i, i + 1 :] = np.maximum.accumulate(np.array(values[i:], float))
        return found

    def divided(self, tensor: int, experts: int = 1) -> Divided:
        """Parameters and flops of a rank that has a `tensor`-th of what can be divided, and one of
        `experts` equal parts of all experts."""
        if (tensor, experts) not in self._by_tensor:
            kept = [1 - x.divided + x.divided / tensor for x in self.model.layers]
            own = [x.parameters * x.expert / experts * (experts > 1) for x in self.model.layers]
            parameters = [
                x.parameters * (part - x.expert * (experts > 1))
                for x, part in zip(self.model.layers, kept, strict=True)
            ]
            held = self._sum(parameters)
            for a, b, tied in self.model.tied:
                held = held - tied * ((self.first <= a) & (self.end > b))
            zipped = list(zip(self.model.layers, kept, strict=True))
            self._by_tensor[tensor, experts] = Divided(
                held,
                self._sum(own),
                self._most([a + b for a, b in zip(parameters, own, strict=True)]),
                self._sum([x.flops * part for x, part in zipped]),
                self._sum([x.backward_flops * part for x, part in zipped]),
                self._sum([x.passed_bytes * (x.divided > 0) for x in self.model.layers]),
                self._sum([float(x.divided > 0) for x in self.model.layers]),
            )
        return self._by_tensor[tensor, experts]


@dataclass(frozen=True)
class Divided:
    """Sums over runs of layers, of what one rank of a tensor-parallel group has."""

    held: Array
    own: Array
    """Parameters of experts that other ranks do not have; 0 where all ranks have all experts."""
    largest: Array
    flops: Array
    back_flops: Array
    exchanged: Array
    """Bytes a sample that the layers whose parameters are divided pass on."""
    exchanges: Array
    """How many of them there are."""


class StageCosts:
    """See cutting.Costs: the stages of one shape over slots of servers."""

    def __init__(
        self,
        sums: LayerSums,
        shape: Shape,
        slots: list[Slot],
        links: tuple[RankLink, RankLink],
        kept: Kept,
        as_needed: bool = False,
    ) -> None:
        """`links` are those inside a server and between servers. `as_needed`: every stage computes
        the activations of as many layers again as it has no memory for."""
        self.as_needed, self.relaxed = as_needed, False
        self.layers, self.microbatches = sums.layers, shape.microbatches
        self._sums, self._shape, self._slots, self._kept = sums, shape, slots, kept
        self._inside, self._between = self._links = links
        self._divided = sums.divided(shape.tensor, shape.experts)
        self.below = math.inf
        """Stages whose gradients take this many seconds to add up, or more, are left out."""
        self.longest = math.inf
        """Seconds: what layers are computed again is not looked for in slower stages. It falls."""
        self._again: dict[tuple[float, Slot, bool], Array] = {}
        self._times: dict[tuple[float, float, RankLink], Array] = {}
        self._longer: dict[tuple[float, float, RankLink], Array] = {}
        """Seconds of computing each layer again."""

    def with_recomputed(self, layers: bool | tuple[int, ...], slots: tuple[int, ...]) -> StageCosts:
        """The same where only these layers are computed again, with each stage in its slot."""
        shape, used = replace(self._shape, recompute=layers), [self._slots[s] for s in slots]
        return StageCosts(self._sums, shape, used, self._links, self._kept)

    def last(self, slot: int) -> Array:
        time = self.computing(slot)[:, self.layers] + self._longer_to_fit(slot, 1)[:, self.layers]
        if self.below < math.inf:
            time[self._syncing(slot)[:, self.layers] >= self.below] = math.inf
        return time

    def inner(self, slot: int, left: int, far: bool) -> Array:
        link = self._between if far else self._inside
        time = self.computing(slot) + 2 * (
            link.alpha + self._shape.samples * self._sums.leaving / link.beta
        )
        time = time + self._longer_to_fit(slot, left)
        inside = self._sums.allowed & (self._sums.end < self.layers)
        if self.below < math.inf:
            inside &= self._syncing(slot) < self.below
        return np.where(inside, time, math.inf)

    def bytes(self, left: int) -> Array:
        """Of a rank whose stage has this many stages from it to the end, itself included; where a
        rank holds several stages, of one of them."""
        shape, many = self._shape, self._flight(left)
        again, kept, entering = self._activations
        active = many * shape.samples * (kept + entering) + shape.samples * again
        return PROCESS_BYTES / shape.looped + self.state + active

    def _flight(self, left: int) -> float:
        """Micro-batches, in a stage's worth, that this stage keeps at most."""
        shape, rank, ranks = self._shape, 0, left
        if shape.looped > 1:
            ranks = shape.pipeline
            rank = (shape.looped * ranks - left) % ranks
        return in_flight(shape.schedule, rank, ranks, shape.microbatches, shape.looped)

    @cached_property
    def _activations(self) -> tuple[Array, Array, Array]:
        """Bytes per sample: live while a layer is recomputed; kept by layers that are not
        recomputed; inputs kept by layers that are."""
        shape, sums, share = self._shape, self._sums, self._share_of_saved
        again = sums.most_of(shape.recompute, sums.largest_saved) * share
        kept = (sums.saved - sums.only(shape.recompute, sums.saved)) * share
        # With split norms what one block hands to the next is divided as well.
        part = 1 / shape.tensor if shape.split_norms else 1.0
        return again, kept, sums.only(shape.recompute, sums.boundary) * part

    @cached_property
    def state(self) -> Array:
        """Parameters, gradients and optimizer of each stage's rank, in bytes."""
        held, largest = self._divided.held, self._divided.largest
        shape = self._shape
        how = (self._kept, shape.shard, shape.zero, shape.microbatches > 1)
        one, top = rank_bytes(1.0, 0.0, *how), rank_bytes(0.0, 1.0, *how)
        alone = rank_bytes(1.0, 0.0, self._kept, 1, 0, shape.microbatches > 1)
        found: Array = one * held + alone * self._divided.own + top * largest
        found[0] += shape.whole_bytes  # a run from layer 0 on is the first stage
        return found

    @property
    def may_fit(self) -> bool:
        """Whether all slots together have memory for parameters, gradients and optimizer. Without
        activations; no cut into stages takes less."""
        room = sum(slot.usable_bytes - PROCESS_BYTES for slot in self._slots) / self._shape.looped
        return float(self.state[0, -1]) <= room

    @cached_property
    def _share_of_saved(self) -> float:
        model = self._sums.model
        total = sum(layer.saved_bytes for layer in model.layers) or 1.0
        split = sum(layer.saved_bytes for layer in model.layers if layer.divided)
        # Of a transformer's block, what lies between its two halves is whole on every rank: about
        # a third (Korthikanti et al., Reducing Activation Recomputation, MLSys 2023, equation 2).
        # With the norms split it is divided as well.
        whole = 0.0 if self._shape.split_norms else 1 / 3
        rest = whole + (1 - whole) / self._shape.tensor
        return (total - split + split * rest) / total

    def computing(self, slot: int) -> Array:
        """Seconds of each run of layers for one micro-batch, forward and backward, on a slot."""
        at = self._slots[slot]
        key = (at.flops_s, at.dispatch_s, at.wide)
        if key not in self._times:
            self._times[key] = self._compute(at, self._shape.recompute)
        return self._times[key]

    def whole_seconds(self, slot: int) -> float:
        """Seconds of all layers in one stage on a slot without computing anything again: what no
        choice of layers is below."""
        return float(self._compute(self._slots[slot], False, np.s_[:1, -1:])[0, 0])

    def _compute(
        self, at: Slot, recompute: bool | tuple[int, ...], part: Any = np.s_[:, :]
    ) -> Array:
        shape, sums, own = self._shape, self._sums, self._divided

        def once(values: Array) -> Array:
            found: Array = values[part]
            return found

        def twice(values: Array) -> Array:
            """In the forward pass, and where it is computed again."""
            found: Array = values[part] + sums.only(recompute, values)[part]
            return found

        operators = twice(sums.operators) + once(sums.back_operators)
        flops = twice(own.flops) + once(own.back_flops)
        time = operators * at.dispatch_s + flops * shape.samples / at.flops_s
        if shape.tensor > 1:
            # Two sums in the forward and two in the backward pass of each block: Shoeybi et al.,
            # Megatron-LM, 2019.
            n, link = shape.tensor, at.wide
            for each in (once, once, once, twice):
                time = time + 2 * (n - 1) * (each(own.exchanges) * link.alpha)
                time = time + 2 * (n - 1) / n * shape.samples * each(own.exchanged) / link.beta
        time = time + self._attending(at, once, twice) + self._routing(at, once, twice)
        if shape.zero >= 3:
            time = time + 2 * (
                (shape.shard - 1) * at.wide.alpha
                + (shape.shard - 1)
                / shape.shard
                * self._kept.working
                * once(own.held)
                / at.wide.beta
            )
        found: Array = np.where(sums.allowed[part], time, math.inf)
        return found

    def _attending(self, at: Slot, once: _Pick, twice: _Pick) -> Array | float:
        """Seconds that slices of a sequence pass on for attention. A ring sends keys and values
        once in the forward pass, and these and their gradients in the backward pass (Liu et al.
        2023); Ulysses has four all-to-alls each way (Jacobs et al. 2023). A message has as many
        bytes as a layer passes on."""
        shape, link = self._shape, at.wide
        calls, sizes = self._sums.attentions, self._sums.attended
        found: Array | float = 0.0

        def sent(pick: _Pick, trips: float, bytes: float) -> Array:
            return trips * pick(calls) * link.alpha + (
                bytes * shape.samples * pick(sizes) / link.beta
            )

        if shape.ring > 1:
            n = shape.ring
            found = found + sent(twice, n - 1, 2 * (n - 1)) + sent(once, n, 4 * n)
        if shape.ulysses > 1:
            n = shape.ulysses
            one = (4 * (n - 1), 4 * (n - 1) / n)
            found = found + sent(twice, *one) + sent(once, *one)
        return found

    def _routing(self, at: Slot, once: _Pick, twice: _Pick) -> Array | float:
        """Seconds of the all-to-alls that bring positions to their experts and back, in the forward
        and in the backward pass (Lepikhin et al., GShard, 2021)."""
        shape, link, n = self._shape, at.wide, self._shape.experts
        if n == 1:
            return 0.0
        trips = (n - 1) * link.alpha
        size = (n - 1) / n * shape.samples / link.beta
        return sum(
            2 * (trips * pick(self._sums.routings) + size * pick(self._sums.routed))
            for pick in (once, twice)
        )

    def lighten(
        self, ends: tuple[tuple[int, int], ...], slots: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        """The layers that stages with these ends compute again if each keeps the activations of
        those that take longest to compute again, as many as it has room for. None: one does not
        fit."""
        found: list[int] = []
        for stage, (slot, (i, j)) in enumerate(zip(slots, ends, strict=True)):
            layers = self._each(slot, len(ends) - stage).part(i, j)
            again = chosen_again(layers, float(self._room(slot)[i, j]))
            if again is None:
                return None
            found += [i + place for place in again]
        return tuple(found)

    def _longer_to_fit(self, slot: int, left: int) -> Array:
        """Seconds that a stage computes again, so that it fits; infinite where it never does.
        `relaxed`: no choice is below it, and it is found sooner."""
        at = self._slots[slot]
        if not self.as_needed:
            return np.where(self.bytes(left) <= at.usable_bytes / self._shape.looped, 0.0, math.inf)
        key = (self._flight(left), at, self.relaxed)
        if key not in self._again:
            layers, room = self._each(slot, left), self._room(slot)
            if self.relaxed:
                self._again[key] = no_less_again(layers, room)
            else:
                wanted = self.computing(slot) <= self.longest
                self._again[key] = least_again(layers, room, wanted)
        return self._again[key]

    def _room(self, slot: int) -> Array:
        """Bytes that each run of layers has for activations."""
        return (self._slots[slot].usable_bytes - PROCESS_BYTES) / self._shape.looped - self.state

    def _each(self, slot: int, left: int) -> Activations:
        shape, sums, at = self._shape, self._sums, self._slots[slot]
        many = shape.samples * self._flight(left)
        part = 1 / shape.tensor if shape.split_norms else 1.0
        key = (at.flops_s, at.dispatch_s, at.wide)
        if key not in self._longer:
            both = [np.diagonal(self._compute(at, each), 1) for each in (True, False)]
            self._longer[key] = both[0] - both[1]
        saved = np.diagonal(sums.saved, 1) * self._share_of_saved
        return Activations(
            many * saved,
            many * np.diagonal(sums.boundary, 1) * part,
            shape.samples * saved,
            self._longer[key],
        )

    def _syncing(self, slot: int) -> Array:
        """Seconds until the gradients of each run of layers are added up over the data ranks."""
        n, link = self._shape.data, self._slots[slot].wide
        if n == 1:
            return np.zeros_like(self._divided.held)
        trips = 3 if self._shape.zero == 1 else 2  # then torch broadcasts parameters besides
        found = trips * (n - 1) * (link.alpha + 4.0 * self._divided.held / n / link.beta)
        copies = n // self._shape.experts
        if self._shape.experts > 1 and copies > 1:
            found = found + trips * (copies - 1) * (
                link.alpha + 4.0 * self._divided.own / copies / link.beta
            )
        return found

    def sync_seconds(self, ends: tuple[tuple[int, int], ...], slots: tuple[int, ...]) -> float:
        """The same of the slowest stage, once a step."""
        return max(
            float(self._syncing(slot)[i, j]) for slot, (i, j) in zip(slots, ends, strict=True)
        )

    @property
    def least_sync(self) -> float:
        """What no cut into as many stages as there are slots can be below."""
        held = float(self._divided.held[0, self.layers]) / len(self._slots)
        return min(at.wide.all_reduce(self._shape.data, 4.0 * held) for at in self._slots)

    def peak_bytes(self, ends: tuple[tuple[int, int], ...]) -> list[float]:
        """Peak bytes of each stage, on its rank."""
        return [float(self.bytes(len(ends) - s)[i, j]) for s, (i, j) in enumerate(ends)]
