"""The members of a job at its hub: a record of each, those that are in and those that are away.

Theory. A member's record is a state machine of two parts that do not depend on each other, and a
few numbers. Only the record's own methods change it; all other modules call these and read.

`state` is the member's part in the rounds. Rounds wait for members that are training or late:

=========================  =======================================  ==========
state                      what happens                             next state
=========================  =======================================  ==========
(none)                     `Join` is accepted                       waiting
waiting, training, late    training begins for it (`Start`)         training
training, late             a round closes without it                late
waiting, training, late    any message of it is accepted            the same; late: training
waiting, training, late    `Leave`                                  left
waiting, training, late    it is given up or expelled               gone
training, late, gone       `Resume` is accepted                     training
=========================  =======================================  ==========

`standing` is whether the hub knows which of the member's messages have arrived. While it does not,
nothing counts but `Resume`, `Join` and `Leave`:

====================  ========================================  ==========
standing              what happens                              next
====================  ========================================  ==========
(none)                `Join` is accepted                        in step
(none)                it is read from a journal                 returning
in step               a gap, or damage, in its messages         astray
returning, astray     `Resume`, or `Join` again, is accepted    in step
====================  ========================================  ==========

The numbers only grow, except when a member comes back: `first_round` (rounds from this one on wait
for it), `next_round` (its next contribution is for this one) and `merged` (its contributions to
rounds before this one are merged). `merged <= next_round`; what lies between is in open rounds, and
is lost if the hub dies. So a member that a restored hub hears again goes on from `merged`. Where
rounds concern ranges of the vector in turn, a late contribution waits for the next round of its
range, and others of its member are merged before it: `merged_by_range` knows these, and they do not
count again.

A member that is given up is away: it is remembered, under its name, so that it can resume. One that
left, or was expelled, is forgotten.

No method of `Members` looks at all members, so a fleet of thousands joins in the time that its
messages take. Whether a member may join is decided in `admission`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from edgetrain.exchange.hub.records import Seat
from edgetrain.exchange.transport import owner_of
from edgetrain.vectors.vector import Buffer

AWAY = 4
"""Remember up to AWAY x members departed members, so that they can resume."""

MemberState = Literal["waiting", "training", "late", "gone", "left"]
Standing = Literal["in step", "astray", "returning"]
_Happening = Literal["starts", "misses a round", "is heard", "leaves", "is given up", "resumes"]

NEXT_STATE: Mapping[tuple[MemberState, _Happening], MemberState] = {
    ("waiting", "starts"): "training",
    ("training", "starts"): "training",
    ("late", "starts"): "training",
    ("training", "misses a round"): "late",
    ("late", "misses a round"): "late",
    ("waiting", "is heard"): "waiting",
    ("training", "is heard"): "training",
    ("late", "is heard"): "training",
    ("waiting", "leaves"): "left",
    ("training", "leaves"): "left",
    ("late", "leaves"): "left",
    ("waiting", "is given up"): "gone",
    ("training", "is given up"): "gone",
    ("late", "is given up"): "gone",
    ("training", "resumes"): "training",
    ("late", "resumes"): "training",
    ("gone", "resumes"): "training",
}
"""The first table of the module's docstring. Anything else is an error of the hub (KeyError)."""


@dataclass(eq=False)
class MemberRecord:
    """One member, as the hub knows it. Changed by its own methods only; connection and name change
    through `Members` only, which finds members by them."""

    name: str
    sender: bytes
    """How the transport knows its connection."""
    index: int
    weight: float
    checksum: int
    """Checksum of its parameters when it joined."""
    session: int = 0
    state: MemberState = "waiting"
    standing: Standing = "in step"
    first_round: int = 0
    """Rounds from this one on wait for it."""
    next_round: int = 0
    """The round that its next contribution is for."""
    merged_by_range: list[int] = field(default_factory=lambda: [0])
    """First unmerged round of each range, in turn."""
    left_out: list[range] = field(default_factory=list)
    """Rounds that it was told to leave out each time it came back, oldest first."""
    resumed: bool = False
    """Whether it has come back at least once: then repeated contributions are no fault."""
    gaps: int = 0
    """Times that it went astray since its last whole contribution."""
    applied: int = 0
    """Replies that it had applied when it last said so."""
    ends: int = 0
    """It gives no contributions from this number on: for good where members are out of step, until
    it comes back where it is a gateway without members; 0: it has not said so."""
    incoming: list[Buffer] = field(default_factory=list)
    """Parts of the contribution that is arriving."""
    unreachable_since: float | None = None
    reported: float = float("-inf")
    """Up to when its reports are accounted for: see `telemetry`."""
    evaluates: bool = False
    """Whether it has said that it evaluates the model."""
    fixed: str = ""
    """Digest of its fixed tensors' values, as it joined with them."""
    address: str = ""
    """Its address for other members; "": none, or not known yet."""
    behind: int = 0
    """Members of the site that it joined for, as its gateway; 0: it is a member itself."""
    optimizer: str = ""
    """Its optimizer when it joined: see `messages.Join`."""
    used: int = 0
    """Contributions that its site cannot give any more: those that are merged, and one of each
    member for each round before it began."""
    open: int = 0
    """Contributions of its site in open rounds."""
    drawn: int | None = None
    """The newest round that it was drawn for; None: all members have a part in all rounds."""

    # -- looking ------------------------------------------------------------------------------

    @property
    def merged(self) -> int:
        """Its contributions to rounds before this one are merged."""
        return min(self.merged_by_range)

    @property
    def places(self) -> int:
        """Places of the job, and indexes, that it takes."""
        return self.behind or 1

    @property
    def is_in(self) -> bool:
        return self.state in ("waiting", "training", "late")

    @property
    def trains(self) -> bool:
        """Whether rounds may wait for it, and replies are sent to it."""
        return self.state in ("training", "late")

    @property
    def follows(self) -> bool:
        """Whether it trains, and has a part in all rounds."""
        return self.trains and self.drawn is None

    def is_told(self, round: int) -> bool:
        """Whether it is sent the reply to this round; one that is returning is, once it is back."""
        return self.trains and not self.returning and self.drawn in (None, round)

    @property
    def returning(self) -> bool:
        """Whether the hub was restored and has not heard of it since."""
        return self.standing == "returning"

    @property
    def clock(self) -> int:
        """The number of its next contribution, behind those that it was told to leave out."""
        end = self.next_round
        for rounds in self.left_out:
            end = rounds.stop if end in rounds else end
        return end

    @property
    def is_done(self) -> bool:
        """Out of step: whether it has given its last contribution."""
        return 0 < self.ends <= self.next_round

    def may_be_at(self, sender: bytes) -> bool:
        """Whether this member may use this connection: a member that came with a key keeps it."""
        key = owner_of(self.sender)
        return not key or key == owner_of(sender)

    def is_waited_for(self, round: int) -> bool:
        return (
            self.next_round <= round
            and self.first_round <= round
            and self.drawn in (None, round)
            and not 0 < self.ends <= round
            and self.state in ("training", "late")
        )

    def has_settled(self, round: int) -> bool:
        """Whether what it gave to this round is merged, or it gave nothing to it. One that came
        back may have contributed while its question was on the way: that has to be merged."""
        return self.merged > round or (self.first_round > round and not self.left_out)

    def may_skip_to(self, round: int) -> bool:
        """Whether it was told to leave out all rounds from its next one to the one before this."""
        return self.next_round < round <= self.clock

    def seat(self) -> Seat:
        several = len(self.merged_by_range) > 1
        return Seat(
            self.name, self.sender, self.session, self.index, self.weight, self.first_round,
            self.merged, tuple(self.merged_by_range) if several else (), self.behind,
            self.used,
        )  # fmt: skip

    @classmethod
    def of_seat(cls, seat: Seat) -> MemberRecord:
        """A member as a journal knows it, which has not been heard since."""
        member = cls(
            seat.name, seat.address, seat.index, seat.weight, 0, seat.session,
            state="training", standing="returning", first_round=seat.first_round,
            next_round=max(seat.next_round, seat.first_round),
            merged_by_range=list(seat.by_range) or [seat.next_round],
            applied=max(0, seat.next_round - 1),
            left_out=[range(seat.next_round, seat.first_round)], behind=seat.behind,
            used=seat.used or seat.behind * seat.first_round,
        )  # fmt: skip
        member._skip_merged()
        return member

    # -- connection and part in the rounds ----------------------------------------------------

    def _change_state(self, happening: _Happening) -> None:
        self.state = NEXT_STATE[self.state, happening]

    def mark_heard(self) -> None:
        """A message of it was accepted: it is reachable, and not late any more."""
        self.unreachable_since = None
        if self.state == "late":  # nothing else changes, and this is asked for every message
            self._change_state("is heard")

    def note_report(self, until: float) -> None:
        """A report of it is passed on, which accounts for its reports `until` then."""
        self.reported = until

    def note_end(self, ends: int) -> bool:
        """It gives none from this number on, if not 0; whether it has said so just now."""
        self.ends = ends or self.ends
        return ends > 0

    def note_evaluates(self) -> None:
        self.evaluates = True

    def mark_unreachable(self, now: float) -> None:
        """Its connection is lost since `now`."""
        self.unreachable_since = now

    def mark_late(self) -> None:
        self._change_state("misses a round")

    def mark_astray(self) -> None:
        """Something that it sent was lost: only what follows its `Resume` counts."""
        self.standing = "astray"
        self.gaps += 1
        self.incoming = []

    def reconnect(self, sender: bytes) -> None:
        """It has another connection, and sends again what it had begun. For `Members.move`."""
        self.sender, self.incoming, self.unreachable_since = sender, [], None
        self.standing = "in step"

    def offer(self, checksum: int, fixed: str, address: str) -> None:
        """It asked to join once more, with parameters of this checksum, and fixed tensors of this
        digest; others can connect to it at this address."""
        self.checksum, self.fixed, self.address = checksum, fixed, address

    def start(self, first_round: int | None, applied: int) -> None:
        """Training begins for it, after `applied` replies, at `first_round` (None: as it was)."""
        self._change_state("starts")
        if first_round is not None:
            self.first_round = self.next_round = first_round
            self.used = self.behind * first_round
        self.applied = applied

    def forget_unmerged(self) -> None:
        """What it gave to open rounds is lost with the hub that had it."""
        self.next_round, self.open = self.merged, 0
        self._skip_merged()

    def settle(self, address: str) -> None:
        """A journal has this address of it."""
        self.address = address

    def resume(self, oldest: int, address: str) -> None:
        """It has come back, with contributions from `oldest` on, reachable at this address."""
        self._change_state("resumes")
        self.address = address
        self.resumed = True
        self.ends = 0 if self.behind else self.ends
        self.next_round = max(self.next_round, oldest)
        self._skip_merged()

    def begin_at(self, first_round: int, submitted: int) -> None:
        """It is told that its next new contribution is for this round."""
        self.first_round = first_round
        before = [rounds for rounds in self.left_out if rounds.stop > self.merged]
        self.left_out = [*before, range(submitted, first_round)]

    def draw(self, round: int) -> None:
        """It has a part in this round; -1: in none, until it is drawn again."""
        self.drawn = round

    def mark_applied(self, applied: int) -> None:
        """It has this many replies, or is being sent them."""
        self.applied = applied

    def depart(self, left: bool) -> None:
        """It left, or is given up or expelled."""
        self._change_state("leaves" if left else "is given up")
        self.incoming = []

    # -- contributions ------------------------------------------------------------------------

    def skip_to(self, round: int) -> None:
        """Its next contribution is for this round: it may leave out those before."""
        self.next_round = round

    def add_part(self, payload: Buffer, applied: int) -> None:
        """A part of a contribution, and not the last one, came after `applied` replies."""
        self.applied = applied
        self.incoming.append(payload)

    def complete_contribution(self, payload: Buffer, applied: int) -> tuple[Buffer, ...]:
        """The last part came after `applied` replies; returns all parts."""
        self.applied, self.gaps = applied, 0
        payloads, self.incoming = (*self.incoming, payload), []
        self.next_round += 1
        self._skip_merged()
        return payloads

    def count_in(self, round: int, said: int) -> int:
        """How many contributions its next one has, to this round, of which it says that many: of a
        site no more than one of each member for each round so far, late ones included."""
        if not self.behind:
            return 1
        count = min(said, self.behind * (round + 1) - self.used - self.open)
        self.open += count
        return count

    def note_answer(self) -> None:
        """A whole answer of it came, where the hub hands out work: nothing is missing before it."""
        self.gaps = 0

    def mark_merged(self, meant_for: int, members: int = 1) -> None:
        """Its contribution to this round, with as many in it, and earlier ones of the range, are
        merged or dropped."""
        self.used, self.open = self.used + members, self.open - members
        ranges = len(self.merged_by_range)
        self.merged_by_range[meant_for % ranges] = meant_for + ranges

    def replay_merged(self, meant_for: int, members: int) -> None:
        """A journal says that its contribution to this round was merged."""
        self.open += members
        self.mark_merged(meant_for, members)
        self.next_round = max(self.next_round, self.merged)
        self._skip_merged()

    def _skip_merged(self) -> None:
        while self.merged_by_range[self.next_round % len(self.merged_by_range)] > self.next_round:
            self.next_round += 1


class Away:
    """Departed members that may come back, by name: the newest ones, `most` at most."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._records: dict[str, MemberRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[MemberRecord]:
        """In the order in which they were given up."""
        return iter(self._records.values())

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def get(self, name: str) -> MemberRecord | None:
        return self._records.get(name)

    def pop(self, name: str) -> MemberRecord | None:
        """The member of that name, which is not kept here any longer."""
        return self._records.pop(name, None)

    def remember(self, member: MemberRecord) -> list[str]:
        """Keep a member that was given up: its place in the rounds, without payloads. Returns the
        names of those that are forgotten for it."""
        self._records.pop(member.name, None)
        self._records[member.name] = member
        forgotten = list(self._records)[: max(0, len(self._records) - self.most)]
        for name in forgotten:
            del self._records[name]
        return forgotten


class Members:
    """The members that are in, each with a connection, a name, an index and (where members have
    keys) a key of its own; and, as `away`, those that may come back (`most_away` at most)."""

    def __init__(self, most_away: int = 0) -> None:
        self.away = Away(most_away)
        self.places = 0
        """Members that are in, those behind gateways counted one by one."""
        self._by_sender: dict[bytes, MemberRecord] = {}
        self._by_name: dict[str, MemberRecord] = {}
        self._by_session: dict[int, MemberRecord] = {}
        self._by_owner: dict[bytes, MemberRecord] = {}
        self._indexes: Counter[int] = Counter()
        # A member that comes back keeps its index, even if another one has it now.
        # No index, and no name of that number, below these is free.
        self._low_index = self._low_name = 0

    def __len__(self) -> int:
        return len(self._by_sender)

    def __iter__(self) -> Iterator[MemberRecord]:
        """The members in the order in which they came, or came back."""
        return iter(self._by_sender.values())

    def __getitem__(self, sender: bytes) -> MemberRecord:
        return self._by_sender[sender]

    def get(self, sender: bytes) -> MemberRecord | None:
        return self._by_sender.get(sender)

    def named(self, name: str) -> MemberRecord | None:
        return self._by_name.get(name)

    def in_session(self, session: int) -> MemberRecord | None:
        """The member that joined with this session; 0 is no session."""
        return self._by_session.get(session) if session else None

    def owned_by_owner_of(self, sender: bytes) -> MemberRecord | None:
        """The member whose key is that of this connection; None if this one has no key."""
        return self._by_owner.get(owner_of(sender))

    @property
    def names(self) -> list[str]:
        return sorted(self._by_name)

    def free_index(self, places: int = 1) -> int:
        """The lowest index from which on this many are no member's."""
        self._low_index = next(i for i in count(self._low_index) if not self._indexes[i])
        if places == 1:
            return self._low_index
        return next(
            i
            for i in count(self._low_index)
            if not any(self._indexes[i + each] for each in range(places))
        )

    def free_name(self) -> str:
        """The first of m0, m1, … that no member has, in or away."""
        self._low_name = next(i for i in count(self._low_name) if self._is_free(f"m{i}"))
        return f"m{self._low_name}"

    def _is_free(self, name: str) -> bool:
        return name not in self._by_name and name not in self.away

    def add(self, member: MemberRecord) -> None:
        """Add a member. Its connection and name are free."""
        self._by_sender[member.sender] = self._by_name[member.name] = member
        self._indexes.update(range(member.index, member.index + member.places))
        self.places += member.places
        if member.session:
            self._by_session[member.session] = member
        if owner := owner_of(member.sender):
            self._by_owner[owner] = member

    def remove(self, member: MemberRecord, *, may_return: bool = False) -> None:
        """Remove a member. One that may return keeps its name, as long as it is remembered."""
        self._take_out(member)
        freed = self.away.remember(member) if may_return else [member.name]
        for name in freed:
            self._free_name(name)

    def forget(self, member: MemberRecord) -> None:
        self.away.pop(member.name)
        self._free_name(member.name)

    def move(self, member: MemberRecord, sender: bytes) -> None:
        """Give a member another connection, free or its own; one that was away is in again."""
        self.away.pop(member.name)
        if self._by_sender.get(member.sender) is member:
            self._take_out(member)
        member.reconnect(sender)
        self.add(member)

    def _take_out(self, member: MemberRecord) -> None:
        del self._by_sender[member.sender], self._by_name[member.name]
        self._indexes.subtract(range(member.index, member.index + member.places))
        self.places -= member.places
        if self._by_session.get(member.session) is member:
            del self._by_session[member.session]
        owner = owner_of(member.sender)
        if self._by_owner.get(owner) is member:
            del self._by_owner[owner]
        self._low_index = min(self._low_index, member.index)

    def _free_name(self, name: str) -> None:
        number = name.removeprefix("m")
        if number.isdecimal() and len(number) < 10:
            self._low_name = min(self._low_name, int(number))
