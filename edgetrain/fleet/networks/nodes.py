"""The nodes of a fleet's network, and the links that bytes pass between any two of them. Pure.

Members and hubs are nodes: member i is node i, hub number k is node -1 - k. Each may have an access
link (up, down) of its own, and stand at a site behind an uplink that it shares. The way from a to b
is a's link up, the uplinks where they are not at the same site, and b's link down. The emulator and
the simulator have link models of their own; which of them are passed is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from edgetrain.fleet.networks.profile import Profile
from edgetrain.fleet.networks.site import Site

Stage = TypeVar("Stage")

LEAD = -1
"""The node of the hub that all members join."""


def hub_node(number: int) -> int:
    """The node of hub `number`; 0 is the lead. The same function finds the number of a node."""
    return -1 - number


def node_name(node: int) -> str:
    """A node as reports name it: m3, the hub, hub 1."""
    if node >= 0:
        return f"m{node}"
    return "the hub" if node == LEAD else f"hub {hub_node(node)}"


def by_node(members: Sequence[Profile], hubs: Sequence[Profile]) -> dict[int, Profile]:
    return {**dict(enumerate(members)), **{hub_node(k): hub for k, hub in enumerate(hubs)}}


@dataclass(frozen=True)
class NodeLinks(Generic[Stage]):
    """The links of all nodes, each as (up, down), in the caller's own type of link."""

    access: Mapping[int, tuple[Stage, Stage]]
    """By node. A node without one, as a hub may be, adds nothing to a way."""
    uplinks: Sequence[tuple[Site, tuple[Stage, Stage]]] = ()

    def way(self, source: int, target: int) -> list[Stage]:
        """The links from one node to another, in order; [] from a node to itself."""
        if source == target:
            return []
        here, there = self._uplink(source), self._uplink(target)
        stages = [self.access[source][0]] if source in self.access else []
        if here is not there:
            stages += [here[0]] if here else []
            stages += [there[1]] if there else []
        return stages + ([self.access[target][1]] if target in self.access else [])

    def _uplink(self, node: int) -> tuple[Stage, Stage] | None:
        return next((pair for site, pair in self.uplinks if node in site.nodes), None)
