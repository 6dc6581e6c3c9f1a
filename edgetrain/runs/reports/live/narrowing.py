"""Erase what a narrowed terminal makes of a frame.

Most terminals break rows that have become too long. rich goes up as many rows as it has drawn, so
that the upper rows of the older frame would stay above the next one. xterm and GNU screen cut rows:
there nothing more is erased, because that would be the rows above the frame. Rows that the terminal
has pushed off the screen meanwhile cannot be reached: they stay in its history.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleDimensions, ConsoleRenderable, RenderableType
    from rich.live import Live


def cuts_rows(environ: Mapping[str, str]) -> bool:
    """Whether a narrowed terminal cuts its rows, as far as its environment says."""
    return "STY" in environ or ("XTERM_VERSION" in environ and "TMUX" not in environ)


class Narrowing:
    """A rich.console.RenderHook: erases these rows before anything is printed while `live` shows a
    frame.

    Push it before `live` starts: hooks pushed later put their part in front, and `live` has to go
    up its own rows first.
    """

    def __init__(self, live: Live, *, cuts_rows: bool = False) -> None:
        self._live, self._cuts_rows = live, cuts_rows
        self._drawn: tuple[RenderableType, ConsoleDimensions] | None = None
        """The frame on the terminal, and the terminal's size as it was drawn."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        from rich.control import Control
        from rich.segment import ControlType

        console = self._live.console
        more = self._more_rows(console)
        self._drawn = self._live.renderable, console.size
        up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2))
        return [Control(*up * more), *renderables] if more else renderables

    def _more_rows(self, console: Console) -> int:
        """Rows that the last frame takes now beyond those that it was drawn in."""
        if self._drawn is None or self._cuts_rows:
            return 0
        from rich.segment import Segment

        frame, size = self._drawn
        width = console.width
        if width >= size.width:
            return 0
        segments = console.render(frame, console.options.update_dimensions(*size))
        cells = [Segment.get_line_length(line) for line in Segment.split_lines(segments)]
        return sum((min(each, size.width) - 1) // width for each in cells[: size.height] if each)
