"""Profiles and faults as JSON, to send them to an emulator's process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from edgetrain.fleet.networks.faults import Fault
from edgetrain.fleet.networks.profile import Burst, Direction


def direction_to_json(way: Direction) -> dict[str, Any]:
    return dataclasses.asdict(way)


def direction_from_json(table: Mapping[str, Any]) -> Direction:
    burst = table["burst"]
    return Direction(**{**table, "burst": Burst(**burst) if burst else None})


def faults_to_json(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(fault) for fault in faults]


def faults_from_json(tables: Sequence[Mapping[str, Any]]) -> tuple[Fault, ...]:
    return tuple(
        Fault(**{**table, "members": tuple(table["members"]), "hubs": tuple(table["hubs"])})
        for table in tables
    )
