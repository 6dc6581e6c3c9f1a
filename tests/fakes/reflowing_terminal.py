"""A terminal that breaks its rows again when it gets narrower or wider, as most do."""

from __future__ import annotations

import io
import re


class ReflowingTerminal(io.StringIO):
    """Shows what rich's live display writes: text, line feeds, cursor up, erase a row.

    A row is (text, whether the next one is its continuation).
    """

    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        self.width, self.height = width, height
        self._rows: list[tuple[str, bool]] = [("", False)]
        self._row = self._column = 0

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> list[str]:
        """The rows with something on them, those that have scrolled away, too."""
        return [text.rstrip() for text, _ in self._rows if text.strip()]

    def write(self, text: str) -> int:
        for code in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|[\r\n]|[^\x1b\r\n]+", text):
            self._obey(code)
        return len(text)

    def _obey(self, code: str) -> None:
        text, _ = self._rows[self._row]
        if code == "\n":
            self._row, self._column = self._row + 1, 0
            self._rows += [("", False)] * (self._row == len(self._rows))
        elif code == "\r":
            self._column = 0
        elif code.endswith("A"):
            top = max(0, len(self._rows) - self.height)
            self._row = max(top, self._row - int(code[2:-1] or 1))
        elif code == "\x1b[2K":
            self._rows[self._row] = ("", False)
        elif not code.startswith("\x1b"):
            end = self._column + len(code)
            assert end <= self.width, f"a row of {end} in {self.width} columns"
            text = text.ljust(self._column)[: self._column] + code + text[end:]
            self._rows[self._row], self._column = (text, False), end

    def resize(self, width: int) -> None:
        """Join the rows that belong together, and break them at the new width."""
        lines, cursor, continues = [], (0, 0), False
        for place, (text, more) in enumerate(self._rows):
            before = lines.pop() if continues else ""
            if place == self._row:
                cursor = len(lines), len(before) + self._column
            lines.append(before + text)
            continues = more
        self.width, self._rows = width, []
        for place, line in enumerate(lines):
            pieces = [line[at : at + width] for at in range(0, max(1, len(line)), width)]
            if place == cursor[0]:
                down = min(cursor[1] // width, len(pieces) - 1)
                self._row = len(self._rows) + down
                self._column = cursor[1] - down * width
            last = len(pieces) - 1
            self._rows += [(piece, at < last) for at, piece in enumerate(pieces)]
