"""How much of a vector a message of `codec = "auto"` carries: the rung in force, and when it moves.

Numbers of bytes and seconds, and what members and the hub have measured. No message, no clock.

The hub decides for everyone, by the slowest link: its replies say their rung, and members encode on
the rung of the last reply that they have applied. A round's messages should take no longer, both
ways together, than the round's steps do on the slowest member; so links carry them while members
compute, whatever the delay. They and the latency should fit into the longest delay that the run can
bear, too (`spare_s`).

What a link carries follows from round trips, as the delay does: latency is the shortest trip that
a member has seen, and the bytes of a round over what its trip took beyond that are the rate. Of the
last few rates the best one counts: TCP's slow start, and a member that was busy, make rates look
smaller than they are, and nothing makes them look larger. (So does BBR, by a link's best rate and
shortest trip.)

    measured on this rung         the rung
    by not all members            stays
    a finer one would fit         climbs, to LEAP times the bytes at most
    it does not fit               goes down to one that does; it is LASTING rounds until it climbs
                                  again, and twice as many after each time
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from edgetrain.codecs.auto import RUNGS, element_bytes, finest_rung
from edgetrain.exchange.delay import MARGIN
from edgetrain.exchange.hub.delay import GREW, REMEMBERED, Wish

LEAP = 8.0
"""Messages become at most this many times longer at once: rates of short ones are inexact."""

LASTING = 3
"""Rounds measured before messages become shorter."""

NEWEST = 8
"""Rates of a member that are remembered."""


def spare_s(local_steps: int, step_s: float, latency_s: float, most_delay: int) -> float:
    """Seconds that one round's messages may take, both ways together.

    `local_steps` of `step_s` seconds are in a round; `most_delay`: steps of the longest delay; 0:
    replies are waited for whatever they take. Where not even the latency fits into the delay, a
    tenth of it.
    """
    computed_s = local_steps * step_s
    if not most_delay:
        return computed_s
    return min(computed_s, max(most_delay * step_s - latency_s, (MARGIN - 1) * latency_s))


def rung_for(
    elements: int, bytes_per_s: float, seconds: float, floor: float, most: float = 1.0
) -> int:
    """The highest density at which a contribution and its reply take at most `seconds` (`most`
    times as long) at `bytes_per_s`."""
    return finest_rung(elements, most * bytes_per_s * seconds / 2, floor)


class AgreedDensity:
    """The hub's measurements of its members' links, and its decisions."""

    def __init__(self, floor: float) -> None:
        self.next_rung: int | None = None
        """Density level of the next reply; None: undecided since the hub began, so the last one."""
        self._floor = floor
        self._moved: dict[int, dict[str, int]] = {}
        """Bytes of each member's contribution to a round, and its reply."""
        self._waits: dict[int, dict[str, float]] = {}
        self._latency: dict[str, float] = {}
        self._rates: dict[str, deque[float]] = {}
        self._since = 0
        """The first round whose reply is on this rung."""
        self._measured = 0
        """Rounds since then for which the rates of all members are known."""
        self._patience = 1
        self._has_told = False

    def agree(
        self,
        round: int,
        wishes: Sequence[Wish],
        now: float,
        *,
        rung: int,
        elements: int,
        reply_bytes: int,
        local_steps: int,
        most_delay: int,
    ) -> tuple[int, str]:
        """This round closes with a reply on this `rung`. Returns `next_rung`, and news or ""."""
        self.next_rung = rung
        self._moved[round] = {wish.member: wish.sent + reply_bytes for wish in wishes}
        self._waits[round] = {wish.member: now - wish.arrived for wish in wishes}
        for known in (self._moved, self._waits):
            known.pop(round - REMEMBERED, None)
        known_to = [wish for wish in wishes if wish.steps and self._note(wish)]
        if not known_to or len(known_to) < len(wishes):
            return rung, ""
        self._measured += 1
        step_s = max(wish.step_s for wish in wishes)
        links = [
            (
                max(self._rates[each.member]),
                self._spare(each, local_steps, step_s, most_delay),
                each,
            )
            for each in wishes
        ]
        rate, spare, slowest = min(links, key=lambda link: link[0] * link[1])
        fits = rung_for(elements, rate, spare, self._floor)
        slack = rung_for(elements, rate, spare, self._floor, GREW)
        then = rung
        if fits < rung and self._measured >= self._patience:
            leap = LEAP * element_bytes(rung)
            then = next(r for r in range(fits, rung + 1) if element_bytes(r) <= leap)
        elif slack > rung and self._measured >= LASTING:
            then, self._patience = slack, max(LASTING, 2 * self._patience)
        if then == rung and (self._has_told or fits != rung):
            return rung, ""
        self._has_told = True
        if then != rung:
            self._since, self._measured = round + 1, 0
            self._rates = {}
        self.next_rung = then
        return then, _told(rung, then, fits, elements, rate, spare, slowest.member)

    def _spare(self, wish: Wish, local_steps: int, step_s: float, most_delay: int) -> float:
        return spare_s(local_steps, step_s, self._latency[wish.member], most_delay)

    def _note(self, wish: Wish) -> bool:
        """Note what a member has measured. Whether a rate of it is known on this rung."""
        name, of = wish.member, wish.applied - 1
        waited = self._waits.get(of, {}).get(name, 0.0)
        trip_s = max(0.0, wish.steps * wish.step_s / MARGIN - waited)
        latency = self._latency[name] = min(self._latency.get(name, trip_s), trip_s)
        moved = self._moved.get(of, {}).get(name, 0)
        if moved and of >= self._since:
            # A member looks for replies once a step: up to a step is not the link's.
            taken_s = max(trip_s - latency - wish.step_s, 1e-6)
            self._rates.setdefault(name, deque(maxlen=NEWEST)).append(moved / taken_s)
        return name in self._rates


def _told(
    rung: int, then: int, fits: int, elements: int, rate: float, spare: float, name: str
) -> str:
    change = RUNGS[then].name if then == rung else f"{RUNGS[then].name} ({RUNGS[rung].name} before)"
    size, takes, at = 2 * elements * element_bytes(then), "take", ""
    if not then > fits and then:  # what did not fit
        size, takes = 2 * elements * element_bytes(then - 1), "would take"
        at = f"at {RUNGS[then - 1].name} "
    took = f"{size / rate:.2g} s" if size / rate >= 1e-3 else "no measurable time"
    return (
        f"{change}: {at}{_bytes(size)} to and from {name}, the slowest member, {takes} {took}; "
        f"a round leaves {spare:.2g} s"
    )


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
