"""Rules that judge whole contributions by their lengths and by how far they are from each other.

All of them are weighted sums of the contributions; the weights follow from their inner products,
and those are added up in one pass over the vector. So a rule is a few lines on a small matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgetrain.strategies.merging.rule import Discounted, Piece
from edgetrain.vectors.vector import Vector

TILE = 1 << 13
"""Elements whose products are taken at a time: as float64, 100 members are 6.4 MB of them."""

ITERATIONS = 3
"""Steps of centred clipping from its start."""

Matrix = NDArray[np.float64]
"""float64 [members, members]."""

Weights = NDArray[np.float64]
"""float64 [members]."""

Length = tuple[float, bool]
"""A length, and whether it is a multiple of the round's median."""

Judgement = tuple[Weights, tuple[Discounted, ...]]
"""Share of each contribution in the sum, and the cuts to report."""


class WeightedSum:
    """A RoundRule that is a sum of contributions, each times what `judge` says. See RoundRule."""

    fewest = 1
    keeps_late: bool

    def judge(self, products: Matrix, weights: Weights) -> Judgement:
        """From all inner products, and weights that sum to 1, to those of the sum."""
        raise NotImplementedError

    def merge_round(
        self, contributions: Sequence[Sequence[Piece]], out: Sequence[Vector]
    ) -> tuple[Discounted, ...]:
        claimed = np.array([pieces[0].weight for pieces in contributions])
        shares, cuts = self.judge(inner_products(contributions, out), claimed / claimed.sum())
        for part, merged in enumerate(out):
            pieces = [c[part] for c, share in zip(contributions, shares, strict=True) if share]
            kept = [float(share) for share in shares if share]
            _sum(pieces, kept, merged)
        return cuts


def _sum(pieces: Sequence[Piece], shares: Sequence[float], out: Vector) -> None:
    """out = sum of share * piece; a single whole one is copied bit for bit."""
    if not pieces:
        out[:] = 0
        return
    pieces[0].read(out)
    if shares[0] != 1.0:
        out *= np.float32(shares[0])
    for piece, share in zip(pieces[1:], shares[1:], strict=True):
        piece.add(share, out)


def inner_products(contributions: Sequence[Sequence[Piece]], out: Sequence[Vector]) -> Matrix:
    """All <x_i, x_j>. Products of float32 are exact in float64, so that two honest contributions
    are as far apart as they are, however long a third one is."""
    members = len(contributions)
    products = np.zeros((members, members))
    for part, merged in enumerate(out):
        rows = np.empty((members, merged.size), np.float32)
        for contribution, row in zip(contributions, rows, strict=True):
            contribution[part].read(row)
        for start in range(0, merged.size, TILE):
            tile = rows[:, start : start + TILE].astype(np.float64)
            products += tile @ tile.T
    return products


def distances(products: Matrix) -> Matrix:
    squares = np.diag(products)
    apart: Matrix = np.maximum(squares[:, None] + squares[None, :] - 2 * products, 0.0)
    return apart


def _limit(tau: Length, lengths: Weights) -> float:
    value, relative = tau
    return value * float(np.median(lengths)) if relative else value


class Krum(WeightedSum):
    """The `chosen` contributions whose n - f - 2 nearest neighbours are nearest, and their mean.

    Krum (chosen = 1) and Multi-Krum, Blanchard et al., "Machine Learning with Adversaries",
    NeurIPS 2017, section 4. It wants n > 2 f + 2 contributions. Of Multi-Krum as many may be chosen
    as resilience is proved for, m <= n - f - 2 (Damaskinos et al., AggregaThor, MLSys 2019); None
    is that many. In a round with fewer contributions than 2 f + 3 it tolerates as many liars
    as it can, and reports how many.
    """

    def __init__(self, f: int, chosen: int | None = 1, keeps_late: bool = True) -> None:
        self.f = f
        self.chosen = chosen
        self.keeps_late = keeps_late
        self.fewest = max(2 * f + 3, f + 2 + (chosen or 1))

    def judge(self, products: Matrix, weights: Weights) -> Judgement:
        """See WeightedSum. All members count the same."""
        members = len(products)
        f = max(min(self.f, (members - 3) // 2), 0)
        near = max(members - f - 2, 1)
        apart = np.sort(distances(products), axis=1)
        scores = apart[:, 1 : near + 1].sum(axis=1)  # [0] is its own, which is 0
        most = near if self.chosen is None else min(self.chosen, near)
        order = np.argsort(scores, kind="stable")
        shares = np.zeros(members)
        shares[order[:most]] = 1.0 / most
        limit = float(np.sqrt(scores[order[most - 1]]))
        cuts = [
            Discounted(
                int(i),
                1.0,
                f"{np.sqrt(scores[i]):.3g} from its neighbours, chosen up to {limit:.3g}",
            )
            for i in sorted(order[most:])
        ]
        if f < self.f:
            cuts.append(
                Discounted(
                    -1, 0.0, f"{members} contributions: {f} that lie are tolerated, not {self.f}"
                )
            )
        return shares, tuple(cuts)


class NormClip(WeightedSum):
    """The weighted mean of contributions, those longer than `tau` shortened to it.

    Sun et al., "Can You Really Backdoor Federated Learning?", 2019, section 4: no member moves the
    result by more than its weight times tau. It does not tolerate many that lie the same way.
    """

    def __init__(self, tau: Length, keeps_late: bool = True) -> None:
        self.tau = tau
        self.keeps_late = keeps_late

    def judge(self, products: Matrix, weights: Weights) -> Judgement:
        lengths = np.sqrt(np.diag(products))
        limit = _limit(self.tau, lengths)
        scale = _at_most(lengths, limit)
        return weights * scale, _shortened("length", lengths, scale, limit)


class NormBound(NormClip):
    """The weighted mean of the contributions that are not longer than `tau`; of none it is 0.

    The other reading of Sun et al., 2019: what is too long is left out.
    """

    def judge(self, products: Matrix, weights: Weights) -> Judgement:
        lengths = np.sqrt(np.diag(products))
        limit = _limit(self.tau, lengths)
        kept = (lengths <= limit).astype(np.float64)
        counted = weights * kept
        total = counted.sum()
        return counted / (total or 1.0), _shortened("length", lengths, kept, limit)


class CenteredClip(WeightedSum):
    """From a contribution in the middle, the mean of the ways to all others, none longer than tau.

    Centred clipping, Karimireddy et al., "Learning from History for Byzantine Robust Optimization",
    ICML 2021, equation (CC): v += 1/n sum (x_i - v) min(1, tau / |x_i - v|), `iterations` times.
    Where the paper starts from the last round's result, v starts from the contribution with the
    smallest median distance to the others: the rule needs no memory, and a restarted hub gives the
    same bits. As a multiple, tau is of the median distance from v.
    """

    def __init__(self, tau: Length, iterations: int = ITERATIONS, keeps_late: bool = True) -> None:
        self.tau = tau
        self.iterations = iterations
        self.keeps_late = keeps_late

    def judge(self, products: Matrix, weights: Weights) -> Judgement:
        """See WeightedSum. All members count the same; v is kept as weights of the sum."""
        members = len(products)
        apart = np.sort(distances(products), axis=1)
        # Two that are each other's median have equal ones; the nearer half decides.
        nearer = apart[:, : (members + 1) // 2].sum(axis=1)
        shares = np.zeros(members)
        shares[np.lexsort((nearer, np.median(apart, axis=1)))[0]] = 1.0
        for _ in range(self.iterations):
            ways = np.eye(members) - shares  # row i: x_i - v
            lengths = np.sqrt(np.maximum(np.einsum("ij,jk,ik->i", ways, products, ways), 0.0))
            limit = _limit(self.tau, lengths)
            scale = _at_most(lengths, limit)
            shares = shares + (scale[:, None] * ways).mean(axis=0)
        return shares, _shortened("distance", lengths, scale, limit)


def _at_most(lengths: Weights, limit: float) -> Weights:
    """Factors of the lengths, so that none exceeds the limit."""
    return np.divide(limit, lengths, out=np.ones_like(lengths), where=lengths > limit)


def _shortened(what: str, lengths: Weights, scale: Weights, limit: float) -> tuple[Discounted, ...]:
    return tuple(
        Discounted(i, float(1 - kept), f"{what} {length:.3g}, the limit is {limit:.3g}")
        for i, (length, kept) in enumerate(zip(lengths, scale, strict=True))
        if kept < 1
    )
