"""Members that share an uplink."""

from __future__ import annotations

from dataclasses import dataclass

from edgetrain.fleet.networks.profile import Profile


@dataclass(frozen=True, slots=True)
class Site:
    """Members behind one shared uplink. Each member also has its own access link in the site."""

    uplink: Profile
    members: tuple[int, ...]
