"""Doing again what a journal's records say happened after its snapshot: members that came and
went, rounds that were merged.

Nothing is sent. Where the records end a restored hub begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from edgetrain.exchange.hub.members import Away, MemberRecord
from edgetrain.exchange.hub.records import Departed, Entered, Record, Restarted, Round, Sent
from edgetrain.exchange.hub.rounds import Rounds


class Replayed(NamedTuple):
    """The state at the end of the records."""

    epoch: int
    """After the last record."""
    deserted: bool
    """Whether nobody is in, and the last one to go was lost: it did not leave."""


def replay(
    records: Iterable[Record],
    epoch: int,
    present: dict[str, MemberRecord],
    away: Away,
    rounds: Rounds,
) -> Replayed:
    """Change `present` (members that are in, by name), `away` and `rounds` as the records say.

    Skips rounds from before the snapshot. Raises Diverged if the journal contradicts itself.
    """
    # A hub that is finished writes no snapshot: if nobody was in, all had been lost.
    deserted = not present
    for record in records:
        match record:
            case Round() if record.round >= rounds.round:
                _mark_counted(record, present, away)
                rounds.replay(record)
            case Sent() if record.round >= rounds.collecting:
                _mark_counted(record, present, away)
                rounds.replay_sent(record)
            case Entered():
                member = MemberRecord.of_seat(record.seat)
                present[member.name] = member
                away.pop(member.name)
            case Departed():
                gone = present.pop(record.name, None)
                if gone is not None and not record.final:
                    gone.depart(left=False)
                    away.remember(gone)
                if record.final:
                    away.pop(record.name)
                deserted = not record.final if gone is not None else deserted
            case Restarted():
                epoch = record.epoch
    return Replayed(epoch, deserted and not present)


def _mark_counted(record: Round | Sent, present: dict[str, MemberRecord], away: Away) -> None:
    for counted in record.counted:
        member = present.get(counted.member) or away.get(counted.member)
        if member is not None:
            member.replay_merged(counted.meant_for, counted.members)
