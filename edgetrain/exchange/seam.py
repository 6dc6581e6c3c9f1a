"""What a member exchanges through: the seam between a member's driver and its link to a hub.

`Exchange` is the protocol; the dataclasses are what is said over it. The link to a hub
(`member/link.py`) implements it, and `direct.py` for members of one process; both pass the same
tests (tests/exchange/test_exchanges.py). Collectives between members, several hubs with a range of
the vector each, and gateways can implement it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from edgetrain.exchange.delay import Delay
from edgetrain.exchange.messages import Contribute, Figure, Start, Telemetry
from edgetrain.exchange.transport import Traffic
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import Buffer, Vector

if TYPE_CHECKING:
    from edgetrain.exchange.masks.terms import MaskTerms
    from edgetrain.strategies.factored import Factors


class FixedTensors(Protocol):
    """Tensors of a model that are not trained, and whose values the first member hands to all
    others. They belong to the model; `write` changes them in place."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def digest(self) -> str:
        """Digest of the current values (vectors/blob.py)."""

    def read(self) -> Buffer:
        """The values as they are now, `size` bytes: a copy."""

    def write(self, blob: Buffer) -> None:
        """Take over the values that another member's `read` gave."""


@dataclass(frozen=True)
class Request:
    """A member's description of itself when it joins."""

    model: str
    """Digest of the names, shapes and dtypes of its trained parameters."""
    name: str = ""
    """The name it asks for; "" lets the hub choose."""
    weight: float = 1.0
    """Samples it holds."""
    job: str = ""
    """Digest of the job, or "" for a member with its own training loop."""
    layout: bytes = b""
    """The description whose digest is `model`. Codecs that look at tensors need it."""
    secure: bool | MaskTerms = False
    """Contribute only with masks: on these terms, or (True) on any terms whose threshold is more
    than two thirds of the members. False: as the hub says."""
    honest_hub: bool = False
    """With `secure` = True: more than half will do, because the hub is trusted to tell the truth
    about who dropped out."""
    fixed_tensors: FixedTensors | None = None
    """Untrained tensors with the first member's values, as in `layout`; None: none."""
    steps: int = 0
    """Local steps of the run, from a member with its own loop; 0: not known."""
    address: str = ""
    """Its address, if members connect to each other: see `messages.Join`."""
    behind: int = 0
    """Members of the site that a gateway joins for; 0: it is a member itself."""
    data: str = ""
    """Digest of the data that it computes slices of, where the hub hands out work; "": it has
    none."""
    optimizer: str = ""
    """Words that say what its optimizer's steps depend on: see `messages.Join`."""
    predicts: bool = True
    """Whether it may choose a correction that predicts replies. The hub is not told."""


@dataclass(frozen=True)
class Past:
    """The position of a member restarted from its checkpoint."""

    session: int
    name: str
    round: int
    """The next round it would have contributed to."""
    applied: int
    checksum: int
    """Checksum of its base after them."""
    has_base: bool
    """Whether it still has that base; otherwise it takes the hub's."""
    oldest: int | None = None
    """The oldest round whose contribution it can send again; None: there is none."""


@dataclass(frozen=True)
class Behind:
    """Of a gateway's contribution: what its site's members contributed."""

    members: int
    """Contributions in it."""
    applied: int
    """Replies in the bases they were made from."""
    checksum: int
    """Checksum of these bases."""


@dataclass(frozen=True)
class Submission:
    """A contribution to a round, and what its member says with it."""

    round: int
    vector: Vector
    weight: float
    """Samples behind it; NO_WEIGHT: none, and it is not merged."""
    applied: int
    """Replies in the member's base."""
    checksum: int
    """Checksum of that base."""
    wanted_delay: int = 0
    """Local steps that would have hidden the last round trip; 0: not known."""
    step_s: float = 1.0
    """Seconds of one of them."""
    rest_later: bool = True
    """Whether what a lossy codec leaves out goes with a later contribution."""
    behind: Behind | None = None
    """Members behind a gateway; `applied` and `checksum` are then of its own base."""

    @property
    def head(self) -> Contribute:
        site = self.behind or Behind(0, self.applied, self.checksum)
        return Contribute(
            self.round, 0, 1, self.weight, site.applied, site.checksum, self.wanted_delay, b"",
            self.step_s, site.members,
        )  # fmt: skip


@dataclass(frozen=True)
class RoundReply:
    """The reply to one round, whole and decoded, and what the hub says with it."""

    round: int
    members: int
    """Contributions in the round; 0: it has none, or none with steps in it."""
    delay: int
    """The delay in force once this reply is applied, in local steps."""
    checksum: int
    """Checksum of the base after this reply; 0: not known (gradients), or given by pieces."""
    arrived: float
    """When its last part arrived, by the clock of the member's exchange."""
    pieces: Sequence[Vector]
    """The vector in consecutive pieces, float32, together [elements]."""
    local_steps: int = 0
    """Local steps in a round, in force once this reply is applied; 0: as before."""
    decode_s: float = 0.0
    """Seconds of decoding this reply, part by part."""
    wait_decode_s: float = 0.0
    """Seconds of decoding, of this and later replies, within the call that waited for it."""
    sent_bytes: int = 0
    """Bytes of the member's own contribution to this round, as encoded; 0: not sent."""
    received_bytes: int = 0
    """Bytes of this reply, as encoded."""
    payloads: Sequence[Buffer] = ()
    """To a gateway, in place of `pieces`: the reply as it came, part by part."""
    merged: int = 0
    """Out of step: with this reply the member's contributions with numbers below this are merged;
    0: none of them is in it."""
    complete: int = 0
    """Out of step: and all members' contributions with numbers below this."""
    checksums: Sequence[tuple[slice, int, str]] = ()
    """Of pieces of the base after this reply, where several hubs have one each; and who says it."""

    def add_to(self, base: Vector) -> Vector:
        """Add the vector to `base`, in place, piece by piece; returns it."""
        at = 0
        for piece in self.pieces:
            base[at : at + piece.size] += piece
            at += piece.size
        return base


class Idle(Exception):
    """A member's last round is over, and it has no part in the one that is open."""


@dataclass(frozen=True)
class CatchUp:
    """The fleet went on without this member: it takes part again from `round` on."""

    round: int
    delay: int
    """The delay in force, in local steps."""
    applied: int
    checksum: int
    """Checksum of the base after `applied` replies."""
    base: Vector | None
    """That base, float32 [elements], where replies that this member missed are gone. None: they
    will still come."""
    local_steps: int = 0
    """Local steps in a round, in force; 0: as before."""
    merged: int = 0
    complete: int = 0
    """Out of step, of `base`: see RoundReply."""
    steps: int = 0
    """Local steps of the run before `round`."""
    idle_s: float = 0.0
    """Seconds of the wait since the member heard that its last round was over."""

    @classmethod
    def of(cls, start: Start, base: Vector | None) -> Self:
        return cls(
            start.round, start.delay, start.applied, start.checksum, base, start.local_steps,
            start.merged, start.complete, start.steps,
        )  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """The hub's answer to a join, as training starts."""

    name: str
    index: int
    """Its place among the members, from 0."""
    members: int
    """How many members the job starts with."""
    strategy: str
    """As the strategy is spelled in the job."""
    local_steps: int
    """Local steps in a round, as the job begins."""
    delay: Delay
    codec: str
    is_masked: bool
    round: int
    """The next round to contribute to."""
    applied: int
    checksum: int
    """Checksum of the base after `applied` replies, the start of this member."""
    resend: int
    """For a member that was started again: contributions to rounds from this one on are not with
    the fleet."""
    is_exact: bool = False
    """Whether contributions and replies arrive bit for bit: no codec and no mask rounds them, or
    leaves a part for later."""
    steps: int = 0
    """Local steps of the run before `round`."""
    steps_now: int = 0
    """Local steps in a round, in force; 0: as the job begins."""
    status_s: float = 0.0
    """Seconds between two reports of how the member is doing; 0: none is wanted."""
    complete: int = 0
    """Out of step: all members' contributions with numbers below this are in the base."""
    began: float | None = None
    """When training began, by the clock of the exchange; None: not known. About half a round trip
    off at most, unless a base had to be sent first."""


class Exchange(Protocol):
    """What a member needs of whatever it exchanges through: a link to a hub is one.

    For each round in turn, all members submit a vector, and all get the same reply: what the fleet
    made of them. A round's reply may come long after the member has submitted to later rounds.
    Which round a member submits to, and when it waits for a reply, is for its strategy to decide;
    an exchange gives replies out in the order of rounds, each once.

    If the strategy is out of step, a contribution's round is its member's own number, and a reply's
    round the hub's: a reply says whose contributions are in it (`RoundReply.merged`).

    One thread uses an exchange, `join` first. Only `join` and `wait` wait; they call `interrupt` at
    least once a second, and what it raises ends the wait. Whatever raises, the exchange may still
    be left with `leave` or `vanish`.

    Vectors are float32 [elements], as many as the parameters given to `join`.
    """

    interrupt: Callable[[], None]
    memory: VectorPool
    """From `join` on: where the member makes its contributions, so that the memory of one that has
    been sent can be used for its reply."""

    @property
    def session(self) -> int:
        """From `join` on: the number that proves, in a `Past`, that a process is this member."""

    def join(
        self, request: Request, params: Vector, checksum: int, past: Past | None = None
    ) -> Entry:
        """Ask to be let in, and wait until training starts, however long the others take.

        `params`, whose checksum is given, is only borrowed: it is read if the fleet starts from it,
        and overwritten with the fleet's base otherwise, before this returns. With a `past` that has
        its base it is left alone. The request's fixed tensors then have the fleet's values, in any
        case.

        Raises Refused (its code is "session" if the past is not known any more), HubUnreachable.
        """

    def factors(self) -> Factors | None:
        """What makes contributions, where the codec sends them in two dependent trips; otherwise
        None. Call it once, after `join`."""

    def unsent(self) -> dict[str, Vector]:
        """What lossy contributions have left out so far and later ones will carry, for a
        checkpoint. The exchange owns the arrays: write them before the next `submit`."""

    def restore_unsent(self, unsent: Mapping[str, Vector]) -> None:
        """Go on with what `unsent` returned before; copied. ConfigError where it does not fit."""

    def submit(self, submission: Submission) -> Vector | None:
        """Hand a contribution over; returns at once.

        Its vector belongs to the exchange from now on: the caller does not write it again, and its
        memory is free (`memory` lends it again) once nobody holds it. With `rest_later` the result
        is None. Otherwise the rest is the caller's, and the result is what others will read: a
        vector of the caller's; None: they will read all of it.
        """

    @property
    def sent_nearly_all(self) -> bool:
        """Whether the last contribution left out too little for a round of its own. The same of
        all members whose contributions to a round followed the same replies."""

    def wait(self, round: int) -> RoundReply | CatchUp:
        """The reply of this round, the oldest that was not given out; waits until it is here.

        The reply's pieces are the caller's to read, and are not written by the exchange as long as
        the caller holds them. CatchUp instead: there is no such reply for this member; its base
        belongs to the caller.

        Raises HubUnreachable, Refused, Diverged, BadPayload.
        """

    @property
    def ready(self) -> int:
        """Replies to rounds before this one can be had without waiting, or a CatchUp instead: as of
        the last `poll` or `wait`."""

    def end(self, round: int) -> None:
        """Say that this member gives no contribution from this number on, so that nobody waits for
        one: one that is out of step, or the gateway of a site that all members have left."""

    def await_reply(self) -> bool:
        """Out of step, after `end`: wait until the next reply can be had. False: there is none any
        more, all members' contributions are in those before. Raises what `wait` does."""

    def settle(self) -> bool:
        """Once every reply has been given out: wait until the fleet says which contributions of
        this member it has kept for good; whether that is all of them. One that came after its round
        had closed is kept when a later round closes. Raises what `wait` does."""

    def poll(self) -> None:
        """Take in what has arrived, without waiting. Raises what `wait` does."""

    def report(self, telemetry: Telemetry | Figure) -> None:
        """Say how this member, or the model, is doing, to whoever looks at the fleet.
        Waits for nothing; lost where there is no connection."""

    def traffic(self) -> Traffic:
        """Bytes at the socket so far, headers and acknowledgements included."""

    def leave(self, reason: str) -> None:
        """Tell the fleet that this member is done (`reason`: at most 256 printable characters), and
        let go. Works twice, and without a connection."""

    def vanish(self) -> None:
        """Let go without a word: the fleet keeps this member's place for a while. Works twice."""
