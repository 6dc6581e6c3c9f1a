"""A pipeline in one thread: a hub and its stages, messages between them in any order that TCP
allows, and stages and hubs that die at any moment."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from edgetrain.errors import Refused
from edgetrain.exchange.hub.effects import Answered, Note, Save, Send
from edgetrain.exchange.hub.orders import Answer, Order
from edgetrain.exchange.hub.records import pack_state, unpack_state
from edgetrain.exchange.messages import PROTOCOL, Join, Message, pack, unpack
from edgetrain.exchange.pipeline.desk import Computes, StageDesk
from edgetrain.exchange.pipeline.relay import Relay, RelayTerms

HUB = -1


def join_of(
    stage: int, job: str = "job", model: str = "model", generation: int = 0, microbatches: int = 6
) -> Join:
    """What a member of the stage joins with."""
    return Join(PROTOCOL, job, model, 10, f"m{stage}", float(microbatches), 0, session=generation)


class PipelineRoom:
    """`make` makes what a stage computes; a stage that dies gets a new one of them. Every message
    goes through its bytes, and so does what the hub keeps."""

    def __init__(
        self, terms: RelayTerms, make: Callable[[int], Computes], windows: list[int], seed: int = 0,
        microbatches: int = 6,
    ) -> None:  # fmt: skip
        self.terms, self._make, self._windows = terms, make, windows
        self.relay, self.notes = Relay(terms), []
        self.saved = pack_state(self.relay.state())
        self.microbatches, self.figures = microbatches, []
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
            stage, terms.stages, self.microbatches, terms.steps, terms.save_every,
            self._windows[stage], self._make(stage),
        )  # fmt: skip
        self.up[sender], self.down[sender] = deque(), deque()
        self._join(sender)

    def _join(self, sender: bytes) -> None:
        desk, count = self.desks[sender], self.microbatches
        join = join_of(desk.stage, self.terms.job, "model", desk.generation, count)
        self.up[sender].append(join)

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

    def kill_hub(self) -> None:
        """The hub dies, with some of what was on its way, and is restored from what it kept. What
        stages had queued for it comes first when they are back."""
        self.relay = Relay(self.terms)
        self.relay.restore(unpack_state(self.saved))
        self.saved = pack_state(self.relay.state())
        for sender, desk in self.desks.items():
            for queue in (self.up[sender], self.down[sender]):
                for _ in range(self.rng.randint(0, len(queue))):
                    queue.popleft() if queue is self.up[sender] else queue.pop()
            if not desk.is_over:
                self._join(sender)

    def _carry_out(self, effects: list) -> None:
        for effect in effects:
            match effect:
                case Save():
                    self.saved = pack_state(effect.state)
                case Send() if effect.to in self.down:
                    self.down[effect.to].append(unpack(pack(effect.message)))
                case Send():
                    self._carry_out(self.relay.unreachable(effect.to))
                case Note():
                    self.notes.append(effect)
                case Answered():
                    effect.answer(effect.told)

    def tell(self, *words: str) -> Answer:
        """What the hub answers to an order."""
        answers: list[Answer] = []
        self._carry_out(self.relay.obey(Order(words, answers.append)))
        (answer,) = answers
        return answer

    def turn(self) -> None:
        """Something happens: a message arrives somewhere, or a stage computes."""
        self.turns += 1
        ways: list[Callable[[], None]] = []
        for sender, desk in self.desks.items():
            if self.up[sender]:
                ways.append(lambda s=sender: self._to_hub(s))
            if self.down[sender]:
                ways.append(lambda s=sender, d=desk: self._to_stage(s, d))
            ways.append(lambda s=sender, d=desk: self._work(s, d))
        self.rng.choice(ways)()
        for stage, sender in enumerate(self.senders):
            desk = self.desks[sender]
            self.most_out[stage] = max(self.most_out[stage], desk.under_way)

    def _to_hub(self, sender: bytes) -> None:
        self._carry_out(self.relay.handle(sender, self.up[sender].popleft()))
        if self.relay.committed != self.commits[-1]:
            self.commits.append(self.relay.committed)

    def _to_stage(self, sender: bytes, desk: StageDesk) -> None:
        try:
            desk.handle(self.down[sender].popleft())
        except Refused as refused:
            # What it had queued came before its Join; or it is a fresh process that came too late.
            if refused.code not in ("ended", "unknown"):
                raise
            desk.is_over = refused.code == "ended"
        if desk.figure is not None:
            self.figures.append(desk.figure)

    def _work(self, sender: bytes, desk: StageDesk) -> None:
        self.up[sender] += [unpack(pack(each)) for each in desk.work() or ()]

    @property
    def stands(self) -> bool:
        """Whether nothing is on its way, and no stage can do anything: one that can does it."""
        if any(self.up.values()) or any(self.down.values()):
            return False
        for sender, desk in self.desks.items():
            if (sent := desk.work()) is not None:
                self.up[sender] += [unpack(pack(each)) for each in sent]
                return False
        return True

    def run(
        self, kills: dict[int, int] | None = None, most: int = 1_000_000, *, paused: bool = False
    ) -> None:
        """To the end of the job; `kills`: the stage that dies before this turn, or HUB. paused: to
        where all stand."""
        while not all(desk.is_over for desk in self.desks.values()):
            if paused and not kills and self.stands:
                return
            self.go_on(kills)
            assert self.turns < most, "it stands still"

    def go_on(self, kills: dict[int, int] | None = None) -> None:
        """One turn; see `run`."""
        if kills and (stage := kills.pop(self.turns, None)) is not None:
            if stage == HUB:
                self.kill_hub()
            else:
                self.kill(stage)
        self.turn()
