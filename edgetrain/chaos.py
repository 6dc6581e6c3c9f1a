"""Chaos: a seeded schedule of what goes wrong in a simulated fleet, and a verdict. Pure.

What happens is drawn here and done by `simulate`; the verdict is a list of broken laws, empty where
all held.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgetrain.checksum import Vector, checksum
from edgetrain.codecs import Dense
from edgetrain.merge import SliceRule
from edgetrain.messages import Buffer
from edgetrain.records import Round

Kind = Literal[
    "hub", "disk", "kill", "power", "pause", "clock", "link", "partition", "slow", "cut",
    "corrupt-up", "corrupt-down",
]  # fmt: skip

MEANS: dict[Kind, str] = {
    "hub": "the hub is killed, and started again from its journal",
    "disk": "the disk of the journal is full: the hub stops until there is room, or goes on",
    "kill": "a member's process is killed, and started anew",
    "power": "a member's device loses power, and starts anew: nobody is told",
    "pause": "a member's process stands still",
    "clock": "a clock, the hub's or a member's, jumps ahead",
    "link": "a member's link is down",
    "partition": "several members' links are down at once",
    "slow": "a member's link has a twentieth of its rate",
    "cut": "a member's connection breaks, with what was under way",
    "corrupt-up": "a message of a member arrives damaged: the hub breaks the connection off",
    "corrupt-down": "a message to a member arrives damaged: the member breaks the connection off",
}
"""What can go wrong. Connections are encrypted, so that whoever gets a damaged message knows it."""

KINDS: tuple[Kind, ...] = tuple(MEANS)

AN_INSTANT_S = 0.1

LONGEST_S: dict[Kind, float] = {
    "hub": 8.0, "disk": 8.0, "kill": 10.0, "power": 30.0, "pause": 12.0, "clock": 40.0,
    "link": 20.0, "partition": 25.0, "slow": 10.0, "cut": AN_INSTANT_S,
    "corrupt-up": AN_INSTANT_S, "corrupt-down": AN_INSTANT_S,
}  # fmt: skip


@dataclass(frozen=True)
class Happening:
    """One thing that goes wrong, `at_s` after the beginning of training, `for_s` long (a clock
    jumps by so much), to these members (none: to the hub)."""

    at_s: float
    kind: Kind
    for_s: float
    members: tuple[int, ...] = ()

    def __str__(self) -> str:
        who = " and ".join(f"m{member}" for member in self.members) or "the hub"
        return f"{self.at_s:.2f} s: {self.kind} of {who} for {self.for_s:.2f} s"


def draw(
    seed: int, members: int, seconds: float, count: int, kinds: Sequence[Kind] = KINDS
) -> tuple[Happening, ...]:
    """`count` happenings within the first `seconds` of training, in order of time."""
    rng = random.Random(f"{seed} chaos")
    found = []
    for _ in range(count):
        kind = rng.choice(kinds)
        longest = LONGEST_S[kind]
        # Short ones are as likely as long ones: both find mistakes.
        for_s = longest ** rng.random() * 0.05 ** (1 - rng.random())
        struck = _struck(kind, members, rng)
        found.append(Happening(rng.uniform(0, seconds), kind, min(for_s, longest), struck))
    return tuple(sorted(found, key=lambda happening: happening.at_s))


def _struck(kind: Kind, members: int, rng: random.Random) -> tuple[int, ...]:
    """Whom it strikes."""
    if kind in ("hub", "disk") or (kind == "clock" and not rng.randrange(members + 1)):
        return ()
    count = rng.randint(min(2, members), members) if kind == "partition" else 1
    return tuple(sorted(rng.sample(range(members), count)))


class Witness:
    """Keeps what members have given, to merge it again afterwards."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, int], set[bytes]] = {}
        self._parts: dict[tuple[str, int], dict[int, bytes]] = {}

    def saw(self, member: str, round: int, part: int, payload: Buffer) -> None:
        """A member has handed over a part of a contribution. Repeats must be the same bytes."""
        content = bytes(payload)
        self._given.setdefault((member, round), set())
        parts = self._parts.setdefault((member, round), {})
        if parts.get(part, content) != content:
            self._given[member, round].add(content)
        parts[part] = content

    def changed(self) -> list[tuple[str, int]]:
        """Contributions that were sent twice and were not the same."""
        return [key for key, others in self._given.items() if others]

    def rounds(self, member: str) -> list[int]:
        """The rounds that a member has contributed to, sorted."""
        return sorted(round for name, round in self._parts if name == member)

    def vector(self, member: str, round: int) -> Vector | None:
        """A contribution in float32, or None where nobody gave it."""
        parts = self._parts.get((member, round))
        if not parts:
            return None
        return np.frombuffer(b"".join(parts[part] for part in sorted(parts)), np.float32)


@dataclass(frozen=True)
class Outcome:
    """How one schedule ended. `broken` is empty where every law held."""

    seed: int
    happenings: tuple[Happening, ...]
    rounds: int
    seconds: float
    """Virtual."""
    broken: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """A member that came to the end."""

    applied: int
    """Replies it had applied."""
    base: str
    """Checksum of its base, as text."""


def judge(
    merged: Iterable[Round],
    witness: Witness,
    merge: SliceRule,
    initial: Vector,
    ended: Mapping[str, Ended],
    steady: Iterable[str],
) -> list[str]:
    """The laws, over every round that members were told of (what the journal has, and what a hub
    told that went on without one):

    - a contribution counts once: no (member, round) twice;
    - nothing is lost: of who was never without power, or killed, all that it gave counts;
    - the model is what the same contributions give without any fault: merged again, they lead to
      every reply, bit for bit, and to the last base;
    - replicas are equal: everyone who came to the end has the base after the replies it had got,
      and the last who did has that of all.

    `ended` are the members that came to the end, `steady` those that were never cut short.
    """
    broken, always = [], set(steady)
    base = initial.copy()
    bases = [_spelt(base)]
    counted: Counter[tuple[str, int]] = Counter()
    for record in merged:
        counted.update((each.member, each.meant_for) for each in record.counted)
        given = [(each, witness.vector(each.member, each.meant_for)) for each in record.counted]
        if any(vector is None for _, vector in given):
            broken.append(f"round {record.round} counts what nobody gave")
            continue
        pieces = [_Given(vector, each.weight) for each, vector in given if vector is not None]
        reply: Vector = np.zeros_like(base)
        if pieces:
            merge.merge(pieces, reply)
        if reply.tobytes() != b"".join(bytes(payload) for payload in record.reply):
            broken.append(f"round {record.round}: merged again, its reply is another")
        base += reply
        bases.append(_spelt(base))
    broken += [f"{m} counts {n} times in round {r}" for (m, r), n in counted.items() if n > 1]
    for member in sorted(always):
        lost = [r for r in witness.rounds(member) if not counted[member, r]]
        if lost:
            broken.append(f"{member} was there all the time, and its rounds {lost[:5]} are lost")
    for member, end in ended.items():
        wanted = bases[end.applied] if end.applied < len(bases) else "of fewer replies"
        if end.base != wanted:
            broken.append(f"{member} ended with base {end.base}, not {wanted}")
    if ended and max(end.applied for end in ended.values()) != len(bases) - 1:
        broken.append(f"there were {len(bases) - 1} rounds, and nobody ended with all of them")
    # One that has lost power may: the hub had lost the first with it, and counts what comes last.
    broken += [
        f"{m} sent round {r} twice, differently" for m, r in witness.changed() if m in always
    ]
    return broken


def _spelt(base: Vector) -> str:
    return f"{checksum(base):016x}"


@dataclass(frozen=True)
class _Given:
    """A contribution as a merge rule sees it."""

    vector: Vector
    weight: float

    def read(self, out: Vector) -> None:
        out[:] = self.vector

    def add(self, weight: float, out: Vector) -> None:
        Dense().add(self.vector.data.cast("B"), weight, out)


def search(
    seeds: Iterable[int], run: Callable[[int], Outcome], watch: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run every seed's schedule; `watch` hears of each. The outcomes in which a law was broken."""
    found = []
    for seed in seeds:
        outcome = run(seed)
        watch(outcome)
        if outcome.broken:
            found.append(outcome)
    return found
