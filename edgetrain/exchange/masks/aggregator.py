"""The hub's side of secure aggregation: it passes keys and shares on, adds up masked contributions,
which it cannot read, and unmasks their sum.

The hub decides which members take part and when a round closes; the aggregator knows the masks.
Keys are made for a block of rounds at a time:

    phase        what the hub waits for           next        what it sends then
    advertise    Advertise, public keys           share       KeyList, to all that advertised
    share        Shares, encrypted for others     ready       Shares, to all that shared
    ready        -

A phase ends when all members that are there have answered, or, after a time, without those that
have not. With fewer than the threshold the block is removed, and begun again by the caller once
enough members are there: its rounds stay open.

A round whose block is ready is added up until it is closed. Then the holders of shares are asked to
unmask it, and it ends: with a vector, or given up because too few contributed or answered.

No socket, no clock: the time is an argument. Nothing here is written to a journal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from edgetrain.errors import BadMessage, BadPayload
from edgetrain.exchange.further_messages import (
    Advertise,
    KeyList,
    Masking,
    Rekey,
    Reveal,
    Shares,
    Unmask,
)
from edgetrain.exchange.keys.pairs import KEY_BYTES
from edgetrain.exchange.masks import primitives
from edgetrain.exchange.masks.fixed_point import FixedPoint, Words
from edgetrain.exchange.masks.masker import pair_key
from edgetrain.exchange.masks.payloads import (
    SEED_BYTES,
    advert_bytes,
    check_length,
    key_list_bytes,
    keys_of,
    read_table,
    round_context,
    shares_bytes,
    write_places,
    write_table,
)
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.vectors.vector import Buffer, Vector

Outgoing: TypeAlias = list[tuple[str, Masking]]
"""Messages, each with the name of the member it is for."""


@dataclass(frozen=True)
class Sum:
    """The end of a round."""

    vector: Vector | None
    """The weighted mean; None: the round is given up, and its sum is never unmasked."""
    reason: str = ""


@dataclass
class HubBlock:
    """One block of rounds, as the hub knows it."""

    number: int
    first: int
    rounds: int
    weights: dict[str, float]
    """Weights of all members asked for keys."""
    since: float
    """When this phase began."""
    phase: Literal["advertise", "share", "ready"] = "advertise"
    adverts: dict[str, bytes] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """Members that have advertised keys, by place."""
    unit: float = 1.0
    """The largest of their weights."""
    sent: Buffer = b""
    """The payload of the list of keys."""
    digest: bytes = b""
    shares: dict[str, dict[int, bytes]] = field(default_factory=dict)
    """Encrypted shares as they came, by sender and place of the receiver."""
    holders: tuple[str, ...] = ()
    """Members that have shared their secrets, by place."""
    lost: set[str] = field(default_factory=set)
    """Members that restarted, and have lost their secrets."""

    @property
    def end(self) -> int:
        return self.first + self.rounds

    def waits_for(self) -> tuple[Collection[str], Collection[str]]:
        """Members asked for what this phase needs, and those of them that have answered."""
        if self.phase == "advertise":
            return self.weights, self.adverts
        return self.names, self.shares

    def place(self, name: str) -> int:
        return self.names.index(name)

    def row(self, place: int, round: int) -> tuple[bytes, bytes]:
        """The public key and the commitment that a place has advertised for a round."""
        start = KEY_BYTES * (1 + 2 * (round - self.first))
        row = self.adverts[self.names[place]][start : start + 2 * KEY_BYTES]
        return row[:KEY_BYTES], row[KEY_BYTES:]


@dataclass
class OpenSum:
    """A round that is being added up, or unmasked."""

    total: Words
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of the contributions in `total`, relative to the unit."""
    asked: Unmask | None = None
    """The request for shares, once the round is closed."""
    asked_at: float = 0.0
    reveals: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """Shares by place of the holder, and place of the member whose secret they restore."""
    end: Sum | None = None


class Aggregator:
    """The masks of one job, at its hub. Keeps one sum for each round, and no contributions."""

    def __init__(self, terms: MaskTerms) -> None:
        self.terms = terms
        self._fixed = FixedPoint(terms.clip_range, terms.members)
        self._blocks: list[HubBlock] = []
        self._numbers = 0
        self._open: dict[int, OpenSum] = {}
        self._front = 0
        """The round after the last one with a contribution."""
        self.remarks: list[str] = []
        """Lines for the log; the caller that logs them empties the list."""

    def start_masks(self, epoch: int) -> None:
        """Start without blocks and rounds. `epoch`: how often the hub was restored."""
        self._blocks, self._open, self._front = [], {}, 0
        self._numbers = epoch << 32

    @property
    def blocks(self) -> Sequence[HubBlock]:
        """The blocks that are not over, oldest first."""
        return self._blocks

    @property
    def open_sums(self) -> Mapping[int, OpenSum]:
        """The rounds with a contribution, or closed, that have not been answered yet."""
        return self._open

    # -- blocks of keys ------------------------------------------------------------------------

    def wants_block(self, round: int) -> bool:
        """Whether to begin the next block now, so that no round waits for its keys.

        `round` is the oldest open one. The next block is begun when a quarter of the last is used:
        a newcomer does not wait for long, and three quarters are left to make the keys.
        """
        if not self._blocks:
            return True
        last = self._blocks[-1]
        if last.phase != "ready":
            return False
        return max(self._front, round) >= last.first + last.rounds // 4

    @property
    def next_first(self) -> int:
        """The first round of the next block, from which newcomers can contribute."""
        return self._blocks[-1].end if self._blocks else 0

    def begin_block(
        self, weights: Mapping[str, float], first: int, rounds: int, now: float
    ) -> Outgoing:
        """Ask members, `weights` by name, for keys for [first, first + rounds)."""
        if self._blocks:
            first = max(first, self.next_first)
        block = HubBlock(self._numbers, first, rounds, dict(sorted(weights.items())), now)
        self._numbers += 1
        self._blocks.append(block)
        return [(name, self._rekey(block)) for name in block.weights]

    def _rekey(self, block: HubBlock) -> Rekey:
        return Rekey(block.number, block.first, block.rounds)

    def accept_message(self, name: str, message: Masking) -> None:
        """Handle a member's message about masks. Raises BadMessage if it is wrong."""
        match message:
            case Advertise():
                self._take_advert(name, message)
            case Shares():
                self._take_shares(name, message)
            case Reveal():
                self._take_reveal(name, message)
            case _:
                raise BadMessage(f"{type(message).__name__} is a message to members")

    def advance_blocks(self, present: Collection[str], patience_s: float, now: float) -> Outgoing:
        """End the phases that can end: all members `present` have answered, or `patience_s` is over
        and enough have. Returns what to send."""
        out: Outgoing = []
        for block in list(self._blocks):
            if block.phase == "ready":
                continue
            asked, answered = block.waits_for()
            able = [name for name in asked if name not in block.lost]
            missing = [name for name in able if name in present and name not in answered]
            made = sum(name in answered for name in able)
            enough = made >= self.terms.threshold
            too_few = len(able) < self.terms.threshold
            overdue = too_few or now - block.since >= patience_s
            if not overdue and (missing or not enough):
                continue
            if not enough:
                self._blocks.remove(block)  # these rounds get another one
                self.remarks.append(
                    f"{made} of at least {self.terms.threshold} members made keys for rounds "
                    f"{block.first} to {block.end - 1}: they are asked again"
                )
            elif block.phase == "advertise":
                out += self._pass_on_keys(block, now)
            else:
                block.phase = "ready"
                block.holders = tuple(name for name in block.names if name in block.shares)
                out += [(name, self._shares_for(block, name)) for name in block.holders]
        return out

    def _take_advert(self, name: str, message: Advertise) -> None:
        block = self._numbered(message.block)
        if block is None or block.phase != "advertise" or name in block.adverts:
            return
        if name not in block.weights:
            raise BadMessage("it was not asked for keys")
        size = advert_bytes(block.rounds)
        advert = check_length(message.payload, size, "public keys")
        # Members stop if a list of keys could betray them: a single one must not cause that.
        if advert[:KEY_BYTES] in {other[:KEY_BYTES] for other in block.adverts.values()}:
            raise BadMessage("it shows another member's key")
        if not all(primitives.is_public(key) for key in keys_of(advert)):
            raise BadMessage("one of its public keys is not an X25519 key")
        block.adverts[name] = advert

    def _pass_on_keys(self, block: HubBlock, now: float) -> Outgoing:
        block.phase, block.since = "share", now
        block.names = tuple(sorted(block.adverts))
        block.unit = max(block.weights[name] for name in block.names)
        block.sent = b"".join(block.adverts[name] for name in block.names)
        block.digest = primitives.digest(key_list_bytes(self.terms, block.unit, block.sent))
        return [(name, self._key_list(block, name)) for name in block.names]

    def _key_list(self, block: HubBlock, name: str) -> KeyList:
        place, places = block.place(name), len(block.names)
        return KeyList(block.number, place, places, block.unit, block.sent)

    def _take_shares(self, name: str, message: Shares) -> None:
        block = self._numbered(message.block)
        if block is None or block.phase != "share" or name in block.shares:
            return
        if name not in block.names:
            raise BadMessage("it has not advertised keys")
        size = shares_bytes(block.rounds)
        table = read_table(message.payload, len(block.names), size, "shares")
        if set(table) != set(range(len(block.names))) - {block.place(name)}:
            raise BadMessage("shares for all others are needed, and no more")
        block.shares[name] = table

    def _shares_for(self, block: HubBlock, name: str) -> Shares:
        place = block.place(name)
        rows = {
            block.place(other): block.shares[other][place] if other != name else b""
            for other in block.holders
        }
        size = shares_bytes(block.rounds)
        rows[place] = bytes(size)
        return Shares(block.number, write_table(rows, len(block.names), size))

    def _numbered(self, number: int) -> HubBlock | None:
        return next((block for block in self._blocks if block.number == number), None)

    def _covering(self, round: int) -> HubBlock | None:
        return next((b for b in self._blocks if b.first <= round < b.end), None)

    # -- rounds --------------------------------------------------------------------------------

    def contributors(self, round: int) -> frozenset[str] | None:
        """Members that can contribute to a round; None: not known yet."""
        block = self._covering(round)
        if block is None or block.phase != "ready":
            return None
        return frozenset(block.holders) - block.lost

    def may_skip(self, name: str, first: int, end: int) -> bool:
        """Whether a member cannot contribute to any of the rounds [first, end)."""
        return all(
            self.is_closed(round) or name not in (self.contributors(round) or ())
            for round in range(first, end)
        )

    def is_closed(self, round: int) -> bool:
        entry = self._open.get(round)
        return entry is not None and (entry.asked is not None or entry.end is not None)

    def add_contribution(self, name: str, round: int, payloads: Sequence[Buffer]) -> None:
        """Add a whole masked contribution to the sum of its round; it is not kept."""
        block = self._covering(round)
        assert block is not None
        assert not self.is_closed(round)
        entry = self._open.get(round)
        if entry is None:
            elements = sum(memoryview(payload).nbytes for payload in payloads) // 4
            entry = self._open[round] = OpenSum(np.zeros(elements, np.uint32))
        start = 0
        for payload in payloads:
            words = np.frombuffer(payload, "<u4")
            entry.total[start : start + words.size] += words
            start += words.size
        entry.weights[name] = min(1.0, block.weights[name] / block.unit)
        self._front = max(self._front, round + 1)

    def close_round(self, round: int, now: float) -> Outgoing:
        """Close a round: ask for the shares that unmask its sum. With fewer contributions than the
        threshold the round is given up, and no shares are asked for."""
        block = self._covering(round)
        entry = self._open.setdefault(round, OpenSum(np.zeros(0, np.uint32)))
        given, least = len(entry.weights), self.terms.threshold
        if block is None or given < least:
            return self._give_up(round, f"{given} of at least {least} members contributed to it")
        places = [block.place(name) for name in entry.weights]
        flags = write_places(places, len(block.names))
        entry.asked, entry.asked_at = Unmask(block.number, round, flags), now
        return [(name, entry.asked) for name in block.holders if name not in block.lost]

    def _give_up(self, round: int, reason: str) -> Outgoing:
        self._open[round].end = Sum(None, reason)
        self._open[round].total = np.zeros(0, np.uint32)
        return []

    def _take_reveal(self, name: str, message: Reveal) -> None:
        block, entry = self._numbered(message.block), self._open.get(message.round)
        if block is None or entry is None or entry.asked is None or entry.end is not None:
            return  # there were enough shares before it came
        if name not in block.holders or entry.asked.block != block.number:
            raise BadMessage("it does not hold shares")
        places = len(block.names)
        table = read_table(message.payload, places, SEED_BYTES, "revealed shares")
        entry.reveals.setdefault(block.place(name), table)

    def unmask_round(self, round: int, patience_s: float, now: float) -> Sum | None:
        """How a closed round ended; None: not enough shares have come yet."""
        entry, block = self._open.get(round), self._covering(round)
        if entry is None:
            return None
        if entry.end is None and entry.asked is not None and block is not None:
            if len(entry.reveals) >= self.terms.threshold:
                self._unmask(block, round, entry)
            if entry.end is None and now - entry.asked_at >= patience_s:
                least = self.terms.threshold
                self._give_up(
                    round, f"{len(entry.reveals)} of at least {least} members helped to unmask it"
                )
        return entry.end

    def forget_round(self, round: int) -> None:
        """A round was answered: forget it, and its block if it was the last of it."""
        self._open.pop(round, None)
        self._blocks = [
            b for b in self._blocks if b.end > round + 1 or b is self._blocks[-1]
        ]  # fmt: skip

    def _unmask(self, block: HubBlock, round: int, entry: OpenSum) -> None:
        given = [block.place(name) for name in sorted(entry.weights)]
        holders = [block.place(name) for name in block.holders]
        try:
            seeds = {place: self._seed(entry, place) for place in holders}
            if any(seed is None for seed in seeds.values()):
                return  # some shares could not be opened: other holders may have them
            keys = self._mask_keys(block, round, given, seeds)  # type: ignore[arg-type]
        except BadPayload as error:
            self._give_up(round, str(error))
            return
        for key, sign in keys:
            primitives.add_mask(key, sign, entry.total)
        vector = np.empty(entry.total.size, np.float32)
        self._fixed.decode(entry.total, sum(entry.weights.values()), vector)
        entry.end = Sum(vector)
        entry.reveals, entry.total = {}, np.zeros(0, np.uint32)

    def _seed(self, entry: OpenSum, place: int) -> bytes | None:
        """The secret of a place that was revealed, restored from shares; None: too few."""
        shares = {holder: table[place] for holder, table in entry.reveals.items() if place in table}
        if len(shares) < self.terms.threshold:
            return None
        chosen = sorted(shares)[: self.terms.threshold]
        return primitives.combine({holder: shares[holder] for holder in chosen})

    def _mask_keys(
        self, block: HubBlock, round: int, given: Sequence[int], seeds: Mapping[int, bytes]
    ) -> list[tuple[bytes, int]]:
        """The keys of the masks that are left in the sum, each with the sign that removes it.

        Raises BadPayload if shares restore another secret than the one that was committed to: a
        wrong mask would turn the sum into noise, and it would not be noticed.
        """
        found = []
        context = round_context(block.number, round)
        for place, seed in seeds.items():
            public, committed = block.row(place, round)
            if place in given:
                if not primitives.equal(primitives.commitment(seed, context), committed):
                    raise BadPayload(f"the shares of {block.names[place]}'s mask are wrong")
                found.append((primitives.own_key(seed, context + block.digest), -1))
                continue
            if not primitives.equal(primitives.public_of(seed, context), public):
                raise BadPayload(f"the shares of {block.names[place]}'s key are wrong")
            for other in given:
                other_public = block.row(other, round)[0]
                key = pair_key(seed, block.number, round, other_public, block.digest)
                found.append((key, -1 if other < place else 1))
        return found

    # -- members that come and go --------------------------------------------------------------

    def messages_missed(self, name: str) -> Outgoing:
        """Messages that a member may have missed while its connection was lost."""
        out: Outgoing = []
        for block in self._blocks:
            if name in block.lost or name not in block.weights:
                continue
            if block.phase == "advertise":
                out.append((name, self._rekey(block)))
            elif block.phase in ("share", "ready") and name in block.names:
                out.append((name, self._key_list(block, name)))
            if block.phase == "ready" and name in block.holders:
                out.append((name, self._shares_for(block, name)))
        out += [
            (name, entry.asked)
            for round, entry in sorted(self._open.items())
            if entry.asked is not None
            and entry.end is None
            and (block_of := self._covering(round)) is not None
            and name in block_of.holders
        ]
        return out

    def drop_secrets(self, name: str) -> None:
        """A member restarted under this name: its secrets are lost."""
        for block in self._blocks:
            block.lost.add(name)
