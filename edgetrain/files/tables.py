"""Tables of plain values, as TOML has them, read into dataclasses that say what each key may hold.

A field's type, and what `key` and `ranged` keep in its metadata, are all there is to say: reading,
errors, the schema for editors and the tables of the documentation follow from them. An error names
the file, the key and the value, and says what is allowed.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field
from pathlib import Path
from typing import Any, TypeVar, Union

from edgetrain.errors import ConfigError, did_you_mean

Table = TypeVar("Table")
LONGEST_SHOWN = 120
"""Characters of a value that an error shows."""
_WORDS = {
    int: "an integer", float: "a number", str: "text", Path: "the name of a file",
    bool: "true or false", dict: "a table",
}  # fmt: skip


def key(default: Any = MISSING, doc: str = "", **more: Any) -> Any:
    """A key with this default, or with what a function (`dict`) makes; without one it has to be
    given. `doc`: a line of explanation, and the way out where the key is missing. `choices`: all
    that it may be. `check(value, where)`: raises ConfigError, and may return the value in another
    spelling; of a list: of each in it. `name`: in the file, where that is not the field's."""
    if doc and "choices" in more:
        doc += f": {', '.join(filter(None, more['choices']))}"
    how: Any = {"default_factory" if callable(default) else "default": default}
    return field(metadata={"doc": doc, **more}, **how)


def ranged(default: Any, low: float, high: float, doc: str = "", unit: str = "") -> Any:
    """A key with a number (or numbers) from `low` to `high`; MISSING: it has to be given."""
    return key(default, doc, low=low, high=high, unit=unit)


def read(
    table: Callable[..., Table],
    values: Mapping[str, Any],
    source: str = "",
    prefix: str = "",
    within: Mapping[str, int] | None = None,
    **given: Any,
) -> Table:
    """A dataclass of the values of its keys; fields in `given` are none. Errors begin with
    `source`, the path of the file, and keys in them with `prefix`. Paths begin at its folder.
    `within`: the largest number in a key, where that is known only now. Raises ConfigError."""
    made: Any = table
    hints, begin = typing.get_type_hints(made), f"{source}: " if source else ""
    specs = {
        spec.metadata.get("name", spec.name): spec
        for spec in dataclasses.fields(made)
        if spec.name not in given
    }
    for name, value in values.items():
        if name not in specs:
            raise ConfigError(f"{begin}no key '{prefix}{name}'", did_you_mean(name, specs))
        spec = specs[name]
        about = {"low": 0, "high": within[name]} if within and name in within else spec.metadata
        key = _Key(hints[spec.name], about, source, f"{prefix}{name}")
        given[spec.name] = key.taken(key.hint, value, key.name)
    for name, spec in specs.items():
        if spec.name not in given and spec.default is spec.default_factory is MISSING:
            raise ConfigError(f"{begin}{prefix}{name} is missing", spec.metadata.get("doc", ""))
    return table(**given)


@dataclasses.dataclass(frozen=True)
class _Key:
    hint: Any
    about: Mapping[str, Any]
    source: str
    name: str

    def taken(self, hint: Any, value: Any, name: str) -> Any:
        """The value of the key, or what is in it at `name`, as the field has it. ConfigError."""
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if origin in (Union, types.UnionType):  # X | Literal["auto"], X | None
            is_word = value in typing.get_args(inner[1])
            return value if is_word else self.taken(inner[0], value, name)
        if origin in (list, tuple) and isinstance(value, list | tuple):
            return origin(self.taken(inner[0], v, f"{name}[{i}]") for i, v in enumerate(value))
        if origin in (dict, Mapping) and isinstance(value, Mapping):
            return {each: self.taken(inner[1], v, f"{name}.{each}") for each, v in value.items()}
        if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
            made: Any = hint
            return read(made, value, self.source, f"{name}.")
        return value if hint is Any else self._plain(hint, value, name)

    def _plain(self, hint: Any, value: Any, name: str) -> Any:
        where, about = f"{self.source}: {name}" if self.source else name, self.about
        kinds = {float: (int, float), Path: (str,)}.get(hint, (hint,))
        fits = type(value) in kinds and (value != "" or hint is not Path)
        fits = fits or (hint is int and type(value) is float and value.is_integer())
        if not fits or not about.get("low", value) <= value <= about.get("high", value):
            shown = repr(value)
            shown = shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}…"
            said = allowed(self.hint if name == self.name else hint, about)
            raise ConfigError(f"{where} = {shown}", f"allowed is {said}")
        if "choices" in about and value not in about["choices"]:
            raise ConfigError(f"{where} = '{value}'", did_you_mean(value, about["choices"]))
        if "check" in about:
            value = about["check"](value, where) or value
        return Path(self.source).parent / Path(value).expanduser() if hint is Path else hint(value)


def allowed(hint: Any, about: Mapping[str, Any]) -> str:
    """The allowed values of a key, in words."""
    kind, word = kind_of(hint)
    what = _WORDS.get(kind, "a table")
    if kind in (list, tuple):
        inner = typing.get_args(hint)[0]
        items = {str: "texts", int: "integers", Path: "files"}.get(inner, "tables")
        what = f"a list of {items}"
    what += f" or '{word}'" if word else ""
    if "low" in about:
        what += f" from {about['low']:g} to {about['high']:g} {about.get('unit', '')}".rstrip()
    return what


def kind_of(hint: Any) -> tuple[Any, str]:
    """The type of a key's value, and the word that may stand there instead; "": none."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return kind_of(inner[0])[0], next(iter(typing.get_args(inner[1])), "")
    return origin or hint, ""
