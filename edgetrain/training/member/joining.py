"""The library's way in: `join`, then a training loop as it was, then `close`.

A member whose exchange is behind its optimizers' own steps (`hooks`). What every member does is in
`member`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from edgetrain.errors import ConfigError, EdgetrainError, refuse_first
from edgetrain.exchange.addresses import any_port_of, rotated, wait_for_route
from edgetrain.exchange.keys.credentials import credentials as credentials_for
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.member.link import OUTAGE_S, Link
from edgetrain.exchange.member.shared import SharedExchange
from edgetrain.exchange.messages import MAX_COUNT, NO_WEIGHT
from edgetrain.exchange.seam import Exchange, Request
from edgetrain.exchange.zeromq.standby_socket import member_end
from edgetrain.jobs.doubts import doubts
from edgetrain.jobs.job import DIRECT, Privacy
from edgetrain.tasks.fixed import Unexchanged
from edgetrain.tasks.flat import FlatModel
from edgetrain.training.member.hooks import StepHooks
from edgetrain.training.member.member import Member, bind, release_of
from edgetrain.training.member.optimizers import (
    Together,
    kept_copy,
    parameters_of,
    plain_optimizers,
)
from edgetrain.training.member.several import dialling

if TYPE_CHECKING:
    from edgetrain.exchange.member.checkpoint import Keep
    from edgetrain.jobs.resolved import Resolved
    from edgetrain.training.member.keeping import Keeping
    from edgetrain.training.member.state import Stateful

log = logging.getLogger("edgetrain")


def join(
    hub: str | Sequence[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
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
    frozen: str = "equal",
    buffers: str = "local",
    runs: str | Path | None = None,
    steps: int = 0,
    job_file: str | Path | None = None,
    personal: str | Sequence[str] = "",
) -> JoinedMember:
    """Join the hub at "tcp://host:port", or at one of several addresses, with a model.

    Until `close`, each `optimizer.step()` exchanges, in any caller; of several optimizers, in the
    order of their steps, the last one's step does. The hub chooses strategy, local steps, delay and
    codec. Parameters become views of one flat float32 vector and, except for the first member's,
    get the fleet's values. `weight`: number of the member's samples. `timeout_s`: seconds to try an
    unreachable hub (600 with a checkpoint). `job_file`: for `fleet.topology`.

    Connections to another machine are encrypted, with this machine's `keys` (a folder; None: the
    default) and the hub's key: from the enrolment, or `hub_key` (text or file). `insecure`: without
    encryption. `secure`: only a hub limited to sums, even a lying one (`honest_hub`: one known not
    to lie), and without a checkpoint (docs/how-to/secure-aggregation.md). `checkpoint` (a folder or
    an edgetrain.Keep) holds the member's own state: the optimizer's, the remainder of a lossy codec
    and the steps. A restarted process with the same folder and `name` continues after
    `member.steps` batches. `close` empties the folder. `state`: further objects for the checkpoint,
    with `state_dict` and `load_state_dict`, restored before `join` returns; then step a scheduler
    `while scheduler.last_epoch < member.begins_at`. `privacy` (an edgetrain.Privacy, unit "member")
    clips contributions and adds noise; without a checkpoint. `frozen`: frozen parameters and
    buffers (not statistics of normalisation) are "equal" on all members, the "first" member's, or
    each one's "own". `buffers` = "mean": the fleet averages running statistics. `runs`: a folder
    for a run folder. `steps`: length of the run, equal on all members. `personal`: tensors (names
    as "head.*") trained and kept here, never sent. Raises HubUnreachable, NetworkError, Refused,
    ConfigError.
    """
    _check_arguments(weight, runs, checkpoint is not None, bool(state), privacy, steps)
    found, optimizers = _job_of(job_file), plain_optimizers(optimizer)
    keep = _keep_in(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint
    reached = _reach_hub(hub, timeout_s, keep, name, job)
    shown = credentials_for(reached.hubs, hub_key, keys, insecure=insecure)
    keeping, release = _keeping(keep, name, model, optimizers, state or {}), release_of(privacy)
    flat, stepper = bind(model, optimizers, frozen, buffers, personal), Together(optimizers)
    request = Request("", name, weight, job, secure=secure, honest_hub=honest_hub, steps=steps)
    link, request = _way(reached, shown, keys, insecure, found, request)
    member = JoinedMember.join(link, flat, stepper, request, keeping=keeping, release=release)
    member.watch(model, buffers, None if frozen == "own" else Unexchanged(model), privacy)
    return _recorded(member.follow(flat, optimizers), runs)


def _keep_in(folder: str | Path) -> Keep:
    from edgetrain.exchange.member.checkpoint import Keep

    return Keep(Path(folder))


def _job_of(path: str | Path | None) -> Resolved | None:
    """The job of a file whose members reduce; None: without one. Raises ConfigError for another."""
    if path is None:
        return None
    from edgetrain.jobs.reading import load
    from edgetrain.jobs.rules import resolve

    found = resolve(load(path))
    if (topology := found.job.fleet.topology) != DIRECT:
        raise ConfigError(
            f"job_file = '{path}' has fleet.topology = '{topology}'",
            "only members that reduce need the file: fleet.topology = 'direct'; join without it",
        )
    return found


@dataclass(frozen=True)
class _Reached:
    """A hub that has answered."""

    hubs: list[str]
    """Its addresses, that one first."""
    via: str
    """The way there, as `route` says it."""
    patience_s: float
    """Seconds for which it is tried when it says nothing."""


def _way(
    reached: _Reached,
    shown: Credentials | None,
    keys: str | Path | None,
    insecure: bool,
    found: Resolved | None,
    request: Request,
) -> tuple[Exchange, Request]:
    """The exchange with the hub, and with all others if it is the lead of several; or that of a
    member that may reduce, of the job `found`: it listens where the hub sees it. And what to join
    with: all members have that job, because each makes reducers by it."""
    end, patience_s = member_end(reached.hubs, shown), reached.patience_s
    if found is None:
        lead = Link(end, time.monotonic, patience_s)
        dial = dialling(shown, keys, insecure, patience_s, OUTAGE_S)
        return SharedExchange([lead], dial), request
    from edgetrain.training.member.direct import peer_exchange  # and with it all of a hub

    way, address = peer_exchange(found, end, shown, any_port_of(reached.via), patience_s)
    return way, replace(request, job=request.job or found.job.digest(), address=address)


def _keeping(
    keep: Keep | None,
    name: str,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, Stateful],
) -> Keeping | None:
    """What goes into checkpoints: the first optimizer, and the others with the user's `state`."""
    if keep is None:
        return None
    from edgetrain.training.member.keeping import keeping_of

    first, *rest = optimizers
    others = {f"optimizer {number}": each for number, each in enumerate(rest, 2)}
    if taken := sorted(set(others) & set(state)):
        raise ConfigError(f"state['{taken[0]}'] is an optimizer of this member's", "another name")
    return keeping_of(keep, name, model, first, others={**state, **others})


def _recorded(member: JoinedMember, runs: str | Path | None) -> JoinedMember:
    try:
        if runs is not None:
            member.record(runs)
    except ConfigError as error:
        member.abandon(f"failed: {error}")
        raise
    return member


def _reach_hub(
    hub: str | Sequence[str], timeout_s: float, keep: Keep | None, name: str, job: str
) -> _Reached:
    """Return once one of the hub's addresses answers. Raises as `wait_for_route`."""
    hubs = [hub] if isinstance(hub, str) else list(hub)
    if not hubs:
        raise ConfigError("hub = []", "the address of the hub, as tcp://hub.local:5555, or several")
    trained = False
    if keep is not None:
        from edgetrain.exchange.member.checkpoint import MEMBER, has_checkpoint

        trained = has_checkpoint(keep.folder, name or MEMBER, job)
    first, via = wait_for_route(hubs, timeout_s, OUTAGE_S if trained else 0.0)
    log.info("joining %s over %s", first, via)
    patience_s = max(timeout_s, OUTAGE_S) if trained else timeout_s
    return _Reached(rotated(hubs, first), via, patience_s)


def _check_arguments(
    weight: float,
    runs: str | Path | None,
    keeps: bool,
    has_state: bool,
    privacy: Privacy | None,
    steps: int,
) -> None:
    """ConfigError for a weight that cannot be, a folder that cannot be written, and what does not
    go with a checkpoint, or not without one."""
    refuse_first(
        (not isinstance(weight, Real) or not NO_WEIGHT < weight <= 1e15, f"weight = {weight!r}",
         "allowed are 1e-9 to 1e15: how many samples this member holds"),
        (not isinstance(steps, int) or not 0 <= steps <= MAX_COUNT, f"steps = {steps!r}",
         "how many steps the loop will take; 0: not known"),
    )  # fmt: skip
    if runs is not None:
        from edgetrain.runs.folder import check_room

        check_room(runs)
    refuse_first(
        (has_state and not keeps, "`state` is for a checkpoint", "name its folder: checkpoint=…")
    )
    if keeps:
        from edgetrain.jobs.on_member import refuse_checkpoint

        refuse_checkpoint(privacy.unit if privacy is not None else "none")


class JoinedMember(Member):
    """A member in a loop of one's own: every step of its optimizers exchanges, until `close`.

    `step` is for loops that do not step the optimizers themselves.
    """

    _hooks: StepHooks
    _model: FlatModel
    watched: Unexchanged | None = None
    """The unchanged part of the model, until it is reported; None: it may change."""
    check_noise: Callable[[], None] = staticmethod(lambda: None)
    """Raises ConfigError once something would leave without the noise that it should have."""
    _left: list[int]
    """How often parameters had been written to when the last step ended."""
    _told_copy = False

    def watch(
        self,
        model: torch.nn.Module,
        buffers: str,
        watched: Unexchanged | None,
        privacy: Privacy | None,
    ) -> None:
        """From now on notice what of the model changes on this member alone."""
        self.watched = watched
        if privacy is not None and privacy.unit != "none":
            from edgetrain.tasks.weights import unnoised_check

            self.check_noise = unnoised_check(model, buffers == "mean", privacy.unit)

    def follow(self, model: FlatModel, optimizers: Sequence[torch.optim.Optimizer]) -> Self:
        """Exchange at every step of these optimizers, of this model, from now on; this member.
        Raises ConfigError, and leaves, where that cannot be."""
        driver, several = self._driver, len(optimizers) > 1
        if several and not self.half.moves_params and not driver.entry.is_exact:
            self.abandon("failed: several optimizers")
            raise ConfigError(
                f"{len(optimizers)} optimizers, {driver.entry.strategy} and a lossy codec: what it "
                "leaves out of the gradient of one would be lost in the exchange of the next",
                "one optimizer with parameter groups; or codec fp32, or dga or fedavg",
            )

        for doubt in doubts(driver.strategy, [type(each).__name__ for each in optimizers]):
            log.warning("%s: %s", self.name, doubt)
        if any(p.dtype is torch.float64 for each in optimizers for p in parameters_of(each)):
            log.warning(
                "%s: float64 parameters are exchanged, and kept between rounds, as float32",
                self.name,
            )

        def begin(optimizer: torch.optim.Optimizer, *, adds: bool) -> None:
            self._check_open()
            if not (several and self.half.adjusts_gradient):
                self._exchange(lambda: driver.begin_step(adds=adds))
                return
            with model.only(parameters_of(optimizer)):
                self._exchange(lambda: driver.begin_step(adds=adds))

        self._began = self.steps
        self._model, self._hooks = model, StepHooks(optimizers, begin, self._end_step)
        self._left = self._model.count_writes()
        return self

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizers, which exchanges; may wait for a reply. Returns what the last one's
        step returns.

        Call it where `optimizer.step()` stood, or leave that where it is: not both. Raises Stopped
        once that was asked for, when the member has gone.
        """
        self._check_open()
        return self._hooks.step(closure)

    def exchange_gradients(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make of this member's gradients what its optimizers step with: the members' mean, under
        `sync-sgd`. What the loop does before `step` (clipping, noise, a log of the norm) then sees
        that, as under DDP. The step does not exchange again. Nothing where the strategy leaves
        gradients alone (`dga`, `fedavg`).

        Call it once a step, on all members; with a GradScaler behind `unscale_`, with a closure in
        it. Of several `optimizers`: those whose gradients are there; (): all. May wait. Raises
        ConfigError for a second call in one step, EdgetrainError as `step` does.
        """
        self._check_open()
        if self.half.adjusts_gradient:
            self._hooks.exchange(plain_optimizers(optimizers or self._hooks.optimizers))

    @property
    def param_groups(self) -> NoReturn:
        """A GradScaler asks for them. It would not know that this is the optimizer whose gradients
        it has unscaled already, and unscale them twice: raises EdgetrainError."""
        raise EdgetrainError(
            "a member is no optimizer", "scaler.step(optimizer), and unscale_, too"
        )

    def wait_for_fleet(self) -> None:
        """Stay until no member takes steps any more: those left are contributed, then the others'
        rounds are followed without adding to them. `close` then leaves the same model everywhere,
        although members took unequal numbers of steps. Call it on all of them, after the last step.

        With a gradient strategy the optimizer steps with the others' gradients, at the learning
        rate that it has. ConfigError where contributions are masked.
        """
        self._check_open()
        if self._driver.entry.is_masked:
            raise ConfigError(
                "a member whose contributions are masked cannot wait for the fleet",
                "let all members take the same number of steps",
            )
        self._end_open_step()
        optimizers = self._hooks.optimizers

        def step() -> None:
            moved = {id(p) for o in optimizers for p in parameters_of(o) if p.grad is not None}
            of_all = (o for o in optimizers if moved <= set(map(id, parameters_of(o))))
            next(of_all, optimizers[0]).step()  # the one that the others step, too
            drop_gradients()

        def drop_gradients() -> None:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)

        drop_gradients()
        with self._hooks.paused():
            self._exchange(lambda: self._driver.wait_for_fleet(step))
        self._no_step = "this member has waited for the fleet: no step may follow"
        self._left = self._model.count_writes()

    def state_dict(self) -> dict[str, Any]:
        """The fleet's model as its `state_dict`: copies, each in memory of its own.

        For saving while training goes on. Until `close` the model's own tensors are views of one
        vector, with which `torch.save` of one layer writes all of them, and safetensors nothing.
        """
        with self.fleet_model():
            return self._model.state()

    def close(self) -> None:
        """Drain, then leave. The model is the fleet's, and an ordinary one again. Works twice.

        Raises EdgetrainError for a member that took no step: its loop steps another optimizer.
        """
        if self._closed:
            return
        self._end_open_step()
        self._report_changed()
        self._report_copies()
        if not (self.steps or self.begins_at):
            self.abandon("failed: it took no step")
            raise EdgetrainError(
                "this member took no step, and contributed nothing",
                "join with the optimizer that the loop steps",
            )
        # Of several optimizers, some may have stepped behind the one whose step ended the round.
        if len(self._hooks.optimizers) == 1 and self._model.count_writes() != self._left:
            log.warning(
                "%s: the parameters were changed after the last step, as load_best_model_at_end "
                "does: no other member has that, and models may end apart. Do it after close()",
                self.name,
            )
        super().close()
        self._give_back()
        driver = self._driver
        if (fewer := driver.rounds_with_fewer) and not self._no_step:
            log.warning(
                "%s: the fleet went on for %d rounds with fewer than its %d members. Models of "
                "members that left sooner lack them, unless these called wait_for_fleet()",
                self.name, fewer, driver.most_members,
            )  # fmt: skip

    def _end_step(self) -> None:
        super()._end_step()
        self._left = self._model.count_writes()
        if self.steps - self._began in (2, self.half.local_steps):  # a teacher follows the first
            self._report_changed()
            self._report_copies()

    def _report_copies(self) -> None:
        """Warn, once, of a state that is as good as the parameters, and that no reply reaches."""
        for optimizer in self._hooks.optimizers if self.half.moves_params else ():
            if not self._told_copy and (kept := kept_copy(optimizer)):
                self._told_copy = True
                log.warning(
                    "%s: '%s' in the state of %s is shaped like its parameter and near it: a copy "
                    "that members do not exchange and that replies do not reach, so that they may "
                    "end apart. Take an optimizer without one, or sync-sgd",
                    self.name, kept, type(optimizer).__name__,
                )  # fmt: skip

    def _report_changed(self) -> None:
        """Warn, once, of tensors that should be equal on all members and change on each. Leave, and
        raise ConfigError, where what changes would have no noise."""
        try:
            self.check_noise()
        except ConfigError as error:
            self.abandon(f"failed: {error}")
            raise
        if self.watched is not None and (changed := list(self.watched.changed())):
            self.watched = None
            log.warning(
                "%s: of frozen parameters and buffers, which members do not exchange, %d changed "
                "in training ('%s'): each member has its own. If that is meant, join with "
                "frozen='own'",
                self.name, len(changed), changed[0],
            )  # fmt: skip

    def _end_open_step(self) -> None:
        """Contribute what optimizers did since the last one's step ended a round, as a critic does
        behind the generator's last step."""
        if len(self._hooks.optimizers) == 1 or not self._driver.is_mid_step:
            return
        if self.half.moves_params and not self.half.steps_taken:
            self._end_step()

    def _give_back(self) -> None:
        """Leave the optimizers and the model as ordinary ones. Works twice."""
        self._hooks.remove()
        self._model.release()
