"""A pipeline in one thread: a hub and its stages, messages between them in any order that TCP
allows, and stages that die at any moment."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from edgetrain.exchange.hub.effects import Note, Send
from edgetrain.exchange.messages import PROTOCOL, Join, Message, pack, unpack
from edgetrain.exchange.pipeline.desk import Computes, StageDesk
from edgetrain.exchange.pipeline.relay import Relay, RelayTerms


def join_of(stage: int, job: str = "job", model: str = "model") -> Join:
    """What a member of the stage joins with."""
    return Join(PROTOCOL, job, model, 10, f"m{stage}", 1.0, 0)


class PipelineRoom:
    """`make` makes what a stage computes; a stage that dies gets a new one of them. Every message
    goes through its bytes."""

    def __init__(
        self, terms: RelayTerms, make: Callable[[int], Computes], windows: list[int], seed: int = 0
    ) -> None:
        self.terms, self._make, self._windows = terms, make, windows
        self.relay, self.notes = Relay(terms), []
        self.rng, self.turns, self._lives = random.Random(seed), 0, 0
        self.up: dict[bytes, deque[Message]] = {}
        self.down: dict[bytes, deque[Message]] = {}
        self.desks: dict[bytes, StageDesk] = {}
        self.senders = [b""] * terms.stages
        self.most_out = [0] * terms.stages
        self.commits = [0]
        for stage in range(terms.stages):
            self.start(stage)

    def start(self, stage: int) -> None:
        """A fresh process of a stage joins."""
        terms, self._lives = self.terms, self._lives + 1
        sender = b"%d of %d" % (self._lives, stage)
        self.senders[stage] = sender
        self.desks[sender] = StageDesk(
            stage, terms.stages, terms.microbatches, terms.steps, terms.save_every,
            self._windows[stage], self._make(stage),
        )  # fmt: skip
        self.up[sender], self.down[sender] = deque([join_of(stage, terms.job)]), deque()

    def kill(self, stage: int) -> None:
        """The process of a stage dies: what it had sent may still arrive, what was on the way to it
        does not; the hub finds out."""
        sender = self.senders[stage]
        sent = list(self.up.pop(sender))
        for message in sent[: self.rng.randint(0, len(sent))]:
            self._carry_out(self.relay.handle(sender, message))
        del self.desks[sender], self.down[sender]
        self._carry_out(self.relay.unreachable(sender))
        self.start(stage)

    def _carry_out(self, effects: list) -> None:
        for effect in effects:
            match effect:
                case Send() if effect.to in self.down:
                    self.down[effect.to].append(unpack(pack(effect.message)))
                case Send():
                    self._carry_out(self.relay.unreachable(effect.to))
                case Note():
                    self.notes.append(effect)

    def turn(self) -> None:
        """Something happens: a message arrives somewhere, or a stage computes."""
        self.turns += 1
        ways: list[Callable[[], None]] = []
        for sender, desk in self.desks.items():
            if self.up[sender]:
                ways.append(lambda s=sender: self._to_hub(s))
            if self.down[sender]:
                ways.append(lambda s=sender, d=desk: d.handle(self.down[s].popleft()))
            ways.append(lambda s=sender, d=desk: self._work(s, d))
        self.rng.choice(ways)()
        for stage, sender in enumerate(self.senders):
            desk = self.desks[sender]
            self.most_out[stage] = max(self.most_out[stage], desk.under_way)

    def _to_hub(self, sender: bytes) -> None:
        self._carry_out(self.relay.handle(sender, self.up[sender].popleft()))
        if self.relay.committed != self.commits[-1]:
            self.commits.append(self.relay.committed)

    def _work(self, sender: bytes, desk: StageDesk) -> None:
        self.up[sender] += [unpack(pack(each)) for each in desk.work() or ()]

    def run(self, kills: dict[int, int] | None = None, most: int = 1_000_000) -> None:
        """To the end of the job; `kills`: the stage that dies before this turn."""
        while not all(desk.is_over for desk in self.desks.values()):
            if kills and (stage := kills.pop(self.turns, None)) is not None:
                if self.relay.finished:
                    continue
                self.kill(stage)
            self.turn()
            assert self.turns < most, "it stands still"
