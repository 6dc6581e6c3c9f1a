"""Which samples belong to which member: pure functions of the labels, the members and a seed.

No data is touched and no tensor is made; a shard is an array of sample indices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import TaskError

Indices = NDArray[np.int64]

ALPHA_RANGE = (1e-3, 1e6)
MOST_OF_FEW = 100
"""Classes that there may be however few samples each has."""
_DIRICHLET = re.compile(r"dirichlet\(\s*([0-9.eE+-]+)\s*\)")


_SHARED = re.compile(r"shared\(\s*([0-9]+|all)\s*\)")


@dataclass(frozen=True)
class Shared:
    """Every member draws so many samples from all, whatever the others draw."""

    samples: int | None
    """None: all of them."""


def parse_partition(spec: str) -> float | Shared | None:
    """Alpha of "dirichlet(0.3)", Shared(64) of "shared(64)", None for "iid". TaskError."""
    if spec == "iid":
        return None
    if isinstance(spec, str) and (shared := _SHARED.fullmatch(spec)):
        if shared[1] == "all":
            return Shared(None)
        if not int(shared[1]):
            raise TaskError(f"partition '{spec}'", "a member needs at least 1 sample")
        return Shared(int(shared[1]))
    found = _DIRICHLET.fullmatch(spec) if isinstance(spec, str) else None
    try:
        alpha = float(found[1]) if found else None
    except ValueError:
        alpha = None
    if alpha is None:
        raise TaskError(
            f"no partition '{spec}'", "known: iid, dirichlet(ALPHA), shared(SAMPLES), shared(all)"
        )
    low, high = ALPHA_RANGE
    if not low <= alpha <= high:
        raise TaskError(
            f"partition '{spec}': alpha must lie in {low:g} … {high:g}",
            "small is one class a member, large is like iid",
        )
    return alpha


def partition(
    spec: str, labels: NDArray[np.integer], members: int, seed: int, minimum: int = 1
) -> list[Indices]:
    """The shards of all members: sorted, disjoint, together all of `labels`, none under `minimum`.

    "iid" deals a random permutation out. "dirichlet(alpha)" draws for each member a class mix
    q ~ Dir(alpha * p), p being the mix of all the data, and fills its shard with it without
    replacement (Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification", 2019); a class that has run out is left out of the mixes of
    those that follow. As there, shards are of one size (here up to one sample, so that none is
    lost): only the mixes are skewed. "shared(n)" is the exception: each member draws n samples of
    its own from all of them (its shard), so that a fleet may be larger than its data; shards then
    overlap; with "shared(all)" each holds all of them. Raises TaskError when members would get
    fewer than `minimum`.
    """
    alpha = parse_partition(spec)
    if members < 1:
        raise TaskError(f"a partition over {members} members", "at least 1 is needed")
    if isinstance(alpha, Shared):
        return _shared(alpha.samples, len(labels), members, seed)
    if len(labels) // members < minimum:
        raise TaskError(
            f"{len(labels)} samples over {members} members leave one with "
            f"{len(labels) // members}, fewer than {minimum}",
            f"use at most {len(labels) // max(minimum, 1)} members, or partition = 'shared(64)'",
        )
    rng = np.random.default_rng(seed)
    if alpha is None:
        shards = np.array_split(rng.permutation(len(labels)), members)
    else:
        shards = _dirichlet(labels, members, alpha, rng)
    return [np.sort(shard) for shard in shards]


def _shared(samples: int | None, there: int, members: int, seed: int) -> list[Indices]:
    if samples is None:
        return [np.arange(there, dtype=np.int64)] * members
    if samples > there:
        raise TaskError(f"partition 'shared({samples})'", f"there are only {there} samples")
    return [
        np.sort(np.random.default_rng([seed, member]).choice(there, samples, replace=False))
        for member in range(members)
    ]


def _dirichlet(
    labels: NDArray[np.integer], members: int, alpha: float, rng: np.random.Generator
) -> list[Indices]:
    if np.ndim(labels) != 1:
        raise TaskError(
            f"labels of a partition have the shape {tuple(np.shape(labels))}",
            "one class a sample is needed: labels.argmax(1) of rows with a 1 for the class",
        )
    _, codes, left = np.unique(labels, return_inverse=True, return_counts=True)
    if len(left) > max(MOST_OF_FEW, len(labels) // 4):
        raise TaskError(
            f"{len(labels)} labels of a partition have {len(left)} values, which are no classes",
            "put them into bins: np.digitize(labels, np.quantile(labels, [0.2, 0.4, 0.6, 0.8]))",
        )
    pools = [rng.permutation(np.flatnonzero(codes == code)) for code in range(len(left))]
    alphas = alpha * left / len(labels)
    whole, more = divmod(len(labels), members)
    shards = []
    for member in range(members):
        taken = _take(rng, alphas, left, whole + (member < more))
        ends = left - taken
        shards.append(
            np.concatenate([pool[a:b] for pool, a, b in zip(pools, ends, left, strict=True)])
        )
        left = ends
    return shards


def _take(
    rng: np.random.Generator, alphas: NDArray[np.float64], left: Indices, size: int
) -> Indices:
    """How many of each class make a shard of `size` with a mix ~ Dir(alphas), at most `left` each.

    Draws that hit an exhausted class are drawn again among the others, so each turn takes one or
    more. A Dirichlet mix restricted to some classes is the Dirichlet of their alphas; it is drawn
    afresh where restricting would divide by nearly 0.
    """
    taken = np.zeros_like(left)
    mix = rng.dirichlet(alphas)
    while (missing := size - int(taken.sum())) > 0:
        some_left = taken < left
        mix = np.where(some_left, mix, 0.0)
        if mix.sum() < 1e-9:
            mix[some_left] = rng.dirichlet(alphas[some_left])
        mix /= mix.sum()
        taken += np.minimum(rng.multinomial(missing, mix), left - taken)
    return taken


class Shards:
    """The partition of one data set, worked out once for each number of members asked for."""

    def __init__(self, labels: NDArray[np.integer], spec: str, seed: int) -> None:
        """Keeps `labels`, one class a sample. Raises TaskError for a bad `spec` or `seed`."""
        parse_partition(spec)
        self._labels, self._spec = labels, spec
        self._seed = _natural("data.seed", seed)
        self._known: dict[int, list[Indices]] = {}

    def of(self, member: int, members: int) -> Indices:
        """The sorted indices of the member's shard; not to be written to."""
        if not 0 <= member < members:
            raise TaskError(f"no member {member} of {members}", f"0 … {members - 1}")
        if members not in self._known:
            self._known = {members: partition(self._spec, self._labels, members, self._seed)}
        return self._known[members][member]

    def batches(
        self, member: int, members: int, batch: int, seed: int
    ) -> tuple[Iterator[Indices], np.random.Generator]:
        """Endless batches of the shard's indices, and the generator that further draws come from.

        Members of one seed draw independently of each other.
        """
        shard = self.of(member, members)
        if batch < 1:
            raise TaskError(f"a batch of {batch}", "at least 1 is needed")
        rng = np.random.default_rng([_natural("seed", seed), member, members])
        return _endless(shard, batch, rng), rng


def _endless(shard: Indices, batch: int, rng: np.random.Generator) -> Iterator[Indices]:
    """Permutation after permutation, cut into batches: every sample once an epoch, none dropped.

    A batch may span two epochs, so a shard smaller than the batch will do.
    """
    queue = rng.permutation(shard)
    while True:
        while len(queue) < batch:
            queue = np.concatenate([queue, rng.permutation(shard)])
        yield queue[:batch]
        queue = queue[batch:]


def _natural(key: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TaskError(f"{key} = {value!r}", "a whole number from 0 is needed")
    return value
