"""Tasks whose losses are more than a mean over samples and positions, and what groups make of
them."""

from __future__ import annotations

import group_cases as cases
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.placement.words import parse
from edgetrain.tasks.text import CharLM, Transformer, char_lm
from edgetrain.training.servers.owned import local_part
from edgetrain.training.servers.rank import prepare_rank

SMALL = (*cases.CHARS, "optimizer=sgd", "lr=0.1", "batch=2")


def _scores(model, batch):
    return model(batch[0])


def plain(model, batch):
    return F.cross_entropy(_scores(model, batch).flatten(0, 1), batch[1].flatten())


def left_out(batch):
    """Few targets count; none do of some samples and slices."""
    return torch.where(batch[1] % 8 == 1, batch[1], -100)


def counted(model, batch):
    scores = _scores(model, batch).flatten(0, 1)
    return F.cross_entropy(scores, left_out(batch).flatten(), ignore_index=-100)


def masked(model, batch):
    """As `counted`, with a mean whose gradient is not a number where nothing counts."""
    each = F.cross_entropy(_scores(model, batch).mT, batch[1], reduction="none")
    mask = (left_out(batch) != -100).to(each.dtype)
    return (each * mask).sum() / mask.sum()


def summed(model, batch):
    scores = _scores(model, batch).flatten(0, 1)
    return F.cross_entropy(scores, batch[1].flatten(), reduction="sum") / 100


def shifted(model, batch):
    scores = _scores(model, batch)[:, :-1].flatten(0, 1)
    return F.cross_entropy(scores, batch[0][:, 1:].flatten())


def negatives(model, batch):
    found = F.normalize(_scores(model, batch).mean(1), dim=-1)
    return F.cross_entropy(found @ found.T / 0.1, torch.arange(len(found)))


def penalised(model, batch):
    found = plain(model, batch)
    return found + 0.01 * sum(p.square().sum() for p in model.parameters() if p.dim() > 1)


def penalised_first(model, batch):
    found = 0.01 * sum(p.square().sum() for p in model.parameters())
    return found + plain(model, batch)


def inside(model, batch):
    return plain(model, batch) + model.norm.weight.square().sum()


def two_calls(model, batch):
    text = batch[0]
    return plain(model, batch) + (model(text) - model(text.flip(0))).square().mean()


def drawn(model, batch):
    """Letters are hidden, and are to be told."""
    hidden = torch.rand(batch[0].shape) < 0.5
    scores = model(torch.where(hidden, 0, batch[0]))
    return F.cross_entropy(scores[hidden], batch[0][hidden])


OWN = torch.Generator()


def by_hand(model, batch):
    return plain(model, batch) * torch.rand((), generator=OWN)


def a_number(model, batch):
    return plain(model, batch).item()


def elsewhere(model, batch):
    return plain(model, batch).to("meta")


def a_row(model, batch):
    return F.cross_entropy(_scores(model, batch).mT, batch[1], reduction="none").mean(1)


class Chars(CharLM):
    """char_lm with a loss of this file."""

    def loss(self, model, batch):
        return globals()[self.of](model, batch)


class Counting(Chars):
    def counted(self, batch):
        return (left_out(batch) != -100).sum()


def chars(of="plain", says=False, **options):
    task = char_lm(**options)
    task.__class__ = Counting if says else Chars
    task.of = of
    return task


def job_of(of: str, *words: str, says: bool = False):
    said = f"data.says={'true' if says else 'false'}"
    return cases.job_of(*SMALL, "task=loss_cases:chars", f"data.of={of}", said, *words)


# -- random numbers -------------------------------------------------------------------------------


class Forgetful(nn.Module):
    """A block, some of whose output is dropped."""

    def __init__(self, block) -> None:
        super().__init__()
        self.block, self.dropout = block, nn.Dropout(0.1)

    def forward(self, hidden):
        return self.dropout(self.block(hidden))


class Dropping(Transformer):
    tensor_plan = {  # noqa: RUF012
        name.replace("blocks.*", "blocks.*.block"): style
        for name, style in Transformer.tensor_plan.items()
    }

    def __init__(self, *size) -> None:
        super().__init__(*size)
        self.blocks = nn.ModuleList(Forgetful(block) for block in self.blocks)


def dropping(of="plain", **options):
    """The task whose model drops a tenth of what each block adds."""
    task = chars(of, **options)
    size = task.size
    task.model = lambda: Dropping(size.context, size.width, size.heads, size.layers, size.tied)
    return task


def drop_job(*words: str):
    return cases.job_of(*SMALL, "task=loss_cases:dropping", *words)


def train_and_look(job, words: str):
    """What `train` finds, from wherever torch's generator is; what the first dropout of the last
    step left over; and this rank's whole parameters."""
    torch.rand(17 * dist.get_rank() + 1)
    rank = prepare_rank(job, cases.Double(task_of(job)), parse(words), torch.device("cpu"))
    kept, losses = [], []
    for module in rank.held.modules:
        for each in module.modules():
            if isinstance(each, nn.Dropout):
                each.register_forward_hook(lambda own, given, output: kept.append(output != 0))
    for _ in range(3):
        kept.clear()
        loss = rank.steps.backward()
        rank.steps.step()
        losses.append(loss())
    whole = {
        name: local_part(parameter.detach()).clone()
        for name, parameter in rank.held.own[0].items()
        if local_part(parameter).shape == parameter.shape
    }
    return losses, kept[0], whole


def masks(job, words: str):
    """What the first dropout leaves over, in each micro-batch of two steps."""
    rank = prepare_rank(job, task_of(job), parse(words), torch.device("cpu"))
    kept, (module,) = [], rank.held.modules
    first = next(each for each in module.modules() if isinstance(each, nn.Dropout))
    first.register_forward_hook(lambda own, given, output: kept.append(output != 0))
    for _ in range(2):
        rank.steps.backward()
    return kept
