"""One member's part in a collective: float32 sums in the order of a schedule, and the mean.

No connection, no clock: what may leave is asked for, and what came is handed over. Sums are made in
the memory of what came, which then goes on to the next member, so a member needs no vector besides
its contribution and the mean. Its contribution is never written: another attempt starts from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edgetrain.errors import BadPayload
from edgetrain.exchange.messages import NO_WEIGHT
from edgetrain.exchange.peers.schedules import Action, SumOrder
from edgetrain.vectors.vector import Buffer, Vector


class Portions:
    """What each contribution is multiplied by, and the sum in the end: float32, from the weights of
    all places. Of equal weights the first is 1, and costs nothing.

    x's mean = last * (first[0] x[0] + first[1] x[1] + ...), with first[i] = w[i] / max(w) and
    last = max(w) / sum(w). A weight of at most NO_WEIGHT counts as 0; if all do, so does the mean.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        counted = [0.0 if weight <= NO_WEIGHT else weight for weight in weights]
        most, total = max(counted), sum(counted)
        self.first = [np.float32(weight / most if most else 0.0) for weight in counted]
        self.last = np.float32(most / total if total else 0.0)


class Summing:
    """What one place of a schedule does with its contribution, float32 [elements], action by
    action: send all of `sendable()`, then `accept` what `wanted` names, until that is None."""

    def __init__(self, schedule: SumOrder, place: int, own: Vector, shares: Portions) -> None:
        self._segments = schedule.segments
        self._actions = schedule.actions(place)
        self._own, self._first, self._last = own, shares.first[place], shares.last
        self._at = 0
        self._held: dict[int, Buffer] = {}
        """The segments that came, with the sums in them; the others are as contributed."""

    def sendable(self) -> Iterator[tuple[Action, Buffer]]:
        """What is to be sent now, with its bytes, which nobody may write. Each once."""
        while self._at < len(self._actions) and self._actions[self._at].sends:
            action = self._actions[self._at]
            self._at += 1
            held = self._held.get(action.segment)
            values = self._scaled(action.segment).data if held is None else held
            if action.adds:  # the sum is another's from here on
                self._held.pop(action.segment, None)
            yield action, values

    @property
    def wanted(self) -> Action | None:
        """What comes next, from its place; None: the mean is whole. Ask after `sendable`."""
        return self._actions[self._at] if self._at < len(self._actions) else None

    def accept(self, payload: Buffer) -> None:
        """The bytes of what is `wanted`: writable memory that belongs to this object from now on.
        BadPayload for other sizes."""
        action = self._actions[self._at]
        here = self._segments[action.segment]
        if memoryview(payload).nbytes != 4 * (here.stop - here.start):
            raise BadPayload(
                f"segment {action.segment} has {memoryview(payload).nbytes} bytes, not "
                f"{4 * (here.stop - here.start)}"
            )
        if action.adds:
            values = np.frombuffer(payload, np.float32)
            if not values.flags.writeable:
                payload = bytearray(payload)
                values = np.frombuffer(payload, np.float32)
            held = self._held.get(action.segment)
            mine = self._scaled(action.segment) if held is None else np.frombuffer(held, np.float32)
            np.add(values, mine, out=values)
            if action.ends:
                np.multiply(values, self._last, out=values)
        self._held[action.segment] = payload
        self._at += 1

    def _scaled(self, segment: int) -> Vector:
        values = self._own[self._segments[segment]]
        return values if self._first == 1 else values * self._first

    def pieces(self) -> list[Vector]:
        """The mean's consecutive pieces, once nothing is wanted; read only."""
        return [
            np.frombuffer(self._held[number], np.float32)
            if number in self._held
            else self._scaled(number) * self._last
            for number in range(len(self._segments))
        ]
