"""One stage of a pipeline: which micro-batch it computes next, and what it tells its neighbours.

    state      what comes                               next
    waiting    StageBegin without parts                 training, as the job's seed has it
    waiting    StageBegin with parts, then StageState   training, once the last part is here
    training   an Activation of this step, or the next  training; it is kept until its turn
    training   StageBegin of a later generation         as when waiting: what was under way is void
    training   StageBegin of this generation, and its   training; it is the first stage, and gets
               StageStates                              the states of all stages, to be evaluated
    any        Refuse                                   over ("ended"), or Refused is raised

The schedule is 1F1B (Narayanan et al., PipeDream, SOSP 2019) with a window as wide as the link is
long. A stage takes a gradient as soon as it is there, and otherwise goes forward while fewer than
`window` of its micro-batches are out. Forwards may overtake each other's gradients, but gradients
are taken in the order 0, 1, … M - 1: whatever the network does, the sum of a step's gradients has
the bits of one process that adds up its micro-batches in this order.

Where gradients are clipped, the sum of their squares goes to the first stage with the last gradient
of a step, and back to the others with the next step's first activation, which they need anyway:
they step their optimizers then. After the last step an activation of nothing takes it along.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from edgetrain.errors import BadMessage, Refused
from edgetrain.exchange.further_messages import Activation, StageBegin, StageState
from edgetrain.exchange.messages import Figure, Message, Refuse
from edgetrain.vectors.vector import Buffer

PART_BYTES = 1 << 18
"""Part of a stage's state in one message: activations wait behind one part at most."""


class Computes(Protocol):
    """What a stage computes. Payloads are those of `Activation`; the last stage passes none on, and
    the first one takes none. `micro` counts from 0 in each step."""

    clips: bool
    """Whether `finish` wants the sum of the squares of all stages' gradients."""

    def forward(self, step: int, micro: int, given: Buffer | None) -> Buffer | None:
        """The output of a micro-batch; None on the last stage. Raises BadPayload for another
        length than the stage's."""

    def backward(self, micro: int, given: Buffer | None) -> tuple[Buffer | None, float]:
        """Add up the gradients of a micro-batch whose output has this gradient; returns that of its
        input (None on the first stage), and on the last stage its part of the loss, elsewhere 0."""

    def squares(self) -> float:
        """The sum of the squares of this stage's gradients of all micro-batches."""

    def finish(self, step: int, loss: float, squares: float) -> None:
        """Step the optimizer: the gradients of all micro-batches are there. `squares`: if it
        `clips`, those of all stages."""

    def state(self) -> bytes:
        """Parameters and optimizer."""

    def begin(self, step: int, state: bytes) -> None:
        """Go on after this many steps from what `state` gave; b"": as the job's seed has it. What
        was under way is forgotten."""

    def evaluate(self, step: int, stage: int, state: bytes) -> Figure | None:
        """Take what `state` of a stage gave after this many steps; those of all stages come in
        their order. Of the last one returns how good the model of all is."""


def window_of(stage: int, stages: int, microbatches: int, trip_s: float, micro_s: float) -> int:
    """Micro-batches that a stage (from 0) has out at once, so that it is busy while the first one
    goes to the last stage and back: 1F1B's `stages - stage`, and as many as the slowest stage
    computes, in `micro_s` each, during the trips over 2 (stages - 1 - stage) cuts. `trip_s`:
    seconds from a member through the hub to the next."""
    after = stages - 1 - stage
    more = math.ceil(2 * after * trip_s / micro_s - 1e-9) if micro_s else microbatches
    return max(1, min(microbatches, 1 + after + (more if trip_s else 0)))


class StageDesk:
    """The desk of one stage. Whoever drives it hands messages to `handle`, calls `work` while that
    returns a list, and sends what both return."""

    def __init__(
        self, stage: int, stages: int, microbatches: int, steps: int, save_every: int, window: int,
        computes: Computes,
    ) -> None:  # fmt: skip
        """`stage` counts from 0. `save_every`: steps between two states that are sent to the hub;
        the last step's always is."""
        self._stages, self._microbatches = stages, microbatches
        self._steps, self._save_every, self._window = steps, save_every, window
        self._computes = computes
        self.stage, self.generation, self.step = stage, 0, 0
        self.is_over = False
        """The hub has all that it needs, and the job is over."""
        self.figure: Figure | None = None
        """The newest evaluation, until it has been sent."""
        self._begin: StageBegin | None = None
        """The `StageBegin` of the parts in `_state`."""
        self._state: list[Buffer] = []
        self._outgoing: deque[StageState] = deque()
        self._burst = 1
        """Parts of a state that are sent at a time."""
        self._clear()

    def _clear(self) -> None:
        self._given: dict[tuple[bool, int, int], Activation] = {}
        self._outgoing.clear()
        self._forwards = self._backwards = 0
        self._loss = self._squares = 0.0
        self._blank: Buffer = b""
        self.is_waiting = True
        """Whether training has not begun, or begins anew, and its state is not here yet."""

    @property
    def under_way(self) -> int:
        """Micro-batches that have gone forward, and not yet backward."""
        return self._forwards - self._backwards

    def handle(self, message: Message) -> None:
        """Take a message of the hub's. BadMessage for one that no hub sends to this stage; Refused
        if it was refused."""
        match message:
            case Refuse(code="ended") if self.step == self._steps and not self._outgoing:
                self.is_over = True
            case Refuse():
                raise Refused(message.code, message.reason)
            case StageBegin() if message.generation > self.generation:
                self._take_place(message)
            case StageBegin() if message.generation == self.generation:
                self._announce(message)
            case StageState() if message.generation == self.generation:
                self._load(message)
            case Activation() if message.generation == self.generation:
                self._keep(message)
            case _:
                pass  # a beat, or of an earlier generation

    def _take_place(self, begin: StageBegin) -> None:
        own = self.stage, self._stages
        if (begin.stage, begin.stages) != own or begin.step > self._steps:
            raise BadMessage(
                f"stage {begin.stage} of {begin.stages} after {begin.step} steps: this is stage "
                f"{self.stage} of {self._stages}, and the job has {self._steps} steps"
            )
        self._clear()
        self.generation, self._begin, self._state = begin.generation, begin, []
        if not begin.parts:
            self._start(begin.step, b"")

    def _announce(self, begin: StageBegin) -> None:
        if self.is_waiting or self.stage or not begin.parts or begin.step > self.step:
            raise BadMessage(f"the state of stage {begin.stage}, of which nothing is to be done")
        self._begin, self._state = begin, []

    def _load(self, part: StageState) -> None:
        begin = self._begin
        if begin is None or (part.step, part.part, part.parts) != (
            begin.step, len(self._state), begin.parts,
        ):  # fmt: skip
            raise BadMessage(f"part {part.part} of {part.parts} of a state that was not announced")
        self._state.append(part.payload)
        if len(self._state) < begin.parts:
            return
        whole = b"".join(self._state)
        self._begin, self._state = None, []
        if self.is_waiting:
            self._start(begin.step, whole)
        elif (figure := self._computes.evaluate(begin.step, begin.stage, whole)) is not None:
            self.figure = figure

    def _start(self, step: int, state: bytes) -> None:
        self.step, self._begin, self.is_waiting = step, None, False
        self._computes.begin(step, state)

    def _keep(self, given: Activation) -> None:
        key = (given.backward, given.step, given.micro)
        ahead = self.step + (not given.backward)  # whoever is before this stage may be a step ahead
        if (
            self.is_waiting
            or key in self._given
            or not self.step <= given.step <= ahead
            or given.micro >= self._microbatches
        ):
            what = "the gradient" if given.backward else "an activation"
            raise BadMessage(
                f"{what} of micro-batch {given.micro} of step {given.step} in step {self.step}"
            )
        self._given[key] = given

    # -- computing -----------------------------------------------------------------------------

    def work(self) -> list[Message] | None:
        """Do what is next, one micro-batch or one step of the optimizer at most; returns what to
        send. None: nothing can be done before another message is here."""
        if self.is_waiting:
            return None
        sent: list[Message] | None = self._compute() if self.step < self._steps else None
        if self.figure is not None:
            sent, self.figure = [*(sent or ()), self.figure], None
        for _ in range(min(self._burst, len(self._outgoing))):
            sent = [*(sent or ()), self._outgoing.popleft()]
        return sent

    def _compute(self) -> list[Message] | None:
        is_last = self.stage == self._stages - 1
        micro = self._backwards
        if micro == self._microbatches:
            return self._finish_if_known()
        gradient = self._given.pop((True, self.step, micro), None)
        if gradient is not None or (is_last and micro < self._forwards):
            return self._backward(micro, gradient)
        micro = self._forwards
        if micro == self._microbatches or self.under_way >= self._window:
            return None
        given = self._given.pop((False, self.step, micro), None)
        if given is None and self.stage:
            return None
        self._forwards += 1
        payload = self._computes.forward(self.step, micro, given.payload if given else None)
        return [] if payload is None else [self._passed(micro, False, 0.0, payload)]

    def _backward(self, micro: int, gradient: Activation | None) -> list[Message]:
        self._backwards += 1
        payload, loss = self._computes.backward(micro, gradient.payload if gradient else None)
        loss += gradient.loss if gradient else 0.0
        self._loss += loss
        if self._computes.clips and self._backwards == self._microbatches:
            self._squares = self._computes.squares() + (gradient.squares if gradient else 0.0)
        return [] if payload is None else [self._passed(micro, True, loss, payload)]

    def _passed(self, micro: int, backward: bool, loss: float, payload: Buffer) -> Activation:
        is_told = micro == (self._microbatches - 1 if backward else 0)
        if not backward and self._computes.clips:
            self._blank = payload
        return Activation(
            self.generation, self.step, micro, backward, loss, payload, self._squares * is_told
        )

    def _finish_if_known(self) -> list[Message] | None:
        if self._computes.clips and self.stage:
            following = self._given.get((False, self.step + 1, 0))
            if following is None:
                return None
            self._squares = following.squares
        self._finish()
        if self._computes.clips and self.step == self._steps and self._blank:
            return [self._passed(0, False, 0.0, self._blank)]
        return []

    def _finish(self) -> None:
        self._computes.finish(self.step, self._loss, self._squares)
        self.step += 1
        self._forwards = self._backwards = 0
        self._loss = 0.0
        if self.step == self._steps or self.step % self._save_every == 0:
            parts = cut_state(self._computes.state())
            # All are on their way before any stage has finished the step of its next state.
            self._burst = math.ceil(len(parts) / (self._microbatches * self._save_every))
            self._outgoing += [
                StageState(self.generation, self.step, i, len(parts), part)
                for i, part in enumerate(parts)
            ]


def cut_state(state: bytes) -> Sequence[Buffer]:
    """A state in the parts that it is sent in; at least one."""
    whole = memoryview(state)
    return [whole[at : at + PART_BYTES] for at in range(0, max(1, len(whole)), PART_BYTES)]
