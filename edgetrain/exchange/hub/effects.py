"""What a hub wants done, as data: what to send, what to write down, what people want to know.

The hub makes them, in order; a driver (`serve`, the simulator, a test) carries them out in that
order. No decision is taken here, and nothing is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from edgetrain.exchange.hub.orders import Answer
from edgetrain.exchange.hub.records import Record, Round, State
from edgetrain.exchange.messages import Figure, Message, Refuse, Reply, Telemetry

Event = Literal[
    "joined", "started", "late", "gone", "left", "refused", "removed", "back", "pace", "codec",
    "stands", "map", "reducers", "replica", "servers", "search", "told",
]  # fmt: skip


class Send(NamedTuple):
    """Send a message to a peer, by its transport address."""

    to: bytes
    message: Message


@dataclass(frozen=True)
class Note:
    """Something a person wants to know about a member."""

    event: Event
    member: str
    reason: str


@dataclass(frozen=True)
class Dealt:
    """Counts of a round's slices, if the hub hands out work."""

    slices: int
    copies: int
    """Slices that were given out again, because they had been out for long."""
    wasted: int
    """Times that a slice was given out and its answer did not count: of copies, and of members that
    have gone."""
    loss: float
    """Mean over the batch, at the base before this round."""
    step_length: float
    """Where that base is on the line of the search, in lengths of the direction; 0: at its
    beginning."""


@dataclass(frozen=True)
class Closed:
    round: int
    members: tuple[str, ...]
    missing: tuple[str, ...]
    weight: float
    open_s: float
    """From the first whole contribution to the merge."""
    delay: int
    """In force once this round's reply is applied."""
    cuts: tuple[tuple[str, float, str], ...] = ()
    """(member, share of its contribution that was left out, why), where a merge rule left some out;
    a remark about the whole round stands under "hub"."""
    local_steps: int = 0
    """Steps in a round, in force once this round's reply is applied; 0: not said."""
    codec: str = ""
    """How the reply was encoded, where that changes from round to round."""
    final_sync: bool = False
    """Whether `delay` and `local_steps` are the final sync's, or lead to it."""
    ages: tuple[int, ...] = ()
    """Out of step, the age of each contribution that counts: replies that the hub had given and its
    member had not applied when it was made."""
    dealt: Dealt | None = None
    """Counts of slices, if the hub hands out work."""


@dataclass(frozen=True)
class Reported:
    """A member says how it is doing."""

    member: str
    sender: bytes
    """How the transport knows its connection."""
    telemetry: Telemetry


@dataclass(frozen=True)
class Evaluated:
    """A member says how good the model is."""

    member: str
    figure: Figure


Observed = Note | Closed | Reported | Evaluated
"""Effects for people only; nothing depends on them."""


@dataclass(frozen=True)
class Write:
    """Bring this to the journal before any effect that follows."""

    record: Record


@dataclass(frozen=True)
class Save:
    """Bring a snapshot to the journal, which begins with it."""

    state: State


@dataclass(frozen=True)
class Replay:
    """Send a peer the replies of rounds [first, end) from the journal."""

    to: bytes
    first: int
    end: int


@dataclass(frozen=True)
class Feed:
    """Give `take` the next record of the hub's journal, for its replica; None: that was all."""

    begins: bool
    take: Callable[[Record | State | None, float], list[Effect]]


@dataclass(frozen=True)
class Answered:
    """Answer people's order, once what precedes this is done."""

    answer: Callable[[Answer], None]
    told: Answer


Effect = Send | Observed | Write | Save | Replay | Feed | Answered


def refusal(to: bytes, code: str, reason: str) -> Send:
    """Tell a peer why it is not let in, or not any more; `code` is one of `messages.CODES`. The
    reason may repeat what the peer sent: what cannot be printed is left out of it."""
    printable = "".join(each for each in reason[:512] if each.isprintable())
    return Send(to, Refuse(code, printable))


def replies_of(
    record: Round, members: int | None = None, settled: bool = False, steps: int | None = None
) -> Iterator[Reply]:
    """The reply to a round, part by part, from what the journal keeps of it. `members`, `settled`
    and `steps`, its local ones, as in Reply; None: what the record has."""
    told = record.members or len(record.counted)
    parts, members = len(record.reply), told if members is None else members
    pairs = () if settled else record.merged
    for part, payload in enumerate(record.reply):
        yield Reply(
            record.round, part, parts, members, record.delay, record.checksum, settled, payload,
            record.local_steps if steps is None else steps, record.complete or 0,
            () if part else pairs,
        )  # fmt: skip
