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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from edgetrain.errors import ConfigError, TaskError

Record = dict[str, Any]
EventName = Literal[
    "joined", "started", "late", "gone", "back", "left", "refused", "finished", "overrun", "error"
]

HUB = "hub"
# Up to one page a line: a page is copied to the file in one piece even when the writer is killed,
# so only a full disk can tear a line.
LINE_BYTES = 4096
_BUFFER_BYTES = 64 * 1024
_START = b'{"kind":'
_COMMON = ("kind", "t", "member", "step", "round", "eval_s", "cut")

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
        clash = sorted(set(figures) & set(_COMMON))
        if clash:
            raise TaskError(
                f"evaluate() returned a figure named '{clash[0]}', a key of every line of metrics",
                "call it something else; taken are " + ", ".join(_COMMON),
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


def parse_line(line: bytes) -> Record | None:
    """A line of metrics.jsonl, or None if it is not one.

    A line torn by a full disk has another process's line glued to its end; that one is recovered.
    No text within a line can hold the mark that is looked for: its quotes would be escaped.
    """
    start = line.rfind(_START)
    if start < 0:
        return None
    try:
        record = json.loads(line[start:])
    except (ValueError, RecursionError):
        return None
    usable = isinstance(record, dict) and all(
        isinstance(record.get(key), kind)
        for key, kind in (("kind", str), ("member", str), ("t", int | float))
    )
    return record if usable else None


def figures(evaluation: Record) -> dict[str, float | None]:
    """The task's own figures of an "eval" record: what its evaluate() returned."""
    return {key: value for key, value in evaluation.items() if key not in _COMMON}


class Follower:
    """Reads a metrics.jsonl that is still being written: each `read()` gives what is new.

    The file need not exist yet. A last line without its end is kept back until the end arrives.
    `damaged` counts lines that could not be read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.damaged = 0
        self._offset = 0
        self._tail = b""

    def read(self) -> list[Record]:
        """The records that were completed since the last call, in file order."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(new)
        *lines, self._tail = (self._tail + new).split(b"\n")
        return self._parse(lines)

    def rest(self) -> list[Record]:
        """What stands after the last line end: a whole record or nothing. Ask when all is over."""
        line, self._tail = self._tail, b""
        return self._parse([line])

    def _parse(self, lines: Iterable[bytes]) -> list[Record]:
        records = []
        for line in lines:
            record = parse_line(line)
            if record is not None:
                records.append(record)
            elif line.strip():
                self.damaged += 1
        return records


def read(path: Path | str, kind: str | None = None) -> Iterator[Record]:
    """All records of a metrics.jsonl, or those of one kind, in file order.

    Unreadable lines are left out, and an absent file has no records. Holds one line at a time.
    """
    # Most lines are steps; who asks for something else need not parse them.
    mark = b"" if kind is None else b'"kind":"%b"' % kind.encode()
    try:
        file = Path(path).open("rb")  # noqa: SIM115  closed below, in a generator
    except FileNotFoundError:
        return
    with file:
        for line in file:
            record = parse_line(line) if mark in line else None
            if record is not None and kind in (None, record["kind"]):
                yield record


@dataclass
class Counter:
    """A sum that a process reports and that begins again at 0 when the process is restarted."""

    total: float = 0.0
    last: float = 0.0

    def report(self, value: float) -> None:
        """The process says its sum is now `value`."""
        self.total += value - self.last if value >= self.last else value
        self.last = value


@dataclass
class MemberTally:
    """What one member's lines add up to. Times in seconds, memory in bytes."""

    lines: int = 0
    """Steps that lines tell of."""
    step: int = 0
    round: int = 0
    t: float = 0.0
    loss: float | None = None
    compute_s: float = 0.0
    wait_s: float = 0.0
    overhead_s: float = 0.0
    sent_bytes: Counter = field(default_factory=Counter)
    received_bytes: Counter = field(default_factory=Counter)
    cpu_s: Counter = field(default_factory=Counter)
    joules: Counter | None = None
    peak_bytes: int = 0
    late: int = 0
    cut: float = 0.0
    """Contributions of it that a merge rule left out, parts counted as parts."""
    standing: str = ""
    reason: str = ""

    @property
    def seconds_per_step(self) -> float | None:
        """By the clock, first step included; None before it is done."""
        return self.t / self.step if self.step else None

    def add_step(self, record: Record) -> None:
        """Takes in a "step" line."""
        self.lines += int(record.get("steps", 1))
        self.step = max(self.step, int(_value(record, "step")))
        self.t = max(self.t, record["t"])
        self.loss = record.get("loss")
        self.compute_s += _value(record, "compute_s")
        self.wait_s += _value(record, "wait_s")
        self.overhead_s += _value(record, "overhead_s")
        if record.get("joules") is not None:
            self.joules = self.joules or Counter()
            self.joules.report(_value(record, "joules"))
        self.add_usage(record)

    def add_usage(self, record: Record) -> None:
        """Takes in what "step" and "round" lines share."""
        self.round = max(self.round, int(_value(record, "round")))
        self.sent_bytes.report(_value(record, "sent_bytes"))
        self.received_bytes.report(_value(record, "received_bytes"))
        self.cpu_s.report(_value(record, "cpu_s"))
        self.peak_bytes = max(self.peak_bytes, int(_value(record, "peak_bytes")))


@dataclass
class Tally:
    """What all lines of a run add up to, fed one by one. Its size grows with members and
    evaluations, not with steps."""

    members: dict[str, MemberTally] = field(default_factory=dict)
    hub: MemberTally = field(default_factory=MemberTally)
    evaluations: list[Record] = field(default_factory=list)
    rounds: int = 0
    missed: int = 0
    errors: list[str] = field(default_factory=list)
    t: float = 0.0

    def add(self, record: Record) -> None:
        """Takes in one record. Kinds that are not known here are left alone."""
        self.t = max(self.t, record["t"])
        kind, member = record["kind"], record["member"]
        if kind == "step":
            self._of(member).add_step(record)
        elif kind == "eval":
            self.evaluations.append(record)
        elif kind == "round":
            self.rounds += 1
            self._add_round(record)
        elif kind == "event":
            self._add_event(record)

    def add_all(self, records: Iterable[Record]) -> Self:
        """Takes in all of them and returns itself."""
        for record in records:
            self.add(record)
        return self

    def lost(self) -> list[str]:
        """Members that the hub has given up and that did not come back."""
        return [name for name, member in self.members.items() if member.standing == "gone"]

    def unfinished(self) -> list[str]:
        """Members that have neither finished nor taken their leave; after a run, the lost ones."""
        return [name for name, member in self.members.items() if member.standing not in _OVER]

    def _of(self, member: str) -> MemberTally:
        return self.hub if member == HUB else self.members.setdefault(member, MemberTally())

    def _add_round(self, record: Record) -> None:
        self.missed += len(record.get("missing") or []) + _cut(record, "missing")
        self.hub.add_usage(record)
        for name, share, _ in record.get("cuts") or []:
            self._of(name).cut += share
        for name in record.get("members") or []:
            member = self.members.get(name)
            if member is not None and member.standing == "late":
                member.standing, member.reason = "joined", ""

    def _add_event(self, record: Record) -> None:
        event, reason = str(record.get("event")), str(record.get("reason") or "")
        about = str(record.get("about") or record["member"])
        if event == "error":
            self.errors.append(f"{about}: {reason}")
        if event == "late":
            self._of(about).late += 1
        # What changes nothing about whether a member is there: an overrun, a full disk, somebody
        # else refused under its name, and what the hub says after the member's own last word.
        if event in _STANDINGS and self._of(about).standing != "finished":
            self._of(about).standing, self._of(about).reason = event, reason


_STANDINGS = ("joined", "started", "late", "gone", "back", "left", "finished")
_OVER = ("finished", "left")


def _value(record: Record, key: str) -> float:
    value = record.get(key)
    return value if isinstance(value, int | float) else 0


def _cut(record: Record, key: str) -> int:
    cut = record.get("cut")
    return int(_value(cut, key)) if isinstance(cut, dict) else 0
