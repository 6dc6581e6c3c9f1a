"""Where members miss rounds: how far from the optimum of all a fleet ends.

    python benchmarks/missing.py

Five members with quadratic losses, each with a curvature, an optimum and a weight of its own; 160
rounds of 4 steps of plain SGD, each of which lacks the first to fourth column's number of members,
drawn anew. A row is a strategy, whose members hear the replies to rounds that they missed, or
("back") find the base when they are back; the last one is SCAFFOLD's algorithm 1, option II
(Karimireddy et al., ICML 2020), in float64. A figure is the largest distance, of 5 elements, of the
base from the optimum of the weighted sum of all losses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgetrain import codecs, strategies
from edgetrain.exchange.hub.contributions import Contribution
from edgetrain.exchange.hub.merger import Merger
from edgetrain.exchange.hub.terms import Terms
from edgetrain.vectors.vector import Vector

MEMBERS, ELEMENTS, ROUNDS, EVERY = 5, 5, 160, 4
CURVATURE = 0.05 * (1 + np.arange(MEMBERS) / 2)[:, None]
WEIGHTS = np.array([1.0, 2.0, 3.0, 1.0, 2.0])


class Losses:
    """The members' losses, and who is there in each round."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self.optima = 3 * self._rng.standard_normal((MEMBERS, ELEMENTS))

    def gradient(self, member: int, at: NDArray[np.floating]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = CURVATURE[member] * (at - self.optima[member])
        return found

    def there(self, round: int, missing: int) -> list[int]:
        drawn = self._rng.choice(MEMBERS, MEMBERS - missing * (round > 1), replace=False)
        return sorted(int(member) for member in drawn)

    def distance(self, base: NDArray[np.floating]) -> float:
        each = WEIGHTS[:, None] * CURVATURE
        best = (each * self.optima).sum(0) / each.sum()
        return float(np.abs(base[:ELEMENTS] - best).max())


def distance(strategy: str, missing: int, back: bool = False) -> float:
    """Where the strategy's halves and the hub's merger end, if each round lacks that many. Raises
    AssertionError if a member's base is not the hub's."""
    losses, row, fp32 = Losses(), strategies.find(strategy), codecs.parse("fp32")
    params = np.zeros((MEMBERS, ELEMENTS * (1 + row.has_variates)), np.float32)
    gradients = np.zeros((MEMBERS, ELEMENTS), np.float32)
    halves = [
        row.member_half(strategies.Setting(*vectors, EVERY, 0, members=MEMBERS))
        for vectors in zip(params, gradients, strict=True)
    ]
    merger = Merger(row.merge_rule(), fp32, fp32, Terms(row, EVERY), masked=False)
    merger.bind_model((), params.shape[1])
    base: Vector = params[0].copy()
    merger.start(base)
    for round in range(ROUNDS):
        there, given = losses.there(round, missing), []
        for m in there:
            half, mine = halves[m], params[m, :ELEMENTS]
            if half.round < round:
                half.rebase(base.copy(), round)
                half.skip_to(round)
            for _ in range(EVERY):
                gradients[m] = losses.gradient(m, mine)
                half.before_step()
                mine -= gradients[m]
                half.note_rate(1.0)
                own = half.after_step()
            assert own is not None
            given.append(Contribution(f"m{m}", WEIGHTS[m], (own.tobytes(),)))
        (payload,) = merger.close_round(round, given, whole=WEIGHTS.sum()).payloads
        for m, half in enumerate(halves):
            if m in there or not back:
                half.skip_to(round + 1)
                half.apply([np.frombuffer(payload, np.float32)])
                assert half.base.tobytes() == base.tobytes()
    return losses.distance(base)


def papers_distance(missing: int) -> float:
    """Where SCAFFOLD ends as it is written."""
    losses, x, c = Losses(), np.zeros(ELEMENTS), np.zeros(ELEMENTS)
    variates = np.zeros((MEMBERS, ELEMENTS))
    for round in range(ROUNDS):
        there = losses.there(round, missing)
        moved, changed = np.zeros((2, ELEMENTS))
        for m in there:
            y = x.copy()
            for _ in range(EVERY):
                y -= losses.gradient(m, y) - variates[m] + c
            before, variates[m] = variates[m].copy(), variates[m] - c + (x - y) / EVERY
            moved += WEIGHTS[m] * (y - x)
            changed += WEIGHTS[m] * (variates[m] - before)
        x, c = x + moved / WEIGHTS[there].sum(), c + changed / WEIGHTS.sum()
    return losses.distance(x)


def main() -> int:
    """Print the table."""
    rows: dict[str, Callable[[int], float]] = {
        f"{name}{', back' * back}": lambda missing, name=name, back=back: distance(  # type: ignore[misc]
            name, missing, back
        )
        for name in ("fedavg", "scaffold")
        for back in (False, True)
    }
    print(f"{'missing, of 5':18}" + "".join(f"{missing:10}" for missing in range(MEMBERS)))
    for label, found in {**rows, "the paper's": papers_distance}.items():
        print(f"{label:18}" + "".join(f"{found(missing):10.1e}" for missing in range(MEMBERS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
