"""Orders of people to a hub that is running. Values only: who may give them, and over what, is the
driver's (training/orders.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Answer = Mapping[str, Any]
"""JSON; "error" and "hint" where the order was refused."""


@dataclass(frozen=True)
class Order:
    """What a hub is to do: the words of the command, without the run folder. `answer` is to be
    called once."""

    words: tuple[str, ...]
    answer: Callable[[Answer], None]

    def refuse(self, why: str, way_out: str = "") -> None:
        self.answer({"error": why, "hint": way_out})
