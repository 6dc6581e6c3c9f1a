"""A member's end over ZeroMQ that finds the replica of its hub."""

from __future__ import annotations

import time
from collections.abc import Sequence

from edgetrain.errors import BadMessage, ConfigError
from edgetrain.exchange.keys.pairs import Credentials, public_key
from edgetrain.exchange.member.standby import StandbyEnd
from edgetrain.exchange.zeromq.member_socket import MemberSocket


def member_end(hub: str | Sequence[str], credentials: Credentials | None) -> StandbyEnd:
    """An end connected to the hub at this address, or the first of these; and to its replica, under
    the key that the hub tells, when the hub is silent. Without `credentials` neither is encrypted.
    Raises NetworkError."""

    def dial(address: str, key: str) -> MemberSocket:
        if credentials is None:
            return MemberSocket(address)
        try:
            return MemberSocket(address, credentials=Credentials(credentials.pair, public_key(key)))
        except ConfigError as error:
            raise BadMessage(f"the key of the hub's replica: {error.message}") from None

    return StandbyEnd(MemberSocket(hub, credentials=credentials), dial, time.monotonic)
