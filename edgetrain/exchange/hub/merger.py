"""From a round's contributions to the merged contribution, the reply and the next base.

Knows vectors, codecs, merge rules and outer rules. Which contributions a round has, and who is sent
the reply, is decided elsewhere: no member, no connection, no message and no time here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np

from edgetrain.codecs import Codec, Feedback, bound, memory, salt_of, verbatim
from edgetrain.exchange.hub.contributions import (
    BatchMean,
    Contribution,
    ContributionPiece,
    Guarded,
    Spoilt,
    find_spoilt,
)
from edgetrain.exchange.hub.records import Round, State
from edgetrain.exchange.hub.terms import Terms
from edgetrain.exchange.messages import NO_WEIGHT
from edgetrain.strategies.merging.rule import RoundRule, SliceRule
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.ranges import WHOLE, Ranges, TileSums
from edgetrain.vectors.vector import TILE, Buffer, Layout, Vector, all_finite, tile_sum

if TYPE_CHECKING:
    from edgetrain.codecs.auto import OnRungs
    from edgetrain.exchange.masks.aggregator import Sum
    from edgetrain.strategies import Strategy
    from edgetrain.strategies.lbfgs import Lbfgs
    from edgetrain.strategies.outer_rules import OuterRule

MOST_MAGNITUDE = 2.0**80
"""Largest element of a lossy reply. Codecs carry 2^100; what was left out before is added."""

Cuts = tuple[tuple[str, float, str], ...]
"""(member, share of its contribution that was left out, why)."""


@dataclass(frozen=True)
class RoundResult:
    counted: Sequence[Contribution]
    payloads: list[Buffer]
    """The reply, one payload per part."""
    checksum: int
    """Checksum of the base after it; 0: the hub keeps no base."""
    inputs: tuple[tuple[Buffer, ...], ...]
    """Further inputs of the journal for another merge: see records.Round."""
    cuts: Cuts


@dataclass
class _Early:
    """The parts of a round that were merged before it was whole."""

    vector: Vector | None = None
    arrived: dict[int, int] = field(default_factory=dict)
    """How many members each part has come from."""
    payloads: list[list[Buffer]] = field(default_factory=list)
    """The payloads that each merged part was made of, in order."""

    def has(self, part: int, chosen: Sequence[Contribution]) -> bool:
        """Whether the part was made of exactly these contributions."""
        if part >= len(self.payloads) or len(self.payloads[part]) != len(chosen):
            return False
        pairs = zip(self.payloads[part], chosen, strict=True)
        return all(payload is contribution.payloads[part] for payload, contribution in pairs)


class Merger:
    """Owns the base, a flat float32 vector [elements], and what lossy replies have left out of it.

    `rule` merges, `codec` decodes contributions, `outer` makes a step of what was merged (None: it
    is the step), or moves the base by the batch's loss and gradient; `reply_codec` encodes it.
    Codecs that depend on the shapes of tensors are bound to the layout given to `bind_model`.
    Unless the `terms` say that the hub keeps the base, it is kept until the first round only, for
    members that have not begun. `masked`: contributions cannot be decoded, only their sums are
    known. A hub has a stretch of the model's vector, and a round's contributions and its reply have
    the elements of its range of that (`vectors/ranges.py`).
    """

    def __init__(
        self,
        rule: SliceRule | RoundRule,
        codec: Codec,
        reply_codec: Codec,
        terms: Terms,
        *,
        masked: bool,
        outer: OuterRule | Lbfgs | None = None,
    ) -> None:
        self.rule = rule
        self.outer = outer
        self._by_slice = None if isinstance(rule, RoundRule) else rule
        self.keeps_late = rule.keeps_late
        """Whether a contribution that missed its round may join the next one."""
        self.lot = int(getattr(rule, "lot", 0))
        """What the rule divides by, and members are told, however many there are; 0: how many."""
        self.codecs = codec, reply_codec
        """As the job names them."""
        self.codec, self.reply_codec = self.codecs
        """Bound to the model, once there is one."""
        self._exact = verbatim(codec)
        """Lossless codec of gateways' contributions."""
        self.base: Vector | None = None
        self.replies = Feedback(reply_codec, 0)
        self._terms, self.stretch = terms, terms.stretch
        self._masked = masked
        self.is_below = False
        """Whether a hub above makes the replies, and this is a gateway's."""
        self.ranges = Ranges(0)
        """Ranges of the vector that rounds concern in turn, once there is a model."""
        self._first = self._second = self._trained = 0
        """Of the vector, the first element here; here, of its second half, and of statistics."""
        self._sums = TileSums(self.ranges)
        self._memory = VectorPool(0)
        self._early, self._sizes = _Early(), dict[tuple[int, bool], tuple[int, ...]]()

    # -- the model ----------------------------------------------------------------------------

    def bind_model(self, layout: Layout, elements: int) -> None:
        """Use the codecs for this model, whose vector has [elements]; an empty layout: not known.
        Raises ConfigError, and changes nothing, if a codec does not work for it."""
        stretch, turns = self.stretch, self._terms.strategy.ranges
        ranges = Ranges(stretch.size(elements), turns)
        cuts = max(turns, stretch.count)
        codecs = [bound(codec, layout, cuts) for codec in self.codecs]
        if stretch != WHOLE:
            from edgetrain.codecs.pieces import in_pieces  # where hubs share the vector

            codecs = [in_pieces(codec, stretch.pieces(elements)) for codec in codecs]
        self.codec, self.reply_codec = codecs
        self._exact = verbatim(self.codec)
        self._sizes.clear()
        self.ranges, self._first = ranges, stretch.of(elements).start
        self._second = max(0, elements // 2 - self._first)
        self._trained = max(0, layouts.trained_elements(layout, elements) - self._first)

    def start(self, base: Vector) -> int:
        """Start from these parameters, owned by the merger from now on. Returns their checksum."""
        self._make_room()
        self.base = base
        return self._sums.read(base)

    def forget_base(self) -> None:
        """The base will not be sent to any member any more."""
        self.base = None

    def _make_room(self) -> None:
        self._memory = VectorPool(self.ranges.largest)
        self._sums = TileSums(self.ranges, self._first)
        self.replies = memory(self.reply_codec, self.ranges.elements)
        if self.outer is not None:
            self.outer.start(self.ranges.elements)

    def unsent(self) -> dict[str, Vector]:
        """Unsent remainder of replies so far, for a journal: views."""
        return {} if self.replies.lossless else self.replies.state()

    def outer_state(self) -> Mapping[str, Vector]:
        """State of the outer rule, for a journal: views."""
        return {} if self.outer is None else self.outer.state()

    @property
    def strategy(self) -> Strategy:
        return self._terms.strategy

    @property
    def adaptive(self) -> OnRungs | None:
        """Encoder of replies if their codec is `auto`; None: another codec."""
        if not self.reply_codec.adapts:
            return None
        from edgetrain.codecs.auto import OnRungs  # of this codec alone

        return self.replies if isinstance(self.replies, OnRungs) else None

    def restore(self, state: State) -> None:
        """Go on from a journal's snapshot. What replies left out, and what the outer rule
        remembered, may be lost: then they begin anew."""
        layout = layouts.read(state.layout, state.elements) if state.layout else ()
        self.bind_model(layout, state.elements)
        self._make_room()
        if not self.replies.lossless and state.memory:
            self.replies.restore(state.memory)
        if self.outer is not None and state.outer:
            self.outer.restore(state.outer)
        self.base = None if state.base is None else state.base.copy()
        if self.base is not None:
            self._sums.read(self.base)

    def offer(self, gradient: Buffer) -> bool:
        """The next move is by this gradient. Returns whether there is a search that moves."""
        if self._searches:
            _search(self.outer).offered = np.frombuffer(gradient, np.float32).copy()
        return self._searches

    @property
    def _searches(self) -> bool:
        """Whether what moves the base is a search, and no outer rule."""
        return self.outer is not None and self._terms.strategy.deals

    # -- the form of a contribution -----------------------------------------------------------

    def sizes(self, round: int, exact: bool = False) -> tuple[int, ...]:
        """Largest payloads of a contribution's parts, in bytes; `exact`: of a gateway."""
        key = round % self.ranges.count, exact
        if key not in self._sizes:
            codec = self._exact if exact else self.codec
            parts = self.codec.slices(self.ranges.size(round))
            self._sizes[key] = tuple(codec.max_bytes(here.stop - here.start) for here in parts)
        return self._sizes[key]

    # -- before a round is whole --------------------------------------------------------------

    def count_part(self, part: int, members: int) -> bool:
        """Count one more member's part for the oldest open round. Returns whether the part may be
        here from all `members`, to be merged early. A RoundRule never merges early."""
        if self._by_slice is None:
            return False
        early = self._early
        early.arrived[part] = early.arrived.get(part, 0) + 1
        return early.arrived[part] >= members and part == len(early.payloads)

    def merge_early(self, round: int, part: int, chosen: Sequence[Contribution]) -> None:
        """Merge a part that is here from all members while their other parts are on the way. If it
        turns out that others count, the part is merged again when the round closes."""
        early = self._early
        if early.vector is None:
            early.vector = self._borrow(round)
        with contextlib.suppress(Spoilt):  # raised again when the round closes
            self._merge_part(chosen, part, early.vector)
            early.payloads.append([contribution.payloads[part] for contribution in chosen])

    # -- a round ------------------------------------------------------------------------------

    def _borrow(self, round: int) -> Vector:
        return self._memory.borrow_vector()[: self.ranges.size(round)]

    def close_round(
        self,
        round: int,
        given: Sequence[Contribution],
        end: Sum | BatchMean | None = None,
        rung: int | None = None,
        whole: float = 0.0,
    ) -> RoundResult:
        """Merge a round's contributions, which are in the order of their members' names, and add
        the reply to the base. `end`: the sum of masked ones, or what the batch's slices came to.
        `rung`: of `auto`, for the reply; None: as the last one. `whole`: the weight of all members.
        Raises Spoilt, and changes nothing, if a contribution has to be left out."""
        inputs: tuple[tuple[Buffer, ...], ...] = ()
        if isinstance(end, BatchMean):
            step, inputs = _moved(self.outer, self.base, end, last=round + 1 == self._terms.steps)
            payloads = self._reply(round, step)
            return RoundResult(given, payloads, self._advance(round, step, payloads), inputs, ())
        counted, merged, cuts = (
            self._merge(round, given) if end is None else _summed(given, end, self._borrow(round))
        )
        if counted:
            _check_size(self, merged, counted)
            _count_missing(self, merged, counted, whole)
        if self._keeps_inputs:
            mean = ((merged.data.cast("B"),),)
            inputs = mean if self._keeps_mean else tuple(c.payloads for c in given)
        step = self._outer_step(round, merged) if counted or self.lot else merged
        if rung is not None and self.adaptive is not None:
            self.adaptive.climb(rung)
        payloads = self._reply(round, step)
        checksum = self._advance(round, step, payloads)
        return RoundResult(counted, payloads, checksum, inputs, cuts)

    def _reply(self, round: int, step: Vector) -> list[Buffer]:
        return self.replies.encode(step, self.ranges.of(round), salt_of("", round))

    def replay_round(self, record: Round) -> int:
        """Merge a round again from a journal's record. Returns the base's checksum."""
        if self._searches:
            end = _told(record.inputs[0])
            step, _ = _moved(self.outer, self.base, end, last=record.round + 1 == self._terms.steps)
            return self._advance(record.round, step, record.reply)
        if not self._keeps_inputs:
            merged = self._borrow(record.round)
            parts = self.reply_codec.slices(merged.size)
            for here, payload in zip(parts, record.reply, strict=True):
                self.reply_codec.decode(payload, merged[here])
        else:
            merged = self._merged_again(record)
            if self.lot or any(counted.weight > NO_WEIGHT for counted in record.counted):
                merged = self._outer_step(record.round, merged)
            if not self.replies.lossless:
                if self.adaptive is not None:
                    from edgetrain.codecs.auto import rung_of

                    self.adaptive.climb(rung_of(record.reply[0]))
                self._reply(record.round, merged)  # for what it leaves out
        return self._advance(record.round, merged, record.reply)

    def _outer_step(self, round: int, merged: Vector) -> Vector:
        """What is added to the base of a merged vector. That stays as it is if the journal needs
        it. A round in which nobody counts is no step, and statistics are the mean of members'."""
        if self.outer is None:
            return merged
        step, outer = merged, cast("OuterRule", self.outer)
        if self._keeps_inputs:
            step = self._borrow(round)
            step[:] = merged
        outer.step(step[: max(0, self._trained - (at := self.ranges.of(round).start))], at)
        return step

    def merge_site(
        self, round: int, given: Sequence[Contribution]
    ) -> tuple[Sequence[Contribution], Vector]:
        """The contributions of a site that count, and the merged vector: the step above. Raises
        Spoilt, and changes nothing, if one has to be left out."""
        counted, merged, _ = self._merge(round, given)
        if counted:
            _check_size(self, merged, counted)
        return counted, merged

    @property
    def _keeps_inputs(self) -> bool:
        """Whether a round cannot be merged again from its reply: lossy replies leave something out,
        and an outer rule with state has to see what was merged. The hub above a gateway does."""
        return not self.is_below and (not self.replies.lossless or bool(self.outer_state()))

    @property
    def _keeps_mean(self) -> bool:
        """Whether the inputs that are kept are the merged vector: of masked contributions nothing
        else is known, gateways' are as long, with variates it is no mean, and beside the state of
        an outer rule one vector more. Otherwise the contributions, small where replies are."""
        is_mean = self.outer is None and not self.strategy.has_variates
        return self._masked or self._terms.gateways or not is_mean

    def _merged_again(self, record: Round) -> Vector:
        if self._keeps_mean:
            return np.frombuffer(record.inputs[0][0], np.float32)
        return self._merge(
            record.round,
            [
                Contribution(counted.member, counted.weight, payloads)
                for counted, payloads in zip(record.counted, record.inputs, strict=True)
            ],
        )[1]

    def _merge(
        self, round: int, chosen: Sequence[Contribution]
    ) -> tuple[Sequence[Contribution], Vector, Cuts]:
        chosen = [contribution for contribution in chosen if contribution.weight > NO_WEIGHT]
        early, self._early = self._early, _Early()
        merged = self._borrow(round) if early.vector is None else early.vector
        if self._by_slice is None and (chosen or self.lot):
            return self._merge_round(cast("RoundRule", self.rule), chosen, merged)
        if not chosen:
            merged[:] = 0
        for part in range(len(self.sizes(round)) if chosen else 0):
            if not early.has(part, chosen):
                self._merge_part(chosen, part, merged)
        return chosen, merged, ()

    def _merge_part(self, chosen: Sequence[Contribution], part: int, merged: Vector) -> None:
        assert self._by_slice is not None
        out = merged[self.codec.slices(merged.size)[part]]
        pieces = [
            ContributionPiece(each, part, self._exact if each.is_exact else self.codec)
            for each in chosen
        ]
        with np.errstate(over="ignore", invalid="ignore"):
            self._by_slice.merge(pieces, out)
        if not all_finite(out):
            find_spoilt(pieces, np.empty_like(out))

    def _merge_round(
        self, rule: RoundRule, chosen: Sequence[Contribution], merged: Vector
    ) -> tuple[Sequence[Contribution], Vector, Cuts]:
        """Merge by a rule that wants one contribution of each member: the newest one counts."""
        newest = {contribution.member: contribution for contribution in chosen}
        counted = list(newest.values())
        parts = self.codec.slices(merged.size)
        pieces = [
            [Guarded(contribution, part, self.codec) for part in range(len(parts))]
            for contribution in counted
        ]
        found = rule.merge_round(pieces, [merged[here] for here in parts])
        for part, here in enumerate(parts):
            if not all_finite(merged[here]):
                find_spoilt([each[part] for each in pieces], np.empty_like(merged[here]))
        names = [*newest, "hub"]
        cuts = [(names[cut.index], cut.share, cut.reason) for cut in found]
        cuts += [
            (c.member, 1.0, "a newer one of the same member counts in this round")
            for c in chosen
            if c is not newest[c.member]
        ]
        return counted, merged, tuple(cuts)

    def _advance(self, round: int, merged: Vector, payloads: Sequence[Buffer]) -> int:
        """base += the reply as members decode it. Returns its checksum, 0 without a base."""
        if not self._terms.strategy.hub_keeps_base:
            self.forget_base()
        if self.base is None:
            return 0
        sums: list[int] = []
        first = self.ranges.of(round).start
        parts = self.reply_codec.slices(merged.size)
        for here, payload in zip(parts, payloads, strict=True):
            reply = merged[here]
            if not self.reply_codec.lossless:
                reply = np.empty(here.stop - here.start, np.float32)
                self.reply_codec.decode(payload, reply)
            start = first + here.start
            for tile in self._sums.tiles(slice(start, first + here.stop)):
                base = self.base[tile]
                with np.errstate(over="ignore", invalid="ignore"):  # members will notice
                    base += reply[tile.start - start : tile.stop - start]
                if (self._first + tile.start) % TILE and sums:  # a part has ended within this tile
                    sums[-1] += tile_sum(base)
                else:
                    sums.append(tile_sum(base))
        return self._sums.replace(round, sums)


def _summed(
    given: Sequence[Contribution], end: Sum, merged: Vector
) -> tuple[Sequence[Contribution], Vector, Cuts]:
    """The contributions that count, the merged vector and the cuts of a masked round."""
    merged[:] = 0 if end.vector is None else end.vector
    if end.vector is None:
        return [], merged, (("hub", 1.0, end.reason),)
    return given, merged, ()


def _count_missing(
    merger: Merger, merged: Vector, counted: Sequence[Contribution], whole: float
) -> None:
    """With variates: the base has the mean gradient of all members, of which these are a part."""
    if merger.strategy.has_variates:
        merged[merger._second :] *= np.float32(sum(each.weight for each in counted) / whole)


def _check_size(merger: Merger, merged: Vector, chosen: Sequence[Contribution]) -> None:
    """If the outer rule or lossy replies cannot take the merged vector, raise Spoilt for the
    contribution with the largest element."""
    most, of = MOST_MAGNITUDE, "replies can carry"
    if merger.outer is not None:
        from edgetrain.strategies.outer_rules import MOST_MAGNITUDE as MOST_BEFORE_OUTER

        most, of = MOST_BEFORE_OUTER, "outer rules can take"
    elif merger.replies.lossless:
        return
    if merger._masked or not merged.size or _size(merged) <= most:
        return
    sizes = []
    scratch: Vector = np.empty_like(merged)
    for contribution in chosen:
        codec = merger._exact if contribution.is_exact else merger.codec
        for part, here in enumerate(codec.slices(merged.size)):
            ContributionPiece(contribution, part, codec).read(scratch[here])
        sizes.append(_size(scratch))
    largest = chosen[int(np.argmax(sizes))]
    raise Spoilt(largest, f"an element of {max(sizes):g} is more than {of}")


def _size(vector: Vector) -> float:
    return max(float(vector.max()), -float(vector.min()))


def _moved(
    search: OuterRule | Lbfgs | None, base: Vector | None, end: BatchMean, last: bool
) -> tuple[Vector, tuple[tuple[Buffer, ...], ...]]:
    """What a search adds to the base that a batch's mean is of, and what the journal needs to find
    that again: the gradient, if it was wanted, and what the search was told."""
    assert base is not None
    search = _search(search)
    gradient: tuple[Buffer, ...] = () if end.vector is None else (end.vector.data.cast("B"),)
    step = search.move(base, end.loss, end.vector, last, end.products)
    return step, ((*gradient, search.told.tobytes()),)


def _search(outer: OuterRule | Lbfgs | None) -> Lbfgs:
    from edgetrain.strategies.lbfgs import Lbfgs  # of a hub that deals

    assert isinstance(outer, Lbfgs)
    return outer


def _told(inputs: Sequence[Buffer]) -> BatchMean:
    *gradient, numbers = inputs
    vector = np.frombuffer(gradient[0], np.float32) if gradient else None
    loss, *products = np.frombuffer(numbers, np.float64)
    return BatchMean(float(loss), vector, np.array(products) if products else None)
