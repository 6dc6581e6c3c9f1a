"""A rank of a group as the training loop sees it: its work, and what it is a member of."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from edgetrain.errors import EdgetrainError
from edgetrain.exchange.member.driver import Exchanged
from edgetrain.exchange.member.telemetry import Sums
from edgetrain.exchange.transport import Traffic
from edgetrain.exchange.zeromq.tcp_counters import traffic_of_process
from edgetrain.tasks.draws import figures_of
from edgetrain.tasks.protocol import Task
from edgetrain.tasks.work import Evaluation
from edgetrain.training.servers.rank import Rank
from edgetrain.training.servers.snapshots import Snapshots
from edgetrain.vectors.vector import checksum

_SIGN = 1 << 63


def diverged(what: str, step: int) -> EdgetrainError:
    """The error of training with numbers that are not finite."""
    return EdgetrainError(
        f"{what} is not finite in step {step}: training has diverged",
        "a smaller learning rate, train.clip or precision = 'fp32', from an earlier snapshot",
    )


class RankProgress:
    def __init__(self, step: int) -> None:
        self.round, self.checksum = step, 0

    def quiet_steps(self) -> int:
        return 0


class RankWork:
    """See tasks.work.Local. All ranks call both methods together."""

    takes_many = False

    def __init__(self, task: Task, rank: Rank, progress: RankProgress) -> None:
        self._task, self._rank, self._progress = task, rank, progress

    def backward(self, ahead: int = 0) -> Callable[[], float]:
        """See Local. The loss is that of all ranks. EdgetrainError, before anything is stepped, if
        it is no number."""
        loss = self._rank.steps.backward()()
        if not math.isfinite(loss):
            raise diverged("the loss", self._progress.round + 1)
        return lambda: loss

    def evaluate(self, by: Evaluation = figures_of) -> dict[str, Any]:
        """See Local: of the whole model, on the leader; {} elsewhere."""
        held = self._rank.held
        model = held.gather()
        told = torch.zeros(1, dtype=torch.int64)
        if held.whole is not None:
            told[0] = checksum(held.whole.params) - _SIGN
        dist.broadcast(told, 0)
        self._progress.checksum = int(told[0]) + _SIGN
        return {} if model is None else by(self._task, model)


class RankMember:
    wait_s = exchange_s = 0.0
    """What a rank waits for its neighbours cannot be told from computing."""

    def __init__(self, rank: Rank, progress: RankProgress, snapshots: Snapshots) -> None:
        self._rank, self.half, self._snapshots = rank, progress, snapshots
        self.begins_at = self.steps = progress.round

    def step(self) -> None:
        self._rank.steps.step()
        self.steps += 1
        self.half.round = self.steps
        self._snapshots.keep_if_due(self.steps)

    def skip(self, steps: int) -> None:
        assert not steps

    def drain(self, *, to_the_end: bool = False) -> None:
        self._snapshots.wait()

    def fleet_model(self) -> contextlib.AbstractContextManager[None]:
        """There is only one model."""
        return contextlib.nullcontext()

    def observe_exchanges(self, observe: Callable[[Exchanged], None]) -> None:
        """A rank exchanges within torch, where nobody can look."""

    def account_with(self, sums: Callable[[], Sums]) -> None:
        """A group on its own has nobody to tell."""

    def traffic(self) -> Traffic:
        """Traffic of all connections of this process, those to ranks on the same machine
        included."""
        return traffic_of_process()
