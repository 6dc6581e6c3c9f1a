"""Does what holds after 200 rounds hold after 20,000? Each codec, each strategy, five gradients.

    make test-endurance TESTS=tests/endurance/test_long_laws.py ROUNDS=20000

A codec's line: `lost` is |sum(decoded) + residual - sum(given)| in units of float32's rounding
(2^-24 of the largest number that the sum of an element was made of), and `left` is the length of
the residual, in rounds: as a share of the sum of all gradients' lengths, times the rounds. A
strategy's line: `lost` is how far the base is from where the mean of the members' steps leads, as
a share of the way; `aside` is 1 - the cosine between the two ways.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator

import codec_cases as cases
import every_strategy
import fleet as fleets
import numpy as np

from edgetrain import codecs
from edgetrain.codecs.lowrank import PowerSGD
from edgetrain.vectors.vector import Vector

KINDS = ("zero", "rank-one", "sparse", "heavy-tailed", "half")
MATRICES = (("w", 0, (24, 20)), ("b", 480, (20,)), ("v", 500, (15, 30)))
ELEMENTS = 950
SPECS = [*(spec for spec in cases.ALL if not spec.startswith("powersgd")), "dgc(0.05, 0.0)"]
STRATEGIES = [*every_strategy.SPELLED, *every_strategy.OUT_OF_STEP, "fedavg | sgd(0.5)"]
ROUNDING = 2.0**-24


def gradients(kind: str, rounds: int, layout: tuple, elements: int, seed: int) -> Iterator[Vector]:
    """float32 [elements] for each round. Half of the time zero, or of rank one, then what has all
    directions; always sparse, with other elements in each round; with a variance that is infinite
    (Student's t of 1.5 degrees); or float16's numbers, from its smallest to its largest."""
    rng = np.random.default_rng(seed)
    always = rng.uniform(0.5, 1.5, elements) * rng.choice([-1, 1], elements)
    one = np.zeros(elements)
    for _, at, shape in layout:
        if len(shape) == 2:
            outer = np.outer(rng.standard_normal(shape[0]), rng.standard_normal(shape[1]))
            one[at : at + outer.size] = outer.reshape(-1)
    spread = always * np.logspace(-7, 4.5, elements)
    for number in range(rounds):
        noise = 0.3 * rng.standard_normal(elements)
        if kind in ("zero", "rank-one") and number < rounds // 2:
            gradient = one * (kind == "rank-one")
        elif kind == "sparse":
            gradient = (always + noise) * (rng.random(elements) < 0.05)
        elif kind == "heavy-tailed":
            gradient = always + rng.standard_t(1.5, elements)
        elif kind == "half":
            gradient = (spread * (1 + noise / 3)).astype(np.float16)
        else:
            gradient = always + noise
        yield gradient.astype(np.float32)


# -- codecs ---------------------------------------------------------------------------------------


def of_codec(spec: str, kind: str, rounds: int) -> tuple[float, float, float]:
    """(lost, left after a tenth of the rounds, left at the end). The residual is put away and
    taken over by another memory in the middle, as after a restart."""
    codec = codecs.parse(spec).bind(MATRICES)
    memory = codecs.memory(codec, ELEMENTS)
    given, sent, largest = np.zeros((3, ELEMENTS))
    lengths, lefts = 0.0, []
    each = enumerate(gradients(kind, rounds, MATRICES, ELEMENTS, 5), 1)
    for number, gradient in each:
        given += gradient
        payloads = memory.encode(gradient, salt=codecs.salt_of("m0", number))
        decoded = cases.decode(codec, payloads, ELEMENTS)
        sent += decoded
        largest = np.maximum(largest, np.maximum(np.abs(decoded), np.abs(gradient)))
        if memory.residual.size:
            largest = np.maximum(largest, np.abs(memory.residual))
        lengths += float(np.linalg.norm(gradient))
        if number == rounds // 2:
            state = {name: array.copy() for name, array in memory.state().items()}
            memory = codecs.memory(codec, ELEMENTS)
            memory.restore(state)
        if number in (rounds * 6 // 10, rounds):
            left = memory.residual.astype(np.float64) if memory.residual.size else 0 * given
            lefts.append(float(np.linalg.norm(left)) * number / lengths)
    lost = np.abs(sent + left - given) / (ROUNDING * np.maximum(largest, 2.0**-100))
    return float(lost.max()), lefts[0], lefts[1]


def of_powersgd(rank: int, kind: str, rounds: int) -> tuple[float, float, float]:
    """The same of two members that agree on factors in two trips."""
    members = [PowerSGD(MATRICES, rank) for _ in range(2)]
    given, sent, largest = np.zeros((3, ELEMENTS))
    lengths, lefts, out = 0.0, [], np.empty(ELEMENTS, np.float32)
    own = [gradients(kind, rounds, MATRICES, ELEMENTS, 5 + number) for number in range(2)]
    for number, pair in enumerate(zip(*own, strict=True), 1):
        left = np.mean([m.left(g) for m, g in zip(members, pair, strict=True)], axis=0)
        right = np.mean([m.right(left.astype(np.float32)) for m in members], axis=0)
        for member in members:
            member.finish(right.astype(np.float32), out)
        mean = np.mean(pair, axis=0, dtype=np.float64)
        given, sent = given + mean, sent + out
        largest = np.maximum(largest, np.abs(out) + np.abs(pair).max(axis=0))
        lengths += float(np.linalg.norm(mean))
        if number in (rounds * 6 // 10, rounds):
            rest = np.mean([m.residual for m in members], axis=0, dtype=np.float64)
            lefts.append(float(np.linalg.norm(rest)) * number / lengths)
    largest = np.maximum(largest, np.abs(rest)).max()
    return float(np.abs(sent + rest - given).max() / (ROUNDING * largest)), *lefts


# -- strategies -----------------------------------------------------------------------------------

BLOCK = 21
"""Elements of each of KINDS in the vector of a fleet."""


def in_blocks(rounds: int, kinds: tuple[str, ...], seed: int) -> Iterator[Vector]:
    """Gradients of all `kinds`, one behind the other in each vector; float16's are scaled to be at
    most 4, for what is measured of the whole vector."""
    layout = (("w", 0, (2, 10)),)
    each = [gradients(kind, rounds, layout, BLOCK, seed) for kind in kinds]
    for many in zip(*each, strict=True):
        scaled = [g * 2.0**-13 if k == "half" else g for k, g in zip(kinds, many, strict=True)]
        yield np.concatenate(scaled).astype(np.float32)


def of_strategy(name: str, kinds: tuple[str, ...], rounds: int) -> list[tuple[str, float, float]]:
    """(kind, lost, aside) of two members with unequal data, one step a round, four of delay."""
    elements = BLOCK * len(kinds)
    apart = np.where(np.random.default_rng(3).random(elements) < 0.5, 0.25, 0.0)
    each = [in_blocks(rounds, kinds, 7) for _ in range(2)]

    def local_step(member: int, step: int, params: Vector) -> Vector:
        return np.float32(0.01) * next(each[member]) * (1 + apart * (2 * member - 1)).astype("f4")

    fleets.MOST_EVENTS = 100 * rounds
    fleet = fleets.Fleet(name, 2, 1, 4, rounds, elements=elements, local_step=local_step).run()
    first, second = fleet.members
    assert [m.state for m in fleet.members] == ["done"] * 2
    assert not fleet.strategy.is_synchronous or first.params.tobytes() == second.params.tobytes()
    moved = first.params.astype(np.float64) - fleet.initial
    assert np.isfinite(moved).all()
    walked, found = sum(m.walked for m in fleet.members) / 2, []
    for number, kind in enumerate(kinds):
        here = slice(BLOCK * number, BLOCK * (number + 1))
        way, wanted = moved[here], walked[here]
        length = np.linalg.norm(way) * np.linalg.norm(wanted)
        lost = np.linalg.norm(way - wanted) / np.linalg.norm(wanted)
        found.append((kind, float(lost), 1 - float(way @ wanted / length)))
    return found


# -- the tables -----------------------------------------------------------------------------------


def table_of_codecs(rounds: int) -> list[tuple[str, str, float, float, float]]:
    """(codec, gradients, lost, left before, left at the end) of all; prints them."""
    print(f"{'codec':36} {'gradients':12} {'lost':>9} {'left':>8} {'at end':>8} {'s':>5}")
    rows = []
    works = [(spec, functools.partial(of_codec, spec)) for spec in SPECS]
    works += [(f"powersgd({r})", functools.partial(of_powersgd, r)) for r in (1, 2)]
    for (name, work), kind in itertools.product(works, KINDS):
        began = time.monotonic()
        lost, early, late = work(kind, rounds)
        rows.append((name, kind, lost, early, late))
        took = time.monotonic() - began
        print(f"{name:36} {kind:12} {lost:9.1f} {early:8.2f} {late:8.2f} {took:5.1f}", flush=True)
    return rows


def table_of_strategies(rounds: int) -> list[tuple[str, str, float, float]]:
    """(strategy, gradients, lost, aside) of all; prints them. Those that measure whole vectors are
    there a second time, with a whole vector of zeros for half of the rounds."""
    print(f"{'strategy':28} {'gradients':12} {'lost':>9} {'aside':>9} {'s':>5}")
    rows = []
    works = [(name, KINDS) for name in STRATEGIES]
    works += [(name, ("zero",)) for name in STRATEGIES if name.startswith(("dga", "eager", "st"))]
    for name, kinds in works:
        began = time.monotonic()
        found = of_strategy(name, kinds, rounds)
        took = time.monotonic() - began
        for kind, lost, aside in found:
            rows.append((name, kind, lost, aside))
            print(f"{name:28} {kind:12} {lost:9.1e} {aside:9.1e} {took:5.1f}", flush=True)
    return rows
