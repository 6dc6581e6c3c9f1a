"""Messages between members and the hub: one frozen dataclass per kind, every field checked.

On the wire a message is `[kind, header]` or `[kind, header, payload]`: one byte, a msgpack array of
the fields in order, and for the kinds that carry a vector one raw buffer. Nothing is ever
unpickled. `unpack` raises only BadMessage, and looks at sizes before it takes memory. The table of
kinds, byte by byte, is in docs/wire.md. No socket here, no torch, no numpy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgpack

from edgetrain.errors import BadMessage

if TYPE_CHECKING:
    from edgetrain.vectors.vector import Buffer

PROTOCOL = 5
"""Goes up when a hub and a member of different versions would misunderstand each other."""

MAX_HEADER_BYTES = 4096
MAX_ELEMENTS = 1 << 40

MAX_BLOCK_ROUNDS = 1 << 10
"""Rounds whose masks are set up in one go."""

Check = Callable[[Any], bool]


def _integer(low: int, high: int, **kwargs: Any) -> Any:
    def check(value: Any) -> bool:
        return type(value) is int and low <= value <= high

    return field(metadata={"check": check, "allowed": f"an integer from {low} to {high}"}, **kwargs)


def _number(low: float, high: float, **kwargs: Any) -> Any:
    def check(value: Any) -> bool:
        return type(value) is float and math.isfinite(value) and low <= value <= high

    return field(metadata={"check": check, "allowed": f"a float from {low} to {high}"}, **kwargs)


def _text(longest: int, **kwargs: Any) -> Any:
    def check(value: Any) -> bool:
        return type(value) is str and len(value) <= longest and value.isprintable()

    allowed = f"printable text of at most {longest} characters"
    return field(metadata={"check": check, "allowed": allowed}, **kwargs)


def _flag(**kwargs: Any) -> Any:
    def check(value: Any) -> bool:
        return type(value) is bool

    return field(metadata={"check": check, "allowed": "true or false"}, **kwargs)


def _payload(**kwargs: Any) -> Any:
    return field(repr=False, metadata={"payload": True}, **kwargs)


_U63 = (1 << 63) - 1
_U64 = (1 << 64) - 1


@dataclass(frozen=True)
class Join:
    """member -> hub: let me in. Proves the protocol, the job and the model before a tensor
    moves."""

    kind: ClassVar[bytes] = b"J"
    protocol: int = _integer(0, 1 << 16)
    job: str = _text(64)
    """Digest of what must be equal in a job, or "" for a member that brings its own loop."""
    model: str = _text(64)
    """Digest of the names, shapes and dtypes of the trained parameters, which the payload
    tells."""
    elements: int = _integer(1, MAX_ELEMENTS)
    name: str = _text(64)
    """The name it would like; "" lets the hub choose."""
    weight: float = _number(1e-9, 1e15)
    """Samples it holds; only strategies that weigh members look at it."""
    checksum: int = _integer(0, _U64)
    """Of its initial parameters: equal ones need not be sent again."""
    session: int = _integer(0, _U64, default=0)
    """Drawn by the member, which shows it to come back; 0: it will not."""
    payload: Buffer = _payload(default=b"")  # noqa: RUF009
    """The tensors of the vector, whose digest `model` is: see `layout`. Empty: not told."""


@dataclass(frozen=True)
class Welcome:
    """hub -> member: you are in; here is what the job agreed on."""

    kind: ClassVar[bytes] = b"W"
    name: str = _text(64)
    index: int = _integer(0, 1 << 20)
    members: int = _integer(1, 1 << 20)
    """Members the job starts with."""
    strategy: str = _text(64)
    every: int = _integer(1, 1 << 32)
    delay: int = _integer(-1, 1 << 32)
    """Local steps; -1: measured during the first rounds, then announced in a reply."""
    codec: str = _text(256)
    reply_codec: str = _text(256)
    beat_s: float = _number(0.001, 3600.0)
    """The hub sends at least one message in this time."""
    upload: bool = _flag()
    """Whether this member's parameters become the base everyone starts from."""
    epoch: int = _integer(0, 1 << 32, default=0)
    """How often the hub was restored from its journal: another one in a beat, and it has been."""
    threshold: int = _integer(0, 1 << 20, default=0)
    """Contributions are masked, and so many members can unmask a round's sum; 0: they are not."""
    span: float = _number(1e-9, 1e15, default=1.0)
    """Masked: elements of weighted contributions are sent within [-span, span]."""


@dataclass(frozen=True)
class Refuse:
    """hub -> member: no, and why. `code` is one of CODES."""

    kind: ClassVar[bytes] = b"N"
    code: str = _text(32)
    reason: str = _text(512)


CODES = {
    "protocol": "the two sides speak different protocol versions",
    "job": "the member runs another job, or the same job with other settings",
    "model": "names, shapes or dtypes of the model's parameters differ",
    "layout": "the model's tensors are not told, not as their digest says, or not for the codec",
    "name": "another member with this name is there, or has it with another key",
    "full": "all places of the job are taken",
    "started": "the strategy cannot take in members after the start",
    "unknown": "the hub does not know this connection (any more): come back with Resume, or join",
    "session": "the hub does not know this session (any more): join again",
    "again": "too much was sent over this connection for nothing: come back over another one",
    "ahead": "the member has applied replies that the restored hub does not have",
    "order": "a message came out of order",
    "size": "a payload is larger than the codec allows for this model",
    "payload": "a payload cannot be decoded",
    "diverged": "the checksum of base differs: replicas are no longer equal",
    "masks": "what was said about masks does not fit, or came when it was not asked for",
    "ended": "the job is over",
}
"""Every reason for a refusal."""


@dataclass(frozen=True)
class Base:
    """Either way: a part of the base, as float32, before `Start`."""

    kind: ClassVar[bytes] = b"B"
    part: int = _integer(0, 1 << 32)
    parts: int = _integer(1, 1 << 32)
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class Start:
    """hub -> member: train. The base (sent before, or the member's own) is what `applied` says."""

    kind: ClassVar[bytes] = b"S"
    applied: int = _integer(0, _U63)
    round: int = _integer(0, _U63)
    delay: int = _integer(0, 1 << 32)
    checksum: int = _integer(0, _U64)
    keep: bool = _flag()
    """The member's own parameters, or its own base, are the base already."""
    resend: int = _integer(0, _U63, default=0)
    """To a member that is back: its contributions from this round on are not here."""
    attempt: int = _integer(0, 1 << 32, default=0)
    """Of the Resume that this answers; 0: it answers a Join."""


@dataclass(frozen=True)
class Resume:
    """member -> hub: I trained before; the connection, or the hub, was lost. Answered like a
    Join, with what I missed."""

    kind: ClassVar[bytes] = b"A"
    protocol: int = _integer(0, 1 << 16)
    model: str = _text(64)
    elements: int = _integer(1, MAX_ELEMENTS)
    name: str = _text(64)
    session: int = _integer(1, _U64)
    applied: int = _integer(0, _U63)
    """Replies it has applied."""
    checksum: int = _integer(0, _U64)
    """Of its base after them; 0: not known, for gradient strategies."""
    submitted: int = _integer(0, _U63)
    """The next round it has a contribution for."""
    oldest: int = _integer(0, _U63)
    """The oldest round it can still send its contribution for; `submitted`: none."""
    attempt: int = _integer(1, 1 << 32)
    """Counts the member's: only what follows the answer to the last one is for it."""
    lacks_base: bool = _flag(default=False)
    """It was started again, and has no base: it takes the hub's, not the replies it missed."""


@dataclass(frozen=True)
class Contribute:
    """member -> hub: one part of a contribution to a round."""

    kind: ClassVar[bytes] = b"C"
    round: int = _integer(0, _U63)
    part: int = _integer(0, 1 << 32)
    parts: int = _integer(1, 1 << 32)
    weight: float = _number(1e-9, 1e15)
    """Reserved: members count by the weight they joined with."""
    applied: int = _integer(0, _U63)
    checksum: int = _integer(0, _U64)
    """Of the member's base after `applied` replies."""
    wanted_delay: int = _integer(0, 1 << 32)
    """Local steps that would have hidden this member's last round trip (0: not known yet)."""
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class Reply:
    """hub -> member: one part of what a round's contributions became."""

    kind: ClassVar[bytes] = b"R"
    round: int = _integer(0, _U63)
    part: int = _integer(0, 1 << 32)
    parts: int = _integer(1, 1 << 32)
    members: int = _integer(0, 1 << 20)
    """Contributions merged; 0: nobody could give to this round any more."""
    delay: int = _integer(0, 1 << 32)
    """The delay in force once this reply is applied."""
    checksum: int = _integer(0, _U64)
    """Of the base after this reply; 0 where the hub holds no base (gradient strategies)."""
    settled: bool = _flag()
    """What anyone has given to this round is counted; else `Beat.merged` will say when."""
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class Beat:
    """Either way: I am here."""

    kind: ClassVar[bytes] = b"H"
    epoch: int = _integer(0, 1 << 32, default=0)
    """The hub's, as in Welcome; 0 from a member."""
    merged: int = _integer(0, _U63, default=0)
    """To a member: what it gave to rounds before this one is in the journal. 0 from a member."""


@dataclass(frozen=True)
class Leave:
    """member -> hub: I am done, do not wait for me."""

    kind: ClassVar[bytes] = b"L"
    reason: str = _text(256)


@dataclass(frozen=True)
class Rekey:
    """hub -> member: make keys for a block of rounds, whose contributions will be masked."""

    kind: ClassVar[bytes] = b"K"
    block: int = _integer(0, _U63)
    """The hub's epoch in the upper half, so that none comes twice."""
    first: int = _integer(0, _U63)
    rounds: int = _integer(1, MAX_BLOCK_ROUNDS)


@dataclass(frozen=True)
class Advertise:
    """member -> hub: my public keys for a block, to be passed on to the others in it."""

    kind: ClassVar[bytes] = b"P"
    block: int = _integer(0, _U63)
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class KeyList:
    """hub -> member: the public keys of all who are in a block, in the order of their places."""

    kind: ClassVar[bytes] = b"O"
    block: int = _integer(0, _U63)
    place: int = _integer(0, 1 << 16)
    """The receiver's."""
    members: int = _integer(1, 1 << 16)
    unit: float = _number(1e-9, 1e15)
    """The largest weight among them: contributions are scaled by weight / unit."""
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class Shares:
    """Either way: shares of a block's secrets, encrypted from member to member. To the hub those
    for all others, from the hub those of all others."""

    kind: ClassVar[bytes] = b"X"
    block: int = _integer(0, _U63)
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class Unmask:
    """hub -> member: the contributions of these places were added up. Asks for a share of the own
    mask of each of them, and of the key of each that is missing."""

    kind: ClassVar[bytes] = b"U"
    block: int = _integer(0, _U63)
    round: int = _integer(0, _U63)
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class Reveal:
    """member -> hub: these shares."""

    kind: ClassVar[bytes] = b"V"
    block: int = _integer(0, _U63)
    round: int = _integer(0, _U63)
    payload: Buffer = _payload()  # noqa: RUF009


Masking = Rekey | Advertise | KeyList | Shares | Unmask | Reveal
"""What is said only where contributions are masked."""

Message = (
    Join | Welcome | Refuse | Base | Start | Resume | Contribute | Reply | Beat | Leave | Masking
)

KINDS: dict[bytes, type[Message]] = {
    cls.kind: cls
    for cls in (
        Join, Welcome, Refuse, Base, Start, Resume, Contribute, Reply, Beat, Leave,
        Rekey, Advertise, KeyList, Shares, Unmask, Reveal,
    )
}  # fmt: skip

_FIELDS = {
    cls: tuple(f for f in dataclasses.fields(cls) if "check" in f.metadata)
    for cls in KINDS.values()
}
# Every message of a run goes through these: names and checks are looked up once.
_NAMES = {cls: tuple(f.name for f in fields) for cls, fields in _FIELDS.items()}
_CHECKS: dict[type[Message], tuple[Check, ...]] = {
    cls: tuple(f.metadata["check"] for f in fields) for cls, fields in _FIELDS.items()
}
_CARRIES = {
    cls: any("payload" in f.metadata for f in dataclasses.fields(cls)) for cls in KINDS.values()
}


def pack(message: Message) -> list[Buffer]:
    """The frames of a message; the payload is passed on without a copy.

    Raises BadMessage when a field is out of range: a bad value is stopped where it enters.
    """
    cls = type(message)
    values = [getattr(message, name) for name in _NAMES[cls]]
    _check(cls, values)
    frames: list[Buffer] = [cls.kind, msgpack.packb(values)]
    if _CARRIES[cls]:
        frames.append(message.payload)  # type: ignore[union-attr]
    return frames


def unpack(frames: Sequence[Buffer]) -> Message:
    """The message in these frames; its payload still lies in the caller's buffer.

    Raises BadMessage, and nothing else, whatever the frames hold.
    """
    if len(frames) not in (2, 3):
        raise BadMessage(f"{len(frames)} frames: a message has 2 or 3")
    kind = memoryview(frames[0])
    cls = KINDS.get(bytes(kind)) if kind.nbytes == 1 else None
    if cls is None:
        raise BadMessage(f"no message kind {bytes(kind[:8])!r}")
    if len(frames) != 2 + _CARRIES[cls]:
        raise BadMessage(f"{cls.__name__} in {len(frames)} frames")
    header = memoryview(frames[1])
    if header.nbytes > MAX_HEADER_BYTES:
        raise BadMessage(
            f"{cls.__name__}: a header of {header.nbytes} bytes, allowed {MAX_HEADER_BYTES}"
        )
    try:
        values = msgpack.unpackb(header, use_list=True, max_array_len=64, max_map_len=0)
    except Exception as error:  # msgpack raises half a dozen unrelated types on bad bytes
        raise BadMessage(f"{cls.__name__}: the header is not msgpack: {error}") from None
    names = _NAMES[cls]
    if not isinstance(values, list) or len(values) != len(names):
        raise BadMessage(f"{cls.__name__}: the header is not an array of {len(names)} fields")
    _check(cls, values)
    arguments = dict(zip(names, values, strict=True))
    if _CARRIES[cls]:
        arguments["payload"] = frames[2]
    return cls(**arguments)


def other_protocol(frames: Sequence[Buffer]) -> int | None:
    """The version of a Join or Resume in a layout that this version cannot read: it is the first
    field in all of them. None: it is something else."""
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
    """BadMessage for the first value that its field does not allow."""
    for number, (check, value) in enumerate(zip(_CHECKS[cls], values, strict=True)):
        if not check(value):
            spec = _FIELDS[cls][number]
            allowed = spec.metadata["allowed"]
            # A list may be nested deeper than Python can print.
            nested = isinstance(value, list)
            shown = f"a {type(value).__name__}" if nested else repr(str(value)[:60])
            raise BadMessage(f"{cls.__name__}.{spec.name} = {shown}: allowed is {allowed}")
