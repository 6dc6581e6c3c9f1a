"""Nodes that share an uplink."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from edgetrain.fleet.networks.profile import Profile


@dataclass(frozen=True)
class Site:
    """Members behind one shared uplink, and hubs that stand there with them, by number. Each of
    them also has its own access link in the site."""

    uplink: Profile
    members: tuple[int, ...]
    hubs: tuple[int, ...] = ()

    @functools.cached_property
    def nodes(self) -> frozenset[int]:
        """The nodes at it, as `networks.nodes` numbers them."""
        return frozenset((*self.members, *(-1 - hub for hub in self.hubs)))
