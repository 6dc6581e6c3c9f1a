"""What a hub must know after a crash, as records: their fields, and bytes there and back.

A `State` is all of it at one moment; the others are what changed since. The hub makes them, the
journal keeps them, `Hub.restore` reads them. No file here, no socket, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgpack
import numpy as np

from edgetrain.errors import BadMessage
from edgetrain.vectors.vector import Buffer, Vector

LAYOUT = 6
"""Of the records' fields; goes up when they change. Layout 1 ends before the fields `every` and
`steps`, layout 2 has no `State.fixed`, layout 3 no `Round.complete`, layout 4 no `Round.members`,
layout 5 no `State.course`: all are read as well, and written where that is 0, empty or None."""


@dataclass(frozen=True)
class CountedOnce:
    """One contribution that was merged. (member, meant_for) is the key it counts once by."""

    member: str
    meant_for: int
    weight: float


@dataclass(frozen=True)
class Round:
    """A round was merged. Written before anyone is told."""

    round: int
    counted: tuple[CountedOnce, ...]
    delay: int
    """In force once this round's reply is applied."""
    before: int
    """Checksum of the base before this round; 0: nobody said it."""
    checksum: int
    """Of the base after it; 0 where the hub holds no base."""
    reply: tuple[Buffer, ...] = field(repr=False)
    """The payloads that went to everyone."""
    inputs: tuple[tuple[Buffer, ...], ...] = field(default=(), repr=False)
    """Where what the hub keeps cannot be made from replies: the payloads of each contribution; or
    the merged vector, float32, if contributions are masked or there is an outer rule."""
    every: int = 0
    """Steps in a round, in force once this round's reply is applied; 0: not known."""
    complete: int | None = None
    """Out of step, as Reply has it: in this or earlier rounds are all members' contributions with
    numbers below this. None: members are in step."""
    members: int = 0
    """Contributions in it, where sites have merged theirs first; 0: as many as `counted`."""

    @property
    def merged(self) -> tuple[tuple[str, int], ...]:
        """Out of step, as Reply has it: of each member in this round, the number below which all of
        its contributions are merged. (): members are in step."""
        if self.complete is None:
            return ()
        return tuple({each.member: each.meant_for + 1 for each in self.counted}.items())


@dataclass(frozen=True)
class Seat:
    """A member as the hub knows it."""

    name: str
    address: bytes
    """How the transport last knew it."""
    session: int
    """What it proves itself by when it comes back."""
    index: int
    weight: float
    first_round: int
    next_round: int
    """The once-only key: of all rounds before this one, what it gave has been merged."""
    by_range: tuple[int, ...] = ()
    """The same of the rounds that concern each range of the vector; (): there is one range."""
    behind: int = 0
    """Members of the site that it joined for, as its gateway; 0: it is a member itself."""


@dataclass(frozen=True)
class Entered:
    """A member was let in, or came back over another connection."""

    seat: Seat


@dataclass(frozen=True)
class Departed:
    """A member is no longer waited for. `final`: it took its leave, or was expelled."""

    name: str
    final: bool


@dataclass(frozen=True)
class Restarted:
    """The hub has been restored from this journal, for the so many-th time."""

    epoch: int


@dataclass(frozen=True)
class Sent:
    """A gateway hands a round of its site to the hub above; or a hub of several that hands out work
    has a batch's mean gradient, of which the lead gets products. Written before it leaves."""

    round: int
    counted: tuple[CountedOnce, ...]
    weight: float
    members: int
    """Contributions in it; those without weight, too."""
    applied: int
    """Replies in the bases that they were made from."""
    checksum: int
    """Checksum of these bases."""
    wanted_delay: int
    step_s: float
    vector: Buffer = field(repr=False)
    """Their weighted mean, float32."""


@dataclass(frozen=True)
class Above:
    """A gateway's place at the hub above."""

    session: int
    name: str
    index: int
    """The first of its site's members among all."""
    next_round: int
    """The oldest round of its site that is still open."""
    kept: tuple[Sent, ...]
    """What the hub above may not have merged for good."""


@dataclass(frozen=True)
class Charted:
    """Where members are, and who reduces what, from now on. Written before anyone is told."""

    chart: bytes
    """See places.Places.chart."""


Course = Literal["", "paused", "stopped"]
"""What people have told a hub: to go on, to pause, to end the job."""


@dataclass(frozen=True)
class Steered:
    """People told the hub this."""

    course: Course


@dataclass(frozen=True)
class Sharing:
    """Which hub of several has which ranges, as one of them knows it."""

    number: int = 0
    """Of the map."""
    round: int = 0
    """The first round by it; of a pending one 0 if it is given up."""
    pending: bool = False
    """Ranges are about to move: this hub closes no round from `round` on."""
    first: int = 0
    end: int = 0
    """The hub's own ranges, [first, end)."""
    since: int = 0
    """The first round with these."""
    rows: tuple[tuple[str, str, int, int], ...] = ()
    """At the lead: the other hubs: address, public key, ranges."""
    giver: str = ""
    taker: str = ""
    """At the lead, pending: the addresses of the hubs that ranges move from, and to; "": itself."""
    leads: bool = False
    """Whether it is the lead's."""


Record = Round | Entered | Departed | Restarted | Sent | Charted | Sharing | Steered


@dataclass(frozen=True)
class State:
    """All a hub needs to go on. `base` and `memory` belong to the hub: write them at once."""

    agreed: str
    """Job, strategy and codecs, as text: another hub must not go on with it."""
    model: str
    layout: bytes
    elements: int
    epoch: int
    round: int
    delay: int
    seats: tuple[Seat, ...]
    away: tuple[Seat, ...]
    """Members that were given up and may come back."""
    checksums: tuple[tuple[int, int], ...]
    """(replies, checksum of the base after them), as far back as the hub remembers."""
    base: Vector | None = field(repr=False)
    memory: Mapping[str, Vector] = field(default_factory=dict, repr=False)
    """What a lossy reply codec has not sent yet."""
    outer: Mapping[str, Vector] = field(default_factory=dict, repr=False)
    """The state of the outer rule, if it has one."""
    every: int = 0
    """Steps in a round, in force now; 0: not known."""
    steps: int = 0
    """Steps in the rounds before `round`; 0: not known."""
    fixed: tuple[Buffer, ...] = field(default=(), repr=False)
    """The values of fixed tensors that all members have from the first, in pieces; (): none."""
    above: Above | None = None
    """Of a gateway."""
    chart: bytes = b""
    """Of a hub whose members reduce: see Charted."""
    partitions: tuple[Sharing, ...] = ()
    """Of a hub of several, once ranges have moved or are about to: the map in force, and a pending
    one."""
    course: Course = ""
    """What people have told the hub."""


_OUTER = "outer/"
"""Begins the names of arrays that are the outer rule's."""


def encode(record: Record | State) -> tuple[bytes, list[Buffer]]:
    """The header of a record and the buffers behind it, which are not copied."""
    match record:
        case Round():
            payloads = [*record.reply, *(part for each in record.inputs for part in each)]
            counted = [[c.member, c.meant_for, c.weight] for c in record.counted]
            fields: list[Any] = [
                record.round, counted, record.delay, record.before, record.checksum,
                len(record.reply), len(record.inputs), [memoryview(p).nbytes for p in payloads],
            ]  # fmt: skip
            if record.members:
                newest = [record.every, record.complete, record.members]
                return msgpack.packb([5, "R", *fields, *newest]), payloads
            if record.complete is not None:
                head: bytes = msgpack.packb([4, "R", *fields, record.every, record.complete])
                return head, payloads
            return _header("R", fields, [record.every]), payloads
        case Entered():
            return _header("E", _seat_fields(record.seat)), []
        case Departed():
            return _header("D", [record.name, record.final]), []
        case Restarted():
            return _header("A", [record.epoch]), []
        case Sent():
            return _header("U", _sent_fields(record)), [record.vector]
        case Charted():
            return _header("M", [record.chart]), []
        case Sharing():
            return _header("H", _partition_fields(record)), []
        case Steered():
            return _header("T", [record.course]), []
        case State():
            return _encode_state(record)


def _header(
    kind: str, fields: Sequence[Any], newer: Sequence[int] = (), newest: int | None = None
) -> bytes:
    """`newer` are the fields that layout 2 has at the end, `newest` the one of layout 3."""
    layout = 3 if newest else 2 if any(newer) else 1
    head = [layout, kind, *fields, *(newer if layout > 1 else ()), *([newest] if newest else ())]
    packed: bytes = msgpack.packb(head)
    return packed


def _sent_fields(sent: Sent) -> list[Any]:
    return [
        sent.round, [[c.member, c.meant_for, c.weight] for c in sent.counted], sent.weight,
        sent.members, sent.applied, sent.checksum, sent.wanted_delay, sent.step_s,
    ]  # fmt: skip


def _sent(fields: Sequence[Any], vector: Buffer) -> Sent:
    round, counted, weight, members, applied, checksum, wanted_delay, step_s = fields
    each = tuple(CountedOnce(*once) for once in counted)
    return Sent(round, each, weight, members, applied, checksum, wanted_delay, step_s, vector)


_ABOVE = "above/"
"""Begins the names of arrays that a gateway has sent, and is that of what it says of them."""


_CHART = "chart/"
"""The name of the array that has these bytes."""


def _above_arrays(above: Above | None) -> dict[str, Any]:
    if above is None:
        return {}
    told = [above.session, above.name, above.index, above.next_round]
    told.append([_sent_fields(sent) for sent in above.kept])
    arrays = {f"{_ABOVE}{s.round}": np.frombuffer(s.vector, np.float32) for s in above.kept}
    return {_ABOVE: np.frombuffer(msgpack.packb(told), np.uint8), **arrays}


def _above(arrays: dict[str, Any]) -> Above | None:
    """What of `arrays` is a gateway's, which is taken out of them."""
    if _ABOVE not in arrays:
        return None
    told = msgpack.unpackb(arrays.pop(_ABOVE).tobytes(), use_list=True)
    session, name, index, next_round, kept = told
    each = (_sent(fields, arrays.pop(f"{_ABOVE}{fields[0]}").data.cast("B")) for fields in kept)
    return Above(session, name, index, next_round, tuple(each))


_HUBS = "hubs/"
"""Is the name of an array with what a hub of several knows of the others."""


def _partition_fields(each: Sharing) -> list[Any]:
    return [
        each.number, each.round, each.pending, each.first, each.end, each.since,
        [list(row) for row in each.rows], each.giver, each.taker, each.leads,
    ]  # fmt: skip


def _partition(fields: Sequence[Any]) -> Sharing:
    number, round, pending, first, end, since, rows, giver, taker, leads = fields
    each = tuple((address, key, low, high) for address, key, low, high in rows)
    return Sharing(number, round, pending, first, end, since, each, giver, taker, leads)


def _partitions(arrays: dict[str, Any]) -> tuple[Sharing, ...]:
    """What of `arrays` is of several hubs, which is taken out of them."""
    packed = arrays.pop(_HUBS, None)
    told = [] if packed is None else msgpack.unpackb(packed.tobytes(), use_list=True)
    return tuple(map(_partition, told))


def _seat_fields(seat: Seat) -> list[Any]:
    return [
        seat.name, seat.address, seat.session, seat.index, seat.weight, seat.first_round,
        seat.next_round, *([list(seat.by_range)] if seat.by_range or seat.behind else ()),
        *([seat.behind] if seat.behind else ()),
    ]  # fmt: skip


def _seat(fields: Sequence[Any]) -> Seat:
    return Seat(*fields[:7], *map(tuple, fields[7:8]), *fields[8:])


def _encode_state(state: State) -> tuple[bytes, list[Buffer]]:
    arrays = dict(state.memory) | {_OUTER + name: array for name, array in state.outer.items()}
    arrays |= _above_arrays(state.above)
    if state.chart:
        arrays[_CHART] = np.frombuffer(state.chart, np.uint8)
    if state.partitions:
        told = [_partition_fields(each) for each in state.partitions]
        arrays[_HUBS] = np.frombuffer(msgpack.packb(told), np.uint8)
    if state.base is not None:
        arrays[""] = state.base
    described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    fields = [
        state.agreed, state.model, state.layout, state.elements, state.epoch, state.round,
        state.delay, [_seat_fields(seat) for seat in state.seats],
        [_seat_fields(seat) for seat in state.away], [list(pair) for pair in state.checksums],
        described,
    ]  # fmt: skip
    payloads: list[Buffer] = [
        np.ascontiguousarray(array).reshape(-1).data.cast("B") for array in arrays.values()
    ]
    fixed_bytes = sum(memoryview(piece).nbytes for piece in state.fixed)
    newer = [state.every, state.steps]
    header = _header("S", fields, newer, fixed_bytes)
    if state.course:
        header = msgpack.packb([6, "S", *fields, *newer, fixed_bytes, state.course])
    return header, [*payloads, *state.fixed]


def decode(header: Buffer, payload: Buffer) -> Record | State:
    """The record that `encode` made these of; views of `payload`. Raises BadMessage alone."""
    try:
        layout, kind, *fields = msgpack.unpackb(header, use_list=True)
        if layout not in range(1, LAYOUT + 1):
            raise ValueError(f"records of layout {layout}, and this one reads 1 to {LAYOUT}")
        return _decode(kind, fields, memoryview(payload))
    except Exception as error:  # msgpack and NumPy raise many unrelated types on bad bytes
        raise BadMessage(f"{error}") from None


def pack_state(state: State) -> bytes:
    """A state as one text of bytes, for another machine."""
    header, payloads = encode(state)
    return b"".join([len(header).to_bytes(4, "little"), header, *map(bytes, payloads)])


def unpack_state(packed: Buffer) -> State:
    """The state that `pack_state` made this of. Raises BadMessage, and nothing else."""
    view = memoryview(packed)
    end = 4 + int.from_bytes(view[:4], "little")
    found = decode(view[4:end], view[end:])
    if not isinstance(found, State):
        raise BadMessage("a record that is no state of a hub")
    return found


def _decode(kind: str, fields: list[Any], payload: memoryview) -> Record | State:
    if kind == "R":
        round, counted, delay, before, checksum, replies, inputs, sizes, *newer = fields
        parts = list(_cut(payload, sizes))
        reply, rest = tuple(parts[:replies]), parts[replies:]
        each = len(rest) // inputs if inputs else 0
        return Round(
            round, tuple(CountedOnce(*c) for c in counted), delay, before, checksum, reply,
            tuple(tuple(rest[i * each : (i + 1) * each]) for i in range(inputs)), *newer,
        )  # fmt: skip
    if kind == "E":
        return Entered(_seat(fields))
    if kind == "D":
        return Departed(*fields)
    if kind == "A":
        return Restarted(*fields)
    if kind == "U":
        return _sent(fields, payload)
    if kind == "M":
        return Charted(bytes(fields[0]))
    if kind == "H":
        return _partition(fields)
    if kind == "T":
        return Steered(_course(fields[0]))
    if kind != "S":
        raise ValueError(f"a record of kind {kind!r}, and this one knows none")
    agreed, model, layout, elements, epoch, round, delay, seats, away, checksums, told, *newer = (
        fields
    )
    sizes = [np.dtype(dtype).itemsize * math.prod(shape) for _, dtype, shape in told]
    absent: list[Any] = [0, 0, 0, ""]
    every, steps, fixed_bytes, course = newer + absent[len(newer) :]
    *parts, fixed = _cut(payload, [*sizes, fixed_bytes])
    arrays = {
        name: np.frombuffer(part, np.dtype(dtype)).reshape(shape)
        for (name, dtype, shape), part in zip(told, parts, strict=True)
    }
    base, above, partitions = arrays.pop("", None), _above(arrays), _partitions(arrays)
    chart = arrays.pop(_CHART).tobytes() if _CHART in arrays else b""
    outer = {
        name.removeprefix(_OUTER): arrays.pop(name) for name in [*arrays] if name.startswith(_OUTER)
    }
    return State(
        agreed, model, layout, elements, epoch, round, delay,
        tuple(map(_seat, seats)),
        tuple(map(_seat, away)),
        tuple((applied, checksum) for applied, checksum in checksums),
        base,
        arrays,
        outer,
        every,
        steps,
        (fixed,) if fixed_bytes else (),
        above,
        chart,
        partitions,
        _course(course),
    )  # fmt: skip


def _course(told: object) -> Course:
    for each in get_args(Course):
        if each == told:
            course: Course = each
            return course
    raise ValueError(f"people told it {told!r}")


def _cut(payload: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    if sum(sizes) != payload.nbytes:
        raise ValueError(f"{payload.nbytes} bytes where {sum(sizes)} were told")
    parts, start = [], 0
    for size in sizes:
        parts.append(payload[start : start + size])
        start += size
    return parts
