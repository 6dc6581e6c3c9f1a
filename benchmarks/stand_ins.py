"""What should stand for a round in flight? A naive reference, for trying rules.

    python benchmarks/stand_ins.py                       # all three groups, some minutes
    python benchmarks/stand_ins.py --groups momentum
    python benchmarks/stand_ins.py --groups text
    python benchmarks/stand_ins.py --groups final_sync --partitions 0.3,iid
    python benchmarks/stand_ins.py --groups variates
    python benchmarks/stand_ins.py --groups mixing --partitions iid
    python benchmarks/stand_ins.py --groups choice --partitions iid,1,0.3,0.1 --seeds 2
    python benchmarks/stand_ins.py --groups rate

Members are the rows of one matrix and exchange by taking its mean, without protocol and time;
tasks, models and batches are the package's own. A row is one rule: digits, 8 members, 280 steps,
final accuracy in percent, mean of --seeds and their range. D is 6 (what hides 200 ms at 50 ms a
step), 12 (500 ms, or 200 at 20) or 29 (500 at 20).
docs/decisions/023 says what follows.

paper, predict
              `strategy.correction`, as in edgetrain/strategies/drift.py; theta is measured on all
spread S      a share S of the gap also step by step within a round, as SCAFFOLD's control variates
keep, learn   other shares of its own progress, and of the gap, at theta = 1
per tensor    a theta for each tensor
forget F      of older evidence for theta (the package: 0.8)
outer L M     the hub's learning rate L and momentum M; stand-ins foretell them (as DiLoCo with
              eager updates)
velocity V    when a reply comes, V (reply - own) / (lr K) is taken from the optimizer's momentum;
              decayed: V = m^D (1 - m^K), what that still holds of a round that was K steps of drift
decay R       a share R of what a member was away from the mean stays in its parameters when a reply
              comes, and so on of what stayed: stayed <- R (stayed + own - reply). The mean of all
              members is what it was; each is pulled back less at once
first N       the first N rounds are waited for, and nothing stays of them
last N K      the last N steps in rounds of K steps without a delay (docs/decisions/032)
alpha A       a share A of what the member has stays when a reply comes, as with streaming-diloco
              of one fragment; paper's: the steps of the delay are in that share only
scaffold      control variates, as in edgetrain/strategies/variates.py
feddyn A      FedDyn (Acar et al., ICLR 2021, algorithm 1) with alpha A: each member's gradient has
              -g_m + A (params - base), g_m <- g_m - A own; the base also moves by -h / A,
              h <- h - A mean(own)

The groups `text` and `final_sync_text` are char-lm, a Transformer of one layer of width 32: 4
members with batches of 8, equal data, --steps steps, final loss.

The group `rate` is text with 8 members, batches of 16 and plain SGD at a rate of 1.0, 250 steps.

The group `choice` says how far members' first three rounds led from the fleet: `apart` of
edgetrain/strategies/choice.py, on all elements, with own progress; mean, lowest and highest of all
members and seeds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from edgetrain.tasks import Task, load_task

STEPS = {"digits": 280, "char_lm": 200}
TEXT = {"context": 32, "limit_bytes": 200_000, "width": 32, "heads": 4, "layers": 1}


@dataclass(frozen=True)
class Rule:
    """A row of a table."""

    local_steps: int
    delay: int
    lr: float = 0.2
    momentum: float = 0.0
    is_adamw: bool = False
    corrects: bool = True
    keep: float | None = None
    learn: float | None = None
    spread: float = 0.0
    per_tensor: bool = False
    forget: float = 0.8
    outer: tuple[float, float] = (1.0, 0.0)
    velocity: float = 0.0
    leave: float = 0.0
    first: int = 0
    last: tuple[int, int] = (0, 5)
    alpha: float = 0.0
    drops: bool = False
    """Of the steps of the delay all but `alpha`."""
    variates: bool = False
    dyn: float = 0.0
    task: str = "digits"
    steps: int = 0
    """0: those of the task."""
    members: int = 0
    """With batches of 16; 0: the task's, with its own."""


class Fleet:
    """The members of one run, one a row."""

    def __init__(self, rule: Rule, partition: str, seed: int) -> None:
        self.rule = rule
        self.members, self.batch = (8, 16) if rule.task == "digits" else (4, 8)
        if rule.members:
            self.members, self.batch = rule.members, 16
        self.steps = rule.steps or STEPS[rule.task]
        more = {} if rule.task == "digits" else TEXT
        self.task: Task = load_task(
            f"edgetrain.tasks:{rule.task}", {"partition": partition, **more},
            defaults={"seed": seed},
        )  # fmt: skip
        torch.manual_seed(seed)
        self.model = self.task.model()
        parameters = list(self.model.parameters())
        self.sizes = [p.numel() for p in parameters]
        self.base = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.params = self.base.repeat(self.members, 1)
        groups = self.sizes if rule.per_tensor else [sum(self.sizes)]
        self.group = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(groups))
        self.flights: deque[tuple[int, Tensor, Tensor | None]] = deque()
        self.gap, self.theta, self.within, self.stayed = (
            torch.zeros_like(self.params) for _ in range(4)
        )
        self.products = torch.zeros(2, self.members, len(groups))
        self.moments = torch.zeros(2, *self.params.shape)
        self.variates, self.summed, self.pulls = (torch.zeros_like(self.params) for _ in range(3))
        self.pulled = torch.zeros_like(self.base)
        self.outer = torch.zeros_like(self.base)
        self.replies = 0
        self.ways = torch.zeros(2, *self.params.shape)
        """Sums of the first own contributions, and of their replies."""
        self.rounds = max(1, math.ceil(rule.delay / rule.local_steps))
        self.gradients = self._gradients([p.shape for p in parameters])

    def _gradients(self, shapes: list[torch.Size]) -> Callable[..., Tensor]:
        names = [name for name, _ in self.model.named_parameters()]

        def loss(flat: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
            parts = zip(names, torch.split(flat, self.sizes), shapes, strict=True)
            named = {name: part.reshape(shape) for name, part, shape in parts}
            found = torch.func.functional_call(self.model, named, (inputs,))
            return torch.nn.functional.cross_entropy(found.flatten(0, -2), labels.flatten())

        made: Callable[..., Tensor] = torch.func.vmap(torch.func.grad(loss))
        return made

    def run(self, seed: int) -> float:
        """All steps; the accuracy of the base in percent, or its loss."""
        rule, every_member = self.rule, range(self.members)
        sources = [self.task.batches(m, self.members, self.batch, seed) for m in every_member]
        syncs_at = self.steps - rule.last[0]
        for step in range(1, self.steps + 1):
            batches = [next(source) for source in sources]
            inputs, labels = (torch.stack([batch[i] for batch in batches]) for i in (0, 1))
            self._step(self.gradients(self.params, inputs, labels), step)
            since = step if step <= syncs_at else step - syncs_at
            if since % rule.local_steps == 0 or step in (syncs_at, self.steps):
                own = self.params - self._expected() - self.within
                foretold = self.gap.clone() if self.replies else None
                self.flights.append((step, own, foretold))
                self.within.zero_()
                self.params = self._expected()
            while self.flights and (
                step == syncs_at
                or self.replies < rule.first
                or step - self.flights[0][0] >= rule.delay
            ):
                self._reply()
            if not self.params.isfinite().all():
                return math.nan
            if step == syncs_at:
                rule = self.rule = replace(rule, local_steps=rule.last[1], delay=0, leave=0.0)
        while self.flights:
            self._reply()
        with torch.no_grad():
            parts = torch.split(self.base, self.sizes)
            for parameter, part in zip(self.model.parameters(), parts, strict=True):
                parameter.copy_(part.reshape(parameter.shape))
        found = self.task.evaluate(self.model)
        return 100 * float(found["accuracy"]) if rule.task == "digits" else float(found["loss"])

    def apart(self) -> list[float]:
        """How far the first rounds of each member led from the fleet."""
        own, reply = self.ways
        found = (own - reply).square().sum(1) / reply.square().sum(1)
        return [float(each) for each in found]

    def _step(self, gradient: Tensor, step: int) -> None:
        rule, (first, second) = self.rule, self.moments
        if rule.variates:
            self.summed += gradient
            gradient = gradient + self.variates
        if rule.dyn:
            gradient = gradient - self.pulls + rule.dyn * (self.params - self.base)
        if rule.is_adamw:
            first.mul_(0.9).add_(0.1 * gradient)
            second.mul_(0.999).add_(0.001 * gradient * gradient)
            size = (second / (1 - 0.999**step)).sqrt() + 1e-8
            gradient = first / (1 - 0.9**step) / size + 0.01 * self.params
        elif rule.momentum:
            gradient = first.mul_(rule.momentum).add_(gradient)
        more = rule.spread * self.theta * self.gap / rule.local_steps
        self.within = self.within + more
        self.params = self.params - rule.lr * gradient + more

    def _expected(self) -> Tensor:
        """Where the rounds in flight are thought to lead, for each member."""
        rule, taken = self.rule, 0.5 + 0.25 / self.rounds
        learn = taken - 0.25
        if momentum := 0.9 if rule.is_adamw else rule.momentum:
            taken *= 1 - momentum**rule.local_steps
            learn = 1 - taken
        keep = 1 - taken if rule.keep is None else rule.keep
        learn = learn if rule.learn is None else rule.learn
        found, moving = self.base + self.stayed, self.outer
        for _, own, _ in self.flights:
            stand_in = (1 - self.theta * (1 - keep)) * own + learn * self.theta * self.gap
            moving = rule.outer[1] * moving + stand_in
            found += rule.outer[0] * moving
        return found

    def _reply(self) -> None:
        rule = self.rule
        local = self.params - self._expected() - self.within
        _, own, foretold = self.flights.popleft()
        reply = own.mean(0)
        if self.replies < 3:
            self.ways += torch.stack([own, reply.expand_as(own)])
        if rule.variates:
            self.variates = (self.summed.mean(0) - self.summed) / rule.local_steps
            self.summed.zero_()
        if rule.dyn:
            self.pulls -= rule.dyn * own
            self.pulled -= rule.dyn * reply
            reply = reply - self.pulled / rule.dyn
        self.outer = rule.outer[1] * self.outer + reply
        self.base = self.base + rule.outer[0] * self.outer
        self.replies += 1
        missed = reply - own
        if rule.corrects and foretold is not None:
            new = [self._summed(missed * foretold), self._summed(foretold * foretold)]
            self.products = rule.forget * self.products + torch.stack(new)
            theta = (self.products[0] / self.products[1].clamp_min(1e-20)).clamp(0, 1)
            self.theta = theta[:, self.group]
        self.gap += max(1 / (self.rounds + 1), 1 / self.replies) * (missed - self.gap)
        if rule.velocity:
            self.moments[0] -= rule.velocity * missed / (rule.lr * rule.local_steps)
        self.stayed = rule.leave * (self.stayed - missed) * (self.replies > rule.first)
        kept = self.params
        self.params = self._expected() + self.within + local * (not rule.drops)
        self.params = rule.alpha * kept + (1 - rule.alpha) * self.params

    def _summed(self, products: Tensor) -> Tensor:
        found = torch.zeros(self.members, self.products.shape[2])
        return found.index_add_(1, self.group, products)


def _momentum_rules(local_steps: int) -> dict[str, dict[str, Any]]:
    """What the rows of the group momentum change, with rounds of this length."""
    plain = {"keep": 0.25, "learn": 0.5}
    decayed = 0.9**local_steps * (1 - 0.9**local_steps)
    return {
        "paper": {"corrects": False},
        "predict": {},
        "keep 0.25, learn 0.5 (plain SGD's)": plain,
        "the same, velocity 0.5": {**plain, "velocity": 0.5},
        "the same, velocity decayed": {**plain, "velocity": decayed},
        "keep 0.25, learn 0.25": {"keep": 0.25, "learn": 0.25},
        "keep 0.5, learn 0.5": {"keep": 0.5, "learn": 0.5},
    }


def _final_sync_rules() -> dict[str, Rule]:
    """Momentum at FedAvg's best rate, D = 6, 12 and 29, with and without a final sync."""
    plain, table = Rule(5, 0, 0.1, 0.9, corrects=False), {}
    for local_steps, delay, corrects, lasts in (
        (5, 0, False, ((0, 5),)),
        (29, 0, False, ((0, 5), (35, 7))),
        (5, 6, False, ((0, 5), (35, 5))),
        (12, 6, False, ((35, 7),)),
        (6, 6, True, ((0, 6), (36, 6))),
        (5, 12, False, ((0, 5), (35, 5))),
        (12, 12, False, ((0, 7), (35, 7))),
        (24, 12, False, ((0, 7), (35, 7))),
        (12, 12, True, ((0, 7), (35, 7))),
        (5, 29, False, ((0, 5), (35, 5))),
        (29, 29, False, ((35, 7),)),
        (29, 29, True, ((0, 7), (35, 7))),
        (58, 29, False, ((35, 7),)),
        (29, 12, False, ((0, 7), (28, 7), (35, 7), (42, 7), (56, 7), (35, 5))),
        (29, 12, True, ((35, 7),)),
        (5, 20, False, ((35, 7),)),
        (20, 10, False, ((35, 7),)),
        (20, 20, False, ((35, 7),)),
        (26, 13, False, ((35, 7),)),
        (18, 9, False, ((35, 7),)),
        (40, 20, False, ((35, 7),)),
        (29, 6, False, ((35, 7),)),
    ):
        name = "fedavg" if not delay else "predict" if corrects else "paper"
        for last, short in lasts:
            label = f"{name} K={local_steps}" + f" D={delay}" * bool(delay)
            rule = replace(
                plain, local_steps=local_steps, delay=delay, corrects=corrects, last=(last, short)
            )
            table[label + f", last {last} K={short}" * bool(last)] = rule
    return table


def rows(group: str) -> dict[str, Rule]:
    """The rules of a table."""
    if group == "final_sync":
        return _final_sync_rules()
    far, near = Rule(12, 12), Rule(6, 6, 0.05, 0.9)
    if group == "sgd":
        return {
            **{f"fedavg K={k}": Rule(k, 0) for k in (5, 12, 24)},
            "paper K=5 D=12": Rule(5, 12, corrects=False),
            **{f"predict K={k} D=12": Rule(k, 12) for k in (4, 6, 12)},
            "predict, spread 0.25": replace(far, spread=0.25),
            "keep 0.5, learn 0.5, spread 1": replace(far, keep=0.5, learn=0.5, spread=1.0),
            "keep 1, learn 1, spread 0.5": replace(far, keep=1.0, learn=1.0, spread=0.5),
            "predict per tensor": replace(far, per_tensor=True),
            "predict, forget 0.6": replace(far, forget=0.6),
            "predict, outer 1 0.3": replace(far, outer=(1.0, 0.3)),
            "predict, outer 1 0.5, lr 0.1": replace(far, outer=(1.0, 0.5), lr=0.1),
        }
    if group == "momentum":
        return {
            **{f"fedavg K={k}": Rule(k, 0, 0.05, 0.9) for k in (5, 12, 29)},
            **{
                f"{name}, K=D={k}": replace(near, local_steps=k, delay=k, **more)
                for k in (6, 12, 29)
                for name, more in _momentum_rules(k).items()
            },
        }
    table: dict[str, Rule] = {}
    if group == "variates":
        for k in (5, 12):
            for rule in (Rule(k, 0, 0.02, is_adamw=True), Rule(k, 0, 0.1), Rule(k, 0, 0.2),
                         Rule(k, 0, 0.05, 0.9)):  # fmt: skip
                plain = replace(rule, corrects=False)
                name = "adamw" if rule.is_adamw else "momentum" if rule.momentum else "sgd"
                label = f"{name} {rule.lr} K={k}"
                table[f"{label}, fedavg"] = plain
                table[f"{label}, scaffold"] = replace(plain, variates=True)
                if k == 5 and rule.lr < 0.2 and not rule.is_adamw:
                    for alpha in (0.1, 0.3, 1.0):
                        table[f"{label}, feddyn {alpha}"] = replace(plain, dyn=alpha)
        return table
    if group == "mixing":
        for name, whole in (
            ("momentum", Rule(20, 6, 0.05, 0.9, corrects=False)),
            ("adamw", Rule(20, 6, 0.01, is_adamw=True, corrects=False)),
            ("text, momentum", Rule(20, 6, 0.1, 0.9, corrects=False, task="char_lm")),
            ("text, adamw", Rule(20, 6, 0.01, is_adamw=True, corrects=False, task="char_lm")),
        ):
            for d, alpha in itertools.product((6, 12, 18), (0.0, 0.5)):
                rule = replace(whole, delay=d, alpha=alpha, outer=(0.7, 0.5))
                table[f"{name}, D={d}, alpha {alpha}"] = rule
                table[f"{name}, D={d}, alpha {alpha}, paper's"] = replace(rule, drops=True)
        return table
    if group == "choice":
        for name, rule in (
            ("sgd 0.2", Rule(5, 6, corrects=False)),
            ("momentum 0.02", Rule(5, 6, 0.02, 0.9, corrects=False)),
            ("momentum 0.1", Rule(5, 6, 0.1, 0.9, corrects=False)),
            ("adamw 0.02", Rule(5, 6, 0.02, is_adamw=True, corrects=False)),
            ("text, momentum 0.1", Rule(5, 6, 0.1, 0.9, corrects=False, task="char_lm")),
            ("text, adamw 0.01", Rule(5, 6, 0.01, is_adamw=True, corrects=False, task="char_lm")),
        ):
            for k, d in ((5, 6), (6, 6), (12, 12), (5, 29), (29, 29)):
                if d < 29 or rule.task == "digits":
                    shown = replace(rule, local_steps=k, delay=d, steps=3 * k + d)
                    table[f"{name}, K={k} D={d}"] = shown
        return table
    if group == "rate":
        own = Rule(5, 9, 1.0, corrects=False, task="char_lm", steps=250, members=8)
        share = 1 - 5 / (2 * (5 + 9))
        return {
            "fedavg K=5": replace(own, delay=0),
            "paper K=5 D=9": own,
            "paper, first 3": replace(own, first=3),
            "decay 0.82": replace(own, leave=share),
            "decay 0.82, first 3": replace(own, leave=share, first=3),
        }
    if group == "text":
        for name, own in (
            ("momentum", Rule(6, 6, 0.1, 0.9, corrects=False, task="char_lm")),
            ("adamw", Rule(6, 6, 0.01, is_adamw=True, corrects=False, task="char_lm")),
        ):
            table |= {
                f"{name}, fedavg K={k}": replace(own, local_steps=k, delay=0) for k in (5, 17)
            }
            table |= {
                f"{name}, own K=D={k}": replace(own, local_steps=k, delay=k) for k in (2, 3, 6)
            }
            table[f"{name}, drift K=D=6"] = replace(own, corrects=True)
            table |= {
                f"{name}, own, leave 0.7, K=D=3": replace(own, local_steps=3, delay=3, leave=0.7)
            }
            shares = (0.5, 0.7, 0.9)
            table |= {f"{name}, paper, decay {s}, K=D=6": replace(own, leave=s) for s in shares}
        return table
    best = Rule(5, 6, 0.02, is_adamw=True)
    table = {f"fedavg K=5, lr {r}": replace(best, delay=0, lr=r) for r in (0.01, 0.02, 0.05)}
    for k in (6, 12):
        whole = replace(best, local_steps=k, delay=k)
        table[f"paper K=5 D={k}, lr 0.02"] = replace(best, delay=k, corrects=False)
        table[f"predict K=D={k}, lr 0.02"] = whole
        table[f"keep 0.25, learn 0.5, K=D={k}, lr 0.02"] = replace(whole, keep=0.25, learn=0.5)
    table["predict K=6 D=12, lr 0.02"] = replace(best, local_steps=6, delay=12)
    return table


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", default="sgd,momentum,adamw")
    parser.add_argument("--partitions", default="0.3,0.1", help="of Dirichlet distributions; iid")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows with these words")
    parser.add_argument("--steps", type=int, default=0, help="instead of 280, of text 200")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for group in args.groups.split(","):
        names = "iid" if group in ("text", "rate") else args.partitions
        partitions = [n if n == "iid" else f"dirichlet({n})" for n in names.split(",")]
        digits = {"text": 3, "rate": 3, "choice": 2}.get(group, 1)
        print(f"| {group} | {' | '.join(partitions)} |\n|---|{'---|' * len(partitions)}")
        chosen = {label: rule for label, rule in rows(group).items() if args.only in label}
        for label, rule in chosen.items():
            cells = []
            rule = replace(rule, steps=args.steps or rule.steps)
            for partition in partitions:
                fleets = [Fleet(rule, partition, seed) for seed in range(args.seeds)]
                found = [fleet.run(seed) for seed, fleet in enumerate(fleets)]
                if group == "choice":
                    found = [each for fleet in fleets for each in fleet.apart()]
                if diverged := sum(map(math.isnan, found)):
                    cells.append(f"{diverged} of {len(found)} diverged")
                    continue
                mean = statistics.fmean(found)
                least, most = (f"{x:.{digits}f}" for x in (min(found), max(found)))
                cells.append(f"{mean:.{digits}f} ({least} to {most})")
            print(f"| {label} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
