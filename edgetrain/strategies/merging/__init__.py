"""Merge rules by name, as a job's `strategy.merge` spells them: "median", "multi-krum(2, 5)".

The table is data; a rule is built by `parse`. Until then neither numpy nor anything else that is
heavy is loaded, so that the command line can list the table at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgetrain import extensions
from edgetrain.errors import ConfigError
from edgetrain.strategies.spelling import check_count, number, split, whole

if TYPE_CHECKING:
    from edgetrain.strategies.merging.rule import RoundRule, SliceRule


@dataclass(frozen=True)
class RuleRow:
    """A row of the table."""

    name: str
    spelling: str
    """Name with its arguments; those in [] may be left out."""
    arguments: tuple[int, int]
    """Fewest and most arguments."""
    weighs: bool
    """Whether it can weigh members. Other rules count each once: a member that states its own
    weight could state more than all others together."""
    elementwise: bool
    """Whether it judges each element separately, over all members."""
    sum_only: bool
    """Whether it reads no more of a round than the (weighted) sum of its contributions. Such a rule
    goes with contributions that are masked, or that only mean something once they are added."""
    summary: str
    source: str
    own: type[Any] | None = None
    """The class of a user's own rule."""


_ROWS = (
    RuleRow(
        "mean", "mean", (0, 0), True, True, True,
        "the (weighted) mean; one member that lies can make it anything",
        "McMahan et al., AISTATS 2017",
    ),
    RuleRow(
        "median", "median", (0, 0), False, True, False,
        "each element's median: tolerates any minority of members that lie",
        "Yin et al., ICML 2018",
    ),
    RuleRow(
        "trimmed-mean", "trimmed-mean(share)", (1, 1), False, True, False,
        "each element's mean without the lowest and the highest share of members",
        "Yin et al., ICML 2018",
    ),
    RuleRow(
        "krum", "krum(f)", (1, 1), False, False, False,
        "the one contribution that is closest to its neighbours: tolerates f that lie",
        "Blanchard et al., NeurIPS 2017",
    ),
    RuleRow(
        "multi-krum", "multi-krum(f[, m])", (1, 2), False, False, False,
        "the mean of the m contributions that krum likes best (m: members - f - 2)",
        "Blanchard et al., NeurIPS 2017; Damaskinos et al., MLSys 2019",
    ),
    RuleRow(
        "centered-clip", "centered-clip(tau[, iterations])", (1, 2), False, False, False,
        "the mean of the way from a central contribution, no member's longer than tau",
        "Karimireddy et al., ICML 2021",
    ),
    RuleRow(
        "norm-clip", "norm-clip(tau)", (1, 1), True, False, False,
        "the mean of contributions, longer ones shortened to tau",
        "Sun et al., Can You Really Backdoor Federated Learning?, 2019",
    ),
    RuleRow(
        "norm-bound", "norm-bound(tau)", (1, 1), True, False, False,
        "the mean of contributions that are no longer than tau",
        "Sun et al., Can You Really Backdoor Federated Learning?, 2019",
    ),
)  # fmt: skip

TABLE: dict[str, RuleRow] = {row.name: row for row in _ROWS}


def find(text: str) -> RuleRow:
    """The row that a spelling belongs to; ConfigError with the near miss."""
    return _split(text)[0]


def parse(text: str, keeps_late: bool = True) -> SliceRule | RoundRule:
    """A fresh rule; ConfigError names what is wrong with the spelling or a value.

    A `tau` is a length in the units of contributions, or, as in "norm-clip(2x)", a multiple of the
    round's median.
    """
    row, arguments = _split(text)
    if row.own is not None:
        rule = extensions.build("merge rule", row.name, arguments, row.own)
        rule.keeps_late = keeps_late
        return rule  # type: ignore[no-any-return]  # `testing.check_merge_rule` looks at it
    check_count(row.name, row.spelling, arguments, *row.arguments)
    if row.name == "mean":
        from edgetrain.strategies.merging.rule import Mean

        return Mean(keeps_late)
    from edgetrain.strategies.merging import distance, elementwise

    match row.name:
        case "median":
            return elementwise.Median(keeps_late)
        case "trimmed-mean":
            share = number(row.name, "share", arguments[0], 0.0, 0.5)
            return elementwise.TrimmedMean(share, keeps_late)
        case "krum":
            return distance.Krum(whole(row.name, "f", arguments[0], 0), 1, keeps_late)
        case "multi-krum":
            f, *rest = arguments
            chosen = whole(row.name, "m", rest[0], 1) if rest else None
            return distance.Krum(whole(row.name, "f", f, 0), chosen, keeps_late)
        case "centered-clip":
            tau, *rest = arguments
            turns = whole(row.name, "iterations", rest[0], 1) if rest else distance.ITERATIONS
            return distance.CenteredClip(_length(row, tau), turns, keeps_late)
        case "norm-clip":
            return distance.NormClip(_length(row, arguments[0]), keeps_late)
        case _:
            return distance.NormBound(_length(row, arguments[0]), keeps_late)


def sum_rule() -> SliceRule:
    """A fresh rule that adds contributions up, each times its weight: what `mean` is where members
    are out of step, and the closing rule says what each counts."""
    from edgetrain.strategies.merging.rule import ScaledSum

    return ScaledSum()


def _split(text: str) -> tuple[RuleRow, list[str]]:
    name, arguments = split(text)
    found: Any = extensions.find("merge rule", name, TABLE, type)
    return found if name in TABLE else _own_row(name, found), arguments


def _own_row(name: str, cls: type[Any]) -> RuleRow:
    """The row of a user's own rule, from its class. What it does not say is what promises least."""
    weighs, by_element, sums = (
        bool(getattr(cls, key, False)) for key in ("weighs", "elementwise", "sum_only")
    )
    summary = (cls.__doc__ or "").partition("\n")[0]
    return RuleRow(name, name, (0, 0), weighs, by_element, sums, summary, cls.__module__, cls)


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
