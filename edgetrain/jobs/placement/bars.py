"""Words that a job's placements cannot have, because of its loss, its optimizer, or what its model
does besides computing.

What shapes and memory rule out is in `decision`. Torch is loaded only to look at loss and model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job
from edgetrain.jobs.optimizers import ELEMENTWISE
from edgetrain.jobs.placement.words import Placement

if TYPE_CHECKING:
    from edgetrain.tasks.effects import Effects
    from edgetrain.tasks.losses import Look
    from edgetrain.tasks.protocol import Task

_DIVIDING = ("tensor", "zero=2", "zero=3", "experts")
"""Words with which a rank has a part of some tensors."""
_SLICES = ("sequence", "norms=split")
"""Words with which a rank has some positions of a sequence."""
_APART = ("pipeline",)
_COUNTED = "say what it is a mean over (a task's `counted`, docs/how-to/tasks.md)"


@dataclass(frozen=True)
class Bar:
    """Words that a placement cannot have, see `Placement.parts`; (): no group can train the job."""

    words: tuple[str, ...]
    reason: str
    hint: str = ""
    is_known: bool = True
    """Whether it holds; else it is only said."""

    def on(self, placement: Placement) -> str:
        """The word of this placement that cannot be; ""."""
        return next((each for each in self.words or ("",) if each in placement.parts), "")

    def hits(self, placement: Placement) -> bool:
        """Whether this placement cannot be."""
        return self.is_known and (not self.words or bool(self.on(placement)))

    @property
    def note(self) -> str:
        if not self.is_known:
            return f"not known to be right are {', '.join(self.words)}: {self.reason}: {self.hint}"
        return f"left out are {', '.join(self.words) or 'all groups'}: {self.reason}"


def refuse(placement: Placement, bars: Iterable[Bar]) -> None:
    """ConfigError for a placement that one of these bars."""
    for bar in bars:
        if bar.hits(placement):
            word = bar.on(placement)
            leave = f"leave {word.partition('=')[0]} out" if word else "train as a fleet"
            hint = f"{leave}, or {bar.hint}" if bar.hint else leave
            raise ConfigError(f"placement: {placement}, and {bar.reason}", hint)


def bars_of(job: Job, task: Task) -> tuple[Bar, ...]:
    """What the job's optimizer, its loss and its model rule out. TaskError for a loss that is
    none."""
    from edgetrain.tasks.effects import effects_of
    from edgetrain.tasks.losses import first_batches, look_at

    found = []
    name = str(job.train.optimizer.get("name", ""))
    if name.lower() not in ELEMENTWISE:
        reason = f"{name} looks at whole tensors, of which ranks would have parts"
        found.append(Bar(_DIVIDING, reason, "take adamw or sgd"))
    batch = first_batches(task, job.fleet.members, job.train.batch, job.seed)
    found += of_loss(look_at(task, batch))
    found += _of_model(effects_of(task, batch))
    return tuple(found)


def of_loss(look: Look) -> list[Bar]:
    """What a look at a loss rules out."""
    found = []
    if look.draws:
        found.append(Bar((), f"the task {look.draws}", "draw from torch's own generator"))
    if look.samples:
        reason = f"the loss of a batch {look.samples}"
        found.append(Bar(("data", "microbatches"), reason, _COUNTED))
    if look.unknown:
        found.append(Bar(("data", "microbatches"), look.unknown, _COUNTED, False))
    if look.positions:
        found.append(Bar(("sequence",), f"the loss of a batch {look.positions}", _COUNTED))
    if look.apart:
        found.append(Bar(_APART, f"the loss {look.apart}"))
    if look.parameters == "before":
        reason = "the loss reads parameters before it calls the model"
        found.append(Bar((), reason, "read them after the call, or use weight_decay"))
    if look.parameters == "after":
        words = (*_APART, "tensor", "zero=3", "experts")
        reason = "the loss reads parameters, of which a rank has a part"
        found.append(Bar(words, reason, "use the optimizer's weight_decay"))
    return found


def _of_model(effects: Effects) -> list[Bar]:
    found = []
    if effects.samples:
        reason = f"the module '{effects.samples}' normalises over the samples of a batch"
        hint = "take GroupNorm or LayerNorm"
        found.append(Bar(("data", "microbatches", *_SLICES), reason, hint))
    if effects.positions:
        reason = f"the module '{effects.positions}' normalises over the positions of a sequence"
        found.append(Bar(_SLICES, reason))
    if effects.attention:
        reason = f"the model's attention has {effects.attention}"
        found.append(Bar(("sequence",), reason, "take causal or full attention without dropout"))
    if effects.buffer:
        reason = f"the forward pass changes the buffer '{effects.buffer}'"
        hint = "change it where the model is not called"
        words = ("data", "microbatches", *_SLICES, "recompute")
        found.append(Bar(words, reason, hint if not effects.samples else ""))
    if effects.complex:
        found.append(Bar(("tensor",), f"the parameter '{effects.complex}' is complex"))
    everywhere = (
        (effects.sparse, f"the module '{effects.sparse}' has sparse gradients, which ranks cannot "
         "add up", "sparse=False"),
        (effects.count, f"the forward pass counts in '{effects.count}', and servers look at it "
         "beforehand", "count in a buffer: self.register_buffer"),
        (effects.shared, f"{effects.shared} share memory and are not one parameter",
         "tie them: other.weight = this.weight"),
        (effects.written, f"the forward pass changes the parameter '{effects.written}'",
         "let the loss keep it small (embeddings: leave max_norm out)"),
        (effects.rebuilt, f"the forward pass makes the model another one, at '{effects.rebuilt}'",
         "make it in the constructor"),
        (effects.hooked, f"the parameter '{effects.hooked}' has a hook, which ranks would not call",
         "let the optimizer or the loss do it"),
    )  # fmt: skip
    found += [Bar((), reason, hint) for seen, reason, hint in everywhere if seen]
    if effects.untraced:
        reason = f"torch's tracer, which would cut this model, leaves out {effects.untraced}"
        found.append(Bar(_APART, reason, "name its pieces (`pieces`, docs/how-to/gpu-servers.md)"))
    return found
