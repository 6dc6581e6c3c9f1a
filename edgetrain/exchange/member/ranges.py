"""A member's exchange with several hubs, each of which adds up a stretch of the vector.

Each hub is a whole one, with rounds, members and a journal of its own, and a link of its own to it.
Contributions are cut and replies put together here; nothing else is decided. The first hub leads:
K, D, the final sync and the members' names are as it says. No transport, no clock, no codec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edgetrain import strategies
from edgetrain.errors import ConfigError, Diverged, Refused
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.messages import Figure, Telemetry
from edgetrain.exchange.seam import CatchUp, Entry, Past, Request, RoundReply, Submission
from edgetrain.exchange.transport import Traffic
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import Vector, checksum, zeros

if TYPE_CHECKING:
    from edgetrain.strategies.factored import Factors


PAUSE_S = 0.05
"""Wait on one link before the others are looked at; each further one is twice as long."""


@dataclass
class _Standing:
    """The position of one hub, for a member taking over its base."""

    applied: int
    round: int
    """The next round to contribute to."""
    base: Vector
    """Base of the hub's stretch, after `applied` replies."""
    delay: int
    local_steps: int


class RangedExchange:
    """An `Exchange` over one link a hub, the lead's first; see there for who owns what.

    Joining: the lead first. The member whose parameters it asks for enters at all others, and hands
    them theirs, before it answers; the others follow once the lead has started. So all of the first
    base is one member's.

    Every hub closes its rounds by itself. A round closes with the same contributions everywhere
    unless a deadline or the end of a member comes between; a contribution then counts once in each
    stretch, but perhaps in another round. If one hub went on without this member, all are asked for
    their base, those behind are brought up by their replies, and the member goes on from that.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        """The links are this exchange's own."""
        self._links, self._lead = [*links], links[0]
        self.interrupt: Callable[[], None] = lambda: None
        self._has_begun = self._are_entered = False
        self._known = [0 for _ in links]
        """Checksum of each hub's stretch of the base that was last given out."""
        self._keeps_base = True
        self._first = 0
        """The link that contributions are sent on first."""
        for link in links:
            self._watch(link)

    def _watch(self, link: Link) -> None:
        # What interrupts may be set later.
        link.interrupt, link.while_idle = lambda: self.interrupt(), partial(self._pulse, link)
        link.first_pause_s = PAUSE_S

    def _pulse(self, waiting: Link) -> None:
        """While nothing comes on one link, the others take in what comes. Not that one: it would
        wait for what it has. While this member enters there, the lead may say that it is in vain.
        """
        if not self._has_begun and waiting is not self._lead:
            self._lead.watch()
        for link in self._links if self._has_begun else ():
            if link is not waiting:
                link.poll()

    # -- joining -------------------------------------------------------------------------------

    def join(
        self, request: Request, params: Vector, checksum: int, past: Past | None = None
    ) -> Entry:
        lead = self._lead
        lead.before_upload = lambda name: self._enter(name, request, params, past)
        lead.enter(request, params, checksum, past)
        entries = [lead.begin()]
        self._enter(entries[0].name, request, params, past)
        entries += [link.begin() for link in self._links[1:]]
        self._check_stretches()
        self.memory = lead.memory if len(entries) == 1 else VectorPool(params.size)
        self._keeps_base = strategies.find(entries[0].strategy).hub_keeps_base
        self._has_begun = True
        self._known = [entry.checksum for entry in entries]
        if len(entries) == 1:
            return entries[0]
        if past is not None and past.has_base:
            return replace(entries[0], resend=min(entry.resend for entry in entries))
        return self._unite_entries(entries, params)

    def _enter(self, name: str, request: Request, params: Vector, past: Past | None) -> None:
        """Ask the other hubs to let this member in, under the lead's name for it. Works twice."""
        if self._are_entered:
            return
        self._are_entered = True
        request = replace(request, name=name, fixed_tensors=None)
        for link in self._links[1:]:
            link.number = self._lead.session
            link.ask_in(request, params, checksum(params), past)
        for link in self._links[1:]:
            link.await_welcome()

    def _check_stretches(self) -> None:
        found = [link.stretch for link in self._links]
        count, at = found[0].count, 0
        for stretch in found:
            is_next = (stretch.count, stretch.first) == (count, at)
            at = stretch.end if is_next or stretch.first == stretch.end else -1
        if at != count:
            words = "; ".join(map(str, found))
            raise Refused(
                "job", f"the {len(found)} hubs have {words}: together they are not one vector",
                "start each with the same job file, and --number as hub.hubs counts them",
            )  # fmt: skip

    def _unite_entries(self, entries: Sequence[Entry], params: Vector) -> Entry:
        """One entry of all: the hubs may have closed rounds while this member joined."""
        for link, entry in zip(self._links, entries, strict=True):
            if self._keeps_base and _sum_of(link, params) != entry.checksum:
                raise Diverged("the base arrived damaged: its checksum differs from the hub's")
        found = [
            _Standing(e.applied, e.round, params[link.own].copy(), e.delay.steps, e.steps_now)
            for link, e in zip(self._links, entries, strict=True)
        ]
        whole = self._unite(found)
        params[:] = whole.base
        self._note_base(params)
        lead = entries[0]
        more = (whole.round - lead.round) * (lead.steps_now or lead.local_steps)
        return replace(
            lead, round=whole.round, applied=whole.applied, checksum=checksum(params),
            steps=lead.steps + more, resend=min(entry.resend for entry in entries),
        )  # fmt: skip

    def _note_base(self, base: Vector) -> None:
        self._known = [_sum_of(link, base) for link in self._links]

    # -- one base of all -----------------------------------------------------------------------

    def _unite(self, found: list[_Standing]) -> _Standing:
        """Bring all hubs' bases to the same number of replies, and let this member contribute to
        the same round next, everywhere."""
        pairs = [*enumerate(self._links)]
        while True:
            # First of all: a hub that waits for this member's contribution gives no replies.
            round, applied = max(e.round for e in found), max(e.applied for e in found)
            for number, link in pairs:
                if found[number].round < round:
                    link.ask_again(round=round)
                    found[number].round = round
            if all(each.applied == applied for each in found):
                break
            for number, link in pairs:
                if found[number].applied < applied:
                    reply = link.wait(found[number].applied)
                    if isinstance(reply, CatchUp):
                        found[number] = self._standing_of(link, reply)
                    else:
                        _add(reply, found[number], link.own.start)
        base = np.concatenate([each.base for each in found])
        return replace(found[0], base=base)

    def _standing_of(self, link: Link, reply: RoundReply | CatchUp | None) -> _Standing:
        """Where a hub is, with its base: it is asked for that unless it has just given it."""
        while not isinstance(reply, CatchUp) or reply.base is None:
            link.ask_again(base=True)
            reply = link.wait(link.applied)
        if checksum(reply.base, link.own.start) != reply.checksum:
            raise Diverged("the base arrived damaged: its checksum differs from the hub's")
        return _Standing(reply.applied, reply.round, reply.base, reply.delay, reply.local_steps)

    # -- contributions -------------------------------------------------------------------------

    @property
    def session(self) -> int:
        """See Exchange: the same with every hub."""
        return self._lead.session

    @property
    def on_welcome(self) -> Callable[[int], None]:
        """See Link: of the lead."""
        return self._lead.on_welcome

    @on_welcome.setter
    def on_welcome(self, call: Callable[[int], None]) -> None:
        self._lead.on_welcome = call

    @property
    def members_here(self) -> int:
        """See Link: at the hub that has the fewest."""
        links = self._links if self._has_begun else self._links[:1]
        return min(link.members_here for link in links)

    @property
    def away_s(self) -> float:
        """See Link: of the hub that has been away longest."""
        links = self._links if self._has_begun else self._links[:1]
        return max(link.away_s for link in links)

    @property
    def is_to_evaluate(self) -> bool:
        return any(link.is_to_evaluate for link in self._links)

    def factors(self) -> Factors | None:
        """See Exchange: there are no codecs of two trips here."""
        return None

    def unsent(self) -> dict[str, Vector]:
        """See Exchange: as of one hub that has the whole vector."""
        each = [(link.unsent(), zeros(link.own.stop - link.own.start)) for link in self._links]
        names = {name for state, _ in each for name in state}  # a lead without a range has none
        return {n: np.concatenate([state.get(n, none) for state, none in each]) for n in names}

    def restore_unsent(self, unsent: Mapping[str, Vector]) -> None:
        elements = max(link.own.stop for link in self._links)
        if any(vector.size != elements for vector in unsent.values()):
            raise ConfigError(f"the checkpoint's unsent rest is not of {elements} parameters")
        for link in self._links:
            link.restore_unsent({name: vector[link.own] for name, vector in unsent.items()})

    def submit(self, submission: Submission) -> Vector | None:
        """See Exchange. Each hub is told the checksum of its own stretch, or, where hubs keep no
        base, that of the whole from the first round on: they compare members with each other."""
        links = self._links
        read = {
            number: links[number].submit(self._own_part(number, submission))
            for number in (*range(self._first, len(links)), *range(self._first))
        }
        if all(each is None for each in read.values()):
            return None
        return np.concatenate(
            [
                submission.vector[link.own] if read[number] is None else read[number]
                for number, link in enumerate(links)
            ]
        )

    def _own_part(self, number: int, submission: Submission) -> Submission:
        is_of_stretch = self._keeps_base or not submission.applied
        return replace(
            submission,
            vector=submission.vector[self._links[number].own],
            checksum=self._known[number] if is_of_stretch else submission.checksum,
        )

    @property
    def sent_nearly_all(self) -> bool:
        return all(link.sent_nearly_all for link in self._links)

    # -- replies -------------------------------------------------------------------------------

    def wait(self, round: int) -> RoundReply | CatchUp:
        """See Exchange: whole once every hub's is."""
        found = [link.wait(round) for link in self._links]
        replies = [reply for reply in found if isinstance(reply, RoundReply)]
        if len(replies) < len(found):
            return self._catch_up(found)
        self._known = [reply.checksum for reply in replies]
        pairs = zip(self._links, replies, strict=True)
        return self._whole([(link.own, reply, self.whose(link)) for link, reply in pairs])

    def _whole(self, found: Sequence[tuple[slice, RoundReply, str]]) -> RoundReply:
        """One reply of those of all stretches, in order, the lead's first, with their senders."""
        replies = [reply for _, reply, _ in found]
        checks = [(own, reply.checksum, whose) for own, reply, whose in found]
        return replace(
            replies[0],
            checksum=0,
            arrived=max(reply.arrived for reply in replies),
            pieces=[piece for reply in replies for piece in reply.pieces],
            decode_s=sum(reply.decode_s for reply in replies),
            wait_decode_s=sum(reply.wait_decode_s for reply in replies),
            sent_bytes=sum(reply.sent_bytes for reply in replies),
            received_bytes=sum(reply.received_bytes for reply in replies),
            checksums=checks if self._keeps_base else (),
        )

    def whose(self, link: Link) -> str:
        return "the hub"

    def _catch_up(self, found: Sequence[RoundReply | CatchUp | None]) -> CatchUp:
        pairs = zip(self._links, found, strict=True)
        whole = self._unite([self._standing_of(link, reply) for link, reply in pairs])
        self._note_base(whole.base)
        sum_ = checksum(whole.base)
        return CatchUp(whole.round, whole.delay, whole.applied, sum_, whole.base, whole.local_steps)

    @property
    def ready(self) -> int:
        return min(link.ready for link in self._links)

    def end(self, round: int) -> None:
        """See Exchange: members are in step here."""

    def await_reply(self) -> bool:
        """See Exchange: members are in step here."""
        return False

    def settle(self) -> bool:
        settled = [link.settle() for link in self._links]
        return all(settled)

    def poll(self) -> None:
        for link in self._links:
            link.poll()

    # -- leaving, and what people look at ------------------------------------------------------

    def report(self, telemetry: Telemetry | Figure) -> None:
        """See Exchange: to every hub, each has a run folder."""
        for link in self._links:
            link.report(telemetry)

    def traffic(self) -> Traffic:
        """See Exchange: sums, and the longest round trip."""
        return Traffic.of_all(link.traffic() for link in self._links)

    def leave(self, reason: str) -> None:
        for link in self._links:
            link.leave(reason)

    def vanish(self) -> None:
        for link in self._links:
            link.vanish()


def _sum_of(link: Link, whole: Vector) -> int:
    return checksum(whole[link.own], link.own.start)


def _add(reply: RoundReply, standing: _Standing, first: int) -> None:
    """Add the next reply to a base from element `first` on, as members and hubs do."""
    reply.add_to(standing.base)
    standing.applied += 1
    standing.delay, standing.local_steps = reply.delay, reply.local_steps or standing.local_steps
    if reply.checksum and checksum(standing.base, first) != reply.checksum:
        raise Diverged("a base is not what its hub says: their checksums differ")
