"""Records what a hub does in a run folder. It observes `serve` and decides nothing.

The metrics file begins with training, because its times count from there:

    state       effect                   what is written
    waiting     an event                 kept in memory, at most FIRST + NEWEST of them
    waiting     the event "started"      the events kept, then this one; recording from now on
    recording   an event, a round        a line each
    recording   a member's report        a line of status: sums become what the steps since took
    any         `close`                  events that were still kept; then nothing more
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edgetrain.exchange.hub.effects import Closed, Evaluated, Note, Observed, Reported
from edgetrain.exchange.limits import Refusals
from edgetrain.exchange.messages import CODES, UNKNOWN_CELSIUS, Telemetry
from edgetrain.runs.environment import Meter, Usage
from edgetrain.runs.folder import metrics_path
from edgetrain.runs.metrics.log import MetricsLog

if TYPE_CHECKING:
    from edgetrain.exchange.transport import Traffic


FIRST, NEWEST = 100, 900
"""Events from before training that are written: the first and the newest. Members may come and go
for days before it begins."""

MOST_NAMES = 1 << 14
"""Names to remember a report of. Members come and go under any number of them."""

_PARTS = ("wait", "overhead", "eval", "end")


class _Early:
    """Events from before training, when there is no file yet."""

    def __init__(self) -> None:
        self._first: list[Note] = []
        self._newest: deque[Note] = deque(maxlen=NEWEST)
        self._left_out = 0

    def __bool__(self) -> bool:
        return bool(self._first)

    def add(self, note: Note) -> None:
        if len(self._first) < FIRST:
            self._first.append(note)
            return
        self._left_out += len(self._newest) == NEWEST
        self._newest.append(note)

    def notes(self) -> Iterator[Note]:
        """The events in order. The first after a gap says how many were left out."""
        yield from self._first
        for number, note in enumerate(self._newest):
            if self._left_out and not number:
                told = f"{note.reason} ({self._left_out:,} events before this one are left out)"
                note = Note(note.event, note.member, told)
            yield note


class HubRecorder:
    """Writes what a hub does into a run folder.

    `on_start` is called with the time of `clock` at which training began; `say` gets each event as
    a line for people. `earlier_s`: seconds of training before the hub was restored. `name_of` is
    asked for the name under which the machine at a connection was enrolled; "": it was not.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float],
        traffic: Callable[[], Traffic],
        *,
        usage: Usage | None = None,
        on_start: Callable[[float], None] = lambda began: None,
        say: Callable[[str], None] = lambda line: None,
        earlier_s: float = 0.0,
        name_of: Callable[[bytes], str] = lambda sender: "",
    ) -> None:
        self._folder = folder
        self._traffic = traffic
        self._on_start = on_start
        self._say = say
        self._clock = clock
        self._earlier_s = earlier_s
        self._usage = usage or Meter()
        self._early = _Early()
        self._refusals, self._strangers = Refusals(few=20), Refusals(few=200)
        self._log: MetricsLog | None = None
        self._statuses, self._name_of = Statuses(), name_of
        self.above: Callable[[], Traffic] | None = None
        """Traffic of a gateway's connection to the hub above."""
        self.reducers = ""
        """Reducers of each range, recorded as training begins; "": one hub for all."""

    def __call__(self, effect: Observed) -> None:
        if isinstance(effect, Closed):
            self._round(effect)
            return
        if isinstance(effect, Reported):
            if self._log is not None:
                keys = self._statuses.keys_of(effect.member, effect.telemetry)
                name = self._name_of(effect.sender)
                self._log.status(about=effect.member, name=name, keys=keys)
            return
        if isinstance(effect, Evaluated):
            self._figure(effect)
            return
        if effect.event == "refused":
            code, _, _ = effect.reason.partition(":")
            if code in CODES:
                told = self._refusals.count_line(code, effect.reason)
            else:  # of each kind few were told; these are all kinds together
                told = self._strangers.count_line("?", effect.reason)
            if told is None:
                return
            effect = Note("refused", effect.member, told)
        self._say(f"{effect.member} {effect.event}: {effect.reason}")
        if self._log is None:
            self._early.add(effect)
            if effect.event == "started":
                self._open()
                if self.reducers:
                    self(Note("reducers", "hub", self.reducers))
        else:
            self._event(self._log, effect)

    def _open(self) -> None:
        began = self._clock() - self._earlier_s
        self._log = MetricsLog(metrics_path(self._folder), "hub", self._clock, began)
        self._on_start(began)
        for note in self._early.notes():
            self._event(self._log, note)
        self._early = _Early()

    def _event(self, log: MetricsLog, note: Note) -> None:
        about = None if note.member == "hub" else note.member
        log.event(note.event, note.reason, about=about)

    def _round(self, closed: Closed) -> None:
        if self._log is None:
            return
        traffic, usage, keys = self._traffic(), self._usage, dict(vars(closed))
        keys["close_s"], dealt = keys.pop("open_s"), keys.pop("dealt")
        keys |= {"sent_bytes": traffic.sent_bytes, "received_bytes": traffic.received_bytes}
        keys |= {"cpu_s": usage.cpu_s, "peak_bytes": usage.peak_bytes}
        if self.above is not None:
            above = self.above()
            keys["above_sent_bytes"] = above.sent_bytes
            keys["above_received_bytes"] = above.received_bytes
        self._log.round(**keys, **({} if dealt is None else vars(dealt)))

    def strike(self, event: Literal["fault", "absence"], reason: str, about: str = "") -> None:
        """Something that the job planned goes wrong now; `about` a member, or the whole fleet."""
        if self._log is not None:
            self._log.event(event, reason, about=about or None)

    def _figure(self, evaluated: Evaluated) -> None:
        told = evaluated.figure
        if self._log is not None and told.metric:
            self._log.figure(
                about=evaluated.member,
                metric=told.metric,
                value=told.value,
                better="lower" if told.lower else "higher",
                step=told.step,
                # A member's word, which must not date a figure into the future.
                at=min(told.t_ms / 1000, self._log.elapsed_s),
            )
        if self._log is not None and told.own:
            sums = {name: (value, count) for name, value, count in told.own}
            self._log.own_evaluation(sums, step=told.own_step, about=evaluated.member)

    def close(self) -> None:
        """Write events that are still kept, and close the file; works twice."""
        if self._log is None and self._early:
            self._open()
        if self._log is not None:
            self._log.close()


class Statuses:
    def __init__(self) -> None:
        self._newest: dict[str, Telemetry] = {}

    def __len__(self) -> int:
        return len(self._newest)

    def keys_of(
        self, member: str, told: Telemetry
    ) -> Mapping[str, float | int | bool | str | None]:
        before = self._newest.pop(member, None)
        self._newest[member] = told
        while len(self._newest) > MOST_NAMES:
            del self._newest[next(iter(self._newest))]
        if before is None or _is_anew(before, told):
            # Of a process that has just begun, or that this hub has not heard of before: its sums
            # are of an unknown number of steps.
            before = Telemetry(told.step, told.round, told.t_ms) if told.versions else None
        steps = told.step - before.step if before else told.step
        parts = {
            f"{part}_s": (_ms(told, part) - (_ms(before, part) if before else 0)) / 1000
            for part in _PARTS
        }
        passed_s = (told.t_ms - (before.t_ms if before else 0)) / 1000
        return {
            "step": told.step,
            "round": told.round,
            "steps": steps,
            "at": told.t_ms / 1000,
            "pace_s": passed_s / steps if steps else None,
            "compute_s": max(0.0, passed_s - sum(parts.values())),
            **parts,
            "round_trip_s": told.round_trip_us100 / 1e4 or None,
            "sent_bytes": told.sent_bytes,
            "received_bytes": told.received_bytes,
            "peak_bytes": told.memory_mb << 20 or None,
            "celsius": None if told.celsius == UNKNOWN_CELSIUS else told.celsius,
            "throttled": None if told.throttled < 0 else bool(told.throttled),
            "joules": None if told.joules < 0 else told.joules,
            "versions": told.versions or None,
            "disk_free_bytes": None if told.disk_mb < 0 else told.disk_mb << 20,
            "swap_bytes": None if told.swap_mb < 0 else told.swap_mb << 20,
            "mhz": told.mhz or None,
            "under_voltage": None if told.under_voltage < 0 else bool(told.under_voltage),
            "wifi_dbm": told.wifi_dbm or None,
            "clock_s": told.unix_ms / 1000 - time.time() if told.unix_ms else None,
        }


def _ms(told: Telemetry, part: str) -> int:
    value: int = getattr(told, f"{part}_ms")
    return value


def _is_anew(before: Telemetry, told: Telemetry) -> bool:
    """Whether another process says this: its sums have begun again."""
    return min(told.step - before.step, told.t_ms - before.t_ms) < 0 or any(
        _ms(told, p) < _ms(before, p) for p in _PARTS
    )
