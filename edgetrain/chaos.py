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

Kind = Literal["hub", "power", "pause", "link", "slow"]
KINDS: tuple[Kind, ...] = ("hub", "power", "pause", "link", "slow")
"""The hub is killed and started again from its journal; a device loses power and starts anew; a
member's process stands still; its link is down; its link is slow."""

LONGEST_S: dict[Kind, float] = {"hub": 8.0, "power": 30.0, "pause": 12.0, "link": 9.0, "slow": 10.0}


@dataclass(frozen=True)
class Happening:
    """One thing that goes wrong, `at_s` after the beginning of training, `for_s` long."""

    at_s: float
    kind: Kind
    for_s: float
    member: int = 0

    def __str__(self) -> str:
        who = "the hub" if self.kind == "hub" else f"m{self.member}"
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
        found.append(
            Happening(rng.uniform(0, seconds), kind, min(for_s, longest), rng.randrange(members))
        )
    return tuple(sorted(found, key=lambda happening: happening.at_s))


class Witness:
    """Keeps what members have given, to merge it again afterwards."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, int], set[bytes]] = {}
        self._parts: dict[tuple[str, int], dict[int, bytes]] = {}

    def saw(self, member: str, round: int, part: int, payload: Buffer) -> None:
        """A part of a contribution has arrived at the hub. Repeats must be the same bytes."""
        content = bytes(payload)
        self._given.setdefault((member, round), set())
        parts = self._parts.setdefault((member, round), {})
        if parts.get(part, content) != content:
            self._given[member, round].add(content)
        parts[part] = content

    def changed(self) -> list[tuple[str, int]]:
        """Contributions that were sent twice and were not the same."""
        return [key for key, others in self._given.items() if others]

    def vector(self, member: str, round: int) -> Vector | None:
        """A contribution in float32, or None where it never came whole."""
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


def judge(
    journal: Iterable[Round],
    witness: Witness,
    merge: SliceRule,
    initial: Vector,
    ended: Mapping[str, str],
    steady: Iterable[str],
    submitted: Mapping[str, int],
) -> list[str]:
    """The laws, over everything the journal has:

    - a contribution counts once: no (member, round) twice in the journal;
    - nothing answered is lost: who was never without power has all it submitted in the journal;
    - the model is what the same contributions give without any fault: merged again, they lead to
      every reply and to the last base, bit for bit;
    - replicas are equal: everyone who came to the end has that base.

    `ended` are the bases (checksums as text) of members that came to the end, `steady` those that
    never lost power, `submitted` their rounds.
    """
    broken, always = [], set(steady)
    base = initial.copy()
    counted: Counter[tuple[str, int]] = Counter()
    for record in journal:
        counted.update((each.member, each.meant_for) for each in record.counted)
        given = [(each, witness.vector(each.member, each.meant_for)) for each in record.counted]
        if any(vector is None for _, vector in given):
            broken.append(f"round {record.round} counts what nobody gave")
            continue
        pieces = [_Given(vector, each.weight) for each, vector in given if vector is not None]
        merged: Vector = np.empty_like(base)
        merge.merge(pieces, merged)
        if merged.tobytes() != b"".join(bytes(payload) for payload in record.reply):
            broken.append(f"round {record.round}: merged again, its reply is another")
        base += merged
    broken += [f"{m} counts {n} times in round {r}" for (m, r), n in counted.items() if n > 1]
    for member in sorted(always):
        lost = [r for r in range(submitted.get(member, 0)) if not counted[member, r]]
        if lost:
            broken.append(f"{member} was there all the time, and its rounds {lost[:5]} are lost")
    wanted = f"{checksum(base):016x}"
    broken += [f"{m} ended with base {b}, not {wanted}" for m, b in ended.items() if b != wanted]
    # One that has lost power may: the hub had lost the first with it, and counts what comes last.
    broken += [
        f"{m} sent round {r} twice, differently" for m, r in witness.changed() if m in always
    ]
    return broken


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
