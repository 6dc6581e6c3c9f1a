"""The backends `none`, `stream`, `packet` and `tc`, as seen by the process that starts them."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from edgetrain.errors import ConfigError, NetworkError
from edgetrain.fleet.networks.emulation.emulation import Attachment, Emulation, EmulationRequest
from edgetrain.fleet.networks.emulation.namespaces import Namespace
from edgetrain.fleet.networks.emulation.travel import direction_to_json, faults_to_json
from edgetrain.fleet.networks.emulation.worker import Worker
from edgetrain.fleet.networks.profile import Profile

_DEFAULT_PORT = 5555  # always free in a new namespace


class Bare(Emulation):
    """Backend `none`: members connect to hubs, and to each other, directly."""

    backend = "none"

    def __init__(self, request: EmulationRequest, reason: str) -> None:
        super().__init__(request, reason)
        if request.sites or request.faults or request.nat or not request.bare_hubs:
            raise NetworkError(
                "backend 'none' has no sites, no faults, no NAT and no links of hubs",
                "use backend packet",
            )
        self._hubs = _hub_addresses(request)
        self._host = request.hub[0]

    @property
    def hub_addresses(self) -> tuple[str, ...]:
        return self._hubs

    def attachment(self, member: int) -> Attachment:
        return Attachment(self._hubs, host=self._host)


class _Worked(Emulation):
    """A backend with a process of its own."""

    _worker: Worker

    @property
    def pid(self) -> int:
        return self._worker.pid

    def start_faults(self, began_s: float | None = None) -> None:
        # All processes share the monotonic clock.
        at_ns = time.monotonic_ns() if began_s is None else round(began_s * 1e9)
        self._worker.ask(f"start {at_ns}")

    def _end(self) -> None:
        self._worker.close()


class Streamed(_Worked):
    """Backend `stream`: a proxy process between members and hubs. Members do not reach others."""

    backend = "stream"

    def __init__(self, request: EmulationRequest, reason: str) -> None:
        super().__init__(request, reason)
        if request.sites:
            raise NetworkError(
                f"backend 'stream' ({reason}) has no shared uplinks, and the job has sites",
                "use backend packet if namespaces are allowed, or leave the sites out",
            )
        if not request.bare_hubs or request.nat or any(fault.hubs for fault in request.faults):
            raise NetworkError(
                f"backend 'stream' ({reason}) has no links of hubs, no faults of them and no NAT",
                "use backend packet if namespaces are allowed, or leave fleet.hub_network, "
                "fleet.nat and faults of hubs out",
            )
        self._hubs = _hub_addresses(request)
        self._worker = Worker(
            "edgetrain.fleet.networks.emulation.stream", _stream_config(request, self._hubs)
        )
        self._proxies = [address(tuple(ready)) for ready in self._worker.ready["addresses"]]

    @property
    def hub_addresses(self) -> tuple[str, ...]:
        return self._hubs

    def attachment(self, member: int) -> Attachment:
        return Attachment(tuple(self._proxies[member :: len(self.request.profiles)]))

    def _congestion(self) -> str:
        return f"{self.request.congestion}, as a model"

    def _measured(self) -> dict[str, Any]:
        ready = self._worker.ready
        return {"approximate": True, "priority": ready["priority"], **self._worker.ask("report")}


def _stream_config(request: EmulationRequest, hubs: Sequence[str]) -> dict[str, Any]:
    links = [_both_ways(profile) for profile in request.profiles]
    for profile in request.profiles:
        if profile.has_loss and request.congestion == "none":
            raise ConfigError(
                f"network '{profile.name}' loses packets, and the stream backend without a "
                "congestion window would be far too fast (200 times at 1 %)",
                "use congestion 'cubic', or the packet backend",
            )
    return {
        "links": links,
        "hubs": [hub.removeprefix("tcp://").rsplit(":", 1) for hub in hubs],
        "seed": request.seed,
        "congestion": request.congestion,
        "faults": faults_to_json(request.faults),
    }


class Packeted(_Worked):
    """Backend `packet`: a namespace per host, real TCP, and a process that delays packets."""

    backend = "packet"
    module = "edgetrain.fleet.networks.emulation.packet"

    def __init__(self, request: EmulationRequest, reason: str) -> None:
        super().__init__(request, reason)
        self._worker = Worker(self.module, _packet_config(request))
        self._port = request.hub[1] or _DEFAULT_PORT
        self._hosts = self._worker.ready["hosts"]

    @property
    def hub_addresses(self) -> tuple[str, ...]:
        others = self._hosts[len(self.request.profiles) + 1 :]
        return tuple(address((host["address"], self._port)) for host in (self._hosts[0], *others))

    def _namespace(self, host: int) -> Namespace:
        entry = self._hosts[host]
        return Namespace(self._worker.pid, entry["fd"], entry["inode"])

    def hub_attachment(self, number: int = 0) -> Attachment:
        host = len(self.request.profiles) + number if number else 0
        return Attachment((self.hub_addresses[number],), self._namespace(host))

    def attachment(self, member: int) -> Attachment:
        if not 0 <= member < len(self.request.profiles):
            raise ConfigError(
                f"no member {member}", f"allowed: 0 to {len(self.request.profiles) - 1}"
            )
        host = self._hosts[member + 1]["address"]
        return Attachment(self.hub_addresses, self._namespace(member + 1), host)

    def evict(self) -> None:
        """Kill all processes that are still in one of the hosts."""
        self._worker.ask("evict")

    def _congestion(self) -> str:
        return self.request.congestion

    def _measured(self) -> dict[str, Any]:
        ready = self._worker.ready
        facts = {"approximate": False, "priority": ready["priority"], "rights": ready["rights"]}
        return {**facts, **self._worker.ask("report")}


class Shaped(Packeted):
    """Backend `tc`: the same hosts, connected and shaped by the kernel's netem."""

    backend = "tc"
    module = "edgetrain.fleet.networks.emulation.kernel"

    def __init__(self, request: EmulationRequest, reason: str) -> None:
        if request.sites or request.faults or request.nat:
            raise NetworkError(
                "backend 'tc' has no sites, no faults and no NAT", "use backend packet"
            )
        super().__init__(request, reason)


def _both_ways(profile: Profile) -> dict[str, Any]:
    return {"up": direction_to_json(profile.up), "down": direction_to_json(profile.down)}


def _packet_config(request: EmulationRequest) -> dict[str, Any]:
    return {
        "links": [_both_ways(profile) for profile in request.profiles],
        "hubs": [_both_ways(profile) for profile in request.hubs],
        "nat": sorted(request.nat),
        "sites": [
            {"uplink": _both_ways(site.uplink), "members": site.members, "hubs": site.hubs}
            for site in request.sites
        ],
        "seed": request.seed,
        "congestion": request.congestion,
        "faults": faults_to_json(request.faults),
    }


def _hub_addresses(request: EmulationRequest) -> tuple[str, ...]:
    """An address of this machine for each hub; the lead's has the request's port, if any."""
    with contextlib.ExitStack() as taken:  # all at once, so that no port is given out twice
        hubs = [request.hub, *((request.hub[0], 0) for _ in request.hubs[1:])]
        return tuple(address(with_port(hub, taken)) for hub in hubs)


def with_port(hub: tuple[str, int], taken: contextlib.ExitStack) -> tuple[str, int]:
    """Return `hub`, with port 0 replaced by a port that is free while `taken` is open."""
    if hub[1]:
        return hub
    trial = taken.enter_context(socket.socket())
    try:
        trial.bind((hub[0], 0))
    except OSError as error:
        raise NetworkError(
            f"the hub's address {hub[0]} is not usable here: {os.strerror(error.errno or 0)}",
            "use an address of this machine, such as 127.0.0.1",
        ) from None
    return hub[0], int(trial.getsockname()[1])


def address(end: Sequence[Any]) -> str:
    return f"tcp://{end[0]}:{end[1]}"
