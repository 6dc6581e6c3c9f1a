"""Assign devices, networks and sites to the members of a fleet. Pure.

A text names one profile for all members ("wan-200ms") or a mix with counts ("wifi:4, 4g-bad:4").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain import extensions
from edgetrain.errors import ConfigError
from edgetrain.fleet.devices.profile import load as load_device

if TYPE_CHECKING:
    from edgetrain.fleet.networks.site import Site


def devices_of(text: str) -> list[str]:
    """Return device names in member order; "servers" is a group, which is one member.

    >>> devices_of("raspberry-pi-4b:2, jetson-orin-nano")
    ['raspberry-pi-4b', 'raspberry-pi-4b', 'jetson-orin-nano']

    Raises ConfigError for a bad count or an unknown device.
    """
    return _named(text, "device", "raspberry-pi-4b:8", load_device)


def networks_of(text: str, members: int | None = None) -> list[str]:
    """Return network names in member order.

    >>> networks_of("none:2, rtt-50ms")
    ['none', 'none', 'rtt-50ms']

    If `members` is given, a single name without a count stands for all members, and any other text
    must name exactly this many. Raises ConfigError for a bad count or an unknown network.
    """
    from edgetrain.fleet.networks.profile import load  # members and hubs know no links

    profiles = _named(text, "network", "wifi:4", load)
    if members is not None and [colon for _, _, colon, _ in _items(text)] == [""]:
        return profiles * members
    if members is not None and len(profiles) != members:
        raise ConfigError(
            f"network '{text}' names {len(profiles)} members, the fleet has {members}",
            "give one name for all, or counts that add up",
        )
    return profiles


def spread(names: Sequence[str], count: int, what: str, of: str = "members") -> tuple[str, ...]:
    """Return one name per member (or what else there are `count` `of`); a single name stands for
    all.

    `what` is the key of [fleet] that errors name. Raises ConfigError for any other number of names.
    """
    if len(names) == 1:
        return tuple(names) * count
    if len(names) != count:
        raise ConfigError(
            f"fleet.{what} names {len(names)} {of}, the job has {count}",
            f"give one {what} for all, or as many as there are {of}",
        )
    return tuple(names)


def _items(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield each item of "NAME, NAME: REST" whole, and its name, ":" or "", and the rest.

    The path of a profile that is there may hold both marks.
    """
    text = extensions.dotted(text)
    while True:
        ends = (match.end() for match in _PATH_END.finditer(text))
        size = next((end for end in ends if Path(text[:end].strip()).expanduser().is_file()), 0)
        item, comma, after = text[size:].partition(",")
        name, colon, rest = item.partition(":")
        whole = text[: size + len(item)].strip()
        yield whole, text[:size].strip() or name.strip(), colon, rest.strip()
        if not comma:
            return
        text = after


_PATH_END = re.compile(r"\.toml(?=\s*(?:[:,]|$))")


def _named(text: str, what: str, example: str, load: Callable[[str], object]) -> list[str]:
    names: list[str] = []
    for item, name, colon, count in _items(text):
        if not name or (colon and not (count.isdecimal() and int(count) > 0)):
            raise ConfigError(f"'{item}' in {what} '{text}' is not NAME or NAME:COUNT", example)
        load(name)
        names += [name] * (int(count) if colon else 1)
    return names


def parse_sites(text: str, members: int) -> tuple[Site, ...]:
    """Parse sites such as "home-fixed: 0-3, 4g-good: 4 5 6"; a member is in one. ConfigError."""
    from edgetrain.fleet.networks.profile import load
    from edgetrain.fleet.networks.site import Site

    sites: list[Site] = []
    taken: set[int] = set()
    for item, name, colon, who in _items(text):
        if not item:
            continue
        if not colon or not who:
            raise ConfigError(f"'{item}' is not NETWORK: MEMBERS", "home-fixed: 0-3")
        indices = tuple(i for word in who.split() for i in _indices(word, members))
        twice = taken.intersection(indices) or len(set(indices)) < len(indices)
        if twice:
            raise ConfigError(f"'{item}' names a member that is already in a site")
        taken.update(indices)
        sites.append(Site(load(name), indices))
    return tuple(sites)


def members_of(text: str, members: int) -> tuple[int, ...]:
    """Return the members that a text such as "0-2 5" names. Raises ConfigError for any other."""
    return tuple(
        sorted({i for word in text.replace(",", " ").split() for i in _indices(word, members)})
    )


def _indices(word: str, members: int) -> Sequence[int]:
    first, dash, last = word.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ConfigError(f"'{word}' is not a member number or a range of them", "3 or 0-3")
    low, high = int(first), int(last) if dash else int(first)
    if not low <= high < members:
        raise ConfigError(f"members {word} are out of range", f"allowed: 0 to {members - 1}")
    return range(low, high + 1)
