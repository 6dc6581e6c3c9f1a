"""The gateways of a simulation: at each site of the job a hub, as a process in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgetrain.exchange.gateway.site import SiteHub
from edgetrain.exchange.gateway.way_up import WayUp
from edgetrain.exchange.hub.effects import Observed
from edgetrain.exchange.hub.serve import serve
from edgetrain.fleet.networks import Profile, Site
from edgetrain.fleet.networks.profile import BARE
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.resolved import Resolved
from edgetrain.training.simulated.virtual import Process, World
from edgetrain.training.simulated.wires import HubWire, SimulatedNetwork


def with_gateways(planned: Resolved) -> tuple[tuple[Profile, ...], tuple[Site, ...]]:
    """The links of all hubs and the sites of a job: with a hub at each site, if it has gateways.
    The link of a gateway within its site is as good as none."""
    links, sites = planned.hub_links, planned.sites
    if not planned.job.fleet.gateways:
        return links, sites
    number = len(links)
    there = tuple(replace(site, hubs=(number + i,)) for i, site in enumerate(sites))
    return (*links, *[BARE] * len(sites)), there


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
        hub = hub_of(self._found, site=members)
        hub.policy = replace(hub.policy, status_s=0.0)
        site = SiteHub(hub, f"site {self._number}", self._connect)
        serve(site, self.wire, self._world.clock, _ignore)
        if site.link is not None:
            site.link.leave("done")

    def _connect(self) -> WayUp:
        wire = self._network.connect(self.wire.node)
        wire.on_arrival = self.wire.wake
        return WayUp(wire, self._world.clock)


def gateway_of(index: int, gateways: Sequence[SimulatedGateway], found: Resolved) -> HubWire | None:
    """Where a member connects: its site's gateway; None: the hub."""
    for gateway, site in zip(gateways, found.sites, strict=False):
        if index in site.members:
            return gateway.wire
    return None


def _ignore(effect: Observed) -> None:
    """What a site's hub does is in no run folder: the fleet's rounds are in the hub's."""
