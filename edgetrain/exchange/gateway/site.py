"""The hub of a site, and its link to the hub above.

A `SitePart` is a part of a hub: members join that, contribute and are answered as at any other.
Three things differ. Training begins when the fleet's does: once all members of the site and their
base are here, the site joins the hub above, as one member for all of them, and what that says is
the beginning. A round that closes goes up, and its reply comes from above (`rounds`). And it is
finished only when the hub above has merged everything for good.

`hear` moves the link: it sends what is in the journal by then, and takes in what has come. A hub
above that is away is waited for; contributions are kept, and sent again by the link. A site that
all members have left says so above, and asks where the fleet is once one is back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from edgetrain.errors import Refused
from edgetrain.exchange.gateway.rounds import SiteRounds
from edgetrain.exchange.gateway.way_up import WayUp
from edgetrain.exchange.hub.base_transfer import FixedValues
from edgetrain.exchange.hub.effects import Effect, Note, Save, Send, refusal
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.hub.membership import Membership
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.hub.protocol import ASTRAY, GoOn, Hub, HubPart, Records, Restore
from edgetrain.exchange.hub.records import Above, Sent, State
from edgetrain.exchange.hub.steering import Steering
from edgetrain.exchange.messages import Figure, Message, Welcome
from edgetrain.exchange.seam import Behind, CatchUp, Entry, Past, Request, Submission
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.blob import blob_digest, blob_parts
from edgetrain.vectors.vector import Buffer, Vector
from edgetrain.vectors.vector import checksum as checksum_of

NOBODY_HERE = "no member is here: the fleet goes on without this site until one is back"

CUT_OFF = "the hub above does not answer: members wait, and contributions are kept until it does"

REACHED = "the hub above answers again"


class SiteTensors:
    """The fixed tensors of a site, which are none of its own: a FixedTensors that holds bytes."""

    def __init__(self, blob: Buffer) -> None:
        self._blob = bytes(blob)

    @property
    def size(self) -> int:
        return len(self._blob)

    @property
    def digest(self) -> str:
        return blob_digest(blob_parts(self._blob))

    def read(self) -> Buffer:
        return self._blob

    def write(self, blob: Buffer) -> None:
        self._blob = bytes(blob)


class SiteMembership(Membership):
    """The members of one site. Of the whole job they are told how many begin it, and an index."""

    first_index = 0
    """Index of the site's first member among all."""

    def may_start(self, now: float) -> bool:
        """A site begins when the fleet does: the hub above says so."""
        return False

    def may_ask(self, now: float) -> bool:
        """Whether all members of the site and their base are here."""
        return super().may_start(now)

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


class SitePart(HubPart):
    """The part of the hub of one site. `connect` makes its link to the hub above, where it asks for
    `name`."""

    rounds: SiteRounds
    membership: SiteMembership

    def __init__(self, name: str, connect: Callable[[], WayUp]) -> None:
        self.name = name
        self.link: WayUp | None = None
        """To the hub above; None: not everything is here that it takes to join."""
        self._connect = connect
        self._joined = False
        self._past: Above | None = None
        self._base: Vector = np.empty(0, np.float32)
        """The base for the site's join, while it joins."""
        self._tensors: SiteTensors | None = None
        self._is_empty = False
        """Whether the hub above has been told that no member is here."""
        self._is_cut_off = False
        """Whether people have been told that the hub above is away."""
        self.refused: Refused | None = None
        """Reason of the hub above for refusing this site."""

    def attach(self, hub: Hub) -> Hub:
        """The members of a fresh hub of the site's job are the site's."""
        super().attach(hub)
        terms, policy, members = hub.terms, hub.policy, hub.members
        merger, delay, closing = hub.rounds.merger, hub.rounds.delay, terms.closing_rule(policy)
        assert isinstance(merger.rule, Mean)
        self.rounds = SiteRounds(members, merger, delay, closing, None, policy.deadline_s)
        self.membership = SiteMembership(terms, policy, members, self.rounds)
        hub.rounds, hub.membership = self.rounds, self.membership
        hub.steering = Steering(members, self.rounds, self.membership, hub.state)
        return hub

    @property
    def holds(self) -> bool:
        """Whether the hub above has not merged all contributions."""
        return bool(self.rounds.kept)

    # -- the way up ---------------------------------------------------------------------------

    def hear(self, now: float) -> list[Effect]:
        """Send what waits, and take in what has come from above. Raises Refused, when members that
        wait for the start have been told, Diverged, and HubUnreachable for a hub that has been away
        for too long."""
        if self.refused is not None:
            raise self.refused
        if self.hub.steering.stands:
            return []
        try:
            return self._hear(now)
        except Refused as refused:
            if refused.code == "ended" and self.hub.started:
                return self.hub.steering.turn("stop", now)
            if self.hub.started:
                raise
            self.refused = refused
            why = f"the hub above refuses this site: {refused.message}"
            return [refusal(each.sender, refused.code, why) for each in self.hub.members]

    def obey(self, order: Order, now: float, go_on: GoOn) -> list[Effect]:
        """The course of the job is the hub's above."""
        if order.words[:1] == ("remove",):
            return go_on()
        why = f"{' '.join(order.words[:2])}: this hub is a gateway, of one site"
        order.refuse(why, "tell the hub above, in its run folder")
        return []

    def _hear(self, now: float) -> list[Effect]:
        if not self._joined:
            return self._join(now)
        link, rounds = self._require_link(), self.rounds
        outgoing, rounds.outgoing = rounds.outgoing, []
        effects = self._say_who_is_here()
        for sent in outgoing:
            self._submit(sent)
        link.poll()
        effects += self._check_way_up()
        while link.ready > self.hub.round:
            found = link.wait(self.hub.round)
            if isinstance(found, CatchUp):
                effects += self._catch_up(found)
                break  # its base goes to the journal before it is changed
            effects += rounds.answer(found) + self.membership.give_up_behind()
        rounds.note_settled(link.outbox.kept)
        if link.is_to_evaluate:
            link.is_to_evaluate = False
            effects += self.membership.ask_to_evaluate()
        return effects

    def _say_who_is_here(self) -> list[Effect]:
        """Tell the hub above when the last member has gone and may come back, so that rounds do not
        wait for this site; once one is back, ask where the fleet is."""
        hub = self.hub
        is_over = self.membership.finished or hub.steering.is_over
        is_empty = not hub.members and not is_over
        if is_empty is self._is_empty:
            return []
        self._is_empty, link = is_empty, self._require_link()
        # Nobody can say that there is no round at all: a first round that is lost is waited for.
        link.end(max(1, self.rounds.collecting) if is_empty else 0)
        if not is_empty:
            link.ask_again()
        return [Note("late", "hub", NOBODY_HERE)] if is_empty else []

    def _check_way_up(self) -> list[Effect]:
        """Say once that the hub above is away, and once that it is back. Raises HubUnreachable for
        one that has been away for too long."""
        link = self._require_link()
        link.check_silence()
        is_cut_off = link.away_s >= self.hub.policy.lost_after_s
        if is_cut_off is self._is_cut_off or 0.0 < link.away_s < self.hub.policy.lost_after_s:
            return []
        self._is_cut_off = is_cut_off
        return [Note("late", "hub", CUT_OFF) if is_cut_off else Note("back", "hub", REACHED)]

    def _require_link(self) -> WayUp:
        assert self.link is not None
        return self.link

    def _submit(self, sent: Sent) -> None:
        link, vector = self._require_link(), np.frombuffer(sent.vector, np.float32)
        site = Behind(sent.members, sent.applied, sent.checksum)
        own = self.hub.round, self.hub.checksum(self.hub.round)
        given = Submission(sent.round, vector, sent.weight, *own, sent.wanted_delay, sent.step_s)
        link.submit(replace(given, behind=site))

    def handle(self, sender: bytes, message: Message, now: float, go_on: GoOn) -> list[Effect]:
        is_here = self.hub.members.get(sender) is not None
        if isinstance(message, Figure) and message.is_fleets and self._joined and is_here:
            # What members found on data of their own is of this site, and stays here.
            self._require_link().report(replace(message, own_step=0, own=()))
        return go_on()

    # -- joining ------------------------------------------------------------------------------

    def _join(self, now: float) -> list[Effect]:
        if self.link is None:
            if not (self.hub.started or self.membership.may_ask(now)):
                return []
            self._ask_above()
        link = self._require_link()
        if (entry := link.poll_join()) is None:
            return self._check_way_up()
        self._joined = True
        if self._past is not None:
            return self._go_on(entry)
        self._past = Above(link.session, entry.name, entry.index, entry.round, ())
        return self._begin(entry)

    def _ask_above(self) -> None:
        membership, rounds, past = self.membership, self.rounds, None
        model, fixed = membership.model, membership.fixed
        if self.hub.started:
            place = self._past
            assert place is not None
            applied, oldest = rounds.round, min(rounds.kept, default=None)
            past = Past(
                place.session, place.name, rounds.collecting, applied, self.hub.checksum(applied),
                self.hub.base is not None or not self.hub.terms.strategy.hub_keeps_base, oldest,
            )  # fmt: skip
            self._base = np.empty(model.elements, np.float32)
            checksum = 0
        else:
            self._base = membership.first_base.vector(model.elements)
            checksum = checksum_of(self._base)
            fixed = membership.first_base.fixed_values(model.elements)
        self._tensors = SiteTensors(b"".join(fixed.payloads)) if model.fixed_bytes else None
        weight = sum(member.weight for member in self.hub.members) or 1.0
        request = Request(
            model.digest, self.name, weight, self.hub.terms.job, model.description,
            fixed_tensors=self._tensors, steps=rounds.delay.steps, behind=self.hub.policy.members,
        )  # fmt: skip
        self.link = self._connect()
        self.link.ask_in(request, self._base, checksum, past)

    def _begin(self, entry: Entry) -> list[Effect]:
        self.rounds.begin(self._base, entry)
        self.rounds.start(self.hub.epoch)
        tensors = self._tensors
        fixed = FixedValues() if tensors is None else FixedValues.restored(tensors.read())
        effects = self.membership.admit_site(fixed, entry.index)
        save = Save(self.hub.state())
        if not self.hub.terms.strategy.hub_keeps_base:
            self.rounds.merger.forget_base()
        return [save, *effects]

    def _go_on(self, entry: Entry) -> list[Effect]:
        """This site was started again: the hub above says where the fleet stands."""
        effects: list[Effect] = []
        if entry.applied > self.hub.round:
            missed = CatchUp(
                entry.round, entry.delay.steps, entry.applied, entry.checksum, self._base,
                entry.steps_now,
            )  # fmt: skip
            effects += self._take_base(missed)
        self.rounds.outgoing = []
        for round in sorted(self.rounds.kept):
            self._submit(self.rounds.kept[round])
        return effects + self._skip_to(entry.round)

    # -- behind the fleet ---------------------------------------------------------------------

    def _catch_up(self, missed: CatchUp) -> list[Effect]:
        effects = [] if missed.base is None else self._take_base(missed)
        return effects + self._skip_to(missed.round)

    def _take_base(self, missed: CatchUp) -> list[Effect]:
        """Replies are gone: the site goes on from the fleet's base, and so do its members."""
        self.rounds.jump(missed)
        self.oldest_reply = missed.applied
        return [Save(self.hub.state()), *self._call_back()]

    def _skip_to(self, round: int) -> list[Effect]:
        return self._call_back() if self.rounds.skip_to(round) else []

    def _call_back(self) -> list[Effect]:
        """Let all members say where they are: they are told where the fleet is."""
        effects: list[Effect] = []
        for member in self.hub.members:
            if member.trains and member.standing == "in step":
                member.mark_astray()
                effects.append(refusal(member.sender, "unknown", ASTRAY))
        if effects:
            effects.append(Note("late", "hub", "the fleet went on without this site"))
        return effects

    # -- what survives a restart --------------------------------------------------------------

    def state(self, state: State) -> State:
        place = self._past
        assert place is not None
        return replace(state, above=self.rounds.place(place.session, place.name, place.index))

    def restore(self, state: State, now: float, go_on: Restore, records: Records) -> None:
        """Raises Refused for a journal that is not a gateway's."""
        if state.above is None:
            raise Refused("gateway", "the journal is a hub's, not a gateway's")
        self._past = state.above
        self.membership.first_index = state.above.index
        go_on(records)
