"""What a member's checkpoint costs: bytes in an hour, and steps with it beside steps without.

    python benchmarks/checkpoint.py                       # a million parameters, Adam
    python benchmarks/checkpoint.py --width 2000 --codec 'topk(0.01) | q2'

Two members of fedavg train alone, each with a hub in memory, in turns of a few seconds; one of them
keeps a checkpoint. `--every` is far below the default, so that there is something to see; what the
default pace comes to is worked out from the saves that were measured. On a shared machine the
ratio wavers by some percent; the bytes do not.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

from edgetrain import codecs, strategies
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.serve import serve
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.loopback import Loopback
from edgetrain.exchange.member.checkpoint import Keep, Sparing
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.training.keeping import keeping_of
from edgetrain.training.member import Member, bind


def hub_of(codec: str) -> tuple[Loopback, Hub]:
    row = strategies.find("fedavg")
    terms = Terms.of_strategy(row, 5, 0)
    parsed = codecs.parse(codec)
    return Loopback(), Hub(terms, Policy(1), row.merge_rule(), parsed, parsed)


class Trained:
    """A member and its hub; `turn` trains for so many seconds."""

    def __init__(self, options: argparse.Namespace, folder: Path | None) -> None:
        torch.manual_seed(0)
        width = options.width
        self.model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-4)
        self.x, self.y = torch.randn(options.batch, width), torch.randint(0, 10, (options.batch,))
        wires, hub = hub_of(options.codec)
        ended = threading.Event()
        self._end = ended.set
        arguments = (hub, wires, time.monotonic, lambda effect: None, ended.is_set)
        threading.Thread(target=serve, args=arguments, daemon=True).start()
        keeping = None
        if folder is not None:
            keep = Keep(folder, Sparing(options.every, 1.0, 1e15))
            keeping = keeping_of(keep, "m0", self.model, self.optimizer)
        self.keeper = None if keeping is None else keeping.keeper
        flat = bind(self.model, self.optimizer)
        self.elements = flat.elements
        link = Link(wires.connect(), time.monotonic)
        self.member = Member.join(link, flat, self.optimizer, Request("", "m0"), keeping=keeping)
        self.steps, self.seconds = 0, 0.0

    def turn(self, seconds: float) -> None:
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(self.x), self.y).backward()  # type: ignore[no-untyped-call]
            self.member.step()
            self.steps += 1
        self.seconds += time.monotonic() - began

    def end(self) -> None:
        self.member.abandon("done")
        self._end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1000, help="of the hidden layer")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two saves")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--turn", type=float, default=3.0, help="seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        plain, kept = Trained(options, None), Trained(options, Path(place))
        for each in (plain, kept):
            stack.callback(each.end)
            each.turn(1.0)
            each.steps, each.seconds = 0, 0.0
        for _ in range(options.turns):
            plain.turn(options.turn)
            kept.turn(options.turn)
        keeper = kept.keeper
        assert keeper is not None
        newest = max(Path(place).glob("*.checkpoint"))  # the first one has no optimizer's state
        size, took = newest.stat().st_size, keeper.seconds / keeper.saves
        ratio = (kept.seconds / kept.steps) / (plain.seconds / plain.steps)
        usual = Sparing()
        pause = usual.pause_s(took, size)
        print(f"{kept.elements:,} parameters, Adam, {options.codec}")
        print(f"a checkpoint has {size:,.0f} bytes, {size / kept.elements:.2f} a parameter")
        share = keeper.seconds / kept.seconds
        print(f"one took {took * 1000:.0f} ms, all together {share:.3f} of the time")
        print(f"a step with one every {options.every:g} s is {ratio:.3f} of one without")
        print(f"by default one every {pause:,.0f} s: {size * 3600 / (pause + took) / 1e6:,.1f} MB")
        print(f"an hour, and {took / (pause + took):.5%} of the time")


if __name__ == "__main__":
    main()
