"""The local work of many simulated members at once: their models are rows of matrices.

`torch.func.vmap` computes the gradients of a block of rows together, in worker threads while the
event loop goes on; those of a model with convolutions are computed row by row there. Rounding
differs from single members in the last bits. Which rows are computed together depends on virtual
time only, so the result does not depend on the machine's cores.

What happens to a row, step by step:

    `backward`        its next steps are requested; the block starts as soon as all its rows have
                      asked, or one of them needs its result
    in a worker       its gradient is computed, and the optimizer steps the row (`steps_too`)
    `pull_params`     waits for the worker; then the row is its member's

If the strategy adjusts gradients (`Strategy.adjusts_gradient`), a worker must not step: the half's
`before_step` comes between the gradient and the step. Then a request is for one gradient, and each
member steps its own row.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import heapq
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from edgetrain.exchange.member.driver import Flat, Stepper, in_place
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import tuning_of
from edgetrain.jobs.optimizers import ELEMENTWISE
from edgetrain.jobs.resolved import Resolved
from edgetrain.strategies import find
from edgetrain.tasks import Task
from edgetrain.tasks.draws import (
    DRAWING,
    drawn_by,
    figures_of,
    model_of,
    seed_generators,
    seed_step,
)  # fmt: skip
from edgetrain.tasks.flat import FlatModel, with_parameters
from edgetrain.tasks.layerwise import LAYER_WISE, LayerWise
from edgetrain.tasks.protocol import batches_from, is_counted
from edgetrain.tasks.vmapped import LossModule, batchable_attention
from edgetrain.tasks.work import Evaluation, Local, optimizer_for
from edgetrain.vectors.vector import Vector


class RowDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within: an operation of torch that draws is done row by row, each with its own state.

    `states` are those of torch's generator, one a row; they are replaced as numbers are drawn. The
    rows come first in what is drawn, as torch.func.vmap lays them. RuntimeError where they do not.
    """

    def __init__(self, states: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._states = states

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        sizes = [each.shape if isinstance(each, Tensor) else each for each in args]
        first = {tuple(size[:1]) for size in sizes if isinstance(size, Sequence)}
        if first != {(len(self._states),)}:
            raise RuntimeError(f"{func} does not draw row by row")
        found: list[Tensor] = []
        for row, state in enumerate(self._states):
            own = (
                each[row] if isinstance(each, Tensor)
                else each[1:] if isinstance(each, Sequence) else each
                for each in args
            )  # fmt: skip
            with DRAWING:
                torch.set_rng_state(state)
                found.append(func(*own, **(kwargs or {})))
                self._states[row] = torch.get_rng_state()
        return args[0] if func._schema.is_mutable else torch.stack(found)


BLOCK = 256
"""Rows in a block, whose gradients are computed together."""

GOING_BLOCK = 32
"""The same where members come and go. A cohort is small: more blocks keep more cores busy."""

SINGLE_BLOCK = 8
"""The same where a block's rows are computed one after the other."""

CONVOLUTIONS = 3e7
"""Floating point operations of a batch's convolutions, forward, from which on rows are computed one
after the other. With weights of each row they are grouped ones: on a core they took 0.3 times as
long as row by row at 2e6, 0.7 to 0.9 times at 8e6, 1.2 times at 2.5e7, 1.7 times at 1e8."""

TOLERANCE = 1e-3
"""Relative difference between a batched gradient and a single one that counts as rounding."""


def why_not_batched(task: Task, job: Job) -> str | None:
    """Why this job's members cannot be batched, found by trying; None if they can."""
    if find(job.strategy.name).deals:
        return "the hub hands out slices, one at a time"
    if job.privacy.unit == "example":
        return "privacy of examples takes the gradient of each of them"
    name = str(job.train.optimizer.get("name", "")).lower()
    if name not in ELEMENTWISE and name not in LAYER_WISE:
        return f"optimizer '{name}' does not work element by element"
    if job.train.optimizer.get("groups") or getattr(task, "optimizer_groups", []):
        return "the optimizer has groups of parameters"
    if job.train.accumulate > 1 and is_counted(task):
        return "the task says what counts of each batch that is added up"
    model = model_of(task, job.seed)
    parameters = list(model.parameters())
    if job.strategy.personal:
        return "the model has layers that each member keeps for itself"
    if any(p.dtype is not torch.float32 for p in parameters):
        return "the model has parameters that are not float32"
    if any(not p.requires_grad for p in parameters):
        return "the model has frozen parameters"
    if any(True for _ in model.buffers()):
        return "the model has buffers, which each member keeps for itself"
    if len(parameters) != len(list(model.named_parameters(remove_duplicate=False))):
        return "the model has tied parameters"
    seed_generators(job.seed)
    batch = next(batches_from(task, 0, job.fleet.members, job.train.batch, job.seed))
    flat = FlatModel(copy.deepcopy(model))
    single = copy.deepcopy(model)
    if once := drawn_by(lambda: task.loss(single, batch)) - {"torch"}:
        return f"the loss draws from {once.pop()}'s generator, once for all members"
    seed_generators(job.seed)
    state = torch.get_rng_state()
    task.loss(single, batch).backward()  # type: ignore[no-untyped-call]
    wanted = torch.cat([p.grad.reshape(-1) for p in single.parameters() if p.grad is not None])
    try:
        params = torch.from_numpy(flat.params).repeat(2, 1)
        grads = torch.zeros_like(params)
        seed_generators(job.seed)
        data = batches_of(task, job)
        draw = next(data.draws(0, job.fleet.members, job.train.batch, job.seed))
        with batchable_attention():
            _Stacked(task, model, flat, data).backward(params, grads, [draw, draw], [state, state])
    except Exception as error:  # whatever a user's model does, one by one is the answer
        return f"torch.func.vmap: {' '.join(str(error).split())[:120]}"
    worst = float((grads - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))
    return None if worst <= TOLERANCE else f"batched gradients differ by {worst:.1e}"


def convolves(task: Task, job: Job) -> bool:
    """Whether a batch has CONVOLUTIONS or more, for which one row after the other is faster."""
    from torch.utils.flop_counter import FlopCounterMode

    model = model_of(task, job.seed)
    batch = next(batches_from(task, 0, job.fleet.members, job.train.batch, job.seed))
    with FlopCounterMode(display=False) as counter:
        task.loss(model, batch)
    found = counter.get_flop_counts()["Global"]
    return bool(sum(found[each] for each in found if "convolution" in str(each)) >= CONVOLUTIONS)


@runtime_checkable
class Batches(Protocol):
    """A task's batches in two steps: what members draw, and the tensors of many draws at once."""

    def draws(self, member: int, members: int, batch: int, seed: int) -> Iterator[Any]:
        """Endless draws of one member, the same as its batches."""

    def gather(self, draws: list[Any]) -> tuple[Tensor, ...]:
        """The batches of these draws, stacked: [len(draws), batch, …]."""


class _Drawn:
    """The batches of a task that knows no draws: a draw is the batch itself."""

    def __init__(self, task: Task, job: Job) -> None:
        self.draws = functools.partial(
            batches_from, task, steps=job.train.steps, accumulate=job.train.accumulate
        )

    def gather(self, draws: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return tuple(torch.stack(parts) for parts in zip(*draws, strict=True))


def batches_of(task: Task, job: Job) -> Batches:
    """The task's own draws, where it has them (`draws` and `gather`, see Classification)."""
    return task if isinstance(task, Batches) else _Drawn(task, job)


class _Stacked:
    """Computes gradients of several rows in one call. Not thread-safe: it changes its module."""

    def __init__(self, task: Task, model: nn.Module, flat: FlatModel, data: Batches) -> None:
        self._layout, self._data = flat.layout, data
        module = LossModule(task, copy.deepcopy(model))

        def loss(parameters: dict[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
            return torch.func.functional_call(module, parameters, batch)  # type: ignore[no-any-return]

        self._losses = torch.func.vmap(loss, in_dims=(0, 0), randomness="different")

    def backward(
        self, params: Tensor, grads: Tensor, draws: list[Any], states: list[Tensor]
    ) -> list[float]:
        """Overwrite `grads` [rows, elements] with the gradients at `params`; the rows' losses. The
        `states` are RowDraws's; []: the loss draws nothing."""
        rows = params.shape[0]
        leaves = {}
        for name, start, shape in self._layout:
            stop = start + torch.Size(shape).numel()
            leaf = params[:, start:stop].view(rows, *shape).detach().requires_grad_()
            leaves[f"model.{name}"] = leaf
        batches = self._data.gather(draws)
        with RowDraws(states) if states else contextlib.nullcontext():
            losses = self._losses(leaves, batches)
        found_grads = torch.autograd.grad(losses.sum(), list(leaves.values()))
        torch.cat([grad.reshape(rows, -1) for grad in found_grads], 1, out=grads)
        found: list[float] = losses.detach().tolist()
        return found


class _Single:
    """The same row by row: as a member alone, but for kernels that round by where tensors lie."""

    def __init__(self, task: Task, model: nn.Module, flat: FlatModel, data: Batches) -> None:
        self._task, self._model, self._data = task, copy.deepcopy(model), data
        named = dict(self._model.named_parameters())
        self._pieces = [(named[name], start, shape) for name, start, shape in flat.layout]

    def backward(
        self, params: Tensor, grads: Tensor, draws: list[Any], states: list[Tensor]
    ) -> list[float]:
        """As _Stacked's."""
        return [
            self._row(row, params[row], grads[row], draw, states) for row, draw in enumerate(draws)
        ]

    def _row(
        self, row: int, params: Tensor, grads: Tensor, draw: Any, states: list[Tensor]
    ) -> float:
        leaves = []
        for leaf, start, shape in self._pieces:
            leaf.data = params[start : start + leaf.numel()].view(shape)
            leaves.append(leaf)
        batch = tuple(each[0] for each in self._data.gather([draw]))
        with DRAWING if states else contextlib.nullcontext():  # one generator for all threads
            if states:
                torch.set_rng_state(states[row])
            loss = self._task.loss(self._model, batch)
            if states:
                states[row] = torch.get_rng_state()
        found = torch.autograd.grad(loss, leaves)
        torch.cat([grad.reshape(-1) for grad in found], out=grads)
        return float(loss.detach())


class ModelRow:
    """One member's model: a row of the matrix.

    Its vectors are views of it. They are up to date after `pull_params` or `pull_gradient`, which
    wait for the worker.
    """

    is_storage = False
    fixed, fixed_tensors = "", None
    """Models with frozen parameters or buffers are not batched."""

    def __init__(self, params: Vector, gradient: Vector, like: FlatModel) -> None:
        self.params, self.gradient = params, gradient
        self.elements, self.description, self.layout = like.elements, like.description, like.layout
        self.trained, self.place = like.elements, (0, 0)

        self.pending: Callable[[], object] | None = None
        """Waits for the steps that were requested; None: there are none."""

    def pull_params(self) -> None:
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending()

    pull_gradient = pull_params

    def holding(self, vector: Vector) -> contextlib.AbstractContextManager[None]:
        self.pull_params()
        return in_place(self.params, vector)

    def push_params(self) -> None:
        """See Flat: nothing to do."""

    def push_gradient(self, zeros_are_none: bool = False) -> None:
        """See Flat: nothing to do; gradients of rows are never None."""


class _Block:
    """Consecutive members whose gradients are computed together: as soon as all of them have asked,
    or one of them needs its result."""

    def __init__(
        self,
        stacked: _Stacked | _Single,
        rows: list[Tensor],
        matrix: tuple[Tensor, Tensor],
        optimizer: torch.optim.Optimizer,
        steps_too: bool,
        pool: ThreadPoolExecutor,
        job: Job,
        draws: bool,
    ) -> None:
        """`draws`: whether each member draws numbers."""
        self._stacked, self._rows, self._optimizer = stacked, rows, optimizer
        self._params, self._grads = matrix
        self._tuning, self._rate = tuning_of(job), float(optimizer.param_groups[0]["lr"])
        self._accumulate, self._seed, self._draws = job.train.accumulate, job.seed, draws
        self._members = [-1] * len(rows)
        self._live = len(rows)
        """Rows that have a member, or are to have one."""
        self._begin_all: Callable[[], None] | None = None
        self.param_groups = optimizer.param_groups
        self.taken = [0] * len(rows)
        """The number of each row's next step in the job."""
        self.steps_too, self._pool = steps_too, pool
        self.is_over = False
        """Nobody waits for what workers have not computed yet."""
        self._asked: list[int] = []
        self._work: list[tuple[Iterator[Any], int]] = []
        self._answer: Future[list[list[float]]] | None = None
        self._last: Future[list[list[float]]] | None = None

    def ask(self, row: int, draws: Iterator[Any], count: int) -> Callable[[], list[float]]:
        """Request the next `count` steps of a row, or its next gradient without `steps_too`.

        Returns a function that waits for them and returns their losses. The worker advances
        `draws`: nobody else may until it is done.
        """
        if self._answer is None:
            self._answer = Future()
        answer, place = self._answer, len(self._asked)
        self._asked.append(row)
        self._work.append((draws, count))
        if len(self._asked) == self._live:
            self._begin()

        def losses() -> list[float]:
            if self._answer is answer and self._begin_all is not None:
                self._begin_all()
            elif self._answer is answer:
                self._begin()
            return answer.result()[place]

        return losses

    def _begin(self) -> None:
        answer, asked, work = self._answer, self._asked, self._work
        assert answer is not None
        self._answer, self._asked, self._work = None, [], []
        before, self._last = self._last, answer

        def work_in_turn() -> None:
            try:
                if before is not None:  # the same matrix and module: one after the other
                    before.exception()
                answer.set_result(self._take_steps(asked, work))
            except BaseException as error:
                answer.set_exception(error)

        self._pool.submit(work_in_turn)

    def _take_steps(
        self, asked: list[int], work: list[tuple[Iterator[Any], int]]
    ) -> list[list[float]]:
        losses: list[list[float]] = [[] for _ in asked]
        for turn in range(max(count for _, count in work)):
            if self.is_over:
                break
            here = [place for place, (_, count) in enumerate(work) if count > turn]
            found = self._take_step([asked[p] for p in here], [work[p][0] for p in here])
            for place, loss in zip(here, found, strict=True):
                losses[place].append(loss)
        return losses

    def _take_step(self, asked: list[int], draws: list[Iterator[Any]]) -> list[float]:
        """One step of these rows, or one gradient; the losses."""
        first, count = asked[0], len(asked)
        if asked == list(range(first, first + count)):
            here = slice(first, first + count)
            losses = self._backward(asked, self._params[here], self._grads[here], draws)
        else:
            chosen = torch.tensor(asked)
            grads = torch.empty(count, self._params.shape[1])
            losses = self._backward(asked, self._params[chosen], grads, draws)
            self._grads[chosen] = grads
        if self.steps_too:
            self.step(asked)
        return losses

    def _drawn(
        self, rows: list[int], draws: list[Iterator[Any]]
    ) -> tuple[list[list[Any]], list[Tensor]]:
        """The next draws of these rows for each batch of a step; then the rows' states of torch's
        generator, if they draw numbers."""
        of_rows, states = list[list[Any]](), list[Tensor]()
        for row, own in zip(rows, draws, strict=True):
            if not self._draws:
                of_rows.append(list(islice(own, self._accumulate)))
                continue
            with DRAWING:
                seed_step(self._seed, self._members[row], self.taken[row])
                of_rows.append(list(islice(own, self._accumulate)))
                states.append(torch.get_rng_state())
        return [list(batch) for batch in zip(*of_rows, strict=True)], states

    def _backward(
        self, rows: list[int], params: Tensor, grads: Tensor, draws: list[Iterator[Any]]
    ) -> list[float]:
        """Overwrite `grads` with the mean over the batches of a step; the mean losses."""
        (first, *others), states = self._drawn(rows, draws)
        losses = self._stacked.backward(params, grads, first, states)
        if not others:
            return losses
        found, part = torch.tensor(losses), torch.empty_like(grads)
        for each in others:
            losses = self._stacked.backward(params, part, each, states)
            grads += part
            found += torch.tensor(losses)
        grads /= self._accumulate
        means: list[float] = (found / self._accumulate).tolist()
        return means

    def step(self, rows: list[int]) -> None:
        tuning, group = self._tuning, self._optimizer.param_groups[0]
        if tuning.clip:
            for row in rows:
                torch.nn.utils.clip_grad_norm_([self._rows[row]], tuning.clip)
        numbers = {0} if tuning.factor is None else {self.taken[row] for row in rows}
        for step in sorted(numbers):
            chosen = rows
            if tuning.factor is not None:
                chosen = [row for row in rows if self.taken[row] == step]
                group["lr"] = self._rate * tuning.factor(step)
            group["params"] = [self._rows[row] for row in chosen]
            self._optimizer.step()
            for row in chosen:
                self.taken[row] += 1

    def vectors(self, row: int) -> tuple[Vector, Vector]:
        """A row's parameters and gradient, float32 [elements], as views of the matrices."""
        params: Vector = self._params[row].numpy()
        gradient: Vector = self._grads[row].numpy()
        return params, gradient

    def come_and_go(self, begin_all: Callable[[], None]) -> None:
        """Have rows without members from now on. `begin_all` begins what has been asked of all
        blocks: called where a member needs its result before all others have asked."""
        self._begin_all, self._live = begin_all, 0

    def begin_asked(self) -> None:
        """Begin what has been asked for, if anything has."""
        if self._asked:
            self._begin()

    def release(self, row: int) -> None:
        """The row has no member until it is renewed."""
        self._members[row] = -1
        self._live -= 1

    def renew(self, row: int, member: int, initial: Tensor) -> None:
        """Put a fresh member into a row: first parameters, no optimizer state."""
        self._live += self._begin_all is not None and self._members[row] < 0
        self._members[row] = member
        if row in self._asked:  # by the member that lost its power
            self._begin()
        if self._last is not None:
            self._last.exception()
        self._optimizer.state.pop(self._rows[row], None)
        self.taken[row] = 0
        with torch.no_grad():
            self._rows[row].copy_(initial)


class _RowOptimizer:
    """The optimizer of one row. With `steps_too` the block's worker has stepped already."""

    def __init__(self, block: _Block, row: int, steps_too: bool) -> None:
        self._block, self._row, self._done = block, row, steps_too
        self.param_groups = block.param_groups

    def step(self) -> None:
        if not self._done:
            self._block.step([self._row])


class _RowWork:
    """The work of one row."""

    takes_many = True

    def __init__(
        self,
        block: _Block,
        row: int,
        draws: Iterator[Any],
        flat: ModelRow,
        evaluate: Callable[[Evaluation], dict[str, Any]],
    ) -> None:
        self._block, self._row, self._draws = block, row, draws
        self._flat, self._evaluate = flat, evaluate
        self._answers: deque[Callable[[], float]] = deque()

    def backward(self, ahead: int = 0) -> Callable[[], float]:
        """See Local. Requests this step and the `ahead` next ones at once, if a worker steps."""
        if not self._answers:
            count = ahead + 1 if self._block.steps_too else 1
            losses = self._block.ask(self._row, self._draws, count)
            self._flat.pending = losses
            self._answers.extend(functools.partial(_item, losses, i) for i in range(count))
        return self._answers.popleft()

    def evaluate(self, by: Evaluation = figures_of) -> dict[str, Any]:
        return self._evaluate(by)


def _item(losses: Callable[[], list[float]], place: int) -> float:
    return losses()[place]


class Rows:
    """Members as rows of matrices [BLOCK, elements]; where they come and go (`goes`), whoever is
    there, in [GOING_BLOCK, elements]. `single`: gradients are computed row by row."""

    def __init__(
        self, task: Task, found: Resolved, goes: bool = False, single: bool = False
    ) -> None:
        self._task, self._job, self._data = task, found.job, batches_of(task, found.job)
        job = found.job
        self._model = model_of(task, job.seed)
        plain = copy.deepcopy(self._model)
        draws = task.batches(0, job.fleet.members, job.train.batch, job.seed)
        self._draws = bool(drawn_by(lambda: task.loss(plain, next(draws))))
        self._flat = FlatModel(self._model)
        members = job.fleet.members
        self._initial = torch.from_numpy(self._flat.params.copy())
        # A gradient that the strategy adjusts, or replaces, must not be stepped with before it has.
        self._steps_too = not found.strategy.adjusts_gradient
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, "gradients", self._one_thread)
        self._plain, self._goes = plain, goes
        self._places: dict[int, tuple[int, int]] = {}
        """Where members are; of those that all have a place of their own: see `_place`."""
        self._free: list[tuple[int, int]] = []
        self._positions: dict[int, Iterator[Any]] = {}
        """Positions of departing members in their data."""
        self._kind = _Single if single else _Stacked
        self._most = most = SINGLE_BLOCK if single else GOING_BLOCK if goes else BLOCK
        self._blocks = [
            self._block(min(most, members - start))
            for start in range(0, 0 if goes else members, most)
        ]
        self.reason = f"members batched with torch.func.vmap, {min(most, members)} at once"
        if single:
            self.reason = f"members in blocks of {most}, row by row for its convolutions"

        self._attention = contextlib.ExitStack()
        self._attention.enter_context(batchable_attention())

    def begin_at(self, index: int, step: int) -> None:
        number, row = self._places.get(index) or divmod(index, self._most)
        self._blocks[number].taken[row] = step

    def release(self, flat: Flat, index: int) -> None:
        """The member with this index goes until it is made anew; `flat` was its model."""
        assert isinstance(flat, ModelRow)
        number, row = flat.place
        self._blocks[number].release(row)
        heapq.heappush(self._free, flat.place)

    def _place(self, index: int) -> tuple[int, int]:
        if not self._goes:
            return divmod(index, self._most)
        if not self._free:
            self._blocks.append(block := self._block(self._most))
            block.come_and_go(self._begin_all)
            self._free = [(len(self._blocks) - 1, row) for row in range(self._most)]
        place = self._places[index] = heapq.heappop(self._free)
        return place

    def _begin_all(self) -> None:
        for block in self._blocks:
            block.begin_asked()

    def model_at(self, base: Vector) -> nn.Module:
        return with_parameters(self._model, base)

    def close(self) -> None:
        for block in self._blocks:
            block.is_over = True
        self._pool.shutdown(cancel_futures=True)
        self._attention.close()

    @staticmethod
    def _one_thread() -> None:
        torch.set_num_threads(1)

    def _block(self, members: int) -> _Block:
        # A matrix for each block: torch's autograd watches a matrix for changes as a whole.
        params = torch.zeros(members, self._flat.elements)
        grads = torch.zeros(members, self._flat.elements)
        rows = list(params)
        for row, grad in zip(rows, grads, strict=True):
            row.grad = grad
        # All rows in one call of torch; by default it is one of Python for each row on a CPU.
        settings = self._job.train.optimizer
        if str(settings.get("name", "")).lower() not in LAYER_WISE:
            settings = {"foreach": True, **settings}
        optimizer = optimizer_for(_Parameters(rows), settings)
        if isinstance(optimizer, LayerWise):
            optimizer.pieces = [
                (start, start + torch.Size(shape).numel()) for _, start, shape in self._flat.layout
            ]
        stacked = self._kind(self._task, self._plain, self._flat, self._data)
        return _Block(
            stacked, rows, (params, grads), optimizer, self._steps_too, self._pool, self._job,
            self._draws,
        )  # fmt: skip

    def member(self, index: int, taken: int = 0) -> tuple[Flat, Stepper, Local]:
        """A fresh member, or one that goes and has `taken` steps."""
        number, row = place = self._place(index)
        block = self._blocks[number]
        block.renew(row, index, self._initial)
        params, gradient = block.vectors(row)
        flat = ModelRow(params, gradient, self._flat)
        flat.place, job = place, self._job
        draws = self._positions.get(index)
        if draws is None:
            draws = self._data.draws(index, job.fleet.members, job.train.batch, job.seed)
        if self._goes:
            self._positions[index] = draws
        work = _RowWork(block, row, draws, flat, functools.partial(self._evaluate, params))
        return flat, _RowOptimizer(block, row, self._steps_too), work

    def _evaluate(self, params: Vector, by: Evaluation) -> dict[str, Any]:
        self._flat.params[:] = params
        return by(self._task, self._model)


class _Parameters(nn.Module):
    """Rows as a module's parameters, for `optimizer_for`."""

    def __init__(self, rows: list[Tensor]) -> None:
        super().__init__()
        self._listed = rows
        for row in rows:
            row.requires_grad_()

    def named_parameters(self, *unused: Any, **named: Any) -> Iterator[Any]:
        """The rows themselves, not copies."""
        return ((str(place), row) for place, row in enumerate(self._listed))
