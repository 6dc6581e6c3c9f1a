"""What goes wrong, and when: drawn by a seed. Pure; only the standard library.

`simulated` and `fleet` carry a schedule out; `laws` says what has to hold in spite of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from edgetrain.errors import ConfigError, did_you_mean

Kind = Literal[
    "hub", "disk", "kill", "power", "blackout", "pause", "clock", "link", "partition", "slow",
    "cut", "corrupt-up", "corrupt-down", "control-pause", "control-remove", "control-stop",
    "strangers", "frames",
]  # fmt: skip

MEANS: dict[Kind, str] = {
    "hub": "the hub is killed, and started again from its journal",
    "disk": "the disk of the journal is full: the hub stops until there is room, or goes on",
    "kill": "a member's process is killed, and started anew",
    "power": "a member's device loses power, and starts anew: nobody is told",
    "blackout": "the hub's machine and all members' devices lose power at once",
    "pause": "a member's process stands still",
    "clock": "a clock, the hub's or a member's, jumps ahead",
    "link": "a member's link is down",
    "partition": "several members' links are down at once",
    "slow": "a member's link has a twentieth of its rate",
    "cut": "a member's connection breaks, with what was under way",
    "corrupt-up": "a message of a member arrives damaged: the hub breaks the connection off",
    "corrupt-down": "a message to a member arrives damaged: the member breaks the connection off",
    "control-pause": "people pause the job, and let it go on",
    "control-remove": "people remove a member; its process is started anew",
    "control-stop": "people end the job",
}
"""What can go wrong. Connections are encrypted, so that the receiver of a damaged message knows."""

MEANS_TO_PROCESSES: dict[Kind, str] = {
    "strangers": "strangers hold connections, and the hub has few descriptors left",
    "frames": "a device that is no member sends the hub a message of frames without end",
}
"""What can also go wrong with real processes: it concerns sockets, which a simulation has not."""

KINDS: tuple[Kind, ...] = tuple(MEANS)
ORDERS: tuple[Kind, ...] = ("control-pause", "control-remove", "control-stop")
"""What people tell the lead: see `people`."""
FAULTS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind not in ORDERS)
PROCESS_KINDS: tuple[Kind, ...] = (*KINDS, *MEANS_TO_PROCESSES)

AN_INSTANT_S = 0.1

LONGEST_S: dict[Kind, float] = {
    "hub": 8.0, "disk": 8.0, "kill": 10.0, "power": 30.0, "blackout": 10.0, "pause": 12.0,
    "clock": 40.0,
    "link": 20.0, "partition": 25.0, "slow": 10.0, "cut": AN_INSTANT_S,
    "corrupt-up": AN_INSTANT_S, "corrupt-down": AN_INSTANT_S, "strangers": 15.0,
    "control-pause": 15.0, "control-remove": 10.0, "control-stop": AN_INSTANT_S,
    "frames": AN_INSTANT_S,
}  # fmt: skip


@dataclass(frozen=True)
class Happening:
    """One thing that goes wrong: `at_s` seconds after training began, for `for_s` seconds (a clock
    jumps by `for_s`), to these members and hubs; of neither: to the lead."""

    at_s: float
    kind: Kind
    for_s: float
    members: tuple[int, ...] = ()
    hubs: tuple[int, ...] = ()
    """Numbers, where a job has several."""

    def shrunk(self, share: float) -> Happening:
        """The same happening with its times multiplied by `share`."""
        return replace(self, at_s=self.at_s * share, for_s=self.for_s * share)

    def __str__(self) -> str:
        if self.kind == "blackout":
            return f"{self.at_s:.2f} s: blackout for {self.for_s:.2f} s"
        struck = [f"m{member}" for member in self.members] + [f"hub {hub}" for hub in self.hubs]
        who = " and ".join(struck) or "the hub"
        return f"{self.at_s:.2f} s: {self.kind} of {who} for {self.for_s:.2f} s"


def draw(
    seed: int,
    members: int,
    seconds: float,
    count: int,
    kinds: Sequence[Kind] = KINDS,
    hubs: int = 1,
) -> tuple[Happening, ...]:
    """Draw `count` happenings of the first `seconds` of training, in order of time. With several
    hubs any of them may be struck, and also stand still, be cut off, or be on either side of a
    partition."""
    rng = random.Random(f"{seed} chaos")
    found = []
    for _ in range(count):
        kind = rng.choice(kinds)
        longest = LONGEST_S[kind]
        # Short ones are as likely as long ones: both find mistakes.
        for_s = longest ** rng.random() * 0.05 ** (1 - rng.random())
        struck = _struck(kind, members, rng)
        at_s = rng.uniform(0, seconds)
        also = _struck_hubs(kind, struck, hubs, rng) if hubs > 1 and kind not in ORDERS else ()
        if also and kind != "partition":
            struck = ()
        found.append(Happening(at_s, kind, min(for_s, longest), struck, also))
    return tuple(sorted(found, key=lambda happening: happening.at_s))


def _struck(kind: Kind, members: int, rng: random.Random) -> tuple[int, ...]:
    """Draw the members that it strikes; (): the hub."""
    if kind == "blackout":
        return tuple(range(members))
    if kind in ("hub", "disk", "control-pause", "control-stop", "strangers", "frames") or (
        kind == "clock" and not rng.randrange(members + 1)
    ):
        return ()
    count = rng.randint(min(2, members), members) if kind == "partition" else 1
    return tuple(sorted(rng.sample(range(members), count)))


def _struck_hubs(
    kind: Kind, members: tuple[int, ...], hubs: int, rng: random.Random
) -> tuple[int, ...]:
    """Draw the hubs that it strikes; (): none. Where it is for members or hubs, for a hub one time
    in three."""
    if kind == "partition":
        return tuple(sorted(rng.sample(range(hubs), rng.randint(0, hubs - 1))))
    alike = kind in ("pause", "link", "slow", "cut") and not rng.randrange(3)
    return (rng.randrange(hubs),) if alike or (not members and kind != "blackout") else ()


def parse_kinds(text: str, kinds: tuple[Kind, ...] = KINDS) -> tuple[Kind, ...]:
    """The kinds in "hub,link"; all `kinds` for "". ConfigError suggests the nearest kind.

    >>> parse_kinds("hub, link")
    ('hub', 'link')
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name in MEANS_TO_PROCESSES and name not in kinds:
            raise ConfigError(f"'{name}' is for real processes", "add --processes")
        if name not in kinds:
            raise ConfigError(f"no kind of chaos '{name}'", did_you_mean(name, kinds))
    return tuple(kind for kind in kinds if kind in names) or kinds
