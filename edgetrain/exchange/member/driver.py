"""A member's half of a strategy, driven over an exchange: the loop of every member. No torch.

The driver moves vectors between a model, the half and the exchange, and measures. It decides
nothing that a strategy or the hub decides.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from edgetrain import codecs, strategies
from edgetrain.errors import Diverged
from edgetrain.exchange.delay import MARGIN
from edgetrain.exchange.messages import NO_WEIGHT
from edgetrain.exchange.seam import (
    CatchUp,
    Entry,
    Exchange,
    FixedTensors,
    Request,
    RoundReply,
    Submission,
)
from edgetrain.exchange.transport import Traffic
from edgetrain.strategies import Strategy
from edgetrain.vectors.vector import Vector, checksum, checksum_within, in_whole_tiles

if TYPE_CHECKING:
    from edgetrain.strategies.half import MemberHalf


class Stepper(Protocol):
    """The part of an optimizer used by a member."""

    def step(self) -> Any:
        """Change the parameters in place."""


def momentum_of(optimizer: Stepper) -> float:
    """The share of its velocity that an optimizer keeps from step to step: `momentum`, or the first
    of `betas`, of the first of its `param_groups`, where torch's optimizers have them. 0: it has
    none."""
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
    if not groups:
        return 0.0
    return float(groups[0].get("momentum") or groups[0].get("betas", (0.0,))[0])


def rate_of(optimizer: Stepper) -> float:
    """The learning rate of an optimizer as it is now: the largest `lr` of its `param_groups`, where
    torch's optimizers have one. 1: it has none."""
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
    return max((float(g["lr"]) for g in groups if g.get("lr") is not None), default=1.0)


class Flat(Protocol):
    """What a member needs of a model, as flat float32 vectors: see `tasks.flat.FlatModel`.

    `params` and `gradient`, [elements], belong to the model; the member reads and writes them
    between pulling and pushing. `description` says which tensors they are (vectors.layout), and
    `fixed` is a digest of what else the model computes with; "": it is not compared. Or else
    `fixed_tensors` are what of that takes the first member's values.
    The first `trained` elements are parameters; those behind them are statistics that the model
    measures. `is_storage`: they are the model's own memory: pulling and pushing cost nothing.
    """

    params: Vector
    gradient: Vector
    elements: int
    description: bytes
    fixed: str
    trained: int
    is_storage: bool

    @property
    def fixed_tensors(self) -> FixedTensors | None:
        """See above; None: there are none."""

    def pull_params(self) -> None:
        """Bring `params` up to what the optimizer did."""

    def push_params(self) -> None:
        """Write `params` back into the model."""

    def holding(self, vector: Vector) -> AbstractContextManager[None]:
        """Within: the model's parameters are `vector`. Afterwards they have the bits they had."""

    def pull_gradient(self) -> None:
        """Collect the gradient into `gradient`."""

    def push_gradient(self, zeros_are_none: bool = False) -> None:
        """Write `gradient` back, for the optimizer to step with. `zeros_are_none`: a tensor of
        zeros means that no member had a gradient for it, not that a codec has left it out."""


@contextmanager
def in_place(params: Vector, vector: Vector) -> Iterator[None]:
    """Within: `params`, which are a model's own memory, hold `vector`; then what they held."""
    own = params.copy()
    params[:] = vector
    try:
        yield
    finally:
        params[:] = own


@dataclass(frozen=True)
class Exchanged:
    """One exchange of a member that is over: seconds of the driver's clock, and how long parts of
    it took."""

    round: int
    submitted: float
    """When its contribution was handed over, encoded."""
    arrived: float
    """When the reply was here, whole."""
    applied: float
    """When the reply had been applied."""
    submit_s: float
    """Seconds of encoding and handing over."""
    apply_s: float
    """Seconds of applying the reply."""
    members: int
    """Contributions merged."""
    decode_s: float
    """Seconds of decoding the reply, part by part."""
    sent_bytes: int
    """Bytes of its contribution, as encoded; 0: not sent."""
    received_bytes: int
    """Bytes of the reply, as encoded."""
    local_steps: int
    """Steps in a round from now on."""
    delay: int
    """Steps that a reply may take from now on."""
    note: str = ""
    """The half's own decisions, with reasons; "": none."""


def _compare_stretches(half: MemberHalf, reply: RoundReply) -> None:
    """Raise Diverged unless each hub's stretch of the base is here as it is there."""
    for here, wanted, whose in reply.checksums:
        if checksum_within(half.base, here, half.tile_sums) != wanted:
            raise Diverged(
                f"after round {reply.round} the base is not that of {whose}, which has elements "
                f"{here.start:,} to {here.stop:,}: their checksums differ"
            )


Compute = Callable[[int, int, bool], tuple[float, int]]
"""Computes a slice of the job's batch with the model as it is, by its number and how many there
are: its mean loss, and how many samples it has. With the last argument also its mean gradient,
which is then where backward leaves it."""


class Still:
    """The optimizer of a member whose hub moves the base: it takes no step."""

    def step(self) -> None:
        """Nothing."""


Release = Callable[[Vector, Vector], None]
"""Writes what others may see of the first vector into the second."""


def _pop_submitted(
    submitted: dict[int, tuple[float, float]], strategy: Strategy, reply: RoundReply
) -> tuple[float, float]:
    """When the oldest contribution in this reply was submitted, and the seconds of that."""
    at_once = reply.arrived, 0.0
    if strategy.is_synchronous:
        return submitted.pop(reply.round, at_once)
    answered = [number for number in submitted if number < reply.merged]
    return min((submitted.pop(number) for number in answered), default=at_once)


class DelayMeter:
    """Measures how many local steps would have hidden the last round trip."""

    def __init__(self) -> None:
        self.wanted = 0
        """Local steps; 0: not known yet."""
        self._step_s: deque[float] = deque(maxlen=32)

    @property
    def step_s(self) -> float:
        """Median seconds of the last steps; 1: none was measured yet."""
        return max(statistics.median(self._step_s), 1e-6) if self._step_s else 1.0

    def add_step(self, computed_s: float) -> None:
        self._step_s.append(computed_s)

    def add_round_trip(self, seconds: float) -> None:
        """The reply to a contribution came this long after it was submitted."""
        if self._step_s and seconds > 0:
            self.wanted = max(1, math.ceil(MARGIN * seconds / self.step_s))


class Driver:
    """One member in training: `join`, then `step` in place of the optimizer's step (or `begin_step`
    and `end_step` around it), then `drain` and `leave`.

    `steps` is the number of local steps taken. `wait_s` and `exchange_s` are the seconds that all
    steps so far waited for replies, and spent on handing over and applying; `idle_s` are those of
    rounds without it, if it `is_drawn`. `is_mid_step` is True from before a step's exchange to
    after the optimizer's step. `half` is the strategy's half, `entry` what the exchange said.
    """

    def __init__(
        self,
        exchange: Exchange,
        flat: Flat,
        optimizer: Stepper,
        entry: Entry,
        request: Request,
        clock: Callable[[], float],
        release: Release | None = None,
    ) -> None:
        """Over an exchange that was joined with this `entry`; it is not used here. Call `begin` (or
        `half.start`, where the base is older) before the first step.

        `request` is what the member joined with. `release` makes from each contribution
        what others may see of it; None: all of it.
        """
        self.exchange, self.flat, self.entry = exchange, flat, entry
        self.strategy = strategies.find(entry.strategy)
        row = self.strategy if request.predicts else self.strategy.without_choice()
        is_auto = codecs.parse(entry.codec).adapts
        setting = strategies.Setting(
            flat.params, flat.gradient, entry.steps_now or entry.local_steps, entry.delay.steps,
            exchange.memory, exchange.factors(), momentum_of(optimizer), entry.members, is_auto,
        )  # fmt: skip
        self.half: MemberHalf = row.member_half(setting)
        self.steps = 0
        self.wait_s = self.idle_s = self.exchange_s = 0.0
        self.observe: Callable[[Exchanged], None] | None = None
        """Called after each exchange."""
        self.is_mid_step, self.is_drained, self.is_drawn = False, False, entry.is_drawn
        self.optimizer, self.clock, self.release = optimizer, clock, release
        self._weight = float(request.weight) if self.strategy.weighted else 1.0
        self._meter = DelayMeter() if entry.delay.is_measured or is_auto else None
        self._longest = 0
        """The longest an automatic delay may be until the first reply says it; 0: it is known."""
        if entry.delay.is_measured and not (entry.applied or entry.round):
            self._longest = entry.delay.steps
            self.half.delay = min(self._longest, self.half.local_steps)
        self._skipped = 0
        """Steps taken elsewhere since the last one that was taken here."""
        self._computed_s = 0.0
        """Seconds of this step so far, without exchanges."""
        self._is_waiting = False
        """Whether rounds have none of this member's steps, and weigh nothing."""
        self.most_members = self.rounds_with_fewer = 0
        """The most contributions in a reply, and how many replies since had fewer."""
        self._members = 0
        """Contributions in the newest reply."""
        self._progress = entry.steps
        self._submitted: dict[int, tuple[float, float]] = {}
        self._compute: Compute | None = None
        self._step_began = clock()

    @classmethod
    def join(
        cls,
        exchange: Exchange,
        flat: Flat,
        optimizer: Stepper,
        request: Request,
        clock: Callable[[], float],
        release: Release | None = None,
    ) -> Self:
        """Join through an exchange as a newcomer, and begin from the fleet's base, which is pushed
        into the model. Raises Refused, HubUnreachable, Diverged."""
        entry = exchange.join(request, flat.params, checksum(flat.params))
        flat.push_params()
        driver = cls(exchange, flat, optimizer, entry, request, clock, release)
        driver.begin()
        return driver

    def begin(self) -> None:
        """Begin from the base that the exchange has put into the parameters."""
        self.half.start(self.entry.applied, self.entry.round)
        self.half.note_merged(0, self.entry.complete)
        self._progress = self.entry.steps
        self._compare(self.entry.checksum)
        self.restart_clock()

    def restore_rest(self, rest: Vector, steps_taken: int) -> None:
        """After `begin`: go on in the middle of a round, as MemberHalf.restore_rest says."""
        self.half.restore_rest(rest, steps_taken)
        self._progress += steps_taken

    @property
    def progress(self) -> int:
        """Steps of the job that the fleet has behind it, as far as this member takes part: those
        before it came, its own, and those of rounds that went on without it."""
        has_steps = self.strategy.has_local_steps or self.strategy.deals
        return self._progress if has_steps else self.steps

    # -- training ------------------------------------------------------------------------------

    def step(self) -> None:
        """Step the optimizer, and exchange what the strategy asks for; may wait for a reply."""
        self.begin_step()
        self.optimizer.step()
        self.end_step()

    def begin_step(self, *, adds: bool = True) -> None:
        """Before the optimizer's step, with the gradients there: exchange them, if the strategy
        does. `adds` = False: this member has no gradient for the step, and the others' mean is not
        to have its zeros in it. More than once in a step where several optimizers share it."""
        self._computed_s += self.clock() - self._step_began
        half, flat = self.half, self.flat
        self.is_mid_step = True
        if self._compute is not None:
            _answer_work(self, self._compute)
        elif adds or not half.moves_params:
            if half.adjusts_gradient:
                flat.pull_gradient()
            is_empty = not adds and (self.entry.is_exact or self._is_waiting)
            weight = NO_WEIGHT if is_empty else self._weight
            self._exchange(half.before_step, apply_anyway=False, weight=weight)
            if half.adjusts_gradient:
                flat.push_gradient(zeros_are_none=half.moves_params or self.entry.is_exact)
        self.restart_clock()

    def work_with(self, compute: Compute) -> None:
        """The hub hands out work: from now on a step answers it until its round is over."""
        self._compute, self.optimizer = compute, Still()

    def end_step(self) -> None:
        """After the optimizer's step: exchange what a round's end asks for."""
        half, flat = self.half, self.flat
        self.is_mid_step = False
        self.steps += 1
        self._progress += 1
        computed_s, self._computed_s = self._computed_s + self.clock() - self._step_began, 0.0
        if self._meter is not None:
            steps, self._skipped = 1 + self._skipped, 0
            self._meter.add_step(computed_s / steps)
        began = self.clock()
        self.exchange.poll()
        self.exchange_s += self.clock() - began
        is_quiet = half.quiet_steps() > 0  # nothing looks at the parameters before
        if not is_quiet:
            flat.pull_params()
        half.note_rate(rate_of(self.optimizer))
        self._exchange(half.after_step)
        if half.moves_within and not is_quiet:
            flat.push_params()
        self.restart_clock()

    def restart_clock(self) -> None:
        """Count the seconds of the next step from now: those before were not spent on it."""
        self._step_began = self.clock()

    def skip(self, steps: int) -> None:
        """This many steps have been taken elsewhere (a simulation takes them for many members at
        once), between which the strategy has nothing to do: at most `half.quiet_steps()`."""
        rate = rate_of(self.optimizer) if steps else 0.0
        for _ in range(steps):
            self.half.note_rate(rate)
            self.half.after_step()
        self.steps += steps
        self._progress += steps
        self._skipped += steps

    def wait_for_fleet(self, step: Callable[[], None]) -> None:
        """Take part in the fleet's rounds without adding to them, until no member adds to one.

        Local steps that are in no contribution yet are contributed first. A displacement strategy's
        half counts steps that are not taken; with a gradient strategy `step` is called to step the
        optimizer with the mean of the others' gradients, and to leave no gradient.
        """
        self._members = int(self.strategy.is_synchronous)  # out of step nobody waits for this one
        while self._members:
            if self.half.moves_params:
                self._take_part()
            else:
                self._is_waiting = True
                self.begin_step(adds=False)
                step()
                self.is_mid_step = False

    def _take_part(self) -> None:
        """Take part in a displacement strategy's next round without steps of its own."""
        self._is_waiting = not self.half.has_steps
        round = self.half.round
        while self.half.round == round:
            self._exchange(self.half.after_step)

    def drain(self, *, to_the_end: bool = False) -> None:
        """Submit what is left, and wait for every reply, and until the fleet has all of it: the
        parameters then are the base. No step may follow. Works twice. `to_the_end`: out of step,
        wait for the contributions of all others, too: the base then is the job's last."""
        if not self.is_drained:
            self.is_drained = True
            self.flat.pull_params()
            self._exchange(self._rest)
            while not (self.exchange.settle() or self.is_drawn) and self.half.moves_params:
                self._take_part()  # what came too late for its own round is in this one
            while to_the_end and not self.strategy.is_synchronous and self.exchange.await_reply():
                self._apply(self.half.applied)
            if self.half.moves_params:  # what is given up leaves the model without a reply, too
                self.flat.push_params()

    def submit_rest(self) -> None:
        """Submit what is left, without waiting for replies. Nothing but `leave` may follow."""
        is_more = self._submit(self._rest(), self._weight)
        while is_more:
            is_more = self._submit(self.half.follow_up(), self._weight)

    def _rest(self) -> Vector | None:
        rest = self.half.finish(rest=not (self.exchange.sent_nearly_all or self.is_drawn))
        if not self.strategy.is_synchronous:
            self.exchange.end(self.half.round)
        return rest

    def leave(self, reason: str) -> None:
        """Leave the fleet at once. Works twice."""
        self.exchange.leave(reason)

    def vanish(self) -> None:
        """Let go without a word: the fleet keeps this member's place for a while. Works twice."""
        self.exchange.vanish()

    def traffic(self) -> Traffic:
        return self.exchange.traffic()

    # -- exchanging ----------------------------------------------------------------------------

    def _exchange(
        self,
        contribution_of: Callable[[], Vector | None],
        *,
        apply_anyway: bool = True,
        weight: float | None = None,
    ) -> None:
        """Submit the contribution, if there is one, and apply every reply that is due; without a
        contribution only if `apply_anyway`. `weight`: samples behind it; None: the member's."""
        began, waited = self.clock(), self.wait_s
        if weight is None:
            weight = NO_WEIGHT if self._is_waiting else self._weight
        changed = self._submit(contribution_of(), weight)
        while (changed or apply_anyway) and (due := self.half.due(self.exchange.ready)) is not None:
            self._apply(due)
            self._submit(self.half.follow_up(), weight)
            changed = True
        if changed and self.half.moves_params:
            self.flat.push_params()
        self.exchange_s += self.clock() - began - (self.wait_s - waited)

    def _submit(self, contribution: Vector | None, weight: float) -> bool:
        # A separate method, so that no local variable keeps the vector alive: once it has been
        # sent, its memory is used for the reply.
        if contribution is None:
            return False
        round, began = self.half.round - 1, self.clock()
        if self._meter is not None and not self._meter.wanted and not self.is_drained:
            # The first round: what the connection has seen of the way so far, while joining. After
            # the last step there is no delay: its reply would never be due.
            self._meter.add_round_trip(self.exchange.traffic().round_trip_s)
            self.half.delay = max(self.half.delay, min(self._meter.wanted, self._longest))
        # The half takes the whole contribution as in flight, not what was released: the reply
        # replaces all of it, what was cut off and without the noise. Neither may be in a later one.
        read = self.exchange.submit(
            Submission(
                round,
                contribution if self.release is None else self._released(contribution),
                weight,
                self.half.applied,
                self.half.checksum,
                0 if self._meter is None or self._is_waiting else self._meter.wanted,
                1.0 if self._meter is None else self._meter.step_s,
                rest_later=self.release is not None or not self.half.keeps_rest,
            )
        )
        if read is not None:
            self.half.sent(read)
        self._submitted[round] = (now := self.clock()), now - began
        return True

    def _released(self, contribution: Vector) -> Vector:
        assert self.release is not None
        shown = self.exchange.memory.borrow_vector()[: contribution.size]
        self.release(contribution, shown)
        return shown

    def _apply(self, round: int) -> None:
        began = self.clock()
        try:
            reply = self.exchange.wait(round)
        finally:
            self.wait_s += self.clock() - began
        if isinstance(reply, CatchUp):
            self._catch_up(reply)
            return
        self.wait_s -= reply.wait_decode_s
        submitted, submit_s = _pop_submitted(self._submitted, self.strategy, reply)
        if self._meter is not None:
            self._meter.add_round_trip(reply.arrived - submitted + submit_s)
        self._members = reply.members
        is_most = reply.members >= self.most_members
        self.rounds_with_fewer = 0 if is_most else self.rounds_with_fewer + 1
        self.most_members = max(self.most_members, reply.members)
        ready = self.clock()
        self.half.note_merged(reply.merged, reply.complete)
        self.half.apply(in_whole_tiles(reply.pieces))
        if reply.checksum and reply.checksum != self.half.checksum:
            raise Diverged(
                f"after round {round} the base has checksum {self.half.checksum:016x} here and "
                f"{reply.checksum:016x} at the hub"
            )
        if reply.checksums:
            _compare_stretches(self.half, reply)
        self._take_delay(reply.delay, reply.local_steps)
        if self.observe is not None:
            now = self.clock()
            self.observe(
                Exchanged(
                    round, submitted, max(reply.arrived, submitted), now, submit_s, now - ready,
                    reply.members, reply.decode_s, reply.sent_bytes, reply.received_bytes,
                    reply.local_steps or self.half.local_steps, reply.delay, self.half.take_note(),
                )
            )  # fmt: skip

    def _catch_up(self, found: CatchUp) -> None:
        self.half.note_merged(found.merged, found.complete)
        if found.base is not None:
            self.half.rebase(found.base, found.applied)
            self._compare(found.checksum)
        self.idle_s, self.wait_s = self.idle_s + found.idle_s, self.wait_s - found.idle_s
        self.exchange_s -= found.idle_s
        self._progress = max(self._progress, self.is_drawn * found.steps)
        if not self.strategy.deals:  # then each round is a step, also one that was missed
            self._progress += max(0, found.round - self.half.round) * self.half.local_steps
        self.half.skip_to(found.round)
        first = self.half.applied if self.strategy.is_synchronous else found.merged
        self._submitted = {r: at for r, at in self._submitted.items() if r >= first}
        self._take_delay(found.delay, found.local_steps)

    def _take_delay(self, delay: int, local_steps: int) -> None:
        if not self.is_drained:
            self.half.delay, self.half.local_steps = delay, local_steps or self.half.local_steps

    def _compare(self, wanted: int) -> None:
        if self.half.checksum != wanted:
            raise Diverged("the base arrived damaged: its checksum differs from the hub's")


def _answer_work(driver: Driver, compute: Compute) -> None:
    """Answer the hub's work, until the round of this step is over; if all are, there is none."""
    from edgetrain.exchange.member.work import RangedWork, WorkLink  # where the hub deals

    link, flat, half = driver.exchange, driver.flat, driver.half
    assert isinstance(link, WorkLink | RangedWork)
    while half.applied <= driver.progress and not link.is_over:
        began = driver.clock()
        task = link.next_work()
        driver.wait_s += driver.clock() - began
        if task is None and not link.is_over:
            driver._apply(half.applied)
            flat.push_params()
        if task is None:
            continue
        loss, samples = compute(task.number, task.of, task.gradient)
        began = driver.clock()
        flat.pull_gradient()
        link.answer(task, samples, loss, flat.gradient if task.gradient else None, half.checksum)
        driver.exchange_s += driver.clock() - began
