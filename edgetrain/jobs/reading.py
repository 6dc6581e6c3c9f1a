"""The job: one file that means the same simulated, emulated and real.

Reads TOML and `key=value` overrides into frozen dataclasses; every key is known, typed and ranged,
and an unknown one names the near miss. Nothing is looked up here (no profile, no task, no
strategy): what a name stands for is known where it is used. Neither torch nor zmq is imported.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, nearest
from edgetrain.files.tables import LONGEST_SHOWN, read
from edgetrain.files.toml import MOST_DEPTH, parse_toml, read_toml
from edgetrain.jobs.job import Job, _sgd


def load(path: str | Path | None, overrides: Iterable[str] = ()) -> Job:
    """A job from a file (None: all defaults) and `key=value` overrides, which win. ConfigError."""
    return parse(_read(path), overrides, str(path or "defaults"))


def parse(table: Mapping[str, Any], overrides: Iterable[str] = (), source: str = "job") -> Job:
    """A job from plain values, as `load`. An override of a whole table (`optimizer=adam`) comes
    before those of its keys, in whatever order they are said."""
    values = {key: dict(v) if isinstance(v, Mapping) else v for key, v in table.items()}
    for path, text in sorted(map(_split, overrides), key=lambda each: len(each[0])):
        _set(values, path, text)
    return read(Job, values, source)


def _read(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return read_toml(Path(path))
    except FileNotFoundError:
        way_out = "`edgetrain init` writes one; a key reads steps=200"
        raise ConfigError(f"no job file '{path}'", way_out) from None


def placed(path: str, beside: Path | None) -> Path:
    """A path in a job: `~` is the home folder, and a relative path begins at the job file's."""
    return (beside or Path()) / Path(path).expanduser()


# -- overrides ------------------------------------------------------------------------------------

_TABLES: dict[str, Any] = {
    name: hint
    for name, hint in typing.get_type_hints(Job).items()
    if dataclasses.is_dataclass(hint)
}
_SHORT = {"strategy": "strategy.name", "privacy": "privacy.unit", "clip": "privacy.clip",
          "partition": "data.partition"}  # fmt: skip
"""Tables and keys that may be said in one word, though others have such a key or none is listed."""


def keys() -> dict[str, dataclasses.Field[Any]]:
    found = {f.name: f for f in dataclasses.fields(Job) if f.name not in _TABLES}
    for name, cls in _TABLES.items():
        found |= {f"{name}.{f.name}": f for f in dataclasses.fields(cls)}
    return found


def _full_key(key: str) -> str:
    """`network` for `fleet.network`: a last part will do where it is the only one."""
    known = keys()
    head = key.split(".")[0]
    if (
        key in known
        or head == "data"
        or key.startswith("servers.data")
        or key.startswith("train.optimizer")
    ):
        return key
    if key in _SHORT:
        return _SHORT[key]
    if key.startswith("optimizer") or head == "lr":
        return "train.optimizer.lr" if head == "lr" else f"train.{key}"
    short = [full for full in known if full.rsplit(".", 1)[-1] == key]
    if len(short) == 1:
        return short[0]
    if short:
        raise ConfigError(f"the key '{key}' is in several tables", " or ".join(short))
    choices = {"lr", "rtt", *known, *(full.rsplit(".", 1)[-1] for full in known)}
    if near := nearest(key, choices):
        raise ConfigError(f"no key '{key}' in a job", near)
    raise ConfigError(
        f"no key '{key}' in a job",
        f"the optimizer's is optimizer.{key}=…, the task's data.{key}=… (docs/reference/jobs.md)",
    )


def _split(override: str) -> tuple[list[str], str]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"'{override}' is not an override", "it reads key=value, as steps=200")
    if key.count(".") >= MOST_DEPTH:
        raise ConfigError(
            f"'{key[:LONGEST_SHOWN]}…' has {key.count('.') + 1} parts",
            f"a key has at most {MOST_DEPTH}, as strategy.codec has two",
        )
    if key.strip() in ("rtt", "fleet.rtt"):
        key, text = "network", f"rtt-{text.strip().removesuffix('ms').strip()}ms"
    path, text = _full_key(key.strip()).split("."), text.strip()
    if path == ["train", "optimizer"] and not text.startswith("{"):
        text = f'{{ name = "{text}" }}'  # another optimizer has other settings
    return path, text


def _set(values: dict[str, Any], path: list[str], text: str) -> None:
    *tables, last = path
    for depth, part in enumerate(tables):
        inner = values.get(part)
        if inner is None and tables[: depth + 1] == ["train", "optimizer"]:
            inner = _sgd()
        values[part] = values = dict(inner or {})
    values[last] = _value(text)


def _value(text: str) -> Any:
    """A TOML value where it is one, else the text itself: names need no quotes."""
    try:
        return parse_toml(f"v = {text}")["v"]
    except ValueError:
        return text
