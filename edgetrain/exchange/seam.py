"""The interface between a member's driver and its link to a hub.

`Exchange` is the protocol; the dataclasses are its arguments and results. The link to a hub
(`member/link.py`) implements it, and `direct.py` for members of one process; both pass the same
tests (tests/exchange/test_exchanges.py). Collectives between members, several hubs with a range of
the vector each, and gateways implement it, too.
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
    """Untrained tensors of a model, with the first member's values on all members. They belong to
    the model; `write` changes them in place."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def digest(self) -> str:
        """Digest of the current values (vectors/blob.py)."""

    def read(self) -> Buffer:
        """A copy of the current values, `size` bytes."""

    def write(self, blob: Buffer) -> None:
        """Take over the result of another member's `read`."""


@dataclass(frozen=True)
class Request:
    """A member's description of itself when it joins."""

    model: str
    """Digest of the names, shapes and dtypes of its trained parameters."""
    name: str = ""
    """The requested name; "": the hub chooses."""
    weight: float = 1.0
    """Samples it holds."""
    job: str = ""
    """Digest of the job, or "" for a member with its own training loop."""
    layout: bytes = b""
    """The description behind the digest `model`, for codecs by tensor."""
    secure: bool | MaskTerms = False
    """Contribute only with masks: on these terms, or (True) on any terms with a threshold above two
    thirds of the members. False: as the hub decides."""
    honest_hub: bool = False
    """With `secure` = True: a threshold above half is enough, because the hub reports dropouts
    truthfully."""
    fixed_tensors: FixedTensors | None = None
    """Untrained tensors with the first member's values, as in `layout`; None: none."""
    steps: int = 0
    """Local steps of the run, from a member with its own loop; 0: not known."""
    address: str = ""
    """Its address, if members connect to each other: see `messages.Join`."""
    behind: int = 0
    """Members of a gateway's site; 0: it is a member itself."""
    data: str = ""
    """Digest of its batch, if the hub hands out slices; "": none."""
    optimizer: str = ""
    """Settings behind its optimizer's steps, in words: see `messages.Join`."""
    predicts: bool = True
    """Whether it may choose a correction with predicted replies. Not sent to the hub."""


@dataclass(frozen=True)
class Past:
    """The position of a member restarted from its checkpoint."""

    session: int
    name: str
    round: int
    """The next round of a contribution."""
    applied: int
    checksum: int
    """Checksum of its base after them."""
    has_base: bool
    """Whether it still has this base; otherwise it takes the hub's."""
    oldest: int | None = None
    """The oldest round with a contribution to send again; None: none."""


@dataclass(frozen=True)
class Behind:
    """The contributions of its site's members in a gateway's contribution."""

    members: int
    """Contributions in it."""
    applied: int
    """Replies in their bases."""
    checksum: int
    """Checksum of these bases."""


@dataclass(frozen=True)
class Submission:
    """A contribution to a round, with its member's state."""

    round: int
    vector: Vector
    weight: float
    """Samples behind it; NO_WEIGHT: none, and no part in the mean."""
    applied: int
    """Replies in the member's base."""
    checksum: int
    """Checksum of that base."""
    wanted_delay: int = 0
    """Local steps as long as the last round trip; 0: not known."""
    step_s: float = 1.0
    """Seconds of one of them."""
    rest_later: bool = True
    """Whether a lossy codec's remainder goes with a later contribution."""
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
    """The reply to one round, whole and decoded, with the hub's state."""

    round: int
    members: int
    """Contributions in the round; 0: none, or none with steps."""
    delay: int
    """The delay in force once this reply is applied, in local steps."""
    checksum: int
    """Checksum of the base after this reply; 0: not known (gradients), or given by pieces."""
    arrived: float
    """Arrival of its last part, by the clock of the member's exchange."""
    pieces: Sequence[Vector]
    """The vector in consecutive pieces, float32, together [elements]."""
    local_steps: int = 0
    """Local steps in a round, in force once this reply is applied; 0: as before."""
    decode_s: float = 0.0
    """Seconds of decoding this reply, part by part."""
    wait_decode_s: float = 0.0
    """Seconds of decoding this and later replies, within the waiting call."""
    sent_bytes: int = 0
    """Bytes of the member's own contribution to this round, as encoded; 0: not sent."""
    received_bytes: int = 0
    """Bytes of this reply, as encoded."""
    payloads: Sequence[Buffer] = ()
    """To a gateway, in place of `pieces`: the reply as it came, part by part."""
    merged: int = 0
    """Asynchronous: with this reply the member's contributions with numbers below this are merged;
    0: none of them is in it."""
    complete: int = 0
    """Asynchronous: and all members' contributions with numbers below this."""
    checksums: Sequence[tuple[slice, int, str]] = ()
    """Checksums of pieces of the base after this reply, one for each of several hubs, by name."""

    def add_to(self, base: Vector) -> Vector:
        """Add the vector to `base`, in place, piece by piece; returns it."""
        at = 0
        for piece in self.pieces:
            base[at : at + piece.size] += piece
            at += piece.size
        return base


class Idle(Exception):
    """A member's last round is over, and it has no part in the open one."""


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
    """This base, float32 [elements], if replies missed by the member are gone. None: they will
    still come."""
    local_steps: int = 0
    """Local steps in a round, in force; 0: as before."""
    merged: int = 0
    complete: int = 0
    """Asynchronous, of `base`: see RoundReply."""
    steps: int = 0
    """Local steps of the run before `round`."""
    idle_s: float = 0.0
    """Seconds of the wait since the end of the member's last round."""

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
    """Number of members at the start of the job."""
    strategy: str
    """The strategy's spelling in the job."""
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
    """For a restarted member: the fleet lacks its contributions to rounds from this one on."""
    is_exact: bool = False
    """Whether contributions and replies arrive bit for bit, without rounding or remainder of a
    codec or a mask."""
    steps: int = 0
    """Local steps of the run before `round`."""
    steps_now: int = 0
    """Local steps in a round, in force; 0: as the job begins."""
    status_s: float = 0.0
    """Seconds between two reports of the member; 0: no reports."""
    complete: int = 0
    """Asynchronous: all members' contributions with numbers below this are in the base."""
    is_drawn: bool = False
    """Whether each round has a sample of the members: this one waits for its own rounds."""
    began: float | None = None
    """Beginning of training, by the clock of the exchange; None: not known. Off by about half a
    round trip at most, unless a base had to be sent first."""


class Exchange(Protocol):
    """A member's connection to the fleet; a link to a hub is one.

    For each round in turn, all members submit a vector, and all get the same reply: the merged
    vector. A round's reply may come long after the member has submitted to later rounds. The
    strategy decides the round of a contribution and the time to wait for a reply; an exchange
    gives replies out in the order of rounds, each once.

    With asynchronous strategies a contribution's round is its member's own number, and a reply's
    round the hub's: `RoundReply.merged` tells the contributions in a reply.

    One thread uses an exchange, `join` first. Only `join` and `wait` wait; they call `interrupt` at
    least once a second, and an exception from it ends the wait. After any exception the exchange
    may still be left with `leave` or `vanish`.

    Vectors are float32 [elements], as many as the parameters given to `join`.
    """

    interrupt: Callable[[], None]
    memory: VectorPool
    """From `join` on: memory for the member's contributions; the memory of a sent one can be used
    for its reply."""

    @property
    def session(self) -> int:
        """From `join` on: a process's proof, in a `Past`, of being this member."""

    def join(
        self, request: Request, params: Vector, checksum: int, past: Past | None = None
    ) -> Entry:
        """Join, and wait until training starts, however long the others take.

        `params`, with this checksum, is only borrowed: it is read if the fleet starts from it, and
        otherwise overwritten with the fleet's base before this returns. With a `past` and its base
        it stays as it is. Afterwards the request's fixed tensors have the fleet's values in any
        case.

        Raises Refused (code "session": the past is not known any more), HubUnreachable.
        """

    def factors(self) -> Factors | None:
        """The maker of contributions for a codec with two dependent trips; otherwise None. Call it
        once, after `join`."""

    def unsent(self) -> dict[str, Vector]:
        """The unsent remainder of lossy contributions, for a checkpoint. The exchange owns the
        arrays: write them before the next `submit`."""

    def restore_unsent(self, unsent: Mapping[str, Vector]) -> None:
        """Continue with an earlier result of `unsent`; copied. Raises ConfigError for others."""

    def submit(self, submission: Submission) -> Vector | None:
        """Hand a contribution over; returns at once.

        From now on its vector belongs to the exchange: the caller does not write it again, and its
        memory is free (`memory` lends it again) once nobody holds it. With `rest_later` the result
        is None. Otherwise the remainder is the caller's, and the result is the decoded form of the
        contribution, a vector of the caller's; None: the contribution itself.
        """

    @property
    def sent_nearly_all(self) -> bool:
        """Whether the last remainder is too small for a round of its own. Equal for all members
        with contributions after the same replies."""

    def wait(self, round: int) -> RoundReply | CatchUp:
        """Wait for the reply of this round, the oldest one not given out.

        The caller may read the reply's pieces; the exchange does not write them as long as the
        caller holds them. CatchUp instead: there is no such reply for this member; its base belongs
        to the caller.

        Raises HubUnreachable, Refused, Diverged, BadPayload.
        """

    @property
    def ready(self) -> int:
        """Replies to rounds before this one, or a CatchUp instead, need no waiting: as of the last
        `poll` or `wait`."""

    def end(self, round: int) -> None:
        """Announce the end of this member's contributions, from this number on, so no reply waits
        for one: of an asynchronous member, or of a gateway without members."""

    def await_reply(self) -> bool:
        """Asynchronous, after `end`: wait for the next reply. False: none is left, all members'
        contributions are in earlier ones. Raises the errors of `wait`."""

    def settle(self) -> bool:
        """After the last reply: wait until the fleet confirms this member's merged contributions;
        returns whether all of them are merged. A late contribution is merged when a later round
        closes. Raises the errors of `wait`."""

    def poll(self) -> None:
        """Take in arrived messages, without waiting. Raises the errors of `wait`."""

    def report(self, telemetry: Telemetry | Figure) -> None:
        """Report the state of this member, or of the model, to the fleet's observers. Does not
        wait; lost without a connection."""

    def traffic(self) -> Traffic:
        """Bytes at the socket so far, headers and acknowledgements included."""

    def leave(self, reason: str) -> None:
        """Leave the fleet for good (`reason`: at most 256 printable characters), and disconnect.
        Works twice, and without a connection."""

    def vanish(self) -> None:
        """Disconnect without a message: the fleet keeps this member's place for a while. Works
        twice."""
