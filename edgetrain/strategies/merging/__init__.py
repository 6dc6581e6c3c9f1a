"""Merge rules by name, as a job's `strategy.merge` spells them: "median", "multi-krum(2, 5)".

The table is data; a rule is built by `parse`. Until then neither numpy nor anything else that is
heavy is loaded, so that the command line can list the table at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from edgetrain.strategies.merging.rule import RoundRule, SliceRule


@dataclass(frozen=True)
class RuleRow:
    """A row of the table."""

    name: str
    spelling: str
    """With its arguments; those in [] may be left out."""
    weighs: bool
    """Whether it can weigh members. The others count each once: who can say what it weighs could
    say that it weighs more than all others together."""
    elementwise: bool
    """Whether it looks at each element on its own, among all members."""
    sum_only: bool
    """Whether it reads no more of a round than the (weighted) sum of its contributions. Such a rule
    goes with contributions that are masked, or that only mean something once they are added."""
    summary: str
    source: str


_ROWS = (
    RuleRow(
        "mean", "mean", True, True, True,
        "the (weighted) mean; one member that lies can make it anything",
        "McMahan et al., AISTATS 2017",
    ),
    RuleRow(
        "median", "median", False, True, False,
        "each element's median: bears any minority of members that lie",
        "Yin et al., ICML 2018",
    ),
    RuleRow(
        "trimmed-mean", "trimmed-mean(share)", False, True, False,
        "each element's mean without the lowest and the highest share of members",
        "Yin et al., ICML 2018",
    ),
    RuleRow(
        "krum", "krum(f)", False, False, False,
        "the one contribution that is closest to its neighbours: bears f that lie",
        "Blanchard et al., NeurIPS 2017",
    ),
    RuleRow(
        "multi-krum", "multi-krum(f[, m])", False, False, False,
        "the mean of the m contributions that krum likes best (m: members - f - 2)",
        "Blanchard et al., NeurIPS 2017; Damaskinos et al., MLSys 2019",
    ),
    RuleRow(
        "centered-clip", "centered-clip(tau[, iterations])", False, False, False,
        "the mean of the way from a central contribution, no member's longer than tau",
        "Karimireddy et al., ICML 2021",
    ),
    RuleRow(
        "norm-clip", "norm-clip(tau)", True, False, False,
        "the mean of contributions, longer ones shortened to tau",
        "Sun et al., Can You Really Backdoor Federated Learning?, 2019",
    ),
    RuleRow(
        "norm-bound", "norm-bound(tau)", True, False, False,
        "the mean of contributions that are no longer than tau",
        "Sun et al., Can You Really Backdoor Federated Learning?, 2019",
    ),
)  # fmt: skip

TABLE: dict[str, RuleRow] = {row.name: row for row in _ROWS}

_SPELLED = re.compile(r"\s*([A-Za-z][A-Za-z0-9-]*)\s*(?:\(([^()]*)\))?\s*\Z")


def find(text: str) -> RuleRow:
    """The row that a spelling belongs to; ConfigError with the near miss."""
    return _split(text)[0]


def parse(text: str, keeps_late: bool = True) -> SliceRule | RoundRule:
    """A fresh rule; ConfigError names what is wrong with the spelling or a value.

    A `tau` is a length in the units of contributions, or, as in "norm-clip(2x)", a multiple of the
    round's median.
    """
    row, arguments = _split(text)
    from edgetrain.strategies.merging import distance, elementwise
    from edgetrain.strategies.merging.rule import Mean

    match row.name:
        case "mean":
            _none(row, arguments)
            return Mean(keeps_late)
        case "median":
            _none(row, arguments)
            return elementwise.Median(keeps_late)
        case "trimmed-mean":
            (share,) = _count(row, arguments, 1, 1)
            return elementwise.TrimmedMean(_number(row, "share", share, 0.0, 0.5), keeps_late)
        case "krum":
            (f,) = _count(row, arguments, 1, 1)
            return distance.Krum(_whole(row, "f", f, 0), 1, keeps_late)
        case "multi-krum":
            f, *rest = _count(row, arguments, 1, 2)
            chosen = _whole(row, "m", rest[0], 1) if rest else None
            return distance.Krum(_whole(row, "f", f, 0), chosen, keeps_late)
        case "centered-clip":
            tau, *rest = _count(row, arguments, 1, 2)
            turns = _whole(row, "iterations", rest[0], 1) if rest else distance.ITERATIONS
            return distance.CenteredClip(_length(row, tau), turns, keeps_late)
        case "norm-clip":
            (tau,) = _count(row, arguments, 1, 1)
            return distance.NormClip(_length(row, tau), keeps_late)
        case _:
            (tau,) = _count(row, arguments, 1, 1)
            return distance.NormBound(_length(row, tau), keeps_late)


def _split(text: str) -> tuple[RuleRow, list[str]]:
    found = _SPELLED.match(text)
    name = found[1] if found else text.strip()
    if found is None or name not in TABLE:
        raise ConfigError(f"no merge rule '{name}'", did_you_mean(name, TABLE))
    inside = found[2]
    return TABLE[name], [] if inside is None else [word.strip() for word in inside.split(",")]


def _none(row: RuleRow, arguments: list[str]) -> None:
    if arguments:
        raise ConfigError(f"'{row.name}' takes no arguments, not ({', '.join(arguments)})")


def _count(row: RuleRow, arguments: list[str], least: int, most: int) -> list[str]:
    if not least <= len(arguments) <= most:
        given = f"({', '.join(arguments)})" if arguments else "none"
        raise ConfigError(f"{row.name} with arguments {given}", f"it reads {row.spelling}")
    return arguments


def _number(row: RuleRow, what: str, text: str, low: float, high: float) -> float:
    """low <= value < high."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value < high:
        raise ConfigError(
            f"{row.name}: {what} = {text}", f"allowed are {low:g} to less than {high:g}"
        )
    return value


def _whole(row: RuleRow, what: str, text: str, low: int) -> int:
    if not (text.isascii() and text.isdigit() and low <= int(text) <= 100_000):
        raise ConfigError(
            f"{row.name}: {what} = {text}", f"allowed are whole numbers from {low} to 100000"
        )
    return int(text)


def _length(row: RuleRow, text: str) -> tuple[float, bool]:
    """A length, and whether it is a multiple of the median."""
    number = text.removesuffix("x")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise ConfigError(
            f"{row.name}: tau = {text}",
            "allowed are a length greater than 0, as 1.5, or a multiple of the median, as 2x",
        )
    return value, text != number
