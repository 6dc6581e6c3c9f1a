"""A fleet in memory with a hub, its replica, and members that find either: real halves everywhere.

Time passes in quarters of a beat when nothing else can happen, or when a draw says so. The links
between members and either hub, and between hub and replica, are cut, and both hubs killed, by the
test's draws. What leaves either hub is noted: who closed which round, and with which bytes.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable

from fakes.fleet import Disk, FakeMember, Fleet, Wire

from edgetrain.errors import BadMessage, EdgetrainError
from edgetrain.exchange.hub.effects import (
    Answered,
    Closed,
    Effect,
    Feed,
    Note,
    Replay,
    Save,
    Send,
    Write,
    replies_of,
)
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.records import Restarted, Round
from edgetrain.exchange.hub.replica import HUB, Replica
from edgetrain.exchange.hub.replicated import ReplicatedPart
from edgetrain.exchange.hub.terms import Policy
from edgetrain.exchange.member.standby import StandbyEnd
from edgetrain.exchange.messages import Reply, pack, unpack

REPLICA = b"replica"
MOST = 30_000


class TwoWayMember(FakeMember):
    """A member that can reach hub and replica."""

    def __init__(self, fleet, *rest, **other) -> None:
        super().__init__(fleet, *rest, **other)
        self.other = Wire(self._stand_still)
        self.way = StandbyEnd(self.wire, lambda address, key: self.other, fleet.clock)

    def choices(self) -> list[Callable[[], None]]:
        found, fleet = super().choices(), self.fleet
        if self.wire.to_hub:
            found[0] = functools.partial(fleet.arrive, self, self.wire, fleet.first)
        if self.other.to_hub:
            found.append(functools.partial(fleet.arrive, self, self.other, fleet.second))
        if self.other.to_member and not self.is_over:
            found.append(self.hear_other)
        return found

    @property
    def waits_in_vain(self) -> bool:
        return super().waits_in_vain and not self.other.to_member

    @property
    def is_gone(self) -> bool:
        """Whether its connections are closed."""
        is_done = self.state == "done" and not self.wire.to_hub
        return is_done or self.index in self.fleet.dead

    def hear_other(self) -> None:
        self.other.deliver_to_member()
        if self._is_waiting:
            self.go()


class Site:
    """Where one of the two hubs runs."""

    def __init__(self, town: Town, name: str) -> None:
        self.town, self.name = town, name
        self.hub: Hub | None = None
        self.disk = Disk()
        self.own: set[int] = set()
        """Rounds that the hub here merged itself."""

    def wire_of(self, member: TwoWayMember) -> Wire:
        return member.wire if self is self.town.first else member.other

    def carry_out(self, effects) -> None:
        town = self.town
        for effect in effects:
            match effect:
                case Write(record=record):
                    self.disk.append(record)
                    if isinstance(record, Round):
                        self.own.add(record.round)
                case Save(state=state):
                    self.disk.save(state)
                    self.hub.tail = self.disk.first
                case Replay():
                    for record in self.disk.rounds():
                        if effect.first <= record.round < effect.end:
                            self.carry_out([Send(effect.to, r) for r in replies_of(record)])
                case Feed():
                    if effect.begins:
                        self._copy = iter([self.disk.state, *self.disk.records()])
                        self._copied = len(self.disk.log)
                    item = next(self._copy, None)
                    if item is None and self._copied < len(self.disk.log):
                        self._copy = iter(self.disk.records()[self._copied :])
                        self._copied = len(self.disk.log)
                        item = next(self._copy)
                    self.carry_out(effect.take(item, town.now))
                case Send(to=to) if to == REPLICA:
                    if town.replica is not None and not town.parted:
                        town.to_replica.append(pack(effect.message))
                case Send():
                    self._send(effect)
                case Note():
                    town.notes.append(effect)
                case Closed():
                    town.closed.append(effect)
                case Answered():
                    effect.answer(effect.told)

    def _send(self, effect: Send) -> None:
        town = self.town
        member = next((m for m in town.members if m.address == effect.to), None)
        if isinstance(effect.message, Reply):
            town.note_reply(self, effect.message)
        if member is None or member.is_gone:
            self.carry_out(self.hub.unreachable(effect.to, town.now))
        elif (member.index, self.name) not in town.apart:
            self.wire_of(member).send_to_member(pack(effect.message))


class Town(Fleet):
    """`Fleet` with a replica. `policy` has a beat of 1 s."""

    member = TwoWayMember

    def __init__(self, *args, policy: Policy, **other) -> None:
        super().__init__(*args, policy=policy, **other)
        self.fresh_replicated = lambda: self.fresh_hub(
            ReplicatedPart("tcp://c:5555", lambda sender: sender == REPLICA)
        )
        self.first, self.second = self.new_site("hub"), self.new_site("replica")
        self.first.hub = self.hub = self.fresh_replicated()
        self.to_replica = self.new_line("hub", "replica")
        self.from_replica = self.new_line("replica", "hub")
        self.apart: set[tuple[int, str]] = set()
        """(member, hub) between which messages are lost."""
        self.parted = False
        """Whether messages between hub and replica are lost."""
        self.replica: Replica | None = None
        self.took_over_at: float | None = None
        self.killed_at = float("inf")
        self.replies: dict[tuple[int, int], bytes] = {}
        self.closers: dict[int, str] = {}
        self.broken: list[str] = []
        self.start_replica()

    def new_site(self, name: str) -> Site:
        return Site(self, name)

    def new_line(self, source: str, target: str) -> deque[list]:
        """What is under way between hub and replica."""
        return deque()

    # -- what is judged -----------------------------------------------------------------------

    def note_reply(self, site: Site, reply: Reply) -> None:
        key, payload = (reply.round, reply.part), bytes(reply.payload)
        if self.replies.setdefault(key, payload) != payload:
            self.broken.append(f"two replies to round {reply.round}")
        if reply.round in site.own:
            if self.closers.setdefault(reply.round, site.name) != site.name:
                self.broken.append(f"round {reply.round} was closed by both")
            part = site.hub.part
            if isinstance(part, ReplicatedPart) and part.replica not in ("out",):
                held = {record.round for record in self.second.disk.rounds()}
                behind = self.second.disk.first
                is_copied = reply.round in held or reply.round < behind
                if not is_copied and part.replica != "entering":
                    self.broken.append(f"round {reply.round} left before it was copied")

    def judge(self) -> None:
        """Every reply that left is in the books of the hub that goes on."""
        assert not self.broken, self.broken
        site = self.second if self.took_over_at is not None else self.first
        books = {
            (r.round, part): bytes(p) for r in site.disk.rounds() for part, p in enumerate(r.reply)
        }
        first = site.disk.first
        assert {k: v for k, v in self.replies.items() if k[0] >= first}.items() <= books.items()
        counted = [(c.member, c.meant_for) for r in site.disk.rounds() for c in r.counted]
        assert len(counted) == len(set(counted))

    # -- hub and replica ----------------------------------------------------------------------

    def start_replica(self) -> None:
        self.second.disk = Disk()
        agreed = self.hub.state().agreed
        self.replica = Replica(agreed, self.hub.policy.heartbeat_s, 1 << 30, self.now)
        self.on_replica(self.replica.follow(self.now))

    def on_replica(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Save(state=state):
                    self.second.disk.save(state)
                case Write(record=record):
                    self.second.disk.append(record)
                case Send(to=to) if to == HUB:
                    if not self.parted:
                        self.from_replica.append(pack(effect.message))
                case Send():
                    for member in self.members:
                        here = (member.index, "replica") not in self.apart
                        if member.address == effect.to and here:
                            member.other.send_to_member(pack(effect.message))
        if self.replica is not None and self.replica.taken:
            self.take_over()

    def kill_replica(self) -> None:
        """SIGKILL, and its machine is gone."""
        self.replica = None
        self.to_replica.clear()
        self.from_replica.clear()

    def take_over(self) -> None:
        site, replica, self.replica = self.second, self.replica, None
        self.took_over_at = self.now
        self.took_over_epoch = replica.next_epoch
        site.disk.append(Restarted(replica.next_epoch - 1))
        site.hub = self.fresh_hub()
        site.hub.restore(site.disk.state, site.disk.records(), self.now)
        site.hub.tail = site.disk.first
        assert site.hub.epoch == replica.next_epoch > self.hub.epoch
        if self.first.hub is None:
            self.hub = site.hub
        for sender, resume in replica.waiting.items():
            if site.hub is not None:  # what it wrote may have found its disk full
                site.carry_out(site.hub.handle(sender, resume, self.now))
        if site.hub is not None:
            site.carry_out(site.hub.tick(self.now))

    def arrive(self, member: TwoWayMember, wire: Wire, site: Site) -> None:
        message = unpack(wire.to_hub.popleft())
        if (member.index, site.name) in self.apart:
            return
        if site.hub is not None:
            site.carry_out(site.hub.handle(member.address, message, self.now))
        elif site is self.second and self.replica is not None:
            self.on_replica(self.replica.handle_member(member.address, message, self.now))

    def kill_hub(self) -> None:
        """SIGKILL: nothing of it is left but its disk, and what is on its way."""
        self.first.hub, self.killed_at = None, self.now
        for _ in range(self.rng.randint(0, len(self.to_replica))):
            self.to_replica.pop()
        self.from_replica.clear()
        if self.second.hub is not None:
            self.hub = self.second.hub

    def resume_hub(self) -> None:
        hub = self.first.hub = self.fresh_replicated()
        if self.second.hub is None:
            self.hub = hub
        if self.first.disk.state is not None:
            hub.restore(self.first.disk.state, self.first.disk.records(), self.now)
            hub.tail = self.first.disk.first
        self.reconnect_replica()
        for member in self.members:
            member.wire.connections += member.has_begun

    def reconnect_replica(self) -> None:
        self.to_replica.clear()
        self.from_replica.clear()
        if self.replica is not None:
            self.on_replica(self.replica.follow(self.now))

    def step_between(self) -> None:
        if self.to_replica and self.replica is not None:
            message = unpack(self.to_replica.popleft())
            try:
                self.on_replica(self.replica.handle_hub(message, self.now))
            except BadMessage:
                self.reconnect_replica()
        elif self.from_replica:
            message = unpack(self.from_replica.popleft())
            if self.first.hub is not None:
                self.first.carry_out(self.first.hub.handle(REPLICA, message, self.now))

    # -- time ---------------------------------------------------------------------------------

    def advance(self) -> bool:
        choices = [choice for member in self.members for choice in member.choices()]
        if self.to_replica or self.from_replica:
            choices.append(self.step_between)
        if choices:
            self.rng.choice(choices)()
        return bool(choices)

    def let_time_pass(self) -> None:
        self.now += self.hub.policy.heartbeat_s / 4
        for site in (self.first, self.second):
            if site.hub is not None:
                site.carry_out(site.hub.tick(self.now))
        if self.replica is not None:
            self.on_replica(self.replica.tick(self.now))
        for member in self.members:
            if member.waits_in_vain:
                member.go()

    @property
    def is_over(self) -> bool:
        return all(member.is_over for member in self.members)

    def run(
        self,
        each: Callable[[], None] = lambda: None,
        most_s: float = 4000.0,
        later: Callable[[], None] = lambda: None,
    ) -> Town:
        for _ in range(MOST):
            if self.is_over or self.now > most_s:
                break
            if self.advance():
                each()
            else:
                self.let_time_pass()
                later()
        for member in self.members:
            member.end()
        return self


def town(strategy="dga", members=3, steps=12, seed=0, **other) -> Town:
    policy = Policy(members, quorum=members // 2 + 1, rejoin_s=30.0, empty_after_s=60.0)
    delay = other.pop("delay", 2)
    return Town(strategy, members, 2, delay, steps, policy=policy, rng=random.Random(seed), **other)


__all__ = ["EdgetrainError", "Town", "town"]
