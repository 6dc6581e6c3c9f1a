"""A member's ways to hubs that it hears of from the lead."""

from __future__ import annotations

import time
from pathlib import Path

from edgetrain.exchange.keys.credentials import credentials
from edgetrain.exchange.keys.pairs import Credentials, public_key
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.member.shared import Dial
from edgetrain.exchange.zeromq.standby_socket import member_end


def dialling(
    shown: Credentials | None,
    keys: str | Path | None,
    insecure: bool,
    patience_s: float,
    hub_timeout_s: float,
) -> Dial:
    """Makes links to the hubs of a job, with the pair that is `shown` to the lead; None: nothing is
    encrypted. A hub whose key the lead does not say is known from enrolment. The times as for a
    Link. Links raise what `credentials` and `member_end` do."""

    def dial(address: str, key: str) -> Link:
        if shown is not None and key:
            own: Credentials | None = Credentials(shown.pair, public_key(key))
        else:
            own = credentials(address, None, keys, insecure=insecure or shown is None)
        return Link(member_end(address, own), time.monotonic, patience_s, hub_timeout_s)

    return dial
