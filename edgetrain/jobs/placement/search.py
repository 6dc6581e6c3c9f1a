"""Search the placements of a model on servers: the fastest of each kind that fits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from edgetrain.jobs.placement.bars import Bar
from edgetrain.jobs.placement.cutting import Cut, cut_in_order, cut_over
from edgetrain.jobs.placement.formulas import WHOLE_BYTES, Kept, weights_of
from edgetrain.jobs.placement.machines import Servers, Slot, slots
from edgetrain.jobs.placement.stages import LayerSums, Shape, StageCosts
from edgetrain.jobs.placement.words import SPLIT, Placement
from edgetrain.tasks.layers import Model

SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2))
"""Those that the search tries, and how many stages a rank then holds. GPipe is never better than
1F1B, which takes as long and keeps less."""
TENSORS = (1, 2, 4, 8)
MOST_MIXED, MOST_CHOSEN = 16, 6
"""Slots up to which it is searched which of them a pipeline uses, of unequal servers and of equal
ones. With more it fills the servers in order."""


@dataclass(frozen=True)
class Work:
    """What a step of the job is: samples of all members, what of a parameter is kept, and the words
    that its placements cannot have."""

    members: int
    batch: int
    kept: Kept
    bars: tuple[Bar, ...] = ()
    accumulate: int = 1
    """Batches that a step adds up."""

    def bars_out(self, placement: Placement) -> bool:
        """Whether its loss or its optimizer rules a placement out."""
        return any(bar.hits(placement) for bar in self.bars)


@dataclass(frozen=True)
class Found:
    """A placement, what it costs, and what each of its stages holds."""

    placement: Placement
    seconds: float
    bytes: tuple[float, ...]
    """Largest bytes of each rank of the pipeline; the leader has the whole model, too."""
    usable_bytes: tuple[float, ...]
    """Usable bytes of the same ranks."""
    ends: tuple[tuple[int, int], ...]
    """Layers of each stage, [first, end)."""
    servers: tuple[int, ...]
    """The server of each rank of the pipeline."""


@dataclass(frozen=True)
class TooLarge:
    """A kind of placement that does not fit, with the least that it would need."""

    kind: str
    needs_bytes: float
    usable_bytes: float


def kind_of(placement: Placement) -> str:
    """Name of a placement's kind in a table of the best ones."""
    words = []
    if placement.data > 1:
        words.append("sharded data" if placement.shard > 1 else "data")
    if placement.experts > 1:
        words.append("experts")
    if placement.pipeline > 1:
        words.append("pipeline")
    if placement.tensor > 1:
        words.append("tensor")
    if placement.sequence > 1:
        words.append("sequence")
    return " x ".join(words) or "one device"


def search(model: Model, servers: Servers, work: Work) -> tuple[list[Found], list[TooLarge]]:
    """The fastest placement of each kind, in order; and the kinds that do not fit."""
    sums = LayerSums(model)
    best: dict[str, Found] = {}
    least: dict[str, TooLarge] = {}
    # Choosing what is computed again takes longest: it comes last, and mostly cannot be worth it.
    tried = sorted(_options(sums, servers, work), key=lambda each: (each.is_chosen, each.bound))
    for each in tried:
        kind = kind_of(each.placement)
        known = best.get(kind)
        limit = known.seconds if known else math.inf
        if each.bound >= limit:
            continue
        found = each.solve(limit)
        if found is not None:
            best[kind] = found
        elif known is None:
            refused = each.refusal(kind)
            if kind not in least or refused.needs_bytes < least[kind].needs_bytes:
                least[kind] = refused
    ranked = sorted(best.values(), key=lambda each: each.seconds)
    return ranked, [refused for kind, refused in least.items() if kind not in best]


def evaluate(model: Model, servers: Servers, work: Work, placement: Placement) -> Found | TooLarge:
    """What one placement costs; its cuts are chosen if it names none. The caller has checked that
    it can be had on these servers."""
    option = _option(LayerSums(model), servers, work, placement, given=True)
    assert option is not None
    return option.solve(math.inf) or option.refusal(kind_of(placement))


class _Option:
    """One configuration: all but the cuts, and a bound that no cut can be faster than."""

    def __init__(self, sums: LayerSums, costs: StageCosts, placement: Placement, room: list[Slot],
                 mixed: bool) -> None:  # fmt: skip
        self.placement, self._room, self._costs, self._mixed = placement, room, costs, mixed
        self._sums = sums
        self._a, self._c = weights_of(
            placement.schedule, placement.pipeline, costs.microbatches, placement.stages
        )
        fastest = max(range(len(room)), key=lambda d: room[d].flops_s)
        total = costs.whole_seconds(fastest)
        many = min(len(room), sums.layers) if mixed else placement.all_stages
        self.bound = self._a * total + self._c * total / many + costs.least_sync

    def solve(self, limit: float) -> Found | None:
        """The best cut, if a step with it takes less than `limit` seconds."""
        found: Found | None = None
        if not self._costs.may_fit:
            return None
        most = math.inf
        # Adding gradients up takes as long as on the stage that holds most: cut again without such
        # stages, as long as that can be worth it.
        while True:
            left = (limit - self._costs.least_sync) * self._slack
            cut = self._given() if self.placement.cuts else self._cut(left, most)
            if cut is None:
                return found
            syncing = self._costs.sync_seconds(cut.ends, cut.slots)
            seconds = self._step_seconds(cut) + syncing
            if seconds < limit:
                made = self._as_needed(cut) if self._costs.as_needed else self._found(cut, seconds)
                if made is None:
                    return found
                found, limit = made, made.seconds
            if self.placement.cuts or self.placement.data == 1:
                return found
            most = syncing

    def _as_needed(self, cut: Cut) -> Found | None:
        """This cut, with the layers named that are computed again."""
        layers = self._costs.lighten(cut.ends, cut.slots)
        if layers is None:
            return None
        again: bool | tuple[int, ...] = layers or False
        if len(layers) == self._sums.layers:
            again = True
        placement = replace(
            self.placement, pipeline=len(cut.ends) // self.placement.stages,
            cuts=tuple(first for first, _ in cut.ends[1:]), recompute=again,
        )  # fmt: skip
        costs = self._costs.with_recomputed(again, cut.slots)
        used = [self._room[s] for s in cut.slots]
        return _Option(self._sums, costs, placement, used, False).solve(math.inf)

    @property
    def is_chosen(self) -> bool:
        """Whether layers that are computed again are chosen one by one."""
        return self._costs.as_needed

    @property
    def _slack(self) -> float:
        """How much longer than a step a cut's cost may be: it takes the longest stage for the
        longest rank."""
        return 1.3 if self.placement.stages > 1 else 1.0

    def _step_seconds(self, cut: Cut) -> float:
        """Seconds of a step without its sync. A rank with several stages is as busy as all of
        them."""
        if self.placement.stages == 1:
            return cut.cost
        times, placement = self._times(cut.ends), self.placement
        ranks = range(placement.pipeline)
        busy = max(sum(times[stage] for stage in placement.stages_of(rank)) for rank in ranks)
        return self._a * sum(times) + self._costs.microbatches * busy

    def _times(self, ends: tuple[tuple[int, int], ...]) -> list[float]:
        """Seconds of each stage for one micro-batch, infinite where it does not fit."""
        far, count = self._far(), len(ends)
        times = [
            float(self._costs.inner(s, count - s, far[s])[i, j])
            for s, (i, j) in enumerate(ends[:-1])
        ]
        return [*times, float(self._costs.last(count - 1)[ends[-1][0]])]

    def _cut(self, limit: float, syncing: float) -> Cut | None:
        costs = self._costs
        costs.below = syncing
        if costs.as_needed:
            costs.relaxed = True
            hopeless = self._is_hopeless(limit)
            costs.relaxed = False
            if hopeless:
                return None
            costs.longest = limit / (self._a + self._c)
        return self._cut_at(self._a, self._c, limit)

    def _is_hopeless(self, limit: float) -> bool:
        """Whether no cut can be worth it, as far as relaxed costs tell."""
        if self.placement.stages > 1:
            # The busiest rank is at least as busy as all are on average.
            mean = self._costs.microbatches / self.placement.pipeline
            return self._cut_at(self._a + mean, 0.0, limit / self._slack) is None
        return self._cut_at(self._a, self._c, limit) is None

    def _cut_at(self, a: float, c: float, limit: float) -> Cut | None:
        costs, room = self._costs, self._room
        if self._mixed:
            most = min(len(room), self._sums.layers)
            return cut_over(costs, [s.server for s in room], most, a, c, limit)
        return cut_in_order(costs, len(room), self._far(), a, c, limit)

    def _far(self) -> list[bool]:
        after = [*self._room[1:], self._room[0]]
        return [here.server != there.server for here, there in zip(self._room, after, strict=True)]

    def _given(self) -> Cut | None:
        self._costs.below = math.inf
        edges = [0, *self.placement.cuts, self._sums.layers]
        ends = tuple(itertools.pairwise(edges))
        count, times = len(ends), self._times(ends)
        if not max(times) < math.inf:
            return None
        return Cut(self._a * sum(times) + self._c * max(times), ends, tuple(range(count)))

    def _found(self, cut: Cut, seconds: float) -> Found:
        used = [self._room[s] for s in cut.slots]
        pipeline = len(cut.ends) // self.placement.stages
        placement = replace(
            self.placement,
            pipeline=pipeline,
            cuts=tuple(first for first, _ in cut.ends[1:]),
        )
        peaks = self._costs.peak_bytes(cut.ends)
        ranks = range(pipeline)
        return Found(
            placement,
            seconds,
            tuple(sum(peaks[stage] for stage in placement.stages_of(rank)) for rank in ranks),
            tuple(used[rank].usable_bytes for rank in ranks),
            cut.ends,
            tuple(used[rank].server for rank in ranks),
        )

    def refusal(self, kind: str) -> TooLarge:
        """Layers dealt out by their number, as if memory were no matter."""
        stages, layers = max(1, self.placement.all_stages), self._sums.layers
        edges = [round(layers * s / stages) for s in range(stages + 1)]
        ends = tuple(itertools.pairwise(edges))
        costs = self._costs
        if costs.as_needed:
            costs = costs.with_recomputed(True, tuple(range(len(self._room))))
        peaks = costs.peak_bytes(ends)
        ranks = range(self.placement.pipeline)
        held = [sum(peaks[s] for s in self.placement.stages_of(rank)) for rank in ranks]
        return TooLarge(kind, max(held), min(slot.usable_bytes for slot in self._room))


def _options(sums: LayerSums, servers: Servers, work: Work) -> Iterator[_Option]:
    for data in _divisors(work.members, servers.ranks):
        for tensor in TENSORS:
            if data * tensor > servers.ranks or not _divides(sums.model, tensor):
                continue
            for sequence in _sequences(sums.model, servers.ranks // (data * tensor), tensor):
                for placement in _widths(sums, servers, work, (data, tensor, *sequence)):
                    if work.bars_out(placement):
                        continue
                    option = _option(sums, servers, work, placement)
                    if option is not None:
                        yield option


def _sequences(model: Model, most: int, tensor: int) -> list[tuple[int, int]]:
    """(ranks to a sequence, of which exchange heads) to try: Ulysses where heads divide, else a
    ring."""
    found = [(1, 1)]
    for count in TENSORS[1:]:
        if (
            count > most
            or model.experts
            or not model.knows_place
            or not model.length
            or model.length % count
        ):
            continue
        divides = model.heads and (model.heads // tensor) % count == 0
        found.append((count, count if divides else 1))
    return found


def _widths(
    sums: LayerSums, servers: Servers, work: Work, width: tuple[int, int, int, int]
) -> Iterator[Placement]:
    data, tensor, sequence, ulysses = width
    room = slots(servers, data * tensor * sequence)
    samples = work.members // data * work.batch
    shards = [(1, 0)] if data == 1 else [(1, 0), (data, 2), (data, 3)]
    if not room:
        return
    chosen = _is_chosen(servers, room)
    for pipeline in _lengths(len(room), sums.layers):
        for schedule, stages in SCHEDULES if pipeline > 1 else SCHEDULES[:1]:
            if pipeline * stages > sums.layers:
                continue
            if pipeline > 1 and chosen and (stages == 1 or not servers.are_equal):
                continue  # that of one stage stands for all lengths
            for microbatches in _divisors(samples, samples):
                if schedule == "interleaved" and microbatches % pipeline:
                    continue
                for (shard, zero), experts in itertools.product(shards, _experts(sums.model, data)):
                    if zero == 3 and schedule in SPLIT and pipeline > 1:
                        continue
                    for recompute in (False, True):
                        yield Placement(
                            data, shard, zero, pipeline, tensor,
                            sequence=sequence, ulysses=ulysses, experts=experts,
                            schedule=schedule, stages=stages,
                            microbatches=microbatches, recompute=recompute,
                        )  # fmt: skip


def _experts(model: Model, data: int) -> list[int]:
    """Ranks that share experts to try: none, or as many as can."""
    return sorted({1, math.gcd(model.experts, data)}) if model.experts else [1]


def _is_chosen(servers: Servers, room: list[Slot]) -> bool:
    """Whether the cutting chooses which slots are used, and how many."""
    if servers.are_equal:
        return len(servers.servers) > 1 and len(room) <= MOST_CHOSEN
    return len(room) <= MOST_MIXED


def _lengths(room: int, layers: int) -> list[int]:
    most = min(room, layers)
    if most <= 8:
        return list(range(1, most + 1))
    return sorted({*_divisors(room, most), most})


def _option(
    sums: LayerSums, servers: Servers, work: Work, placement: Placement, given: bool = False
) -> _Option | None:
    width = placement.width
    room = slots(servers, width)
    if not room or (placement.pipeline > len(room)):
        return None
    is_free = placement.pipeline == 1 and not given and _is_chosen(servers, room)
    mixed = is_free and not (work.bars and work.bars_out(replace(placement, pipeline=2)))
    inside = servers.servers[room[0].server].inside
    samples = work.members // placement.data * work.batch / placement.microbatches
    shape = Shape(
        placement.data * placement.sequence, placement.shard, placement.zero, placement.tensor,
        placement.schedule, placement.pipeline, placement.stages,
        placement.microbatches * work.accumulate, samples / placement.sequence,
        placement.recompute, placement.ring, placement.ulysses, placement.norms == "split",
        placement.experts,
        0.0 if all(each.has_gpus for each in servers.servers) else WHOLE_BYTES * sums.parameters,
    )  # fmt: skip
    used = room if mixed else [room[s % placement.pipeline] for s in range(placement.all_stages)]
    as_needed = placement.recompute is True and not given
    if as_needed:
        shape = replace(shape, recompute=False)
    costs = StageCosts(sums, shape, used, (inside, servers.between), work.kept, as_needed)
    return _Option(sums, costs, placement, used, mixed)


def _divides(model: Model, tensor: int) -> bool:
    return tensor == 1 or (model.is_divided and model.heads > 0 and model.heads % tensor == 0)


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]
