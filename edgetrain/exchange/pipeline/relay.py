"""The hub of a pipeline: it passes activations and gradients on to the neighbour, unread, and keeps
each stage's state.

    state     what happens                                  next
    waiting   a member joins, and a stage is still missing  waiting
    waiting   the last missing one joins                    running, in a new generation: all stages
                                                            begin after the last step whose states
                                                            are all here
    running   a connection breaks                           waiting: the others stand still
    running   a stage joins again                           running, in a new generation
    running   the states of the last step are all here      finished: they go to the first stage
    any       the hub dies, and is restored                 waiting, with the last states that were
                                                            all there
    any       people pause the job                          the same; what stages pass on is held
                                                            back until people let it go on

States of a step that is evaluated go to the first stage, which puts the model together. A stage may
pass on micro-batches only in order, and those of a step only after the gradients of the
step before: so what waits for a slow stage is at most one step's activations, which bounds the
hub's memory. How many micro-batches those are, the members say: it is not known without the task.

Generations go on: a restored hub's are above all of the hub that died, by a number that is kept,
and those of a hub that knows of none are above what its members say. So nothing that was on its way
is mistaken for the new hub's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.exchange.further_messages import MAX_MICROBATCHES, Activation, StageBegin, StageState
from edgetrain.exchange.hub.effects import (
    Answered,
    Closed,
    Evaluated,
    Event,
    Note,
    Observed,
    Reported,
    Save,
    Send,
    refusal,
)
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.hub.records import Course, State
from edgetrain.exchange.hub.steering import COURSES, NEWS
from edgetrain.exchange.messages import (
    CODES,
    MAX_ELEMENTS,
    PROTOCOL,
    Beat,
    Figure,
    Join,
    Leave,
    Message,
    Telemetry,
)
from edgetrain.exchange.pipeline.desk import PART_BYTES, cut_state
from edgetrain.exchange.transport import owner_of
from edgetrain.vectors.vector import Buffer

Effect = Send | Save | Observed | Answered

STATE_BYTES = 32
"""Bytes a parameter that a stage's state has at most, names apart: five float32 values of an
optimizer's, and room."""
_MOST_GENERATION = 1 << 62
_OF_A_HUB = 1 << 32
"""Generations until the next restored hub's."""


@dataclass(frozen=True)
class RelayTerms:
    """The agreement of one pipeline's members."""

    job: str
    stages: int
    steps: int
    save_every: int
    """Steps between two states of a stage."""
    most_bytes: int
    """Largest size of one activation."""
    most_elements: int = MAX_ELEMENTS
    """Parameters of the largest model."""
    evaluate_every: int = 0
    """Steps between two evaluations, a multiple of `save_every`; 0: after the last step only."""
    heartbeat_s: float = 1.0
    patience_s: float = 60.0
    """Seconds to wait, when the job is over, for a stage that has not heard so and is away."""


@dataclass
class _Place:
    """A stage, its member, and what has come of its next state."""

    name: str
    sender: bytes = b""
    """Its connection; b"": it has none."""
    owner: bytes = b""
    """The key of the machine that joined as this stage first."""
    is_done: bool = False
    """Whether it knows that the job is over."""
    step: int = 0
    """Step of the arriving or arrived state."""
    parts: list[Buffer] = field(default_factory=list)
    of: int = 0
    """Parts of that state."""
    size: int = 0

    def drop_state(self) -> None:
        self.step, self.parts, self.of, self.size = 0, [], 0, 0

    @property
    def is_whole(self) -> bool:
        return self.of > 0 and len(self.parts) == self.of


class Relay:
    """The hub's protocol of a pipeline. Pure, as `hub.protocol.Hub` is: the caller carries out the
    effects in order."""

    def __init__(self, terms: RelayTerms) -> None:
        self._terms = terms
        self._places = [_Place(f"m{stage}") for stage in range(terms.stages)]
        self._model = ("", 0, 0)
        """Digest, parameters, and micro-batches of a step."""
        self._forwards = [0] * (terms.stages - 1)
        """Activations that have gone over each cut in this generation."""
        self._backwards = [0] * (terms.stages - 1)
        """Gradients that have come back over it."""
        self._sizes = [0] * (terms.stages - 1)
        """Bytes of each of these; 0: none has gone over it yet."""
        self._runs = self._has_begun = False
        self._alone_since = float("inf")
        """When the job was over and no stage connected that has not heard so."""
        self._beat_at = float("-inf")
        self._epoch = 0
        """How often this hub has been restored."""
        self.generation = 0
        self.committed = 0
        """The newest step whose states are all here; 0: none."""
        self.states: tuple[bytes, ...] = ()
        """They, one a stage."""
        self._course: Course = ""
        self._held: list[Effect] = []
        """Data between stages since people paused the job: one step's at most."""

    @property
    def finished(self) -> bool:
        return self.committed == self._terms.steps

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two calls of `tick`."""
        return self._terms.heartbeat_s

    @property
    def _microbatches(self) -> int:
        return self._model[2]

    @property
    def is_over(self) -> bool:
        """Whether all stages know that the job is over, or are not waited for."""
        return self.finished and (
            all(each.is_done for each in self._places)
            or self._beat_at - self._alone_since > self._terms.patience_s
        )

    def state(self) -> State:
        """What the journal keeps, from the first: the states of the last step of which all are
        here."""
        states: dict[str, Any] = {
            str(i): np.frombuffer(each, np.uint8) for i, each in enumerate(self.states)
        }
        digest, elements, count = self._model
        return State(
            self._terms.job, digest, b"", elements, self._epoch, self.committed, count, (), (), (),
            None, states, course=self._course,
        )  # fmt: skip

    def restore(self, state: State) -> None:
        """Go on from what `state` gave. ConfigError if that is another job's."""
        if state.agreed != self._terms.job:
            raise ConfigError(
                f"the journal is of the job {state.agreed}, and this one is {self._terms.job}",
                "go on with the same job, or begin anew in another folder",
            )
        self._model = (state.model, state.elements, state.delay)
        self._epoch, self.committed = state.epoch + 1, state.round
        self.generation, self._course = self._epoch * _OF_A_HUB, state.course
        self.states = tuple(state.memory[str(i)].tobytes() for i in range(len(state.memory)))

    # -- what the driver calls -----------------------------------------------------------------

    def handle(self, sender: bytes, message: Message) -> list[Effect]:
        """The effects of a message."""
        place = next((each for each in self._places if each.sender == sender), None)
        if isinstance(message, Join):
            return self._join(sender, message)
        if place is None:
            return [refusal(sender, "unknown", "join first")]
        match message:
            case Activation():
                return self._pass_on(place, message)
            case StageState():
                return self._keep(place, message)
            case Leave():
                place.is_done = self.finished
                return self._lose(place, "left", message.reason)
            case Beat():
                return []
            case Telemetry():
                return [Reported(place.name, sender, message)]
            case Figure():
                return [Evaluated(place.name, message)]
            case _:
                return self._expel(place, "order", f"{type(message).__name__} in a pipeline")

    def tick(self, now: float) -> list[Effect]:
        if now < self._beat_at:
            return []
        self._beat_at = now + self._terms.heartbeat_s
        if not self.finished or any(each.sender for each in self._places):
            self._alone_since = float("inf")
        else:
            self._alone_since = min(self._alone_since, now)
        here = sum(bool(each.sender) for each in self._places)
        beat = Beat(0, 0, 0 if self._runs else here)
        return [Send(each.sender, beat) for each in self._places if each.sender]

    def unreachable(self, to: bytes) -> list[Effect]:
        place = next((each for each in self._places if to and each.sender == to), None)
        return [] if place is None else self._lose(place, "gone", "its connection broke")

    def obey(self, order: Order) -> list[Effect]:
        """Do what people tell, or refuse it; a change is kept before it is answered."""
        words, here = order.words, [each.name for each in self._places if each.sender]
        effects: list[Effect] = []
        match words:
            case ("pause" | "resume" as word,) if self._may_turn:
                effects = self._turn(COURSES[word])
            case ("remove", name) if name in here:
                place = next(each for each in self._places if each.name == name)
                place.owner, reason = b"", CODES["removed"]
                effects = [refusal(place.sender, "removed", reason)]
                effects += self._lose(place, "gone", "removed")
                here.remove(name)
            case _:
                order.refuse(*self._why_not_obey(words, here))
                return []
        told = {"course": self._course, "round": self.committed, "members": here}
        return [*effects, Answered(order.answer, told)]

    def _why_not_obey(self, words: tuple[str, ...], here: list[str]) -> tuple[str, str]:
        match words:
            case ("pause" | "resume" as word,):
                why = "the job is over" if self.finished else "training has not begun"
                return f"{word}: {why}", "Ctrl-C, or SIGTERM, ends the hub"
            case ("remove", name):
                return f"no member '{name[:200]}' is in", did_you_mean(name[:200], here)
            case ("stop",):
                return (
                    "stop: a stage of a pipeline has a part of the model alone",
                    "Ctrl-C, or SIGTERM, ends its hub, and edgetrain hub --resume goes on",
                )
        return f"{' '.join(words[:2])[:200]}: the hub of a pipeline takes no such order", ""

    @property
    def _may_turn(self) -> bool:
        """Whether the job has a course that may change."""
        return (self._has_begun or self.committed > 0) and not self.finished

    def _turn(self, course: Course) -> list[Effect]:
        if course == self._course:
            return []
        self._course, held, self._held = course, self._held, []
        return [Save(self.state()), Note("told", "hub", NEWS[course]), *held]

    # -- members -------------------------------------------------------------------------------

    def _join(self, sender: bytes, join: Join) -> list[Effect]:
        if not self.committed and not any(each.sender for each in self._places):
            self._model = ("", 0, 0)
        place = next((each for each in self._places if each.name == join.name), None)
        model = join.model, join.elements, int(max(1, min(join.weight, MAX_MICROBATCHES)))
        if (why := self._why_not(sender, join, place, model)) is not None:
            return [refusal(sender, *why), Note("refused", join.name or "?", ": ".join(why))]
        assert place is not None
        self._model, place.sender, place.owner = model, sender, owner_of(sender)
        self.generation = max(self.generation, join.session)
        stage = self._places.index(place)
        joined: list[Effect] = [Note("joined", place.name, f"stage {stage}")]
        if self.finished:
            self.generation += 1
            return joined + ([] if stage else self._give(place, 0)) + self._end(place)
        missing = [each.name for each in self._places if not each.sender]
        return joined if missing else joined + self._begin()

    def _why_not(
        self, sender: bytes, join: Join, place: _Place | None, model: tuple[str, int, int]
    ) -> tuple[str, str] | None:
        if join.protocol != PROTOCOL:
            return "protocol", f"the hub speaks version {PROTOCOL}, the member {join.protocol}"
        if join.job != self._terms.job:
            return "job", f"the hub's job is {self._terms.job}, not {join.job}"
        if place is None:
            names = ", ".join(each.name for each in self._places)
            return "full", f"'{join.name}' is no stage: they are {names}"
        if place.sender not in (b"", sender):
            return "name", f"{place.name} is here already"
        if place.owner not in (b"", owner_of(sender)):
            return "taken", f"{place.name} is the place of another key"
        if join.elements > (most := self._terms.most_elements):
            return "large", f"{join.elements:,} parameters; there is memory for {most:,}"
        if self._model not in (("", 0, 0), model):
            return "model", (
                f"the others' model is {self._model[0]}, not {join.model}, or is cut elsewhere: "
                "microbatches=… and cuts=… in fleet.placement say where"
            )
        if join.session > (self.generation if self._has_begun else _MOST_GENERATION):
            return "session", "no hub has said that number"
        return None

    def _begin(self) -> list[Effect]:
        terms, step = self._terms, self.committed
        self.generation += 1
        self._runs = True
        self._forwards = [step * self._microbatches] * (terms.stages - 1)
        self._backwards = list(self._forwards)
        what = f"{terms.stages} stages, {self._microbatches} micro-batches, from step {step} on"
        event: Event = "back" if self._has_begun else "started"
        self._has_begun = True
        effects: list[Effect] = [Note(event, "hub", what)]
        for stage, place in enumerate(self._places):
            place.drop_state()
            effects += self._give(place, stage)
        return effects

    def _give(self, place: _Place, stage: int) -> list[Effect]:
        step = self.committed
        parts = cut_state(self.states[stage]) if step else []
        begin = StageBegin(self.generation, stage, self._terms.stages, step, len(parts))
        given = [StageState(self.generation, step, i, len(parts), p) for i, p in enumerate(parts)]
        return [Send(place.sender, begin), *(Send(place.sender, each) for each in given)]

    def _give_all(self, place: _Place) -> list[Effect]:
        return [e for stage in range(self._terms.stages) for e in self._give(place, stage)]

    def _end(self, place: _Place) -> list[Effect]:
        """Tell a stage that the job is over; the first one gets all states before."""
        states = self._give_all(place) if place is self._places[0] else []
        return [*states, refusal(place.sender, "ended", "the job is over")]

    def _lose(self, place: _Place, event: str, why: str) -> list[Effect]:
        place.sender, self._runs, self._held = b"", False, []
        return [Note("left" if event == "left" else "gone", place.name, why)]

    def _expel(self, place: _Place, code: str, reason: str) -> list[Effect]:
        told = refusal(place.sender, code, reason)
        return [told, Note("refused", place.name, f"{code}: {reason}"),
                *self._lose(place, "gone", "it was refused")]  # fmt: skip

    # -- passing on ----------------------------------------------------------------------------

    def _pass_on(self, place: _Place, given: Activation) -> list[Effect]:
        if given.generation < self.generation or not self._runs:
            return []  # it was on its way when all began anew, or a stage was lost
        stage, terms = self._places.index(place), self._terms
        cut, to = (stage - 1, stage - 1) if given.backward else (stage, stage + 1)
        if given.generation > self.generation or not 0 <= to < terms.stages:
            return self._expel(place, "order", f"stage {stage} passes nothing on to stage {to}")
        expected = divmod(
            (self._backwards if given.backward else self._forwards)[cut], self._microbatches
        )
        out = self._forwards[cut] - self._backwards[cut]
        within = self._backwards[cut] // self._microbatches == expected[0]
        if (given.step, given.micro) != expected or (not out if given.backward else not within):
            what = "the gradient" if given.backward else "the activation"
            return self._expel(
                place, "order",
                f"{what} of micro-batch {given.micro} of step {given.step}; the next one is "
                f"{expected[1]} of step {expected[0]}, after the gradients of all steps before",
            )  # fmt: skip
        size = memoryview(given.payload).nbytes
        most = self._sizes[cut] or terms.most_bytes
        if size > most or (self._sizes[cut] and size != most):
            return self._expel(
                place, "size", f"{size} bytes behind stage {cut}, whose activations have {most}"
            )
        self._sizes[cut] = size
        (self._backwards if given.backward else self._forwards)[cut] += 1
        sent: list[Effect] = [Send(self._places[to].sender, given)]
        if self._course:
            self._held += sent
        return [] if self._course else sent

    # -- states --------------------------------------------------------------------------------

    def _keep(self, place: _Place, part: StageState) -> list[Effect]:
        terms, most = self._terms, (1 << 20) + STATE_BYTES * self._model[1]
        if part.generation < self.generation or not self._runs:
            return []
        if part.part == 0 and part.step > place.step:
            place.drop_state()
            place.step, place.of = part.step, part.parts
        is_due = part.step == terms.steps or part.step % terms.save_every == 0
        size = place.size + memoryview(part.payload).nbytes
        if (
            part.generation > self.generation
            or (part.step, part.part, part.parts) != (place.step, len(place.parts), place.of)
            or not (is_due and self.committed < part.step <= terms.steps)
        ):
            return self._expel(
                place, "order", f"part {part.part} of {part.parts} of the state of step {part.step}"
            )
        if size > most or part.parts > 1 + most // PART_BYTES:
            return self._expel(place, "size", f"a state of more than {most} bytes")
        place.parts.append(part.payload)
        place.size = size
        if not all(each.is_whole and each.step == part.step for each in self._places):
            return []
        self.committed = part.step
        self.states = tuple(b"".join(each.parts) for each in self._places)
        for each in self._places:
            each.drop_state()
        names = tuple(each.name for each in self._places)
        kept: list[Effect] = [
            Save(self.state()), Closed(part.step, names, (), float(terms.stages), 0.0, 0)
        ]  # fmt: skip
        if self.finished:
            return kept + [effect for each in self._places for effect in self._end(each)]
        evaluates = terms.evaluate_every and part.step % terms.evaluate_every == 0
        return kept + self._give_all(self._places[0]) if evaluates else kept
