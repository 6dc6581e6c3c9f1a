"""A member's exchange with several hubs, whose ranges may move from one to another.

The lead says where all hubs are, and that ranges are about to move (`Map`):

=========================  =======================================================================
map                        what a member does
=========================  =======================================================================
of hubs that it did not    before it enters there: joins these, too
know, as it joins
that ranges are to move    contributes to no round from `round` on before the next map
by which they have moved   takes all replies to earlier rounds, which are on their way; then goes
                           on over links to the hubs by that map, as after a lost connection
=========================  =======================================================================

What the links had is divided anew: what lossy contributions have left out, and contributions that
are kept, whose parts never cross the border of a range. If a reply is lost on the way meanwhile,
all hubs are asked for their base.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from edgetrain.errors import BadMessage
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.member.ranges import RangedExchange
from edgetrain.exchange.messages import Contribute, Map
from edgetrain.exchange.seam import CatchUp, Entry, Past, Request, RoundReply, Submission
from edgetrain.exchange.transport import Traffic
from edgetrain.vectors.ranges import Stretch
from edgetrain.vectors.vector import Buffer, Vector, zeros

if TYPE_CHECKING:
    from edgetrain.strategies.factored import Factors

Dial = Callable[[str, str], Link]
"""Makes a link to the hub at an address, whose public key is this text ("": it is not said)."""

LEAD = ""
"""The name of the hub that all join; others are called by their addresses."""


class _LostReplies(Exception):
    """A link waits for a hub that does not serve these ranges any more."""


@dataclass
class _Held:
    """Replies of a stretch that came over a link which has been replaced."""

    own: slice
    whose: str
    replies: deque[RoundReply] = field(default_factory=deque)


class SharedExchange(RangedExchange):
    """A RangedExchange that follows the lead's maps. Over one link it does as the link does.

    `links` are those to the hubs that are known before, the lead's first, `names` the addresses of
    the others; `dial` makes more.
    """

    def __init__(self, links: Sequence[Link], dial: Dial, names: Sequence[str] = ()) -> None:
        super().__init__(links)
        self._dial = dial
        self._names = [LEAD, *names]
        self._since = [0 for _ in links]
        """The first round whose reply comes over each link."""
        self._held: list[_Held] = []
        self._number = 0
        """Number of the links' map."""
        self._settled: Map | None = None
        self._ends = 0
        """The first round that does not come over the links as they are, if `_has_moved`."""
        self._coming: Map | None = None
        self._is_lost = False
        """Whether a reply was lost on the way, so that all are asked for their base."""
        self._request = Request("")
        self._elements = 0
        self._gone = Traffic(0, 0, 0, 0.0)
        """Counted at hubs that are not there any more."""
        self._lead.on_map = self._note_map

    # -- maps ----------------------------------------------------------------------------------

    def _note_map(self, map: Map) -> None:
        if map.trying and (self._coming is None or map.number >= self._coming.number):
            self._coming = map
        if not map.trying and (self._settled is None or map.number > self._settled.number):
            self._ends = self._ends if self._has_moved else map.round
            self._settled = map
        if self._coming and self._settled and self._coming.number <= self._settled.number:
            self._coming = None

    @property
    def _has_moved(self) -> bool:
        """Whether the newest map is not the one that the links are by."""
        return self._settled is not None and self._settled.number > self._number

    def _pulse(self, waiting: Link) -> None:
        super()._pulse(waiting)
        if self._has_begun and self._has_moved and waiting.is_away and waiting in self._links:
            raise _LostReplies

    # -- joining -------------------------------------------------------------------------------

    def join(
        self, request: Request, params: Vector, checksum: int, past: Past | None = None
    ) -> Entry:
        self._request, self._elements = request, params.size
        entry = super().join(request, params, checksum, past)
        for link in self._links:
            link.go_by_map(self._number)
        return entry

    def _enter(self, name: str, request: Request, params: Vector, past: Past | None) -> None:
        map = self._settled
        if map is not None and not self._are_entered and (map.number or len(self._links) == 1):
            rows, known = self._rows(map), dict(zip(self._names, self._links, strict=True))
            self._number, self._names = map.number, [name for name, _, _ in rows]
            self._links = [
                known.pop(at) if at in known else self._link_to(at, key) for at, key, _ in rows
            ]
            self._since = [0 for _ in rows]
            for link in known.values():
                link.vanish()
        super()._enter(name, request, params, past)

    def _link_to(self, name: str, key: str) -> Link:
        link = self._dial(name, key)
        link.interrupt = partial(self._pulse, link)
        return link

    def _rows(self, map: Map) -> list[tuple[str, str, Stretch]]:
        """(name, key, ranges) of each hub, in order. Raises BadMessage for a map that leaves a
        range to none, or to two."""
        count = self._lead.stretch.count
        spans = [(LEAD, "", map.first, map.end), *(row[1:] for row in map.rows)]
        spans.sort(key=lambda row: (row[2], row[3], row[0]))
        borders = [row[2] for row in spans] + [count]
        if [0, *(row[3] for row in spans)] != borders or len({row[0] for row in spans}) < len(
            spans
        ):
            raise BadMessage(f"a map in which ranges have no hub, or two: {spans}"[:200])
        return [(name, key, Stretch(count, first, end)) for name, key, first, end in spans]

    # -- as one link ---------------------------------------------------------------------------

    @property
    def _is_plain(self) -> bool:
        """Whether there is one hub, and has been from the first."""
        return len(self._links) == 1 and not self._since[0]

    def factors(self) -> Factors | None:
        return self._lead.factors() if self._is_plain else None

    def unsent(self) -> dict[str, Vector]:
        return self._lead.unsent() if self._is_plain else super().unsent()

    def restore_unsent(self, unsent: Mapping[str, Vector]) -> None:
        if self._is_plain:
            self._lead.restore_unsent(unsent)
        else:
            super().restore_unsent(unsent)

    def end(self, round: int) -> None:
        if self._is_plain:
            self._lead.end(round)

    # -- contributions and replies ---------------------------------------------------------------

    def submit(self, submission: Submission) -> Vector | None:
        """See Exchange. Waits while ranges move."""
        while self._has_moved or (self._coming and submission.round >= self._coming.round):
            try:
                if self._has_moved:
                    self._move()
                else:
                    self._lead.take_next()
            except _LostReplies:
                continue
        return self._lead.submit(submission) if self._is_plain else super().submit(submission)

    def _own_part(self, number: int, submission: Submission) -> Submission:
        own, since = super()._own_part(number, submission), self._since[number]
        if own.applied >= since:
            return own
        # Of bases from before it had these ranges the hub knows no checksum, nor does this member.
        return replace(own, applied=since, checksum=0)

    def wait(self, round: int) -> RoundReply | CatchUp:
        while True:
            try:
                if self._has_moved:
                    self._move()
                return self._catch_up_all() if self._is_lost else self._wait(round)
            except _LostReplies:
                continue

    def _catch_up_all(self) -> CatchUp:
        found = self._catch_up([None for _ in self._links])
        self._is_lost, self._held = False, []
        return found

    def _wait(self, round: int) -> RoundReply | CatchUp:
        if self._is_plain:
            return self._lead.wait(round)
        found: list[tuple[slice, RoundReply, str]] = []
        for number, link in enumerate(self._links):
            if self._since[number] <= round:
                reply = link.wait(round)
                if isinstance(reply, CatchUp):
                    return self._catch_up_all()
                found.append((link.own, reply, self.whose(link)))
        found += [(each.own, each.replies.popleft(), each.whose) for each in self._held]
        self._held = [each for each in self._held if each.replies]
        for number, link in enumerate(self._links):
            self._known[number] = next((r.checksum for own, r, _ in found if own is link.own), 0)
        found.sort(key=lambda pair: (pair[0].start, pair[0].stop))
        return self._whole(found)

    def whose(self, link: Link) -> str:
        at = self._names[self._links.index(link)] if link in self._links else LEAD
        return f"the hub at {at}" if at else "the lead"

    def settle(self) -> bool:
        while True:
            try:
                if self._has_moved:
                    self._move()
                return super().settle()
            except _LostReplies:
                continue

    # -- ranges have moved -----------------------------------------------------------------------

    def _move(self) -> None:
        map = self._settled
        assert map is not None
        rows, before = self._rows(map), dict(zip(self._names, self._links, strict=True))
        stays = {name for name, _, own in rows if name in before and before[name].stretch == own}
        replaced = [link for name, link in before.items() if name not in stays]
        for link in replaced:
            self._take_replies(link)
        unsent, kept = self.unsent(), _Kept.of(replaced)
        marks = dict(zip(self._names, zip(self._since, self._known, strict=True), strict=True))
        self._links = [before[name] for name in before if name in stays]  # the others are not heard
        links = {
            name: before[name] if name in stays else self._follow(before.get(name), name, key, kept)
            for name, key, _ in rows
        }
        for name in before.keys() - links.keys():
            self._gone = Traffic.of_all([self._gone, before[name].traffic()])
            before[name].leave("its ranges are with another hub")
        self._names, self._links = [*links], [*links.values()]
        self._lead, self._number = links[LEAD], map.number
        marks = {name: mark for name, mark in marks.items() if name in stays}
        self._since = [marks.get(name, (map.round, 0))[0] for name in links]
        self._known = [marks.get(name, (map.round, 0))[1] for name in links]
        for name, link in links.items():
            link.go_by_map(map.number)
            if name not in stays:
                link.restore_unsent({n: vector[link.own] for n, vector in unsent.items()})
                kept.hand_over(link)

    def _take_replies(self, link: Link) -> None:
        """Hold the replies that the hub has given for these ranges. One that was lost on the way is
        nowhere any more."""
        held = _Held(link.own, self.whose(link))
        try:
            while link.applied < self._ends and not self._is_lost:
                found = link.wait(link.applied)
                self._is_lost = isinstance(found, CatchUp)
                if isinstance(found, RoundReply):
                    held.replies.append(found)
        except _LostReplies:
            self._is_lost = True
        self._held += [held] if held.replies else []

    def _follow(self, old: Link | None, name: str, key: str, kept: _Kept) -> Link:
        """A link to a hub whose ranges have changed: this member comes back there."""
        link = self._link_to(name, key) if old is None else old.successor()
        link.interrupt = partial(self._pulse, link)
        applied = 0 if self._is_lost else self._ends
        past = Past(kept.session, kept.name, kept.next_round, applied, 0, True, kept.oldest)
        request = replace(self._request, fixed_tensors=None) if name else self._request
        link.enter(request, zeros(self._elements), 0, past)
        entry = link.begin()
        self._is_lost |= (entry.applied, entry.round) != (past.applied, past.round)
        return link

    def traffic(self) -> Traffic:
        return Traffic.of_all([super().traffic(), self._gone])


@dataclass
class _Kept:
    """What links had that are replaced: contributions, by the element that each part begins at."""

    session: int
    name: str
    next_round: int
    heads: dict[int, Contribute] = field(default_factory=dict)
    parts: dict[int, dict[int, Buffer]] = field(default_factory=dict)

    @classmethod
    def of(cls, links: Sequence[Link]) -> _Kept:
        """Those of these links. One that a hub has merged for good is not with all of them."""
        first = links[0] if links else None
        if first is None:
            return cls(0, "", 0)
        kept = cls(first.session, first.name, max(link.next_round for link in links))
        rounds = set.intersection(*(set(link.outbox.kept) for link in links))
        for round in sorted(rounds):
            parts = kept.parts[round] = {}
            for link in links:
                here = link.outbox.codec.slices(link.own.stop - link.own.start)
                for part, message in zip(here, link.outbox.messages(round), strict=True):
                    kept.heads[round] = replace(message, payload=b"")
                    if part.start < part.stop:
                        parts[link.own.start + part.start] = message.payload
        return kept

    @property
    def oldest(self) -> int | None:
        return min(self.heads, default=None)

    def hand_over(self, link: Link) -> None:
        slices = link.outbox.codec.slices(link.own.stop - link.own.start)
        starts = [link.own.start + part.start for part in slices if part.start < part.stop]
        for round, head in self.heads.items():
            payloads = [self.parts[round][start] for start in starts]
            link.adopt(head, payloads or [b""])
