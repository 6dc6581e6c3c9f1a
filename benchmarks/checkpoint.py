"""What a member's checkpoint costs: bytes in an hour, and steps with it beside steps without.

Two members of fedavg train a network of a million parameters alone, each with a hub in memory, in
turns of a few seconds; one of them keeps a checkpoint. It does so once a second, far more often
than by default, so that there is something to see; what the default comes to is worked out from
the saves that were measured. On a shared machine the ratio wavers by some percent; the bytes do
not.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import Measured, measure
from torch import nn

from edgetrain import codecs, strategies
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.serve import serve
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.member.checkpoint import Keep, Sparing
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.training.member.keeping import keeping_of
from edgetrain.training.member.member import Member, bind

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fakes"))

from loopback import Loopback


def hub_of(codec: str) -> tuple[Loopback, Hub]:
    row = strategies.find("fedavg")
    terms = Terms(row, 5)
    parsed = codecs.parse(codec)
    return Loopback(), Hub(terms, Policy(1), row.merge_rule(), parsed, parsed)


WIDTH, BATCH = 1000, 32
EVERY_S, TURN_S, TURNS = 1.0, 3.0, 5


class Trained:
    """A member and its hub; with a folder it keeps a checkpoint there."""

    def __init__(self, codec: str, folder: Path | None) -> None:
        torch.manual_seed(0)
        width = WIDTH
        self.model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-4)
        self.x, self.y = torch.randn(BATCH, width), torch.randint(0, 10, (BATCH,))
        wires, hub = hub_of(codec)
        ended = threading.Event()
        self._end = ended.set
        arguments = (hub, wires, time.monotonic, lambda effect: None, ended.is_set)
        threading.Thread(target=serve, args=arguments, daemon=True).start()
        keeping = None
        if folder is not None:
            keep = Keep(folder, Sparing(EVERY_S, 1.0, 1e15))
            keeping = keeping_of(keep, "m0", self.model, self.optimizer)
        self.keeper = None if keeping is None else keeping.keeper
        flat = bind(self.model, self.optimizer)
        self.elements = flat.elements
        link = Link(wires.connect(), time.monotonic)
        self.member = Member.join(link, flat, self.optimizer, Request("", "m0"), keeping=keeping)

    def turn(self, seconds: float) -> float:
        """Train for this long; the seconds of a step."""
        began, steps = time.monotonic(), 0
        while time.monotonic() < began + seconds:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(self.x), self.y).backward()  # type: ignore[no-untyped-call]
            self.member.step()
            steps += 1
        return (time.monotonic() - began) / steps

    def end(self) -> None:
        """Leave the hub, which ends."""
        self.member.abandon("done")
        self._end()


def turn(plain: Trained, kept: Trained, folder: Path) -> dict[str, float]:
    """A turn of each."""
    keeper = kept.keeper
    assert keeper is not None
    saves, seconds = keeper.saves, keeper.seconds
    without = plain.turn(TURN_S)
    ratio = kept.turn(TURN_S) / without
    newest = max(folder.glob("*.checkpoint"))
    size, took = newest.stat().st_size, (keeper.seconds - seconds) / (keeper.saves - saves)
    pause = Sparing().pause_s(took, size)
    return {
        "bytes": size,
        "bytes a parameter": size / kept.elements,
        "a save, ms": 1000 * took,
        f"of the time, one every {EVERY_S:g} s, %": 100 * (keeper.seconds - seconds) / TURN_S,
        "a step, of one without": ratio,
        "by default, MB an hour": size * 3600 / (pause + took) / 1e6,
        "by default, % of the time": 100 * took / (pause + took),
    }


def measured() -> Iterator[Measured]:
    """Dense, and with a sparse codec, whose residual is in the checkpoint."""
    torch.set_num_threads(1)
    for codec in ("fp32", "topk(0.01) | q2"):
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            plain, kept = Trained(codec, None), Trained(codec, Path(name))
            for each in (plain, kept):
                stack.callback(each.end)
                each.turn(2 * EVERY_S)  # the first checkpoint has no optimizer's state
            what = f"{kept.elements:,} parameters, Adam, {codec}"
            yield measure(what, lambda: turn(plain, kept, Path(name)), TURNS)  # noqa: B023
