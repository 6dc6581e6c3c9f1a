"""The devices of a cluster as ssh reaches them: their addresses, their host keys; and the keys by
which they and their hub know each other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import spell
from edgetrain.fleet.cluster import Cluster, DeviceEntry
from edgetrain.fleet.ssh import Remote, SshAnswer, SshHost, copy
from edgetrain.provisioning.cards.first_boot import MEMBERS


def hosts_of(cluster: Cluster, devices: Sequence[DeviceEntry]) -> list[SshHost]:
    """Hosts of these devices: their static addresses, otherwise NAME.local."""
    if cluster.ssh is None:
        raise ConfigError(f"{cluster.path}: [ssh] is missing", "which user do the devices have?")
    user = cluster.ssh.user
    return [SshHost(d.name, d.host, user) for d in devices]


def hub_keys(cluster: Cluster, ring: Keyring, device: DeviceEntry) -> str:
    """What a device knows its hub by, and its gateway: a line "ADDRESS KEY" for each address; "" if
    this machine has not the key of one of them: a device's is on its list."""
    known, joins = "", device
    keys = {name: key for key, name in ring.members().items()} if ring.exists else {}
    while ring.exists and joins.role != "hub":
        addresses, joined = cluster.addresses(joins), cluster.joined_by(joins)
        key = keys.get(joined.name) if joined else ring.pair().public
        if key is None:
            return ""
        known += "".join(f"{address} {spell(key)}\n" for address in addresses)
        if joined is None:
            break
        joins = joined
    return known


def members_list(cluster: Cluster, ring: Keyring, device: DeviceEntry) -> str:
    """The list of a device that others join; "" if this one is a member. A gateway lets in those of
    its site; a hub those on this machine's list, without itself and the members of gateways."""
    if device.role == "member":
        return ""
    joined = {d.name: cluster.joined_by(d) for d in cluster.devices}
    others = device if device.role == "hub" else None
    return "".join(
        sorted(
            f"{spell(key)} {name}\n"
            for key, name in ring.members().items()
            if joined.get(name, others) is device
        )
    )


def send_list(remote: Remote, host: SshHost, root: str, members: str) -> SshAnswer:
    """Give a device that others join its list; what runs there takes it. root: the device's root,
    with a slash at its end."""
    with tempfile.TemporaryDirectory(prefix="edgetrain-list-") as folder:
        path = Path(folder) / "members"
        path.write_text(members, "utf-8")
        return copy(remote, host, path, f"{root}{MEMBERS}", root=True)
