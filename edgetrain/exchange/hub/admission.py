"""Who may come in, and who may come back: the rules, each with its code and both values.

Only looks: what an `Admission` is made of is the hub's, at one moment, and nothing of it changes
here. What is done with a member that is let in, or turned away, is the hub's.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgetrain.errors import BadMessage
from edgetrain.exchange.hub.checksums import BaseChecksums
from edgetrain.exchange.hub.members import Away, MemberRecord, Members
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import PROTOCOL, Join, Resume
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.vector import Layout

WhyNot = tuple[str, str] | None
"""(code of a refusal, reason), or nothing to object to."""


@dataclass(frozen=True)
class Model:
    """What a job's members train, as the first of them told it."""

    digest: str = ""
    elements: int = 0
    description: bytes = b""
    """Its tensors, as `layout` writes them; empty: not told."""

    def layout(self) -> Layout:
        """Its tensors, () where they were not told. Raises BadMessage unless they are what the
        digest says."""
        if not self.description:
            return ()
        layout = layouts.read(self.description, self.elements)
        if (told := layouts.digest(self.description)) != self.digest:
            raise BadMessage(
                f"the tensors it tells have the digest {told[:12]}, it says {self.digest[:12]}"
            )
        return layout


@dataclass(frozen=True)
class Admission:
    """The rules of one job, about one moment of it."""

    terms: Terms
    policy: Policy
    model: Model
    members: Members
    away: Away
    checksums: BaseChecksums
    round: int
    started: bool
    finished: bool
    has_base: bool
    tail: int | None
    """The first round from which on the journal has every reply."""
    slack: int
    """Rounds that a member may be ahead."""

    def why_not(self, sender: bytes, join: Join) -> WhyNot:
        """The first rule that keeps a newcomer out."""
        if join.protocol != PROTOCOL:
            return self._other_protocol(join)
        if self.terms.job and join.job and join.job != self.terms.job:
            return "job", (
                f"the hub runs job {self.terms.job[:12]}, the member {join.job[:12]}: "
                "task, data, seed, [train] and [strategy] must be equal"
            )
        if self.model.digest and self._has_another_model(join):
            return self._other_model(join)
        if self.finished:
            return self._ended()
        if self.started and not self.terms.allows_late_join:
            return "started", (
                f"{self.terms.strategy} is at round {self.round}, and the optimizer's state is "
                "only in the members: use a displacement strategy (dga, fedavg) to join late"
            )
        namesake = self.members.named(join.name)
        known = namesake or self.away.get(join.name)
        if known is not None and not known.may_be_at(sender):
            return "name", f"the name '{join.name}' is that of a member with another key"
        there = self.members.get(sender)
        if there is None and namesake is not None and namesake.unreachable_since is None:
            there = namesake
        if there is not None:
            return "name", f"a member named '{there.name}' is there already"
        if len(self.members) - (namesake is not None) >= self.policy.members:
            return self._full()
        return None

    def other_at(self, sender: bytes, member: MemberRecord) -> WhyNot:
        """Why a member cannot go on over this connection: it is another one's, who is there."""
        there = self.members.get(sender)
        if there is None or there is member:
            return None
        return "name", f"this connection is that of '{there.name}'"

    def why_not_back(self, sender: bytes, member: MemberRecord | None, message: Resume) -> WhyNot:
        """The first rule that keeps a member from going on where it was; `member` is whom it may
        be."""
        if message.protocol != PROTOCOL:
            return self._other_protocol(message)
        if self.finished:
            return self._ended()
        if not self.started or member is None or member.session != message.session:
            return "session", f"the hub does not know the session of '{message.name}' (any more)"
        if self._has_another_model(message):
            return self._other_model(message)
        if not member.present and len(self.members) >= self.policy.members:
            return self._full()
        return self._why_not_in_step(member, message) or self.other_at(sender, member)

    def _why_not_in_step(self, member: MemberRecord, message: Resume) -> WhyNot:
        """What keeps a member that is known from taking part in the rounds as they are now."""
        if message.applied > self.round:
            return "ahead", (
                f"the member has applied {message.applied} replies, the hub's journal ends after "
                f"{self.round}"
            )
        first, most = max(message.oldest, message.submitted), self.slack + 1
        if first - max(self.round, member.first_round) > most:
            return "order", f"round {first} is more than {most} ahead of {self.round}"
        known = self.checksums.get(message.applied)
        if known and message.checksum and known != message.checksum:
            return "diverged", (
                f"after {message.applied} replies the base has checksum {known:016x}, "
                f"the member's {message.checksum:016x}"
            )
        if not self.has_base and (message.lacks_base or not self.replies_from(message.applied)):
            return "started", (
                f"{self.terms.strategy} is at round {self.round}, the replies after "
                f"{message.applied} are gone, and the optimizer's state is only in the members"
            )
        return None

    def replies_from(self, applied: int) -> bool:
        """Whether the replies after so many can still be sent."""
        return applied == self.round or (self.tail is not None and self.tail <= applied)

    def _has_another_model(self, told: Join | Resume) -> bool:
        return (told.model, told.elements) != (self.model.digest, self.model.elements)

    def _other_model(self, told: Join | Resume) -> WhyNot:
        return "model", (
            f"the job's model is {self.model.digest[:12]} with {self.model.elements:,} parameters, "
            f"the member's {told.model[:12]} with {told.elements:,}"
        )

    def _other_protocol(self, told: Join | Resume) -> WhyNot:
        return "protocol", f"the hub speaks version {PROTOCOL}, the member {told.protocol}"

    def _ended(self) -> WhyNot:
        return "ended", f"the job is over after {self.round} rounds"

    def _full(self) -> WhyNot:
        return "full", f"all {self.policy.members} places are taken"
