"""A fleet in memory: the real halves, messages and hub; a scheduler in place of network and clock.

Members advance and messages are delivered in an order drawn from a `random.Random`, so that a law
can be tried against many interleavings. Links are in order, as TCP is. No thread, no sleep.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from edgetrain import codecs, strategies
from edgetrain.exchange.hub.effects import Closed, Note, Replay, Save, Send, Write, replies_of
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.records import Round, State, decode, encode
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import (
    PROTOCOL,
    Base,
    Beat,
    Contribute,
    Join,
    Leave,
    Refuse,
    Reply,
    Resume,
    Start,
    Welcome,
    pack,
    unpack,
)
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.parts import parts_of
from edgetrain.vectors.vector import Vector, checksum

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
        if isinstance(record, Round):
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


class FakeMember:
    """One member: its half, a queue to the hub and one back."""

    def __init__(
        self, fleet: Fleet, index: int, params: Vector, steps: int, weight: float = 1.0
    ) -> None:
        self.fleet, self.index, self.steps, self.weight = fleet, index, steps, weight
        self.address = b"member-%d" % index
        self.params = params.copy()
        self.gradient = np.zeros_like(params)
        two_trips = isinstance(fleet.codec, codecs.BoundTwoTrips)
        self.half = fleet.strategy.member_half(
            self.params,
            self.gradient,
            fleet.hub.terms.every,
            fleet.hub.terms.delay or 0,
            factors=fleet.codec.factors() if two_trips else None,
        )
        self.memory = codecs.memory(fleet.codec, params.size)
        self.sent, self.unsent = np.zeros((2, params.size))
        self.walked = np.zeros(params.size)
        self.to_hub: deque[list] = deque()
        self.inbox: deque[list] = deque()
        self.parts: dict[int, list] = {}
        self.step = 0
        self.state = "joining"
        self.stage = "idle"
        self.refusal: Refuse | None = None
        self.epoch = 0
        self.kept: dict[int, list] = {}
        self.answered: list[int] = []
        self.returning = False
        self.attempt = self.asked = 0
        self.base_parts: list = []
        self.upload = False
        self.history: list[Vector] = []
        self.checksums: list[int] = []
        self.join()

    def join(self) -> None:
        described = self.fleet.description
        self.say(
            Join(
                PROTOCOL, "", layouts.digest(described), self.params.size, f"m{self.index}",
                self.weight, checksum(self.params), self.index + 1, described,
            )
        )  # fmt: skip

    def come_back(self) -> None:
        """As Link does: say where it is, forget replies that were not applied."""
        self.returning, self.parts, self.base_parts = True, {}, []
        self.attempt += 1
        half = self.half
        self.say(
            Resume(
                PROTOCOL, layouts.digest(self.fleet.description), self.params.size,
                f"m{self.index}", self.index + 1, half.applied,
                half.checksum if half.moves_params else 0, half.round,
                min(self.kept, default=half.round), self.attempt,
            )
        )  # fmt: skip

    def _back(self, start: Start) -> None:
        self.returning = False
        if not start.keep:
            base = np.concatenate([np.frombuffer(p, np.float32) for p in self.base_parts])
            self.half.rebase(base, start.applied)
            assert self.half.checksum == start.checksum
        for round in sorted(self.kept):
            if round >= start.resend:
                self.to_hub.extend(self.kept[round])
        if start.round > self.half.round:
            self.half.skip_to(start.round)

    def say(self, message) -> None:
        self.to_hub.append(pack(message))

    def hear(self) -> None:
        """Take in everything that has been delivered."""
        while self.inbox:
            message = unpack(self.inbox.popleft())
            training = self.state == "training"
            if self.state == "done":
                continue
            match message:
                case Welcome() if training and self.returning:
                    self.epoch = message.epoch
                case Base() if training and self.returning:
                    self.base_parts.append(message.payload)
                case Start() if training:
                    if self.returning and message.attempt == self.attempt:
                        self._back(message)
                    self.base_parts = []
                case Refuse(code="unknown") if training:
                    if not self.returning:
                        self.come_back()
                case Beat() if training and message.epoch != self.epoch:
                    self.count(message)
                    if not self.returning or message.epoch != self.asked:
                        self.asked = message.epoch
                        self.come_back()
                case Reply() if self.returning:
                    pass
                case Welcome(upload=True):
                    self.epoch = message.epoch
                    self.say(Base(0, 1, memoryview(self.params.copy()).cast("B")))
                case Base():
                    self.params[:] = np.frombuffer(message.payload, np.float32)
                case Start():
                    self.half.start(message.applied, message.round)
                    assert self.half.checksum == message.checksum
                    self.state = "training"
                case Reply():
                    if message.settled:
                        self.kept.pop(message.round, None)
                    self.parts.setdefault(message.round, []).append(message)
                case Refuse():
                    self.state, self.refusal = "refused", message
                case Welcome():
                    self.epoch = message.epoch
                case Beat():
                    self.count(message)

    def count(self, beat: Beat) -> None:
        """What the hub says it has merged need not be kept."""
        self.kept = {r: frames for r, frames in self.kept.items() if r >= beat.merged}

    @property
    def blocked(self) -> bool:
        due = self.half.due()
        return due is not None and not self._whole(due)

    def _decoded(self, codec: codecs.Codec, payloads: list) -> Vector:
        out = np.empty_like(self.params)
        for here, payload in zip(parts_of(out.size, codec.part_elements), payloads, strict=True):
            codec.decode(payload, out[here])
        return out

    def _whole(self, round: int) -> bool:
        parts = self.parts.get(round, [])
        return bool(parts) and len(parts) == parts[0].parts

    def advance(self) -> None:
        """One stage of the driver's loop: see strategies.MemberHalf."""
        while (due := self.half.due()) is not None:
            if not self._whole(due):
                return
            replies = self.parts.pop(due)
            self.answered.append(due)
            payloads = [reply.payload for reply in replies]
            self.half.apply([self._decoded(self.fleet.reply_codec, payloads)])
            if replies[0].checksum:
                assert replies[0].checksum == self.half.checksum
            self.checksums.append(self.half.checksum)
            self.submit(self.half.follow_up())
            if self.fleet.hub.terms.delay is None and self.stage != "finishing":
                self.half.delay = replies[0].delay
        if self.stage == "finishing":
            self.say(Leave("done"))
            self.state = "done"
        elif self.stage == "stepping":
            self._optimizer_step()
            self.submit(self.half.after_step())
            self.stage = "idle"
        elif self.step == self.steps:
            self.stage = "finishing"
            self.submit(self.half.finish())
        else:
            self.history.append(self.params.copy())
            self.gradient[:] = self.fleet.local_step(self.index, self.step, self.params)
            self.stage = "stepping"
            self.submit(self.half.before_step())

    def _optimizer_step(self) -> None:
        self.params -= self.gradient
        self.walked -= self.gradient
        self.step += 1

    def submit(self, vector: Vector | None) -> None:
        if vector is None:
            return
        codec = self.fleet.codec
        if self.half.keeps_rest and not codec.lossless:
            payloads = codec.encode(vector)
            read = self._decoded(codec, payloads)
            self.half.sent(read)
            self.sent += read
            self.unsent = vector - read
        else:
            payloads = self.memory.encode(vector)
            self.sent += vector
        frames = [
            pack(
                Contribute(
                    self.half.round - 1, part, len(payloads), 1.0, self.half.applied,
                    self.half.checksum, self.fleet.wanted_delay, payload,
                )
            )
            for part, payload in enumerate(payloads)
        ]  # fmt: skip
        self.kept[self.half.round - 1] = frames
        if not self.returning:  # else all that is kept is sent when it is back
            self.to_hub.extend(frames)


class Fleet:
    """`members` fakes, one hub, and the order in which things happen."""

    def __init__(
        self,
        strategy: str,
        members: int,
        every: int,
        delay: int | None,
        steps: int,
        *,
        rng: random.Random | None = None,
        elements: int = 7,
        local_step: LocalStep = noisy_descent,
        weights: list[float] | None = None,
        policy: Policy | None = None,
        wanted_delay: int = 0,
        codec: str = "fp32",
        reply_codec: str = "",
        disk: Disk | None = None,
        kills: Iterable[int] = (),
    ) -> None:
        self.rng = rng or random.Random(0)
        self.strategy = strategies.find(strategy)
        half = elements // 2
        self.description = layouts.describe(
            [("w", (2, half), "float32"), ("b", (elements - 2 * half,), "float32")]
        )
        layout = layouts.read(self.description, elements)
        named = codecs.parse(codec), codecs.parse(reply_codec or codec)
        self.codec, self.reply_codec = (codecs.bound(codec, layout) for codec in named)
        self.local_step = local_step
        self.wanted_delay = wanted_delay
        self.now = 0.0
        self.notes: list[Note] = []
        self.closed: list[Closed] = []
        every = every if self.strategy.has_local_steps else 1
        delay = delay if self.strategy.delays else 0
        terms = Terms.of_strategy(self.strategy, every, delay)
        self.fresh_hub = lambda: Hub(
            terms, policy or Policy(members), self.strategy.merge_rule(), *named
        )
        self.hub = self.fresh_hub()
        self.disk = disk
        self.kills = list(kills)
        """Effects that each hub carries out before it is killed; the last one lives on."""
        self.fuse = self.kills.pop(0) if self.kills else None
        self.initial = np.random.default_rng(99).standard_normal(elements).astype(np.float32)
        weights = weights or [1.0] * members
        self.members = [
            FakeMember(self, i, self.initial, steps, weights[i]) for i in range(members)
        ]
        self.dead: set[int] = set()

    def carry_out(self, effects) -> None:
        self._each(effects)
        disk = self.disk
        if disk and disk.snapshot_every and len(disk.rounds()) >= disk.snapshot_every:
            disk.save(self.hub.state())
            self.hub.tail = disk.first

    def _each(self, effects) -> None:
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
                        self._each([Send(effect.to, reply) for reply in replies_of(record)])
            elif isinstance(effect, Note):
                self.notes.append(effect)
            elif isinstance(effect, Closed):
                self.closed.append(effect)
            elif isinstance(effect, Send):
                member = by_address[effect.to]
                if member.index in self.dead or (member.state == "done" and not member.to_hub):
                    self._each(self.hub.unreachable(effect.to, self.now))
                else:
                    member.inbox.append(pack(effect.message))

    def deliver(self, member: FakeMember) -> None:
        """One message of one member reaches the hub."""
        self.carry_out(self.hub.handle(member.address, unpack(member.to_hub.popleft()), self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.hub.tick(self.now))

    def restart_hub(self) -> None:
        """What was on its way to or from the dead hub is lost, in part; a new one goes on."""
        self.fuse = self.kills.pop(0) if self.kills else None
        for member in self.members:
            for _ in range(self.rng.randint(0, len(member.to_hub))):
                member.to_hub.popleft()
            for _ in range(self.rng.randint(0, len(member.inbox))):
                member.inbox.pop()
        self.hub = self.fresh_hub()
        if self.disk and self.disk.state is not None:
            self.hub.restore(self.disk.state, self.disk.records(), self.now)
            self.hub.tail = self.disk.first
        for member in self.members:
            if member.state == "joining":  # silence, and it asks again
                member.to_hub.clear()
                member.inbox.clear()
                member.join()
        self.survive(lambda: self.tick(0.0))

    def cut(self, index: int) -> None:
        """A member's connection breaks, and a new one stands: what was on its way on the old one is
        lost, and what it had not begun to send goes over the new one."""
        member = self.members[index]
        if member.state != "training" or index in self.dead:
            return
        for _ in range(self.rng.randint(0, len(member.to_hub))):
            member.to_hub.popleft()
        for _ in range(self.rng.randint(0, len(member.inbox))):
            member.inbox.pop()
        member.come_back()

    def survive(self, action: Callable[[], None]) -> None:
        """Do something that may kill the hub; then there is another one."""
        try:
            action()
        except HubDied:
            self.restart_hub()

    def kill(self, index: int) -> None:
        """SIGKILL: what was sent may still arrive, nothing else ever will."""
        self.dead.add(index)

    def choices(self) -> list[tuple[str, FakeMember]]:
        alive = [m for m in self.members if m.index not in self.dead]
        found = [("deliver", m) for m in self.members if m.to_hub]
        found += [("hear", m) for m in alive if m.inbox]
        found += [("advance", m) for m in alive if m.state == "training" and not m.blocked]
        return found

    def run(self, each: Callable[[], None] = lambda: None) -> Fleet:
        """Until nothing can happen any more; time passes only when nothing else can."""
        idle = 0
        while True:
            choices = self.choices()
            if not choices:
                if self.hub.finished or idle > 8:
                    return self
                idle += 1
                patience_s = max(self.hub.policy.gone_s, self.hub.policy.return_s)
                self.survive(lambda s=patience_s: self.tick(s / 2 + 0.1))
                continue
            idle = 0
            what, member = self.rng.choice(choices)
            if what == "deliver":
                self.survive(lambda m=member: self.deliver(m))
            elif what == "hear":
                member.hear()
            else:
                member.advance()
            each()


def whole_parts(vector: Vector, part_elements: int) -> list[Vector]:
    """A vector cut as replies are."""
    return [vector[here] for here in parts_of(vector.size, part_elements)]
