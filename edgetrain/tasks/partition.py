"""Which samples belong to which member: pure functions of the labels, the members and a seed.

No data is touched and no tensor is made; a shard is an array of sample indices.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgetrain import extensions
from edgetrain.errors import TaskError, did_you_mean
from edgetrain.files.reading import read_bytes

if TYPE_CHECKING:
    from edgetrain.tasks.protocol import Batch

Indices = NDArray[np.int64]

ALPHA_RANGE = (1e-3, 1e6)
TOO_FAR_APART = 2.0
"""Times as far from the mix of all data as alpha makes members' mixes: such a mix is mended."""
MOST_GIVEN_BYTES = 1 << 28
MOST_OF_FEW = 100
"""Classes that there may be however few samples each has."""

KNOWN = (
    "iid, dirichlet(ALPHA), shards(CLASSES), by(COLUMN), given(FILE), shared(SAMPLES), "
    "shared(all); behind a bar sizes(lognormal(SIGMA)) or sizes(zipf(EXPONENT))"
)
_SPELLED = re.compile(r"\s*([A-Za-z_.~/][\w.:#@~/-]*)\s*(?:\((.*)\))?\s*\Z")
_SIZES = re.compile(r"\s*sizes\(\s*(lognormal|zipf)\(([^()]*)\)\s*\)\s*\Z")
_SIZED = ("iid", "dirichlet", "shards")
"""Partitions that can fill shards of any sizes."""
_RANGES = {
    "dirichlet": (*ALPHA_RANGE, "small is one class a member, large is like iid"),
    "lognormal": (0.0, 5.0, "the standard deviation of the logarithm; 0 is equal sizes"),
    "zipf": (0.0, 5.0, "the member of rank r has r to the power of minus this; 0 is equal sizes"),
}


@dataclass(frozen=True)
class SpelledPartition:
    """A partition as a job spells it."""

    name: str
    argument: str = ""
    number: float = 0.0
    """The argument, where it is one."""
    sizes: tuple[str, float] | None = None
    """Sampler of the shards' sizes, and its parameter; None: they are equal."""


def parse_partition(spec: str) -> SpelledPartition:
    """What a job spells as "dirichlet(0.3)", or "shards(2) | sizes(zipf(1.2))". TaskError."""
    base, bar, last = spec.partition("|") if isinstance(spec, str) else ("", "", "")
    sizes = _SIZES.match(last if bar else base)
    if bar and not sizes:
        raise TaskError(f"no partition '{spec}'", f"known: {KNOWN}")
    found = _SPELLED.match(base if bar or not sizes else "iid")
    name, argument = (found[1], (found[2] or "").strip()) if found else ("", "")
    drawn = (sizes[1], _in_range(spec, sizes[1], sizes[2])) if sizes else None
    if drawn and name not in _SIZED:
        raise TaskError(
            f"partition '{spec}': {name} has its own sizes", f"sizes go with {', '.join(_SIZED)}"
        )
    if name in ("iid", "by", "given") and bool(argument) == (name != "iid"):
        return SpelledPartition(name, argument.strip("'\""), sizes=drawn)
    if name == "dirichlet" and argument:
        return SpelledPartition(name, argument, _in_range(spec, name, argument), drawn)
    if (name == "shards" or (name == "shared" and argument != "all")) and argument.isdecimal():
        if not int(argument):
            raise TaskError(f"partition '{spec}'", "a member needs at least 1 sample")
        return SpelledPartition(name, argument, int(argument), drawn)
    if (name, argument) == ("shared", "all"):
        return SpelledPartition(name, argument)
    if name not in ("iid", *_RANGES, "shards", "shared", "by", "given") and _is_own(name):
        return SpelledPartition(name, argument)
    raise TaskError(f"no partition '{spec}'", f"known: {KNOWN}")


def _is_own(name: str) -> bool:
    return bool(name) and extensions.own("partition", name) is not None


def _in_range(spec: str, what: str, text: str) -> float:
    low, high, meaning = _RANGES[what]
    try:
        value = float(text)
    except ValueError:
        raise TaskError(f"no partition '{spec}'", f"known: {KNOWN}") from None
    if not low <= value <= high:
        name = "alpha" if what == "dirichlet" else what
        raise TaskError(f"partition '{spec}': {name} must lie in {low:g} … {high:g}", meaning)
    return value


def partition(
    spec: str,
    labels: NDArray[np.integer],
    members: int,
    seed: int,
    minimum: int = 1,
    columns: Mapping[str, Any] = MappingProxyType({}),
) -> list[Indices]:
    """The shards of all members: sorted, disjoint, together all of `labels`, none under `minimum`.

    "iid" deals a random permutation out. "dirichlet(alpha)" draws for each member a class mix
    q ~ Dir(alpha * p), p being the mix of all the data, and fills its shard with it without
    replacement (Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification", 2019); a class that has run out is left out of the mixes of
    those that follow. "shards(k)" sorts samples by label and gives each member k stretches of that
    (McMahan et al., AISTATS 2017). Shards are of one size (here up to one sample, so that none is
    lost), or of drawn sizes behind a bar: "iid | sizes(lognormal(1.0))".

    "by(column)" gives each member a value of a column (`columns`, or "label"), or several if there
    are fewer members. "given(FILE)" reads whose sample is whose (docs/how-to/tasks.md). Here shards
    may overlap, or leave samples out: "shared(n)": each member draws n samples of its own from all
    of them, so that a fleet may be larger than its data; with "shared(all)" each holds all of them;
    and what a user's own partition gives. Raises TaskError when members would get fewer than
    `minimum`.
    """
    chosen = parse_partition(spec)
    if members < 1:
        raise TaskError(f"a partition over {members} members", "at least 1 is needed")
    if chosen.name == "shared":
        samples = None if chosen.argument == "all" else int(chosen.number)
        there = len(labels)
        if samples is None:
            return [np.arange(there, dtype=np.int64)] * members
        if samples > there:
            raise TaskError(f"partition 'shared({samples})'", f"there are only {there} samples")
        return [
            np.sort(np.random.default_rng([seed, member]).choice(there, samples, replace=False))
            for member in range(members)
        ]
    if len(labels) // members < minimum:
        raise TaskError(
            f"{len(labels)} samples over {members} members leave one with "
            f"{len(labels) // members}, fewer than {minimum}",
            f"use at most {len(labels) // max(minimum, 1)} members, or partition = 'shared(64)'",
        )
    rng = np.random.default_rng(seed)
    sizes = _drawn_sizes(chosen, len(labels), members, seed, minimum)
    match chosen.name:
        case "iid":
            shards = _cut(rng.permutation(len(labels)), sizes)
        case "dirichlet":
            shards = _dirichlet(labels, sizes, chosen.number, rng)
        case "shards":
            # `each` stretches a member of the samples in the order of their labels
            each = int(chosen.number)
            shuffled = rng.permutation(len(labels))
            by_label = shuffled[np.argsort(_codes_of(labels)[0][shuffled], kind="stable")]
            pieces = (sizes[:, None] + np.arange(each)) // each  # sum to the size of each member
            order = rng.permutation(pieces.size)
            cut = _cut(by_label, pieces.reshape(-1)[order])
            held: list[list[Indices]] = [[] for _ in sizes]
            for place, piece in zip(order, cut, strict=True):
                held[place // each].append(piece)
            shards = [np.concatenate(pieces) for pieces in held]
        case "by":
            shards = _by(chosen.argument, {"label": labels, **columns}, members, rng)
        case "given":
            shards = _given(Path(chosen.argument), members)
        case _:
            shards = _own(chosen, labels, members, seed)
    return [_checked(spec, shard, len(labels), minimum) for shard in shards]


def _checked(spec: str, shard: Indices, there: int, minimum: int) -> Indices:
    shard = np.sort(np.asarray(shard))
    if shard.ndim != 1 or shard.dtype.kind not in "iu" or len(shard) < minimum:
        said = f"a member has {shard.size} indices of type {shard.dtype}"
        raise TaskError(f"partition '{spec}': {said}", f"{minimum} or more whole numbers")
    if shard[0] < 0 or shard[-1] >= there:
        said = f"an index of {shard[0] if shard[0] < 0 else shard[-1]}"
        raise TaskError(f"partition '{spec}': {said}", f"the data have 0 … {there - 1}")
    return shard.astype(np.int64, copy=False)


def _cut(order: Indices, sizes: Indices) -> list[Indices]:
    return np.split(order, np.cumsum(sizes)[:-1])


def _drawn_sizes(
    chosen: SpelledPartition, there: int, members: int, seed: int, minimum: int
) -> Indices:
    """The samples of each member, all of them together; equal up to one if nothing draws them."""
    if chosen.sizes is None:
        whole, more = divmod(there, members)
        equal: Indices = np.repeat(np.array([whole + 1, whole]), [more, members - more])
        return equal
    (kind, spread), rng = chosen.sizes, np.random.default_rng([seed, 1])
    if kind == "zipf":
        weights = rng.permutation(np.arange(1.0, members + 1) ** -spread)
    else:
        weights = rng.lognormal(0.0, spread, members)
    exact = (there - minimum * members) * weights / weights.sum()
    sizes = exact.astype(np.int64)
    for member in np.argsort(sizes - exact)[: there - minimum * members - int(sizes.sum())]:
        sizes[member] += 1
    drawn: Indices = sizes + minimum
    return drawn


def _by(
    column: str, columns: Mapping[str, Any], members: int, rng: np.random.Generator
) -> list[Indices]:
    if column not in columns:
        raise TaskError(f"partition 'by({column})': no such column", did_you_mean(column, columns))
    _, codes = np.unique(np.asarray(columns[column]), return_inverse=True)
    groups = int(codes.max()) + 1
    if groups < members:
        raise TaskError(
            f"partition 'by({column})': {groups} values over {members} members",
            f"use at most {groups} members",
        )
    order = np.arange(groups) if groups == members else rng.permutation(groups)
    holder = np.empty(groups, np.int64)
    for member, some in enumerate(np.array_split(order, members)):
        holder[some] = member
    held = holder[codes]
    return _cut(np.argsort(held, kind="stable"), np.bincount(held, minlength=members))


def _given(path: Path, members: int) -> list[Indices]:
    """Shards of a JSON file: a list of indices a member, an object with one, or LEAF's
    "num_samples"."""
    try:
        table = json.loads(read_bytes(path, MOST_GIVEN_BYTES))
    except (OSError, ValueError) as error:
        raise TaskError(f"partition 'given({path})': {error}", "a JSON file of indices") from None
    if isinstance(table, dict) and "num_samples" in table:
        counts = np.asarray(table["num_samples"], np.int64)
        lists: list[Any] = _cut(np.arange(counts.sum()), counts)
    else:
        lists = list(table.values() if isinstance(table, dict) else table)
    if len(lists) < members:
        raise TaskError(
            f"partition 'given({path})': {len(lists)} users over {members} members",
            f"use at most {len(lists)} members",
        )
    return [np.asarray(each) for each in lists[:members]]


def _own(
    chosen: SpelledPartition, labels: NDArray[np.integer], members: int, seed: int
) -> list[Indices]:
    made: Any = extensions.find("partition", chosen.name, {})
    words = [word.strip() for word in chosen.argument.split(",") if word.strip()]
    shards: list[Indices] = extensions.build(
        "partition", chosen.name, words, lambda *values: list(made(labels, members, seed, *values))
    )
    if len(shards) != members:
        raise TaskError(
            f"partition '{chosen.name}' gives {len(shards)} shards", f"one of {members}"
        )
    return shards


def _codes_of(labels: NDArray[np.integer]) -> tuple[Indices, Indices]:
    """The class of each sample, as a number from 0 on, and the samples of each class. TaskError."""
    if np.ndim(labels) != 1:
        raise TaskError(
            f"labels of a partition have the shape {tuple(np.shape(labels))}",
            "one class a sample is needed: labels.argmax(1) of rows with a 1 for the class",
        )
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if len(counts) > max(MOST_OF_FEW, len(labels) // 4):
        raise TaskError(
            f"{len(labels)} labels of a partition have {len(counts)} values, which are no classes",
            "put them into bins: np.digitize(labels, np.quantile(labels, [0.2, 0.4, 0.6, 0.8]))",
        )
    return codes, counts


def _dirichlet(
    labels: NDArray[np.integer], sizes: Indices, alpha: float, rng: np.random.Generator
) -> list[Indices]:
    codes, left = _codes_of(labels)
    pools = [rng.permutation(np.flatnonzero(codes == code)) for code in range(len(left))]
    alphas = alpha * left / len(labels)
    taken = np.zeros((len(sizes), len(left)), np.int64)
    ends = left.copy()
    for member, size in enumerate(sizes):
        taken[member] = _take(rng, alphas, ends, int(size))
        ends -= taken[member]
    _mend_last(taken, alphas, rng)
    shards = []
    for each in taken:
        ends = left - each
        shards.append(
            np.concatenate([pool[a:b] for pool, a, b in zip(pools, ends, left, strict=True)])
        )
        left = ends
    return shards


def _mend_last(
    taken: NDArray[np.int64], alphas: NDArray[np.float64], rng: np.random.Generator
) -> None:
    """Let the last members, who get what the others have left over, exchange samples with them for
    mixes of their own. `taken` [members, classes] is changed in place, its sums are not.

    With a small alpha no mix is mended: their distances have a bound, that of one class.
    """
    mix, alpha = alphas / alphas.sum(), float(alphas.sum())
    for member in reversed(range(len(taken))):
        size = int(taken[member].sum())
        apart = float(((taken[member] / size - mix) ** 2 / mix).sum())
        usual = (len(mix) - 1) * ((1 - 1 / size) / (alpha + 1) + 1 / size)
        if apart <= TOO_FAR_APART * usual:
            continue
        wanted = rng.multinomial(size, rng.dirichlet(alphas))
        others = np.delete(np.arange(len(taken)), member)
        lacks = np.minimum(np.maximum(wanted - taken[member], 0), taken[others].sum(0))
        surplus = np.repeat(np.arange(len(mix)), np.maximum(taken[member] - wanted, 0))
        given = iter(rng.permutation(surplus))
        for lacking, count in enumerate(lacks):
            for other, some in zip(
                others, rng.multivariate_hypergeometric(taken[others, lacking], count), strict=True
            ):
                taken[other, lacking] -= some
                taken[member, lacking] += some
                for _ in range(some):
                    back = next(given)
                    taken[other, back] += 1
                    taken[member, back] -= 1


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

    def __init__(
        self,
        labels: NDArray[np.integer],
        spec: str,
        seed: int,
        columns: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Keeps `labels`, one class a sample, and `columns`, of whose values "by(column)" makes
        members. Raises TaskError for a bad `spec` or `seed`."""
        parse_partition(spec)
        self.labels, self._spec, self._columns = labels, spec, columns
        self._seed = _natural("data.seed", seed)
        self._known: dict[int, list[Indices]] = {}
        self.hold_out = 0.0
        """The share of each shard that is held out: one sample or more, and not the last one."""

    def of(self, member: int, members: int) -> Indices:
        """The sorted indices of what the member trains on; not to be written to."""
        return self._split(member, members)[0]

    def held_out(self, member: int, members: int) -> Indices:
        """The sorted indices of what of its shard is held out; drawn by the seed."""
        return self._split(member, members)[1]

    def _split(self, member: int, members: int) -> tuple[Indices, Indices]:
        shard = self._shard(member, members)
        many = min(max(1, round(self.hold_out * len(shard))), len(shard) - 1)
        if not self.hold_out:
            return shard, shard[:0]
        order = np.random.default_rng([self._seed, member, 2]).permutation(shard)
        return np.sort(order[many:]), np.sort(order[:many])

    def _shard(self, member: int, members: int) -> Indices:
        if not 0 <= member < members:
            raise TaskError(f"no member {member} of {members}", f"0 … {members - 1}")
        if members not in self._known:
            shards = partition(self._spec, self.labels, members, self._seed, columns=self._columns)
            self._known = {members: shards}
        return self._known[members][member]

    def counts(self, members: int) -> NDArray[np.int64]:
        """Samples of each class that each member holds, [members, classes]."""
        values, codes = np.unique(self.labels, return_inverse=True)
        rows = [
            np.bincount(codes[self.of(m, members)], minlength=len(values)) for m in range(members)
        ]
        return np.array(rows)

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


class Sharded(ABC):
    """The part of a Task (see protocol) that follows from its shards: who has which samples, in
    which order they come, what is held out. A *draw* is a batch before its samples are looked at:
    their indices, or what `drawn` makes of these."""

    shards: Shards
    held_out_batch = 512
    """Samples that are evaluated at once: bounds the memory, and costs nothing in speed."""

    @abstractmethod
    def batch_of(self, draw: Any) -> Batch:
        """The batch of a draw."""

    def drawn(self, indices: Indices, rng: np.random.Generator) -> Any:
        """A draw of these samples; what varies them comes from `rng`."""
        return indices

    def plain(self, indices: Indices) -> Batch:
        """These samples, not varied."""
        return self.batch_of(indices)

    def samples(self, member: int, members: int) -> int:
        return len(self.shards.of(member, members))

    def batches(self, member: int, members: int, batch: int, seed: int) -> Iterator[Batch]:
        return self.batches_from(member, members, batch, seed, 0)

    def batches_from(
        self, member: int, members: int, batch: int, seed: int, start: int
    ) -> Iterator[Batch]:
        """See protocol.Positioned: what is left out is drawn, and no sample of it is looked at."""
        order, rng = self.shards.batches(member, members, batch, seed)
        draws = (self.drawn(indices, rng) for indices in order)
        return map(self.batch_of, islice(draws, start, None))

    def pick(self, member: int, members: int, chosen: Indices, rng: np.random.Generator) -> Batch:
        return self.batch_of(self.drawn(self.shards.of(member, members)[chosen], rng))

    def held_out(self, member: int, members: int) -> Iterator[Batch]:
        """See protocol.HoldsOut."""
        return self.in_chunks(self.shards.held_out(member, members), self.plain)

    def in_chunks(self, indices: Indices, of: Callable[[Indices], Batch]) -> Iterator[Batch]:
        for start in range(0, len(indices), self.held_out_batch):
            yield of(indices[start : start + self.held_out_batch])


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
