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
"""Of the records' fields; goes up when they change. Layout 1 ends before the fields `local_steps`
and `steps`, layout 2 has no `State.fixed`, layout 3 no `Round.complete`, layout 4 no
`Round.members`, layout 5 no `State.course`: all are read as well, and written where that is 0,
empty or None."""


@dataclass(frozen=True)
class CountedOnce:
    """One contribution that was merged. (member, meant_for) is the key it counts once by."""

    member: str
    meant_for: int
    weight: float
    members: int = 1
    """Contributions in it: a gateway's has those of its site."""


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
    """Checksum of the base after it; 0: the hub holds no base."""
    reply: tuple[Buffer, ...] = field(repr=False)
    """The payloads that went to everyone."""
    inputs: tuple[tuple[Buffer, ...], ...] = field(default=(), repr=False)
    """Where what the hub keeps cannot be made from replies: the payloads of each contribution; or
    the merged vector, float32, if contributions are masked or there is an outer rule."""
    local_steps: int = 0
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
    """Its proof of identity when it comes back."""
    index: int
    weight: float
    first_round: int
    next_round: int
    """The once-only key: of all rounds before this one, what it gave has been merged."""
    by_range: tuple[int, ...] = ()
    """The same of the rounds that concern each range of the vector; (): there is one range."""
    behind: int = 0
    """Members of the site that it joined for, as its gateway; 0: it is a member itself."""
    used: int = 0
    """See MemberRecord."""


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
    """Contributions possibly not merged for good by the hub above."""


@dataclass(frozen=True)
class Charted:
    """Where members are, and who reduces what, from now on. Written before anyone is told."""

    chart: bytes
    """See places.Places.chart."""


Course = Literal["", "paused", "stopped"]
"""Orders of people to a hub: continue, pause, end the job."""


@dataclass(frozen=True)
class Steered:
    """People told the hub this."""

    course: Course


@dataclass(frozen=True)
class Sharing:
    """The ranges of each of several hubs, as known by one of them."""

    number: int = 0
    """Number of the map."""
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
    """Unsent remainder of a lossy reply codec."""
    outer: Mapping[str, Vector] = field(default_factory=dict, repr=False)
    """The state of the outer rule, if it has one."""
    local_steps: int = 0
    """Steps in a round, in force now; 0: not known."""
    steps: int = 0
    """Steps in the rounds before `round`; 0: not known."""
    fixed: tuple[Buffer, ...] = field(default=(), repr=False)
    """The values of fixed tensors that all members have from the first, in pieces; (): none."""
    above: Above | None = None
    """State of a gateway."""
    chart: bytes = b""
    """State of a hub whose members reduce: see Charted."""
    partitions: tuple[Sharing, ...] = ()
    """Of a hub of several, once ranges have moved or are about to: the map in force, and a pending
    one."""
    course: Course = ""
    """The last order of people to the hub."""


_OUTER = "outer/"
"""Begins the names of arrays that are the outer rule's."""
_ABOVE = "above/"
"""Begins the names of arrays that a gateway has sent, and is that of what it says of them."""
_CHART = "chart/"
"""The name of the array that has these bytes."""
_HUBS = "hubs/"
"""Is the name of an array with what a hub of several knows of the others."""

_LETTERS: dict[type[Record], str] = {
    Departed: "D", Restarted: "A", Charted: "M", Sharing: "H", Steered: "T",
}  # fmt: skip
"""Letters of the records without a payload, whose header is their fields."""


def encode(record: Record | State) -> tuple[bytes, list[Buffer]]:
    """The header of a record and the buffers behind it, which are not copied."""
    match record:
        case Round():
            payloads = [*record.reply, *(part for each in record.inputs for part in each)]
            fields = [
                record.round, record.counted, record.delay, record.before, record.checksum,
                len(record.reply), len(record.inputs), [memoryview(p).nbytes for p in payloads],
            ]  # fmt: skip
            steps, complete = (2, (record.local_steps,), (0,)), (4, (record.complete,), (None,))
            return _header("R", fields, steps, complete, (5, (record.members,), (0,))), payloads
        case Entered():
            return _header("E", _fields(record.seat)), []
        case Sent():
            return _header("U", _fields(record)), [record.vector]
        case State():
            return _encode_state(record)
        case _:
            return _header(_LETTERS[type(record)], _fields(record)), []


def _header(
    kind: str, fields: Sequence[Any], *later: tuple[int, tuple[Any, ...], tuple[Any, ...]]
) -> bytes:
    """`later`: fields that layouts have added at the end, as (layout, values, and what these are
    where they say nothing). The header is of the oldest layout that has all that is said."""
    said = [n for n, (_, values, nothing) in enumerate(later, 1) if values != nothing]
    kept = later[: said[-1]] if said else ()
    more = [value for _, values, _ in kept for value in values]
    return _packed([kept[-1][0] if kept else 1, kind, *fields, *more])


def _packed(values: Sequence[Any]) -> bytes:
    packed: bytes = msgpack.packb(values, default=_fields)
    return packed


def _fields(item: Any) -> list[Any]:
    """What the header has of a record, or of what is in one."""
    values = list(vars(item).values())
    if isinstance(item, Sent):
        return values[:-1]  # the vector follows the header
    if isinstance(item, CountedOnce):
        return values if item.members != 1 else values[:3]
    if isinstance(item, Seat):
        return values if item.behind else values[:8] if item.by_range else values[:7]
    return values


def _above_arrays(above: Above | None) -> dict[str, Any]:
    if above is None:
        return {}
    arrays = {f"{_ABOVE}{s.round}": np.frombuffer(s.vector, np.float32) for s in above.kept}
    return {_ABOVE: np.frombuffer(_packed(_fields(above)), np.uint8), **arrays}


def _encode_state(state: State) -> tuple[bytes, list[Buffer]]:
    arrays = dict(state.memory) | {_OUTER + name: array for name, array in state.outer.items()}
    arrays |= _above_arrays(state.above)
    if state.chart:
        arrays[_CHART] = np.frombuffer(state.chart, np.uint8)
    if state.partitions:
        arrays[_HUBS] = np.frombuffer(_packed(state.partitions), np.uint8)
    if state.base is not None:
        arrays[""] = state.base
    described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    fields = [
        state.agreed, state.model, state.layout, state.elements, state.epoch, state.round,
        state.delay, state.seats, state.away, state.checksums, described,
    ]  # fmt: skip
    payloads: list[Buffer] = [
        np.ascontiguousarray(array).reshape(-1).data.cast("B") for array in arrays.values()
    ]
    fixed_bytes = sum(memoryview(piece).nbytes for piece in state.fixed)
    header = _header(
        "S", fields, (2, (state.local_steps, state.steps), (0, 0)), (3, (fixed_bytes,), (0,)),
        (6, (state.course,), ("",)),
    )  # fmt: skip
    return header, [*payloads, *state.fixed]


def decode(header: Buffer, payload: Buffer) -> Record | State:
    """The record that `encode` made these of; views of `payload`. Raises BadMessage alone."""
    try:
        layout, kind, *fields = _unpacked(header)
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


def _decode(kind: str, fields: Sequence[Any], payload: memoryview) -> Record | State:
    match kind:
        case "R":
            round, counted, delay, before, checksum, replies, inputs, sizes, *newer = fields
            parts = list(_cut(payload, sizes))
            reply, rest = tuple(parts[:replies]), parts[replies:]
            each = len(rest) // inputs if inputs else 0
            return Round(
                round, _counted(counted), delay, before, checksum, reply,
                tuple(tuple(rest[i * each : (i + 1) * each]) for i in range(inputs)), *newer,
            )  # fmt: skip
        case "E":
            return Entered(_seat(fields))
        case "D":
            return Departed(*fields)
        case "A":
            return Restarted(*fields)
        case "U":
            return _sent(fields, payload)
        case "M":
            return Charted(bytes(fields[0]))
        case "H":
            return _sharing(*fields)
        case "T":
            return Steered(_course(fields[0]))
        case "S":
            return _decode_state(fields, payload)
    raise ValueError(f"a record of kind {kind!r}, and this one knows none")


def _counted(each: Sequence[Any]) -> tuple[CountedOnce, ...]:
    return tuple(CountedOnce(*once) for once in each)


def _seat(fields: Sequence[Any]) -> Seat:
    return Seat(*fields[:7], *map(tuple, fields[7:8]), *fields[8:])


def _sent(fields: Sequence[Any], vector: Buffer) -> Sent:
    round, counted, *rest = fields
    return Sent(*[round, _counted(counted), *rest, vector])


def _sharing(*fields: Any) -> Sharing:
    found = Sharing(*fields)
    if any(len(row) != 4 for row in found.rows):
        raise ValueError("a hub has an address, a key and two borders")
    return found


def _above(arrays: dict[str, Any]) -> Above | None:
    """What of `arrays` is a gateway's, which is taken out of them."""
    if _ABOVE not in arrays:
        return None
    *place, kept = _unpacked(arrays.pop(_ABOVE).data)
    each = (_sent(fields, arrays.pop(f"{_ABOVE}{fields[0]}").data.cast("B")) for fields in kept)
    return Above(*[*place, tuple(each)])


def _unpacked(packed: Buffer) -> Any:
    return msgpack.unpackb(packed, use_list=False)


def _decode_state(fields: Sequence[Any], payload: memoryview) -> State:
    agreed, model, layout, elements, epoch, round, delay, seats, away, checksums, told, *newer = (
        fields
    )
    absent: list[Any] = [0, 0, 0, ""]
    local_steps, steps, fixed_bytes, course = newer + absent[len(newer) :]
    sizes = [np.dtype(dtype).itemsize * math.prod(shape) for _, dtype, shape in told]
    *parts, fixed = _cut(payload, [*sizes, fixed_bytes])
    arrays = {
        name: np.frombuffer(part, np.dtype(dtype)).reshape(shape)
        for (name, dtype, shape), part in zip(told, parts, strict=True)
    }
    base, above = arrays.pop("", None), _above(arrays)
    hubs = _unpacked(arrays.pop(_HUBS).data) if _HUBS in arrays else ()
    chart = arrays.pop(_CHART).tobytes() if _CHART in arrays else b""
    outer = {
        name.removeprefix(_OUTER): arrays.pop(name) for name in [*arrays] if name.startswith(_OUTER)
    }
    return State(
        agreed, model, layout, elements, epoch, round, delay,
        tuple(map(_seat, seats)), tuple(map(_seat, away)),
        tuple((applied, checksum) for applied, checksum in checksums), base, arrays, outer,
        local_steps, steps, (fixed,) if fixed_bytes else (), above, chart,
        tuple(_sharing(*each) for each in hubs), _course(course),
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
