"""The rounds of a site: contributions come in, one contribution goes up, a reply comes down.

A site's round has two ends. It closes as a hub's does (`close`): its members' weighted mean is the
contribution of the whole site, which is in the journal before it leaves; with that the members'
contributions are kept for good. And it is answered (`answer`) when the reply of the hub above is
here, which goes to the members as it came. Between both lie the rounds that are on their way:
`collecting` is the oldest round that has not closed, `round` the oldest that has no answer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from edgetrain.errors import Diverged
from edgetrain.exchange.delay import MARGIN
from edgetrain.exchange.hub.delay import REMEMBERED, Wish
from edgetrain.exchange.hub.effects import Closed, Effect, Write
from edgetrain.exchange.hub.open_rounds import counted as counted_once
from edgetrain.exchange.hub.records import Above, Round, Sent, State
from edgetrain.exchange.hub.rounds import Due, Rounds, mark_late
from edgetrain.exchange.messages import NO_WEIGHT
from edgetrain.exchange.seam import CatchUp, Entry, RoundReply
from edgetrain.vectors.vector import Vector


class SiteRounds(Rounds):
    """The rounds of one site, in order.

    `kept` are the contributions of the site that the hub above may not have merged for good, by
    round; `outgoing` those that are to be sent, once what was written before is in the journal.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.merger.is_below = True
        self.kept: dict[int, Sent] = {}
        self.outgoing: list[Sent] = []
        self._next_up = 0
        self._waited: dict[int, dict[str, float]] = {}
        self._about: dict[int, tuple[tuple[str, ...], tuple[str, ...], float]] = {}
        """Rounds on their way: contributors, missing members, and seconds open."""

    @property
    def collecting(self) -> int:
        return self._next_up

    @property
    def oldest_number(self) -> int:
        """See Rounds. The fleet may have answered rounds that this site has not contributed to."""
        return max(self._next_up, self.round)

    # -- the fleet begins, or this site goes on where it stands --------------------------------

    def begin(self, base: Vector, entry: Entry) -> None:
        """The fleet trains from this base, which belongs to the rounds from now on. Raises Diverged
        if it is not the one that the hub above says."""
        self._set_base(base, entry.applied, entry.checksum)
        self._next_up = entry.round
        if entry.round:
            self.delay.restore(entry.delay.steps, entry.steps_now)
            before = (entry.round - entry.applied) * self.delay.local_steps
            self.delay.merged_steps = max(0, entry.steps - before)

    def skip_to(self, round: int) -> bool:
        """Contribute again from this round on. Returns whether members have to be told."""
        is_behind, self._next_up = round > self._next_up, max(round, self._next_up)
        self.open_rounds.carry_over(self._next_up, self.merger.keeps_late)
        return is_behind

    def jump(self, missed: CatchUp) -> None:
        """Go on from another base, after replies that nobody has any more."""
        assert missed.base is not None
        self.delay.merged_steps += (missed.applied - self.round) * self.delay.local_steps
        self.delay.restore(missed.delay, missed.local_steps)
        self._set_base(missed.base, missed.applied, missed.checksum)

    def _set_base(self, base: Vector, applied: int, checksum: int) -> None:
        self.round = applied
        found = self.merger.start(base)
        if found != checksum:
            raise Diverged(
                f"the base after {applied} replies has checksum {found:016x} at this gateway, "
                f"{checksum:016x} at the hub above"
            )
        self.checksums.add_known(applied, found)

    def restore(self, state: State) -> None:
        super().restore(state)
        assert state.above is not None
        self._next_up = state.above.next_round
        self.kept = {sent.round: sent for sent in state.above.kept}

    def replay_sent(self, record: Sent) -> None:
        self.kept[record.round] = record
        self._next_up = record.round + 1

    def place(self, session: int, name: str, index: int) -> Above:
        kept = tuple(self.kept[round] for round in sorted(self.kept))
        return Above(session, name, index, self._next_up, kept)

    def steps_before(self, round: int) -> int:
        """See Rounds: those of rounds on their way, too."""
        on_way = [
            self.kept[each].applied for each in sorted(self.kept) if self.round <= each < round
        ]
        later = max(0, round - self.round - len(on_way))
        applied = [*on_way, *[self.round] * later]
        return self.delay.merged_steps + sum(map(self.delay.length_after, applied))

    # -- a round goes up ----------------------------------------------------------------------

    def close(self, due: Due, now: float) -> list[Effect]:
        """Merge the site's contributions to a round, for the hub above. Raises Spoilt, and leaves
        the round open, if one has to be left out."""
        round, entry = self.collecting, due.entry
        counted, merged = self.merger.merge_site(round, entry.in_order)
        self.open_rounds.remove(round, len(due.missing))
        effects = mark_late(self._members, round, due.missing)
        wishes = [c.wish for c in entry.in_order if c.wish is not None]
        applied = statistics.median_low([wish.applied for wish in wishes] or [self.round])
        wanted, step_s = self._site_wish(wishes)
        self._waited[round] = {wish.member: now - wish.arrived for wish in wishes}
        self._waited.pop(round - REMEMBERED, None)
        sent = Sent(
            round, counted_once(entry.by_key), sum(c.weight for c in counted) or NO_WEIGHT,
            len(wishes), applied, self.checksums.likeliest(applied), wanted, step_s,
            merged.data.cast("B"),
        )  # fmt: skip
        self.kept[round] = sent
        self.outgoing.append(sent)
        self._next_up = round + 1
        self._about[round] = entry.members, due.missing, max(0.0, now - entry.opened)
        entry.mark_merged()
        return [*effects, Write(sent)]

    def _site_wish(self, wishes: Sequence[Wish]) -> tuple[int, float]:
        """The steps, and the seconds of each, that would have hidden the longest trip of the site's
        members: without what a contribution waited here for those of others."""
        timed = [wish for wish in wishes if wish.steps]
        slowest = max((wish.step_s for wish in timed or wishes), default=1.0)
        longest = 0.0
        for wish in timed:
            waited = self._waited.get(wish.applied - 1, {}).get(wish.member, 0.0)
            longest = max(longest, wish.steps * wish.step_s - MARGIN * waited)
        return math.ceil(round(longest / slowest, 6)), slowest

    def note_settled(self, kept: Sequence[int]) -> None:
        """The hub above has merged all sent contributions but those to these rounds."""
        waiting = {*kept, *(sent.round for sent in self.outgoing)}
        self.kept = {round: sent for round, sent in self.kept.items() if round in waiting}

    # -- and is answered ----------------------------------------------------------------------

    def answer(self, reply: RoundReply) -> list[Effect]:
        """Send the reply from above to the members. Diverged where the base is another one."""
        record = Round(
            reply.round, (), reply.delay, self.checksums.get(reply.round), reply.checksum,
            tuple(reply.payloads), (), reply.local_steps, members=reply.members,
        )  # fmt: skip
        try:
            self.replay(record)
        except Diverged as diverged:
            raise Diverged(f"the hub above and this gateway differ: {diverged.message}") from None
        members, missing, open_s = self._about.pop(reply.round, ((), (), 0.0))
        weight = self.kept[reply.round].weight if reply.round in self.kept else 0.0
        closed = Closed(
            reply.round, members, missing, weight, open_s, reply.delay, (), self.delay.local_steps
        )
        return [Write(record), *self._answer(record, reply.members), closed]
