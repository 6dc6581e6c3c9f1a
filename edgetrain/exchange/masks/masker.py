"""A member's side of secure aggregation: its secrets, its masks, and what it tells of either.

Pure: a message of the hub in, an answer out; no socket, no clock. Randomness is passed in, except
for the coefficients of Shamir's polynomials, which the package that splits secrets draws itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from edgetrain.errors import BadMessage, BadPayload, EdgetrainError
from edgetrain.exchange.masks import payloads as forms
from edgetrain.exchange.masks import primitives
from edgetrain.exchange.masks.fixed_point import FixedPoint, Words
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.exchange.messages import Advertise, KeyList, Masking, Rekey, Reveal, Shares, Unmask
from edgetrain.vectors.vector import Buffer, Vector

State = Literal["soon", "ready", "out"]
"""Of a round: its masks are being set up; it can be contributed to; this member has no part in it.
"""

_STOP = "stop: this hub is broken, or wants to see what it must not"


@dataclass(frozen=True)
class _Pair:
    """Another member's shares of its secrets of one round, as this one holds them."""

    own: bytes
    """Of the seed of its own mask."""
    key: bytes
    """Of the seed of the key that its pairwise masks come from."""


@dataclass
class _Block:
    """One block of rounds, each an instance of the protocol with secrets of its own."""

    number: int
    first: int
    rounds: int
    advert: bytes
    seal_seed: bytes
    """Of the key that others encrypt shares to."""
    own: dict[int, bytes]
    """By round, until it is masked: the seed of this member's own mask."""
    keys: dict[int, bytes]
    """By round, until it is masked: the seed of its private key."""
    place: int = -1
    unit: float = 1.0
    adverts: list[bytes] = field(default_factory=list)
    digest: bytes = b""
    """Of the roster; masks and shares are bound to it, so that all must have seen the same."""
    sent: Shares | None = None
    held: dict[int, dict[int, _Pair]] = field(default_factory=dict)
    """By round and place."""
    holders: tuple[int, ...] = ()
    """The places that have shares: who masks, and against whom. Empty: not known yet."""
    answered: dict[int, Reveal] = field(default_factory=dict)
    survivors: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.first + self.rounds

    @property
    def places(self) -> int:
        return len(self.adverts)

    def public(self, place: int, round: int) -> bytes:
        """The public key of a place for one round."""
        return _public(self.adverts[place], round - self.first)

    def context(self, round: int) -> bytes:
        """What keys of this round are bound to."""
        return forms.round_context(self.number, round) + self.digest


def _public(advert: bytes, at: int) -> bytes:
    start = forms.KEY + 2 * forms.KEY * at
    return advert[start : start + forms.KEY]


class Masker:
    """Masks one member's contributions; owns its secrets, and forgets each when it is used.

    Every round is masked at most once, whatever the hub says: two sums over different members that
    hold the same contribution would tell it. `cut` counts the elements so far that were larger than
    the agreed range.
    """

    def __init__(
        self, terms: MaskTerms, elements: int, random: Callable[[int], bytes] = os.urandom
    ) -> None:
        self.epoch = 0
        """Of the hub whose blocks these are."""
        self.cut = 0
        self._terms = terms
        self._elements = elements
        self._random = random
        self._fixed = FixedPoint(terms.span, terms.members)
        self._blocks: dict[int, _Block] = {}
        self._next = 0
        """Rounds before this one have been masked, or never will be."""
        self._answered = 0

    def restart(self, epoch: int) -> None:
        """The hub was restored, and knows nothing of the masks of before."""
        self.epoch = epoch
        self._blocks = {}

    def take(self, message: Masking) -> Masking | None:
        """What the hub said, and what to answer.

        Raises BadMessage for what is malformed, and EdgetrainError where the hub wants more than a
        hub may know: then training has to stop.
        """
        match message:
            case Rekey():
                return self._advertise(message)
            case KeyList():
                return self._share(message)
            case Shares():
                self._open(message)
                return None
            case Unmask():
                return self._reveal(message)
            case _:
                raise BadMessage(f"the hub sent {type(message).__name__}, which is for hubs")

    def state(self, round: int) -> State:
        """What this member can do for a round."""
        block = self._covering(round)
        if round < max(self._next, self._answered):
            return "out"
        if block is None or not block.holders:
            # Blocks are set up one after the other: what a later one begins after is over.
            later = any(b.holders and b.first > round for b in self._blocks.values())
            return "out" if later else "soon"
        told = block.survivors.get(round)
        if block.place not in block.holders or (told is not None and block.place not in told):
            return "out"
        return "ready"

    def mask(self, round: int, vector: Vector, weight: float, out: Words) -> None:
        """Overwrite `out` with the masked contribution to a round whose state is "ready".

        `vector` (float32, only read) counts `weight` times. Its secrets are forgotten.
        """
        block = self._covering(round)
        if self.state(round) != "ready" or block is None:
            raise EdgetrainError(f"round {round} cannot be masked (again)", _STOP)
        self._next = round + 1
        self.cut += self._fixed.encode(vector, out, min(1.0, weight / block.unit))
        context = block.context(round)
        primitives.add_mask(primitives.own_key(block.own.pop(round), context), 1, out)
        seed = block.keys.pop(round)
        for place in block.holders:
            if place != block.place:
                key = pair_key(seed, block.number, round, block.public(place, round), block.digest)
                primitives.add_mask(key, 1 if block.place < place else -1, out)

    def forget(self, applied: int) -> None:
        """Rounds before `applied` are answered: nothing of them is needed any more."""
        self._answered = max(self._answered, applied)
        for block in list(self._blocks.values()):
            if block.end <= applied:
                del self._blocks[block.number]
                continue
            for old in [round for round in block.held if round < applied]:
                del block.held[old]
            for secrets in (block.own, block.keys):
                for old in [round for round in secrets if round < applied]:
                    del secrets[old]
            for old in [round for round in block.answered if round < applied]:
                del block.answered[old]

    def _covering(self, round: int) -> _Block | None:
        found = [b for b in self._blocks.values() if b.first <= round < b.end]
        return max(found, key=lambda block: block.number, default=None)

    # -- setting up ----------------------------------------------------------------------------

    def _advertise(self, asked: Rekey) -> Advertise | None:
        """Round 0 of the paper, for all rounds of a block at once."""
        block = self._blocks.get(asked.block)
        if block is None:
            if asked.block >> 32 != self.epoch:
                return None  # of another hub's life
            block = self._new_block(asked)
            self._blocks[asked.block] = block
        return Advertise(asked.block, block.advert)

    def _new_block(self, asked: Rekey) -> _Block:
        rounds = range(asked.first, asked.first + asked.rounds)
        own = {round: self._random(forms.SEED) for round in rounds}
        keys = {round: self._random(forms.SEED) for round in rounds}
        seal = self._random(forms.SEED)
        advert = [primitives.public_of(seal, forms.block_context(asked.block))]
        for round in rounds:
            context = forms.round_context(asked.block, round)
            advert.append(primitives.public_of(keys[round], context))
            advert.append(primitives.commitment(own[round], context))
        return _Block(
            asked.block, asked.first, asked.rounds, b"".join(advert), seal, own, keys
        )  # fmt: skip

    def _share(self, roster: KeyList) -> Shares | None:
        """Round 1 of the paper: each secret in shares, each share for one other's eyes."""
        block = self._blocks.get(roster.block)
        if block is None:
            return None
        if block.sent is None:
            self._take_roster(block, roster)
            block.sent = self._shares_of(block)
        elif self._digest(roster) != block.digest:
            raise EdgetrainError(f"the hub has two rosters of block {block.number}", _STOP)
        return block.sent

    def _take_roster(self, block: _Block, roster: KeyList) -> None:
        if not self._terms.threshold <= roster.members <= self._terms.members:
            raise EdgetrainError(
                f"the hub would add up contributions of {roster.members} members, agreed are "
                f"{self._terms.threshold} to {self._terms.members}",
                _STOP,
            )
        size = forms.advert_bytes(block.rounds)
        data = forms.check_length(roster.payload, roster.members * size, "a roster")
        adverts = [data[start : start + size] for start in range(0, len(data), size)]
        if roster.place >= len(adverts) or adverts[roster.place] != block.advert:
            raise EdgetrainError("the hub shows others another key than this member's", _STOP)
        if len({advert[: forms.KEY] for advert in adverts}) != len(adverts):
            raise EdgetrainError("two members of a roster have the same key", _STOP)
        block.place, block.unit, block.adverts = roster.place, roster.unit, adverts
        block.digest = self._digest(roster)

    def _digest(self, roster: KeyList) -> bytes:
        told = forms.key_list_bytes(self._terms, roster.unit, roster.payload)
        return primitives.digest(told)

    def _shares_of(self, block: _Block) -> Shares:
        plain: list[list[bytes]] = [[] for _ in range(block.places)]
        for round in range(block.first, block.end):
            for secret in (block.own[round], block.keys[round]):
                shares = primitives.split(secret, self._terms.threshold, block.places)
                for place, share in enumerate(shares):
                    plain[place].append(share)
        sealed = {
            place: primitives.seal(
                self._channel(block, block.place, place), b"".join(plain[place]), block.digest
            )
            for place in range(block.places)
            if place != block.place
        }
        self._hold(block, block.place, b"".join(plain[block.place]))
        size = forms.shares_bytes(block.rounds)
        return Shares(block.number, forms.write_table(sealed, block.places, size))

    def _channel(self, block: _Block, sender: int, receiver: int) -> bytes:
        """The key for what one place sends to another; this member is one of them."""
        other = receiver if sender == block.place else sender
        purpose = b"shares %d to %d" % (sender, receiver)
        return primitives.agreed_key(
            block.seal_seed,
            block.adverts[other][: forms.KEY],
            purpose,
            forms.block_context(block.number),
            forms.block_context(block.number) + block.digest,
        )

    def _hold(self, block: _Block, place: int, plain: bytes) -> None:
        for at in range(block.rounds):
            start = 2 * forms.SEED * at
            own = plain[start : start + forms.SEED]
            key = plain[start + forms.SEED : start + 2 * forms.SEED]
            block.held.setdefault(block.first + at, {})[place] = _Pair(own, key)

    def _open(self, message: Shares) -> None:
        """The end of round 1: who has shared its secrets is who masks, and against whom."""
        block = self._blocks.get(message.block)
        if block is None or block.holders or block.sent is None:
            return
        size = forms.shares_bytes(block.rounds)
        table = forms.read_table(message.payload, block.places, size, "shares")
        holders = tuple(sorted({*table, block.place}))
        if len(holders) < self._terms.threshold:
            raise EdgetrainError(
                f"only {len(holders)} members have shared their secrets, agreed are "
                f"{self._terms.threshold}",
                _STOP,
            )
        for place, sealed in table.items():
            if place == block.place:
                continue
            try:
                key = self._channel(block, place, block.place)
            except BadPayload:
                continue
            plain = primitives.unseal(key, sealed, block.digest)
            if plain is not None:  # else its shares are not there, which the others' may make up
                self._hold(block, place, plain)
        block.holders = holders

    # -- taking off ----------------------------------------------------------------------------

    def _reveal(self, asked: Unmask) -> Reveal | None:
        """Round 4 of the paper: of each member one kind of share, and never the other."""
        block = self._blocks.get(asked.block)
        if block is None or not block.holders or not block.first <= asked.round < block.end:
            return None
        survivors = forms.read_places(asked.payload, block.places, "the members of a sum")
        before = block.survivors.get(asked.round)
        if before is not None and before != survivors:
            raise EdgetrainError(
                f"the hub asks for shares of round {asked.round} a second time, for other members: "
                "with both kinds it could see a single contribution",
                _STOP,
            )
        if len(survivors) < self._terms.threshold or not set(survivors) <= {*block.holders}:
            raise EdgetrainError(
                f"the hub would unmask the sum of {len(survivors)} members, agreed are at least "
                f"{self._terms.threshold} of those who share its secrets",
                _STOP,
            )
        if before is None:
            block.survivors[asked.round] = survivors
            held = block.held.pop(asked.round, {})
            chosen = {
                place: pair.own if place in survivors else pair.key
                for place, pair in held.items()
                if place in block.holders
            }
            table = forms.write_table(chosen, block.places, forms.SEED)
            block.answered[asked.round] = Reveal(asked.block, asked.round, table)
        return block.answered.get(asked.round)


def pair_key(seed: bytes, block: int, round: int, public: bytes, digest: bytes) -> bytes:
    """The key of the mask that two members have in common in a round, from one's seed and the
    other's public key."""
    context = forms.round_context(block, round)
    return primitives.agreed_key(seed, public, b"pair mask", context, context + digest)


def parts(masked: Words, part_elements: int) -> list[Buffer]:
    """The payloads in which a masked contribution travels: uint32, little-endian."""
    return [
        np.ascontiguousarray(masked[start : start + part_elements], "<u4").data.cast("B")
        for start in range(0, masked.size, part_elements)
    ]
