"""Write metrics.jsonl: one JSON object a line, from many processes at once.

`lines` reads them back, `runs/data.py` adds them up. Keys and units: docs/reference/run-folder.md.
Only the standard library is imported.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import median_low
from typing import Any, Literal, Self

from edgetrain.errors import TaskError, explain_os_errors
from edgetrain.files.writing import file_mode
from edgetrain.runs import shapes
from edgetrain.runs.metrics.lines import COMMON, format_line, number, seconds

_logger = logging.getLogger("edgetrain")


class LineFile:
    """Appends lines to `path` for one writer, each call in a single write.

    Any number of processes may append to the same file: it is opened with O_APPEND. A full disk is
    not an error: it is logged once, in the name of `writer`, and the next call tries again. Raises
    ConfigError if the file cannot be opened.
    """

    def __init__(self, path: Path, writer: str) -> None:
        self.path = path
        self._writer = writer
        self._torn = False
        self._warned = False
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with explain_os_errors(f"cannot write {path}", "choose another folder for runs"):
            self._fd: int | None = os.open(path, flags, file_mode(path.parent))

    @property
    def closed(self) -> bool:
        return self._fd is None

    def append(self, lines: bytes) -> int:
        """Append whole lines. Returns how many of them the disk did not take."""
        if self._fd is None:
            return lines.count(b"\n")
        # After a torn line begin a new one, so that only the torn one cannot be read.
        data = b"\n" + lines if self._torn else lines
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self._warn(error.strerror or str(error))
            return lines.count(b"\n")
        if written < len(data):  # the disk filled up in the middle
            self._warn(os.strerror(errno.ENOSPC))
        self._torn = not data[:written].endswith(b"\n")
        return data[max(written, 1) :].count(b"\n")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning(
                "%s cannot write its metrics to %s: %s; training goes on without them",
                self._writer,
                self.path,
                why,
            )


EventName = Literal[
    "joined", "started", "late", "gone", "back", "left", "refused", "removed", "pace", "stands",
    "replica", "servers", "told", "codec", "map", "reducers", "search", "correction", "finished",
    "overrun", "fault", "absence", "error",
]  # fmt: skip

_BUFFER_BYTES = 64 * 1024
_FIGURES = 24
"""Figures of a member's own data in a line."""


class MetricsLog:
    """Appends the lines of one writer (a member, or the hub) to a run's metrics.jsonl.

    Any number of processes may each have one on the same file. One thread at a time may use a
    MetricsLog. Raises ConfigError if the file cannot be opened.

    A line's `t` is `clock() - t0` in seconds. All writers of a run share both; on one machine
    `time.monotonic` and one reading of it do.

    Each line is written at once. With `flush_s` > 0, lines are gathered for up to that many seconds
    (for steps of microseconds); an event or `flush()` writes them, a SIGKILL loses them.

    A full disk does not end training: it is logged once, lost lines are counted in `lost`, and
    every later line tries again.
    """

    def __init__(
        self,
        path: Path | str,
        member: str,
        clock: Callable[[], float],
        t0: float,
        *,
        flush_s: float = 0.0,
    ) -> None:
        self.path = Path(path)
        self.member = member
        self.lost = 0
        self.written_bytes = 0
        """Bytes of all lines so far, with those that the disk did not take."""
        self._clock, self._t0, self._flush_s = clock, t0, flush_s
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._flushed_at = clock()
        self._lost_unsaid = 0
        self._file = LineFile(self.path, member)

    def step(self, *, joules: float | None = None, **keys: float) -> None:
        """Write one finished training step of this member, or `steps` of them as one line.

        The other keys are those of the line (docs/reference/run-folder.md), in seconds and bytes.
        """
        usual = {"steps": 1, "eval_s": 0.0, "end_s": 0.0}
        kept = {
            key: value for key, value in keys.items() if key not in usual or value != usual[key]
        }
        self._write("step", _plain("step", {**kept, "joules": joules}))

    def add_exchange(self, exchanged: object) -> None:
        """Write the line of an exchange that is over, whose attributes are `exchange`'s arguments,
        and what the member has decided since."""
        keys = {name: value for name, value in vars(exchanged).items() if name != "applied"}
        note = keys.pop("note")
        self.exchange(**keys)
        if note:
            self.event("correction", note)

    def exchange(self, *, submitted: float, arrived: float, **keys: float) -> None:
        """Write an exchange of this member whose reply has just been applied.

        submitted, arrived: readings of the log's clock. The other keys are those of the line
        (docs/reference/run-folder.md).
        """
        times = {"submitted_t": submitted - self._t0, "arrived_t": arrived - self._t0}
        self._write("exchange", _plain("exchange", keys | times))

    def evaluation(
        self,
        *,
        step: int,
        round: int,
        figures: Mapping[str, float],
        eval_s: float,
    ) -> None:
        """Write the figures that the task's evaluate() returned.

        The line's `t` is when the evaluation began, `eval_s` ago: the moment the model was this
        good. Raises TaskError if a figure has the name of one of the line's own keys.
        """
        clash = sorted(set(figures) & set(COMMON))
        if clash:
            raise TaskError(
                f"evaluate() returned a figure named '{clash[0]}', a key of every line of metrics",
                "call it something else; these names are taken: " + ", ".join(COMMON),
            )
        values = {name: number(value) for name, value in figures.items()}
        keys = {"step": int(step), "round": int(round), **values, "eval_s": seconds(eval_s)}
        self._write("eval", keys, ago=eval_s)

    def own_evaluation(self, sums: Mapping[str, tuple[float, float]], **keys: Any) -> None:
        """Write what this member, or the one that the hub was told `about`, found on data of its
        own: sums and counts of figures, in as many lines as they take. What is not finite is left
        out. The other keys are those of the line (docs/reference/run-folder.md)."""
        rows = [[name, value, count] for name, (value, count) in sums.items() if isfinite(value)]
        for first in range(0, len(rows), _FIGURES):
            line = {**_plain("own_eval", keys), "sums": rows[first : first + _FIGURES]}
            self._write("own_eval", line, ago=keys.get("eval_s", 0.0))

    def round(
        self, *, cuts: Iterable[tuple[str, float, str]] = (), ages: Sequence[int] = (), **keys: Any
    ) -> None:
        """Write a round that the hub closed.

        cuts: (member, share left out, reason) for each contribution that did not count in full.
        ages: of all contributions. Other keys: as the line's (docs/reference/run-folder.md).
        """
        keys["cuts"] = [[name, float(f"{share:.4f}"), reason] for name, share, reason in cuts]
        keys["ages"] = [median_low(ages), max(ages)] if ages else []
        rare = {name for name in ("cuts", "codec", "final_sync", "ages") if not keys.get(name)}
        kept = {name: value for name, value in keys.items() if name not in rare}
        self._write("round", _plain("round", kept))

    def status(
        self,
        *,
        about: str,
        name: str,
        keys: Mapping[str, float | int | bool | str | None],
    ) -> None:
        """Write what the member `about` reported of itself to this writer, the hub. `name`: of its
        enrolled machine, or "". What is not known (None) is left out."""
        known = {key: value for key, value in keys.items() if value is not None}
        self._write("status", {"about": about, **({"name": name} if name else {}), **known})

    def figure(
        self, *, about: str, metric: str, value: float, better: str, step: int, at: float
    ) -> None:
        """Write a figure of the model that the member `about` reported to this writer, the hub.
        `better`: "higher" or "lower" values. `at`: when it was true, in seconds like `t`."""
        keys = {"about": about, "metric": metric, "value": number(value), "better": better}
        self._write("figure", {**keys, "step": int(step), "at": seconds(at)})

    def event(self, event: EventName, reason: str = "", *, about: str | None = None) -> None:
        """Write a rare event: of this writer or, as the hub saw it, of the member `about`."""
        keys = {"event": event, "reason": reason}
        self._write("event", keys if about is None else {**keys, "about": about})
        self.flush()

    @property
    def elapsed_s(self) -> float:
        """Seconds since training began: the `t` of a line that is written now."""
        return self._clock() - self._t0

    def flush(self) -> None:
        """Hand lines still in memory to the operating system, in one write. Raises nothing."""
        if not self._pending or self._file.closed:
            return
        data = b"".join(self._pending)
        self._pending, self._pending_bytes, self._flushed_at = [], 0, self._clock()
        lost = self._file.append(data)
        self.lost += lost
        self._lost_unsaid += lost
        if not lost and self._lost_unsaid:
            reason = f"{self._lost_unsaid} lines of metrics could not be written"
            if not self._file.append(self._line("event", {"event": "error", "reason": reason})):
                self._lost_unsaid = 0

    def close(self) -> None:
        """Flush and close; a second call does nothing. Lines after it are dropped."""
        self.flush()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, kind: str, keys: Mapping[str, Any], ago: float = 0.0) -> None:
        if self._file.closed:
            return
        line = self._line(kind, keys, ago)
        self.written_bytes += len(line)
        self._pending.append(line)
        self._pending_bytes += len(line)
        waited = self._clock() - self._flushed_at
        if waited >= self._flush_s or self._pending_bytes >= _BUFFER_BYTES:
            self.flush()

    def _line(self, kind: str, keys: Mapping[str, Any], ago: float = 0.0) -> bytes:
        t = seconds(self._clock() - self._t0 - ago)
        return format_line({"kind": kind, "t": t, "member": self.member, **keys})


_FORMATS: dict[shapes.Is, Callable[[Any], Any]] = {
    shapes.seconds: seconds, shapes.number: number, shapes.count: int, shapes.texts: list,
}  # fmt: skip


def _plain(kind: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Values as a line has them, by their shapes; KeyError for a key that its kind has not."""
    shape = shapes.LINES[kind]
    return {
        name: value if value is None else _FORMATS.get(shape[name], lambda same: same)(value)
        for name, value in keys.items()
    }
