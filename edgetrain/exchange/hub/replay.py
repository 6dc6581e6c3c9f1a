"""What a journal says happened after its snapshot, once more: who came and went, what was merged.

Nobody is told anything; where it ends a restored hub begins.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgetrain.exchange.hub.members import Away, MemberRecord
from edgetrain.exchange.hub.records import Departed, Entered, Record, Restarted, Round
from edgetrain.exchange.hub.rounds import Rounds


def replay(
    records: Iterable[Record],
    epoch: int,
    seats: dict[str, MemberRecord],
    away: Away,
    rounds: Rounds,
) -> int:
    """Change `seats` (members that are in, by name), `away` and `rounds` as the records tell; the
    epoch after the last. Rounds from before the snapshot are passed over. Raises Diverged where the
    journal contradicts itself."""
    for record in records:
        match record:
            case Round() if record.round >= rounds.round:
                _replay_round(record, seats, away, rounds)
            case Entered():
                member = MemberRecord.of(record.seat)
                seats[member.name] = member
                away.pop(member.name)
            case Departed():
                gone = seats.pop(record.name, None)
                if gone is not None and not record.final:
                    away.remember(gone)
            case Restarted():
                epoch = record.epoch
    return epoch


def _replay_round(
    record: Round, seats: dict[str, MemberRecord], away: Away, rounds: Rounds
) -> None:
    for counted in record.counted:
        member = seats.get(counted.member) or away.get(counted.member)
        if member is not None:
            member.merged = counted.meant_for + 1
            member.next_round = max(member.next_round, member.merged)
    rounds.replay(record)
