"""The devices of a cluster as ssh reaches them: their addresses, their host keys; and the keys by
which they and their hub know each other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import spell
from edgetrain.fleet.cluster import Cluster, DeviceEntry
from edgetrain.fleet.ssh import Remote, SshAnswer, SshClient, SshHost, copy
from edgetrain.provisioning.cards.first_boot import MEMBERS

ACCEPTED = "known_hosts"
"""The file, beside the keys, of SSH host keys that a person said yes to."""


def hosts_of(cluster: Cluster, devices: Sequence[DeviceEntry]) -> list[SshHost]:
    """Where these devices are: at their static addresses, otherwise at NAME.local."""
    if cluster.ssh is None:
        raise ConfigError(f"{cluster.path}: [ssh] is missing", "which user do the devices have?")
    user = cluster.ssh.user
    return [SshHost(d.name, d.host, user) for d in devices]


def hub_keys(cluster: Cluster, ring: Keyring) -> str:
    """What devices know the hub by: a line "ADDRESS KEY" for each of its addresses; "" if the hub's
    keys are not on this machine, or the device that has the hub is not on its list."""
    addresses = cluster.hub.addresses if cluster.hub and ring.exists else ()
    key = ring.pair().public if addresses else None
    if addresses and cluster.hub_device:
        key = next((k for k, n in ring.members().items() if n == cluster.hub_device.name), None)
    return "".join(f"{address} {spell(key)}\n" for address in addresses if key)


def members_list(cluster: Cluster, ring: Keyring) -> str:
    """The list of the device that has the hub: this machine's, without that device itself; "" if
    none has it."""
    if (hub := cluster.hub_device) is None:
        return ""
    return "".join(
        sorted(f"{spell(k)} {name}\n" for k, name in ring.members().items() if name != hub.name)
    )


def send_list(remote: Remote, host: SshHost, root: str, members: str) -> SshAnswer:
    """Give the device that has the hub its list; a hub that runs takes it. root: the device's root,
    with a slash at its end."""
    with tempfile.TemporaryDirectory(prefix="edgetrain-list-") as folder:
        path = Path(folder) / "members"
        path.write_text(members, "utf-8")
        return copy(remote, host, path, f"{root}{MEMBERS}", root=True)


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
