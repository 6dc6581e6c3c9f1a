"""The library's way in: `join`, then `member.step()` in place of `optimizer.step()`.

The driver of a member's half of a strategy: it moves vectors between the model, the strategy and
the link, and measures. It decides nothing that a strategy or the hub decides.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from edgetrain import strategies
from edgetrain.errors import (
    BadMessage,
    ConfigError,
    Diverged,
    EdgetrainError,
    HubUnreachable,
    Refused,
    Stopped,
)
from edgetrain.exchange.addresses import route
from edgetrain.exchange.keys.credentials import credentials as credentials_for
from edgetrain.exchange.member.checkpoint import Folder, Keep, Keeper, Saved
from edgetrain.exchange.member.link import OUTAGE_S, Link
from edgetrain.exchange.messages import Start, Welcome
from edgetrain.exchange.seam import CatchUp, Past, Request
from edgetrain.exchange.transport import MemberTransport, Traffic
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.jobs.job import Privacy
from edgetrain.jobs.rules import refuse_checkpoint
from edgetrain.strategies.half import MemberHalf
from edgetrain.tasks.flat import FlatModel
from edgetrain.training.state import Stateful, TrainingState, pack, unpack
from edgetrain.training.stopping import GRACE_S, Stop
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.noise import Gaussian, Source, system
from edgetrain.vectors.vector import Vector, checksum

log = logging.getLogger("edgetrain")

MARGIN = 1.1
"""An automatic delay is so much longer than the round trip that was measured."""


def join(
    hub: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    name: str = "",
    weight: float = 1.0,
    job: str = "",
    timeout_s: float = 30.0,
    hub_key: str | None = None,
    keys: str | Path | None = None,
    insecure: bool = False,
    secure: bool = False,
    checkpoint: str | Path | Keep | None = None,
    state: Mapping[str, Stateful] | None = None,
    privacy: Privacy | None = None,
) -> Member:
    """Join the hub at "tcp://host:port" with a model and its optimizer; returns when training
    starts.

    The hub decides strategy, every, delay and codec. The model's parameters become views of one
    flat vector and, unless this member is the first, are overwritten with the fleet's. `weight` is
    the number of samples this member holds (fedavg weighs by it); `timeout_s` is how long an
    unreachable hub is tried.

    On another machine the hub is joined encrypted, with this machine's `keys` (a folder; None: the
    usual one) and the hub's public key: the one pinned when this machine was enrolled, or `hub_key`
    (text, or a file). `insecure` does without. `secure`: join only a hub that sees no more of
    contributions than their sum (docs/secure-aggregation.md); without a checkpoint.

    With a `checkpoint` (a folder, or an edgetrain.Keep: how often, too) what only this member knows
    is written there now and then: the optimizer's state, what lossy contributions have left out,
    the number of steps. A process that was killed and joins again with the same folder and `name`
    is the same member, and goes on behind `member.steps`: that many batches have been used. `close`
    empties the folder. `state` names what else of yours is to be in it, anything with `state_dict`
    and `load_state_dict`: a learning-rate scheduler, a GradScaler. It is taken within `step`, and
    put back before `join` returns; as rounds may have been made since, step a scheduler
    until it is where the member is: `while scheduler.last_epoch < member.begins_at`.

    `privacy` (an edgetrain.Privacy with unit "member") clips and noises each contribution
    before it leaves; without a checkpoint.

    Raises HubUnreachable, NetworkError, Refused, ConfigError.
    """
    if state and checkpoint is None:
        raise ConfigError("`state` is for a checkpoint", "name its folder: checkpoint=…")
    release = release_of(privacy) if privacy is not None else None
    if checkpoint is not None:
        refuse_checkpoint(privacy.unit if privacy is not None else "none")
    route(hub, timeout_s)
    credentials = credentials_for(hub, hub_key, keys, insecure=insecure)
    keep = Keep(Path(checkpoint)) if isinstance(checkpoint, str | Path) else checkpoint
    keeping = None if keep is None else keeping_of(keep, name, model, optimizer, others=state)
    flat = bind(model, optimizer)
    socket = MemberSocket(hub, credentials=credentials)
    request = Request("", name, weight, job, secure=secure)
    return Member(socket, flat, optimizer, request, timeout_s, keeping=keeping, release=release)


@dataclass(frozen=True)
class Keeping:
    """A member's checkpoint: where it goes, and what of the process is in it."""

    keeper: Keeper
    state: TrainingState


def keeping_of(
    keep: Keep,
    name: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    clock: Callable[[], float] = time.monotonic,
    others: Mapping[str, Stateful] | None = None,
) -> Keeping:
    """The checkpoint of the member `name` in its folder; raises ConfigError, as Folder."""
    state = TrainingState(model, optimizer, others)
    return Keeping(Keeper(Folder(keep.folder, name or "member"), keep.sparing, clock), state)


class Stepper(Protocol):
    """What a member needs of an optimizer."""

    def step(self) -> Any:
        """Change the parameters in place."""


class Flat(Protocol):
    """What a member needs of a model: see FlatModel, which is the one that people have."""

    params: Vector
    gradient: Vector
    elements: int
    description: bytes
    is_storage: bool

    def pull_params(self) -> None:
        """Bring `params` up to what the optimizer did."""

    def push_params(self) -> None:
        """Write `params` back into the model."""

    def pull_gradient(self) -> None:
        """Collect the gradient into `gradient`."""

    def push_gradient(self) -> None:
        """Write `gradient` back, for the optimizer to step with."""


Release = Callable[[Vector, Vector], None]
"""Writes what may be seen of the first vector into the second."""


class Member:
    """One training process in a fleet. Use `join`; close it when training is over.

    `steps` is the number of local steps it has taken, those before it was killed included: the
    batch that comes next is number `steps`, from 0. `begins_at` is how many steps of the job the
    fleet had behind it when this member began. `wait_s` and `exchange_s` are the seconds that all
    steps so far stood still for replies, and spent on handing over and applying.

    `stop` asks it to end, from anywhere; it is a handler for signals, too, which nobody installs
    but the owner of the process: `signal.signal(signal.SIGTERM, member.stop)`. The step under way
    is finished, a checkpoint written, and `step` raises Stopped, a SystemExit, with everything
    closed. A reply that does not come within two seconds is not waited for. A second signal ends
    the process.
    """

    def __init__(
        self,
        transport: MemberTransport,
        flat: Flat,
        optimizer: Stepper,
        request: Request,
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        outage_s: float = OUTAGE_S,
        keeping: Keeping | None = None,
        release: Release | None = None,
        stop: Stop | None = None,
    ) -> None:
        """`release` makes of each contribution what may be seen of it; None: all of it."""
        self._transport = transport
        self._release = release
        self._optimizer = optimizer
        self._clock = clock
        self.stop = stop or Stop(clock)
        interrupt = functools.partial(self.stop.check, GRACE_S)
        self._link = Link(transport, clock, timeout_s, outage_s, interrupt)
        self._weight = float(request.weight)
        self._keeping = keeping
        self.flat = flat
        self._request = Request(
            layouts.digest(self.flat.description),
            request.name,
            request.weight,
            request.job,
            self.flat.description,
            request.secure,
        )
        saved = None
        try:
            _check_masks(keeping, bool(request.secure))
            saved = self._found()
            welcome, start, saved = self._enter(saved)
            _check_masks(keeping, welcome.threshold > 0)
        except BaseException as error:
            self._let_go()
            if saved is None and not isinstance(error, Exception):  # nobody is to wait for it
                self._link.leave("ended before it had begun")
            transport.close()
            raise
        self.flat.push_params()
        self.name = welcome.name
        self.index = welcome.index
        self.members = welcome.members
        self.strategy = strategies.find(welcome.strategy)
        self.auto_delay = welcome.delay < 0
        self.steps = 0
        self.wait_s = 0.0
        self.exchange_s = 0.0
        self.half: MemberHalf = self.strategy.member_half(
            self.flat.params,
            self.flat.gradient,
            welcome.every,
            start.delay,
            self._link.memory,
            self._link.factors(),
        )
        self._agreed = f"{welcome.strategy}, every {welcome.every}, {welcome.codec}"
        self._submitted: dict[int, float] = {}
        self._wanted_delay = 0
        self._step_s: deque[float] = deque(maxlen=32)
        self._drained = self._closed = False
        try:
            self._begin(saved, start)
        except BaseException:
            self._let_go()
            raise
        gradient = self.strategy.contributes == "gradient"
        in_rounds = self.half.round * self.half.every + self.half.local_steps
        self.begins_at = self.steps if gradient else in_rounds
        self._step_began = clock()
        self.stop.defer()

    # -- the life before this one -------------------------------------------------------------

    def _found(self) -> Saved | None:
        """This member's checkpoint, if there is one and it is of this job."""
        if self._keeping is None:
            return None
        folder = self._keeping.keeper.folder
        saved = folder.load()
        for note in folder.notes:
            log.warning("%s; the one before it is taken", note)
        if saved is None:
            return None
        mine = [
            ("model", self._request.model, saved.model),
            ("job", self._request.job, saved.job),
            ("optimizer", self._keeping.state.optimizer, saved.optimizer),
        ]
        for what, here, there in mine:
            if here != there:
                raise ConfigError(
                    f"the checkpoint in {folder.path} is of the {what} {there[:12] or 'none'}, "
                    f"this member has {here[:12] or 'none'}",
                    "keep the checkpoints of each job in a folder of their own",
                )
        return saved

    def _enter(self, saved: Saved | None) -> tuple[Welcome, Start, Saved | None]:
        """Come back as who this member was, or join as a newcomer."""
        params = self.flat.params
        if saved is not None:
            past = Past(
                saved.session, saved.name, saved.round, saved.applied, saved.checksum,
                "params" in self._tree_of(saved),
            )  # fmt: skip
            try:
                return *self._link.join(self._request, params, 0, past), saved
            except Refused as refused:
                if refused.code != "session":
                    raise
                assert self._keeping is not None
                aside = ", ".join(path.name for path in self._keeping.keeper.folder.set_aside())
                log.warning("%s; joining as a newcomer, %s is not used", refused.message, aside)
        return *self._link.join(self._request, params, checksum(params)), None

    def _tree_of(self, saved: Saved) -> dict[str, Any]:
        tree = unpack(saved.values, saved.buffers)
        if not isinstance(tree, dict):
            raise BadMessage("the checkpoint holds no table")
        vectors = {name: tree[name] for name in ("params", "rest") if name in tree}
        for name, vector in vectors.items():
            if not _is_vector(vector) or vector.numel() != self.flat.elements:
                raise BadMessage(f"the checkpoint's {name} are not {self.flat.elements} float32")
        local_steps = tree.setdefault("local_steps", 0)
        if type(local_steps) is not int or not 0 <= local_steps <= saved.steps:
            raise BadMessage(f"the checkpoint's local_steps are no {local_steps!r}")
        unsent = tree.get("unsent")
        if not isinstance(unsent, dict) or not all(map(_is_vector, unsent.values())):
            raise BadMessage("the checkpoint's unsent rest is no table of float32")
        return tree

    def _begin(self, saved: Saved | None, start: Start) -> None:
        """From the base that the hub has sent, or from where this member was."""
        if saved is None:
            self.half.start(start.applied, start.round)
            self._compare(start)
            if self._keeping is not None:
                self._keeping.keeper.save(self._saved)
            return
        if saved.agreed != self._agreed:
            raise ConfigError(f"the checkpoint is of {saved.agreed}, the hub runs {self._agreed}")
        tree = self._tree_of(saved)
        unsent = {name: tensor.numpy() for name, tensor in tree["unsent"].items()}
        self.steps = saved.steps
        if "params" in tree:  # every reply since is on its way: the same steps are taken again
            self.flat.params[:] = tree["params"].numpy()
            self.half.start(saved.applied, saved.round)
            self._link.restore_unsent(unsent)
        else:
            self.half.start(start.applied, start.round)
            self._compare(start)
            given = start.resend - saved.round
            local_steps = tree["local_steps"]
            if not given:  # else it is in what was given since, and must not count twice
                self._link.restore_unsent(unsent)
                if "rest" in tree:
                    self.half.take_up(tree["rest"].numpy(), local_steps)
            else:
                self.steps += given * self.half.every - local_steps
        assert self._keeping is not None
        self._keeping.state.put_back(tree["state"])
        self._keeping.keeper.wait()
        self.flat.push_params()
        log.info("%s goes on after %d steps of its own", self.name, self.steps)

    def _compare(self, start: Start) -> None:
        if self.half.checksum != start.checksum:
            raise Diverged("the base arrived damaged: its checksum differs from the hub's")

    def _saved(self) -> Saved:
        """All that only this member knows, between two steps."""
        assert self._keeping is not None
        unsent = self._link.unsent()
        tree: dict[str, Any] = {"state": self._keeping.state.collect(), "unsent": unsent}
        base_checksum = self.half.checksum
        if self.strategy.contributes == "gradient":
            tree["params"] = self.flat.params
            base_checksum = checksum(self.flat.params)
        elif (rest := self.half.rest()) is not None:
            tree |= {"rest": rest, "local_steps": self.half.local_steps}
        values, buffers = pack(tree)
        return Saved(
            model=self._request.model,
            job=self._request.job,
            name=self.name,
            session=self._link.session,
            agreed=self._agreed,
            optimizer=self._keeping.state.optimizer,
            steps=self.steps,
            round=self.half.round,
            applied=self.half.applied,
            checksum=base_checksum,
            values=values,
            buffers=tuple(buffers),
        )

    def _let_go(self) -> None:
        if self._keeping is not None:
            self._keeping.keeper.folder.close()

    # -- training -----------------------------------------------------------------------------

    def step(self) -> None:
        """Step the optimizer and exchange what the strategy asks for; may wait for a reply.

        Call it where `optimizer.step()` stood, after `loss.backward()`. Gradients are left as they
        are: zero them as before. Raises Stopped once that was asked for, when the member has gone.
        """
        if self._drained or self._closed:
            raise EdgetrainError("this member has been drained: no step may follow")
        try:
            self._take_step()
        except Stopped:
            self._go()
            raise
        if self.stop.asked:
            self.flat.pull_params()
            self._go()
            self.stop.check()

    def _take_step(self) -> None:
        computed_s = self._clock() - self._step_began
        if self.strategy.contributes == "gradient":
            self.flat.pull_gradient()
            self._exchange(self.half.before_step)
            self.flat.push_gradient()
        began = self._clock()
        self._optimizer.step()
        self.steps += 1
        computed_s += self._clock() - began
        if self.auto_delay:
            self._step_s.append(computed_s)
        self._link.poll()
        if self.flat.is_storage or not self.half.quiet_steps():
            self.flat.pull_params()
        self._exchange(self.half.after_step)
        if self._keeping is not None and not self.half.local_steps and self._keeping.keeper.due:
            self._keeping.keeper.save(self._saved)
        self._step_began = self._clock()

    def skip(self, steps: int) -> None:
        """So many steps have been taken elsewhere (a simulation takes them for many members at
        once), between which the strategy has nothing to do: no more than `half.quiet_steps()`."""
        for _ in range(steps):
            self.half.after_step()
        self.steps += steps

    def drain(self) -> None:
        """Hand over what is left and wait for every reply: the model then is the fleet's model.

        For the end of training; `close` does it too. No step may follow.
        """
        if not self._drained:
            self._drained = True
            self.flat.pull_params()
            try:
                self._exchange(self.half.finish)
            except Stopped:
                self._go()
                raise

    def close(self) -> None:
        """Drain, then leave. Works twice."""
        if self._closed:
            return
        try:
            self.drain()
        except EdgetrainError as error:
            self.abandon(f"failed: {error}")
            raise
        self.abandon("done")
        if self._keeping is not None:
            self._keeping.keeper.folder.clear()

    def abandon(self, reason: str) -> None:
        """Leave at once, without exchanging anything more. Works twice.

        The hub gives up this member's place; with a checkpoint `vanish` keeps it.
        """
        if not self._closed:
            self._closed = True
            self._link.leave(" ".join(reason.split())[:256])
            self._let_go()

    def vanish(self) -> None:
        """End as if the power had gone: without a word, to go on from the checkpoint. Works
        twice."""
        if not self._closed:
            self._closed = True
            self._link.vanish()
            self._let_go()

    def _go(self) -> None:
        """End because that was asked for: to come back, with a checkpoint, else for good. Nothing
        waits any more."""
        # A gradient that was given and not replied to is no step yet, and what was drawn for it is
        # gone: a checkpoint from before is exact. Once drained all has been given, too.
        gradient = self.strategy.contributes == "gradient"
        whole = not self._drained and not (gradient and self.half.due() is not None)
        if self._keeping is not None:
            if whole:
                self._keeping.keeper.save(self._saved)
            self.vanish()
            return
        if whole and self.half.local_steps:
            self._submit(self.half.finish())
        self.abandon("it was asked to stop")

    @contextlib.contextmanager
    def fleet_model(self) -> Iterator[None]:
        """Within: the model holds the base, which all members share, not this member's own
        progress.

        For evaluation and for saving. Afterwards the model is as it was. With synchronous SGD the
        two are the same.
        """
        if self.half.base is self.flat.params:
            yield
            return
        self.flat.pull_params()
        own = self.flat.params.copy()
        self.flat.params[:] = self.half.base
        self.flat.push_params()
        try:
            yield
        finally:
            self.flat.params[:] = own
            self.flat.push_params()

    def traffic(self) -> Traffic:
        """Bytes at the socket, headers and acknowledgements of messages included."""
        return self._transport.traffic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif self._keeping is not None and (
            isinstance(error, HubUnreachable) or not isinstance(error, Exception)
        ):
            self.vanish()  # the process is to end, whoever asked for it
        else:
            self.abandon(f"{type(error).__name__}: {error}")

    def _exchange(self, contribution_of: Callable[[], Vector | None]) -> None:
        began, waited = self._clock(), self.wait_s
        changed = self._submit(contribution_of())
        while (due := self.half.due()) is not None:
            self._apply(due)
            self._submit(self.half.follow_up())
            changed = True
        if changed and self.strategy.contributes == "displacement":
            self.flat.push_params()
        self.exchange_s += self._clock() - began - (self.wait_s - waited)

    def _submit(self, contribution: Vector | None) -> bool:
        # In a method of its own, so that nobody holds the vector any longer: once it has been sent,
        # the reply can be put where it was.
        if contribution is None:
            return False
        round = self.half.round - 1
        self._submitted[round] = self._clock()
        # What is released is not what the half takes for in flight: the reply replaces all of that,
        # what was cut off and without the noise. Nothing of either may be in a later contribution.
        shown = contribution if self._release is None else self._shown(contribution)
        read = self._link.submit(
            round,
            shown,
            weight=self._weight if self.strategy.weighted else 1.0,
            applied=self.half.applied,
            checksum=self.half.checksum,
            wanted_delay=self._wanted_delay,
            rest_later=self._release is not None or not self.half.keeps_rest,
        )
        if read is not None:
            self.half.sent(read)
        return True

    def _shown(self, contribution: Vector) -> Vector:
        assert self._release is not None
        shown = self._link.memory.borrow_vector()
        self._release(contribution, shown)
        return shown

    def _apply(self, round: int) -> None:
        began = self._clock()
        merged = self._link.wait(round)
        self.wait_s += self._clock() - began
        if isinstance(merged, CatchUp):
            self._catch_up(merged)
            return
        self._measure(merged.arrived - self._submitted.pop(round, merged.arrived))
        self.half.apply(merged.pieces)
        if merged.checksum and merged.checksum != self.half.checksum:
            raise Diverged(
                f"after round {round} the base has checksum {self.half.checksum:016x} here and "
                f"{merged.checksum:016x} at the hub"
            )
        if self.auto_delay and not self._drained:
            self.half.delay = merged.delay

    def _catch_up(self, found: CatchUp) -> None:
        """The fleet went on without this member: take part again where it is now."""
        if found.base is not None:
            self.half.rebase(found.base, found.applied)
            if self.half.checksum != found.checksum:
                raise Diverged("the base arrived damaged: its checksum differs from the hub's")
        self.half.skip_to(found.round)
        self._submitted = {r: at for r, at in self._submitted.items() if r >= self.half.applied}
        if self.auto_delay and not self._drained:
            self.half.delay = found.delay

    def _measure(self, round_trip_s: float) -> None:
        """How many steps would have hidden the last round trip; the hub takes the fleet's most."""
        if self.auto_delay and self._step_s and round_trip_s > 0:
            step_s = max(statistics.median(self._step_s), 1e-6)
            self._wanted_delay = max(1, math.ceil(MARGIN * round_trip_s / step_s))


def _check_masks(keeping: Keeping | None, masked: bool) -> None:
    if keeping is not None and masked:
        raise ConfigError(
            "a member whose contributions are masked keeps no checkpoint",
            "its keys must not outlive it: leave out the checkpoint, or strategy.secure",
        )


def _is_vector(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def release_of(table: Privacy, source: Source = system) -> Release | None:
    """What a member does to its contributions under a [privacy] table; None: nothing.

    ConfigError where the noise is not known: a target epsilon has to be settled for a job first.
    """
    if table.unit != "member" or table.where != "member":
        return None
    if table.epsilon:
        raise ConfigError(
            f"privacy.epsilon = {table.epsilon:g}: the noise depends on the number of rounds",
            "`edgetrain privacy --epsilon … --rounds …` says which it is",
        )
    mechanism = Gaussian(table.clip, table.noise)
    return lambda vector, out: mechanism.released(vector, source, out)


def bind(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> FlatModel:
    """The model as flat vectors. ConfigError for an optimizer that would train other tensors."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not trained <= known:
        raise ConfigError(
            f"the optimizer lacks {len(trained - known)} of the model's {len(trained)} parameters",
            "make it from model.parameters(), or freeze what is not trained",
        )
    return FlatModel(model)
