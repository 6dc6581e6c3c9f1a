"""A member's side of secure aggregation: its secrets, its masks, and its answers to the hub.

Keys are made for a block of rounds; each round of it is an instance of the protocol of Bonawitz et
al. with secrets of its own. A block moves on by the hub's messages:

    phase         message    next          answer       what happens
    (none)        Rekey      advertised    Advertise    seeds are drawn, public keys derived
    advertised    KeyList    shared        Shares       the digest of what all were told is fixed
    shared        Shares     open          -            it is known who masks, and against whom
    open          Unmask     open          Reveal       shares of one round are given, once
    any           the same   the same      the same     a message that comes again
    any           another    the same      -            ignored; a second KeyList that differs, or
                                                        a second Unmask, is an error

A round is "soon" until its block is open, then "ready" until it is masked, answered, or unmasked
without this member; then it is "out" for ever. Only "ready" rounds can be masked.

No sockets and no clock. Randomness is passed in, except for the coefficients of Shamir's
polynomials, which the package that splits secrets draws itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from edgetrain.errors import BadMessage, BadPayload, EdgetrainError
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
from edgetrain.exchange.masks.payloads import (
    SEED_BYTES,
    advert_bytes,
    block_context,
    check_length,
    key_list_bytes,
    read_places,
    read_table,
    round_context,
    shares_bytes,
    write_table,
)
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.vectors.vector import Buffer, Vector

State = Literal["soon", "ready", "out"]
"""Of a round: its masks are being set up; it can be masked; this member does not contribute to it.
"""

_STOP = "stop: the hub is broken, or wants to see what it must not"


@dataclass(frozen=True)
class HeldShares:
    """Shares that this member holds of one member's secrets of one round."""

    own: bytes
    """Share of the seed of that member's own mask."""
    key: bytes
    """Share of the seed behind its pairwise masks."""


@dataclass
class MemberBlock:
    """One block of rounds, as a member knows it."""

    number: int
    first: int
    rounds: int
    advert: bytes
    seal_seed: bytes
    """The seed of the key that others encrypt shares to."""
    own: dict[int, bytes]
    """The seeds of this member's own masks, by round, until the round is masked."""
    keys: dict[int, bytes]
    """The seeds of its private keys, by round, until the round is masked."""
    place: int = -1
    """Its place in the list of keys."""
    unit: float = 1.0
    adverts: list[bytes] = field(default_factory=list)
    digest: bytes = b""
    """Of the list of keys: masks and shares are bound to it, so they fit only among members that
    were told the same."""
    sent: Shares | None = None
    """The answer to the list of keys."""
    held: dict[int, dict[int, HeldShares]] = field(default_factory=dict)
    """By round and place, until they are revealed."""
    holders: tuple[int, ...] = ()
    """The places that have shared their secrets: they mask, against each other. () before that."""
    answered: dict[int, Reveal] = field(default_factory=dict)
    """By round."""
    survivors: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By round: the places whose contributions the hub said were in the sum."""

    @property
    def phase(self) -> Literal["advertised", "shared", "open"]:
        if self.sent is None:
            return "advertised"
        return "open" if self.holders else "shared"

    @property
    def end(self) -> int:
        return self.first + self.rounds

    @property
    def places(self) -> int:
        return len(self.adverts)

    def public(self, place: int, round: int) -> bytes:
        start = KEY_BYTES + 2 * KEY_BYTES * (round - self.first)
        return self.adverts[place][start : start + KEY_BYTES]

    def context(self, round: int) -> bytes:
        """The context that keys and masks of this round are bound to."""
        return round_context(self.number, round) + self.digest


class Masker:
    """Masks one member's contributions. Owns its secrets, and forgets each when it was used.

    A round is masked at most once, whatever the hub says: the difference of two sums with and
    without a contribution would be the contribution.
    """

    def __init__(
        self, terms: MaskTerms, elements: int, random: Callable[[int], bytes] = os.urandom
    ) -> None:
        self.epoch = 0
        """Epoch of the hub of these blocks."""
        self.cut = 0
        """Elements so far that were larger than the agreed range, and were cut to it."""
        self._terms = terms
        self._elements = elements
        self._random = random
        self._fixed = FixedPoint(terms.clip_range, terms.members)
        self._blocks: dict[int, MemberBlock] = {}
        self._next = 0
        """Rounds before this one have been masked, or never will be."""
        self._answered = 0
        """Rounds before this one have been answered."""

    def restart(self, epoch: int) -> None:
        """The hub was restored, and has lost all masks: drop the blocks."""
        self.epoch = epoch
        self._blocks = {}

    @property
    def blocks(self) -> Mapping[int, MemberBlock]:
        """The blocks that are not over, by number."""
        return self._blocks

    def answer_hub(self, message: Masking) -> Masking | None:
        """Handle a message of the hub; returns the answer, if there is one.

        Raises BadMessage for a malformed message. Raises EdgetrainError if the hub asks for more
        than it may know: then training must stop.
        """
        match message:
            case Rekey():
                # Round 0 of the paper, for all rounds of a block together
                block = self._blocks.get(message.block)
                if block is None:
                    if message.block >> 32 != self.epoch:
                        return None  # from before the hub was restored
                    block = self._new_block(message)
                    self._blocks[message.block] = block
                return Advertise(message.block, block.advert)
            case KeyList():
                return self._share(message)
            case Shares():
                self._open_block(message)
                return None
            case Unmask():
                return self._reveal(message)
            case _:
                raise BadMessage(f"the hub sent {type(message).__name__}, which is for hubs")

    def state(self, round: int) -> State:
        """Whether a round can be masked: now, later, or not at all."""
        block = self.block_of(round)
        if round < max(self._next, self._answered):
            return "out"
        if block is None or not block.holders:
            # Blocks are set up one after the other: rounds before a later one are over.
            later = any(b.holders and b.first > round for b in self._blocks.values())
            return "out" if later else "soon"
        told = block.survivors.get(round)
        if block.place not in block.holders or (told is not None and block.place not in told):
            return "out"
        return "ready"

    def mask(self, round: int, vector: Vector, weight: float, out: Words) -> None:
        """Overwrite `out` with the masked contribution to a round whose state is "ready".

        `vector`, float32, is only read; it counts `weight` times. The round's secrets are
        forgotten. Raises EdgetrainError for a round in another state.
        """
        block = self.block_of(round)
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

    def forget_rounds(self, applied: int) -> None:
        """Forget the secrets of rounds before `applied`: they have been answered."""
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

    def block_of(self, round: int) -> MemberBlock | None:
        """The newest block that contains a round, if there is one."""
        found = [b for b in self._blocks.values() if b.first <= round < b.end]
        return max(found, key=lambda block: block.number, default=None)

    # -- making keys ---------------------------------------------------------------------------

    def _new_block(self, asked: Rekey) -> MemberBlock:
        rounds = range(asked.first, asked.first + asked.rounds)
        own = {round: self._random(SEED_BYTES) for round in rounds}
        keys = {round: self._random(SEED_BYTES) for round in rounds}
        seal = self._random(SEED_BYTES)
        advert = [primitives.public_of(seal, block_context(asked.block))]
        for round in rounds:
            context = round_context(asked.block, round)
            advert.append(primitives.public_of(keys[round], context))
            advert.append(primitives.commitment(own[round], context))
        return MemberBlock(
            asked.block, asked.first, asked.rounds, b"".join(advert), seal, own, keys
        )  # fmt: skip

    def _share(self, keys: KeyList) -> Shares | None:
        """Round 1 of the paper: split each secret into shares, each encrypted for one member."""
        block = self._blocks.get(keys.block)
        if block is None:
            return None
        if block.phase == "advertised":
            # Take over the list of keys, unless its masks could not hide this member
            if not self._terms.threshold <= keys.members <= self._terms.members:
                raise EdgetrainError(
                    f"the hub would add up contributions of {keys.members} members, agreed are "
                    f"{self._terms.threshold} to {self._terms.members}",
                    _STOP,
                )
            size = advert_bytes(block.rounds)
            data = check_length(keys.payload, keys.members * size, "a list of keys")
            adverts = [data[start : start + size] for start in range(0, len(data), size)]
            if keys.place >= len(adverts) or adverts[keys.place] != block.advert:
                raise EdgetrainError("the hub shows others another key than this member's", _STOP)
            if len({advert[:KEY_BYTES] for advert in adverts}) != len(adverts):
                raise EdgetrainError("two members in the list of keys have the same key", _STOP)
            block.place, block.unit, block.adverts = keys.place, keys.unit, adverts
            block.digest = self._digest(keys)
            block.sent = self._shares_of(block)
        elif self._digest(keys) != block.digest:
            raise EdgetrainError(f"the hub has two lists of keys of block {block.number}", _STOP)
        return block.sent

    def _digest(self, keys: KeyList) -> bytes:
        return primitives.digest(key_list_bytes(self._terms, keys.unit, keys.payload))

    def _shares_of(self, block: MemberBlock) -> Shares:
        """Shares of all secrets of a block: sealed for the others, held for itself."""
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
        self._hold_shares(block, block.place, b"".join(plain[block.place]))
        size = shares_bytes(block.rounds)
        return Shares(block.number, write_table(sealed, block.places, size))

    def _channel(self, block: MemberBlock, sender: int, receiver: int) -> bytes:
        """The key for shares from one place to another; this member is one of the two."""
        other = receiver if sender == block.place else sender
        purpose = b"shares %d to %d" % (sender, receiver)
        return primitives.agreed_key(
            block.seal_seed,
            block.adverts[other][:KEY_BYTES],
            purpose,
            block_context(block.number),
            block_context(block.number) + block.digest,
        )

    def _hold_shares(self, block: MemberBlock, place: int, plain: bytes) -> None:
        for at in range(block.rounds):
            start = 2 * SEED_BYTES * at
            own = plain[start : start + SEED_BYTES]
            key = plain[start + SEED_BYTES : start + 2 * SEED_BYTES]
            block.held.setdefault(block.first + at, {})[place] = HeldShares(own, key)

    def _open_block(self, message: Shares) -> None:
        """The end of round 1: members that have shared their secrets mask, against each other."""
        block = self._blocks.get(message.block)
        if block is None or block.phase != "shared":
            return
        size = shares_bytes(block.rounds)
        table = read_table(message.payload, block.places, size, "shares")
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
            if plain is not None:  # without it, the shares of the others may be enough
                self._hold_shares(block, place, plain)
        block.holders = holders

    # -- unmasking a sum -----------------------------------------------------------------------

    def _reveal(self, asked: Unmask) -> Reveal | None:
        """Round 4 of the paper: of each member one kind of share, and never the other."""
        block = self._blocks.get(asked.block)
        if block is None or block.phase != "open" or not block.first <= asked.round < block.end:
            return None
        survivors = read_places(asked.payload, block.places, "the members of a sum")
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
                place: shares.own if place in survivors else shares.key
                for place, shares in held.items()
                if place in block.holders
            }
            table = write_table(chosen, block.places, SEED_BYTES)
            block.answered[asked.round] = Reveal(asked.block, asked.round, table)
        return block.answered.get(asked.round)


def pair_key(seed: bytes, block: int, round: int, public: bytes, digest: bytes) -> bytes:
    """The key of the mask that two members share in a round, from a seed and a public key."""
    context = round_context(block, round)
    return primitives.agreed_key(seed, public, b"pair mask", context, context + digest)


def parts(masked: Words, part_elements: int) -> list[Buffer]:
    """The payloads of a masked contribution: uint32, little-endian, `part_elements` in each."""
    return [
        np.ascontiguousarray(masked[start : start + part_elements], "<u4").data.cast("B")
        for start in range(0, masked.size, part_elements)
    ]
