"""The credentials that a machine uses, from its folder of keys and its user's options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError
from edgetrain.exchange.addresses import is_local_name, split_address
from edgetrain.exchange.keys.pairs import Credentials, Public, keys_folder, public_key, short

if TYPE_CHECKING:
    from edgetrain.exchange.keys.keyring import Keyring


def credentials(
    hub: str | Sequence[str],
    hub_key: str | None = None,
    chosen: str | Path | None = None,
    *,
    insecure: bool = False,
) -> Credentials | None:
    """Credentials to join the hub at the address `hub`, or at one of these; None: join without
    encryption.

    `hub_key` is the hub's public key, or a file with it; by default the key that enrolment pinned.
    `chosen` is the folder of this machine's keys. Without encryption only with `insecure`, or if
    the hub is on this machine and no folder is chosen. Raises ConfigError if the hub's key is not
    known, or its addresses have different ones.
    """
    if insecure:
        return None
    folder, hubs = keys_folder(chosen), [hub] if isinstance(hub, str) else list(hub)
    is_local = chosen is None and all(is_local_name(split_address(each)[0]) for each in hubs)
    if is_local and not hub_key and not folder.exists():
        return None
    from edgetrain.exchange.keys.keyring import Keyring  # of a machine that has keys

    ring = Keyring(folder)
    key = public_key(hub_key) if hub_key else _pinned(ring, hubs)
    if key is not None:
        return Credentials(ring.pair(), key)
    if is_local:
        return None
    raise ConfigError(
        f"the key of the hub at {', '.join(hubs)} is not known here",
        "enrol with a token (edgetrain keys enroll --hub … --token …), give its key (--hub-key, "
        "hub_key=), or, inside a network you trust, --insecure (insecure=True)",
    )


def _pinned(ring: Keyring, hubs: Sequence[str]) -> Public | None:
    """The key that is pinned for a hub's addresses; one that has none has that of the others."""
    pins = {address: key for address, key in ring.hubs().items() if address in hubs}
    if len(set(pins.values())) > 1:
        shown = ", ".join(f"{address} {short(key)}…" for address, key in pins.items())
        raise ConfigError(
            f"these addresses have different keys here, so they are not one hub's: {shown}",
            "give the addresses of one hub, or its key (--hub-key)",
        )
    return next(iter(pins.values()), None)
