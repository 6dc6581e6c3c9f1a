"""The process of backend `tc`: emulated hosts connected by the kernel's netem and router.

`backends` runs this module through `worker`. It builds the hosts, shapes both ends of each member's
veth, and then keeps the namespaces alive. The kernel does not report how late it is; `check`
measures it.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgetrain.errors import NetworkError
from edgetrain.fleet.networks.emulation import fabric, linux, tc
from edgetrain.fleet.networks.emulation.guard import run_command
from edgetrain.fleet.networks.emulation.netlink import Netlink, Wire
from edgetrain.fleet.networks.emulation.travel import direction_from_json
from edgetrain.fleet.networks.emulation.worker import Parent
from edgetrain.fleet.networks.profile import Direction

# One segment per packet: netem would lose a whole super-packet, which is 20 losses in a row.
_SINGLE = Wire(fabric.MAC, fabric.MTU, fabric.GSO_BYTES, gso_segments=1)


def build(config: Mapping[str, Any]) -> tuple[str, list[fabric.Host]]:
    """Make hosts with netem on both ends of each one's link, and routes between them.

    Returns how this process got the rights, and the hosts.
    """
    rights = fabric.become_able()
    hosts = fabric.build_for(config, _SINGLE)
    core = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1", "ascii")
    own = Netlink()
    for host in hosts:
        own.add_route(host.address, 32, socket.if_nametoindex(host.port))
    own.close()
    lead, *others = config["hubs"]
    for host, link in zip(hosts, [lead, *config["links"], *others], strict=True):
        _shape(host.port, direction_from_json(link["down"]))
        linux.setns(host.namespace, linux.CLONE_NEWNET)
        _shape(fabric.INTERFACE, direction_from_json(link["up"]))
        linux.setns(core, linux.CLONE_NEWNET)
    os.close(core)
    return rights, hosts


def _shape(device: str, way: Direction) -> None:
    if way.is_plain:
        return
    for command in tc.whole(device, way):
        done = run_command(command)
        if done.returncode:
            raise NetworkError(
                f"`{' '.join(command)}` failed: {done.stderr.strip()}",
                "this kernel may lack sch_netem; use backend packet",
            )


def main() -> None:
    parent = Parent()
    config = parent.config()
    with parent.reporting("the kernel's emulation"):
        rights, hosts = build(config)
    described = fabric.hosts_to_json(hosts)
    parent.answer({"hosts": described, "priority": "the kernel's", "rights": rights})
    while not parent.gone():
        if select.select([parent.fd], [], [], 0.4)[0]:
            for command in parent.commands():
                if command == "evict":
                    fabric.end_inhabitants(hosts)
                parent.answer({"lateness": "not measured by the kernel"})
    if parent.died():
        fabric.end_inhabitants(hosts)


if __name__ == "__main__":
    main()
