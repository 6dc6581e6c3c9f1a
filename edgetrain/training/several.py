"""Hubs whose ranges may move while they run: which part of a hub has which machine, and its ways to
the others.

What moves when is in `exchange.hub.lead`; a member's way to them is `member.several`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from edgetrain.exchange.hub.lead import LeadPart
from edgetrain.exchange.hub.protocol import HubPart
from edgetrain.exchange.hub.shared import SharedPart
from edgetrain.exchange.keys.credentials import credentials
from edgetrain.exchange.keys.pairs import spell
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.jobs.job import AUTO
from edgetrain.jobs.resolved import Resolved
from edgetrain.jobs.rules import why_not_topology
from edgetrain.vectors.ranges import shared

LEAD = "lead"
"""The name under which the lead's machine is enrolled at the other hubs."""


class Ways:
    """From the lead to other hubs, which know its key as `LEAD`."""

    def __init__(
        self, keys: Path | None, insecure: bool, wake: Callable[[MemberSocket], None]
    ) -> None:
        """`keys`, `insecure`: as a member has them. `wake`: lets the hub's own socket return from
        its `poll` when another hub has answered."""
        self._keys, self._insecure, self._wake = keys, insecure, wake

    def __call__(self, address: str) -> tuple[MemberSocket, str]:
        """See `Connect`: raises ConfigError where the hub's key is not known, NetworkError."""
        shown = credentials(address, None, self._keys, insecure=self._insecure)
        end = MemberSocket(address, credentials=shown)
        self._wake(end)
        return end, "" if shown is None else spell(shown.hub)


def why_fixed(found: Resolved, is_gateway: bool) -> str | None:
    """Why a job's hubs stay as they are; None: they may change."""
    job = found.job
    if is_gateway:
        return "a gateway is a member of one hub"
    if found.strategy.deals:
        return f"the hubs of {found.strategy.name} hand out work"
    if job.fleet.topology not in ("star", AUTO):
        return f"fleet.topology = '{job.fleet.topology}'"
    refused = why_not_topology("hubs", found)
    return None if refused is None else refused[0]


def shared_part(
    found: Resolved,
    leads: bool,
    ways: Ways,
    name_of: Callable[[bytes], str],
    encrypted: bool,
) -> Callable[[], HubPart]:
    """Makes the part of the lead, or of one that it leads."""
    if not leads:
        return partial(SharedPart, lambda sender: not encrypted or name_of(sender) == LEAD)
    hubs = found.job.hub.hubs
    stretches = shared(found.job.strategy.ranges, len(hubs) or 1)[1:]
    rows = [
        (address, "", own.first, own.end) for address, own in zip(hubs[1:], stretches, strict=True)
    ]
    return partial(LeadPart, ways, hubs[0] if hubs else "", rows)
