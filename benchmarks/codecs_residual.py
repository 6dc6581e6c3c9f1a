"""Where should a member keep what its lossy codec has not sent yet?

    python benchmarks/codecs_residual.py --partitions iid,0.3,0.1 --steps 1000
    python benchmarks/codecs_residual.py --task edgetrain.tasks:char_lm --members 4 --batch 4 \\
        --optimizer adamw --rate 0.002 --seeds 1

`out`: error feedback beside the model. The reply to a contribution replaces all of it, so what was
not sent leaves the member's parameters and waits in the residual.
`in`: the member's parameters keep it. Only what was sent counts as in flight, so the next
displacement contains the rest by itself.
`rule`: one of the two, for each member, as replies teach: what edgetrain does, by its own half of
DGA (docs/decisions/012-residual-in-parameters.md). In brackets: the share of rounds x members in
which the residual was outside.

Members and hub in one process, members as rows of a matrix, with the delay counted in rounds;
contributions and replies both go through the codec, the hub's replies with feedback. Bytes are
those of the payloads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import deque

import numpy as np
import torch
from torch import Tensor, nn

from edgetrain.codecs import Codec, Feedback, parse
from edgetrain.strategies.displacement import Displacement
from edgetrain.tasks import load_task
from edgetrain.tasks.flat import FlatModel, with_parameters
from edgetrain.tasks.vmapped import LossModule, batchable_attention
from edgetrain.vectors.vector import Buffer, Vector


class Rows:
    """The members' models as rows of `params` [members, elements], and one optimizer."""

    def __init__(self, args: argparse.Namespace, partition: str, seed: int) -> None:
        self._task = load_task(args.task, {"seed": seed, "partition": partition})
        torch.manual_seed(seed)
        self._model = self._task.model()
        flat = FlatModel(self._model)
        self.initial: Vector = flat.params.copy()
        self._params = nn.Parameter(torch.from_numpy(self.initial).repeat(args.members, 1))
        self.params = list(self._params.detach().numpy())
        self._draws = [
            iter(self._task.batches(m, args.members, args.batch, seed)) for m in range(args.members)
        ]
        if args.optimizer == "sgd":
            self._optimizer: torch.optim.Optimizer = torch.optim.SGD(
                [self._params], lr=args.rate, momentum=args.momentum
            )
        else:
            self._optimizer = torch.optim.AdamW([self._params], lr=args.rate)
        module, layout = LossModule(self._task, self._model), flat.layout

        def loss(params: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
            named = {
                f"model.{name}": params[start : start + torch.Size(shape).numel()].view(*shape)
                for name, start, shape in layout
            }
            return torch.func.functional_call(module, named, batch)  # type: ignore[no-any-return]

        self._gradients = torch.func.vmap(torch.func.grad(loss), randomness="different")

    def train(self, steps: int) -> None:
        for _ in range(steps):
            drawn = zip(*(next(draws) for draws in self._draws), strict=True)
            batch = tuple(torch.stack(parts) for parts in drawn)
            with batchable_attention():
                self._params.grad = self._gradients(self._params.detach(), batch)
            self._optimizer.step()

    def evaluate(self, base: Vector) -> dict[str, float]:
        return self._task.evaluate(with_parameters(self._model, base))


class Naive:
    """One member's half of DGA, with the residual `in` its parameters or `out` of them."""

    def __init__(self, params: Vector, codec: Codec, keep_in: bool) -> None:
        self.params, self._codec, self._keep_in = params, codec, keep_in
        self.base, self._expected = params.copy(), params.copy()
        self._feedback = Feedback(codec, params.size)
        self._inflight: deque[Vector] = deque()
        self.outside = 0 if keep_in else 1

    def submit(self) -> list[Buffer]:
        """The payloads of what this member did since its last round."""
        own = self.params - self._expected
        if self._keep_in:
            payloads = self._codec.encode(own)
            own = decoded(self._codec, payloads, own.size)
            self._expected = self._expected + own
        else:
            payloads = self._feedback.encode(own)
            self._expected = self.params.copy()
        self._inflight.append(own)
        return payloads

    def apply(self, reply: Vector) -> None:
        """The reply to the oldest contribution replaces it."""
        self._inflight.popleft()
        self.base = self.base + reply
        expected = self.base + sum(self._inflight, np.zeros_like(self.base))
        self.params += expected - self._expected
        self._expected = expected


class Rule:
    """The same by edgetrain's own half."""

    def __init__(self, params: Vector, codec: Codec, every: int, delay: int) -> None:
        self._half, self._codec, self._every = Displacement(params, every, delay), codec, every
        self.outside = 0

    @property
    def base(self) -> Vector:
        return self._half.base

    def submit(self) -> list[Buffer]:
        """The payloads of what this member did since its last round."""
        whole = [self._half.after_step() for _ in range(self._every)][-1]
        assert whole is not None
        payloads = self._codec.encode(whole)
        self._half.sent(decoded(self._codec, payloads, whole.size))
        self.outside = int(self._half.unsent.beside is not None)
        return payloads

    def apply(self, reply: Vector) -> None:
        """The reply to the oldest contribution replaces it."""
        self._half.apply([reply])


def decoded(codec: Codec, payloads: list[Buffer], elements: int) -> Vector:
    out = np.empty(elements, np.float32)
    step = codec.part_elements
    for i, payload in enumerate(payloads):
        codec.decode(payload, out[i * step : (i + 1) * step])
    return out


def run(
    args: argparse.Namespace, spec: str, keep: str, partition: str, seed: int
) -> tuple[dict[str, float], int, float]:
    """(figures of the base in the end, payload bytes both ways, share of residuals outside)."""
    rows, codec = Rows(args, partition, seed), parse(spec)
    members = [
        Rule(params, codec, args.every, args.delay)
        if keep == "rule"
        else Naive(params, codec, keep == "in")
        for params in rows.params
    ]
    hub = Feedback(codec, rows.initial.size)
    replies: deque[Vector] = deque()
    size, outside, rounds = 0, 0, args.steps // args.every
    for _ in range(rounds):
        total = np.zeros(hub.elements, np.float32)
        rows.train(args.every)
        for member in members:
            payloads = member.submit()
            outside += member.outside
            size += sum(map(len, payloads))
            total += decoded(codec, payloads, hub.elements) / np.float32(args.members)
        payloads = hub.encode(total)
        size += args.members * sum(map(len, payloads))
        replies.append(decoded(codec, payloads, hub.elements))
        if len(replies) > args.delay // args.every:
            reply = replies.popleft()
            for member in members:
                member.apply(reply)
    for reply in replies:
        for member in members:
            member.apply(reply)
    return rows.evaluate(members[0].base), size, outside / (rounds * args.members)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="edgetrain.tasks:digits")
    parser.add_argument("--partitions", default="iid", help="iid, or a Dirichlet distribution's")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--delay", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.2)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keeps", default="dense,out,in,rule", help="the rows of the table")
    parser.add_argument("--codec", action="append", help="besides fp32; topk(0.01) | q2 by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = f"every {args.every}, delay {args.delay}"
    print(f"{args.task}, {args.members} members, {rounds}, {args.steps} steps")
    for name in args.partitions.split(","):
        partition = name if name == "iid" else f"dirichlet({name})"
        dense_size = 0.0
        keeps = args.keeps.split(",")
        for spec in ["fp32", *(args.codec or ["topk(0.01) | q2"])]:
            for keep in [k for k in keeps if (k == "dense") == (spec == "fp32")]:
                results = [run(args, spec, keep, partition, seed) for seed in range(args.seeds)]
                size = statistics.mean(size for _, size, _ in results)
                if keep == "dense":
                    dense_size = size
                fewer = f", {dense_size / size:.1f} times fewer payload bytes" if dense_size else ""
                words = []
                for key in results[0][0]:
                    figures = [figures[key] for figures, _, _ in results]
                    spread = f"{min(figures):.4f} to {max(figures):.4f}"
                    words.append(f"{key} {statistics.mean(figures):.4f} ({spread})")
                outside = statistics.mean(share for _, _, share in results)
                print(
                    f"{partition:<14} {spec:<16} {keep:<5} [{outside:.2f}] {', '.join(words)}"
                    f"{fewer}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
