"""The stand-in for a round in flight where a member's own progress predicts its reply badly.

Pure: float32 vectors in and out. docs/explanation/dga.md derives the rule, docs/decisions/023 has
what was tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import BadMessage
from edgetrain.strategies.choice import SENT, FirstRounds
from edgetrain.vectors.vector import TILE, Vector, zeros

FORGET = 0.8
"""Factor by which a new reply weakens older evidence for theta."""

Shares = tuple[np.float32, np.float32]
"""Shares of own contribution and gap that stand for a round in flight: (keep, learn)."""

SAMPLE = 16_384
"""Elements, spread evenly over the vector, on which theta is measured; at most."""


class Drift:
    """Learns how replies differ from a member's own contributions, and predicts it.

    While n rounds are in flight, DGA trains at base + own_1 + ... + own_n: at the member's own,
    unaveraged drift. With this, each own_r is replaced by ::

        stand_in(own) = keep own + learn gap

        keep  = 1 - theta (1/2 + 1/(4n))        learn = theta (1/4 + 1/(4n))
        gap <- gap + b ((reply - own) - gap)    b = max(1/(n + 1), 1/replies so far)
        theta = <reply - own, gap'> / <gap', gap'>, within 0 and 1

    gap' is the gap when `own` was submitted, so theta is the part of that prediction that came
    true; older products fade. theta = 0 is DGA, and the initial value.

    With an optimizer that has momentum m, rounds of K steps overshoot, and ::

        keep  = 1 - theta share                 learn = theta (1 - share)
        share = (1/2 + 1/(4n)) (1 - m^K)

    Nothing of this is in the base, or sent: members may disagree. `gap`, float32 [elements], is the
    one vector of memory; of older gaps a sample is kept for each round in flight.

    With a `choice` the gap is learned, and own progress stands for every round until it is made.
    """

    name = "predict"
    """The correction, as a choice names it."""
    first = 0
    """First rounds of a run that plain SGD takes without a delay."""

    def __init__(
        self,
        elements: int,
        momentum: float = 0.0,
        choice: FirstRounds | None = None,
        others: Callable[[str], Drift | None] | None = None,
    ) -> None:
        """`momentum` is that of the member's optimizer, from 0 (none) to 1. `others` makes another
        correction, which the choice may be, from its name."""
        self.choice = choice
        """What says whether it is needed, while that is open; None: it is not, or no longer."""
        self._others = others
        self._momentum = min(max(momentum, 0.0), 1.0)
        self.waits = 0 if self._momentum else self.first
        """First rounds whose replies are waited for, whatever the delay is."""
        self.gap: Vector = zeros(elements)
        self.theta = 0.0
        self.shares: Shares = np.float32(1), np.float32(0)
        """Shares in force. They change only where the parameters are rebuilt with them."""
        self._coming = self.shares
        self._rounds = 1
        self._replies = 0
        self._products = np.zeros(2)
        """<reply - own, gap'> and <gap', gap'> over the replies so far, older ones weakened."""
        self._stride = max(1, math.ceil(elements / SAMPLE))
        self._scratch = np.empty((2, min(TILE, elements)), np.float32)
        self._rate = np.float32(1)
        self._measured = [0.0, 0.0]
        self._learns = self._is_evidence = True

    @property
    def stayed(self) -> Vector | None:
        """What is in the parameters besides base and rounds in flight; None: nothing ever is."""
        return None

    # -- standing in ---------------------------------------------------------------------------

    def add_stand_ins(
        self, expected: Vector, here: slice, owns: Sequence[Vector], shares: Shares
    ) -> None:
        """Add what stands for these rounds to one tile, with these shares of them."""
        if not owns:
            return
        (keep, learn), scratch = shares, self._scratch[0, : expected.size]
        for own in owns:
            expected += np.multiply(own[here], keep, out=scratch)
        if learn:
            expected += np.multiply(self.gap[here], np.float32(len(owns)) * learn, out=scratch)

    def stand_in(self, out: Vector, here: slice, own: Vector) -> Vector:
        """Write what stands for one round into `out`, one tile."""
        out[:] = 0
        self.add_stand_ins(out, here, [own], self.shares)
        return out

    # -- learning ------------------------------------------------------------------------------

    def predicted(self) -> Vector | None:
        """A sample of the gap, for the round that is submitted now; None: nothing is known yet."""
        return self.gap[:: self._stride].copy() if self._replies else None

    def begin_reply(
        self, local_steps: int, delay: int, whole: bool = False, sent: float = 1.0
    ) -> Shares:
        """Begin to learn from a reply. Returns the shares to be in force after it, which follow
        from the replies before it: the vector is walked once.

        `whole`: the contribution was sent in part, and is compared as a whole. That teaches
        nothing: until one is not, own progress stands for rounds in flight. `sent`: the share of
        it, of its squared length, that a codec sent; a choice asks."""
        if delay:  # 0 at the end of training: rounds in flight took as long as before
            self._rounds = max(1, math.ceil(delay / local_steps))
        self._replies += 1
        self._rate = np.float32(max(1 / (self._rounds + 1), 1 / self._replies))
        self._measured = [0.0, 0.0]
        if whole:
            self.theta, self._products = 0.0, np.zeros(2)
        self._learns = not whole
        self._is_evidence = not whole and sent >= SENT
        theta = 0.0 if self.choice is not None else self.theta
        taken, given = self._at_most(local_steps)
        self._coming = np.float32(1 - theta * taken), np.float32(theta * given)
        return self._coming

    def _at_most(self, local_steps: int) -> tuple[float, float]:
        """Shares at theta = 1: taken from own progress, and given to the gap."""
        taken = 0.5 + 0.25 / self._rounds
        if not self._momentum:
            return taken, taken - 0.25
        taken *= 1 - self._momentum**local_steps
        return taken, 1 - taken

    def learn_tile(self, here: slice, reply: Vector, own: Vector, predicted: Vector | None) -> None:
        """Learn from one tile of a reply: `reply` is the tile, `own` the whole contribution."""
        if not self._learns:
            return
        difference, scratch = self._scratch[:, : reply.size]
        np.subtract(reply, own[here], out=difference)
        if predicted is not None:
            skip = -here.start % self._stride
            sample = difference[skip :: self._stride].astype(np.float64)
            first = (here.start + skip) // self._stride
            then = predicted[first : first + sample.size].astype(np.float64)
            # Not np.dot: its rounding depends on how many threads BLAS has.
            self._measured[0] += float(np.sum(sample * then))
            self._measured[1] += float(np.sum(then * then))
        gap = self.gap[here]
        np.subtract(difference, gap, out=scratch)
        scratch *= self._rate
        gap += scratch
        if self.choice is not None and self._is_evidence:
            self.choice.add_tile(here, own, reply)

    def end_reply(self) -> tuple[Drift | None, str]:
        """Put the shares of the reply just learned from in force, and update theta. Returns what
        stands for rounds in flight from now on (None: own progress), and why that was chosen; "":
        nothing was."""
        self.shares = self._coming
        if self._measured[1] > 0:
            self._products = FORGET * self._products + self._measured
            theta = self._products[0] / self._products[1]
            self.theta = float(min(max(theta, 0.0), 1.0)) if math.isfinite(theta) else 0.0
        choice = self.choice
        if choice is None or not self._is_evidence:
            return self, ""
        choice.end_round()
        if not choice.is_made:
            return self, ""
        self.choice = None
        return self if choice.chosen == self.name else self._instead(choice.chosen), choice.reason

    def _instead(self, chosen: str) -> Drift | None:
        """What stands for rounds in flight with this correction, another than this."""
        return None if self._others is None else self._others(chosen)

    # -- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, NDArray[Any]]:
        """State that a restarted member needs so as not to learn it again."""
        learned = self._learned()
        return learned if self.choice is None else learned | self.choice.state()

    def restore(self, state: Mapping[str, NDArray[Any]]) -> Drift | None:
        """Continue from `state`, before any round is in flight. Returns what had been chosen in
        place of this, or itself; None: own progress. BadMessage if it is impossible."""
        then = "predict" if "gap" in state else "decay" if "stayed" in state else "paper"
        if self.choice is not None and then != self.name:
            other = self._instead(then)
            return other and other.restore(state)
        self._restore(state)
        if self.choice is None or "ways" not in state:  # it was made
            self.choice = None
        else:
            self.choice.restore(state)
        return self

    def _learned(self) -> dict[str, NDArray[Any]]:
        figures = [*self._products, float(self._replies), float(self._rounds)]
        return {"gap": self.gap, "figures": np.array(figures)}

    def _restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        gap, figures = state.get("gap"), state.get("figures")
        if gap is None or figures is None or gap.shape != self.gap.shape or figures.shape != (4,):
            raise BadMessage(f"the checkpoint's drift is not one of {self.gap.size} elements")
        if not (np.isfinite(figures).all() and (figures >= [-np.inf, 0, 0, 1]).all()):
            raise BadMessage(f"the checkpoint's drift has the figures {figures.tolist()}")
        self.gap[:] = gap
        self._products = figures[:2].astype(np.float64)
        self._replies, self._rounds = int(figures[2]), int(figures[3])
        if self._products[1] > 0:
            self.theta = float(np.clip(self._products[0] / self._products[1], 0.0, 1.0))
