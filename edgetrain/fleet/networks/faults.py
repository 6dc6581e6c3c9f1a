"""Scheduled faults, as data: links that go down, partitions, rates that drop. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.files.tables import key, ranged, read
from edgetrain.fleet.networks.nodes import hub_node, node_name
from edgetrain.fleet.networks.profile import Profile

KINDS = ("down", "partition", "rate")


@dataclass(frozen=True, slots=True)
class Fault:
    """A change of some members' links for a time.

    down        nothing passes on the links of these members and hubs.
    partition   these members and hubs reach each other, and no others. It differs from `down` if
                members exchange messages with each other, or with a hub on their side.
    rate        the access links of these members and hubs run at `share` of their profile's rate.

    `at_s` counts from the start of training. `hubs` are numbers, 0 is the lead. Empty `members` and
    `hubs` mean all members.
    """

    kind: str = key(choices=KINDS)
    at_s: float = ranged(MISSING, 0, 1e6, unit="s")
    for_s: float = ranged(MISSING, 0, 1e6, unit="s")
    members: tuple[int, ...] = ()
    share: float = ranged(1.0, 0.001, 1)
    hubs: tuple[int, ...] = ()

    @property
    def stops_traffic(self) -> bool:
        """Whether nothing passes on the links of these members."""
        return self.kind != "rate"

    def __str__(self) -> str:
        struck = (*self.members, *map(hub_node, self.hubs))
        whose = ", ".join(map(node_name, struck)) or "all members"
        what = f"at {self.share:.3g} of its rate" if self.kind == "rate" else self.kind
        return f"link of {whose}: {what} for {self.for_s:g} s"

    def strikes(self, node: int) -> bool:
        """Return whether the fault affects this node (`networks.nodes`)."""
        if node < 0:
            return hub_node(node) in self.hubs
        return node in self.members or not (self.members or self.hubs)


def parse_faults(
    tables: Iterable[Mapping[str, Any]], members: int, hubs: int = 1
) -> tuple[Fault, ...]:
    """Read faults from a job's [[faults]] tables. ConfigError names the table, key and range.

    >>> parse_faults([{"kind": "down", "at_s": 5, "for_s": 2, "members": [1]}], 4)
    (Fault(kind='down', at_s=5.0, for_s=2.0, members=(1,), share=1.0, hubs=()),)
    """
    faults, within = [], {"members": members - 1, "hubs": hubs - 1}
    for i, table in enumerate(tables):
        faults.append(read(Fault, table, prefix=f"faults[{i}].", within=within))
        if faults[-1].kind == "rate" and "share" not in table:
            raise ConfigError(f"faults[{i}].share is missing", "0.1 is a tenth of the rate")
    return tuple(faults)


def refuse_idle(faults: Sequence[Fault], links: Mapping[int, Profile]) -> None:
    """Raise ConfigError for a `rate` fault on a link without a fixed rate: it has no effect.
    `links`: the profile of each node."""
    for place, fault in enumerate(faults):
        if fault.kind != "rate":
            continue
        for node, profile in links.items():
            if fault.strikes(node) and not (profile.up.rate_mbit or profile.down.rate_mbit):
                raise ConfigError(
                    f"faults[{place}] is a share of the rate of {node_name(node)}, and network "
                    f"'{profile.name}' has no fixed rate",
                    "name members whose network has rate_mbit, or choose such a network",
                )


class FaultSchedule:
    """The faults that are active. The emulator calls `switch` on time; faults may overlap."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = tuple(faults)
        self._on: Counter[Fault] = Counter()

    def changes(self) -> list[tuple[float, Fault, bool]]:
        """Return (seconds, fault, begins) in time order; at equal times, ends come first."""
        events = [(fault.at_s, fault, True) for fault in self._faults]
        events += [(fault.at_s + fault.for_s, fault, False) for fault in self._faults]
        return sorted(events, key=lambda change: (change[0], change[2]))

    def switch(self, fault: Fault, begins: bool) -> None:
        self._on[fault] += 1 if begins else -1

    def _active(self) -> Iterable[Fault]:
        return (fault for fault, count in self._on.items() if count > 0)

    def apart(self, one: int, other: int) -> bool:
        """Whether nothing passes between two nodes."""
        for fault in self._active():
            if fault.kind == "down" and (fault.strikes(one) or fault.strikes(other)):
                return True
            if fault.kind == "partition" and fault.strikes(one) != fault.strikes(other):
                return True
        return False

    def rate_share(self, node: int) -> float:
        """Return the share of its rate that a node's link has now: the lowest of all faults."""
        return min(
            (f.share for f in self._active() if f.kind == "rate" and f.strikes(node)), default=1.0
        )
