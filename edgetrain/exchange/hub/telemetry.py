"""What members say of themselves, on its way through the hub: nothing depends on it.

A member reports every `Policy.status_s` seconds, and once as it begins and as it ends; the member
that evaluates adds its newest figure. An insider
may send ten thousand reports a second: it is believed two in that time, and four in a row; the rest
costs a look at a number.
"""

from __future__ import annotations

from edgetrain.exchange.hub.effects import Effect, Evaluated, Reported
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.messages import Agree, Beat, Figure, Telemetry

IN_A_ROW = 4
"""Reports of a member that are passed on without a pause between them."""


def observe_sign(
    member: MemberRecord, message: Beat | Telemetry | Figure | Agree, status_s: float, now: float
) -> list[Effect]:
    """A sign of life from a member: what observers learn from it."""
    if isinstance(message, Figure):
        if message.is_fleets:
            member.note_evaluates()
        if not (message.metric or message.own):
            return []
    if isinstance(message, Beat | Agree) or not status_s:
        return []
    accounted = max(member.reported, now - IN_A_ROW * status_s / 2)
    if accounted + status_s / 2 > now:
        return []
    member.note_report(accounted + status_s / 2)
    if isinstance(message, Figure):
        return [Evaluated(member.name, message)]
    return [Reported(member.name, member.sender, message)]
