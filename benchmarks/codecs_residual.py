"""Where should a DGA member keep what its lossy codec has not sent yet?

    python benchmarks/codecs_residual.py --members 4 --delay 5 --steps 1000 --seeds 3
    python benchmarks/codecs_residual.py --task edgetrain.tasks:char_lm --members 4 \\
        --steps 500 --optimizer adamw --rate 0.002 --seeds 3

`out`: error feedback beside the model. The reply to a contribution replaces all of it, so what was
not sent leaves the member's parameters and waits in the residual.
`in`: the member's parameters keep it. Only what was sent counts as in flight, so the next
displacement contains the rest by itself.
`in` is what edgetrain does (docs/decisions/012-residual-in-parameters.md).
Members and hub in one process, with the delay counted in rounds; contributions and replies both go
through the codec, the hub's replies with feedback. Bytes are those of the payloads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from edgetrain.codecs import Codec, Feedback, parse
from edgetrain.tasks import Task, load_task
from edgetrain.vectors.vector import Buffer, Vector


class Member:
    """One member's model, its optimizer, its data, and its half of DGA."""

    def __init__(
        self, task: Task, number: int, args: argparse.Namespace, seed: int, codec: Codec
    ) -> None:
        torch.manual_seed(seed)
        self._task, self._model = task, task.model()
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        if args.optimizer == "sgd":
            self._optimizer: torch.optim.Optimizer = torch.optim.SGD(
                self._parameters, lr=args.rate, momentum=0.9
            )
        else:
            self._optimizer = torch.optim.AdamW(self._parameters, lr=args.rate)
        self._data: Iterator[Any] = iter(task.batches(number, args.members, args.batch, seed))
        self._codec = codec
        self.base = self.read()
        self._feedback = Feedback(codec, self.base.size)
        self._keep_in = args.keep == "in"
        self._inflight: deque[Vector] = deque()
        self._expected = self.base.copy()

    def read(self) -> Vector:
        return torch.cat([p.detach().reshape(-1) for p in self._parameters]).numpy().copy()

    def write(self, vector: Vector) -> None:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(vector), self._parameters)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._optimizer.zero_grad()
            self._task.loss(self._model, next(self._data)).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()

    def submit(self) -> list[Buffer]:
        """The payloads of what this member did since its last round."""
        params = self.read()
        own = params - self._expected
        if self._keep_in:
            payloads = self._codec.encode(own)
            own = decoded(self._codec, payloads, own.size)
            self._expected = self._expected + own
        else:
            payloads = self._feedback.encode(own)
            self._expected = params
        self._inflight.append(own)
        return payloads

    def apply(self, reply: Vector) -> None:
        """The reply to the oldest contribution replaces it."""
        self._inflight.popleft()
        self.base = self.base + reply
        expected = self.base + sum(self._inflight, np.zeros_like(self.base))
        self.write(self.read() + (expected - self._expected))
        self._expected = expected

    def evaluate(self) -> dict[str, float]:
        """The task's figures for the base, which all members share."""
        params = self.read()
        self.write(self.base)
        figures: dict[str, float] = self._task.evaluate(self._model)
        self.write(params)
        return figures


def decoded(codec: Codec, payloads: list[Buffer], elements: int) -> Vector:
    out = np.empty(elements, np.float32)
    step = codec.part_elements
    for i, payload in enumerate(payloads):
        codec.decode(payload, out[i * step : (i + 1) * step])
    return out


def run(args: argparse.Namespace, spec: str, seed: int) -> tuple[dict[str, float], int]:
    """(figures of the base in the end, payload bytes both ways)."""
    task, codec = load_task(args.task, {"seed": seed}), parse(spec)
    members = [Member(task, m, args, seed, codec) for m in range(args.members)]
    hub = Feedback(codec, members[0].base.size)
    replies: deque[Vector] = deque()
    size = 0
    for _ in range(args.steps // args.every):
        total = np.zeros(hub.elements, np.float32)
        for member in members:
            member.train(args.every)
            payloads = member.submit()
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
    return members[0].evaluate(), size


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="edgetrain.tasks:digits")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--delay", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--codec", action="append", help="besides fp32; topk(0.01) | q2 by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = f"every {args.every}, delay {args.delay}"
    print(f"{args.task}, {args.members} members, {rounds}, {args.steps} steps")
    dense_size = 0.0
    for spec in ["fp32", *(args.codec or ["topk(0.01) | q2"])]:
        for args.keep in ["out"] if spec == "fp32" else ["out", "in"]:
            results = [run(args, spec, seed) for seed in range(args.seeds)]
            size = statistics.mean(size for _, size in results)
            dense_size = dense_size or size
            words = []
            for key in results[0][0]:
                figures = [figures[key] for figures, _ in results]
                spread = statistics.stdev(figures) if len(figures) > 1 else 0.0
                words.append(f"{key} {statistics.mean(figures):.4f} ± {spread:.4f}")
            smaller = f"{dense_size / size:7.1f} times fewer payload bytes"
            print(f"{spec:<18} residual {args.keep:<4} {', '.join(words)}, {smaller}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
