"""A member's contributions, from the moment they are handed over until the hub has merged them.

Encoded, or masked where the job is secure, and kept for sending again. No transport, no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from edgetrain import codecs
from edgetrain.codecs import Codec, Feedback
from edgetrain.errors import ConfigError, Refused, require
from edgetrain.exchange.messages import Contribute, Reply, Welcome
from edgetrain.exchange.seam import Request
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.ranges import Ranges
from edgetrain.vectors.vector import Buffer, Vector

if TYPE_CHECKING:
    from edgetrain.codecs.lowrank import PowerSGD
    from edgetrain.exchange.further_messages import Masking
    from edgetrain.exchange.masks.masker import Masker

log = logging.getLogger("edgetrain")


@dataclass(frozen=True)
class _Waiting:
    """A contribution that waits for its masks."""

    head: Contribute
    """Its message, without a payload."""
    vector: Vector


class Outbox:
    """The contributions of the member `name`. With a `masker` they are masked before they are sent.

    What a lossy `codec` leaves out of a contribution is added to a later one; `unsent` and
    `restore_unsent` carry it through a checkpoint. Vectors are made in `memory`. The payloads that
    are kept may be views of the vectors that were added.
    """

    def __init__(
        self,
        name: str,
        codec: Codec,
        ranges: Ranges,
        members: int,
        memory: VectorPool,
        masker: Masker | None = None,
    ) -> None:
        """`members` at the start; `ranges`: the elements of each round's contribution."""
        self.codec = codec
        self.sent_nearly_all = codec.nearly_all
        """Whether what the last contribution left out is too little for a round of its own."""
        self._name = name
        self._ranges, self._members, self._memory = ranges, members, memory
        self._masker = masker
        self._feedback: Feedback | None = None
        self._factors: PowerSGD | None = None
        self._kept: dict[int, list[Contribute]] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._warned = False

    @property
    def is_masked(self) -> bool:
        return self._masker is not None

    @property
    def kept(self) -> tuple[int, ...]:
        """The rounds whose contributions are kept for sending again, oldest first."""
        return tuple(sorted(self._kept))

    @property
    def waiting(self) -> tuple[int, ...]:
        """The rounds whose contributions wait for their masks, oldest first."""
        return tuple(sorted(self._waiting))

    @property
    def oldest(self) -> int | None:
        """The oldest round whose contribution can still be sent; None: there is none."""
        return min((*self._kept, *self._waiting), default=None)

    # -- what a lossy codec leaves out ---------------------------------------------------------

    def factors(self) -> PowerSGD | None:
        """Maker of contributions in two trips, if the codec has them; otherwise None."""
        self._factors = None
        if self.codec.two_trips:
            from edgetrain.codecs.lowrank import BoundTwoTrips  # of this codec alone

            assert isinstance(self.codec, BoundTwoTrips)
            self._factors = self.codec.factors()
        return self._factors

    def unsent(self) -> dict[str, Vector]:
        """What lossy contributions have left out so far: arrays of this outbox, to be written to a
        checkpoint before the next contribution."""
        state = self._factors or self._feedback
        return {} if state is None else state.state()

    def restore_unsent(self, unsent: Mapping[str, Vector]) -> None:
        """Go on with what `unsent` returned. ConfigError where it is another codec's."""
        if not unsent:
            return
        if self._factors is not None:
            self._factors.restore(unsent)
            return
        self._feedback = codecs.memory(self.codec, self._ranges.elements, self._members)
        self._feedback.restore(unsent)

    def follow(self, rung: int | None) -> None:
        """Encode on this rung of `auto` from now on, as the reply was; None: it has none."""
        if rung is None:
            return
        from edgetrain.codecs.auto import Auto, OnRungs  # of this codec alone

        if isinstance(self.codec, Auto):
            self.codec = self.codec.at(rung)
        if isinstance(self._feedback, OnRungs):
            self._feedback.climb(rung)

    # -- adding --------------------------------------------------------------------------------

    def add(self, head: Contribute, vector: Vector, rest_later: bool) -> Vector | None:
        """Encode and keep a contribution, whose message without payload is `head`.

        With `rest_later`, what a lossy codec leaves out is added to a later contribution, and the
        result is None. Otherwise the result is what others will read, for the caller to take care
        of the difference; None: they read all of it.
        """
        payloads, read = self._encoded(vector, head.round, rest_later)
        self.sent_nearly_all = self.codec.nearly_all
        self.keep(head, payloads)
        return read

    def add_unmasked(self, head: Contribute, vector: Vector) -> None:
        self._waiting[head.round] = _Waiting(head, vector)

    def mask_ready(self) -> Iterator[int]:
        """Mask and keep the contributions whose masks are there, in round order; their rounds."""
        masker = self._masker
        if masker is None:
            return
        from edgetrain.exchange.masks.masker import parts

        for round in self.waiting:
            state = masker.state(round)
            if state == "soon":
                return
            waiting = self._waiting.pop(round)
            if state == "out":
                log.info("%s has no part in round %d: its keys came too late", self._name, round)
                continue
            masked = self._memory.borrow_vector()[: waiting.vector.size].view(np.uint32)
            masker.mask(round, waiting.vector, waiting.head.weight, masked)
            self._warn_of_cut(masker.cut)
            self.keep(waiting.head, parts(masked, self.codec.part_elements))
            yield round

    def messages(self, round: int) -> Sequence[Contribute]:
        return self._kept[round]

    def keep(self, head: Contribute, payloads: Sequence[Buffer]) -> None:
        """Keep a contribution, whose message without a payload is `head`, by its parts."""
        self._kept[head.round] = [
            replace(head, part=part, parts=len(payloads), payload=payload)
            for part, payload in enumerate(payloads)
        ]

    def _encoded(
        self, vector: Vector, round: int, rest_later: bool
    ) -> tuple[list[Buffer], Vector | None]:
        """The payloads; and what they decode to, where that is the caller's to know."""
        salt = codecs.salt_of(self._name, round)
        if rest_later and not self.codec.lossless:
            if self._feedback is None:
                self._feedback = codecs.memory(self.codec, self._ranges.elements, self._members)
            return self._feedback.encode(vector, self._ranges.of(round), salt), None
        payloads = self.codec.encode(vector, salt)
        if self.codec.lossless:
            return payloads, None
        read = self._memory.borrow_vector()[: vector.size]
        parts = self.codec.slices(vector.size)
        for here, payload in zip(parts, payloads, strict=True):
            self.codec.decode(payload, read[here])
        return payloads, read

    def _warn_of_cut(self, cut: int) -> None:
        if cut and not self._warned:
            self._warned = True
            log.warning(
                "%s: contributions have elements beyond the range of strategy.clip_range, which "
                "are cut: raise it, or clip gradients", self._name,
            )  # fmt: skip

    # -- dropping ------------------------------------------------------------------------------

    def drop_merged(self, merged: int) -> None:
        """The contributions to rounds before `merged` are in the hub's journal."""
        for round in [round for round in self._kept if round < merged]:
            del self._kept[round]

    def drop_answered(self, reply: Reply) -> None:
        """The reply to this round is coming. Unless it is settled, the contribution may still be on
        its way to a later round: then it is kept until it is merged. Out of step a reply says whose
        contributions are merged."""
        round = reply.round
        self.drop_merged(reply.merged_of(self._name))
        if reply.settled and not reply.complete:
            self._kept.pop(round, None)  # its memory is free for the reply
        if self._masker is not None:
            self._waiting.pop(round, None)
            self._masker.forget_rounds(round + 1)

    def drop_missed(self, applied: int) -> None:
        """A base has come in place of so many replies: masked contributions to them are dropped."""
        if self._masker is not None:
            self._masker.forget_rounds(applied)
            self._kept = {r: kept for r, kept in self._kept.items() if r >= applied}
            self._waiting = {r: each for r, each in self._waiting.items() if r >= applied}

    # -- masks ---------------------------------------------------------------------------------

    def accept_masking(self, message: Masking) -> Masking | None:
        """The answer to the hub's message about masks. Raises BadMessage, EdgetrainError."""
        assert self._masker is not None
        return self._masker.answer_hub(message)

    def restart_masks(self, epoch: int) -> bool:
        """Note the hub's epoch; whether it has restarted, and lost the masks of contributions."""
        if self._masker is None or epoch <= self._masker.epoch:
            return False
        self._masker.restart(epoch)
        self._kept = {}
        return True


def masker_of(welcome: Welcome, request: Request, elements: int) -> Masker | None:
    """The masker of this member's contributions, or None. Raises Refused, ConfigError."""
    wanted = request.secure
    if not wanted and not welcome.threshold:
        return None
    from edgetrain.exchange.masks.terms import MaskTerms, default_threshold

    cohort = wanted.members if welcome.drawn and isinstance(wanted, MaskTerms) else 0
    agreed = MaskTerms(cohort or welcome.members, welcome.threshold, welcome.clip_range)
    if isinstance(wanted, MaskTerms) and wanted != agreed:
        found = "not masked" if not welcome.threshold else f"masked with {agreed}"
        raise Refused(
            "masks", f"contributions to this hub are {found}, this job's are masked with {wanted}",
            "the hub has to run the same job file",
        )  # fmt: skip
    least = welcome.members // 2 + 1 if request.honest_hub else default_threshold(welcome.members)
    if wanted is True and welcome.threshold < least:
        raise Refused(
            "masks",
            f"the hub's threshold is {welcome.threshold} of {welcome.members} members, and at "
            f"least {least} are wanted",
            "start it with strategy.secure=true and the usual threshold; or join without secure, "
            "or with honest_hub=True",
        )
    if not welcome.threshold:
        return None
    if not np.isfinite(welcome.clip_range) or welcome.threshold > welcome.members:
        raise ConfigError(f"the hub wants masks by {agreed}, which cannot be")
    require("a hub that masks contributions", "private", "cryptography")
    from edgetrain.exchange.masks.masker import Masker

    masker = Masker(agreed, elements)
    masker.epoch = welcome.epoch
    return masker
