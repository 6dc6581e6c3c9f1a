"""What a merge rule bears: digits, ten members, three of which send what they have not learnt.

    python benchmarks/byzantine.py                     all rules and attacks: about two minutes
    python benchmarks/byzantine.py --rules mean,median --attacks reversed --seeds 0,1,2 --json

The real hub, members and strategy over a transport in memory. `flipped` members send the opposite
of what they learnt, `reversed` ones three times the opposite, `random` ones standard normal noise,
`together` all the same noise. The last column is the most that accuracy fell against the mean of
honest members only, which is the first line. A rule passes that loses at most one point.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edgetrain import codecs, strategies
from edgetrain.errors import EdgetrainError
from edgetrain.exchange.hub.effects import Closed, Observed
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.serve import serve
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.loopback import Loopback
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.exchange.transport import MemberTransport
from edgetrain.strategies import merging
from edgetrain.tasks import Task, load_task
from edgetrain.tasks.flat import FlatModel
from edgetrain.training.member import Member
from edgetrain.vectors.vector import Vector

MEMBERS, LIARS = 10, 3
RULES = ("mean", "median", "trimmed-mean(0.3)", "krum(3)", "multi-krum(3)", "centered-clip(1x)",
         "norm-clip(1x)", "norm-bound(1.5x)")  # fmt: skip
ROBUST = ("median", "trimmed-mean(0.3)", "multi-krum(3)", "centered-clip(1x)")
"""Rules that bear any three of ten and learn from all others. `krum` bears them too, but takes what
one member learnt in a round: it stays behind the mean whether anyone lies or not."""
EVERY, DELAY = 5, 5

Lie = Callable[[Vector, np.random.Generator, int], Vector]


def noise(rng: np.random.Generator, like: Vector) -> Vector:
    """Standard normal, of the size of a vector."""
    return rng.standard_normal(like.size, np.float32)


ATTACKS: dict[str, Lie] = {
    "flipped": lambda own, rng, round: -own,
    "reversed": lambda own, rng, round: np.float32(-3) * own,
    "random": lambda own, rng, round: noise(rng, own),
    "together": lambda own, rng, round: noise(np.random.default_rng(round), own),
}


class Hostile(Link):
    """The link of a member that trains like the others and contributes something else."""

    def __init__(self, transport: MemberTransport, lie: Lie, rng: np.random.Generator) -> None:
        super().__init__(transport, time.monotonic)
        self._lie, self._rng = lie, rng

    def submit(self, round: int, contribution: Vector, **other: Any) -> Vector | None:
        """Hand over a lie."""
        return super().submit(round, self._lie(contribution, self._rng, round + 1), **other)


@dataclass(frozen=True)
class Setting:
    """One run."""

    rule: str
    attack: str
    """Of LIARS of the members; "none": all are honest. """
    seed: int
    steps: int
    batch: int
    strategy: str


@dataclass
class Outcome:
    """What came of it."""

    accuracy: float
    cut_share: float
    """Of all that was reported as cut, what was the liars'."""
    seconds: float


def train(setting: Setting, task: Task) -> Outcome:
    """One run, each member a thread."""
    row = strategies.find(setting.strategy)
    codec = codecs.Dense()
    delay = DELAY if row.delays else 0
    terms = Terms.of_strategy(row, EVERY, delay)
    hub = Hub(terms, Policy(MEMBERS), row.merge_rule(setting.rule), codec, codec)
    wire = Loopback()
    cuts = {f"m{i}": 0.0 for i in range(MEMBERS)}

    def watch(effect: Observed) -> None:
        if isinstance(effect, Closed):
            for name, share, _ in effect.cuts:
                if name in cuts:
                    cuts[name] += share

    found: dict[int, float] = {}
    began = time.monotonic()
    threads = [
        threading.Thread(target=one_member, args=(setting, task, wire, index, found))
        for index in range(MEMBERS)
    ]
    for thread in threads:
        thread.start()
    serve(hub, wire, time.monotonic, watch)
    for thread in threads:
        thread.join()
    lied = sum(cuts[f"m{i}"] for i in range(MEMBERS - LIARS, MEMBERS))
    share = lied / (sum(cuts.values()) or 1.0)
    return Outcome(found.get(0, float("nan")), share, time.monotonic() - began)


LOCK = threading.Lock()
"""torch's global generator belongs to one model at a time."""


def one_member(
    setting: Setting, task: Task, wire: Loopback, index: int, found: dict[int, float]
) -> None:
    """Train; member 0, who is honest, says how good the fleet's model is."""
    with LOCK:
        torch.manual_seed(setting.seed)
        model = task.model()
    flat = FlatModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    lies = setting.attack != "none" and index >= MEMBERS - LIARS
    batches = task.batches(index, MEMBERS, setting.batch, setting.seed)
    request = Request("", f"m{index}", 1.0)
    if lies:
        rng = np.random.default_rng(index)
        link: Link = Hostile(wire.connect(), ATTACKS[setting.attack], rng)
    else:
        link = Link(wire.connect(), time.monotonic)
    try:
        with Member.join(link, flat, optimizer, request) as member:
            for _ in range(setting.steps):
                optimizer.zero_grad()
                task.loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
                member.step()
    except EdgetrainError as error:  # training diverged
        print(f"{setting.rule}, {setting.attack}: m{index}: {error}", file=sys.stderr)
        return
    if index == 0:
        found[0] = task.evaluate(model)["accuracy"]


def main() -> None:
    """Run, print, fail if a rule did not keep what it promises."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rules", default=";".join(RULES), help="separated by ';'")
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--strategy", default="dga", choices=["dga", "local-sgd", "sync-sgd"])
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    tasks = {
        seed: load_task("edgetrain.tasks:digits", {}, defaults={"seed": seed}) for seed in seeds
    }

    def measure(rule: str, attack: str) -> list[Outcome]:
        settings = [
            Setting(rule, attack, seed, arguments.steps, arguments.batch, arguments.strategy)
            for seed in seeds
        ]
        return [train(setting, tasks[setting.seed]) for setting in settings]

    def say(text: str) -> None:
        if not arguments.json:
            print(text, flush=True)

    clean = statistics.mean(o.accuracy for o in measure("mean", "none"))
    say(f"{'rule':20} {'attack':10} accuracy    points  liars' share of the cuts")
    say(f"{'mean':20} {'none':10} {clean:8.1%}")
    rows, worst = [], dict[str, float]()
    for rule in arguments.rules.split(";"):
        merging.find(rule)
        for attack in ["none", *arguments.attacks.split(",")]:
            outcomes = measure(rule, attack)
            accuracy = statistics.mean(o.accuracy for o in outcomes)
            points = 100 * (accuracy - clean)
            share = statistics.mean(o.cut_share for o in outcomes)
            rows.append(
                {"rule": rule, "attack": attack, "accuracy": accuracy, "points": points,
                 "liars_share_of_cuts": share}
            )  # fmt: skip
            # A run that diverged has no accuracy: it lost everything.
            lost = 100 * clean if points != points else -points
            worst[rule] = max(worst.get(rule, 0.0), lost)
            say(f"{rule:20} {attack:10} {accuracy:8.1%} {points:+9.1f}  {share:6.0%}")
    if arguments.json:
        print(json.dumps({"clean": clean, "rows": rows, "worst": worst}))
    for rule, points in worst.items():
        say(f"{rule:20} loses at most {points:.1f} points")
    failed = [rule for rule in worst if rule in ROBUST and worst[rule] > 1.0]
    if failed or worst.get("mean", 99.0) < 10.0:
        sys.exit(f"not as promised: {', '.join(failed) or 'the mean bears them'}")


if __name__ == "__main__":
    main()
