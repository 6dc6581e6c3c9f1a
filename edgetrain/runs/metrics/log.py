"""metrics.jsonl: how a run's numbers are written, read back, followed and added up.

One JSON object a line, written by many processes at once. This module knows the lines and nothing
of folders, strategies or how anything is shown; it imports only the standard library.

Keys and units: docs/run-folder.md.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from edgetrain.errors import ConfigError, TaskError
from edgetrain.runs.metrics.lines import COMMON, LINE_BYTES, Record

EventName = Literal[
    "joined", "started", "late", "gone", "back", "left", "refused", "finished", "overrun", "error"
]

HUB = "hub"
_BUFFER_BYTES = 64 * 1024

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_logger = logging.getLogger("edgetrain")


class MetricsLog:
    """Appends the lines of one writer (a member, or the hub) to a run's metrics.jsonl.

    Any number of processes may each have one on the same file: it is opened with O_APPEND and whole
    lines leave in a single write. One thread at a time may use a MetricsLog.

    `clock() - t0` is a line's `t`. All writers of a run share both; on one machine
    `time.monotonic` and one reading of it do.

    Lines are written at once. With `flush_s` > 0 they may wait that many seconds for each other
    (for steps of microseconds); an event or `flush()` writes them, a SIGKILL loses them.

    A full disk does not end training: the loss is told once, counted in `lost`, and
    writing is tried again with every line.
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
        self._clock, self._t0, self._flush_s = clock, t0, flush_s
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._flushed_at = clock()
        self._torn = False
        self._lost_untold = 0
        self._warned = False
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd: int | None = os.open(self.path, flags, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.path}: {error.strerror}", "choose another folder for runs"
            ) from None

    def step(
        self,
        *,
        step: int,
        round: int,
        loss: float,
        wait_s: float,
        compute_s: float,
        overhead_s: float,
        sent_bytes: int,
        received_bytes: int,
        cpu_s: float,
        peak_bytes: int,
        joules: float | None = None,
        steps: int = 1,
    ) -> None:
        """One finished training step of this member, or `steps` of them that share a line.

        step: steps done, this one included (the first is 1). round: rounds submitted so far.
        wait_s, compute_s (pacing included), overhead_s: seconds of these steps. sent_bytes,
        received_bytes (at the socket), cpu_s, joules: sums since this process began training.
        """
        self._write(
            "step",
            {
                "step": int(step),
                "round": int(round),
                "loss": _number(loss),
                "wait_s": _seconds(wait_s),
                "compute_s": _seconds(compute_s),
                "overhead_s": _seconds(overhead_s),
                "sent_bytes": int(sent_bytes),
                "received_bytes": int(received_bytes),
                "cpu_s": _seconds(cpu_s),
                "peak_bytes": int(peak_bytes),
                "joules": None if joules is None else _number(joules),
                **({} if steps == 1 else {"steps": int(steps)}),
            },
        )

    def evaluation(
        self,
        *,
        step: int,
        round: int,
        figures: Mapping[str, float],
        eval_s: float,
    ) -> None:
        """What the task's evaluate() gave. Its `t` is when the evaluation began, `eval_s` ago: the
        moment the model was this good.

        Raises TaskError if a figure has the name of one of the line's own keys.
        """
        clash = sorted(set(figures) & set(COMMON))
        if clash:
            raise TaskError(
                f"evaluate() returned a figure named '{clash[0]}', a key of every line of metrics",
                "call it something else; taken are " + ", ".join(COMMON),
            )
        values = {name: _number(value) for name, value in figures.items()}
        keys = {"step": int(step), "round": int(round), **values, "eval_s": _seconds(eval_s)}
        self._write("eval", keys, ago=eval_s)

    def round(
        self,
        *,
        round: int,
        members: Iterable[str],
        missing: Iterable[str],
        weight: float,
        close_s: float,
        sent_bytes: int,
        received_bytes: int,
        cpu_s: float,
        peak_bytes: int,
        delay: int = 0,
        cuts: Iterable[tuple[str, float, str]] = (),
    ) -> None:
        """A round that the hub closed. close_s: from the first contribution to the reply.

        delay: local steps, in force once this round's reply is applied. cuts: (member, share of its
        contribution that was left out, why), of those that did not count in full.
        """
        shares = [[name, float(f"{share:.4f}"), reason] for name, share, reason in cuts]
        self._write(
            "round",
            {
                "round": int(round),
                "members": list(members),
                "missing": list(missing),
                "weight": _number(weight),
                "close_s": _seconds(close_s),
                "sent_bytes": int(sent_bytes),
                "received_bytes": int(received_bytes),
                "cpu_s": _seconds(cpu_s),
                "peak_bytes": int(peak_bytes),
                "delay": int(delay),
                **({"cuts": shares} if shares else {}),
            },
        )

    def event(self, event: EventName, reason: str = "", *, about: str | None = None) -> None:
        """Something that happens rarely, to this writer or, as the hub saw it, to `about`."""
        keys = {"event": event, "reason": reason}
        self._write("event", keys if about is None else {**keys, "about": about})
        self.flush()

    def flush(self) -> None:
        """Hand what is still here to the operating system, in one write. Raises nothing."""
        if not self._pending or self._fd is None:
            return
        data = b"".join(self._pending)
        self._pending, self._pending_bytes, self._flushed_at = [], 0, self._clock()
        lost = self._append(self._fd, data)
        self.lost += lost
        self._lost_untold += lost
        if not lost and self._lost_untold:
            self._tell_what_was_lost(self._fd)

    def close(self) -> None:
        """Flush and close; a second call does nothing, and lines after it are dropped."""
        self.flush()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, kind: str, keys: Mapping[str, Any], ago: float = 0.0) -> None:
        if self._fd is None:
            return
        line = self._line(kind, keys, ago)
        self._pending.append(line)
        self._pending_bytes += len(line)
        waited = self._clock() - self._flushed_at
        if waited >= self._flush_s or self._pending_bytes >= _BUFFER_BYTES:
            self.flush()

    def _line(self, kind: str, keys: Mapping[str, Any], ago: float = 0.0) -> bytes:
        t = _seconds(self._clock() - self._t0 - ago)
        return _fit({"kind": kind, "t": t, "member": self.member, **keys})

    def _append(self, fd: int, lines: bytes) -> int:
        """One write. Returns how many lines the disk did not take."""
        # After a torn line a fresh start, so that only that one is unreadable.
        data = b"\n" + lines if self._torn else lines
        try:
            written = os.write(fd, data)
        except OSError as error:
            self._warn(error.strerror or str(error))
            return lines.count(b"\n")
        if written < len(data):  # the disk filled up in the middle
            self._warn(os.strerror(errno.ENOSPC))
        self._torn = not data[:written].endswith(b"\n")
        return data[max(written, 1) :].count(b"\n")

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning(
                "%s cannot write its metrics to %s: %s; training goes on without them",
                self.member,
                self.path,
                why,
            )

    def _tell_what_was_lost(self, fd: int) -> None:
        reason = f"{self._lost_untold} lines of metrics could not be written"
        if not self._append(fd, self._line("event", {"event": "error", "reason": reason})):
            self._lost_untold = 0


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity: they become null."""
    value = float(value)
    return value if math.isfinite(value) else None


def _seconds(value: float) -> float | None:
    """To 0.1 microseconds: finer digits are noise that would double a line's length."""
    value = float(value)
    return round(value, 7) if math.isfinite(value) else None


def _fit(keys: Record) -> bytes:
    """The line, shortened to LINE_BYTES if it must be.

    The longest text or list is cut, and `cut` tells how many characters or names each one lost:
    ten thousand names of a round do not fit.
    """
    line = _encode(keys).encode("ascii") + b"\n"
    cut: dict[str, int] = {}
    while len(line) > LINE_BYTES:
        longest = max(
            (name for name, value in keys.items() if isinstance(value, str | list) and value),
            key=lambda name: len(_encode(keys[name])),
        )
        value = keys[longest]
        kept = value[: len(value) // 2]
        cut[longest] = cut.get(longest, 0) + len(value) - len(kept)
        keys = {**keys, longest: kept, "cut": cut}
        line = _encode(keys).encode("ascii") + b"\n"
    return line
