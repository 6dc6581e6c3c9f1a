"""Outer rules, the part of a strategy that says what the hub makes of a round's merged contribution
before it goes to all: as it is, or a step of a second optimizer, whose state lives at the hub.

The table is data and imports no numpy; `outer_rules` has what its rows build.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgetrain import extensions
from edgetrain.strategies.spelling import Parameter, arguments_of, spelled, split

if TYPE_CHECKING:
    from edgetrain.strategies.outer_rules import OuterRule


@dataclass(frozen=True)
class OuterRow:
    """A row of the table."""

    name: str
    parameters: tuple[Parameter, ...]
    summary: str
    source: str

    @property
    def spelling(self) -> str:
        return spelled(self.name, [f"{each.name} = {each.default:g}" for each in self.parameters])


def _rate(default: float) -> Parameter:
    return Parameter("lr", 1e-9, 1000.0, default)


def _decay(name: str, default: float) -> Parameter:
    return Parameter(name, 0.0, 1.0, default)


_EPS = Parameter("eps", 1e-12, 1000.0, 1e-3)
_MOMENTS = (_decay("b1", 0.9), _decay("b2", 0.99), _EPS)

_ROWS = (
    OuterRow(
        "sgd", (_rate(1.0),),
        "the merged contribution times lr; sgd(1) is having no outer rule",
        "Reddi et al., ICLR 2021",
    ),
    OuterRow(
        "momentum", (_rate(1.0), _decay("m", 0.9)),
        "momentum over rounds",
        "Hsu et al., 2019",
    ),
    OuterRow(
        "nesterov", (_rate(0.7), _decay("m", 0.9)),
        "Nesterov's momentum over rounds",
        "Douillard et al., DiLoCo, 2023",
    ),
    OuterRow(
        "adam", (_rate(0.03), *_MOMENTS),
        "Adam over rounds, without bias correction",
        "Reddi et al., ICLR 2021",
    ),
    OuterRow(
        "yogi", (_rate(0.03), *_MOMENTS),
        "adam whose second moment grows no faster than it shrinks",
        "Reddi et al., ICLR 2021",
    ),
    OuterRow(
        "adagrad", (_rate(0.03), _EPS),
        "steps divided by the length of all before them, elementwise",
        "Reddi et al., ICLR 2021",
    ),
)  # fmt: skip

TABLE: dict[str, OuterRow] = {row.name: row for row in _ROWS}


def parse(text: str) -> OuterRule:
    """A fresh rule, as a job's `strategy.outer` spells it: "nesterov(0.7, 0.9)", or "nesterov" for
    the defaults. ConfigError names what is wrong with the spelling or a value."""
    name, words = split(text)
    from edgetrain.strategies.outer_rules import RULES, OuterRule

    cls: Any = extensions.find("outer rule", name, RULES, OuterRule)
    if name not in TABLE:
        own: OuterRule = extensions.build("outer rule", name, words, cls)
        own.name = name
        return own
    row = TABLE[name]
    return RULES[name](*arguments_of(name, row.spelling, row.parameters, words))
