"""Which member has which device and network: "wan-200ms", or a mix "wifi:4, 4g-bad:4"; and sites
behind one uplink.

Texts to lists of names; pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgetrain.errors import ConfigError
from edgetrain.fleet.devices.profile import load as load_device
from edgetrain.fleet.networks.profile import load as load_network
from edgetrain.fleet.networks.site import Site


def devices_of(text: str) -> list[str]:
    """Device names in member order.

    >>> devices_of("raspberry-pi-4b:2, jetson-orin-nano")
    ['raspberry-pi-4b', 'raspberry-pi-4b', 'jetson-orin-nano']

    Raises ConfigError for a bad count or a name that no profile has.
    """
    return _named(text, "device", "raspberry-pi-4b:8", load_device)


def networks_of(text: str, members: int | None = None) -> list[str]:
    """Network names in member order.

    >>> networks_of("none:2, rtt-50ms")
    ['none', 'none', 'rtt-50ms']

    With `members`, a single name without a count stands for every member, and any other text must
    name exactly that many. Raises ConfigError for a bad count or a name that no profile has.
    """
    found = _named(text, "network", "wifi:4", load_network)
    if members is not None and not any(mark in text for mark in ",:"):
        return found * members
    if members is not None and len(found) != members:
        raise ConfigError(
            f"network '{text}' names {len(found)} members, the fleet has {members}",
            "give one name for all, or counts that add up",
        )
    return found


def spread(names: Sequence[str], members: int, what: str) -> tuple[str, ...]:
    """One of `names` for each member: a single name is everyone's. ConfigError names fleet.`what`
    where there are neither one nor as many as members."""
    if len(names) == 1:
        return tuple(names) * members
    if len(names) != members:
        raise ConfigError(
            f"fleet.{what} names {len(names)} members, the job has {members}",
            f"give one {what} for all, or as many as there are members",
        )
    return tuple(names)


def _named(text: str, what: str, example: str, load: Callable[[str], object]) -> list[str]:
    """Names with their counts, each looked up."""
    found: list[str] = []
    for item in (part.strip() for part in text.split(",")):
        name, colon, count = (part.strip() for part in item.partition(":"))
        if not name or (colon and not (count.isdecimal() and int(count) > 0)):
            raise ConfigError(f"'{item}' in {what} '{text}' is not NAME or NAME:COUNT", example)
        load(name)
        found += [name] * (int(count) if colon else 1)
    return found


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
        sites.append(Site(load_network(name), indices))
    return tuple(sites)


def _indices(word: str, members: int) -> Sequence[int]:
    first, dash, last = word.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ConfigError(f"'{word}' is not a member number or a range of them", "3 or 0-3")
    low, high = int(first), int(last) if dash else int(first)
    if not low <= high < members:
        raise ConfigError(f"members {word} are out of range", f"allowed: 0 to {members - 1}")
    return range(low, high + 1)
