"""The members of a site: they begin when the fleet does, and have their place in it."""

from __future__ import annotations

from dataclasses import replace

from edgetrain.exchange.hub.base_transfer import FixedValues
from edgetrain.exchange.hub.effects import Effect, Note, Send
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.hub.membership import Membership
from edgetrain.exchange.messages import Welcome


class SiteMembership(Membership):
    """The members of one site. Of the whole job they are told how many begin it, and an index."""

    first_index = 0
    """Index of the site's first member among all."""

    def _welcome(self, member: MemberRecord) -> Welcome:
        told, index = super()._welcome(member), self.first_index + member.index
        return replace(told, index=index, members=self.policy.fleet)

    def admit_site(self, fixed: FixedValues, first_index: int) -> list[Effect]:
        """The fleet has begun, with a base that `rounds` has, and this site's members with it."""
        self.fixed, moved = fixed, first_index != self.first_index
        self.first_index = first_index
        self.first_base.drop_parts()
        effects: list[Effect] = [Note("started", "hub", f"{len(self._members)} members")]
        for member in self._members:
            effects += [Send(member.sender, self._welcome(member))] if moved else []
            effects += self.admit(member)
        return effects

    def ask_to_evaluate(self) -> list[Effect]:
        """Somebody has to evaluate, says the hub above: see Evaluators."""
        self.evaluators.note_wanted()
        return self.evaluators.ask()
