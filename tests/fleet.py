"""A fleet in memory: the real halves, messages and hub; a scheduler in place of network and clock.

Members advance and messages are delivered in an order drawn from a `random.Random`, so that a law
can be tried against many interleavings. Links are in order, as TCP is. No thread, no sleep.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import numpy as np

from edgetrain import codecs, strategies
from edgetrain import layout as layouts
from edgetrain.checksum import Vector, checksum
from edgetrain.hub import Closed, Hub, Note, Policy, Send, Terms, parts_of
from edgetrain.messages import (
    PROTOCOL,
    Base,
    Beat,
    Contribute,
    Join,
    Leave,
    Refuse,
    Reply,
    Start,
    Welcome,
    pack,
    unpack,
)

LocalStep = Callable[[int, int, Vector], Vector]
"""(member, step, params) -> what a plain optimizer would subtract, as float32."""


def noisy_descent(member: int, step: int, params: Vector) -> Vector:
    """A contraction towards a point of each member's own, plus noise; reproducible."""
    noise = np.random.default_rng([member, step]).standard_normal(params.size)
    return (0.1 * (params - member) + 0.05 * noise).astype(np.float32)


class FakeMember:
    """One member: its half, a queue to the hub and one back."""

    def __init__(
        self, fleet: Fleet, index: int, params: Vector, steps: int, weight: float = 1.0
    ) -> None:
        self.fleet, self.index, self.steps, self.weight = fleet, index, steps, weight
        self.address = b"member-%d" % index
        self.params = params.copy()
        self.gradient = np.zeros_like(params)
        self.half = fleet.strategy.member_half(
            self.params, self.gradient, fleet.hub.terms.every, fleet.hub.terms.delay or 0
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
        self.history: list[Vector] = []
        self.checksums: list[int] = []
        self.say(
            Join(
                PROTOCOL, "", layouts.digest(fleet.description), params.size, f"m{index}", weight,
                checksum(self.params), payload=fleet.description,
            )
        )  # fmt: skip

    def say(self, message) -> None:
        self.to_hub.append(pack(message))

    def hear(self) -> None:
        """Take in everything that has been delivered."""
        while self.inbox:
            message = unpack(self.inbox.popleft())
            match message:
                case Welcome(upload=True):
                    self.say(Base(0, 1, memoryview(self.params.copy()).cast("B")))
                case Base():
                    self.params[:] = np.frombuffer(message.payload, np.float32)
                case Start():
                    self.half.start(message.applied, message.round)
                    assert self.half.checksum == message.checksum
                    self.state = "training"
                case Reply():
                    self.parts.setdefault(message.round, []).append(message)
                case Refuse():
                    self.state, self.refusal = "refused", message
                case Welcome() | Beat():
                    pass

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
            payloads = [reply.payload for reply in replies]
            self.half.apply([self._decoded(self.fleet.reply_codec, payloads)])
            if replies[0].checksum:
                assert replies[0].checksum == self.half.checksum
            self.checksums.append(self.half.checksum)
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
        for part, payload in enumerate(payloads):
            self.say(
                Contribute(
                    self.half.round - 1, part, len(payloads), 1.0, self.half.applied,
                    self.half.checksum, self.fleet.wanted_delay, payload,
                )
            )  # fmt: skip


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
        every = 1 if self.strategy.contributes == "gradient" else every
        terms = Terms(
            strategy, self.strategy.contributes, self.strategy.weighted, every,
            delay if self.strategy.delays else 0,
        )  # fmt: skip
        self.hub = Hub(terms, policy or Policy(members), self.strategy.merge_rule(), *named)
        self.initial = np.random.default_rng(99).standard_normal(elements).astype(np.float32)
        weights = weights or [1.0] * members
        self.members = [
            FakeMember(self, i, self.initial, steps, weights[i]) for i in range(members)
        ]
        self.dead: set[int] = set()

    def carry_out(self, effects) -> None:
        by_address = {m.address: m for m in self.members}
        for effect in effects:
            if isinstance(effect, Note):
                self.notes.append(effect)
            elif isinstance(effect, Closed):
                self.closed.append(effect)
            elif isinstance(effect, Send):
                member = by_address[effect.to]
                if member.index in self.dead:
                    self.carry_out(self.hub.unreachable(effect.to, self.now))
                else:
                    member.inbox.append(pack(effect.message))

    def deliver(self, member: FakeMember) -> None:
        """One message of one member reaches the hub."""
        self.carry_out(self.hub.handle(member.address, unpack(member.to_hub.popleft()), self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.hub.tick(self.now))

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
                if self.hub.finished or idle > 3:
                    return self
                idle += 1
                self.tick(self.hub.policy.gone_s + 0.1)
                continue
            idle = 0
            what, member = self.rng.choice(choices)
            if what == "deliver":
                self.deliver(member)
            elif what == "hear":
                member.hear()
            else:
                member.advance()
            each()


def whole_parts(vector: Vector, part_elements: int) -> list[Vector]:
    """A vector cut as replies are."""
    return [vector[here] for here in parts_of(vector.size, part_elements)]
