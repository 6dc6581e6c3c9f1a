"""A member's exchange in a job whose members connect to each other: they host the reducers, or hand
sums on."""

from __future__ import annotations

import functools
import time

from edgetrain.exchange.addresses import listen_on, split_address
from edgetrain.exchange.keys.pairs import Credentials, Pair
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.messages import CLIENT
from edgetrain.exchange.peers.direct import DirectExchange
from edgetrain.exchange.peers.listener import Listener, listen
from edgetrain.exchange.peers.peering import MappedEnd, Peering
from edgetrain.exchange.peers.reducer_link import ReducerLink
from edgetrain.exchange.peers.together import LOST_S, CollectiveExchange
from edgetrain.exchange.transport import MemberTransport
from edgetrain.jobs.building import message_limit, reducer_of
from edgetrain.jobs.resolved import Resolved


def direct_exchange(
    found: Resolved,
    hub: MemberTransport,
    credentials: Credentials | None,
    at: str,
    patience_s: float,
) -> tuple[DirectExchange, str]:
    """The exchange of one member, over its connection to the `hub` that all join, and the address
    to join with. `at`: tcp://HOST:PORT, where it listens; "": it is a client. Raises NetworkError.
    """
    pair = None if credentials is None else credentials.pair
    open_another = functools.partial(_listen, found, pair, _at_any_port(at))
    listener, address = _listen(found, pair, at) if at else (None, CLIENT)
    peering = Peering(listener, pair)
    waits = time.monotonic, patience_s, found.job.hub.outage_s

    def link_over(end: MemberTransport) -> ReducerLink:
        return ReducerLink(end, *waits)

    reducer = functools.partial(reducer_of, found)
    lead = Link(MappedEnd(hub, peering), *waits)
    way = DirectExchange(lead, peering, link_over, reducer, open_another, time.monotonic)
    return way, address


def collective_exchange(
    found: Resolved,
    hub: MemberTransport,
    credentials: Credentials | None,
    at: str,
    patience_s: float,
) -> tuple[CollectiveExchange, str]:
    """The exchange of a member that averages with others, and the address to join with; see
    `direct_exchange`."""
    pair = None if credentials is None else credentials.pair
    listener, address = _listen(found, pair, at) if at else (None, CLIENT)
    # The hub notices first that a member has died: then nobody has to be blamed for its silence.
    lost_s = max(LOST_S, 2 * found.job.hub.gone_s)
    waits = time.monotonic, patience_s, found.job.hub.outage_s
    outer = found.strategy.outer_rule()
    return CollectiveExchange(hub, Peering(listener, pair), *waits, lost_s, outer), address


def _listen(found: Resolved, pair: Pair | None, at: str) -> tuple[Listener, str]:
    """A listener there, and the address under which others reach it."""
    listening = listen_on(*split_address(at))
    listener, bound = listen(listening.bind, pair, message_limit(found.codec))
    return listener, _spelled(listening.reachable[0].address, split_address(bound)[1])


def _at_any_port(at: str) -> str:
    return _spelled(split_address(at)[0], 0) if at else ""


def _spelled(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
