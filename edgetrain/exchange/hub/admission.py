"""Who may join, and who may come back: the rules, each with its code and both values.

An `Admission` only reads what it is made of. What follows from its answer is done in `membership`.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgetrain.errors import BadMessage
from edgetrain.exchange.hub.members import MemberRecord, Members
from edgetrain.exchange.hub.rounds import Rounds
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import PROTOCOL, Join, Resume
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.ranges import WHOLE, Stretch
from edgetrain.vectors.vector import Layout

WhyNot = tuple[str, str] | None
"""(code of a refusal, reason), or None: no objection."""


_OTHER_DATA = (
    "the member's data or frozen tensors differ from the first member's; with lbfgs all members "
    "need the same data"
)
_OTHER_FIXED = (
    "what is not trained (frozen parameters, buffers but for normalisation statistics) has other "
    "values than the first member's"
)


@dataclass(frozen=True)
class AgreedModel:
    """The model of a job, as its first member described it."""

    digest: str = ""
    elements: int = 0
    description: bytes = b""
    """Its tensors, as `layout` writes them; empty: not described."""
    fixed_bytes: int = 0
    """Bytes of the fixed tensors, handed out from the first member to all others."""
    stretch: Stretch = WHOLE
    """The hub's part of its vector."""

    @property
    def base_elements(self) -> int:
        return self.stretch.size(self.elements) if self.elements else 0

    def layout(self) -> Layout:
        """Its tensors, () if not described. Raises BadMessage unless they have the digest."""
        if not self.description:
            return ()
        layout = layouts.read(self.description, self.elements)
        told = layouts.digest(self.description)
        if not layouts.tensors_agree(told, self.digest):
            raise BadMessage(
                f"model digest mismatch: announced {self.digest[:12]}, computed {told[:12]}"
            )
        return layout


_NO_GATEWAYS = (
    "no gateway may join here: the hub's job does not say fleet.gateways=true, or the hub is a "
    "gateway itself"
)


def _elements(join: Join) -> int:
    """What of the hub's memory a base and the fixed tensors would take, in float32."""
    return join.elements + -(-join.fixed_bytes // 4)


def most_places(policy: Policy, members: Members, name: str = "") -> int:
    """Places of the job: one more while its stand-in is there, or comes, if that has this name."""
    stand_in = policy.stand_in
    is_there = bool(stand_in) and (name == stand_in or members.named(stand_in) is not None)
    return policy.members + is_there


@dataclass(frozen=True)
class Admission:
    """The rules of one job, applied to its hub as it is now."""

    terms: Terms
    policy: Policy
    model: AgreedModel
    members: Members
    rounds: Rounds
    finished: bool
    tail: int | None
    """The first round from which on the journal has every reply."""

    def why_not(self, sender: bytes, join: Join) -> WhyNot:
        """The first rule that keeps a newcomer out."""
        if join.protocol != PROTOCOL:
            return self._other_protocol(join)
        if self.terms.job and join.job and join.job != self.terms.job:
            (mine, *code), (its, *theirs) = self.terms.job.split("+"), join.job.split("+")
            if mine == its:
                return "job", (
                    f"the hub's extensions have the code {''.join(code) or 'none'}, the member's "
                    f"{''.join(theirs) or 'none'}: give both the same files"
                )
            return "job", (
                f"the hub runs job {self.terms.job[:12]}, the member {join.job[:12]}: "
                "task, data, seed, [train] and [strategy] must be equal"
            )
        if self.terms.strategy.has_variates and not layouts.is_doubled(join.payload):
            return "gradients", (
                f"{self.terms.strategy.spelled} exchanges mean gradients, and the member's vector "
                "has no room for them"
            )
        if self.model.digest and self._has_another_model(join):
            return self._other_model(join)
        if self.model.digest and not layouts.fixed_agree(self.model.digest, join.model):
            return self._other_fixed()
        if not self.model.elements and _elements(join) > self.policy.most_elements:
            takes, most = 4e-6 * join.elements, 4e-6 * self.policy.most_elements
            fixed = f" and {1e-6 * join.fixed_bytes:,.0f} MB of fixed tensors"
            return "large", (
                f"the member's model has {join.elements:,} parameters, {takes:,.0f} MB"
                f"{fixed if join.fixed_bytes else ''}; this hub takes {most:,.0f} MB: "
                "hub.max_model_mb in its job, or more free memory"
            )
        if self.finished:
            return self._ended()
        if join.behind and not self.terms.gateways:
            return "gateway", _NO_GATEWAYS
        known = self.rounds.delay.steps
        if join.steps and known and join.steps != known:
            return "steps", f"the run has {known:,} steps, the member's {join.steps:,}"
        if self.rounds.started and not self.terms.strategy.allows_late_join:
            return "started", (
                f"{self.terms.strategy.spelled} is at round {self.rounds.round}, and the "
                "optimizer's state is only in the members: use a displacement strategy (dga, "
                "fedavg) to join late"
            )
        namesake = self.members.named(join.name)
        earlier = namesake or self.members.away.get(join.name)
        if earlier is not None and not earlier.may_be_at(sender):
            return "taken", f"the name '{join.name}' is that of a member with another key"
        there = self.members.get(sender)
        if there is None and namesake is not None and namesake.unreachable_since is None:
            there = namesake
        if there is not None:
            return "name", f"a member named '{there.name}' is there already"
        replaced = self.replaced_by(sender, join)
        for other in replaced:
            if other.unreachable_since is None:
                return self._has_a_place(other)
        free = (
            most_places(self.policy, self.members, join.name)
            - self.members.places
            + sum(each.places for each in replaced)
        )
        if free < (join.behind or 1):
            return self._full(join.behind)
        return None

    def replaced_by(self, sender: bytes, join: Join) -> list[MemberRecord]:
        """The members whose place a newcomer takes: that of its name, and that of its key."""
        found = [self.members.named(join.name), self.members.owned_by_owner_of(sender)]
        return list(dict.fromkeys(member for member in found if member is not None))

    def _has_a_place(self, there: MemberRecord) -> WhyNot:
        """One key has one place, so that no device has several votes."""
        return "name", f"'{there.name}' is there already with this key: each device has one place"

    def other_at(self, sender: bytes, member: MemberRecord) -> WhyNot:
        """Why a member cannot go on over this connection: another member has it."""
        there = self.members.get(sender)
        if there is None or there is member:
            return None
        return "name", f"this connection is that of '{there.name}'"

    def why_not_back(self, sender: bytes, member: MemberRecord | None, message: Resume) -> WhyNot:
        """The first rule that keeps a known `member`, if there is one, from going on."""
        if message.protocol != PROTOCOL:
            return self._other_protocol(message)
        if self.finished:
            return self._ended()
        if not self.rounds.started or member is None or member.session != message.session:
            return "session", f"the hub does not know the session of '{message.name}' (any more)"
        if self._has_another_model(message):
            return self._other_model(message)
        if not layouts.fixed_agree(self.model.digest, message.model):
            return self._other_fixed()
        there = self.members.owned_by_owner_of(sender)
        if there is not None and there is not member:
            return self._has_a_place(there)
        if not member.is_in and self.members.places + member.places > most_places(
            self.policy, self.members, member.name
        ):
            return self._full()
        return self._why_not_in_step(member, message) or self.other_at(sender, member)

    def _why_not_in_step(self, member: MemberRecord, message: Resume) -> WhyNot:
        """What keeps a known member from taking part in the rounds as they are now."""
        round = self.rounds.round
        if message.applied > round:
            return "ahead", (
                f"the member has applied {message.applied} replies, the hub's journal ends after "
                f"{round}"
            )
        first, most = max(message.oldest, message.submitted), self.rounds.slack + 1
        is_synchronous = self.terms.strategy.is_synchronous
        if is_synchronous and first - max(round, member.first_round) > most:
            return "order", f"round {first} is more than {most} ahead of {round}"
        known = self.rounds.checksums.get(message.applied)
        if known and message.checksum and known != message.checksum:
            return "diverged", (
                f"after {message.applied} replies the base has checksum {known:016x}, "
                f"the member's {message.checksum:016x}"
            )
        lacks_replies = message.lacks_base or not self.has_replies_from(message.applied)
        if self.rounds.base is None and lacks_replies:
            return "started", (
                f"{self.terms.strategy.spelled} is at round {round}, the replies after "
                f"{message.applied} are gone, and the optimizer's state is only in the members"
            )
        return None

    def has_replies_from(self, applied: int) -> bool:
        """Whether all replies after `applied` can still be sent."""
        newest = applied == self.rounds.round
        return newest or (self.tail is not None and self.tail <= applied)

    def _has_another_model(self, told: Join | Resume) -> bool:
        same = layouts.tensors_agree(told.model, self.model.digest)
        if isinstance(told, Join) and told.fixed_bytes != self.model.fixed_bytes:
            return True
        return not same or told.elements != self.model.elements

    def _other_model(self, told: Join | Resume) -> WhyNot:
        reason = (
            f"the job's model is {self.model.digest[:12]} with {self.model.elements:,} parameters, "
            f"the member's {told.model[:12]} with {told.elements:,}"
        )
        if isinstance(told, Join) and bool(told.fixed_bytes) != bool(self.model.fixed_bytes):
            reason += "; one takes the first member's values (frozen = 'first'), one does not"
        payload = told.payload if isinstance(told, Join) else b""
        differs = layouts.first_difference(self.model.description, payload)
        return "model", f"{reason}; {differs}" if differs else reason

    def _other_fixed(self) -> WhyNot:
        return ("data", _OTHER_DATA) if self.terms.strategy.deals else ("fixed", _OTHER_FIXED)

    def _other_protocol(self, told: Join | Resume) -> WhyNot:
        return "protocol", f"the hub speaks version {PROTOCOL}, the member {told.protocol}"

    def _ended(self) -> WhyNot:
        return "ended", f"the job is over after {self.rounds.round} rounds"

    def _full(self, behind: int = 0) -> WhyNot:
        taken, most = self.members.places, self.policy.members
        if behind and taken < most:
            return "full", (
                f"{taken} of {most} places are taken, and the gateway's site has {behind} members"
            )
        return "full", f"all {most} places are taken"
