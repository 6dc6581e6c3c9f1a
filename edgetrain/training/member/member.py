"""A member of a fleet in a process of PyTorch: its model and optimizer, a checkpoint, stopping.

The exchange, and the strategy's half, are driven by `exchange/member/driver.py`, which knows no
torch. The way in for people's own training loops is in `joining`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch.utils._pytree import tree_leaves

from edgetrain.errors import (
    ConfigError,
    Diverged,
    EdgetrainError,
    HubUnreachable,
    Refused,
    Stopped,
    lacks_memory,
    refuse_first,
)
from edgetrain.exchange.member.driver import Driver, Exchanged, Flat, Release, Stepper
from edgetrain.exchange.member.telemetry import Sums, Telemeter
from edgetrain.exchange.seam import Entry, Exchange, Request
from edgetrain.exchange.transport import Traffic
from edgetrain.jobs.job import BUFFERS, FROZEN, Privacy
from edgetrain.runs.environment import free_memory
from edgetrain.strategies import find
from edgetrain.tasks.fixed import personal_of
from edgetrain.tasks.flat import FlatModel
from edgetrain.training.member.optimizers import each_of, parameters_of, plain_optimizers
from edgetrain.training.member.readings import readings_of, versions
from edgetrain.training.stopping import GRACE_S, Stop
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.vector import Vector, checksum, flushes_tiny

if TYPE_CHECKING:
    from edgetrain.exchange.member.checkpoint import Saved
    from edgetrain.training.member.keeping import Keeping
    from edgetrain.training.member.recording import Recording
    from edgetrain.vectors.noise import Source

log = logging.getLogger("edgetrain")


class Member:
    """One training process in a fleet, made by `edgetrain.join`; close it after training.

    `name`, `index` and `members`: its name, its place, and the number of members at the start.
    `strategy` and `half`: the strategy's row, and the member's half of it. `flat`: the model.
    `begins_at`: steps of the job taken by the fleet before this member began.

    `stop` asks the member to end, from any thread or as a signal handler; only the owner of the
    process installs it: `signal.signal(signal.SIGTERM, member.stop)`. The member finishes its step,
    waits at most two seconds for a reply and writes a checkpoint. Then `step` raises Stopped, a
    SystemExit, with everything closed. A second signal ends the process at once.
    """

    def __init__(
        self, driver: Driver, request: Request, stop: Stop, keeping: Keeping | None = None
    ) -> None:
        """Around a driver that has begun, on this request; use `join`."""
        self._driver, self._request, self._keeping = driver, request, keeping
        self.stop = stop
        self.name = driver.entry.name
        self.index = driver.entry.index
        self.members = driver.entry.members
        self.strategy, self.half, self.work_with = driver.strategy, driver.half, driver.work_with
        self.begins_at, self.flat = driver.progress, driver.flat
        self.eval_s = 0.0
        """Seconds of all evaluations in `fleet_model`."""
        self.recording: Recording | None = None
        """Writes a run folder, if one was asked for."""
        self._closed = False
        self._no_step = ""
        """Why no step may be taken now; "": it may."""
        began = driver.clock() if driver.entry.began is None else driver.entry.began
        exchange = driver.exchange
        self.telemeter = Telemeter(
            driver.entry.status_s, began, driver.clock, self._sums, exchange.traffic,
            exchange.report,
        )  # fmt: skip
        """Says how this member is doing."""
        if driver.entry.status_s:
            self.telemeter.versions = versions()
            self.telemeter.read = readings_of()

    @classmethod
    def join(
        cls,
        exchange: Exchange,
        flat: Flat,
        optimizer: Stepper,
        request: Request,
        clock: Callable[[], float] = time.monotonic,
        *,
        keeping: Keeping | None = None,
        release: Release | None = None,
        stop: Stop | None = None,
    ) -> Self:
        """Join through an exchange; returns when training starts, from the fleet's base or from
        this member's checkpoint.

        The model's digest and layout in `request` are filled in here. `release` makes from each
        contribution what others may see of it; None: all of it. What raises leaves the exchange and
        the checkpoint closed: Refused, HubUnreachable, ConfigError, Diverged, BadMessage, Stopped.
        """
        stop = stop or Stop(clock)
        exchange.interrupt = functools.partial(stop.check, GRACE_S)
        request = replace(_described(request, flat), optimizer=_in_words(optimizer))
        saved = None
        try:
            _check_alone(keeping, optimizer, request)
            saved = keeping.find(request) if keeping is not None else None
            found = _enter_with_room(exchange, flat, request, keeping, saved)
            flat, request, entry, saved = found
            _check_entry(keeping, flat, optimizer, entry, request)
        except BaseException as error:
            if keeping is not None:
                keeping.close()
            if saved is None and not isinstance(error, Exception):  # nothing to come back to
                exchange.leave("ended before it had begun")
            exchange.vanish()
            raise
        flat.push_params()
        driver = Driver(exchange, flat, optimizer, entry, request, clock, release)
        try:
            if saved is None:
                driver.begin()
                if keeping is not None:
                    keeping.save(driver, request)
            elif keeping is not None:
                keeping.restore(saved, driver)
            driver.restart_clock()
            stop.defer()
        except BaseException:
            if keeping is not None:
                keeping.close()
            exchange.vanish()
            raise
        if hasattr(exchange, "base_of"):  # an exchange among members, who give each other the base
            exchange.base_of = functools.partial(_base_of, driver)
        return cls(driver, request, stop, keeping)

    @property
    def began(self) -> float:
        """When training began at the hub, by this member's clock."""
        return self.telemeter.began

    def _sums(self) -> Sums:
        """Where this member is, and where its time went."""
        driver = self._driver
        return Sums(
            driver.progress, self.half.round, driver.clock(), driver.wait_s, driver.exchange_s,
            self.eval_s,
        )  # fmt: skip

    @property
    def steps(self) -> int:
        """Local steps, with those before a restart: the next batch is number `steps`, from 0."""
        return self._driver.steps

    @property
    def progress(self) -> int:
        """Steps of the job that the fleet has behind it, rounds without this member included."""
        return self._driver.progress

    @property
    def wait_s(self) -> float:
        return self._driver.wait_s

    @property
    def exchange_s(self) -> float:
        return self._driver.exchange_s

    def observe_exchanges(self, observe: Callable[[Exchanged], None]) -> None:
        """Call `observe` after each exchange from now on."""
        self._driver.observe = observe

    def record(self, runs: str | Path) -> None:
        """Write a run folder in `runs` from now on. Raises ConfigError if it cannot be made."""
        from edgetrain.training.member.recording import Recording  # of a loop that asks for it

        entry = self._driver.entry
        self.recording = Recording(runs, self._request.job, self.name, self.began, self.traffic())
        self.recording.known |= {
            "strategy": entry.strategy, "members": self.members, "local_steps": entry.local_steps,
            "delay": entry.delay.steps,
        }  # fmt: skip
        self.observe_exchanges(self.recording.add_exchange)
        log.info("%s writes its run folder %s", self.name, self.recording.folder)

    def account_with(self, sums: Callable[[], Sums]) -> None:
        """Tell the hub from now on what `sums` says of this member's time."""
        self.telemeter.sums = sums

    # -- training ------------------------------------------------------------------------------

    def step(self) -> None:
        """Step the optimizer and exchange as the strategy requires; may wait for a reply.

        Call it after `loss.backward()`. Gradients stay as they are: zero them as before. Raises
        Stopped after `stop`, once the member has left.
        """
        self._check_open()
        self._exchange(self._driver.begin_step)
        self._driver.optimizer.step()
        self._end_step()

    def _check_open(self) -> None:
        if self._driver.is_drained or self._closed:
            what = "has left the fleet" if self._closed else "has been drained"
            raise EdgetrainError(f"this member {what}: no step may follow")
        if self._no_step:
            raise EdgetrainError(self._no_step)

    def _exchange(self, exchange: Callable[[], None]) -> None:
        try:
            exchange()
        except Stopped:
            self._end_as_asked()
            raise
        except Diverged as error:
            if not (changed := getattr(self.flat, "changed", "")):
                raise
            what = "by this member's own numbers: in forward, in the loop, or an optimizer as SAM"
            said = f"{error.message}; something writes to '{changed}' between steps, {what}"
            raise Diverged(said, error.hint) from None

    def _end_step(self) -> None:
        driver = self._driver
        self._exchange(driver.end_step)
        if self._keeping is not None and not self.half.steps_taken and self._keeping.keeper.due:
            self._keeping.save(driver, self._request)
            driver.restart_clock()
        self.telemeter.poll()
        if self.recording is not None:
            self.recording.add_step(self._sums(), driver.traffic())
        self.stop.alive()
        if self.stop.asked:
            self.flat.pull_params()
            self._end_as_asked()
            self.stop.check()

    def skip(self, steps: int) -> None:
        """This many steps have been taken elsewhere: see Driver."""
        self._driver.skip(steps)

    def drain(self, *, to_the_end: bool = False) -> None:
        """Send the last contribution and wait for every reply: the model then is the fleet's. For
        the end of training; `close` does it too. No step may follow. `to_the_end`: see Driver."""
        self._exchange(functools.partial(self._driver.drain, to_the_end=to_the_end))

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
            self._keeping.clear()

    def abandon(self, reason: str) -> None:
        """Leave at once and for good, without an exchange. Works twice."""
        if not self._closed:
            self._closed = True
            self.telemeter.say()
            self._driver.leave(" ".join(reason.split())[:256])
            self._close_files(reason, done=reason == "done")

    def vanish(self) -> None:
        """End as in a power cut, to continue from the checkpoint. Works twice."""
        if not self._closed:
            self._closed = True
            self._driver.vanish()
            self._close_files("it goes on from its checkpoint", done=False)

    def _close_files(self, reason: str, *, done: bool) -> None:
        if self.recording is not None:
            self.recording.close(reason, done=done)
        if self._keeping is not None:
            self._keeping.close()

    def _end_as_asked(self) -> None:
        """End as asked: with a checkpoint to come back, otherwise for good, at once."""
        # In the middle of a step, what was drawn for its gradient is gone: an earlier checkpoint is
        # exact, this state is not. After draining, all has been contributed.
        driver = self._driver
        is_whole = not driver.is_drained and not driver.is_mid_step
        if self._keeping is not None:
            if is_whole:
                self._keeping.save(driver, self._request)
            self.vanish()
            return
        if is_whole and self.half.has_steps:
            driver.submit_rest()
        self.abandon("it was asked to stop")

    @contextlib.contextmanager
    def fleet_model(self) -> Iterator[None]:
        """For evaluation and saving: within, the model holds the base, equal on all members,
        without this member's own progress (none with synchronous SGD). Afterwards it has its former
        bits, in any dtype: training does not change."""
        began, before = self._driver.clock(), self._no_step
        self._no_step = "a step within fleet_model() would be lost: step after it"
        try:
            if self.half.base is self.flat.params:
                yield
                return
            with self.flat.holding(self.half.base):
                yield
        finally:
            self._no_step = before
            self.eval_s += self._driver.clock() - began

    def traffic(self) -> Traffic:
        return self._driver.traffic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.close()
            elif self._keeping and (
                isinstance(error, HubUnreachable) or not isinstance(error, Exception)
            ):
                self.vanish()  # the process is about to end: it can go on from its checkpoint
            else:
                self.abandon(_told_of(error, is_private=self._driver.release is not None))
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """Leave model and optimizer as they were. Here: nothing to do."""


def driver_of(member: Member) -> Driver:
    """What drives it. Only to be looked at by who steps the member."""
    return member._driver


def _base_of(driver: Driver) -> tuple[int, Vector | None]:
    """How many replies it has applied, and its base; None: the strategy has none that hubs keep."""
    return driver.half.applied, driver.half.base if driver.strategy.hub_keeps_base else None


def _told_of(error: BaseException, *, is_private: bool) -> str:
    """What the hub is told of an error that ends a member, and how much memory is free. Of a
    private one not a task's own words, in which its data may be."""
    told = f"{type(error).__name__}: {error}"
    if is_private and not isinstance(error, EdgetrainError):
        told = type(error).__name__
    return (
        f"memory: {1e-6 * free_memory():,.0f} MB are free; {told}" if lacks_memory(told) else told
    )


def _described(request: Request, flat: Flat) -> Request:
    """With the tensors of a model, those that it trains and those that it does not."""
    fixed = flat.fixed
    if request.data:  # compared as what all members have alike is
        fixed = hashlib.sha256(f"{flat.fixed} {request.data}".encode()).hexdigest()[:24]
    digest = layouts.digest(flat.description, fixed)
    return replace(request, model=digest, layout=flat.description, fixed_tensors=flat.fixed_tensors)


def _in_words(optimizer: Stepper) -> str:
    """What its steps depend on beside gradients, for members to be compared: rates, and digests of
    other settings and of the state, which do not depend on the machine."""
    several = [each for each in each_of(optimizer) if isinstance(each, torch.optim.Optimizer)]
    groups = [group for each in several for group in each.param_groups]
    rates = sorted({float(group["lr"]) for group in groups if group.get("lr") is not None})
    rest = [[g[key] for key in sorted(g.keys() - {"params", "lr"})] for g in groups]
    state = [each.state[p] for each in several for p in parameters_of(each) if p in each.state]
    lr = "/".join(map(str, rates))[:64] or "none"
    settings = _digest([*(type(each).__name__ for each in several), rest])
    return f"lr={lr} settings={settings} state={_digest(state) if state else 'none'}"


def _digest(tree: object) -> str:
    return hashlib.sha256(repr([*map(_plain, tree_leaves(tree))]).encode()).hexdigest()[:12]


def _plain(leaf: object) -> object:
    """A number or a word as it is; of a tensor what has no rounding: its shape, least and most."""
    if isinstance(leaf, torch.Tensor):
        real = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).detach().float()
        return [*leaf.shape, *(each.item() for each in (real.aminmax() if leaf.numel() else ()))]
    return leaf if isinstance(leaf, int | float | str | None) else type(leaf).__name__


def _enter_with_room(
    exchange: Exchange, flat: Flat, request: Request, keeping: Keeping | None, saved: Saved | None
) -> tuple[Flat, Request, Entry, Saved | None]:
    """As `_enter`, with room for mean gradients where the strategy exchanges them: a loop of one's
    own learns that from its hub, or its checkpoint."""
    if saved is None or layouts.tensors_agree(request.model, saved.model):
        try:
            return flat, request, *_enter(exchange, flat, request, keeping, saved)
        except Refused as refused:
            if refused.code != "gradients":
                raise
    from edgetrain.exchange.member.doubled import Doubled

    flat = Doubled(flat)
    request = _described(request, flat)
    return flat, request, *_enter(exchange, flat, request, keeping, saved)


def _enter(
    exchange: Exchange, flat: Flat, request: Request, keeping: Keeping | None, saved: Saved | None
) -> tuple[Entry, Saved | None]:
    """Come back as who this member was, or as a newcomer; its checkpoint, if it goes on from it."""
    if saved is not None and keeping is not None and not keeping.joins_anew:
        from edgetrain.training.member.keeping import past_of

        try:
            past = past_of(saved, flat.elements)
            return exchange.join(request, flat.params, 0, past), saved
        except Refused as refused:
            if refused.code != "session":
                raise
            aside = keeping.set_aside()
            log.warning("%s; joining as a newcomer, %s is not used", refused.message, aside)
            saved = None
    return exchange.join(request, flat.params, checksum(flat.params)), saved


_KEPT_MASKS = (
    "a member whose contributions are masked keeps no checkpoint",
    "its keys must not outlive it: leave out the checkpoint, or strategy.secure",
)


def _check_alone(keeping: Keeping | None, optimizer: Stepper, request: Request) -> None:
    """ConfigError for what no hub has to say first."""
    refuse_first(
        (keeping is not None and request.secure, *_KEPT_MASKS),
        (flushes_tiny(), "this thread takes float32 below 1.2e-38 for 0, so that its base would "
         "not be the others' bit for bit",
         "torch.set_flush_denormal(False), and no library built with -ffast-math"),
        (_has(optimizer, torch.optim.LBFGS),
         "LBFGS computes the loss again within its step, which a member cannot",
         "use adam or sgd"),
    )  # fmt: skip


def _check_entry(
    keeping: Keeping | None, flat: Flat, optimizer: Stepper, entry: Entry, request: Request
) -> None:
    """ConfigError for what does not go with the job that this member has entered."""
    strategy = find(entry.strategy)
    refuse_first(
        (keeping is not None and entry.is_masked, *_KEPT_MASKS),
        (keeping is not None and entry.is_drawn and not keeping.joins_anew,
         "the hub draws cohorts: a loop of one's own keeps no checkpoint there", "leave it out"),
        (flat.trained < flat.elements and not strategy.moves_params,
         f"{entry.strategy} exchanges gradients, and statistics have none",
         "buffers='local', or a strategy that exchanges displacements (dga, fedavg)"),
        (strategy.deals and not request.data, f"{entry.strategy}: the hub hands out slices of the "
         "job's data, and a loop of one's own has its own batches",
         "start members with edgetrain member, or choose dga or fedavg"),
        (strategy.adjusts_gradient and _has(optimizer, torch.optim.SparseAdam),
         f"{entry.strategy} reads and writes gradients as dense vectors, and SparseAdam takes none",
         "use adam, or a strategy that leaves gradients alone (dga, fedavg)"),
    )  # fmt: skip


def _has(optimizer: Stepper, kind: type[torch.optim.Optimizer]) -> bool:
    return any(isinstance(each, kind) for each in each_of(optimizer))


def release_of(table: Privacy | None, source: Source = os.urandom) -> Release | None:
    """What a member does to contributions under [privacy], if anything. ConfigError."""
    if table is None or table.unit != "member" or table.where != "member":
        return None
    if table.epsilon:
        raise ConfigError(
            f"privacy.epsilon = {table.epsilon:g}: the noise depends on the number of rounds",
            "`edgetrain privacy --epsilon … --rounds …` says which it is",
        )
    from edgetrain.vectors.noise import Gaussian

    mechanism = Gaussian(table.clip, table.noise)
    return lambda vector, out: mechanism.released(vector, source, out)


def bind(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    frozen: str = "equal",
    buffers: str = "local",
    personal: str | Sequence[str] | None = None,
) -> FlatModel:
    """The model as flat vectors. ConfigError for optimizers that would train other tensors.

    `frozen`: what is not trained is "equal" on all members, and compared, the "first" member's, or
    each member's "own".
    `buffers`: running statistics are exchanged like parameters ("mean"), or "local".
    `personal`: patterns of what this member keeps; None: as the model says.
    """
    if personal or (personal is not None and personal_of(model)):
        from edgetrain.tasks.personal import make_personal

        make_personal(model, personal)
    refuse_first(
        (buffers not in BUFFERS, f"buffers = {buffers!r}", f"allowed are {' and '.join(BUFFERS)}"),
        (frozen not in FROZEN, f"frozen = {frozen!r}", f"allowed are {', '.join(FROZEN)}"),
    )
    optimizers = plain_optimizers(optimizer)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    stepped = [p for each in optimizers for p in parameters_of(each)]
    known = {id(p) for p in stepped}
    if not trained <= known:
        raise ConfigError(
            f"the optimizer lacks {len(trained - known)} of the model's {len(trained)} parameters",
            "make it from model.parameters(), or freeze what is not trained",
        )
    others = [tuple(p.shape) for p in stepped if p.requires_grad and id(p) not in trained]
    if others:
        raise ConfigError(
            f"the optimizer steps {len(others)} parameters that are not the model's, of shapes "
            f"{', '.join(map(str, others[:4]))}: they would be trained on this member alone",
            "join with one module that has all of them, as "
            "torch.nn.ModuleDict({'model': model, 'loss': loss})",
        )
    return FlatModel(model, frozen=frozen, statistics=buffers == "mean")
