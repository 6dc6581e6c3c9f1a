"""A member's exchange in a job whose members connect to each other: they host the reducers, or hand
sums on."""

from __future__ import annotations

import functools
import time

from edgetrain.exchange.addresses import join_address, listen_on, split_address
from edgetrain.exchange.keys.pairs import Credentials, Pair
from edgetrain.exchange.member.link import OUTAGE_S, PATIENCE_S, Link
from edgetrain.exchange.messages import CLIENT
from edgetrain.exchange.peers.beside import THREADS, Beside
from edgetrain.exchange.peers.dialled import Clock
from edgetrain.exchange.peers.direct import DirectExchange, Listen
from edgetrain.exchange.peers.listener import Listener, listen
from edgetrain.exchange.peers.peering import MappedEnd, Peering
from edgetrain.exchange.peers.reducer_link import ReducerLink
from edgetrain.exchange.peers.together import LOST_S, CollectiveExchange
from edgetrain.exchange.transport import MemberTransport
from edgetrain.jobs.building import message_limit, reducer_of
from edgetrain.jobs.job import DIRECT
from edgetrain.jobs.resolved import Resolved


def peer_exchange(
    found: Resolved,
    hub: MemberTransport,
    credentials: Credentials | None,
    at: str,
    patience_s: float,
) -> tuple[DirectExchange | CollectiveExchange, str]:
    """The exchange of one member, over its connection to the `hub` that all join, and the address
    to join with. `at`: tcp://HOST:PORT, where it listens; "": it is a client. Raises NetworkError.
    """
    pair = None if credentials is None else credentials.pair
    listener, address = _listen(found, pair, at) if at else (None, CLIENT)
    at_any_port = join_address(split_address(at)[0], 0) if at else ""
    another = functools.partial(_listen, found, pair, at_any_port)
    waits_s, peering = (patience_s, found.job.hub.hub_timeout_s), Peering(listener, pair)
    return exchange_among(found, hub, peering, another, time.monotonic, waits_s), address


def exchange_among(
    found: Resolved,
    hub: MemberTransport,
    peering: Peering,
    another: Listen,
    clock: Clock,
    waits_s: tuple[float, float] = (PATIENCE_S, OUTAGE_S),
    beside: Beside = THREADS,
) -> DirectExchange | CollectiveExchange:
    """The same, for a member that others can connect to by `peering`. `another` listens at another
    port; `waits_s` as for a Link."""
    if found.job.fleet.topology != DIRECT:
        outer = found.strategy.outer_rule()
        # The hub notices first that one has died: then nobody has to be blamed for its silence.
        lost_s = max(LOST_S, 2 * found.job.hub.lost_after_s)
        return CollectiveExchange(hub, peering, clock, *waits_s, lost_s, outer, beside)

    def link_over(end: MemberTransport) -> ReducerLink:
        return ReducerLink(end, clock, *waits_s)

    lead = Link(MappedEnd(hub, peering), clock, *waits_s)
    reducer = functools.partial(reducer_of, found)
    return DirectExchange(lead, peering, link_over, reducer, another, clock)


def _listen(found: Resolved, pair: Pair | None, at: str) -> tuple[Listener, str]:
    listening = listen_on(*split_address(at))
    listener, bound = listen(listening.bind, pair, message_limit(found.codec))
    return listener, join_address(listening.reachable[0].address, split_address(bound)[1])
