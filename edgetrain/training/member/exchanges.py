"""What a member exchanges through, where that is more than one link to one hub."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.member.ranges import RangedExchange
from edgetrain.exchange.member.shared import SharedExchange
from edgetrain.exchange.transport import MemberTransport
from edgetrain.jobs.job import COLLECTIVES, DIRECT
from edgetrain.jobs.resolved import Resolved
from edgetrain.jobs.rules import why_not_topology
from edgetrain.training.member.several import dialling


def exchange_of(
    found: Resolved,
    sockets: Sequence[MemberTransport],
    shown: Credentials | None,
    keys: Path | None,
    listen: str,
    patience_s: float,
) -> tuple[Link | RangedExchange, str]:
    """The exchange over `sockets`, the lead's first, to which this member has `shown` its keys; and
    the address at which other members reach it, if they do. `keys`: the folder of this machine's,
    `listen`: where other members connect; "": they cannot."""
    hub_timeout_s = found.job.hub.hub_timeout_s
    if found.job.fleet.topology in (DIRECT, *COLLECTIVES):
        from edgetrain.training.member.direct import peer_exchange  # and with it all of a hub

        return peer_exchange(found, sockets[0], shown, listen, patience_s)
    if found.strategy.deals:
        from edgetrain.exchange.member.work import RangedWork, WorkLink

        works = [WorkLink(each, time.monotonic, patience_s, hub_timeout_s) for each in sockets]
        return (RangedWork(works) if len(works) > 1 else works[0]), ""
    links = [Link(each, time.monotonic, patience_s, hub_timeout_s) for each in sockets]
    if why_not_topology("hubs", found) is not None:
        return links[0], ""
    dial = dialling(shown, keys, shown is None, patience_s, hub_timeout_s)
    return SharedExchange(links, dial, found.job.hub.hubs[1:]), ""
