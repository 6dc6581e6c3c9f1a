"""The laws that hold whatever goes wrong, and the verdict on one schedule. Pure.

The caller reports the contributions that members sent (`Witness`), the rounds that the hub wrote,
and how members ended (`Ended`). `judge` returns the broken laws, as sentences.

It merges every round again, from the recorded contributions that the round says it counted, with
the job's own merge rule, outer rule and codecs, residuals of the reply included. The arithmetic is
the hub's: replies and bases have to be equal bit for bit. So a wrong bit shows, and a contribution
that was lost or counted twice.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from chaos.schedule import Happening
from edgetrain import codecs
from edgetrain.codecs import Codec
from edgetrain.codecs.auto import OnRungs, rung_of
from edgetrain.codecs.pieces import in_pieces
from edgetrain.errors import BadPayload, ConfigError
from edgetrain.exchange.further_messages import Computed
from edgetrain.exchange.hub.deal import BatchMean, SliceSums
from edgetrain.exchange.hub.records import Round
from edgetrain.jobs.resolved import Resolved
from edgetrain.strategies.lbfgs import Lbfgs, joined
from edgetrain.strategies.merging.rule import SliceRule
from edgetrain.strategies.outer_rules import OuterRule
from edgetrain.vectors.ranges import Ranges, Stretch
from edgetrain.vectors.vector import Buffer, Layout, Vector, checksum


class Witness:
    """Records what members have sent, to merge it again afterwards."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, int], set[bytes]] = {}
        self._parts: dict[tuple[str, int], dict[int, bytes]] = {}

    def saw(self, member: str, round: int, part: int, payload: Buffer) -> None:
        """Record a part of a contribution that a member sent. Repeats must be the same bytes."""
        content = bytes(payload)
        self._given.setdefault((member, round), set())
        parts = self._parts.setdefault((member, round), {})
        if parts.get(part, content) != content:
            self._given[member, round].add(content)
        parts[part] = content

    def promised(self, member: str, round: int) -> None:
        """Record that a member made a contribution: it has to count, even if nobody saw it sent."""
        self._given.setdefault((member, round), set())

    def changed(self) -> list[tuple[str, int]]:
        """(member, round) of contributions that were sent twice with different bytes."""
        return [key for key, others in self._given.items() if others]

    def rounds(self, member: str) -> list[int]:
        """The rounds that a member contributed to, or promised to, sorted."""
        return sorted(round for name, round in self._given if name == member)

    def payloads(self, member: str, round: int) -> list[bytes] | None:
        """A contribution as it was sent, part by part; None if nobody saw it."""
        parts = self._parts.get((member, round))
        return [parts[part] for part in sorted(parts)] if parts else None


class Answer(NamedTuple):
    """What a slice came to."""

    samples: int
    loss: float
    gradient: bytes


class Answers:
    """Records what members have answered to the hub's work, whoever answers."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], dict[int, Answer]] = {}
        self._changed: set[tuple[int, int]] = set()

    def saw(self, message: Computed) -> None:
        """Record a part of an answer. Those of two members to the same slice are to be equal."""
        answer = Answer(message.samples, message.loss, bytes(message.payload))
        key = message.round, message.slice
        if self._parts.setdefault(key, {}).setdefault(message.part, answer) != answer:
            self._changed.add(key)

    def of(self, round: int, slice: int) -> Answer | None:
        """What the slice came to; None: nobody answered."""
        parts = self._parts.get((round, slice))
        if not parts:
            return None
        return parts[0]._replace(gradient=b"".join(parts[i].gradient for i in sorted(parts)))

    def changed(self) -> list[tuple[int, int]]:
        """(round, slice) to which there were two answers."""
        return sorted(self._changed)


@dataclass(frozen=True)
class Outcome:
    """How one schedule ended. `broken` is empty if every law held."""

    seed: int
    happenings: tuple[Happening, ...]
    rounds: int
    seconds: float
    """Virtual seconds if the fleet was simulated."""
    broken: tuple[str, ...]
    base: str = ""
    """Checksum of the newest base that a member ended with, in 16 hexadecimal digits, where it is
    known."""


@dataclass(frozen=True)
class Ended:
    """A member that trained to the end."""

    applied: int
    """Number of replies that it had applied."""
    base: str
    """Checksum of its base, in 16 hexadecimal digits."""


@dataclass(frozen=True)
class Merging:
    """How a job's hub makes a reply of contributions, to do it again. Made by `Merging.of`."""

    rule: SliceRule
    codec: Codec
    """Of contributions."""
    reply_codec: Codec
    outer: OuterRule | None = None
    ranges: int = 1
    """Ranges of the vector that rounds concern in turn."""
    search: Lbfgs | None = None
    """What moves the base of a hub that hands out `slices` of a batch, `steps` times."""
    slices: int = 0
    steps: int = 0
    second: int | None = None
    """Where the mean gradients of all members begin in the vector; None: they are not in it."""

    @classmethod
    def of(cls, found: Resolved) -> Merging:
        """The merging of a job; ConfigError for a job that cannot be judged."""
        job, table = found.job, found.job.strategy
        if table.secure:
            raise ConfigError(
                "chaos with strategy.secure: its verdict merges contributions again, and nobody "
                "can read these",
                "leave secure out",
            )
        if not found.strategy.allows_late_join:
            raise ConfigError(
                f"chaos with {table.name}: a device that comes back cannot join",
                "choose dga or fedavg",
            )
        rule = found.strategy.merge_rule(table.merge)
        if not isinstance(rule, SliceRule) or job.privacy.where == "hub":
            raise ConfigError(
                f"chaos with merge = '{table.merge}'"
                + (" and noise at the hub" if job.privacy.where == "hub" else ""),
                "leave it at 'mean', and noise to the members",
            )
        row = found.strategy
        made = cls(rule, found.codec, found.reply_codec, row.outer_rule(), row.ranges)
        made = replace(made, second=0 if row.has_variates else None)
        if not row.deals:
            return made
        slices = row.argument("slices") * job.fleet.members
        return replace(made, search=row.search(), slices=slices, steps=job.train.steps)

    def bound(self, layout: Layout) -> Merging:
        """The same for a vector with this layout; (): the layout is not known."""
        elements = layout[-1][1] + math.prod(layout[-1][2]) if layout else 0
        return replace(
            self,
            second=None if self.second is None else elements // 2,
            codec=codecs.bound(self.codec, layout),
            reply_codec=codecs.bound(self.reply_codec, layout),
        )

    def of_stretch(self, stretch: Stretch, elements: int) -> Merging:
        """The same at a hub of this stretch of a vector of [elements]."""
        if stretch.count == 1:
            return self
        codec, reply_codec = (
            in_pieces(codec, stretch.pieces(elements)) for codec in (self.codec, self.reply_codec)
        )
        second = self.second and max(0, self.second - stretch.of(elements).start)
        return replace(self, codec=codec, reply_codec=reply_codec, second=second)

    def steps_of(
        self, merged: Vector, record: Round, known: Mapping[str, float]
    ) -> Iterator[Vector]:
        """What the hub may make of what was merged: the mean gradients count for as many as they
        are of all members, of whom the record of a round does not say which there were."""
        if self.second is None:
            yield merged
            return
        there = {each.member: each.weight for each in record.counted}
        weight = sum(each.weight for each in record.counted)
        others = [each for name, each in known.items() if name not in there]
        for n in range(len(others), -1, -1):
            for more in itertools.combinations(others, n):
                step = merged.copy()
                step[self.second :] *= np.float32(weight / sum((*there.values(), *more)))
                yield step

    def merge(
        self, given: Sequence[tuple[Sequence[bytes], float]], out: Vector, first: int
    ) -> None:
        """Overwrite `out`, the elements from the `first` on, with what the merged (payloads,
        weight) of one round add to the base. BadPayload. The outer rule, if there is one, goes on
        from the round before."""
        out[:] = 0
        for part, here in enumerate(self.codec.slices(out.size) if given else ()):
            pieces = [_Given(self.codec, payloads[part], weight) for payloads, weight in given]
            self.rule.merge(pieces, out[here])
        if self.outer is not None and given:
            self.outer.step(out, first)

    def mean(self, round: int, answers: Answers) -> BatchMean | None:
        """What the answers to each slice once come to; None: a slice has none."""
        sums = SliceSums()
        for slice in range(self.slices):
            if (answer := answers.of(round, slice)) is None:
                return None
            gradient = np.frombuffer(answer.gradient, np.float32) if answer.gradient else None
            sums.add(slice, answer.samples, answer.loss, gradient)
        return sums.mean()


def judge(
    merged: Iterable[Round],
    witness: Witness,
    merging: Merging,
    initial: Vector,
    ended: Mapping[str, Ended],
    steady: Iterable[str],
) -> list[str]:
    """Judge every round that members were told of; returns the laws that were broken.

    - A contribution counts once: no (member, round) counts twice.
    - Nothing is lost: all contributions of a member that was never killed or without power count.
    - The model is what the same contributions give without any fault: merged again, they give every
      reply, bit for bit, and the last base.
    - Replicas are equal: a member that trained to the end has the base of the replies that it
      applied, and at least one applied all of them.

    `merged` are the rounds in order: those in the journal, and those of a hub that went on without
    one. `initial` is the base before the first round, float32 [elements]. `ended`: the members that
    trained to the end; `steady`: the members that were never killed or without power.
    """
    return judge_hubs([Judged(tuple(merged), witness, merging, initial)], ended, steady)


@dataclass(frozen=True)
class Judged:
    """What one hub did: see `judge`, of its stretch of the vector."""

    merged: tuple[Round, ...]
    witness: Witness
    merging: Merging
    initial: Vector
    answers: Answers | None = None
    """Where the hub hands out work: then these count, each slice once, and no contributions."""


def judge_hubs(
    hubs: Sequence[Judged],
    ended: Mapping[str, Ended],
    steady: Iterable[str],
    *,
    stopped_at: int | None = None,
) -> list[str]:
    """Judge the rounds of hubs that have a stretch of the vector each, in its order: the laws of
    `judge` hold for each hub, and replicas have what all of them have added up.

    Where the lead said that people end the job, at the round `stopped_at`, it closes none from then
    on. A member may end without the last replies, and its last contributions may not count: none
    before one that does."""
    always, bases, broken = set(steady), [], list[str]()
    stopped, moved = stopped_at is not None, iter(_moved_bases(hubs))
    for number, hub in enumerate(hubs):
        if hub.answers is not None:
            known, found = next(moved)
        else:
            known, found = _bases(hub.merged, hub.witness, hub.merging, hub.initial)
        bases.append(known)
        found += _counted(hub.merged, hub.witness, always, stopped)
        if stopped_at is not None and number == 0:
            late = [record.round for record in hub.merged if record.round >= stopped_at]
            found += [f"rounds {late[:5]} closed after people ended the job"] if late else []
        broken += [f"hub {number}: {each}" if len(hubs) > 1 else each for each in found]
    rounds = max(map(len, bases)) - 1
    for member, end in ended.items():
        wanted = "of fewer replies"
        if end.applied < min(map(len, bases)):
            wanted = _checksum_of(np.concatenate([each[end.applied] for each in bases]))
        if end.base != wanted:
            broken.append(f"{member} ended with base {end.base}, not {wanted}")
    if not stopped and ended and max(end.applied for end in ended.values()) != rounds:
        broken.append(f"there were {rounds} rounds, and nobody ended with all of them")
    return broken


def _counted(
    rounds: Iterable[Round], witness: Witness, always: set[str], stopped: bool
) -> list[str]:
    """The laws of counting that one hub broke."""
    counted = Counter((each.member, each.meant_for) for record in rounds for each in record.counted)
    broken = [f"{m} counts {n} times in round {r}" for (m, r), n in counted.items() if n > 1]
    for member in sorted(always):
        given = witness.rounds(member)
        end = max((r for m, r in counted if m == member), default=0) if stopped else float("inf")
        lost = [r for r in given if r < end and not counted[member, r]]
        if lost:
            broken.append(f"{member} was there all the time, and its rounds {lost[:5]} are lost")
    # A member that was killed may: the hub dropped the first with the member, and counts the last.
    broken += [
        f"{m} sent round {r} twice, differently" for m, r in witness.changed() if m in always
    ]
    return broken


def _bases(
    rounds: Iterable[Round], witness: Witness, merging: Merging, initial: Vector
) -> tuple[list[Vector], list[str]]:
    """The base before the first round and after each, merged again; broken laws."""
    base, ranges = initial.copy(), Ranges(initial.size, merging.ranges)
    replies = codecs.memory(merging.reply_codec, base.size)
    if merging.outer is not None:
        merging.outer.start(base.size)
    bases, broken, weights = [base.copy()], [], dict[str, float]()
    for record in rounds:
        weights |= {each.member: each.weight for each in record.counted}
        changed = ranges.of(record.round)
        told = np.zeros_like(base[changed])
        given = [(witness.payloads(c.member, c.meant_for), c.weight) for c in record.counted]
        known = [(payloads, weight) for payloads, weight in given if payloads is not None]
        if len(known) < len(given):
            broken.append(f"round {record.round} counts what nobody gave")
            continue
        try:
            merging.merge(known, told, changed.start)
        except (BadPayload, IndexError):
            broken.append(f"round {record.round} counts what is no whole contribution")
            continue
        if isinstance(replies, OnRungs):
            replies.climb(rung_of(record.reply[0]))
        before, reply = replies, list[bytes]()
        for step in merging.steps_of(told, record, weights):
            replies = before if merging.second is None else copy.deepcopy(before)
            reply = [bytes(payload) for payload in replies.encode(step, changed)]
            if b"".join(reply) == b"".join(map(bytes, record.reply)):
                break
        else:
            broken.append(f"round {record.round}: merged again, its reply is another")
        for here, payload in zip(merging.reply_codec.slices(told.size), reply, strict=True):
            merging.reply_codec.decode(payload, told[here])
        base[changed] += told
        bases.append(base.copy())
    return bases, broken


def _moved_bases(hubs: Sequence[Judged]) -> list[tuple[list[Vector], list[str]]]:
    """Of each hub that hands out work, the base before the first round and after each, searched
    again by the slices of all of them; broken laws."""
    found = []
    for hub in hubs:
        if hub.answers is None:
            return []
        assert hub.merging.search is not None
        hub.merging.search.start(hub.initial.size)
        twice = [f"slice {s} of round {r} has two answers" for r, s in hub.answers.changed()]
        found.append(([hub.initial.copy()], twice))
    for round in range(max(len(hub.merged) for hub in hubs)):
        if not _moved(hubs, round, found):
            break
    return found


def _moved(
    hubs: Sequence[Judged], round: int, found: Sequence[tuple[list[Vector], list[str]]]
) -> bool:
    """Move all hubs once; whether there is something to go on from."""
    shares, means = [], []
    for number, (hub, (bases, broken)) in enumerate(zip(hubs, found, strict=True)):
        search, answers = hub.merging.search, hub.answers
        assert search is not None
        assert answers is not None
        wants = search.wants_gradient
        mean = hub.merging.mean(round, answers) if wants or not number else means[0]
        if mean is None:
            broken.append(f"round {round} counts a slice that nobody answered")
            return False
        products = search.products(bases[-1], mean.vector) if mean.vector is not None else []
        shares.append(np.array([mean.loss, *products]))
        means.append(mean)
    told = joined(shares)
    for hub, mean, (bases, broken) in zip(hubs, means, found, strict=True):
        assert hub.merging.search is not None
        last, products = round + 1 == hub.merging.steps, None
        if len(hubs) > 1 and mean.vector is not None:
            products = told[1:]
        step = hub.merging.search.move(bases[-1], told[0], mean.vector, last, products)
        if round < len(hub.merged):
            reply = b"".join(map(bytes, hub.merged[round].reply))
            if hub.merged[round].round != round or reply != step.tobytes():
                broken.append(f"round {round}: each slice once, its reply is another")
            bases.append(bases[-1] + step)
    return all(len(bases) == len(found[0][0]) for bases, _ in found)


def _checksum_of(base: Vector) -> str:
    return f"{checksum(base):016x}"


@dataclass(frozen=True)
class _Given:
    """A part of a contribution, as a merge rule reads it."""

    codec: Codec
    payload: bytes
    weight: float

    def read(self, out: Vector) -> None:
        self.codec.decode(self.payload, out)

    def add(self, weight: float, out: Vector) -> None:
        self.codec.add(self.payload, weight, out)
