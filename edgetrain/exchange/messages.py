"""Messages between members and the hub: one frozen dataclass per kind, every field checked.

On the wire a message is `[kind, header]` or `[kind, header, payload]`: one byte, a msgpack array of
the fields in order, and for the kinds that carry a vector one raw buffer. Nothing is ever
unpickled. `unpack` raises only BadMessage, and checks sizes before it allocates memory. What each
field means, and its bytes, is in docs/wire.md and nowhere else. Arrays travel as
`memoryview(array)`, without a copy. This module knows no sockets, no torch and no numpy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgpack

from edgetrain.errors import BadMessage

if TYPE_CHECKING:
    from edgetrain.vectors.vector import Buffer

PROTOCOL = 11
"""Version; raised when hubs and members of different versions would misunderstand each other."""

MAX_HEADER_BYTES = 4096
MAX_LONG_HEADER_BYTES = 1 << 20
"""Of a message that has a list of members."""
MAX_ELEMENTS = 1 << 40

MAX_BLOCK_ROUNDS = 1 << 10
"""Rounds in a block, whose masks are set up together; at most."""

MAX_COUNT = (1 << 63) - 1
"""Of rounds, and of blocks of rounds."""
MOST_FIGURE = 1e300
MAX_STAGES = 1 << 12
MAX_MICROBATCHES = 1 << 12
MAX_CHECKSUM = (1 << 64) - 1
MOST_MS = 1 << 45
"""A thousand years."""

NO_WEIGHT = 1e-9
"""Weight of a contribution that adds nothing: a member that took no step, and is in step all the
same."""

Check = Callable[[Any], bool]


def _checked(check: Check, allowed: str, **kwargs: Any) -> Any:
    return field(metadata={"check": check, "allowed": allowed}, **kwargs)


def _integer(low: int, high: int, **kwargs: Any) -> Any:
    def check(value: Any) -> bool:
        return type(value) is int and low <= value <= high

    return _checked(check, f"an integer from {low} to {high}", **kwargs)


def _number(low: float, high: float, **kwargs: Any) -> Any:
    def check(value: Any) -> bool:
        return type(value) is float and math.isfinite(value) and low <= value <= high

    return _checked(check, f"a float from {low} to {high}", **kwargs)


def _is_text(value: Any, longest: int) -> bool:
    return type(value) is str and len(value) <= longest and value.isprintable()


def _text(longest: int, **kwargs: Any) -> Any:
    allowed = f"printable text of at most {longest} characters"
    return _checked(lambda value: _is_text(value, longest), allowed, **kwargs)


def _flag(**kwargs: Any) -> Any:
    return _checked(lambda value: type(value) is bool, "true or false", **kwargs)


def _listed(check: Check, allowed: str, **kwargs: Any) -> Any:
    def check_all(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(map(check, value))

    return _checked(check_all, allowed, **kwargs)


def _named(value: Any, is_number: Check) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return _is_text(value[0], 64) and is_number(value[1])


def _pairs(**kwargs: Any) -> Any:
    def is_count(value: Any) -> bool:
        return type(value) is int and 0 <= value <= MAX_COUNT

    allowed = "pairs of a printable name of at most 64 characters and a number"
    return _listed(lambda value: _named(value, is_count), allowed, **kwargs)


def _weights(**kwargs: Any) -> Any:
    def is_weight(value: Any) -> bool:
        return type(value) is float and 0 < value <= 1e15

    allowed = (
        "weights: a printable name of at most 64 characters, and a float above 0 and at most 1e15"
    )
    return _listed(lambda value: _named(value, is_weight), allowed, **kwargs)


MAX_RANGES = 1 << 20
MAX_ADDRESS = 128
"""Characters of an address."""
CLIENT = "client"
"""In place of its address: other members cannot connect to this one."""


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


def _peers(**kwargs: Any) -> Any:
    allowed = (
        f"peers: a name of at most 64, an address of at most {MAX_ADDRESS} and a key of at most "
        f"64 printable characters, and two integers from 0 to {MAX_RANGES}"
    )
    return _listed(_is_peer, allowed, **kwargs)


def _is_peer(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != len(Peer._fields):
        return False
    *texts, first, end = value
    if not all(map(_is_text, texts, (64, MAX_ADDRESS, 64))):
        return False
    return type(first) is int and type(end) is int and 0 <= first <= end <= MAX_RANGES


MOST_SLICES = 1 << 20
MOST_AT_ONCE = 16
"""Slices in one `Assign`."""


def _slices(**kwargs: Any) -> Any:
    def check(value: Any) -> bool:
        is_list = isinstance(value, list | tuple) and len(value) <= MOST_AT_ONCE
        return is_list and all(type(each) is int and 0 <= each < MOST_SLICES for each in value)

    allowed = f"up to {MOST_AT_ONCE} integers from 0 to {MOST_SLICES - 1}"
    return _checked(check, allowed, **kwargs)


def _optional(spec: Any) -> Any:
    """A field at the end of a message, left out while it and all behind it have defaults."""
    return field(default=spec.default, metadata={**spec.metadata, "optional": True})


def _payload(**kwargs: Any) -> Any:
    return field(repr=False, metadata={"payload": True}, **kwargs)


KINDS: dict[bytes, type[Message]] = {}
"""Every kind of message, by its byte."""


class _Kind:
    """A kind of message: what each class below begins with."""

    kind: ClassVar[bytes]

    def __init_subclass__(cls, kind: bytes) -> None:
        cls.kind = kind
        KINDS[kind] = cls  # type: ignore[assignment]


@dataclass(frozen=True)
class Join(_Kind, kind=b"J"):
    """member -> hub: asks to take part. Protocol, job and model are compared before a tensor is
    sent."""

    protocol: int = _integer(0, 1 << 16)
    job: str = _text(64)
    model: str = _text(64)
    elements: int = _integer(1, MAX_ELEMENTS)
    name: str = _text(64)
    weight: float = _number(1e-9, 1e15)
    checksum: int = _integer(0, MAX_CHECKSUM)
    session: int = _integer(0, MAX_CHECKSUM, default=0)
    fixed_bytes: int = _integer(0, 4 * MAX_ELEMENTS, default=0)
    fixed: str = _text(64, default="")
    steps: int = _integer(0, MAX_COUNT, default=0)
    address: str = _optional(_text(MAX_ADDRESS, default=""))
    behind: int = _optional(_integer(0, 1 << 20, default=0))
    optimizer: str = _optional(_text(256, default=""))
    payload: Buffer = _payload(default=b"")  # noqa: RUF009


@dataclass(frozen=True)
class Welcome(_Kind, kind=b"W"):
    """hub -> member: the member takes part; the terms of the job."""

    name: str = _text(64)
    index: int = _integer(0, 1 << 20)
    members: int = _integer(1, 1 << 20)
    strategy: str = _text(160)
    every: int = _integer(1, 1 << 32)
    delay: int = _integer(-1, 1 << 32)
    codec: str = _text(256)
    reply_codec: str = _text(256)
    beat_s: float = _number(0.001, 3600.0)
    upload: bool = _flag()
    epoch: int = _integer(0, 1 << 32, default=0)
    threshold: int = _integer(0, 1 << 20, default=0)
    span: float = _number(1e-9, 1e15, default=1.0)
    status_ms: int = _integer(0, 3_600_000, default=0)
    ranges: int = _optional(_integer(1, 1 << 20, default=1))
    first: int = _optional(_integer(0, 1 << 20, default=0))
    end: int = _optional(_integer(0, 1 << 20, default=1))


@dataclass(frozen=True)
class Refuse(_Kind, kind=b"N"):
    """hub -> member: the member does not take part (any longer). `code` is one of CODES."""

    code: str = _text(32)
    reason: str = _text(512)


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


@dataclass(frozen=True)
class Base(_Kind, kind=b"B"):
    """Both ways, before `Start`: a part of the base, as float32."""

    part: int = _integer(0, 1 << 32)
    parts: int = _integer(1, 1 << 32)
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class Fixed(_Kind, kind=b"F"):
    """Both ways, behind the base: a part of the values of tensors that are not trained, as raw
    bytes. The hub passes them on unread."""

    part: int = _integer(0, 1 << 32)
    parts: int = _integer(1, 1 << 32)
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class Start(_Kind, kind=b"S"):
    """hub -> member: train from the base that was sent, or from the member's own."""

    applied: int = _integer(0, MAX_COUNT)
    round: int = _integer(0, MAX_COUNT)
    delay: int = _integer(0, 1 << 32)
    checksum: int = _integer(0, MAX_CHECKSUM)
    keep: bool = _flag()
    resend: int = _integer(0, MAX_COUNT, default=0)
    attempt: int = _integer(0, 1 << 32, default=0)
    every: int = _integer(0, 1 << 32, default=0)
    steps: int = _integer(0, MAX_COUNT, default=0)
    t_ms: int = _integer(0, MOST_MS, default=0)
    fixed: str = _text(64, default="")
    merged: int = _optional(_integer(0, MAX_COUNT, default=0))
    complete: int = _optional(_integer(0, MAX_COUNT, default=0))
    each: tuple[tuple[str, int], ...] = _optional(_pairs(default=()))


@dataclass(frozen=True)
class Resume(_Kind, kind=b"A"):
    """member -> hub: asks to go on after the connection, or the hub, was lost. Answered like a
    Join, with what the member missed."""

    protocol: int = _integer(0, 1 << 16)
    model: str = _text(64)
    elements: int = _integer(1, MAX_ELEMENTS)
    name: str = _text(64)
    session: int = _integer(1, MAX_CHECKSUM)
    applied: int = _integer(0, MAX_COUNT)
    checksum: int = _integer(0, MAX_CHECKSUM)
    submitted: int = _integer(0, MAX_COUNT)
    oldest: int = _integer(0, MAX_COUNT)
    attempt: int = _integer(1, 1 << 32)
    lacks_base: bool = _flag(default=False)
    fixed: str = _text(64, default="")
    steps: int = _integer(0, MAX_COUNT, default=0)
    address: str = _optional(_text(MAX_ADDRESS, default=""))
    map: int = _optional(_integer(0, MAX_COUNT, default=0))
    skips: int = _optional(_integer(0, MAX_COUNT, default=0))


@dataclass(frozen=True)
class Contribute(_Kind, kind=b"C"):
    """member -> hub: one part of a contribution to a round."""

    round: int = _integer(0, MAX_COUNT)
    part: int = _integer(0, 1 << 32)
    parts: int = _integer(1, 1 << 32)
    weight: float = _number(NO_WEIGHT, 1e15)
    applied: int = _integer(0, MAX_COUNT)
    checksum: int = _integer(0, MAX_CHECKSUM)
    wanted_delay: int = _integer(0, 1 << 32)
    payload: Buffer = _payload()  # noqa: RUF009
    step_s: float = _number(1e-9, 1e9, default=1.0)
    members: int = _optional(_integer(0, 1 << 20, default=0))


@dataclass(frozen=True)
class Reply(_Kind, kind=b"R"):
    """hub -> member: one part of a round's merged contribution."""

    round: int = _integer(0, MAX_COUNT)
    part: int = _integer(0, 1 << 32)
    parts: int = _integer(1, 1 << 32)
    members: int = _integer(0, 1 << 20)
    delay: int = _integer(0, 1 << 32)
    checksum: int = _integer(0, MAX_CHECKSUM)
    settled: bool = _flag()
    payload: Buffer = _payload()  # noqa: RUF009
    every: int = _integer(0, 1 << 32, default=0)
    complete: int = _optional(_integer(0, MAX_COUNT, default=0))
    merged: tuple[tuple[str, int], ...] = _optional(_pairs(default=()))

    def merged_of(self, name: str) -> int:
        """Out of step: below which number all contributions of this member are in this reply or in
        earlier ones; 0: it does not say."""
        return self.complete if self.settled else dict(self.merged).get(name, 0)


@dataclass(frozen=True)
class Beat(_Kind, kind=b"H"):
    """Both ways: a sign of life."""

    epoch: int = _integer(0, 1 << 32, default=0)
    merged: int = _integer(0, MAX_COUNT, default=0)
    here: int = _integer(0, 1 << 20, default=0)
    last: int = _optional(_integer(0, MAX_COUNT, default=0))


@dataclass(frozen=True)
class Leave(_Kind, kind=b"L"):
    """member -> hub: the member stops; do not wait for it."""

    reason: str = _text(256)


@dataclass(frozen=True)
class Telemetry(_Kind, kind=b"T"):
    """member -> hub: how the member is doing. Numbers that people look at; nothing depends on them,
    and none of them is a loss or a figure of the task (see Figure).

    Times and bytes are sums since the member's process began to train. What is left of the time is
    computing.
    """

    step: int = _integer(0, MAX_COUNT)
    round: int = _integer(0, MAX_COUNT)
    t_ms: int = _integer(0, MOST_MS, default=0)
    wait_ms: int = _integer(0, MOST_MS, default=0)
    overhead_ms: int = _integer(0, MOST_MS, default=0)
    eval_ms: int = _integer(0, MOST_MS, default=0)
    end_ms: int = _integer(0, MOST_MS, default=0)
    round_trip_us100: int = _integer(0, 1 << 32, default=0)
    sent_bytes: int = _integer(0, 1 << 60, default=0)
    received_bytes: int = _integer(0, 1 << 60, default=0)
    memory_mb: int = _integer(0, 1 << 32, default=0)
    celsius: int = _integer(-274, 1000, default=-274)
    throttled: int = _integer(-1, 1, default=-1)
    joules: int = _integer(-1, 1 << 50, default=-1)
    versions: str = _text(40, default="")
    disk_mb: int = _optional(_integer(-1, 1 << 40, default=-1))
    swap_mb: int = _optional(_integer(-1, 1 << 40, default=-1))
    mhz: int = _optional(_integer(0, 1 << 20, default=0))
    under_voltage: int = _optional(_integer(-1, 1, default=-1))
    wifi_dbm: int = _optional(_integer(-200, 0, default=0))
    unix_ms: int = _optional(_integer(0, 1 << 50, default=0))


@dataclass(frozen=True)
class Figure(_Kind, kind=b"G"):
    """member -> hub: this member evaluates, and how good the model is. For people; nothing depends
    on the figure. In a job with privacy or masks `metric` is empty and the rest 0."""

    metric: str = _text(40, default="")
    value: float = _number(-MOST_FIGURE, MOST_FIGURE, default=0.0)
    lower: bool = _flag(default=False)
    step: int = _integer(0, MAX_COUNT, default=0)
    t_ms: int = _integer(0, MOST_MS, default=0)


@dataclass(frozen=True)
class Evaluate(_Kind, kind=b"D"):
    """hub -> member: the member that evaluated is gone: evaluate in its place."""


@dataclass(frozen=True)
class Rekey(_Kind, kind=b"K"):
    """hub -> member: asks for keys for a block of rounds, whose contributions will be masked."""

    block: int = _integer(0, MAX_COUNT)
    first: int = _integer(0, MAX_COUNT)
    rounds: int = _integer(1, MAX_BLOCK_ROUNDS)


@dataclass(frozen=True)
class Advertise(_Kind, kind=b"P"):
    """member -> hub: the member's public keys for a block, for the others in it."""

    block: int = _integer(0, MAX_COUNT)
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class KeyList(_Kind, kind=b"O"):
    """hub -> member: the public keys of all members in a block, in the order of their places."""

    block: int = _integer(0, MAX_COUNT)
    place: int = _integer(0, 1 << 16)
    members: int = _integer(1, 1 << 16)
    unit: float = _number(1e-9, 1e15)
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class Shares(_Kind, kind=b"X"):
    """Both ways: shares of a block's secrets, encrypted from member to member. To the hub: the
    sender's for all others. From the hub: all others' for the receiver."""

    block: int = _integer(0, MAX_COUNT)
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class Unmask(_Kind, kind=b"U"):
    """hub -> member: the contributions of these places are in the sum. Asks for a share of the own
    mask of each of them, and of the key of every other place."""

    block: int = _integer(0, MAX_COUNT)
    round: int = _integer(0, MAX_COUNT)
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class Reveal(_Kind, kind=b"V"):
    """member -> hub: the shares that Unmask asked for."""

    block: int = _integer(0, MAX_COUNT)
    round: int = _integer(0, MAX_COUNT)
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class Map(_Kind, kind=b"M"):
    """hub -> member: who takes part, where they can be reached, and who reduces which ranges."""

    number: int = _integer(0, MAX_COUNT)
    trying: bool = _flag()
    ticket: int = _integer(0, MAX_CHECKSUM)
    name: str = _text(64)
    first: int = _integer(0, MAX_RANGES)
    end: int = _integer(0, MAX_RANGES)
    rows: tuple[tuple[str, str, str, int, int], ...] = _peers()
    round: int = _optional(_integer(0, MAX_COUNT, default=0))

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The rows, by names."""
        return tuple(Peer(*row) for row in self.rows)


@dataclass(frozen=True)
class Reached(_Kind, kind=b"Y"):
    """member -> hub: the answer to a `Map` that asks to try."""

    number: int = _integer(0, MAX_COUNT)
    reached: tuple[tuple[str, int], ...] = _pairs()


@dataclass(frozen=True)
class Takeover(_Kind, kind=b"Q"):
    """Both ways: the reducer of the ranges [first, end) is lost, and another member takes over."""

    stage: int = _integer(0, 3)
    first: int = _integer(0, MAX_RANGES)
    end: int = _integer(0, MAX_RANGES)
    applied: int = _integer(0, MAX_COUNT, default=0)
    hosts: bool = _flag(default=False)
    address: str = _text(MAX_ADDRESS, default="")
    payload: Buffer = _payload(default=b"")  # noqa: RUF009


@dataclass(frozen=True)
class Hello(_Kind, kind=b"I"):
    """Member -> member: the first message of a connection, and its answer."""

    ticket: int = _integer(0, MAX_CHECKSUM)
    name: str = _text(64)
    to: str = _text(64)


@dataclass(frozen=True)
class Segment(_Kind, kind=b"E"):
    """Member -> member: a part of a sum, or of the mean, in a ring, butterfly or tree."""

    round: int = _integer(0, MAX_COUNT)
    attempt: int = _integer(0, 1 << 32)
    number: int = _integer(0, 1 << 32)
    adds: bool = _flag()
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class RunRound(_Kind, kind=b"q"):
    """hub -> member: average a round among yourselves, in a ring, butterfly or tree."""

    round: int = _integer(0, MAX_COUNT)
    attempt: int = _integer(0, 1 << 32)
    topology: str = _text(32)
    is_base: bool = _flag()
    places: tuple[tuple[str, float], ...] = _weights()


@dataclass(frozen=True)
class Ran(_Kind, kind=b"z"):
    """member -> hub: what came of a `RunRound`."""

    round: int = _integer(0, MAX_COUNT)
    attempt: int = _integer(0, 1 << 32)
    checksum: int = _integer(0, MAX_CHECKSUM)
    lost: str = _text(64)
    silent: int = _integer(0, 1 << 32, default=0)


@dataclass(frozen=True)
class Follow(_Kind, kind=b"f"):
    """replica -> hub: send me what you journal; or, once it has taken over, that it has."""

    protocol: int = _integer(0, 1 << 16)
    agreed: str = _text(800)
    position: int = _integer(0, MAX_COUNT)
    epoch: int = _integer(0, 1 << 32, default=0)


@dataclass(frozen=True)
class Copy(_Kind, kind=b"c"):
    """hub -> replica: a part of a record or snapshot of the hub's journal."""

    position: int = _integer(1, MAX_COUNT)
    part: int = _integer(0, 1 << 32)
    parts: int = _integer(1, 1 << 32)
    begins: bool = _flag()
    whole: bool = _flag()
    header_bytes: int = _integer(0, 1 << 26)
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class Stored(_Kind, kind=b"h"):
    """replica -> hub: what it holds, written to its disk."""

    position: int = _integer(0, MAX_COUNT)
    parts: int = _integer(0, MAX_COUNT)


@dataclass(frozen=True)
class Standby(_Kind, kind=b"s"):
    """hub -> member, with its beats: where the hub's replica is, and how far it is."""

    address: str = _text(MAX_ADDRESS)
    key: str = _text(64)
    link: int = _integer(0, MAX_COUNT)
    sent: int = _integer(0, MAX_COUNT)
    beat_s: float = _number(0.001, 3600.0)
    asks: bool = _flag()
    out: bool = _flag()


@dataclass(frozen=True)
class Offer(_Kind, kind=b"o"):
    """replica -> member: the hub is silent: may I take over from this position?"""

    position: int = _integer(1, MAX_COUNT)


@dataclass(frozen=True)
class Agree(_Kind, kind=b"v"):
    """member -> hub or replica: yes, to Standby.asks or to an Offer, for this position only."""

    position: int = _integer(1, MAX_COUNT)
    takes_over: bool = _flag()


@dataclass(frozen=True)
class Handover(_Kind, kind=b"m"):
    """lead -> hub, and the answer: ranges move from one hub of a job to another."""

    protocol: int = _integer(0, 1 << 16)
    stage: int = _integer(0, 11)
    number: int = _integer(0, MAX_COUNT)
    round: int = _integer(0, MAX_COUNT, default=0)
    first: int = _integer(0, MAX_RANGES, default=0)
    end: int = _integer(0, MAX_RANGES, default=0)
    part: int = _integer(0, 1 << 32, default=0)
    parts: int = _integer(1, 1 << 32, default=1)
    agreed: str = _text(800, default="")
    why: str = _text(200, default="")
    session: int = _integer(0, MAX_CHECKSUM, default=0)
    payload: Buffer = _payload(default=b"")  # noqa: RUF009


@dataclass(frozen=True)
class Assign(_Kind, kind=b"w"):
    """hub -> member: slices of a batch, to be computed on the base that the replies lead to."""

    round: int = _integer(0, MAX_COUNT)
    of: int = _integer(1, MOST_SLICES)
    gradient: bool = _flag()
    slices: tuple[int, ...] = _slices()


@dataclass(frozen=True)
class Computed(_Kind, kind=b"a"):
    """member -> hub: one part of what a slice came to. It is not kept for sending again."""

    round: int = _integer(0, MAX_COUNT)
    slice: int = _integer(0, MOST_SLICES - 1)
    samples: int = _integer(1, MAX_COUNT)
    loss: float = _number(-MOST_FIGURE, MOST_FIGURE)
    part: int = _integer(0, 1 << 32)
    parts: int = _integer(1, 1 << 32)
    checksum: int = _integer(0, MAX_CHECKSUM)
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class Products(_Kind, kind=b"n"):
    """Both ways, passed on unread between hubs of several: what a search decides by, of the ranges
    [first, end) of the vector."""

    round: int = _integer(0, MAX_COUNT)
    first: int = _integer(0, MAX_RANGES)
    end: int = _integer(0, MAX_RANGES)
    payload: Buffer = _payload()  # noqa: RUF009


@dataclass(frozen=True)
class StageBegin(_Kind, kind=b"p"):
    """hub -> member: you hold this stage of a pipeline; go on after `step` steps."""

    generation: int = _integer(1, MAX_COUNT)
    """Goes up each time that all stages begin: messages of an earlier one no longer count."""
    stage: int = _integer(0, MAX_STAGES - 1)
    stages: int = _integer(1, MAX_STAGES)
    step: int = _integer(0, MAX_COUNT)
    """Steps of the job that the stage's state is after."""
    parts: int = _integer(0, 1 << 32)
    """`StageState` that follow; 0: none, the stage begins as the job's seed has it."""


@dataclass(frozen=True)
class Activation(_Kind, kind=b"x"):
    """Both ways: what a stage passes to the next one for a micro-batch, or the gradient of the loss
    by that, to the one before. The hub passes it on unread."""

    generation: int = _integer(1, MAX_COUNT)
    step: int = _integer(0, MAX_COUNT)
    """Steps of the job before this one."""
    micro: int = _integer(0, MAX_MICROBATCHES - 1)
    """The micro-batch, from 0."""
    backward: bool = _flag()
    """It is a gradient."""
    loss: float = _number(-MOST_FIGURE, MOST_FIGURE)
    """With a gradient: the micro-batch's part of the step's loss."""
    payload: Buffer = _payload()  # noqa: RUF009
    """Of a length that both stages know (docs/wire.md)."""
    squares: float = _optional(_number(0.0, MOST_FIGURE, default=0.0))
    """Where gradients are clipped. With the last gradient of a step: the sum of the squares of all
    gradients of the stages behind; with the first activation of the next: of all stages."""


@dataclass(frozen=True)
class StageState(_Kind, kind=b"k"):
    """Both ways: one part of a stage's parameters and optimizer after `step` steps."""

    generation: int = _integer(1, MAX_COUNT)
    step: int = _integer(1, MAX_COUNT)
    part: int = _integer(0, 1 << 32)
    parts: int = _integer(1, 1 << 32)
    payload: Buffer = _payload()  # noqa: RUF009
    """What they hold is the members' business: the hub keeps it unread."""


Replicating = Follow | Copy | Stored | Standby | Offer | Agree
"""Messages that occur only if the hub has a replica."""

Masking = Rekey | Advertise | KeyList | Shares | Unmask | Reveal
"""Messages that occur only if contributions are masked."""

Piping = StageBegin | Activation | StageState
"""Messages that occur only if the members are the stages of a pipeline."""

Message = (
    Join | Welcome | Refuse | Base | Fixed | Start | Resume | Contribute | Reply | Beat | Leave
    | Telemetry | Figure | Evaluate | Masking | Map | Reached | Takeover | Hello | Segment
    | RunRound | Ran | Replicating | Handover | Assign | Computed | Products | Piping
)  # fmt: skip

_FIELDS = {
    cls: tuple(f for f in dataclasses.fields(cls) if "check" in f.metadata)
    for cls in KINDS.values()
}
# Looked up once: every message of a run needs them.
_NAMES = {cls: tuple(f.name for f in fields) for cls, fields in _FIELDS.items()}
_CHECKS: dict[type[Message], tuple[Check, ...]] = {
    cls: tuple(f.metadata["check"] for f in fields) for cls, fields in _FIELDS.items()
}
_CARRIES = {
    cls: any("payload" in f.metadata for f in dataclasses.fields(cls)) for cls in KINDS.values()
}


_DEFAULTS = {
    cls: tuple(f.default for f in fields if "optional" in f.metadata)
    for cls, fields in _FIELDS.items()
}
"""Of the fields at the end that may be left out."""
_MOST_HEADER: dict[type[Message], int] = dict.fromkeys(
    (Reply, Map, Reached, RunRound), MAX_LONG_HEADER_BYTES
)


def pack(message: Message) -> list[Buffer]:
    """The frames of a message; the payload is not copied. BadMessage if a field is out of range."""
    cls = type(message)
    values = [getattr(message, name) for name in _NAMES[cls]]
    _check(cls, values)
    for default in reversed(_DEFAULTS[cls]):
        if values[-1] != default:
            break
        values.pop()
    frames: list[Buffer] = [cls.kind, msgpack.packb(values)]
    if _CARRIES[cls]:
        frames.append(message.payload)  # type: ignore[union-attr]
    return frames


def unpack(frames: Sequence[Buffer]) -> Message:
    """The message in these frames; its payload is the caller's buffer. Raises BadMessage alone."""
    if len(frames) not in (2, 3):
        raise BadMessage(f"{len(frames)} frames: a message has 2 or 3")
    kind = memoryview(frames[0])
    cls = KINDS.get(bytes(kind)) if kind.nbytes == 1 else None
    if cls is None:
        raise BadMessage(f"no message kind {bytes(kind[:8])!r}")
    if len(frames) != 2 + _CARRIES[cls]:
        raise BadMessage(f"{cls.__name__} in {len(frames)} frames")
    header = memoryview(frames[1])
    most = _MOST_HEADER.get(cls, MAX_HEADER_BYTES)
    if header.nbytes > most:
        raise BadMessage(f"{cls.__name__}: a header of {header.nbytes} bytes, allowed {most}")
    try:
        # An element takes a byte at least, and the array of fields 64 at most.
        longest = max(64, most // 8) if cls in _MOST_HEADER else 64
        values = msgpack.unpackb(header, use_list=False, max_array_len=longest, max_map_len=0)
    except Exception as error:  # msgpack raises half a dozen unrelated types on bad bytes
        raise BadMessage(f"{cls.__name__}: the header is not msgpack: {error}") from None
    names, optional = _NAMES[cls], _DEFAULTS[cls]
    fewest = len(names) - len(optional)
    if not isinstance(values, tuple) or not fewest <= len(values) <= len(names):
        raise BadMessage(f"{cls.__name__}: the header is not an array of {len(names)} fields")
    values = [*values, *optional[len(values) - fewest :]]
    _check(cls, values)
    arguments = dict(zip(names, values, strict=True))
    if _CARRIES[cls]:
        arguments["payload"] = frames[2]
    return cls(**arguments)


def other_protocol(frames: Sequence[Buffer]) -> int | None:
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
    for number, (check, value) in enumerate(zip(_CHECKS[cls], values, strict=True)):
        if not check(value):
            spec = _FIELDS[cls][number]
            allowed = spec.metadata["allowed"]
            # A list may be nested deeper than Python can print.
            nested = isinstance(value, list | tuple)
            shown = f"a {type(value).__name__}" if nested else repr(str(value)[:60])
            raise BadMessage(f"{cls.__name__}.{spec.name} = {shown}: allowed is {allowed}")
