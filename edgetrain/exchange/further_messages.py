"""Messages that a plain star does not send: of masks, between members, of replicas of the hub, of
several hubs, of slices and of pipelines. They are known as `messages.unpack` meets the first."""

import math
from typing import TYPE_CHECKING, Annotated

from edgetrain.exchange.messages import (
    MAX_LONG_HEADER_BYTES,
    MOST_FIGURE,
    Address,
    Border,
    Checksum,
    Count,
    Count16,
    Count32,
    Count32From1,
    CountFrom1,
    Counts,
    Domain,
    Finite,
    Flag,
    Message,
    Name,
    Weight,
    listed,
    number,
    optional,
    rows,
    text,
    whole,
)

if TYPE_CHECKING:
    from edgetrain.vectors.vector import Buffer

MAX_BLOCK_ROUNDS = 1 << 10
"""Rounds in a block, whose masks are set up together; at most."""
MAX_STAGES = 1 << 12
MAX_MICROBATCHES = 1 << 12
MOST_SLICES = 1 << 20
MOST_AT_ONCE = 16
"""Slices in one `Assign`."""

Weights = Annotated[
    tuple[tuple[str, float], ...],
    rows(
        "weights: a printable name of at most 64 characters, and a float above 0 and at most 1e15",
        text(64), number(math.nextafter(0.0, 1.0), 1e15),
    ),
]  # fmt: skip
_SLICES = listed(
    whole(0, MOST_SLICES - 1).check, f"up to {MOST_AT_ONCE} integers from 0 to {MOST_SLICES - 1}"
)
Slices = Annotated[
    tuple[int, ...],
    Domain(lambda value: _SLICES.check(value) and len(value) <= MOST_AT_ONCE, _SLICES.said),
]


class Rekey(Message, kind=b"K"):
    """hub -> member: asks for keys for a block of rounds, whose contributions will be masked."""

    block: Count
    first: Count
    rounds: Annotated[int, whole(1, MAX_BLOCK_ROUNDS)]


class Advertise(Message, kind=b"P"):
    """member -> hub: the member's public keys for a block, for the others in it."""

    block: Count
    payload: "Buffer"


class KeyList(Message, kind=b"O"):
    """hub -> member: the public keys of all members in a block, in the order of their places."""

    block: Count
    place: Count16
    members: Annotated[int, whole(1, 1 << 16)]
    unit: Weight
    payload: "Buffer"


class Shares(Message, kind=b"X"):
    """Both ways: shares of a block's secrets, encrypted from member to member. To the hub: the
    sender's for all others. From the hub: all others' for the receiver."""

    block: Count
    payload: "Buffer"


class Unmask(Message, kind=b"U"):
    """hub -> member: the contributions of these places are in the sum. Asks for a share of the own
    mask of each of them, and of the key of every other place."""

    block: Count
    round: Count
    payload: "Buffer"


class Reveal(Message, kind=b"V"):
    """member -> hub: the shares that Unmask asked for."""

    block: Count
    round: Count
    payload: "Buffer"


class Reached(Message, kind=b"Y", most_bytes=MAX_LONG_HEADER_BYTES):
    """member -> hub: the answer to a `Map` that asks to try."""

    number: Count
    reached: Counts


class Takeover(Message, kind=b"Q"):
    """Both ways: the reducer of the ranges [first, end) is lost, and another member takes over."""

    stage: Annotated[int, whole(0, 3)]
    first: Border
    end: Border
    applied: Count = 0
    hosts: Flag = False
    address: Address = ""
    payload: "Buffer" = b""


class Hello(Message, kind=b"I"):
    """Member -> member: the first message of a connection, and its answer."""

    ticket: Checksum
    name: Name
    to: Name


class Segment(Message, kind=b"E"):
    """Member -> member: a part of a sum, or of the mean, in a ring, butterfly or tree."""

    round: Count
    attempt: Count32
    number: Count32
    adds: Flag
    payload: "Buffer"


class RunRound(Message, kind=b"q", most_bytes=MAX_LONG_HEADER_BYTES):
    """hub -> member: average a round among yourselves, in a ring, butterfly or tree."""

    round: Count
    attempt: Count32
    topology: Annotated[str, text(32)]
    is_base: Flag
    places: Weights


class Ran(Message, kind=b"z"):
    """member -> hub: what came of a `RunRound`."""

    round: Count
    attempt: Count32
    checksum: Checksum
    lost: Name
    silent: Count32 = 0


class Follow(Message, kind=b"f"):
    """replica -> hub: send me what you journal; or, once it has taken over, that it has."""

    protocol: Count16
    agreed: Annotated[str, text(800)]
    position: Count
    epoch: Count32 = 0


class Copy(Message, kind=b"c"):
    """hub -> replica: a part of a record or snapshot of the hub's journal."""

    position: CountFrom1
    part: Count32
    parts: Count32From1
    begins: Flag
    whole: Flag
    header_bytes: Annotated[int, whole(0, 1 << 26)]
    payload: "Buffer"


class Stored(Message, kind=b"h"):
    """replica -> hub: what it holds, written to its disk."""

    position: Count
    parts: Count


class Handover(Message, kind=b"m"):
    """lead -> hub, and the answer: ranges move from one hub of a job to another."""

    protocol: Count16
    stage: Annotated[int, whole(0, 11)]
    number: Count
    round: Count = 0
    first: Border = 0
    end: Border = 0
    part: Count32 = 0
    parts: Count32From1 = 1
    agreed: Annotated[str, text(800)] = ""
    why: Annotated[str, text(200)] = ""
    session: Checksum = 0
    payload: "Buffer" = b""


class Assign(Message, kind=b"w"):
    """hub -> member: slices of a batch, to be computed on the base that the replies lead to."""

    round: Count
    of: Annotated[int, whole(1, MOST_SLICES)]
    gradient: Flag
    slices: Slices


class Computed(Message, kind=b"a"):
    """member -> hub: one part of what a slice came to. It is not kept for sending again."""

    round: Count
    slice: Annotated[int, whole(0, MOST_SLICES - 1)]
    samples: CountFrom1
    loss: Finite
    part: Count32
    parts: Count32From1
    checksum: Checksum
    payload: "Buffer"


class Products(Message, kind=b"n"):
    """Both ways, passed on unread between hubs of several: what a search decides by, of the ranges
    [first, end) of the vector."""

    round: Count
    first: Border
    end: Border
    payload: "Buffer"


class StageBegin(Message, kind=b"p"):
    """hub -> member: you hold this stage of a pipeline; go on after `step` steps."""

    generation: CountFrom1
    """Goes up each time that all stages begin: messages of an earlier one no longer count."""
    stage: Annotated[int, whole(0, MAX_STAGES - 1)]
    stages: Annotated[int, whole(1, MAX_STAGES)]
    step: Count
    """Steps of the job that the stage's state is after."""
    parts: Count32
    """`StageState` that follow; 0: none, the stage begins as the job's seed has it."""


class Activation(Message, kind=b"x"):
    """Both ways: what a stage passes to the next one for a micro-batch, or the gradient of the loss
    by that, to the one before. The hub passes it on unread."""

    generation: CountFrom1
    step: Count
    """Steps of the job before this one."""
    micro: Annotated[int, whole(0, MAX_MICROBATCHES - 1)]
    """The micro-batch, from 0."""
    backward: Flag
    """It is a gradient."""
    loss: Finite
    """With a gradient: the micro-batch's part of the step's loss."""
    payload: "Buffer"
    """Bytes of a length known to both stages (docs/reference/wire.md)."""
    squares: Annotated[float, number(0.0, MOST_FIGURE)] = optional(0.0)
    """Where gradients are clipped. With the last gradient of a step: the sum of the squares of all
    gradients of the stages behind; with the first activation of the next: of all stages."""


class StageState(Message, kind=b"k"):
    """Both ways: one part of a stage's parameters and optimizer after `step` steps."""

    generation: CountFrom1
    step: CountFrom1
    part: Count32
    parts: Count32From1
    payload: "Buffer"
    """What they hold is the members' business: the hub keeps it unread."""


Masking = Rekey | Advertise | KeyList | Shares | Unmask | Reveal
"""Messages that occur only if contributions are masked."""
