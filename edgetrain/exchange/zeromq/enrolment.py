"""Enrolment at the device: it shows a token to the hub, and its key is on the hub's list.

Power may fail at any instant, and an answer may be lost. So the hub's key is pinned before anything
is sent, and the token may be used again by the device that has used it: whoever enrols again after
a failure ends in the same state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgetrain.errors import HubUnreachable
from edgetrain.exchange.addresses import first_of, route
from edgetrain.exchange.keys.gate import ENROL, enrolled
from edgetrain.exchange.keys.keyring import Keyring, read_token
from edgetrain.exchange.keys.pairs import Credentials, Public
from edgetrain.exchange.zeromq.curve import new_pair, pair_of
from edgetrain.exchange.zeromq.member_socket import MemberSocket, wait_for_message


@dataclass(frozen=True)
class Enrolment:
    name: str
    """Name of the device, on the hub's list."""
    hub: str
    """The address that answered."""
    key: Public
    """The hub's, which is pinned for all its addresses."""


def enrol(
    ring: Keyring, hubs: Sequence[str], token: str, timeout_s: float = 10.0, host_key: str = ""
) -> Enrolment:
    """Use a token at the first of the hub's addresses where its hub answers. Makes the device's
    pair if it has none, and pins the hub's key for all addresses. `host_key`: this device's SSH
    host key, as `read_host_key` returns it, for the hub to keep.

    May be repeated with the same token until it expires. Raises ConfigError for a token that is
    none, Refused if the hub refuses it, HubUnreachable and NetworkError if there is no answer, of
    several addresses with what each said.
    """
    key, secret = read_token(token)
    own = ring.pair() if ring.exists else ring.init(new_pair)

    def use(hub: str) -> str:
        route(hub, timeout_s)
        before = ring.hubs()
        ring.pin_hubs(dict.fromkeys(hubs, key))
        member = MemberSocket(hub, credentials=Credentials(pair_of(secret), key))
        try:
            member.send([ENROL, own.public, *([host_key.encode()] if host_key else [])])
            return enrolled(wait_for_message(member, timeout_s))
        except HubUnreachable:  # whoever answers there has not proved that it is the token's hub
            ring.pin_hubs({address: before.get(address) for address in hubs})
            raise
        finally:
            member.close()

    hub, name = first_of(hubs, use)
    return Enrolment(name, hub, key)
