"""The devices of a cluster as ssh reaches them: their addresses, their host keys.

What runs there is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import spell
from edgetrain.fleet.cluster import DHCP, Cluster, DeviceEntry
from edgetrain.fleet.ssh import SshClient, SshHost

ACCEPTED = "known_hosts"
"""The file, beside the keys, of SSH host keys that a person said yes to."""


def hosts_of(cluster: Cluster, devices: Sequence[DeviceEntry]) -> list[SshHost]:
    """Where these devices are: at their static addresses, otherwise at NAME.local."""
    if cluster.ssh is None:
        raise ConfigError(f"{cluster.path}: [ssh] is missing", "which user do the devices have?")
    user = cluster.ssh.user
    return [
        SshHost(d.name, f"{d.name}.local" if d.address == DHCP else d.address.split("/")[0], user)
        for d in devices
    ]


def hub_keys(cluster: Cluster, ring: Keyring) -> str:
    """What devices know the hub by: a line "ADDRESS KEY" for each of its addresses; "" if the hub's
    keys are not on this machine."""
    addresses = cluster.hub.addresses if cluster.hub and ring.exists else ()
    return "".join(f"{address} {spell(ring.pair().public)}\n" for address in addresses)


def open_remote(
    keys: Path,
    ask: Callable[[str], bool] | None = None,
    password: str = "",
    *,
    keeps: bool = True,
) -> SshClient:
    """The way to the devices that enrolled at the hub with these keys. `ask` shows a line with the
    host key of a machine that is not known, and says whether it is right; None: nobody can be
    asked. password: of sudo on the devices. keeps: whether connections are kept for more commands.
    """
    known = Keyring(keys).hosts()
    return SshClient(known, accepted=keys / ACCEPTED, ask=ask, password=password, keeps=keeps)
