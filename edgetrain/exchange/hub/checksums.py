"""Whose base is the right one: the checksums that the hub knows, and those that members tell.

With a displacement strategy the hub has the base and knows its checksum. With a gradient strategy
it has not, and believes what most members say: one that lies, or whose memory is broken, must not
get the others expelled. Knows names and numbers; no round, no time, no message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


class BaseChecksums:
    """Checksums of base by the number of replies in it."""

    def __init__(self, known: Mapping[int, int] | None = None) -> None:
        self._known = dict(known or {})
        self._said: dict[int, dict[str, int]] = {}

    def __getitem__(self, applied: int) -> int:
        return self._known[applied]

    def __len__(self) -> int:
        """How many there are memories of."""
        return len(self._known.keys() | self._said.keys())

    def get(self, applied: int, default: int = 0) -> int:
        """The checksum after so many replies; `default` where nobody knows."""
        return self._known.get(applied, default)

    def items(self) -> Iterable[tuple[int, int]]:
        """What is known, for a journal."""
        return self._known.items()

    def know(self, applied: int, checksum: int) -> None:
        """The hub knows it itself; what members said of it does not matter."""
        self._known[applied] = checksum
        self._said.pop(applied, None)

    def forget(self, applied: int) -> None:
        """Nobody is compared with it any more."""
        self._known.pop(applied, None)
        self._said.pop(applied, None)

    def hear(self, name: str, applied: int, checksum: int, members: int) -> tuple[str, ...]:
        """A member says so; the names of those who, as is known now, said something else.

        Unknown ones are settled once more than half of `members` say the same, or once all have
        spoken: of two that disagree, or where none has a majority, the most frequent and then the
        first is believed, for want of anything better.
        """
        known = self._known.get(applied)
        if known is not None:
            return () if checksum == known else (name,)
        said = self._said.setdefault(applied, {})
        said[name] = checksum
        found, votes = Counter(said.values()).most_common(1)[0]
        if 2 * votes <= members and len(said) < members:
            return ()
        self.know(applied, found)
        return tuple(name for name, value in said.items() if value != found)
