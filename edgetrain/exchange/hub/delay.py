"""How many rounds a job's members may be ahead of their replies: the delay in force, the length of
rounds, and what follows from them.

Numbers of rounds and steps, and what members and the hub have measured. No message, no clock.

With an automatic delay, `agree` at turns 1, 3, 6, 12, … (rounds merged) decides, in this order:

    replies take                          delay D           steps in a round K
    not known yet                         as before         as before
    longer than D, which was enough, and  as before         as long as a round takes
    rounds take longer than their steps
    long, and members diverge             two fifths of K   as long, in the run's bounds
    more than the run can bear            as long as it can longer, in proportion
    anything else                         as long           as before, but not over twice D

What a run can bear is said by `Delay.together`; rounds grow up to half of that. Where rounds begin
faster than they close, the hub or a link is the bottleneck: a longer delay would lengthen its
queue, and hide nothing.

The third row is `Delay.overlaps`: members wait for the rest of each trip. It needs long rounds, and
TCP forgets its window between these where a kernel lets it: messages of more than
`Delay.quick_bytes` would start slowly in each round, which takes longer than what is hidden, so
rounds stay short.

At the end of a run with a final sync, K and D are its own (`final_sync`), fixed or measured before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edgetrain.exchange.delay import APART_SHARE, MARGIN, MAX_IN_FLIGHT, Delay
from edgetrain.exchange.hub.final_sync import EVERY, FinalSync, share_for
from edgetrain.exchange.messages import MAX_COUNT

AUTO_ROUNDS = 3
"""With an automatic delay the fleet agrees on one after the first round, and again after this many,
and two, four, eight … times as many, when slow start is over and the link may have changed."""

MAX_AHEAD = 1024
"""Rounds that a member may be ahead of the oldest open one, whatever the delay."""

GREW = 1.1
"""A delay that was enough is so no more, and rounds take longer than their steps, from this factor
on; and rounds get longer than they take by it."""

REMEMBERED = 4 * MAX_IN_FLIGHT
"""Rounds for which it is known how long each contribution waited for the others."""


class Wish(NamedTuple):
    """What a member has measured, as its contribution says, and when that came."""

    member: str
    steps: int
    """The member's own steps in its last round trip; 0: not known."""
    step_s: float
    """Seconds of one of them."""
    applied: int
    """Replies applied: the round trip is that of the last one."""
    arrived: float
    sent: int = 0
    """Bytes of the contribution."""


def is_turn(round: int) -> bool:
    turns, odd = divmod(round + 1, AUTO_ROUNDS)
    return round == 0 or (not odd and turns.bit_count() == 1)


class AgreedDelay:
    """The delay of one job, in local steps, of which a round has `local_steps`.

    `steps` is what each member takes in the whole run; 0: not known. Rounds concern `ranges` of the
    vector in turn: after the last step all but one of these, whose round has just ended, have steps
    left, and a round each.
    """

    def __init__(self, local_steps: int, delay: Delay, steps: int = 0, ranges: int = 1) -> None:
        self.local_steps = local_steps
        """Steps in a round, in force now."""
        self._is_measured = delay.is_measured
        self.delay = local_steps if delay.is_measured else delay.steps
        """In force now. An automatic one begins with a round: nobody waits for the first reply
        before there is something to do meanwhile."""
        self.merged_steps = 0
        """Steps in the rounds merged so far."""
        self._lengths = [(0, local_steps)]
        """(replies after which members know it, steps in a round), of each change."""
        self._shortest, self._begun_with = local_steps, delay
        self.steps = steps
        """Local steps of the run; 0: not known."""
        self._last_rounds = ranges - 1
        self._one_in_flight, self._overlaps = delay.one_in_flight, delay.overlaps
        self._quick_bytes = delay.quick_bytes
        self._together = delay.together(local_steps, steps)
        self._longest = self.first // local_steps if delay.is_measured else 0
        """The most rounds in flight so far: members still act on it for a while."""
        self._is_enough = self._is_settled = False
        self._again = -1
        """A round that is a turn, too."""
        self._measured_from = 0
        """Replies that a member has applied at least whose last trip says anything."""
        self._waits: dict[int, dict[str, float]] = {}
        self._closed: list[float] = []
        """When the rounds since the last turn closed."""
        self._fixed = None if delay.is_measured else (local_steps, delay.steps)
        """(K, D) until the final sync, where they are not measured."""
        self._begin_final_sync([])
        self._lengths = [(0, self.local_steps)]

    def set_steps(self, steps: int) -> None:
        """Note how long the run is, unless that is known, or over by what is merged."""
        if self.steps or steps <= self.merged_steps:
            return
        self.steps, self._together = steps, self._begun_with.together(self._shortest, steps)
        if not self.merged_steps:
            self._begin_final_sync([])
            self._lengths = [(0, self.local_steps)]

    @property
    def most(self) -> int:
        """The longest delay that there may be, in steps: the job's, or what the run can bear."""
        return self._together - self.local_steps if self._is_measured and self.delay else self.delay

    @property
    def first(self) -> int:
        """The delay that members are told as training begins. Before anything is measured together,
        an automatic one is the longest: each takes what it has measured while joining, up to this.
        Where the run's length is not known, a round."""
        if self._is_measured and self.delay and self.steps and not self.merged_steps:
            return max(self.local_steps, self.most)
        return self.delay

    @property
    def final_sync(self) -> FinalSync | None:
        """The run's end, as K and D are now; None: there is none, or its length is not known."""
        share = self._begun_with.final_sync if self.steps else 0.0
        if share < 0:
            # A measured delay is at least a step, until the final sync.
            is_near = self._fixed is None and not self.delay
            share = share_for(share, MAX_COUNT if is_near else sum(self._fixed or self._now))
        local_steps, delay = self._fixed or (self.local_steps, 1)
        is_short = local_steps <= EVERY and not delay
        return FinalSync.of(share, self.steps) if share and not is_short else None

    @property
    def is_final_sync(self) -> bool:
        """Whether K and D in force are those of the final sync, or lead to it."""
        if self.final_sync is None:
            return False
        return not self.delay if self._fixed is None else self._now != self._fixed

    @property
    def _now(self) -> tuple[int, int]:
        return self.local_steps, self.delay

    def agree(self, round: int, wishes: Sequence[Wish], now: float) -> str:
        """This round closes with these contributions. Returns news for people, or ""."""
        applied = statistics.median_low([wish.applied for wish in wishes]) if wishes else round
        self.merged_steps += self.length_after(applied)
        told = self._agree(round, wishes, now) if self._is_measured and self.delay else ""
        told = self._begin_final_sync(wishes) or told
        self._note_length(round)
        return told

    def _begin_final_sync(self, wishes: Sequence[Wish]) -> str:
        """Let K and D be the final sync's, where it is near. Returns what people should know."""
        if (final_sync := self.final_sync) is None:
            return ""
        (local_steps, delay), was_near = self._now, self.is_final_sync
        self._longest = max(self._longest, delay // local_steps)
        self.local_steps, self.delay = final_sync.pace_after(self.merged_steps, local_steps, delay)
        if was_near or not self.is_final_sync:
            return ""
        trip_s = max((wish.steps * wish.step_s for wish in wishes), default=0.0) / MARGIN
        return final_sync.told(local_steps, delay, trip_s)

    def length_after(self, applied: int) -> int:
        """Steps in a round that a member ended after it had applied this many replies: a round that
        is in flight when rounds get longer is still as long as before."""
        return next((steps for since, steps in reversed(self._lengths) if since <= applied), 0)

    def _note_length(self, round: int) -> None:
        if self.local_steps != self._lengths[-1][1]:
            self._lengths.append((round + 1, self.local_steps))

    def _agree(self, round: int, wishes: Sequence[Wish], now: float) -> str:
        self._waits[round] = {wish.member: now - wish.arrived for wish in wishes}
        self._waits.pop(round - REMEMBERED, None)
        self._closed.append(now)
        if not is_turn(round) and round != self._again:
            return ""
        slowest = max((wish.step_s for wish in wishes if wish.steps), default=0.0)
        taken = self._steps_taken(wishes, slowest)
        lasts = self._lasts(slowest)
        self._closed = [now]
        if not taken:
            return ""
        self._is_settled = round >= AUTO_ROUNDS
        is_long = self._is_settled and taken > self.steps // APART_SHARE
        is_quick = (max(w.sent for w in wishes) or math.inf) <= self._quick_bytes
        if self._overlaps and is_long and is_quick:
            # Let rounds be as long as a reply takes, in the run's bounds, and hide a part of it
            before, self._is_enough = self.local_steps, False
            self.local_steps = max(self._shortest, min(taken, 5 * self._together // 7))
            self.delay = max(1, 2 * self.local_steps // 5)
            rounds = math.ceil(max(0, self.steps - self.merged_steps) / self.local_steps)
            waits_s = rounds * max(0.0, taken / MARGIN - self.delay) * slowest
            told = self._told(
                before,
                f"a round trip takes {taken} steps; {self.delay} of them overlap with training. A "
                "longer delay would cost accuracy on unequal data, so members wait "
                f"{waits_s:.3g} s in total",
                "strategy.local_steps and strategy.delay say others",
            )
        else:
            told = self._decide(taken, lasts, any(wish.applied for wish in wishes))
        self._longest = max(self._longest, self.delay // self.local_steps)
        return told

    def agree_again(self, round: int) -> None:
        """Agree on an automatic delay when this round closes, too: messages change their length."""
        self._again, self._is_enough = round, False

    def known(self, wishes: Iterable[Wish | None]) -> list[Wish]:
        """The wishes that are there; of trips during a pause they say nothing."""
        return [
            each if each.applied >= self._measured_from else each._replace(steps=0)
            for each in wishes
            if each is not None
        ]

    def note_pause(self, round: int) -> None:
        """No round closed for a while, and `round` is the oldest open one: the trips of those under
        way took that long, too, and no delay follows from them."""
        self._measured_from = round + self.in_flight + 2
        self._again = round + 2 * self.in_flight + 2

    def _lasts(self, slowest: float) -> float:
        """Steps of the slowest member between two rounds' ends, lately; 0: not known."""
        newer = self._closed[len(self._closed) // 2 :]
        if not slowest or len(newer) < 2:
            return 0.0
        return (newer[-1] - newer[0]) / (len(newer) - 1) / slowest

    def _steps_taken(self, wishes: Sequence[Wish], slowest: float) -> int:
        """Steps of the slowest member that hide the longest round trip. What a contribution has
        waited for those of others is not the trip's: a longer delay would not shorten it."""
        longest = 0.0
        for wish in wishes:
            steps = float(wish.steps)
            if wish.steps:
                waited = self._waits.get(wish.applied - 1, {}).get(wish.member, 0.0)
                steps = max(0.0, wish.steps * wish.step_s - MARGIN * waited) / slowest
            longest = max(longest, steps)
        return math.ceil(round(longest, 6))

    def _decide(self, taken: int, lasts: float, is_measured: bool) -> str:
        before = self.local_steps
        # Not before slow start is over: TCP would begin anew in the pauses of longer rounds.
        one_in_flight = self._one_in_flight and self._is_settled
        if one_in_flight:
            steps = self.local_steps
            if self.delay == steps and steps <= 2 * taken <= 2 * GREW * steps + 2:
                taken = steps  # members that read replies at a round's end see it as the trip
            one_in_flight = 2 * taken <= self._together
            if one_in_flight:
                self._lengthen(taken)
            else:  # hiding replies comes first
                self.local_steps = max(self._shortest, min(steps, self._together - taken))
        grew = self._is_enough and taken > GREW * self.delay and lasts > GREW * self.local_steps
        if grew:
            self._lengthen(GREW * lasts)
            self.delay = min(self.delay, self.most)
            told = self._told(
                before,
                f"a round takes at least {math.ceil(lasts)} steps of time; the bottleneck is the "
                "hub, a link or a busy machine",
                "a smaller codec, fewer members on a machine",
            )
        elif taken > self.most:
            self._lengthen(self.local_steps * taken / self.most)
            self.delay = self.most
            told = self._told(
                before,
                f"a round trip takes {taken} steps, and the delay of this run is at most "
                f"{self.most}",
                "a nearer hub, or more or longer steps; a smaller codec where links are slow",
            )
        else:
            self.delay, told = taken, ""
            most = max(self._shortest, taken if one_in_flight else 2 * taken)
            self.local_steps = min(self.local_steps, most)
        if one_in_flight:
            self.delay = min(self.delay, self.local_steps)
        self._is_enough = is_measured and (grew or taken <= self.most)
        return told

    def _lengthen(self, steps: float) -> None:
        self.local_steps = max(self.local_steps, min(math.ceil(steps), self._together // 2))

    def _told(self, before: int, why: str, way_out: str) -> str:
        if self.local_steps == before:
            return ""
        steps = self.local_steps
        return f"round length raised from {before} to {steps} steps: {why} ({way_out})"

    def to_keep(self) -> tuple[int, int]:
        """(local_steps, merged_steps) for a journal; 0 where they follow from the job."""
        changes = self._is_measured or self.final_sync is not None
        return (self.local_steps, self.merged_steps) if changes else (0, 0)

    def restore(self, delay: int, local_steps: int = 0) -> None:
        """A journal says that these are in force; `local_steps` 0: before rounds could grow."""
        self.delay = delay
        self.local_steps = local_steps or self.local_steps
        self._lengths = [(0, self.local_steps)]

    def replay(self, round: int, delay: int, local_steps: int = 0) -> None:
        """A journal says that this round was merged, and that these are in force since. It does not
        say after how many replies members ended the round: all that were due by then."""
        self.merged_steps += self.length_after(max(0, round - self.delay // self.local_steps))
        self.delay, self.local_steps = delay, local_steps or self.local_steps
        self._note_length(round)

    def end_after(self, merged: int) -> int:
        """The round after the run's last one, as rounds are long now; MAX_COUNT: not known."""
        if not self.steps:
            return MAX_COUNT
        if (final_sync := self.final_sync) is not None:
            rounds = final_sync.rounds_after(self.merged_steps, self.local_steps)
        else:
            rounds = -((self.merged_steps - self.steps) // self.local_steps)
        return merged + rounds + self._last_rounds

    @property
    def in_flight(self) -> int:
        """Rounds that a member may be ahead of its replies."""
        return self.delay // self.local_steps + 1

    @property
    def slack(self) -> int:
        """Rounds that a member may be ahead of the hub, or behind: four times what its delay needs,
        because delays change and newcomers begin ahead. The hub keeps what it sends until then."""
        return min(MAX_AHEAD, 4 * (max(self._longest, self.delay // self.local_steps) + 2))
