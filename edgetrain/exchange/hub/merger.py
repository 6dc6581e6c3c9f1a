"""What a hub's contributions become: the merged contribution, the reply to it, the next base.

Knows vectors, codecs and merge rules. Which contributions a round has and who is told is the hub's:
no member, no connection, no message and no time here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from edgetrain.codecs import Codec, Feedback, bound, memory
from edgetrain.exchange.hub.contributions import (
    Contribution,
    ContributionPiece,
    Guarded,
    Spoilt,
    find_spoilt,
)
from edgetrain.exchange.hub.records import Round, State
from edgetrain.strategies.merging.rule import RoundRule, SliceRule
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.parts import parts_of
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import Buffer, Layout, Vector, all_finite, combine, tile_sum, tiles

if TYPE_CHECKING:
    from edgetrain.exchange.masks.aggregator import Sum

MOST_MAGNITUDE = 2.0**80
"""Of an element of a lossy reply: codecs carry 2^100, and what was left out comes on top."""

Cuts = tuple[tuple[str, float, str], ...]
"""(member, share of its contribution that was left out, why)."""


@dataclass(frozen=True)
class RoundResult:
    """What became of a round."""

    counted: Sequence[Contribution]
    """Those that are in it."""
    payloads: list[Buffer]
    """The reply, one a part."""
    checksum: int
    """Of the base after it; 0 where the hub holds no base."""
    inputs: tuple[tuple[Buffer, ...], ...]
    """What the journal needs beside the reply, where that leaves something out."""
    cuts: Cuts


@dataclass
class _Early:
    """What was merged of a round before it was whole."""

    merged: Vector | None = None
    heard: dict[int, int] = field(default_factory=dict)
    """Members that a part has come from."""
    payloads: list[list[Buffer]] = field(default_factory=list)
    """Of each part that is in `merged`: what it was made of, in order."""

    def has(self, part: int, chosen: Sequence[Contribution]) -> bool:
        """Whether the part was made of just these contributions."""
        if part >= len(self.payloads) or len(self.payloads[part]) != len(chosen):
            return False
        pairs = zip(self.payloads[part], chosen, strict=True)
        return all(payload is contribution.payloads[part] for payload, contribution in pairs)


class Merger:
    """Owns the base, a flat float32 vector [elements], and what lossy replies have left out of it.

    `rule` closes the slices, `codec` reads contributions, `reply_codec` writes replies. Codecs that
    look at tensors are bound to the layout that `bind` is told. Without `keeps_base` (gradient
    strategies) the base is kept until the first round only, for members that have not begun.
    `masked`: contributions cannot be read, and only their sums are ever known.
    """

    def __init__(
        self,
        rule: SliceRule | RoundRule,
        codec: Codec,
        reply_codec: Codec,
        *,
        keeps_base: bool,
        masked: bool,
    ) -> None:
        self.rule = rule
        self._by_slice = None if isinstance(rule, RoundRule) else rule
        self.keeps_late = rule.keeps_late
        """Whether a contribution that missed its round may join the next one."""
        self.codecs = codec, reply_codec
        """As the job names them."""
        self.codec, self.reply_codec = self.codecs
        """Bound to the model, once there is one."""
        self.base: Vector | None = None
        self.replies = Feedback(reply_codec, 0)
        self._keeps_base = keeps_base
        self._masked = masked
        self._elements = 0
        self._memory = VectorPool(0)
        self._early = _Early()

    # -- the model ----------------------------------------------------------------------------

    def bind(self, layout: Layout, elements: int) -> None:
        """The model is this one; an empty layout: its tensors are not known. ConfigError if the
        codecs cannot do with it; then nothing has changed."""
        self.codec, self.reply_codec = (bound(codec, layout) for codec in self.codecs)
        self._elements = elements

    def begin(self, base: Vector) -> int:
        """Training begins from these parameters, which are the merger's from now on; their
        checksum."""
        self._make_room()
        self.base = base
        return combine(tile_sum(base[tile]) for tile in tiles(base.size))

    def forget_base(self) -> None:
        """Nobody will be given the base any more."""
        self.base = None

    def _make_room(self) -> None:
        self._memory = VectorPool(self._elements)
        self.replies = memory(self.reply_codec, self._elements)

    def unsent(self) -> dict[str, Vector]:
        """What replies have left out so far, for a journal; views."""
        return {} if self.replies.lossless else self.replies.state()

    def restore(self, state: State) -> None:
        """Go on from what a journal kept."""
        layout = layouts.read(state.layout, state.elements) if state.layout else ()
        self.bind(layout, state.elements)
        self._make_room()
        if not self.replies.lossless:
            self.replies.restore(state.memory)
        self.base = None if state.base is None else state.base.copy()

    # -- what is asked of a contribution ------------------------------------------------------

    @property
    def parts(self) -> int:
        """In how many parts a contribution comes."""
        return -(-self._elements // self.codec.part_elements)

    def expected(self, part: int) -> tuple[int, int]:
        """Elements in this part of a contribution, and the most bytes that its payload takes."""
        most = self.codec.part_elements
        elements = min(most, self._elements - part * most)
        return elements, self.codec.max_bytes(elements)

    # -- before a round is whole --------------------------------------------------------------

    def hears(self, part: int, members: int) -> bool:
        """One more member's part for the oldest open round is here; whether it may be time to merge
        that part of all of them. A rule that judges whole rounds never does that early."""
        if self._by_slice is None:
            return False
        early = self._early
        early.heard[part] = early.heard.get(part, 0) + 1
        return early.heard[part] >= members and part == len(early.payloads)

    def merge_early(self, part: int, chosen: Sequence[Contribution]) -> None:
        """Merge the part, which is here from everyone, while the others are still on their way. One
        that is never seen whole here, or turns out otherwise, is merged at the close."""
        early = self._early
        if early.merged is None:
            early.merged = self._memory.borrow_vector()
        with contextlib.suppress(Spoilt):  # the close will meet it again
            self._merge_part(chosen, part, early.merged)
            early.payloads.append([contribution.payloads[part] for contribution in chosen])

    # -- a round ------------------------------------------------------------------------------

    def close(self, given: Sequence[Contribution], end: Sum | None = None) -> RoundResult:
        """Merge a round's contributions, in the order of their members' names, and add the reply to
        the base. `end`: what became of masked ones. Raises Spoilt if one has to be left out;
        then the base is as it was."""
        counted, merged, cuts = (
            self._merge(given) if end is None else _summed(given, end, self._memory.borrow_vector())
        )
        if not self.replies.lossless and counted:
            self._check_size(merged, counted)
        payloads = self.replies.encode(merged)
        checksum = self._advance(merged, payloads)
        inputs: tuple[tuple[Buffer, ...], ...] = ()
        if not self.replies.lossless:
            masked_mean = ((merged.data.cast("B"),),)
            inputs = masked_mean if end is not None else tuple(c.payloads for c in given)
        return RoundResult(counted, payloads, checksum, inputs, cuts)

    def replay(self, record: Round) -> int:
        """The same round again, from what a journal kept of it; the checksum of the base after
        it."""
        if self.replies.lossless:
            merged = self._memory.borrow_vector()
            parts = parts_of(self._elements, self.reply_codec.part_elements)
            for here, payload in zip(parts, record.reply, strict=True):
                self.reply_codec.decode(payload, merged[here])
        else:
            merged = self._merged_again(record)
            self.replies.encode(merged)  # for what it leaves out
        return self._advance(merged, record.reply)

    def _merged_again(self, record: Round) -> Vector:
        """What became of these contributions: the same again. Masked ones are there as their mean,
        which is all that was ever known."""
        if self._masked:
            return np.frombuffer(record.inputs[0][0], np.float32)
        return self._merge(
            [
                Contribution(counted.member, counted.weight, 0, payloads)
                for counted, payloads in zip(record.counted, record.inputs, strict=True)
            ]
        )[1]

    def _merge(self, chosen: Sequence[Contribution]) -> tuple[Sequence[Contribution], Vector, Cuts]:
        """What counts of the contributions, what they became, and who was cut."""
        early, self._early = self._early, _Early()
        merged = self._memory.borrow_vector() if early.merged is None else early.merged
        if not chosen:
            merged[:] = 0
            return chosen, merged, ()
        if isinstance(self.rule, RoundRule):
            return self._merge_round(self.rule, chosen, merged)
        for part in range(self.parts):
            if not early.has(part, chosen):
                self._merge_part(chosen, part, merged)
        return chosen, merged, ()

    def _merge_part(self, chosen: Sequence[Contribution], part: int, merged: Vector) -> None:
        assert self._by_slice is not None
        start = part * self.codec.part_elements
        out = merged[start : start + self.codec.part_elements]
        pieces = [ContributionPiece(contribution, part, self.codec) for contribution in chosen]
        with np.errstate(over="ignore", invalid="ignore"):
            self._by_slice.merge(pieces, out)
        if not all_finite(out):
            find_spoilt(chosen, part, self.codec, np.empty_like(out))

    def _merge_round(
        self, rule: RoundRule, chosen: Sequence[Contribution], merged: Vector
    ) -> tuple[Sequence[Contribution], Vector, Cuts]:
        """By a rule that gives each member one voice: of one that was late the newest counts."""
        newest = {contribution.member: contribution for contribution in chosen}
        counted = list(newest.values())
        parts = list(parts_of(self._elements, self.codec.part_elements))
        pieces = [
            [Guarded(contribution, part, self.codec) for part in range(len(parts))]
            for contribution in counted
        ]
        found = rule.merge_round(pieces, [merged[here] for here in parts])
        names = [*newest, "hub"]
        cuts = [(names[cut.index], cut.share, cut.reason) for cut in found]
        cuts += [
            (c.member, 1.0, "a newer one of the same member counts in this round")
            for c in chosen
            if c is not newest[c.member]
        ]
        return counted, merged, tuple(cuts)

    def _check_size(self, merged: Vector, chosen: Sequence[Contribution]) -> None:
        """Raise Spoilt for whoever sent the largest numbers, where lossy replies could not carry
        what became of them."""
        if _size(merged) <= MOST_MAGNITUDE or self._masked:
            return
        sizes = []
        scratch: Vector = np.empty_like(merged)
        for contribution in chosen:
            for part, here in enumerate(parts_of(self._elements, self.codec.part_elements)):
                ContributionPiece(contribution, part, self.codec).read(scratch[here])
            sizes.append(_size(scratch))
        largest = chosen[int(np.argmax(sizes))]
        raise Spoilt(largest, f"an element of {max(sizes):g} is more than replies can carry")

    def _advance(self, merged: Vector, payloads: Sequence[Buffer]) -> int:
        """base += what the members will decode; the checksum of the new base (0: no base here)."""
        if not self._keeps_base:
            self.forget_base()
        if self.base is None:
            return 0
        sums = []
        parts = parts_of(self._elements, self.reply_codec.part_elements)
        for here, payload in zip(parts, payloads, strict=True):
            reply = merged[here]
            if not self.reply_codec.lossless:
                reply = np.empty(here.stop - here.start, np.float32)
                self.reply_codec.decode(payload, reply)
            for tile in tiles(here.stop, here.start):
                base = self.base[tile]
                with np.errstate(over="ignore", invalid="ignore"):  # members will notice
                    base += reply[tile.start - here.start : tile.stop - here.start]
                sums.append(tile_sum(base))
        return combine(sums)


def _summed(
    given: Sequence[Contribution], end: Sum, merged: Vector
) -> tuple[Sequence[Contribution], Vector, Cuts]:
    """What counts of contributions that nobody but their senders can read."""
    merged[:] = 0 if end.vector is None else end.vector
    if end.vector is None:
        return [], merged, (("hub", 1.0, end.reason),)
    return given, merged, ()


def _size(vector: Vector) -> float:
    return max(float(vector.max()), -float(vector.min()))
