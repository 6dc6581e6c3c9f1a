"""Members that share an uplink."""

from __future__ import annotations

from dataclasses import dataclass

from edgetrain.fleet.networks.profile import Profile


@dataclass(frozen=True, slots=True)
class Site:
    """Members behind one shared uplink; each keeps its own access link inside the site."""

    uplink: Profile
    members: tuple[int, ...]
