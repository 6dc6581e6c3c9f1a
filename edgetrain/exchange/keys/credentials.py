"""The credentials that a machine uses, from its folder of keys and what its user said."""

from __future__ import annotations

from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.exchange.keys.keyring import Keyring, folder
from edgetrain.exchange.keys.pairs import (
    Credentials,
    public_key,
)


def credentials(
    hub: str,
    hub_key: str | None = None,
    chosen: str | Path | None = None,
    *,
    insecure: bool = False,
) -> Credentials | None:
    """With what to join the hub at an address; None: without encryption.

    `hub_key`: the hub's public key or a file with it; else the one that enrolment pinned. `chosen`:
    the folder of this machine's keys. Off this machine nothing travels in the clear unless it is
    said to be `insecure`. Raises ConfigError.
    """
    from edgetrain.exchange.addresses import is_local_name, split_address

    if insecure:
        return None
    ring = Keyring(folder(chosen))
    key = public_key(hub_key) if hub_key else ring.hub(hub)
    if key is not None:
        return Credentials(ring.pair(), key)
    if is_local_name(split_address(hub)[0]) and chosen is None:
        return None
    raise ConfigError(
        f"the key of the hub at {hub} is not known here",
        "enrol with a token (edgetrain keys enroll --hub … --token …), give its key (--hub-key, "
        "hub_key=), or, inside a network you trust, --insecure (insecure=True)",
    )
