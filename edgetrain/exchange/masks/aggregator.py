"""The hub's side of secure aggregation: it passes keys and shares on, adds up what it cannot read,
and takes the masks off a sum.

Pure: no socket, no clock; the time is an argument. Who is in, and when a round closes, the hub
decides; here is only what masks need. Nothing here is written to a journal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from edgetrain.errors import BadMessage, BadPayload
from edgetrain.exchange.masks import payloads as forms
from edgetrain.exchange.masks import primitives
from edgetrain.exchange.masks.fixed_point import FixedPoint, Words
from edgetrain.exchange.masks.masker import pair_key
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.exchange.messages import Advertise, KeyList, Masking, Rekey, Reveal, Shares, Unmask
from edgetrain.vectors.vector import Buffer, Vector

Outgoing: TypeAlias = list[tuple[str, Masking]]
"""Messages, by the name of the member that each is for."""


@dataclass(frozen=True)
class Sum:
    """What became of a round."""

    vector: Vector | None
    """The weighted mean; None: the round is given up, and nothing of it will ever be known."""
    reason: str = ""


@dataclass
class _Block:
    number: int
    first: int
    rounds: int
    weights: dict[str, float]
    """Of all who were asked."""
    since: float
    """When this stage began."""
    stage: Literal["advertise", "share", "ready", "failed"] = "advertise"
    adverts: dict[str, bytes] = field(default_factory=dict)
    roster: tuple[str, ...] = ()
    """Who has advertised keys, by place."""
    unit: float = 1.0
    sent: Buffer = b""
    digest: bytes = b""
    shares: dict[str, dict[int, bytes]] = field(default_factory=dict)
    """Encrypted, as they came: by sender and place."""
    holders: tuple[str, ...] = ()
    """Who has shared its secrets, by place."""
    lost: set[str] = field(default_factory=set)
    """Who has started anew, and knows its secrets no longer."""

    @property
    def end(self) -> int:
        return self.first + self.rounds

    def waits_for(self) -> tuple[Collection[str], Collection[str]]:
        """Who has been asked for what this stage needs, and who has answered."""
        if self.stage == "advertise":
            return self.weights, self.adverts
        return self.roster, self.shares

    def place(self, name: str) -> int:
        return self.roster.index(name)

    def row(self, place: int, round: int) -> tuple[bytes, bytes]:
        """The public key and the commitment that a place has told of a round."""
        start = forms.KEY * (1 + 2 * (round - self.first))
        row = self.adverts[self.roster[place]][start : start + 2 * forms.KEY]
        return row[: forms.KEY], row[forms.KEY :]


@dataclass
class _Open:
    """A round that is being added up, or unmasked."""

    total: Words
    weights: dict[str, float] = field(default_factory=dict)
    """Of those whose contributions are in `total`."""
    asked: Unmask | None = None
    """The round is closed, and the holders have been asked for these shares."""
    asked_at: float = 0.0
    reveals: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By place of the holder, and place of whose secret it is a share of."""
    end: Sum | None = None


class Aggregator:
    """One job's masks, at its hub. It holds one sum a round, not the contributions in it."""

    def __init__(self, terms: MaskTerms) -> None:
        self.terms = terms
        self._fixed = FixedPoint(terms.span, terms.members)
        self._elements = 0
        self._blocks: list[_Block] = []
        self._numbers = 0
        self._open: dict[int, _Open] = {}
        self._front = 0
        """The last round that anyone has given to, and one."""
        self.remarks: list[str] = []
        """What a person should know; whoever tells it empties the list."""

    def settle(self, elements: int, epoch: int) -> None:
        """Begin with vectors of so many elements. `epoch`: how often the hub was restored."""
        self._elements = elements
        self._blocks, self._open, self._front = [], {}, 0
        self._numbers = epoch << 32

    # -- blocks of keys ------------------------------------------------------------------------

    def wants_block(self, round: int) -> bool:
        """Whether keys for later rounds are to be made now, so that no round waits for them.

        `round` is the oldest open one. A quarter of a block is used up before the next is begun:
        a newcomer waits for less, and three quarters are left for the set-up.
        """
        if not self._blocks:
            return True
        last = self._blocks[-1]
        if last.stage in ("advertise", "share"):
            return False
        return max(self._front, round) >= last.first + last.rounds // 4

    @property
    def next_first(self) -> int:
        """The first round of the block that has not been begun: where newcomers can take part."""
        return self._blocks[-1].end if self._blocks else 0

    def begin(self, weights: Mapping[str, float], first: int, rounds: int, now: float) -> Outgoing:
        """Ask the members for keys for [first, first + rounds)."""
        if self._blocks:
            first = max(first, self.next_first)
        block = _Block(self._numbers, first, rounds, dict(sorted(weights.items())), now)
        self._numbers += 1
        self._blocks.append(block)
        return [(name, self._rekey(block)) for name in block.weights]

    def _rekey(self, block: _Block) -> Rekey:
        return Rekey(block.number, block.first, block.rounds)

    def take(self, name: str, message: Masking) -> None:
        """What a member said about masks. BadMessage for what it cannot have meant."""
        match message:
            case Advertise():
                self._take_advert(name, message)
            case Shares():
                self._take_shares(name, message)
            case Reveal():
                self._take_reveal(name, message)
            case _:
                raise BadMessage(f"{type(message).__name__} is for members")

    def step(self, present: Collection[str], patience_s: float, now: float) -> Outgoing:
        """Bring set-ups forward: a stage ends when all who are there have answered, or after
        `patience_s` without those who have not."""
        out: Outgoing = []
        for block in list(self._blocks):
            if block.stage not in ("advertise", "share"):
                continue
            asked, answered = block.waits_for()
            able = [name for name in asked if name not in block.lost]
            missing = [name for name in able if name in present and name not in answered]
            made = sum(name in answered for name in able)
            enough = made >= self.terms.threshold
            hopeless = len(able) < self.terms.threshold
            overdue = hopeless or now - block.since >= patience_s
            if not overdue and (missing or not enough):
                continue
            if not enough:
                self._fail(block, made, present)
            elif block.stage == "advertise":
                out += self._pass_on_keys(block, now)
            else:
                out += self._pass_on_shares(block)
        return out

    def _fail(self, block: _Block, answered: int, present: Collection[str]) -> None:
        """Too few made keys. Nobody can have given to these rounds: with enough members there the
        same rounds are set up again, with others they are given up."""
        said = f"{answered} of at least {self.terms.threshold} members made keys for rounds "
        said += f"{block.first} to {block.end - 1}"
        if len(present) >= self.terms.threshold:
            self._blocks.remove(block)
            self.remarks.append(f"{said}: they are asked again")
        else:
            block.stage = "failed"
            self.remarks.append(f"{said}, which are given up")

    def _take_advert(self, name: str, message: Advertise) -> None:
        block = self._numbered(message.block)
        if block is None or block.stage != "advertise" or name in block.adverts:
            return
        if name not in block.weights:
            raise BadMessage("it was not asked for keys")
        size = forms.advert_bytes(block.rounds)
        advert = forms.check_length(message.payload, size, "public keys")
        # Members stop where a roster could betray them: no one of them may bring that about.
        if advert[: forms.KEY] in {other[: forms.KEY] for other in block.adverts.values()}:
            raise BadMessage("it shows another member's key")
        if not all(primitives.is_public(key) for key in forms.keys_of(advert)):
            raise BadMessage("one of its public keys is none of X25519")
        block.adverts[name] = advert

    def _pass_on_keys(self, block: _Block, now: float) -> Outgoing:
        block.stage, block.since = "share", now
        block.roster = tuple(sorted(block.adverts))
        block.unit = max(block.weights[name] for name in block.roster)
        block.sent = b"".join(block.adverts[name] for name in block.roster)
        told = forms.key_list_bytes(self.terms, block.unit, block.sent)
        block.digest = primitives.digest(told)
        return [(name, self._roster(block, name)) for name in block.roster]

    def _roster(self, block: _Block, name: str) -> KeyList:
        place, places = block.place(name), len(block.roster)
        return KeyList(block.number, place, places, block.unit, block.sent)

    def _take_shares(self, name: str, message: Shares) -> None:
        block = self._numbered(message.block)
        if block is None or block.stage != "share" or name in block.shares:
            return
        if name not in block.roster:
            raise BadMessage("it is in no roster")
        size = forms.shares_bytes(block.rounds)
        table = forms.read_table(message.payload, len(block.roster), size, "shares")
        if set(table) != set(range(len(block.roster))) - {block.place(name)}:
            raise BadMessage("shares are not for all others")
        block.shares[name] = table

    def _pass_on_shares(self, block: _Block) -> Outgoing:
        block.stage = "ready"
        block.holders = tuple(name for name in block.roster if name in block.shares)
        return [(name, self._shares_for(block, name)) for name in block.holders]

    def _shares_for(self, block: _Block, name: str) -> Shares:
        place = block.place(name)
        rows = {
            block.place(other): block.shares[other][place] if other != name else b""
            for other in block.holders
        }
        size = forms.shares_bytes(block.rounds)
        rows[place] = bytes(size)
        return Shares(block.number, forms.write_table(rows, len(block.roster), size))

    def _numbered(self, number: int) -> _Block | None:
        return next((block for block in self._blocks if block.number == number), None)

    def _covering(self, round: int) -> _Block | None:
        return next((b for b in self._blocks if b.first <= round < b.end), None)

    # -- rounds --------------------------------------------------------------------------------

    def contributors(self, round: int) -> frozenset[str] | None:
        """Who can give to a round, none if its set-up failed; None: not known yet."""
        block = self._covering(round)
        if block is None or block.stage in ("advertise", "share"):
            return None
        return frozenset(block.holders) - block.lost

    def may_skip(self, name: str, first: int, end: int) -> bool:
        """Whether a member can give to none of the rounds [first, end) (any more)."""
        return all(
            self.is_closed(round) or name not in (self.contributors(round) or ())
            for round in range(first, end)
        )

    def is_closed(self, round: int) -> bool:
        """Whether nothing can be added to a round any more."""
        entry = self._open.get(round)
        return entry is not None and (entry.asked is not None or entry.end is not None)

    def add(self, name: str, round: int, payloads: Sequence[Buffer]) -> None:
        """Add a whole masked contribution to its round's sum; nobody keeps it."""
        block = self._covering(round)
        assert block is not None
        assert not self.is_closed(round)
        entry = self._open.get(round)
        if entry is None:
            entry = self._open[round] = _Open(np.zeros(self._elements, np.uint32))
        start = 0
        for payload in payloads:
            words = np.frombuffer(payload, "<u4")
            entry.total[start : start + words.size] += words
            start += words.size
        entry.weights[name] = min(1.0, block.weights[name] / block.unit)
        self._front = max(self._front, round + 1)

    def close(self, round: int, now: float) -> Outgoing:
        """No more contributions: ask for what unmasks the sum of those that are there. With fewer
        than the threshold the round is given up, and nobody is asked for anything."""
        block = self._covering(round)
        entry = self._open.setdefault(round, _Open(np.zeros(0, np.uint32)))
        given, least = len(entry.weights), self.terms.threshold
        if block is None or given < least:
            return self._give_up(round, f"{given} of at least {least} members gave to it")
        places = [block.place(name) for name in entry.weights]
        flags = forms.write_places(places, len(block.roster))
        entry.asked, entry.asked_at = Unmask(block.number, round, flags), now
        return [(name, entry.asked) for name in block.holders if name not in block.lost]

    def _give_up(self, round: int, reason: str) -> Outgoing:
        self._open[round].end = Sum(None, reason)
        self._open[round].total = np.zeros(0, np.uint32)
        return []

    def _take_reveal(self, name: str, message: Reveal) -> None:
        block, entry = self._numbered(message.block), self._open.get(message.round)
        if block is None or entry is None or entry.asked is None or entry.end is not None:
            return  # it came when there were enough
        if name not in block.holders or entry.asked.block != block.number:
            raise BadMessage("it holds no shares")
        places = len(block.roster)
        table = forms.read_table(message.payload, places, forms.SEED, "revealed shares")
        entry.reveals.setdefault(block.place(name), table)

    def end_of(self, round: int, patience_s: float, now: float) -> Sum | None:
        """What became of a closed round; None: not enough shares are here yet."""
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

    def done(self, round: int) -> None:
        """A round is over: forget it, and the block that ended with it."""
        self._open.pop(round, None)
        self._blocks = [
            b for b in self._blocks if b.end > round + 1 or b is self._blocks[-1]
        ]  # fmt: skip

    def _unmask(self, block: _Block, round: int, entry: _Open) -> None:
        given = [block.place(name) for name in sorted(entry.weights)]
        holders = [block.place(name) for name in block.holders]
        try:
            seeds = {place: self._seed(entry, place) for place in holders}
            if any(seed is None for seed in seeds.values()):
                return  # someone's shares did not arrive whole: others may have theirs
            keys = self._mask_keys(block, round, given, seeds)  # type: ignore[arg-type]
        except BadPayload as error:
            self._give_up(round, str(error))
            return
        for key, sign in keys:
            primitives.add_mask(key, sign, entry.total)
        vector = np.empty(self._elements, np.float32)
        self._fixed.decode(entry.total, sum(entry.weights.values()), vector)
        entry.end = Sum(vector)
        entry.reveals, entry.total = {}, np.zeros(0, np.uint32)

    def _seed(self, entry: _Open, place: int) -> bytes | None:
        shares = {holder: table[place] for holder, table in entry.reveals.items() if place in table}
        if len(shares) < self.terms.threshold:
            return None
        chosen = sorted(shares)[: self.terms.threshold]
        return primitives.combine({holder: shares[holder] for holder in chosen})

    def _mask_keys(
        self, block: _Block, round: int, given: Sequence[int], seeds: Mapping[int, bytes]
    ) -> list[tuple[bytes, int]]:
        """The masks that are still in the sum, each with the sign that takes it out.

        Raises BadPayload where shares add up to something else than what was told beforehand: a
        wrong mask would make noise of the sum, and nobody would know.
        """
        found = []
        context = forms.round_context(block.number, round)
        for place, seed in seeds.items():
            public, committed = block.row(place, round)
            if place in given:
                if not primitives.equal(primitives.commitment(seed, context), committed):
                    raise BadPayload(f"the shares of {block.roster[place]}'s mask are wrong")
                found.append((primitives.own_key(seed, context + block.digest), -1))
                continue
            if not primitives.equal(primitives.public_of(seed, context), public):
                raise BadPayload(f"the shares of {block.roster[place]}'s key are wrong")
            for other in given:
                other_public = block.row(other, round)[0]
                key = pair_key(seed, block.number, round, other_public, block.digest)
                found.append((key, -1 if other < place else 1))
        return found

    # -- members that come and go --------------------------------------------------------------

    def again(self, name: str) -> Outgoing:
        """All that a member may have missed while its connection was lost."""
        out: Outgoing = []
        for block in self._blocks:
            if name in block.lost or name not in block.weights:
                continue
            if block.stage == "advertise":
                out.append((name, self._rekey(block)))
            elif block.stage in ("share", "ready") and name in block.roster:
                out.append((name, self._roster(block, name)))
            if block.stage == "ready" and name in block.holders:
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

    def forget(self, name: str) -> None:
        """A member of this name has started anew: its secrets are gone with the one before."""
        for block in self._blocks:
            block.lost.add(name)
