"""The run folder: the one interface between running and looking.

    runs/20260131-142501-digits/
        job.toml           the job as run, every key
        environment.json   software and machine
        metrics.jsonl      what happened, line by line (see metrics)
        summary.json       what came of it
        *.png              pictures

`compare` makes a folder of run folders, with a job, a summary and a picture of its own. Here a
folder is made, its files are written and read, and a run is summed up; nothing is shown and nothing
is trained. Keys and units: docs/run-folder.md. Only the standard library at import.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import time
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from edgetrain.runs import environment
from edgetrain.runs.environment import Meter
from edgetrain.errors import ConfigError
from edgetrain.runs.metrics.log import MemberTally, MetricsLog, Record, Tally, figures, read

__all__ = [
    "Meter",
    "MetricsLog",
    "create",
    "create_inside",
    "metrics_path",
    "reached",
    "read_job",
    "read_metrics",
    "read_summary",
    "runs_in",
    "summarise",
    "to_toml",
    "write_environment",
    "write_job",
    "write_summary",
]

JOB, ENVIRONMENT, METRICS, SUMMARY = "job.toml", "environment.json", "metrics.jsonl", "summary.json"
_ROOM_BYTES = 1 << 20

# --- making a folder ---


def create(root: Path | str, name: str, *, now: time.struct_time | None = None) -> Path:
    """A new folder root/<YYYYmmdd-HHMMSS>-<name>, its parents made too.

    Whoever else starts in the same second gets another one (-2, -3, …). Raises ConfigError if the
    folder cannot be made or its disk is full.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", now or time.localtime())
    base = f"{stamp}-{_file_name(name)}"
    for attempt in range(1, 10_000):
        try:
            return _make(Path(root) / (base if attempt == 1 else f"{base}-{attempt}"))
        except FileExistsError:
            continue
    raise ConfigError(f"cannot make a run folder: {Path(root) / base} is taken 9,999 times")


def create_inside(folder: Path, name: str) -> Path:
    """The folder of one run of a comparison: folder/<name>. Raises ConfigError if it is there."""
    try:
        return _make(folder / _file_name(name))
    except FileExistsError:
        raise ConfigError(
            f"two runs of {folder} would both be called '{_file_name(name)}'", "name them apart"
        ) from None


def _make(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
        free = shutil.disk_usage(path).free
    except FileExistsError:
        if path.parent.is_dir():
            raise
        raise ConfigError(f"cannot make {path}: {path.parent} is a file") from None
    except OSError as error:
        raise _cannot_write(path, error) from None
    if free < _ROOM_BYTES:
        path.rmdir()
        raise _cannot_write(path, OSError(errno.ENOSPC, f"only {free} bytes are left on its disk"))
    return path


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    way_out = "free some space, or choose" if full else "choose"
    return ConfigError(
        f"cannot write {path}: {error.strerror}", f"{way_out} another folder for runs"
    )


def _file_name(name: str) -> str:
    """Letters, digits, '.', '_' and '-' of the name; never hidden, never empty, never too long."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "run"


# --- its files ---


def metrics_path(folder: Path) -> Path:
    """Where the run's MetricsLog writes."""
    return folder / METRICS


def write_job(folder: Path, job: Mapping[str, Any]) -> None:
    """job.toml: the job as run, all keys and defaults in it."""
    _replace(folder / JOB, to_toml(job))


def write_environment(folder: Path) -> None:
    """environment.json, as `environment.capture` finds it now."""
    _replace(folder / ENVIRONMENT, json.dumps(environment.capture(), indent=2) + "\n")


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """summary.json, all of it or none: a reader never sees half. NaN and infinity become null."""
    _replace(folder / SUMMARY, json.dumps(_plain(summary), indent=2, allow_nan=False) + "\n")


def read_job(folder: Path) -> dict[str, Any]:
    """job.toml, or {} where there is none. Raises ConfigError if it is damaged."""
    try:
        return tomllib.loads((folder / JOB).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder / JOB} is not TOML: {error}") from None


def read_summary(folder: Path) -> dict[str, Any] | None:
    """summary.json, or None where a run is not over. Raises ConfigError if it is damaged."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{folder / SUMMARY} is not JSON: {error}") from None
    if not isinstance(summary, dict):
        raise ConfigError(f"{folder / SUMMARY} holds no summary")
    return summary


def read_metrics(folder: Path, kind: str | None = None) -> Iterable[Record]:
    """The run's records, or those of one kind, in file order; unreadable lines are left out."""
    return read(metrics_path(folder), kind)


def runs_in(folder: Path) -> list[Path]:
    """The run folders of a comparison in its order, or [folder] if it is a run itself.

    The order is that of `runs` in the comparison's summary, else of creation. Raises ConfigError
    if there is no run at all.
    """
    if (folder / METRICS).exists():
        return [folder]
    inside = [path.parent for path in folder.glob(f"*/{METRICS}")]
    if not inside:
        raise ConfigError(
            f"{folder} is no run folder: no {METRICS} in it", "give one that `edgetrain run` made"
        )
    listed = (read_summary(folder) or {}).get("runs")
    order = {name: place for place, name in enumerate(listed)} if isinstance(listed, list) else {}
    return sorted(
        inside,
        key=lambda run: (order.get(run.name, len(order)), _made_at(run), run.name),
    )


def _made_at(run: Path) -> float:
    job = run / JOB
    return job.stat().st_mtime if job.exists() else math.inf


def _replace(path: Path, text: str) -> None:
    """Writes the whole file and then puts it in place, so that it is never seen half-written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --- TOML ---

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def to_toml(table: Mapping[str, Any]) -> str:
    """TOML of nested tables of text, numbers, booleans, lists and tables; tomllib reads it back.

    A key whose value is None is left out, since TOML has no null. Raises ConfigError for values
    that TOML cannot hold.
    """
    return "\n".join(_toml_table(table, ())).strip("\n") + "\n"


def _toml_table(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lists = {key: value for key, value in table.items() if not path and _is_tables(value)}
    plain = {
        key: value
        for key, value in table.items()
        if not isinstance(value, Mapping) and key not in lists
    }
    lines = [
        f"{_toml_key(key)} = {_toml_value(value, (*path, key))}"
        for key, value in plain.items()
        if value is not None
    ]
    inner = [(key, value) for key, value in table.items() if isinstance(value, Mapping)]
    if path and (lines or not inner):
        lines = ["", f"[{'.'.join(map(_toml_key, path))}]", *lines]
    for key, value in inner:
        lines += _toml_table(value, (*path, key))
    for key, tables in lists.items():
        for item in tables:
            lines += ["", f"[[{_toml_key(key)}]]"]
            lines += [
                f"{_toml_key(name)} = {_toml_value(value, (key, name))}"
                for name, value in item.items()
                if value is not None
            ]
    return lines


def _is_tables(value: Any) -> bool:
    """Whether this is written [[key]], a table for each item."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.match(key) else _toml_text(key)


def _toml_text(text: str) -> str:
    escaped = (
        _ESCAPES.get(char) or (f"\\u{ord(char):04x}" if ord(char) < 32 or char == "\x7f" else char)
        for char in text
    )
    return '"' + "".join(escaped) + '"'


def _toml_value(value: Any, path: tuple[str, ...]) -> str:
    # The base classes' own spelling: NumPy's float64 and an enum of ints spell themselves else.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, str):
        return _toml_text(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item, path) for item in value) + "]"
    if isinstance(value, Mapping):
        items = (
            f"{_toml_key(key)} = {_toml_value(item, (*path, key))}"
            for key, item in value.items()
            if item is not None
        )
        return "{ " + ", ".join(items) + " }"
    raise ConfigError(
        f"{'.'.join(path)} = {value!r} cannot be written as TOML",
        "use text, numbers, booleans, lists and tables",
    )


# --- summing up ---


def summarise(folder: Path, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The summary of a run out of its job and its metrics; docs/run-folder.md explains each key.

    `extra` is what only the driver knows (name, metric, better, target, delay, emulation, status,
    joules_source …); what it holds stands, whatever the metrics say. Writes nothing.
    """
    extra = dict(extra or {})
    summary = _from_job(folder, read_job(folder)) | extra
    tally = Tally().add_all(read_metrics(folder))
    summary.setdefault("members", len(tally.members))
    summary |= _speed(tally) | _quality(tally, summary) | _cost(tally)
    return summary | _ending(tally, extra.get("status")) | extra


def reached(value: Any, target: float, better: str) -> bool:
    """Whether a figure is at the target or beyond it, in the direction that is better."""
    if not isinstance(value, int | float):
        return False
    return value >= target if better == "higher" else value <= target


def _from_job(folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    fleet, strategy = job.get("fleet", {}), job.get("strategy", {})
    known = {
        "name": folder.name,
        "strategy": strategy.get("name"),
        "task": job.get("task"),
        "metric": "accuracy",
        "better": "higher",
        "target": None,
        "members": fleet.get("members"),
        "network": fleet.get("network"),
        "device": fleet.get("device", fleet.get("devices")),
        "every": strategy.get("every"),
        "delay": strategy.get("delay"),
        "emulation": None,
        "joules_source": None,
    }
    return {key: value for key, value in known.items() if key != "members" or value is not None}


def _speed(tally: Tally) -> dict[str, Any]:
    members = [member for member in tally.members.values() if member.step]
    lines = sum(member.lines for member in members)
    rates = [member.step / member.t for member in members if member.t > 0]
    return {
        "steps": max((member.step for member in members), default=0),
        "rounds": tally.rounds,
        "seconds": max((member.t for member in members), default=0.0),
        "steps_per_second": sum(rates) / len(rates) if rates else None,
        "compute_s": _mean(sum(member.compute_s for member in members), lines),
        "wait_s": _mean(sum(member.wait_s for member in members), lines),
        "overhead_s": _mean(sum(member.overhead_s for member in members), lines),
    }


def _quality(tally: Tally, summary: Mapping[str, Any]) -> dict[str, Any]:
    evaluations = sorted(tally.evaluations, key=lambda record: record["t"])
    metric, target, better = summary["metric"], summary["target"], summary["better"]
    first: Record = {}
    if target is not None:
        hits = (record for record in evaluations if reached(record.get(metric), target, better))
        first = next(hits, {})
    return {
        "target_seconds": first.get("t"),
        "target_steps": first.get("step"),
        "final": figures(evaluations[-1]) if evaluations else {},
    }


def _cost(tally: Tally) -> dict[str, Any]:
    members = [member for member in tally.members.values() if member.step]
    joules = [member.joules.total for member in members if member.joules is not None]
    return {
        "sent_bytes": int(sum(member.sent_bytes.total for member in members)),
        "received_bytes": int(sum(member.received_bytes.total for member in members)),
        # A sum over some of the members would look like a saving.
        "joules": sum(joules) if members and len(joules) == len(members) else None,
        "cpu_s": sum(member.cpu_s.total for member in members),
        "peak_bytes": max((member.peak_bytes for member in members), default=0),
        "hub": _hub(tally.hub),
    }


def _hub(hub: MemberTally) -> dict[str, Any]:
    return {
        "sent_bytes": int(hub.sent_bytes.total),
        "received_bytes": int(hub.received_bytes.total),
        "cpu_s": hub.cpu_s.total,
        "peak_bytes": hub.peak_bytes,
    }


def _ending(tally: Tally, status: str | None) -> dict[str, Any]:
    lost, unfinished = tally.lost(), tally.unfinished()
    if status is None:
        over = set(unfinished) <= set(lost) and len(lost) < len(tally.members)
        status = "finished" if over else "failed" if tally.errors else "interrupted"
    return {
        "status": status,
        # In a run that came to its end, who did not is lost, whether the hub noticed or not.
        "members_lost": unfinished if status == "finished" else lost,
        "contributions_missed": tally.missed,
        "contributions_late": sum(member.late for member in tally.members.values()),
        "contributions_cut": {
            name: member.cut for name, member in sorted(tally.members.items()) if member.cut
        },
        "errors": tally.errors[:10],
    }


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None
