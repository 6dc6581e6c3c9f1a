"""Messages between members and the hub: one frozen dataclass per kind, every field checked.

On the wire a message is `[kind, header]` or `[kind, header, payload]`: one byte, a msgpack array of
the fields in order, and for the kinds that carry a vector one raw buffer. Nothing is ever
unpickled. `unpack` raises only BadMessage, and checks sizes before it allocates memory. What each
field means, and its bytes, is in docs/reference/wire.md and nowhere else. Arrays travel as
`memoryview(array)`, without a copy. This module knows no sockets, no torch and no numpy; kinds that
a plain star does not use are in `further_messages`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from operator import ge, le
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, dataclass_transform

import msgpack

from edgetrain.errors import BadMessage

if TYPE_CHECKING:
    from edgetrain.vectors.vector import Buffer

PROTOCOL = 11
"""Version; raised when hubs and members of different versions would misunderstand each other."""

MAX_HEADER_BYTES = 4096
MAX_LONG_HEADER_BYTES = 1 << 20
"""Limit of a header with a list of members."""
MAX_ELEMENTS = 1 << 40


MAX_COUNT = (1 << 63) - 1
"""Largest number of a round, or of a block of rounds."""
MOST_FIGURE = 1e300
MOST_OWN = 256
"""Figures of a member's own data in one message."""
MAX_CHECKSUM = (1 << 64) - 1
MOST_MS = 1 << 45
"""A thousand years."""
UNKNOWN_CELSIUS = -274

NO_WEIGHT = 1e-9
"""Weight of a contribution that adds nothing: a member that took no step, and is in step all the
same."""

MAX_RANGES = 1 << 20
MAX_ADDRESS = 128
"""Characters of an address."""
CLIENT = "client"
"""In place of its address: other members cannot connect to this one."""


class Domain(NamedTuple):
    """The values that a field of a message may hold: stands in its type, and nowhere else."""

    check: Callable[[Any], bool]
    said: str
    """In words."""
    low: Any = ()
    high: Any = ()
    """All of their type from `low` to `high` is allowed."""


def whole(low: int, high: int) -> Domain:
    said = f"an integer from {low} to {high}"
    return Domain(lambda value: type(value) is int and low <= value <= high, said, low, high)


def number(low: float, high: float) -> Domain:
    said = f"a float from {low} to {high}"
    return Domain(lambda value: type(value) is float and low <= value <= high, said, low, high)


def text(longest: int) -> Domain:
    return Domain(
        lambda value: type(value) is str and len(value) <= longest and value.isprintable(),
        f"printable text of at most {longest} characters", "", "",
    )  # fmt: skip


def listed(check: Callable[[Any], bool], said: str) -> Domain:
    return Domain(lambda value: isinstance(value, list | tuple) and all(map(check, value)), said)


def rows(said: str, *columns: Domain) -> Domain:
    """A list of lists with these columns."""

    def check(row: Any) -> bool:
        is_row = isinstance(row, list | tuple) and len(row) == len(columns)
        return is_row and all(each.check(value) for each, value in zip(columns, row, strict=True))

    return listed(check, said)


_COUNT, _NAME = whole(0, MAX_COUNT), text(64)
_BORDER, _ADDRESS = whole(0, MAX_RANGES), text(MAX_ADDRESS)
Count = Annotated[int, _COUNT]
CountFrom1 = Annotated[int, whole(1, MAX_COUNT)]
Count16 = Annotated[int, whole(0, 1 << 16)]
Count20 = Annotated[int, whole(0, 1 << 20)]
Count32 = Annotated[int, whole(0, 1 << 32)]
Count32From1 = Annotated[int, whole(1, 1 << 32)]
Border = Annotated[int, _BORDER]
"""Border of the ranges of the vector."""
Checksum = Annotated[int, whole(0, MAX_CHECKSUM)]
Ms = Annotated[int, whole(0, MOST_MS)]
Weight = Annotated[float, number(1e-9, 1e15)]
Finite = Annotated[float, number(-MOST_FIGURE, MOST_FIGURE)]
Name = Annotated[str, _NAME]
Address = Annotated[str, _ADDRESS]
Flag = Annotated[bool, Domain(lambda value: type(value) is bool, "true or false", False, True)]
Counts = Annotated[
    tuple[tuple[str, int], ...],
    rows("pairs of a printable name of at most 64 characters and a number", _NAME, _COUNT),
]
_PEERS = rows(
    f"peers: a name of at most 64, an address of at most {MAX_ADDRESS} and a key of at most "
    f"64 printable characters, and two integers from 0 to {MAX_RANGES}",
    _NAME, _ADDRESS, _NAME, _BORDER, _BORDER,
)  # fmt: skip
Peers = Annotated[
    tuple[tuple[str, str, str, int, int], ...],
    Domain(lambda value: _PEERS.check(value) and all(r[3] <= r[4] for r in value), _PEERS.said),
]

_OWN = rows(
    f"at most {MOST_OWN} rows: a printable name of at most 40 characters, a sum, a count from 0",
    text(40), number(-MOST_FIGURE, MOST_FIGURE), number(0.0, MOST_FIGURE),
)  # fmt: skip
OwnFigures = Annotated[
    tuple[tuple[str, float, float], ...],
    Domain(lambda value: _OWN.check(value) and len(value) <= MOST_OWN, _OWN.said),
]


class Peer(NamedTuple):
    """A member, as the others see it."""

    name: str
    address: str
    """tcp://HOST:PORT, where other members can connect; "": they cannot."""
    key: str
    """Its public key, spelled; "": it is not encrypted."""
    first: int = 0
    end: int = 0
    """The ranges of the vector that it reduces, [first, end)."""


def optional(default: Any) -> Any:
    """A field at the end of a message, left out while it and all behind it have defaults."""
    return field(default=default, metadata={"optional": True})


KINDS: "dict[bytes, type[Message]]" = {}
"""Every kind of message, by its byte."""


@dataclass_transform(frozen_default=True)
class Message:
    """A kind of message: what each class below begins with."""

    kind: ClassVar[bytes]
    header: ClassVar[dict[str, Domain]]
    """The fields in the header, in order, and what they may hold."""
    quick: ClassVar[tuple[tuple[Any, ...], ...]]  # types, and domains' `low` and `high`
    optional: ClassVar[tuple[Any, ...]]
    """Defaults of those at the end that may be left out."""
    carries: ClassVar[bool]
    """Whether it has a payload."""
    most_bytes: ClassVar[int]
    """Limit of its header, in bytes."""

    def __init_subclass__(cls, kind: bytes, most_bytes: int = MAX_HEADER_BYTES) -> None:
        cls.kind, cls.most_bytes = kind, most_bytes
        made: Any = dataclass(frozen=True, repr=False)(cls)
        found: dict[str, Any] = {each.name: each for each in fields(made)}
        cls.carries = found.pop("payload", None) is not None
        cls.header = {name: each.type.__metadata__[0] for name, each in found.items()}
        low, high = (tuple(getattr(d, e) for d in cls.header.values()) for e in ("low", "high"))
        cls.quick = tuple(map(type, low)), low, high
        cls.optional = tuple(e.default for e in found.values() if "optional" in e.metadata)
        KINDS[kind] = made

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.header)
        return f"{type(self).__name__}({said})"


class Join(Message, kind=b"J"):
    """member -> hub: asks to take part. Protocol, job and model are compared before a tensor is
    sent."""

    protocol: Count16
    job: Name
    model: Name
    elements: Annotated[int, whole(1, MAX_ELEMENTS)]
    name: Name
    weight: Weight
    checksum: Checksum
    session: Checksum = 0
    fixed_bytes: Annotated[int, whole(0, 4 * MAX_ELEMENTS)] = 0
    fixed: Name = ""
    steps: Count = 0
    address: Address = optional("")
    behind: Count20 = optional(0)
    optimizer: Annotated[str, text(256)] = optional("")
    payload: "Buffer" = b""


class Welcome(Message, kind=b"W"):
    """hub -> member: the member takes part; the terms of the job."""

    name: Name
    index: Count20
    members: Annotated[int, whole(1, 1 << 20)]
    strategy: Annotated[str, text(160)]
    local_steps: Count32From1
    delay: Annotated[int, whole(-1, 1 << 32)]
    codec: Annotated[str, text(256)]
    reply_codec: Annotated[str, text(256)]
    heartbeat_s: Annotated[float, number(0.001, 3600.0)]
    upload: Flag
    epoch: Count32 = 0
    threshold: Count20 = 0
    clip_range: Weight = 1.0
    status_ms: Annotated[int, whole(0, 3_600_000)] = 0
    ranges: Annotated[int, whole(1, 1 << 20)] = optional(1)
    first: Count20 = optional(0)
    end: Count20 = optional(1)
    drawn: Flag = optional(False)


class Refuse(Message, kind=b"N"):
    """hub -> member: the member does not take part (any longer). `code` is one of CODES."""

    code: Annotated[str, text(32)]
    reason: Annotated[str, text(512)]


CODES = {
    "protocol": "the two sides speak different protocol versions",
    "job": "the member runs another job, or the same job with other settings",
    "model": "names, shapes or dtypes of the model's parameters differ",
    "gradients": "with this strategy members exchange their mean gradients behind the parameters",
    "fixed": "what of the model is not trained has other values on another member",
    "data": "members are to hold the same data, and this one has others",
    "large": "the model is larger than the hub has memory for",
    "layout": "the model's tensors are missing, differ from the digest, or do not suit a codec",
    "name": "a member with this name, or with this key, is there already",
    "taken": "the name is that of a member with another key",
    "steps": "the members of a fleet take other numbers of steps",
    "full": "all places of the job are taken",
    "started": "with this strategy no member can join after the start",
    "unknown": "the hub does not know this connection (any more): resume, or join",
    "session": "the hub does not know this session (any more): join again",
    "again": "too much was sent over this connection without a contribution: reconnect",
    "ahead": "the member has applied replies that the restored hub does not have",
    "order": "a message came out of order",
    "size": "a payload is larger than the codec allows for this model",
    "payload": "a payload cannot be decoded",
    "diverged": "the checksum of base differs: replicas are no longer equal",
    "masks": "a message about masks is wrong, or was not asked for",
    "ended": "the job is over",
    "hub": "a hub of several that has no ranges yet, or a peer that is not the lead of its job",
    "peers": "members connect to each other, and this one does not",
    "gateway": "this job's rounds cannot be merged at a site first, or a gateway joined a gateway",
    "removed": "people removed the member from the job",
    "few": "too few members are left to unmask a round: the job ends, and may be resumed",
}
"""Every reason for a refusal, with its meaning."""


class Base(Message, kind=b"B"):
    """Both ways, before `Start`: a part of the base, as float32."""

    part: Count32
    parts: Count32From1
    payload: "Buffer"


class Fixed(Message, kind=b"F"):
    """Both ways, behind the base: a part of the values of tensors that are not trained, as raw
    bytes. The hub passes them on unread."""

    part: Count32
    parts: Count32From1
    payload: "Buffer"


class Start(Message, kind=b"S"):
    """hub -> member: train from the base that was sent, or from the member's own."""

    applied: Count
    round: Count
    delay: Count32
    checksum: Checksum
    keep: Flag
    resend: Count = 0
    attempt: Count32 = 0
    local_steps: Count32 = 0
    steps: Count = 0
    t_ms: Ms = 0
    fixed: Name = ""
    merged: Count = optional(0)
    complete: Count = optional(0)
    each: Counts = optional(())


class Resume(Message, kind=b"A"):
    """member -> hub: asks to go on after the connection, or the hub, was lost. Answered like a
    Join, with what the member missed."""

    protocol: Count16
    model: Name
    elements: Annotated[int, whole(1, MAX_ELEMENTS)]
    name: Name
    session: Annotated[int, whole(1, MAX_CHECKSUM)]
    applied: Count
    checksum: Checksum
    submitted: Count
    oldest: Count
    attempt: Count32From1
    lacks_base: Flag = False
    fixed: Name = ""
    steps: Count = 0
    address: Address = optional("")
    map: Count = optional(0)
    skips: Count = optional(0)


class Contribute(Message, kind=b"C"):
    """member -> hub: one part of a contribution to a round."""

    round: Count
    part: Count32
    parts: Count32From1
    weight: Annotated[float, number(NO_WEIGHT, 1e15)]
    applied: Count
    checksum: Checksum
    wanted_delay: Count32
    payload: "Buffer"
    step_s: Annotated[float, number(1e-9, 1e9)] = 1.0
    members: Count20 = optional(0)


class Reply(Message, kind=b"R", most_bytes=MAX_LONG_HEADER_BYTES):
    """hub -> member: one part of a round's merged contribution."""

    round: Count
    part: Count32
    parts: Count32From1
    members: Count20
    delay: Count32
    checksum: Checksum
    settled: Flag
    payload: "Buffer"
    local_steps: Count32 = 0
    complete: Count = optional(0)
    merged: Counts = optional(())

    def merged_of(self, name: str) -> int:
        """Out of step: below which number all contributions of this member are in this reply or in
        earlier ones; 0: it does not say."""
        return self.complete if self.settled else dict(self.merged).get(name, 0)


class Beat(Message, kind=b"H"):
    """Both ways: a sign of life."""

    epoch: Count32 = 0
    merged: Count = 0
    here: Count20 = 0
    last: Count = optional(0)


class Leave(Message, kind=b"L"):
    """member -> hub: the member stops; do not wait for it."""

    reason: Annotated[str, text(256)]


class Telemetry(Message, kind=b"T"):
    """member -> hub: how the member is doing. Numbers that people look at; nothing depends on them,
    and none of them is a loss or a figure of the task (see Figure).

    Times and bytes are sums since the member's process began to train. What is left of the time is
    computing.
    """

    step: Count
    round: Count
    t_ms: Ms = 0
    wait_ms: Ms = 0
    overhead_ms: Ms = 0
    eval_ms: Ms = 0
    end_ms: Ms = 0
    round_trip_us100: Count32 = 0
    sent_bytes: Annotated[int, whole(0, 1 << 60)] = 0
    received_bytes: Annotated[int, whole(0, 1 << 60)] = 0
    memory_mb: Count32 = 0
    celsius: Annotated[int, whole(UNKNOWN_CELSIUS, 1000)] = UNKNOWN_CELSIUS
    throttled: Annotated[int, whole(-1, 1)] = -1
    joules: Annotated[int, whole(-1, 1 << 50)] = -1
    versions: Annotated[str, text(40)] = ""
    disk_mb: Annotated[int, whole(-1, 1 << 40)] = optional(-1)
    swap_mb: Annotated[int, whole(-1, 1 << 40)] = optional(-1)
    mhz: Count20 = optional(0)
    under_voltage: Annotated[int, whole(-1, 1)] = optional(-1)
    wifi_dbm: Annotated[int, whole(-200, 0)] = optional(0)
    unix_ms: Annotated[int, whole(0, 1 << 50)] = optional(0)


class Figure(Message, kind=b"G", most_bytes=MAX_LONG_HEADER_BYTES):
    """member -> hub: this member evaluates, and how good the model is; what it found on data of its
    own, as sums. For people. In a job with privacy or masks `metric` is empty and the rest 0."""

    metric: Annotated[str, text(40)] = ""
    value: Finite = 0.0
    lower: Flag = False
    step: Count = 0
    t_ms: Ms = 0
    own_step: Count = optional(0)
    own: OwnFigures = optional(())

    @property
    def is_fleets(self) -> bool:
        """Whether the member evaluates for the fleet, and not its own data alone."""
        return bool(self.metric) or not self.own


class Evaluate(Message, kind=b"D"):
    """hub -> member: the member that evaluated is gone: evaluate in its place. Where the hub draws
    members of those that are there: evaluate in the round that this one is drawn for."""


class Map(Message, kind=b"M", most_bytes=MAX_LONG_HEADER_BYTES):
    """hub -> member: who takes part, where they can be reached, and who reduces which ranges."""

    number: Count
    trying: Flag
    ticket: Checksum
    name: Name
    first: Border
    end: Border
    rows: Peers
    round: Count = optional(0)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The rows, by names."""
        return tuple(Peer(*row) for row in self.rows)


class Standby(Message, kind=b"s"):
    """hub -> member, with its beats: where the hub's replica is, and how far it is."""

    address: Address
    key: Name
    link: Count
    sent: Count
    heartbeat_s: Annotated[float, number(0.001, 3600.0)]
    asks: Flag
    out: Flag


class Offer(Message, kind=b"o"):
    """replica -> member: the hub is silent: may I take over from this position?"""

    position: CountFrom1


class Agree(Message, kind=b"v"):
    """member -> hub or replica: yes, to Standby.asks or to an Offer, for this position only."""

    position: CountFrom1
    takes_over: Flag


def pack(message: Message) -> "list[Buffer]":
    """The frames of a message; the payload is not copied. BadMessage if a field is out of range."""
    cls = type(message)
    values = [getattr(message, name) for name in cls.header]
    _check(cls, values)
    for default in reversed(cls.optional):
        if values[-1] != default:
            break
        values.pop()
    frames: list[Buffer] = [cls.kind, msgpack.packb(values)]
    if cls.carries:
        frames.append(message.payload)  # type: ignore[attr-defined]
    return frames


def unpack(frames: "Sequence[Buffer]") -> Message:
    """The message in these frames; its payload is the caller's buffer. Raises BadMessage alone."""
    if len(frames) not in (2, 3):
        raise BadMessage(f"{len(frames)} frames: a message has 2 or 3")
    kind = bytes(frames[0][:2])
    if kind not in KINDS:
        import_module("edgetrain.exchange.further_messages")  # which begins with this module
    if (cls := KINDS.get(kind)) is None:
        raise BadMessage(f"no message kind {bytes(frames[0][:8])!r}")
    if len(frames) != 2 + cls.carries:
        raise BadMessage(f"{cls.__name__} in {len(frames)} frames")
    header = frames[1]
    if len(header) > cls.most_bytes:
        raise BadMessage(
            f"{cls.__name__}: a header of {len(header)} bytes, allowed {cls.most_bytes}"
        )
    try:
        # An element takes a byte at least, and the array of fields 64 at most.
        longest = 64 if cls.most_bytes == MAX_HEADER_BYTES else cls.most_bytes // 8
        values = msgpack.unpackb(header, use_list=False, max_array_len=longest, max_map_len=0)
    except Exception as error:  # msgpack raises half a dozen unrelated types on bad bytes
        raise BadMessage(f"{cls.__name__}: the header is not msgpack: {error}") from None
    fewest = len(cls.header) - len(cls.optional)
    if not isinstance(values, tuple) or not fewest <= len(values) <= len(cls.header):
        raise BadMessage(f"{cls.__name__}: the header is not an array of {len(cls.header)} fields")
    values += cls.optional[len(values) - fewest :]
    _check(cls, values)
    made = cls.__new__(cls)  # __init__ sets the fields of a frozen one singly
    vars(made).update(zip((*cls.header, "payload"), (*values, *frames[2:]), strict=False))
    return made


def other_protocol(frames: "Sequence[Buffer]") -> int | None:
    """The sender's protocol version, if these frames are a Join or Resume of another version.

    The version is the first field in every layout. None for anything else.
    """
    if len(frames) < 2 or bytes(frames[0][:2]) not in (Join.kind, Resume.kind):
        return None
    header = memoryview(frames[1])
    if header.nbytes > MAX_HEADER_BYTES:
        return None
    try:
        values = msgpack.unpackb(header, use_list=True, max_array_len=64, max_map_len=0)
    except Exception:  # as in `unpack`
        return None
    if not isinstance(values, list) or not values or type(values[0]) is not int:
        return None
    return values[0] if 0 <= values[0] <= 1 << 16 and values[0] != PROTOCOL else None


def _check(cls: type[Message], values: Sequence[Any]) -> None:
    """Raise BadMessage for the first value that its field does not allow."""
    types, low, high = cls.quick
    if (*map(type, values),) == types and all(map(le, low, values)) and all(map(ge, high, values)):
        return
    for (name, allowed), value in zip(cls.header.items(), values, strict=True):
        if not allowed.check(value):
            # A list may be nested deeper than Python can print.
            nested = isinstance(value, list | tuple)
            shown = f"a {type(value).__name__}" if nested else repr(str(value)[:60])
            raise BadMessage(f"{cls.__name__}.{name} = {shown}: allowed is {allowed.said}")
