"""A fleet in memory: the real drivers, links and hub; a scheduler in place of network and clock.

Each member is a greenlet. Members advance and messages are delivered in an order drawn from a
`random.Random`, so that a law can be tried against many interleavings. Links are in order, as TCP
is. No thread, no sleep.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from greenlet import GreenletExit, greenlet

from edgetrain import codecs, strategies
from edgetrain.errors import HubUnreachable, Refused
from edgetrain.exchange.delay import Delay
from edgetrain.exchange.hub.effects import (
    Answered,
    Closed,
    Note,
    Replay,
    Save,
    Send,
    Write,
    replies_of,
)
from edgetrain.exchange.hub.protocol import Hub, HubPart
from edgetrain.exchange.hub.records import Round, Sent, State, decode, encode
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.masks.aggregator import Aggregator
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.exchange.member.doubled import Doubled
from edgetrain.exchange.member.driver import Driver
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.messages import pack, unpack
from edgetrain.exchange.seam import CatchUp, Exchange, Request, RoundReply, Submission
from edgetrain.exchange.transport import MemberTransport, Traffic
from edgetrain.strategies.half import MemberHalf
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.ranges import Ranges
from edgetrain.vectors.vector import Buffer, Vector
from tests.fakes.flat_vectors import FlatVectors

MOST_EVENTS = 10_000
"""That a fleet may need, with the few members and steps of a test."""

LocalStep = Callable[[int, int, Vector], Vector]
"""(member, step, params) -> what a plain optimizer would subtract, as float32."""


def noisy_descent(member: int, step: int, params: Vector) -> Vector:
    """A contraction towards a point of each member's own, plus noise; reproducible."""
    noise = np.random.default_rng([member, step]).standard_normal(params.size)
    return (0.1 * (params - member) + 0.05 * noise).astype(np.float32)


class Disk:
    """A journal in memory: what was written, as bytes. It outlives hubs."""

    def __init__(self, snapshot_every: int = 0) -> None:
        self.snapshot_every = snapshot_every
        self.snapshot: bytes | None = None
        self.log: list[tuple[bytes, bytes]] = []
        self.first = 0
        self.counted: list[tuple[str, int]] = []
        """Every (member, round) that a record ever said was merged."""

    def append(self, record) -> None:
        header, payloads = encode(record)
        self.log.append((header, b"".join(payloads)))
        if isinstance(record, Round | Sent):
            self.counted += [(c.member, c.meant_for) for c in record.counted]

    def save(self, state: State) -> None:
        header, payloads = encode(state)
        self.snapshot = header, b"".join(payloads)
        self.log, self.first = [], state.round

    @property
    def state(self) -> State | None:
        return None if self.snapshot is None else decode(*self.snapshot)

    def records(self) -> list:
        return [decode(*each) for each in self.log]

    def rounds(self) -> list[Round]:
        return [record for record in self.records() if isinstance(record, Round)]


class HubDied(Exception):
    """It was killed before the next effect."""


class Wire:
    """A member's end of its connection, in memory: a MemberTransport, and Reconnecting.

    Messages are on their way, in order, until the fleet's scheduler delivers them. `wait` is called
    where a member stands still for want of a message.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self.to_hub: deque[list[Buffer]] = deque()
        self.to_member: deque[list[Buffer]] = deque()
        self.connections, self.addresses = 1, {"": ""}
        self.is_dead = False
        """Nothing gets through any more, and neither end knows, until the member reconnects."""
        self._wait = wait
        self._arrived: deque[list[Buffer]] = deque()

    def send(self, frames: Sequence[Buffer]) -> None:
        if not self.is_dead:
            self.to_hub.append(list(frames))

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        """See MemberTransport; the fleet's scheduler says when the time is over."""
        if not self._arrived and timeout_s > 0:
            self._wait()
        return self._arrived.popleft() if self._arrived else None

    def reconnect(self) -> None:
        for queue in (self.to_hub, self.to_member, self._arrived):
            queue.clear()
        self.connections, self.is_dead = 1, False

    def received_bytes(self) -> int:
        """See MemberTransport: messages arrive whole."""
        return 0

    def traffic(self) -> Traffic:
        """See MemberTransport: nothing is counted."""
        return Traffic(0, 0, 0, 0.0)

    def close(self) -> None:
        """See MemberTransport: what was sent still arrives."""

    # what the scheduler does

    def send_to_member(self, frames: list[Buffer]) -> None:
        """Queue a message for the member."""
        if not self.is_dead:
            self.to_member.append(frames)

    def die(self) -> None:
        """From now on nothing gets through, as when a router forgets the connection."""
        self.is_dead = True
        self.to_hub.clear()
        self.to_member.clear()

    def deliver_to_member(self) -> None:
        """All that is on its way to the member arrives."""
        self._arrived.extend(self.to_member)
        self.to_member.clear()

    def lose(self, rng: random.Random) -> None:
        """Lose the older messages to the hub, and the newer ones to the member: any number."""
        for _ in range(rng.randint(0, len(self.to_hub))):
            self.to_hub.popleft()
        for _ in range(rng.randint(0, len(self.to_member))):
            self.to_member.pop()


class Recorded:
    """An Exchange that passes everything on to another one, and notes for its member what was
    exchanged. The delay that members want is the fleet's `wanted_delay`: no time passes here that
    could be measured."""

    def __init__(self, inner: Exchange, member: FakeMember) -> None:
        self._inner, self._member = inner, member

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, submission: Submission) -> Vector | None:
        member = self._member
        member.note_base()
        member.submitted.add(submission.round)
        own = submission.vector.copy()
        wanted = member.fleet.wanted_delay
        read = self._inner.submit(replace(submission, wanted_delay=wanted, step_s=1e6))
        here = member.fleet.ranges.of(submission.round)
        member.sent[here] += own if read is None else read
        if read is not None:
            member.unsent[here] = own - read
        return read

    def wait(self, round: int) -> RoundReply | CatchUp:
        self._member.note_base()
        reply = self._inner.wait(round)
        if isinstance(reply, RoundReply):
            self._member.answered.add(reply.round)
        return reply


class FakeMember:
    """One member: the driver over a link, in a greenlet. The fleet's scheduler runs it: it stands
    still before and within every step, and wherever it waits for a message.

    `state` is "joining", "training", "done" or "refused". `sent` is the sum of what others read of
    its contributions, `unsent` what they did not read of the last one, `walked` what its optimizer
    did; `history` has the parameters before each step, `checksums` those of the base after each
    number of replies; `submitted` are the rounds it contributed to, `answered` those whose replies
    came.
    """

    def __init__(
        self, fleet: Fleet, index: int, params: Vector, steps: int, weight: float = 1.0
    ) -> None:
        self.fleet, self.index, self.steps, self.weight = fleet, index, steps, weight
        self.address = b"member-%d" % index
        self.params = params.copy()
        self.wire = Wire(self._stand_still)
        self.way: MemberTransport = self.wire
        """What its link uses."""
        self.state = "joining"
        self.driver: Driver | None = None
        plain = FlatVectors(self.params, fleet.description)
        self.flat = Doubled(plain) if fleet.strategy.has_variates else plain
        self.sent, self.unsent = np.zeros((2, self.flat.elements))
        self.walked = np.zeros(params.size)
        self.history: list[Vector] = []
        self.checksums: dict[int, int] = {}
        self.submitted: set[int] = set()
        self.answered: set[int] = set()
        self.param_groups = [{"momentum": fleet.momentum}]
        self._greenlet = greenlet(self._live)
        self._deliver = functools.partial(fleet.deliver, self)
        self.is_over = self.waits_for_all = False
        """Whether nothing more will come from it; whether it stays until all have given all."""
        self._is_waiting = False
        self._seen_connections = 1

    @property
    def half(self) -> MemberHalf:
        """Its half of the strategy. Only from its start on."""
        assert self.driver is not None, "it has not joined yet"
        return self.driver.half

    # -- what the scheduler does ---------------------------------------------------------------

    def choices(self) -> list[Callable[[], None]]:
        """What can happen to it now."""
        wire = self.wire
        found: list[Callable[[], None]] = []
        if wire.to_hub:
            found.append(self._deliver)
        if not self.is_over:
            if wire.to_member or (self._is_waiting and wire.connections != self._seen_connections):
                found.append(self.hear)
            if not self._is_waiting:
                found.append(self.go)
        return found

    @property
    def has_begun(self) -> bool:
        """Whether its process has been started."""
        return self.is_over or bool(self._greenlet)

    @property
    def waits_in_vain(self) -> bool:
        """Whether it waits, and nothing is on its way to it."""
        return self._is_waiting and not self.wire.to_member

    def go(self) -> None:
        """Go on until it stands still again."""
        self._seen_connections = self.wire.connections
        self._greenlet.switch()

    def hear(self) -> None:
        """What is on its way to it arrives; go on if it waits."""
        self.wire.deliver_to_member()
        if self._is_waiting:
            self.go()

    def end(self) -> None:
        """End it where it is, as SIGKILL would. Works twice."""
        if not self.is_over:
            self._greenlet.throw(GreenletExit)
            self.is_over, self._is_waiting = True, False

    # -- its life ------------------------------------------------------------------------------

    def _live(self) -> None:
        fleet, flat = self.fleet, self.flat
        request = Request(
            layouts.digest(flat.description), f"m{self.index}", self.weight,
            layout=flat.description, steps=self.steps if fleet.tells_steps else 0,
        )  # fmt: skip
        link = Recorded(Link(self.way, fleet.clock), self)
        try:
            self.driver = Driver.join(link, flat, self, request, fleet.clock)
            self.state = "training"
            for step in range(self.steps):
                self._pause()
                self.history.append(self.params.copy())
                flat.gradient[:] = fleet.local_step(self.index, step, self.params)
                self.driver.step()
                self.note_base()
            self._pause()
            self.driver.drain(to_the_end=self.waits_for_all)
            self.note_base()
            self._pause()
            self.driver.leave("done")
            self.state = "done"
        except (Refused, HubUnreachable):
            self.state = "refused"
        self.is_over = True

    def step(self) -> None:
        self._pause()
        self.params -= self.flat.gradient
        self.walked -= self.flat.gradient

    def note_base(self) -> None:
        """Note the checksum of its base."""
        self.checksums[self.half.applied] = self.half.checksum

    def _pause(self) -> None:
        self._greenlet.parent.switch()

    def _stand_still(self) -> None:
        self._is_waiting = True
        self._greenlet.parent.switch()
        self._is_waiting = False


class Fleet:
    """`members` fakes, one hub, and the order in which things happen."""

    member = FakeMember

    def __init__(
        self,
        strategy: str,
        members: int,
        local_steps: int,
        delay: int | None,
        steps: int,
        *,
        rng: random.Random | None = None,
        elements: int = 7,
        local_step: LocalStep = noisy_descent,
        weights: list[float] | None = None,
        policy: Policy | None = None,
        wanted_delay: int = 0,
        bounded: bool = False,
        codec: str = "fp32",
        reply_codec: str = "",
        disk: Disk | None = None,
        kills: Iterable[int] = (),
        momentum: float = 0.0,
        merge: str = "mean",
        final_sync: float = 0.0,
        tells_steps: bool = False,
        secure: MaskTerms | None = None,
    ) -> None:
        self.secure = secure
        """What contributions are masked by; None: they are not."""
        self.rng = rng or random.Random(0)
        self.strategy = strategies.find(strategy)
        half = elements // 2
        self.description = layouts.describe(
            [("w", (2, half), "float32"), ("b", (elements - 2 * half,), "float32")]
        )
        layout = layouts.read(self.description, elements)
        size = elements * (1 + self.strategy.has_variates)
        self.ranges = Ranges(size, self.strategy.ranges)
        named = codecs.parse(codec), codecs.parse(reply_codec or codec)
        self.codec, self.reply_codec = (codecs.bound(codec, layout) for codec in named)
        self.local_step = local_step
        self.wanted_delay = wanted_delay
        self.momentum = momentum
        """What the members' optimizers say that they have; `local_step` is what they do."""
        self.now = 0.0
        self.notes: list[Note] = []
        self.closed: list[Closed] = []
        local_steps = local_steps if self.strategy.has_local_steps else 1
        pace = Delay(delay or 0, delay is None) if self.strategy.delays else Delay()
        self.tells_steps = tells_steps
        """Whether members say how many steps they take, as with loops of their own."""
        pace = replace(pace, final_sync=final_sync)
        bounded = bounded or (final_sync != 0 and not tells_steps)
        terms = Terms(self.strategy, local_steps, pace, steps=steps if bounded else 0)
        self.fresh_hub = lambda part=None: (part or HubPart()).attach(Hub(
            terms, policy or Policy(members), self.strategy.merge_rule(merge), *named,
            Aggregator(secure) if secure else None, outer=self.strategy.outer_rule(),
        ))  # fmt: skip
        self.hub = self.fresh_hub()
        self.disk = disk
        self.kills = list(kills)
        """Effects that each hub carries out before it is killed; the last one lives on."""
        self.fuse = self.kills.pop(0) if self.kills else None
        self.initial = np.random.default_rng(99).standard_normal(elements).astype(np.float32)
        weights = weights or [1.0] * members
        self.members = [
            self.member(self, i, self.initial, steps, weights[i]) for i in range(members)
        ]
        self.dead: set[int] = set()

    def carry_out(self, effects) -> None:
        self.carry_each(effects)
        disk = self.disk
        if disk and disk.snapshot_every and len(disk.rounds()) >= disk.snapshot_every:
            disk.save(self.hub.state())
            self.hub.tail = disk.first

    def carry_each(self, effects) -> None:
        by_address = {m.address: m for m in self.members}
        for effect in effects:
            if self.fuse is not None:
                self.fuse -= 1
                if self.fuse < 0:
                    raise HubDied
            if isinstance(effect, Write) and self.disk:
                self.disk.append(effect.record)
            elif isinstance(effect, Save) and self.disk:
                self.disk.save(effect.state)
                self.hub.tail = self.disk.first
            elif isinstance(effect, Replay):
                for record in self.disk.rounds():
                    if effect.first <= record.round < effect.end:
                        self.carry_each([Send(effect.to, reply) for reply in replies_of(record)])
            elif isinstance(effect, Note):
                self.notes.append(effect)
            elif isinstance(effect, Closed):
                self.closed.append(effect)
            elif isinstance(effect, Answered):
                effect.answer(effect.told)
            elif isinstance(effect, Send):
                member = by_address.get(effect.to)
                over = member and member.state in ("done", "refused") and not member.wire.to_hub
                if member is None or member.index in self.dead or over:
                    self.carry_each(self.hub.unreachable(effect.to, self.now))
                else:
                    member.wire.send_to_member(pack(effect.message))

    def clock(self) -> float:
        """Seconds; the same for all."""
        return self.now

    def deliver(self, member: FakeMember) -> None:
        """One message of one member reaches the hub; there is another hub if that kills it."""
        message = unpack(member.wire.to_hub.popleft())
        self.survive(lambda: self.carry_out(self.hub.handle(member.address, message, self.now)))

    def tick(self, seconds: float) -> None:
        """The hub's time passes."""
        self.now += seconds
        self.carry_out(self.hub.tick(self.now))

    def restart_hub(self) -> None:
        """All connections break with the hub, and what was on its way is lost, in part; a new hub
        goes on, and members connect to it."""
        self.fuse = self.kills.pop(0) if self.kills else None
        for member in self.members:
            member.wire.lose(self.rng)
        self.hub = self.fresh_hub()
        if self.disk and self.disk.state is not None:
            self.hub.restore(self.disk.state, self.disk.records(), self.now)
            self.hub.tail = self.disk.first
        for member in self.members:
            if member.state == "joining":
                member.wire.to_hub.clear()
                member.wire.to_member.clear()
            if member.has_begun:
                member.wire.connections += 1
        self.survive(lambda: self.tick(0.0))

    def cut(self, index: int) -> None:
        """A member's connection breaks, and a new one stands: what was on its way on the old one is
        lost, and what it had not begun to send goes over the new one."""
        member = self.members[index]
        if member.state == "training" and index not in self.dead:
            member.wire.lose(self.rng)
            member.wire.connections += 1

    def unplug(self, index: int) -> None:
        """Nothing gets through between a member and the hub any more, and neither knows, until the
        silence is too long for the member."""
        member = self.members[index]
        if member.state == "training":
            member.wire.die()

    def survive(self, action: Callable[[], None]) -> None:
        """Do something that may kill the hub; then there is another one."""
        try:
            action()
        except HubDied:
            self.restart_hub()

    def kill(self, index: int) -> None:
        """SIGKILL: what was sent may still arrive, nothing else ever will."""
        self.dead.add(index)
        self.members[index].end()

    def killing(self, index: int, when: int) -> Callable[[], None]:
        """For `run`: kill this member at the `when`-th thing that happens, if training is on."""
        events = itertools.count(1)

        def maybe_kill() -> None:
            if next(events) == when and self.hub.started:
                self.kill(index)

        return maybe_kill

    def advance(self) -> bool:
        """Let one thing happen, of all that can at this time; False: nothing can."""
        choices = [choice for member in self.members for choice in member.choices()]
        if choices:
            self.rng.choice(choices)()
        return bool(choices)

    def let_time_pass(self) -> None:
        """The hub's patience comes to an end, and that of members that nobody answers."""
        policy, members = self.hub.policy, self.hub.members
        alone = all(member.returning for member in members)
        patience_s = max(policy.lost_after_s, policy.empty_after_s if alone else policy.rejoin_s)
        self.survive(lambda: self.tick(patience_s / 2 + 0.1))
        for member in self.members:
            if member.waits_in_vain:
                member.go()

    def run(self, each: Callable[[], None] = lambda: None) -> Fleet:
        """Until nothing can happen any more; time passes only when nothing else can."""
        idle = 0
        for _ in range(MOST_EVENTS):
            if self.advance():
                idle = 0
                each()
            elif self.hub.finished or idle > 8:
                break
            else:
                idle += 1
                self.let_time_pass()
        else:
            raise AssertionError("the fleet does not come to an end")
        for member in self.members:
            member.end()
        return self
