"""What a hub does, written into a run folder. An observer of `serve`; it decides nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.exchange.hub.effects import Closed, Note
from edgetrain.exchange.limits import Refusals
from edgetrain.exchange.messages import CODES
from edgetrain.runs.environment import Meter, Usage
from edgetrain.runs.folder import metrics_path
from edgetrain.runs.metrics.log import MetricsLog

if TYPE_CHECKING:
    from edgetrain.exchange.transport import Traffic


FIRST, NEWEST = 100, 900
"""Of the events before training began, so many are written: for days members may come and go."""


class _Early:
    """What happened before there was a file to write it to."""

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
        """In order; the one behind those that were left out says how many they were."""
        yield from self._first
        for number, note in enumerate(self._newest):
            if self._left_out and not number:
                told = f"{note.reason} ({self._left_out:,} events before this one are left out)"
                note = Note(note.event, note.member, told)
            yield note


class HubRecorder:
    """Writes what a hub does into a run folder.

    `on_start` is told the moment at which training began; `say` gets each event as a line to read.
    What happened before that moment is written when it has come: the first and the newest of it.
    `earlier_s`: training had gone on for so long when the hub was restored.
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
    ) -> None:
        self._folder = folder
        self._traffic = traffic
        self._on_start = on_start
        self._say = say
        self._clock = clock
        self._earlier_s = earlier_s
        self._usage = usage or Meter()
        self._early = _Early()
        self._refusals = Refusals(few=20)
        self._log: MetricsLog | None = None

    def __call__(self, effect: Note | Closed) -> None:
        """An observer, for `serve`."""
        if isinstance(effect, Closed):
            self._round(effect)
            return
        if effect.event == "refused":
            code, _, _ = effect.reason.partition(":")
            told = self._refusals.count_line(code if code in CODES else "?", effect.reason)
            if told is None:
                return
            effect = Note("refused", effect.member, told)
        self._say(f"{effect.member} {effect.event}: {effect.reason}")
        if self._log is None:
            self._early.add(effect)
            if effect.event == "started":
                self._open()
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
        if self._log is not None:
            traffic = self._traffic()
            self._log.round(
                round=closed.round,
                members=closed.members,
                missing=closed.missing,
                weight=closed.weight,
                close_s=closed.open_s,
                sent_bytes=traffic.sent_bytes,
                received_bytes=traffic.received_bytes,
                cpu_s=self._usage.cpu_s,
                peak_bytes=self._usage.peak_bytes,
                delay=closed.delay,
                cuts=closed.cuts,
            )

    def close(self) -> None:
        """Write what is left; works twice."""
        if self._log is None and self._early:
            self._open()
        if self._log is not None:
            self._log.close()
