"""Models and losses that a group of ranks may get wrong, the placements that they are tried on, and
what a group makes of each beside one process.

Every model is a small decoder with one oddity. Those of `TRACED` do not name their pieces, so that
pipelines of them are cut by torch's tracer.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import group_cases as cases
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from edgetrain.errors import EdgetrainError
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.placement.decision import Question, check, decide
from edgetrain.jobs.placement.question import question_of
from edgetrain.jobs.placement.search import TooLarge, evaluate
from edgetrain.jobs.placement.words import parse
from edgetrain.jobs.rules import resolve
from edgetrain.tasks.draws import model_of
from edgetrain.tasks.protocol import evaluating
from edgetrain.tasks.text import Block, Transformer
from edgetrain.tasks.work import optimizer_for
from edgetrain.training.servers.checking import check_group
from edgetrain.training.servers.rank import prepare_rank
from edgetrain.training.servers.rehearsing import problem_of, rehearsal
from edgetrain.training.servers.steps import batches_of

VOCABULARY, LENGTH, WIDTH, MASKED = 16, 8, 8, 15
MOST, NEAR = 1e-9, 1e-5
"""What is rounding in float64, and in models of the zoo that compute some of it in float32: DETR
in one process is 4.6e-6 from itself when it takes the same batches backwards."""
ZOO = "zoo "
"""How the names of subjects begin that are models of `zoo_models`."""
STEPS = 3

TWO = (
    "data=2", "data=2 microbatches=2", "data=2 shard=2 zero=1", "data=2 shard=2 zero=2",
    "data=2 shard=2 zero=3", "data=2 shard=2 zero=3 recompute=yes microbatches=2",
    "tensor=2", "tensor=2 norms=split", "sequence=2", "sequence=2 ulysses=2",
    "data=2 experts=2", "pipeline=2 microbatches=1", "pipeline=2 microbatches=4",
    "pipeline=2 schedule=interleaved microbatches=2",
    "pipeline=2 schedule=zero-bubble microbatches=4", "pipeline=2 schedule=zbv microbatches=4",
)  # fmt: skip
FOUR = (
    "data=2 shard=2 zero=3 pipeline=2 microbatches=2", "data=2 tensor=2",
    "pipeline=2 tensor=2 microbatches=2", "pipeline=4 microbatches=4",
    "data=2 shard=2 zero=2 sequence=2", "data=2 pipeline=2 schedule=zero-bubble microbatches=4",
)  # fmt: skip
PLACEMENTS = (*TWO, *FOUR)


# -- models ---------------------------------------------------------------------------------------


class Decoder(Transformer):
    """Tokens to scores of the next one; `blocks` say what is odd."""

    def __init__(self, blocks=None, experts=0, tied=False) -> None:
        super().__init__(LENGTH, WIDTH, 2, 3, tied, experts)
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        if not tied:
            self.scores = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if blocks is not None:
            self.blocks = nn.ModuleList(blocks)


class Traced(Decoder):
    """A decoder that does not say where it can be cut."""

    pieces = None

    def forward(self, text):
        hidden = self._embedded(text)
        for place, block in enumerate(self.blocks):
            hidden = block(hidden)
            if place == 1:
                hidden = self.between(hidden)
        return self._scored(self.norm(hidden))

    def between(self, hidden):
        """What happens to the output of its second block."""
        return hidden


class OddBlock(Block):
    """A block and something of its own."""

    def __init__(self, extra=None, after=None) -> None:
        super().__init__(WIDTH, 2)
        self.extra, self.after = extra, after

    def forward(self, hidden):
        found = super().forward(hidden)
        return found if self.after is None else self.after(self, found)


class MaskedBlock(Block):
    """Attention with a mask that all blocks have as one buffer."""

    def __init__(self, mask) -> None:
        super().__init__(WIDTH, 2)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, hidden):
        parts = self.queries_keys_values(self.before_attention(hidden))
        batch, length, _ = parts.shape
        query, key, value = parts.view(batch, length, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)
        hidden = hidden + self.attended(mixed.transpose(1, 2).reshape(batch, length, -1))
        return hidden + self.layers(self.before_layers(hidden))


class Running(nn.Module):
    """Takes a running mean away, which evaluation uses as it is, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(hidden.detach().mean((0, 1)), 0.1)
                self.calls += 1
        return hidden - self.mean


class OverPositions(nn.Module):
    """A norm of each sample's features over its positions."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden):
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)


class Reverse(torch.autograd.Function):
    """A gradient with the other sign."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Rounded(torch.autograd.Function):
    """Rounded to eighths; its gradient goes straight through."""

    @staticmethod
    def forward(ctx, x):
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Skipping(Traced):
    """The first block's output is added up again after the last one."""

    def forward(self, text):
        first = self.blocks[0](self._embedded(text))
        hidden = self.blocks[2](self.blocks[1](first))
        return self._scored(self.norm(hidden + first))


class Twice(Traced):
    """The second block is used two times, with the third between."""

    def forward(self, text):
        hidden = self.blocks[1](self.blocks[0](self._embedded(text)))
        return self._scored(self.norm(self.blocks[1](self.blocks[2](hidden))))


class Hooked(Traced):
    def between(self, hidden):
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: 0.5 * gradient)
        return hidden


class Turned(Traced):
    """What it passes on from block to block is not in order in memory, or has no memory of its
    own."""

    def forward(self, text):
        hidden = self._embedded(text)
        mask = hidden.new_ones(LENGTH).expand(len(text), LENGTH)
        for block in self.blocks:
            hidden = (block(hidden) * mask[..., None]).transpose(0, 1).contiguous().transpose(0, 1)
        return self._scored(self.norm(hidden))


class Reversed(Traced):
    def between(self, hidden):
        return hidden + 0.3 * Reverse.apply(hidden)


class Straight(Traced):
    def between(self, hidden):
        return Rounded.apply(hidden)


class OnDevice(Traced):
    """Makes a tensor where its input is."""

    def between(self, hidden):
        places = torch.arange(hidden.shape[1], device=hidden.device, dtype=hidden.dtype)
        return hidden + 0.01 * places[:, None]


class Body(nn.Module):
    """What a decoder has but its scores, none of it in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.first, self.second, self.norm = OddBlock(), OddBlock(), nn.LayerNorm(WIDTH)

    def forward(self, text):
        places = self.places(torch.arange(LENGTH))
        return self.norm(self.second(self.first(self.bytes(text) + places)))


class Bodied(nn.Module):
    """A body and a head with its weights, and `named` modules of the body under a second name."""

    def __init__(self, named=()) -> None:
        super().__init__()
        self.body, self.scores = Body(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scores.weight = self.body.bytes.weight
        for place, name in enumerate(named):
            setattr(self, f"again_{place}", self.body.get_submodule(name))

    def forward(self, text):
        return self.scores(self.body(text))


class Scaled(Decoder):
    """With scalars, one of which nothing uses, in a block and outside."""

    def __init__(self) -> None:
        super().__init__([OddBlock(nn.ParameterList([torch.tensor(0.7)]), _times) for _ in "123"])
        self.scale, self.unused = (nn.Parameter(torch.tensor(v)) for v in (1.3, 2.0))

    def forward(self, text):
        found = super().forward(text)
        return found if self.norm is None else found * self.scale.exp()


class Gathered(Decoder):
    """Its divided layers hand on whole results, and take whole inputs."""

    tensor_plan = {  # noqa: RUF012
        name: {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}[style]
        for name, style in Transformer.tensor_plan.items()
    }


class Chosen(Decoder):
    """Chooses positions by numbers that it sees: how large its tensors are, only those decide."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how = how

    def forward(self, text):
        found = super().forward(text)
        return found if self.norm is None else CHOICES[self.how](found, found > 0)


def _packed(hidden, chosen):
    lengths = chosen.any(-1).sum(1).clamp(1)
    packed = nn.utils.rnn.pack_padded_sequence(hidden, lengths, True, False)
    return hidden * nn.utils.rnn.pad_packed_sequence(packed, True)[0].shape[1]


def _grouped(hidden, chosen):
    """What torch's check of shapes refuses in float32, and its kernel for CPUs computes."""
    rows, ends = hidden.flatten(0, 1).float(), torch.tensor([3, hidden.shape[0] * LENGTH]).int()
    same = torch.eye(hidden.shape[-1]).repeat(2, 1, 1)
    return hidden + F.grouped_mm(rows, same, offs=ends).view_as(hidden)


CHOICES = {
    "mask": lambda hidden, chosen: hidden.masked_scatter(chosen, 2 * hidden[chosen]),
    "nonzero": lambda hidden, chosen: hidden * len(chosen.nonzero()),
    "unique": lambda hidden, chosen: hidden * len(torch.unique(hidden)),
    "repeated": lambda hidden, chosen: hidden * len(
        torch.repeat_interleave(torch.arange(2), chosen.sum((1, 2))[:2])
    ),
    "packed": _packed,
    "grouped": _grouped,
    "a number": lambda hidden, chosen: hidden * int(chosen.sum()),
}  # fmt: skip


def _times(block, hidden):
    return hidden * block.extra[0]


def _shared_mask():
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    return Decoder([MaskedBlock(mask) for _ in range(3)])


def _after(make):
    """A decoder in which a module of each block's own is applied to its output."""
    return Decoder([OddBlock(make(), lambda block, h: block.extra(h)) for _ in range(3)])


def _frozen():
    model = Decoder()
    for each in (model.bytes, model.places, model.blocks[0]):
        each.requires_grad_(False)
    return model


def _shared_layer():
    shared = nn.Linear(WIDTH, WIDTH)
    blocks = [OddBlock(shared, lambda block, h: h + block.extra(h)) for _ in range(2)]
    return Decoder([blocks[0], OddBlock(), blocks[1]])


def _module_hooks():
    model = Decoder()
    model.blocks[0].register_forward_hook(lambda module, given, found: found * 1.1)
    model.blocks[1].register_full_backward_hook(
        lambda module, into, out: tuple(g * 0.5 for g in into)
    )
    return model


def _unused():
    model = Decoder()
    model.unused = nn.Parameter(torch.randn(WIDTH))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "shared mask": _shared_mask,
    "running mean": lambda: _after(Running),
    "instance norm": lambda: _after(lambda: OverPositions(nn.InstanceNorm1d(WIDTH, affine=True))),
    "batch norm": lambda: _after(lambda: OverPositions(nn.BatchNorm1d(WIDTH))),
    "dropout": lambda: _after(lambda: nn.Dropout(0.1)),
    "long skip": Skipping,
    "frozen half": _frozen,
    "experts": lambda: Decoder(experts=2),
    "experts, traced": lambda: Traced(experts=2),
    "tied": lambda: Traced(tied=True),
    "block used twice": Twice,
    "layer of two blocks": _shared_layer,
    "tensor hook": Hooked,
    "module hooks": _module_hooks,
    "gradient reversal": Reversed,
    "straight-through": Straight,
    "unused parameter": _unused,
    "tensor on device": OnDevice,
}
"""The models, each with the mean of cross-entropies as its loss."""


MORE = {
    "body and head": Bodied,
    "two names": lambda: Bodied(("bytes", "norm", "second")),
    "scalars": Scaled,
    "gathered": Gathered,
    "turned": Turned,
    **{f"choosing, {how}": lambda how=how: Chosen(how) for how in CHOICES},
}
"""Models of which a few placements are tried."""


def drawn(seed: int) -> nn.Module:
    """A decoder with several oddities at once."""
    rng = random.Random(seed)
    mask, shared = torch.full((LENGTH, LENGTH), -torch.inf).triu(1), nn.Linear(WIDTH, WIDTH)
    block: dict[str, Callable[[], nn.Module]] = {
        "plain": OddBlock,
        "mask": lambda: MaskedBlock(mask),
        "shared": lambda: OddBlock(shared, lambda block, h: h + block.extra(h)),
        "running": lambda: OddBlock(Running(), lambda block, h: block.extra(h)),
        "norm": lambda: OddBlock(nn.LayerNorm(WIDTH), lambda block, h: h + block.extra(h)),
        "skip": lambda: OddBlock(nn.Linear(WIDTH, WIDTH), lambda block, h: block.extra(h) + h),
    }
    kinds = (Decoder, Decoder, Traced, Skipping, Twice, Hooked, Reversed, Straight, OnDevice)
    names = ["plain", *rng.choices(list(block), k=2)]
    model = rng.choice(kinds)([block[name]() for name in names], tied=rng.random() < 0.25)
    for each in rng.sample([model.bytes, model.places, model.norm, *model.blocks], 2):
        each.requires_grad_(rng.random() < 0.7)
    if rng.random() < 0.2:
        model.unused = nn.Parameter(torch.randn(WIDTH))
    if rng.random() < 0.2:
        model.blocks[0].register_forward_hook(lambda module, given, found: found * 1.1)
    return model


# -- losses ---------------------------------------------------------------------------------------


def plain(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def penalty(model, tokens, targets):
    found = plain(model, tokens, targets)
    return found + 0.01 * sum(p.square().sum() for p in model.parameters())


def random_mask(model, tokens, targets):
    """Half of a sample's tokens are hidden, and predicted. The model copies what it sees."""
    hidden = torch.rand(tokens.shape, device=tokens.device).argsort(1) < tokens.shape[1] // 2
    scores = model(torch.where(hidden, MASKED, tokens))
    each = F.cross_entropy(scores.flatten(0, 1), tokens.flatten(), reduction="none")
    return 2 * (each * hidden.flatten()).mean()


def counted(model, tokens, targets):
    """The mean over targets that count: samples have different numbers of them."""
    targets = torch.where(targets < tokens, -100, targets)
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)


def negatives(model, tokens, targets):
    """Each sample against all others of the batch."""
    found = F.normalize(model(tokens).mean(1), dim=-1)
    return F.cross_entropy(found @ found.T / 0.1, torch.arange(len(found), device=found.device))


def shifted(model, tokens, targets):
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def two_calls(model, tokens, targets):
    other = (tokens + 1) % MASKED
    return plain(model, tokens, targets) + (model(tokens) - model(other)).square().mean()


def summed(model, tokens, targets):
    scores = model(tokens).flatten(0, 1)
    return F.cross_entropy(scores, targets.flatten(), reduction="sum") / 100


def _copying():
    model = Decoder(tied=True)
    with torch.no_grad():
        model.bytes.weight.mul_(20)
        model.places.weight.zero_()
    return model


LOSSES = {
    "penalty": penalty,
    "random mask": random_mask,
    "counted tokens": counted,
    "in-batch negatives": negatives,
    "shifted labels": shifted,
    "two calls": two_calls,
    "sum": summed,
}
"""The losses, each of a decoder without oddities."""
SUBJECTS = ("plain", *MODELS, *LOSSES)
RANDOM = ("dropout", "random mask")
"""What draws numbers: a group cannot have those of one process. It computes the same bits each
time it is started, and about the loss of one process."""


class Odd:
    """The task of a subject, with tokens that are drawn."""

    name, metric, better, target = "odd", "loss", "lower", None

    def __init__(self, subject="plain", seed=0) -> None:
        self._subject = subject

    def model(self):
        """In float64 from the start: `Module.double` would give each user of a buffer its own."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            if self._subject.startswith("drawn "):
                return drawn(int(self._subject.removeprefix("drawn ")))
            return {**MODELS, **MORE, "random mask": _copying}.get(self._subject, Decoder)()
        finally:
            torch.set_default_dtype(before)

    def samples(self, member, members):
        return 64

    def batches(self, member, members, batch, seed):
        return self.batches_from(member, members, batch, seed, 0)

    def batches_from(self, member, members, batch, seed, start):
        drawn = np.random.default_rng([seed, member])
        for step in itertools.count():
            found = torch.from_numpy(drawn.integers(0, MASKED, (2, batch, LENGTH)))
            if step >= start:
                yield tuple(found)

    def loss(self, model, batch):
        return LOSSES.get(self._subject, plain)(model, *batch)

    def evaluate(self, model):
        with evaluating(model):
            return {"loss": float(plain(model, *next(self.batches(99, 100, 8, 0))))}


def job_of(subject: str) -> Job:
    found, decay = f"data.subject={subject.removeprefix(ZOO)}", "optimizer.weight_decay=0.1"
    if subject.startswith(ZOO):
        # Steps of Adam may be any where a gradient is rounding, as it is of biases before a norm.
        return cases.job_of("task=zoo_models:Zoo", found, "optimizer=sgd", "lr=0.1", decay)
    return cases.job_of("task=odd_models:Odd", found, decay)


# -- one process, a plan, a group -----------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """What came out: losses, everything that the model keeps, and its evaluation."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    figures: dict[str, float]

    def differs(self, other: Trained) -> float:
        """The largest difference of any number; infinite where one is not finite."""
        mine, theirs = (
            torch.tensor([*each.losses, *each.figures.values()], dtype=torch.float64)
            for each in (self, other)
        )
        pairs = [(mine, theirs)]
        pairs += [(self.state[name], tensor) for name, tensor in other.state.items()]
        pairs += [
            (torch.tensor(self.figures[k]), torch.tensor(v)) for k, v in other.figures.items()
        ]
        found = [_apart(a.double(), b.double()) for a, b in pairs]
        return max(found) if all(np.isfinite(found)) else np.inf


@dataclass(frozen=True)
class Verdict:
    """`kind` is "exact"; "near", as NEAR says; "refused" by the plan; "late": refused by the ranks
    only; "wrong", or "failed": a traceback."""

    kind: str
    why: str = ""

    @property
    def letter(self) -> str:
        """ "." for what is right."""
        return {"exact": ".", "near": ".", "refused": "."}.get(self.kind, self.kind[0].upper())


SIGNS = {"exact": "=", "near": "≈", "wrong": "another", "failed": "fails"}
"""Kinds in tables of the docs; those that are refused have the number of a reason, with "r" where
only ranks refuse."""


class Table:
    """Verdicts as Markdown, row by row, and then the reasons of those that are refused."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.head = f"| model or loss | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}"
        self._reasons: list[str] = []

    def row(self, subject: str, found: Mapping[str, Verdict]) -> str:
        """The line of a subject; `found` is by placement."""
        cells = [SIGNS.get(each.kind) or self._number(each, w) for w, each in found.items()]
        return f"| {subject} | {' | '.join(cells)} |"

    def _number(self, found: Verdict, words: str) -> str:
        reason = _said(found.why, words)
        if reason not in self._reasons:
            self._reasons.append(reason)
        return f"{self._reasons.index(reason) + 1}{'r' * (found.kind == 'late')}"

    @property
    def reasons(self) -> str:
        return "\n".join(f"{n}. {reason}" for n, reason in enumerate(self._reasons, 1))


def _said(reason: str, words: str) -> str:
    """A reason without the placement in it, and without what to do about it."""
    for each in (str(parse(words)), words) if "=" in words else ():
        reason = reason.replace(each, "…")
    return reason.removeprefix("placement: …, and ").partition(" (leave ")[0]


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Where one of both is infinite, the other is, too."""
    return float(torch.where(a == b, 0.0, (a - b).abs()).max())


def _state(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


@functools.cache
def alone(subject: str) -> Trained:
    """In one process: the batches of all members as one."""
    job = job_of(subject)
    task = task_of(job)
    model = model_of(task, job.seed)
    optimizer = optimizer_for(model, job.train.optimizer)
    batches, losses = batches_of(task, job, 1, 0), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = task.loss(model, next(batches))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, _state(model), task.evaluate(model))


def together(subject: str, words: str, checks: bool = False, ambient: int = 0):
    """In a group; all ranks call it. Why it does not begin, or what was trained, on the leader with
    its state; `ambient` seeds what nobody has seeded."""
    import torch.distributed as dist

    torch.manual_seed(100 * ambient + dist.get_rank())
    # Memory that nobody has filled is NaN, and not by luck what it has to be.
    torch.use_deterministic_algorithms(True, warn_only=True)
    job = job_of(subject)
    task = task_of(job)
    try:
        rank = prepare_rank(job, task, parse(words), torch.device("cpu"))
        if checks:
            check_group(job, task, rank)
    except EdgetrainError as error:
        return Verdict("late", str(error))
    except Exception as error:
        if parse(words).all_stages > 1:
            raise  # the other stages wait for what this one would send
        return Verdict("failed", f"{type(error).__name__}: {error}".splitlines()[0])
    losses = []
    for _ in range(STEPS):
        loss = rank.steps.backward()
        rank.steps.step()
        losses.append(loss())
    model = rank.held.gather()
    if model is None:
        return Trained(losses, {}, {})
    return Trained(losses, _state(model), task.evaluate(model))


@functools.cache
def _question(subject: str) -> Question:
    job = job_of(subject)
    return question_of(resolve(replace(job, servers=replace(job.servers, placement="data=4"))))


def first_choice(subject: str) -> str:
    """What a plan for the four ranks of this machine takes; it was built without numbers."""
    question = replace(_question(subject), placement="auto", fallback="when-faster")
    decision = decide(question, rehearsal(job_of(subject), None))
    return str(decision.found[0].placement)


def planned(subject: str, words: str) -> str:
    """Why the planner refuses; "": it does not."""
    question = _question(subject)
    if question.group_problem:
        return question.group_problem
    try:
        check(parse(words), question.model, question.servers, question.work)
    except EdgetrainError as error:
        return str(error)
    found = evaluate(question.model, question.servers, question.work, parse(words))
    return "too large" if isinstance(found, TooLarge) else ""


def rehearsed(subject: str, words: str) -> str:
    """Why a plan passes over a placement that it has tried without numbers; "": it does not."""
    job = job_of(subject)
    return problem_of(job, task_of(job), parse(words))


def judge(worlds, subject: str, words: str, checks: bool = False) -> Verdict:
    """What a group makes of a subject, and the check before its first step if it `checks`.
    `worlds(n)` are n ranks that wait."""
    is_rehearsed = subject.startswith(ZOO)
    reason = planned(subject, words) or (rehearsed(subject, words) if is_rehearsed else "")
    if not reason:
        found = _tried(worlds, subject, words, checks)
        if is_rehearsed or found.kind not in ("late", "failed"):
            return found
        # A plan tries what it ranks first, and `run` plans: that takes long for all of these.
        reason = rehearsed(subject, words)
        if not reason:
            return found
    return Verdict("refused" if "\n" not in reason else "failed", reason)


def _tried(worlds, subject: str, words: str, checks: bool) -> Verdict:
    world = functools.partial(worlds(parse(words).ranks).run, together, subject, words, checks)
    try:
        found = world()
        again = world(1) if subject in RANDOM and isinstance(found[0], Trained) else found
    except EdgetrainError as error:
        return Verdict("late", str(error))
    except AssertionError as error:
        return Verdict("failed", str(error).strip().splitlines()[-1])
    if not isinstance(found[0], Trained):
        return found[0]
    one = alone(subject)
    if not all(np.array_equal(each.losses, found[0].losses, equal_nan=True) for each in found):
        return Verdict("wrong", "ranks report different losses")
    if subject in RANDOM:
        apart = found[0].differs(again[0])
        if apart:
            return Verdict("wrong", f"{apart:.2g} in two launches")
        off = abs(found[0].losses[0] / one.losses[0] - 1)
        return Verdict("wrong", f"loss {off:.0%} off") if off > 0.1 else Verdict("exact")
    apart = found[0].differs(one)
    if subject.startswith(ZOO) and MOST < apart <= NEAR:
        return Verdict("near")
    return Verdict("exact") if apart <= MOST else Verdict("wrong", f"{apart:.2g}")
