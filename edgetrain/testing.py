"""Laws for your own codecs, merge rules, samplings and strategies.

    from edgetrain.testing import check_codec, check_merge_rule, check_sampling, check_strategy

    def test_my_codec():
        check_codec(MyCodec(3))

Each function takes an object, or its spelling in a job, and raises ConfigError with the first
broken law. edgetrain's own objects pass them in its tests, and a job's extensions before anything
starts. They need only NumPy, and some milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import numpy as np

from edgetrain import codecs, strategies
from edgetrain.codecs import Codec, Feedback
from edgetrain.errors import BadPayload, ConfigError, EdgetrainError, in_words
from edgetrain.strategies import Setting, Strategy, merging
from edgetrain.strategies.cohort import Cohort
from edgetrain.strategies.half import MemberHalf
from edgetrain.strategies.merging.rule import Discounted, Piece, RoundRule, SliceRule
from edgetrain.vectors.vector import Buffer, Layout, Vector

ELEMENTS = 950
LAYOUT: Layout = (("w", 0, (24, 20)), ("b", 480, (20,)), ("v", 500, (15, 30)))
"""The tensors of vectors that codecs are tried on."""


class _Broken(Exception):
    """A law does not hold."""


def _law(holds: object, said: str) -> None:
    if not holds:
        raise _Broken(said)


def _refuse(what: str, error: Exception) -> ConfigError:
    said = str(error) if isinstance(error, _Broken | EdgetrainError) else in_words(error)
    return ConfigError(f"{what}: {said.splitlines()[0]}", "docs/how-to/extensions.md has its laws")


# -- codecs --------------------------------------------------------------------------------------


def check_codec(codec: Codec | str) -> None:
    """Raises ConfigError unless payloads decode to the sent values, each time alike, the remainder
    is sent later, and invalid bytes are refused. An unbound `codec` is bound here.
    """
    codec = codecs.parse(codec) if isinstance(codec, str) else codec
    name = f"codec '{getattr(codec, 'name', type(codec).__name__)}'"
    try:
        codec = codec.bind(LAYOUT)
        for seed, scale in ((0, 1.0), (1, 1e-3), (2, 0.0)):
            x = np.random.default_rng(seed).standard_normal(ELEMENTS).astype(np.float32)
            _check_payloads(codec, x * np.float32(scale))
        _check_refusals(codec)
        if not (codec.sums_only or codec.momentum):
            _check_feedback(codec)
    except Exception as error:
        raise _refuse(name, error) from error


def _decoded(codec: Codec, payloads: Sequence[Buffer], elements: int) -> Vector:
    out = np.full(elements, np.nan, np.float32)
    for here, payload in zip(codec.slices(elements), payloads, strict=True):
        codec.decode(payload, out[here])
    return out


def _check_payloads(codec: Codec, x: Vector) -> None:
    before = x.copy()
    payloads = codec.encode(x, 7)
    _law(np.array_equal(x, before), "encode changes the vector that it is given")
    again = [bytes(payload) for payload in codec.encode(x, 7)]
    _law([bytes(p) for p in payloads] == again, "encode gives other bytes for an equal vector")
    slices = codec.slices(x.size)
    _law(len(payloads) == len(slices), f"{len(payloads)} payloads for {len(slices)} parts")
    for here, payload in zip(slices, payloads, strict=True):
        part, length = x[here].size, len(bytes(payload))
        most = codec.max_bytes(part)
        _law(length <= most, f"a payload of {length} bytes where max_bytes says {most}")
    decoded = _decoded(codec, payloads, x.size)
    _law(np.isfinite(decoded).all(), "decode leaves elements unwritten, or makes them not finite")
    _law(x.any() or not decoded.any(), "a vector of zeros decodes to others")
    _law(not codec.lossless or np.array_equal(decoded, x), "it says lossless, and bits differ")
    for here, payload in zip(slices, payloads, strict=True):
        out, weight = np.ones(x[here].size, np.float32), -0.3
        codec.add(payload, weight, out)
        wanted = 1 + np.float32(weight) * decoded[here]
        _law(np.allclose(out, wanted, rtol=1e-5, atol=1e-5), "add is not adding weight * decoded")


def _check_refusals(codec: Codec) -> None:
    x = np.random.default_rng(3).standard_normal(ELEMENTS).astype(np.float32)
    here, payload = codec.slices(ELEMENTS)[0], bytes(codec.encode(x)[0])
    for bad, what in ((b"", "an empty payload"), (payload[:-1], "a payload without its last byte")):
        out = x[here].copy()
        try:
            codec.decode(bad, out)
        except BadPayload:
            _law(np.array_equal(out, x[here]), f"{what} is refused after it was written")
        else:
            raise _Broken(f"{what} is decoded, and not refused with BadPayload")


def _check_feedback(codec: Codec) -> None:
    """The same gradient in each step: what is not sent stays bounded, so it is sent in time."""
    x = np.random.default_rng(5).standard_normal(ELEMENTS).astype(np.float32)
    feedback, left, shares = Feedback(codec, ELEMENTS), np.zeros(ELEMENTS), []
    for step in range(1, 201):
        left += x - _decoded(codec, feedback.encode(x), ELEMENTS)
        shares.append(float(np.linalg.norm(left)) / (step * float(np.linalg.norm(x))))
    late = shares[199] < 0.01 or shares[199] < 0.6 * shares[49]
    _law(late, "with feedback some of a constant gradient is never sent")


# -- merge rules ---------------------------------------------------------------------------------


class _Held:
    """A contribution that is not encoded. See Piece."""

    def __init__(self, vector: Vector, weight: float) -> None:
        self._vector, self.weight = vector, weight

    def read(self, out: Vector) -> None:
        out[:] = self._vector

    def add(self, weight: float, out: Vector) -> None:
        out += np.float32(weight) * self._vector


def check_merge_rule(rule: SliceRule | RoundRule | str) -> None:
    """Raises ConfigError unless the merged contribution is finite, complete, independent of the
    members' order, and equal to the contributions if those are equal."""
    name = f"merge rule '{rule if isinstance(rule, str) else type(rule).__name__}'"
    made = merging.parse(rule) if isinstance(rule, str) else rule
    try:
        _law(isinstance(made, SliceRule | RoundRule), "it has neither merge nor merge_round")
        rng = np.random.default_rng(0)
        vectors = list(rng.standard_normal((7, 23)).astype(np.float32) / 10)
        merged = _merged(made, vectors)
        again = _merged(made, vectors)
        _law(np.array_equal(merged, again), "equal contributions are merged to other bits")
        turned = _merged(made, vectors[::-1])
        _law(np.allclose(merged, turned, rtol=1e-4, atol=1e-5), "the order of members matters")
        for count in (7, 1):
            same = _merged(made, [vectors[0]] * count)
            what = "members that all send the same get" if count > 1 else "one member alone gets"
            _law(np.allclose(same, vectors[0], rtol=1e-4, atol=1e-5), f"{what} something else back")
    except Exception as error:
        raise _refuse(name, error) from error


def _merged(rule: SliceRule | RoundRule, vectors: Sequence[Vector]) -> Vector:
    """By a rule, in two slices."""
    elements = vectors[0].size
    cuts, out = (slice(0, 5), slice(5, elements)), np.full(elements, np.nan, np.float32)
    held: list[list[Piece]] = [[_Held(v[cut].copy(), 1.0) for cut in cuts] for v in vectors]
    if isinstance(rule, RoundRule):
        said = rule.merge_round(held, [out[cut] for cut in cuts])
        _law(
            all(isinstance(each, Discounted) for each in said), "it returns others than Discounted"
        )
    else:
        for at, cut in enumerate(cuts):
            rule.merge([pieces[at] for pieces in held], out[cut])
    _law(np.isfinite(out).all(), "it leaves elements unwritten, or makes them not finite")
    return out


# -- samplings -----------------------------------------------------------------------------------


def check_sampling(
    sampling: Callable[..., Iterable[int]] | str, cohort: Cohort | None = None
) -> None:
    """Raises ConfigError unless the function draws members of the job (`cohort`; None: 5 of 20),
    none of them twice, and the same ones each time, for any present members and weights."""
    own = None if isinstance(sampling, str) else sampling
    spelled = sampling if isinstance(sampling, str) else getattr(sampling, "__name__", "sampling")
    made = replace(cohort or Cohort(0, 20, 5), sampling=spelled)
    everyone = tuple(range(made.members))
    try:
        for round, there in enumerate((everyone, everyone[::2], everyone[1::3], everyone[-1:])):
            weights = [1.0 + each % 7 for each in there]
            drawn = [made.drawn_of(round, there, weights, own) for _ in range(2)]
            _law(drawn[0] == drawn[1], f"round {round} has other members when it is drawn again")
    except ConfigError:
        raise
    except Exception as error:
        raise _refuse(f"sampling '{spelled}'", error) from error


# -- strategies ----------------------------------------------------------------------------------


def check_strategy(row: Strategy | str) -> None:
    """Raises ConfigError unless the member's half agrees with the row, and all members, also a
    restarted one, end with the hub's parameters bit for bit. Of asynchronous strategies, and of
    work handed out by the hub, only the first law is checked."""
    row = strategies.find(row) if isinstance(row, str) else row
    if not isinstance(row, Strategy):
        raise ConfigError(f"{row!r} is no edgetrain.strategies.Strategy")
    if not row.arguments:
        row = replace(row, arguments=tuple(max(each.low, 0.25) for each in row.parameters))
    try:
        ForkingPickler.dumps(row)  # it goes to other processes
        half = _Trainer(row, 0, 0).half
        for name in ("adjusts_gradient", "moves_params"):
            said, is_so = getattr(row, name), getattr(half, name)
            _law(said is is_so, f"its row has {name} = {said}, its half {is_so}")
        quiet = half.quiet_steps()
        _law(
            not (half.adjusts_gradient and quiet), "its half adjusts gradients and has quiet steps"
        )
        if row.is_synchronous and not row.deals:
            for delay in (0, 2)[: 1 + row.delays]:
                _check_training(row, delay)
    except Exception as error:
        raise _refuse(f"strategy '{row.name}'", error) from error


SIZE, EVERY, MEMBERS, STEPS = 12, 3, 3, 14


class _Trainer:
    """A member of a fleet in lockstep: a quadratic of its own, and its half of the strategy."""

    def __init__(self, row: Strategy, index: int, delay: int) -> None:
        self.index = index
        self.params = np.zeros(SIZE * (1 + row.has_variates), np.float32)
        self.gradient = np.zeros(SIZE, np.float32)
        local_steps = EVERY if row.has_local_steps else 1
        setting = Setting(self.params, self.gradient, local_steps, delay, members=MEMBERS)
        self.half: MemberHalf = row.member_half(setting)

    def pull(self) -> None:
        self.gradient[:] = self.params[:SIZE] - np.float32(self.index + 1)


class _Lockstep:
    """The hub: merges a round when all have contributed, and replies at once."""

    def __init__(self, row: Strategy, trainers: list[_Trainer]) -> None:
        self.trainers, self.outer = trainers, row.outer_rule()
        self.base = trainers[0].params.copy()
        self.given: dict[int, dict[int, Vector]] = {}
        self.replies: dict[int, Vector] = {}
        if self.outer is not None:
            self.outer.start(self.base.size)

    def take(self, member: int, vector: Vector | None) -> None:
        if vector is None:
            return
        fits = vector.dtype == np.float32 and np.isfinite(vector).all()
        _law(fits, "a contribution is not float32, or not finite")
        round = self.trainers[member].half.round - 1
        given = self.given.setdefault(round, {})
        given[member] = vector.copy()
        if len(given) == len(self.trainers):
            all_of = np.array([given[each] for each in sorted(given)])
            merged: Vector = all_of.mean(axis=0, dtype=np.float32)
            if self.outer is not None:
                self.outer.step(merged, 0)
            self.base[: merged.size] += merged
            self.replies[round] = merged

    def exchange(self) -> None:
        """Apply what is due, until nothing is."""
        waiting = True
        while waiting:
            waiting = False
            for member, each in enumerate(self.trainers):
                while (due := each.half.due()) is not None and due in self.replies:
                    each.half.apply([self.replies[due].copy()])
                    self.take(member, each.half.follow_up())
                    waiting = True


def _check_training(row: Strategy, delay: int) -> None:
    trainers = [_Trainer(row, index, delay) for index in range(MEMBERS)]
    hub = _Lockstep(row, trainers)
    for step in range(STEPS):
        for member, each in enumerate(trainers):
            each.pull()
            hub.take(member, each.half.before_step())
        hub.exchange()
        for member, each in enumerate(trainers):
            each.params[:SIZE] -= np.float32(0.1) * each.gradient
            each.half.note_rate(0.1)
            hub.take(member, each.half.after_step())
        hub.exchange()
        if not delay and step == 2 * EVERY - 1:
            _start_again(row, hub)
    for member, each in enumerate(trainers):
        hub.take(member, each.half.finish())
    hub.exchange()
    first = trainers[0]
    for each in trainers:
        _law(each.half.due() is None, "after the last reply a member still waits for one")
        same = each.params.tobytes() == first.params.tobytes()
        _law(same, "members end with other parameters than each other")
        _law(each.half.checksum == first.half.checksum, "members end with other checksums")
    if row.hub_keeps_base:
        _law(first.half.base.tobytes() == hub.base.tobytes(), "base is not the sum of all replies")
        _law(first.params.tobytes() == hub.base.tobytes(), "members do not end at their base")


def _start_again(row: Strategy, hub: _Lockstep) -> None:
    """Member 0 goes on from a checkpoint, in the place of one that did not stop: its next round has
    to be the same."""
    old, new = hub.trainers[0], _Trainer(row, 0, 0)
    new.params[:] = old.half.base
    learned = {key: array.copy() for key, array in old.half.learned().items()}
    new.half.restore_learned(learned)
    new.half.start(old.half.applied, old.half.round)
    if (rest := old.half.rest()) is not None:
        new.half.restore_rest(rest.copy(), old.half.steps_taken)
    same = np.allclose(new.params, old.params, atol=1e-6)
    _law(same, "a member that goes on from its checkpoint has other parameters")
    for each in (old, new):
        each.pull()
        if row.moves_params:  # otherwise it contributes
            each.half.before_step()
    same = np.allclose(new.gradient, old.gradient, atol=1e-6)
    _law(same, "a member that goes on from its checkpoint has forgotten something: see `learned`")
    hub.trainers[0] = new
