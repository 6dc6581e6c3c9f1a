"""The credentials that a machine uses, from its folder of keys and its user's options."""

from __future__ import annotations

from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.exchange.addresses import is_local_name, split_address
from edgetrain.exchange.keys.keyring import Keyring, keys_folder
from edgetrain.exchange.keys.pairs import Credentials, public_key


def credentials(
    hub: str,
    hub_key: str | None = None,
    chosen: str | Path | None = None,
    *,
    insecure: bool = False,
) -> Credentials | None:
    """Credentials to join the hub at the address `hub`; None: join without encryption.

    `hub_key` is the hub's public key, or a file with it; by default the key that enrolment pinned.
    `chosen` is the folder of this machine's keys. Without encryption only with `insecure`, or if
    the hub is on this machine and no folder is chosen. Raises ConfigError if the hub's key is not
    known.
    """
    if insecure:
        return None
    ring = Keyring(keys_folder(chosen))
    key = public_key(hub_key) if hub_key else ring.hub_key(hub)
    if key is not None:
        return Credentials(ring.pair(), key)
    if is_local_name(split_address(hub)[0]) and chosen is None:
        return None
    raise ConfigError(
        f"the key of the hub at {hub} is not known here",
        "enrol with a token (edgetrain keys enroll --hub … --token …), give its key (--hub-key, "
        "hub_key=), or, inside a network you trust, --insecure (insecure=True)",
    )
