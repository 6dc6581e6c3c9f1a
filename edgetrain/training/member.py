"""The library's way in: `join`, then `member.step()` in place of `optimizer.step()`.

The exchange, and the strategy's half, are driven by `exchange/member/driver.py`, which knows no
torch. Here is what a process of PyTorch adds: its model and optimizer, a checkpoint, stopping.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from edgetrain.errors import ConfigError, EdgetrainError, HubUnreachable, Refused, Stopped
from edgetrain.exchange.addresses import wait_for_route
from edgetrain.exchange.keys.credentials import credentials as credentials_for
from edgetrain.exchange.member.checkpoint import MEMBER, Keep, Saved, has_checkpoint
from edgetrain.exchange.member.driver import Driver, Exchanged, Flat, Release, Stepper
from edgetrain.exchange.member.link import OUTAGE_S, Link
from edgetrain.exchange.member.telemetry import Sums, Telemeter
from edgetrain.exchange.seam import Entry, Exchange, Request
from edgetrain.exchange.transport import Traffic
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.jobs.job import Privacy
from edgetrain.jobs.rules import BUFFERS, FIXED, refuse_checkpoint
from edgetrain.runs.folder import check_room
from edgetrain.strategies import find
from edgetrain.tasks.flat import FlatModel
from edgetrain.training.keeping import Keeping, keeping_of, past_of
from edgetrain.training.readings import readings_of, versions
from edgetrain.training.recording import Recording
from edgetrain.training.state import Stateful
from edgetrain.training.stopping import GRACE_S, Stop
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.noise import Gaussian, Source, system
from edgetrain.vectors.vector import checksum, flushes_tiny

log = logging.getLogger("edgetrain")


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
    honest_hub: bool = False,
    checkpoint: str | Path | Keep | None = None,
    state: Mapping[str, Stateful] | None = None,
    privacy: Privacy | None = None,
    fixed: str = "equal",
    buffers: str = "local",
    runs: str | Path | None = None,
) -> Member:
    """Join the hub at "tcp://host:port" with a model and its optimizer; returns when it starts.

    The hub decides strategy, every, delay and codec. The model's parameters become views of one
    flat vector and, unless this member is the first, are overwritten with the fleet's. `weight` is
    the number of samples this member holds (fedavg weighs by it); `timeout_s` is how long an
    unreachable hub is tried: ten minutes if there is a checkpoint of this job.

    On another machine the hub is joined encrypted, with this machine's `keys` (a folder; None: the
    usual one) and the hub's public key: the one pinned when this machine was enrolled, or `hub_key`
    (text, or a file). `insecure` does without. `secure`: join only a hub that sees only sums of
    contributions, even if it lies about who dropped out (docs/secure-aggregation.md); `honest_hub`:
    it does not lie. Without a checkpoint.

    With a `checkpoint` (a folder, or an edgetrain.Keep: how often, too) what only this member knows
    is written there now and then: the optimizer's state, what lossy contributions have left out,
    the number of steps. A process that was killed and joins again with the same folder and `name`
    is the same member, and goes on behind `member.steps`: that many batches have been used. `close`
    empties the folder. `state` names what else of yours is to be in it, with `state_dict` and
    `load_state_dict` (a scheduler, a GradScaler). It is taken within `step`, and put back before
    `join` returns; then step a scheduler `while scheduler.last_epoch < member.begins_at`.

    `privacy` (an edgetrain.Privacy with unit "member") clips and noises each contribution
    before it leaves; without a checkpoint. Frozen parameters and buffers (but for statistics of
    normalisation) are `fixed` "equal" on all members, the "first" member's, or each one's "own".
    With `buffers` "mean" running statistics are averaged, too. In `runs` a run folder is written.

    Raises HubUnreachable, NetworkError, Refused, ConfigError.
    """
    _check_arguments(weight, runs, checkpoint is not None, bool(state), privacy)
    release = release_of(privacy) if privacy is not None else None
    keep = Keep(Path(checkpoint)) if isinstance(checkpoint, str | Path) else checkpoint
    patience_s = _reach_hub(hub, timeout_s, keep, name or MEMBER, job)
    credentials = credentials_for(hub, hub_key, keys, insecure=insecure)
    keeping = None if keep is None else keeping_of(keep, name, model, optimizer, others=state)
    flat = bind(model, optimizer, fixed, buffers)
    link = Link(MemberSocket(hub, credentials=credentials), time.monotonic, patience_s)
    request = Request("", name, weight, job, secure=secure, honest_hub=honest_hub)
    member = Member.join(link, flat, optimizer, request, keeping=keeping, release=release)
    return member if runs is None else _recorded(member, runs)


def _recorded(member: Member, runs: str | Path) -> Member:
    try:
        member.record(runs)
    except ConfigError as error:
        member.abandon(f"failed: {error}")
        raise
    return member


def _reach_hub(hub: str, timeout_s: float, keep: Keep | None, name: str, job: str) -> float:
    """Return once the hub's address answers: how long to try a hub that says nothing. A member that
    has trained before waits for one that is not up yet. Raises as `wait_for_route`."""
    trained = keep is not None and has_checkpoint(keep.folder, name, job)
    wait_for_route([hub], timeout_s, OUTAGE_S if trained else 0.0)
    return max(timeout_s, OUTAGE_S) if trained else timeout_s


def _check_arguments(
    weight: float,
    runs: str | Path | None,
    keeps: bool,
    has_state: bool,
    privacy: Privacy | None,
) -> None:
    """ConfigError for a weight that cannot be, a folder that cannot be written, and what does not
    go with a checkpoint, or not without one."""
    _check_weight(weight)
    if runs is not None:
        check_room(runs)
    if has_state and not keeps:
        raise ConfigError("`state` is for a checkpoint", "name its folder: checkpoint=…")
    if keeps:
        refuse_checkpoint(privacy.unit if privacy is not None else "none")


class Member:
    """One training process in a fleet. Use `edgetrain.join`; close it when training is over.

    `name`, `index` and `members` are its name, its place and how many members the job starts with;
    `strategy` and `half` are the strategy's row and this member's half of it; `flat` is the model.
    `begins_at` is how many steps of the job the fleet had behind it when this member began.

    `stop` asks it to end, from anywhere. It is a signal handler, too, that only the owner of the
    process installs: `signal.signal(signal.SIGTERM, member.stop)`. The step under way is finished,
    a checkpoint written, and `step` raises Stopped, a SystemExit, with everything closed. A reply
    that does not come within two seconds is not waited for. A second signal ends the process.
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
        self.strategy, self.half, self.flat = driver.strategy, driver.half, driver.flat
        self.begins_at = driver.progress
        self.eval_s = 0.0
        """Seconds that all evaluations of `fleet_model` took."""
        self.recording: Recording | None = None
        """Writes a run folder, if one was asked for."""
        self._closed = False
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
        request = _described(request, flat)
        saved = None
        try:
            _check_masks(keeping, bool(request.secure))
            _check_processor()
            _check_step(optimizer)
            saved = keeping.find(request) if keeping is not None else None
            entry, saved = _enter(exchange, flat, request, keeping, saved)
            _check_masks(keeping, entry.is_masked)
            _check_statistics(flat, entry)
            _check_optimizer(optimizer, entry)
        except BaseException as error:
            if keeping is not None:
                keeping.close()
            if saved is None and not isinstance(error, Exception):  # nothing to come back to
                exchange.leave("ended before it had begun")
            exchange.vanish()
            raise
        flat.push_params()
        driver = Driver(exchange, flat, optimizer, entry, request.weight, clock, release)
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
        """Local steps taken, those before the process was killed included: the batch that comes
        next is number `steps`, from 0."""
        return self._driver.steps

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's: so that a member can stand in its place in `scaler.step(member)` and
        `scaler.unscale_(member)` of torch.amp.GradScaler."""
        groups: list[dict[str, Any]] = getattr(self._driver.optimizer, "param_groups", [])
        return groups

    @property
    def wait_s(self) -> float:
        """Seconds that all steps so far waited for replies."""
        return self._driver.wait_s

    @property
    def exchange_s(self) -> float:
        """Seconds that all steps so far spent on handing over and applying."""
        return self._driver.exchange_s

    def observe_exchanges(self, observe: Callable[[Exchanged], None]) -> None:
        """Call `observe` after each exchange from now on."""
        self._driver.observe = observe

    def record(self, runs: str | Path) -> None:
        """Write a run folder in `runs` from now on. ConfigError if that cannot be."""
        entry = self._driver.entry
        self.recording = Recording(
            runs, self._request.job, self.name, self.began, self._driver.traffic()
        )
        self.recording.known |= {
            "strategy": entry.strategy, "members": self.members, "every": entry.every,
            "delay": entry.delay,
        }  # fmt: skip
        self.observe_exchanges(self.recording.add_exchange)
        log.info("%s writes its run folder %s", self.name, self.recording.folder)

    def account_with(self, sums: Callable[[], Sums]) -> None:
        """Tell the hub from now on what `sums` says of this member's time."""
        self.telemeter.sums = sums

    # -- training ------------------------------------------------------------------------------

    def step(self) -> None:
        """Step the optimizer and exchange what the strategy asks for; may wait for a reply.

        Call it where `optimizer.step()` stood, after `loss.backward()`. Gradients are left as they
        are: zero them as before. Raises Stopped once that was asked for, when the member has gone.
        """
        driver = self._driver
        if driver.is_drained or self._closed:
            raise EdgetrainError("this member has been drained: no step may follow")
        try:
            driver.step()
        except Stopped:
            self._end_as_asked()
            raise
        if self._keeping is not None and not self.half.local_steps and self._keeping.keeper.due:
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

    def drain(self) -> None:
        """Hand over what is left and wait for every reply: the model then is the fleet's model.

        For the end of training; `close` does it too. No step may follow.
        """
        try:
            self._driver.drain()
        except Stopped:
            self._end_as_asked()
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
            self._keeping.clear()

    def abandon(self, reason: str) -> None:
        """Leave at once, without exchanging anything more. Works twice.

        The hub gives up this member's place; with a checkpoint `vanish` keeps it.
        """
        if not self._closed:
            self._closed = True
            self.telemeter.say()
            self._driver.leave(" ".join(reason.split())[:256])
            self._close_files(reason, done=reason == "done")

    def vanish(self) -> None:
        """End as if the power had gone: without a word, to go on from the checkpoint. Works
        twice."""
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
        """End because that was asked for: with a checkpoint to come back, otherwise for good. Wait
        for nothing."""
        # In the middle of a step, what was drawn for its gradient is gone: an earlier checkpoint is
        # exact, this state is not. After draining, all has been contributed.
        driver = self._driver
        is_whole = not driver.is_drained and not driver.is_mid_step
        if self._keeping is not None:
            if is_whole:
                self._keeping.save(driver, self._request)
            self.vanish()
            return
        if is_whole and self.half.local_steps:
            driver.submit_rest()
        self.abandon("it was asked to stop")

    @contextlib.contextmanager
    def fleet_model(self) -> Iterator[None]:
        """Within: the model holds the base, which all members share, not this member's own
        progress.

        For evaluation and for saving. Afterwards the model has the bits it had, whatever its
        dtype: looking changes nothing in training. With synchronous SGD the two are the same.
        """
        began = self._driver.clock()
        try:
            if self.half.base is self.flat.params:
                yield
                return
            with self.flat.holding(self.half.base):
                yield
        finally:
            self.eval_s += self._driver.clock() - began

    def traffic(self) -> Traffic:
        """Bytes at the socket, headers and acknowledgements of messages included."""
        return self._driver.traffic()

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
            self.vanish()  # the process is about to end: it can go on from its checkpoint
        else:
            self.abandon(f"{type(error).__name__}: {error}")


def _described(request: Request, flat: Flat) -> Request:
    """With the tensors of a model, those that it trains and those that it does not."""
    digest = layouts.digest(flat.description, flat.fixed)
    return replace(request, model=digest, layout=flat.description, fixed_tensors=flat.fixed_tensors)


def _enter(
    exchange: Exchange, flat: Flat, request: Request, keeping: Keeping | None, saved: Saved | None
) -> tuple[Entry, Saved | None]:
    """Come back as who this member was, or join as a newcomer, whose checkpoint is then None."""
    if saved is not None and keeping is not None:
        try:
            past = past_of(saved, flat.elements)
            return exchange.join(request, flat.params, 0, past), saved
        except Refused as refused:
            if refused.code != "session":
                raise
            aside = keeping.set_aside()
            log.warning("%s; joining as a newcomer, %s is not used", refused.message, aside)
    return exchange.join(request, flat.params, checksum(flat.params)), None


def _check_weight(weight: float) -> None:
    if not isinstance(weight, Real) or not 1e-9 <= weight <= 1e15:
        raise ConfigError(
            f"weight = {weight!r}", "allowed are 1e-9 to 1e15: how many samples this member holds"
        )


def _check_processor() -> None:
    if flushes_tiny():
        raise ConfigError(
            "this thread takes float32 below 1.2e-38 for 0, so that its base would not be the "
            "others' bit for bit",
            "torch.set_flush_denormal(False), and no library built with -ffast-math",
        )


def _check_step(optimizer: Stepper) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS computes the loss again within its step, which a member cannot",
            "use adam or sgd",
        )


def _check_optimizer(optimizer: Stepper, entry: Entry) -> None:
    wants_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    if wants_sparse and not find(entry.strategy).moves_params:
        raise ConfigError(
            f"{entry.strategy} exchanges gradients as dense vectors, and SparseAdam takes none",
            "use adam, or a strategy that exchanges displacements (dga, fedavg)",
        )


def _check_statistics(flat: Flat, entry: Entry) -> None:
    if flat.trained < flat.elements and not find(entry.strategy).moves_params:
        raise ConfigError(
            f"{entry.strategy} exchanges gradients, and statistics have none",
            "buffers='local', or a strategy that exchanges displacements (dga, fedavg)",
        )


def _check_masks(keeping: Keeping | None, masked: bool) -> None:
    if keeping is not None and masked:
        raise ConfigError(
            "a member whose contributions are masked keeps no checkpoint",
            "its keys must not outlive it: leave out the checkpoint, or strategy.secure",
        )


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


def bind(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    fixed: str = "equal",
    buffers: str = "local",
) -> FlatModel:
    """The model as flat vectors. ConfigError for an optimizer that would train other tensors.

    `fixed`: what is not trained is "equal" on all members, and compared, the "first" member's, or
    each member's "own".
    `buffers`: running statistics are exchanged like parameters ("mean"), or "local".
    """
    if buffers not in BUFFERS:
        raise ConfigError(f"buffers = {buffers!r}", f"allowed are {' and '.join(BUFFERS)}")
    if fixed not in FIXED:
        raise ConfigError(f"fixed = {fixed!r}", f"allowed are {', '.join(FIXED)}")
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not trained <= known:
        raise ConfigError(
            f"the optimizer lacks {len(trained - known)} of the model's {len(trained)} parameters",
            "make it from model.parameters(), or freeze what is not trained",
        )
    return FlatModel(model, fixed=fixed, statistics=buffers == "mean")
