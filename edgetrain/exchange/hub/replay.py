"""What a journal says happened after its snapshot, once more: who came and went, what was merged.

Nobody is told anything; where it ends a restored hub begins.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgetrain.exchange.hub.members import Away, Peer
from edgetrain.exchange.hub.records import Departed, Entered, Record, Restarted, Round
from edgetrain.exchange.hub.rounds import Exchange


def relive(
    records: Iterable[Record], epoch: int, seats: dict[str, Peer], away: Away, exchange: Exchange
) -> int:
    """Change `seats` (members that are in, by name), `away` and `exchange` as the records tell; the
    epoch after the last. Rounds from before the snapshot are passed over. Raises Diverged where the
    journal contradicts itself."""
    for record in records:
        match record:
            case Round() if record.round >= exchange.round:
                _relive_round(record, seats, away, exchange)
            case Entered():
                peer = Peer.of(record.seat)
                seats[peer.name] = peer
                away.pop(peer.name)
            case Departed():
                gone = seats.pop(record.name, None)
                if gone is not None and not record.final:
                    away.remember(gone)
            case Restarted():
                epoch = record.epoch
    return epoch


def _relive_round(record: Round, seats: dict[str, Peer], away: Away, exchange: Exchange) -> None:
    for counted in record.counted:
        peer = seats.get(counted.member) or away.get(counted.member)
        if peer is not None:
            peer.merged = counted.meant_for + 1
            peer.next_round = max(peer.next_round, peer.merged)
    exchange.relive(record)
