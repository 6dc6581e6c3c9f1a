"""Who has which network: "wan-200ms", or a mix "wifi:4, 4g-bad:4"; and sites behind one uplink.

Texts to lists of names; pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgetrain.errors import ConfigError
from edgetrain.fleet.networks.profile import Profile, load


def parse_fleet(text: str, members: int | None = None) -> list[str]:
    """Network names in member order.

    >>> parse_fleet("none:2, rtt-50ms")
    ['none', 'none', 'rtt-50ms']

    With `members`, a single name without a count stands for every member, and any other text must
    name exactly that many. Raises ConfigError for a bad count or a name that no profile has.
    """
    found: list[str] = []
    items = [item.strip() for item in text.split(",")]
    for item in items:
        name, colon, count = (part.strip() for part in item.partition(":"))
        if not name or (colon and not (count.isdecimal() and int(count) > 0)):
            raise ConfigError(f"'{item}' in network '{text}' is not NAME or NAME:COUNT", "wifi:4")
        load(name)
        found += [name] * (int(count) if colon else 1)
    if members is not None and len(items) == 1 and ":" not in items[0]:
        return found * members
    if members is not None and len(found) != members:
        raise ConfigError(
            f"network '{text}' names {len(found)} members, the fleet has {members}",
            "give one name for all, or counts that add up",
        )
    return found


@dataclass(frozen=True, slots=True)
class Site:
    """Members behind one shared uplink; each keeps its own access link inside the site."""

    uplink: Profile
    members: tuple[int, ...]


def parse_sites(text: str, members: int) -> tuple[Site, ...]:
    """Sites from "home-fixed: 0-3, 4g-good: 4 5 6"; a member stands in at most one site."""
    sites: list[Site] = []
    taken: set[int] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, colon, who = (part.strip() for part in item.partition(":"))
        if not colon or not who:
            raise ConfigError(f"'{item}' is not NETWORK: MEMBERS", "home-fixed: 0-3")
        indices = tuple(i for word in who.split() for i in _indices(word, members))
        twice = taken.intersection(indices) or len(set(indices)) < len(indices)
        if twice:
            raise ConfigError(f"'{item}' names a member that already stands in a site")
        taken.update(indices)
        sites.append(Site(load(name), indices))
    return tuple(sites)


def _indices(word: str, members: int) -> Sequence[int]:
    first, dash, last = word.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ConfigError(f"'{word}' is not a member number or a range of them", "3 or 0-3")
    low, high = int(first), int(last) if dash else int(first)
    if not low <= high < members:
        raise ConfigError(f"members {word} are out of range", f"allowed: 0 to {members - 1}")
    return range(low, high + 1)
