"""The hub of a pipeline: it passes activations and gradients on to the neighbour, unread, and keeps
each stage's state.

    state     what happens                                  next
    waiting   a member joins, and a stage is still missing  waiting
    waiting   the last missing one joins                    running, in a new generation: all stages
                                                            begin after the last step whose states
                                                            are all here
    running   a connection breaks                           waiting: the others stand still
    running   a stage joins again                           running, in a new generation
    running   the states of the last step are all here      finished

A stage may pass on micro-batches only in order, and those of a step only after the gradients of the
step before: so what waits for a slow stage is at most one step's activations, which bounds the
hub's memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edgetrain.exchange.hub.effects import Note, Observed, Send, refusal
from edgetrain.exchange.messages import (
    PROTOCOL,
    Activation,
    Beat,
    Join,
    Leave,
    Message,
    StageBegin,
    StageState,
)
from edgetrain.exchange.pipeline.desk import PART_BYTES, cut_state
from edgetrain.vectors.vector import Buffer


@dataclass(frozen=True)
class RelayTerms:
    """What the members of one pipeline agree on."""

    job: str
    """Digest of the job."""
    stages: int
    microbatches: int
    """Of each step."""
    steps: int
    save_every: int
    """Steps between two states of a stage."""
    most_bytes: int
    """Of one activation."""
    most_state_bytes: int
    """Of one stage's state."""
    beat_s: float = 1.0


@dataclass
class _Place:
    """A stage, its member, and what has come of its next state."""

    name: str
    sender: bytes = b""
    """Its connection; b"": it has none."""
    step: int = 0
    """Of the state that is coming, or has come."""
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
        self._model = ("", 0)
        self._forwards = [0] * (terms.stages - 1)
        """Activations that have gone over each cut in this generation."""
        self._backwards = [0] * (terms.stages - 1)
        """Gradients that have come back over it."""
        self._sizes = [0] * (terms.stages - 1)
        """Bytes of each of these; 0: none has gone over it yet."""
        self._runs = False
        self._beat_at = float("-inf")
        self.generation = 0
        self.committed = 0
        """The newest step whose states are all here; 0: none."""
        self.states: tuple[bytes, ...] = ()
        """They, one a stage."""

    @property
    def finished(self) -> bool:
        return self.committed == self._terms.steps

    @property
    def beat_s(self) -> float:
        """Seconds between two calls of `tick`."""
        return self._terms.beat_s

    # -- what the driver calls -----------------------------------------------------------------

    def handle(self, sender: bytes, message: Message) -> list[Send | Observed]:
        """What a message leads to."""
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
                return self._lose(place, "left", message.reason)
            case Beat():
                return []
            case _:
                return self._expel(place, "order", f"{type(message).__name__} in a pipeline")

    def tick(self, now: float) -> list[Send | Observed]:
        if now < self._beat_at:
            return []
        self._beat_at = now + self._terms.beat_s
        here = sum(bool(each.sender) for each in self._places)
        beat = Beat(0, 0, 0 if self._runs else here)
        return [Send(each.sender, beat) for each in self._places if each.sender]

    def unreachable(self, to: bytes) -> list[Send | Observed]:
        place = next((each for each in self._places if to and each.sender == to), None)
        return [] if place is None else self._lose(place, "gone", "its connection broke")

    # -- members -------------------------------------------------------------------------------

    def _join(self, sender: bytes, join: Join) -> list[Send | Observed]:
        names = {place.name: place for place in self._places}
        place = names.get(join.name)
        if join.protocol != PROTOCOL:
            reason = f"the hub speaks version {PROTOCOL}, the member {join.protocol}"
            return [refusal(sender, "protocol", reason)]
        if join.job != self._terms.job:
            return [refusal(sender, "job", f"the hub's job is {self._terms.job}, not {join.job}")]
        if place is None:
            reason = f"'{join.name}' is no stage: they are {', '.join(names)}"
            return [refusal(sender, "full", reason)]
        if place.sender not in (b"", sender):
            return [refusal(sender, "name", f"{place.name} is here already")]
        if self._model not in (("", 0), (join.model, join.elements)):
            reason = f"the others' model is {self._model[0]}, not {join.model}"
            return [refusal(sender, "model", reason)]
        self._model = (join.model, join.elements)
        place.sender = sender
        stage = self._places.index(place)
        joined: list[Send | Observed] = [Note("joined", place.name, f"stage {stage}")]
        missing = [each.name for each in self._places if not each.sender]
        return joined if missing else joined + self._begin()

    def _begin(self) -> list[Send | Observed]:
        terms, step = self._terms, self.committed
        first = self.generation == 0
        self.generation += 1
        self._runs = True
        self._forwards = [step * terms.microbatches] * (terms.stages - 1)
        self._backwards = list(self._forwards)
        what = f"{terms.stages} stages, {terms.microbatches} micro-batches"
        effects: list[Send | Observed] = [
            Note("started", "hub", what) if first else Note("back", "hub", f"all go on from {step}")
        ]
        for stage, place in enumerate(self._places):
            place.drop_state()
            parts = cut_state(self.states[stage]) if step else []
            begin = StageBegin(self.generation, stage, terms.stages, step, len(parts))
            effects.append(Send(place.sender, begin))
            effects += [
                Send(place.sender, StageState(self.generation, step, i, len(parts), part))
                for i, part in enumerate(parts)
            ]
        return effects

    def _lose(self, place: _Place, event: str, why: str) -> list[Send | Observed]:
        place.sender, self._runs = b"", False
        return [Note("left" if event == "left" else "gone", place.name, why)]

    def _expel(self, place: _Place, code: str, reason: str) -> list[Send | Observed]:
        told = refusal(place.sender, code, reason)
        return [told, Note("refused", place.name, f"{code}: {reason}"),
                *self._lose(place, "gone", "it was refused")]  # fmt: skip

    # -- passing on ----------------------------------------------------------------------------

    def _pass_on(self, place: _Place, given: Activation) -> list[Send | Observed]:
        if given.generation < self.generation or not self._runs:
            return []  # it was on its way when all began anew, or a stage was lost
        stage, terms = self._places.index(place), self._terms
        cut, to = (stage - 1, stage - 1) if given.backward else (stage, stage + 1)
        if given.generation > self.generation or not 0 <= to < terms.stages:
            return self._expel(place, "order", f"stage {stage} passes nothing on to stage {to}")
        expected = divmod(
            (self._backwards if given.backward else self._forwards)[cut], terms.microbatches
        )
        out = self._forwards[cut] - self._backwards[cut]
        within = self._backwards[cut] // terms.microbatches == expected[0]
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
        return [Send(self._places[to].sender, given)]

    # -- states --------------------------------------------------------------------------------

    def _keep(self, place: _Place, part: StageState) -> list[Send | Observed]:
        terms = self._terms
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
        if size > terms.most_state_bytes or part.parts > 1 + terms.most_state_bytes // PART_BYTES:
            return self._expel(
                place, "size", f"a state of more than {terms.most_state_bytes} bytes"
            )
        place.parts.append(part.payload)
        place.size = size
        if not all(each.is_whole and each.step == part.step for each in self._places):
            return []
        self.committed = part.step
        self.states = tuple(b"".join(each.parts) for each in self._places)
        for each in self._places:
            each.drop_state()
        if not self.finished:
            return []
        return [refusal(each.sender, "ended", "the job is over") for each in self._places]
