"""A member's exchange where members host the reducers: with the hub that all join, and with these.

Every reducer is a hub of a stretch of the vector, and how one exchanges with several is in
`member.ranges`. What is added: who they are is known once the map is there, this member may host
one, and then it stays until all others have left. And a reducer may be lost:

=====  =================================================================================
stage  what a member does
=====  =================================================================================
0      takes nothing more from the lost reducer, is none of these ranges any more; says how many of
       its replies were given out
2      (the one that the hub chose, with the most replies) hosts a reducer in its place: base of
       the stretch after these, members as the hub knows them, nothing merged but what replies said
-      the next map names the new one: goes on with that as after a lost connection
=====  =================================================================================
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from edgetrain.errors import BadMessage, EdgetrainError, Refused
from edgetrain.exchange.further_messages import Takeover
from edgetrain.exchange.hub.evaluators import DONE
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.records import State, unpack_state
from edgetrain.exchange.hub.reducer import take_over
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.member.ranges import RangedExchange
from edgetrain.exchange.messages import Peer
from edgetrain.exchange.peers.dialled import Dialled
from edgetrain.exchange.peers.listener import Listener
from edgetrain.exchange.peers.neighbours import Neighbours
from edgetrain.exchange.peers.peering import Peering
from edgetrain.exchange.peers.reducer_link import ReducerLink
from edgetrain.exchange.seam import Past, Request
from edgetrain.exchange.transport import MemberTransport
from edgetrain.vectors.vector import Vector

log = logging.getLogger("edgetrain")

LOST_EARLY = "a member was lost before training began here: join again"

WATCH_S = 0.5
"""Seconds between two looks at whether the others have left."""

MakeLink = Callable[[MemberTransport], ReducerLink]
MakeReducer = Callable[[int, int], Hub]
"""Makes a hub of the job for the ranges [first, end)."""
Listen = Callable[[], tuple[Listener, str]]
"""Listens at another port; returns where."""


class DirectExchange(RangedExchange):
    """A RangedExchange with the reducers that the map of `peering` names. Owns both.

    `lead` is the link to the hub that all join, over a MappedEnd of the same peering. `base_of`
    says how many replies the member's base has, and the base, [elements] (None: it has none, as
    with gradient strategies): to be set before the first step.
    """

    def __init__(
        self,
        lead: Link,
        peering: Peering,
        make_link: MakeLink,
        make_reducer: MakeReducer,
        listen: Listen,
        clock: Callable[[], float],
    ) -> None:
        super().__init__([lead])
        self._peering, self._make_link, self._make_reducer = peering, make_link, make_reducer
        self._listen, self._clock = listen, clock
        self.base_of: Callable[[], tuple[int, Vector | None]] | None = None
        self._hosted, self._is_leaving = (0, 0), False
        self._dialled: dict[int, tuple[ReducerLink, Dialled, Peer]] = {}
        """The link to each reducer, its connection, and who that is, by the first range."""
        peering.on_map, peering.on_takeover = self._take_map, self._take_over

    def _take_map(self, neighbours: Neighbours) -> None:
        """Host what the map says, and go on with those that it names."""
        own = neighbours.own.first, neighbours.own.end
        if own != self._hosted:
            self._hosted = own
            self._peering.host(self._make_reducer(*own) if own[0] < own[1] else None)
        for first, (link, end, before) in self._dialled.items():
            peer = neighbours.reducer_of(first)
            if peer is None or (peer.name, peer.address) == (before.name, before.address):
                continue
            if peer.name != neighbours.name:
                self._peering.host_no_more(first)
            if not self._is_leaving:
                self._dialled[first] = link, end, peer
                end.redirect(self._peering.dial(peer, neighbours))
                link.ask_another()

    def _enter(self, name: str, request: Request, params: Vector, past: Past | None) -> None:
        neighbours = self._peering.neighbours
        if neighbours is not None and not self._dialled:
            for peer in neighbours.reducers:
                end = self._peering.dial(peer, neighbours)
                link = self._make_link(end)
                self._watch(link)
                self._dialled[peer.first] = link, end, peer
            self._links = [*self._links, *(link for link, _, _ in self._dialled.values())]
            self._first = 1 + neighbours.turn(len(self._dialled))
        super()._enter(name, request, params, past)

    def whose(self, link: Link) -> str:
        names = (peer.name for known, _, peer in self._dialled.values() if known is link)
        return next(names, "the hub")

    # -- a reducer is lost ---------------------------------------------------------------------

    def _take_over(self, message: Takeover) -> Takeover | None:
        """See this module's table. The hub that all join is believed. Without ranges: a member is
        lost before any round is over; it may be one that reducers wait for."""
        if not message.end:
            if not self._has_begun:
                raise Refused("session", f"the hub refused: session: {LOST_EARLY}")
            return None
        link, end, _ = self._dialled.get(message.first, (None, None, None))
        answer = Takeover(message.stage + 1, message.first, message.end)
        if link is None or end is None or not self._has_begun:
            return answer
        if message.stage == 0:
            end.hang_up()
            self._peering.host_no_more(message.first)
            can_host = not self._peering.is_client and self.base_of is not None
            return Takeover(1, message.first, message.end, link.stand_still(), can_host)
        try:
            assert self.base_of is not None
            applied, whole = self.base_of()
            base = None if whole is None else whole[link.own].copy()
            applied = link.given_out if base is None else link.add_given_out(base, applied)
            if applied != message.applied:
                raise BadMessage(f"{message.applied} replies were wanted, and {applied} are here")
            state: State = unpack_state(message.payload)
            reducer = self._make_reducer(message.first, message.end)
            take_over(reducer, state, base, applied, link.merged, self._clock())
            listener, address = self._listen()
            self._peering.host_more(address, listener, reducer)
        except EdgetrainError as error:
            log.warning("cannot reduce in place of a lost member: %s", error)
            return answer
        return Takeover(3, message.first, message.end, address=address)

    # -- leaving -------------------------------------------------------------------------------

    def leave(self, reason: str) -> None:
        """See Exchange. A member that is done, and hosts a reducer, stays until the others are
        done: the hub may ask it for a base that the others lack."""
        lead, *others = self._links
        for link in others:
            link.leave(reason)
        self._is_leaving = True
        try:
            if reason == DONE:
                lead.end(lead.next_round)
            while reason == DONE and not self._peering.wait_for_end(WATCH_S):
                self.interrupt()
                with contextlib.suppress(EdgetrainError):  # it is done, whatever becomes of others
                    lead.poll()
        finally:
            lead.leave(reason)
            self._peering.close()

    def vanish(self) -> None:
        super().vanish()
        self._peering.close()
