"""The JSON schema of the job file, made from its fields: editors complete and check with it."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from edgetrain.files.tables import kind_of
from edgetrain.jobs.job import Job

_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", dict: "object"}


def schema(table: type[Any] = Job) -> dict[str, Any]:
    """The schema of a job, or of one of its tables: types, ranges, defaults, explanations."""
    hints = typing.get_type_hints(table)
    keys = {spec.name: _key(hints[spec.name], spec) for spec in dataclasses.fields(table)}
    shape = {"type": "object", "properties": keys, "additionalProperties": False}
    return {"description": table.__doc__, **shape}


def _key(hint: Any, spec: dataclasses.Field[Any]) -> dict[str, Any]:
    if dataclasses.is_dataclass(hint):
        return schema(typing.cast(type[Any], hint))
    known: dict[str, Any] = {"description": spec.metadata["doc"]}
    if spec.default is not dataclasses.MISSING:
        known["default"] = spec.default
    kind, word = kind_of(hint)
    if kind is list:
        (inner,) = typing.get_args(hint)
        return known | {"type": "array", "items": {"type": _TYPES[kind_of(inner)[0]]}}
    value: dict[str, Any] = {"type": _TYPES[kind]}
    if "choices" in spec.metadata:
        value["enum"] = list(spec.metadata["choices"])
    if "low" in spec.metadata:
        value |= {"minimum": spec.metadata["low"], "maximum": spec.metadata["high"]}
    return known | ({"anyOf": [value, {"const": word}]} if word else value)
