"""Lay out columns of short cells within a width, as plain or rich text.

Knows nothing of runs. rich is imported only for rich text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgetrain.runs.reports.units import ABSENT

if TYPE_CHECKING:
    from rich.text import Text


@dataclass(frozen=True)
class Column:
    """One column. Rank 0 is always shown; of the others, the highest rank is left out first.

    styles: empty, or a rich style for each cell. The first column is aligned left, others right.
    """

    heading: str
    cells: tuple[str, ...]
    rank: int = 0
    styles: tuple[str, ...] = ()
    heading_below: str = ""

    @property
    def width(self) -> int:
        return max(map(len, (self.heading, self.heading_below, *self.cells)))


def column(
    heading: str,
    cells: Iterable[str],
    *,
    below: str = "",
    rank: int = 0,
    styles: Iterable[str] = (),
) -> Column:
    """A column with cells from any iterable; `below` is a second line of heading."""
    return Column(heading, tuple(cells), rank, tuple(styles), below)


def optional(heading: str, cells: Iterable[str], **more: Any) -> list[Column]:
    """The column, if a cell says something: [] where all are absent, empty or 0."""
    shown = column(heading, cells, **more)
    return [shown] if any(cell not in ("", "0", ABSENT) for cell in shown.cells) else []


def total_width(columns: Sequence[Column], gap: int) -> int:
    """Characters of all columns, with `gap` blanks between them."""
    return sum(column.width for column in columns) + gap * max(0, len(columns) - 1)


def fit(columns: Sequence[Column], width: int | None, gap: int) -> list[Column]:
    """The columns that fit `width` characters (None: all), leaving out the highest rank first."""
    kept = list(columns)
    while width is not None and total_width(kept, gap) > width:
        last = max(kept, key=lambda column: column.rank)
        if not last.rank:
            break
        kept.remove(last)
    return kept


def as_text(columns: Sequence[Column], gap: int = 2) -> list[str]:
    """Lines of plain text: one or two of heading, then a line for each row of cells."""
    return ["".join(text for text, _ in line).rstrip() for line in _lines(columns, gap)]


def as_rich(columns: Sequence[Column], gap: int = 2, heading_style: str = "bold") -> Text:
    """Rich text for a terminal. Not a rich Table, which lays all out again at each frame."""
    from rich.text import Text

    lines = _lines(columns, gap, heading_style)
    return Text("\n", no_wrap=True, overflow="ellipsis").join(
        Text.assemble(*line) for line in lines
    )


def _lines(
    columns: Sequence[Column], gap: int, heading_style: str = ""
) -> list[list[tuple[str, str]]]:
    """Lines of (padded cell, style)."""
    two = any(column.heading_below for column in columns)
    # A heading of one line is just above its cells, also beside headings of two lines.
    raised = [column.heading if column.heading_below else "" for column in columns]
    lowest = [column.heading_below or column.heading for column in columns]
    headings = [raised, lowest] if two else [lowest]
    lines = [_line(line, [heading_style] * len(columns), columns, gap) for line in headings]
    for place in range(len(columns[0].cells) if columns else 0):
        cells = [column.cells[place] for column in columns]
        styles = [column.styles[place] if column.styles else "" for column in columns]
        lines.append(_line(cells, styles, columns, gap))
    return lines


def _line(
    cells: Sequence[str], styles: Sequence[str], columns: Sequence[Column], gap: int
) -> list[tuple[str, str]]:
    line = []
    for place, (cell, style, column) in enumerate(zip(cells, styles, columns, strict=True)):
        padded = cell.rjust(column.width) if place else cell.ljust(column.width)
        line += [(" " * gap if place else "", ""), (padded, style)]
    return line
