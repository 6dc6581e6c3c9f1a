"""The gateways of a simulation: at each site of the job a hub, as a process in virtual time."""

from __future__ import annotations

from dataclasses import replace

from edgetrain.exchange.gateway.site import SitePart
from edgetrain.exchange.gateway.way_up import WayUp
from edgetrain.exchange.hub.serve import serve
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.resolved import Resolved
from edgetrain.training.simulated.virtual import Process, World
from edgetrain.training.simulated.wires import HubWire, SimulatedNetwork


class SimulatedGateway:
    """The gateway of site `number` of the job. `process` runs it; it keeps no journal."""

    def __init__(
        self, number: int, found: Resolved, world: World, network: SimulatedNetwork
    ) -> None:
        """It starts with the world."""
        self.wire: HubWire = network.hubs[len(found.hub_links) + number]
        """Where the site's members connect."""
        self._number, self._found, self._world, self._network = number, found, world, network
        self.process: Process = world.start(f"gateway {number}", self._serve)

    def _serve(self) -> None:
        members = len(self._found.sites[self._number].members)
        site = SitePart(f"site {self._number}", self._connect)
        hub = hub_of(self._found, site=members, part=site)
        hub.policy = replace(hub.policy, status_s=0.0)
        # What a site's hub does is in no run folder: the fleet's rounds are in the hub's.
        serve(hub, self.wire, self._world.clock, lambda effect: None)
        if site.link is not None:
            site.link.leave("done")

    def _connect(self) -> WayUp:
        wire = self._network.connect(self.wire.node)
        wire.on_arrival = self.wire.wake
        return WayUp(wire, self._world.clock)
