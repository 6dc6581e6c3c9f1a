"""Which base is the right one: the checksums that the hub knows, and those that members report.

With a strategy whose hub keeps the base, the hub knows its checksum. Otherwise it believes the
majority of the members: a member that lies, or whose memory is broken, must not get the others
expelled. Knows names and numbers; no round, no time, no message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


class BaseChecksums:
    def __init__(self, known: Mapping[int, int] | None = None) -> None:
        self._known = dict(known or {})
        self._reported: dict[int, dict[str, int]] = {}

    def __getitem__(self, applied: int) -> int:
        return self._known[applied]

    def __len__(self) -> int:
        return len(self._known.keys() | self._reported.keys())

    def get(self, applied: int, default: int = 0) -> int:
        """The checksum after `applied` replies; `default` where it is not known."""
        return self._known.get(applied, default)

    def likeliest(self, applied: int) -> int:
        """What is known of a base, or else what most members have reported; 0: nothing."""
        votes = Counter(self._reported.get(applied, {}).values()).most_common(1)
        return self._known.get(applied, votes[0][0] if votes else 0)

    def items(self) -> Iterable[tuple[int, int]]:
        """All that is known, for a journal."""
        return self._known.items()

    def add_known(self, applied: int, checksum: int) -> None:
        """The hub knows this checksum itself, whatever members reported."""
        self._known[applied] = checksum
        self._reported.pop(applied, None)

    def forget_base(self, applied: int) -> None:
        self._known.pop(applied, None)
        self._reported.pop(applied, None)

    def add_report(self, name: str, applied: int, checksum: int, members: int) -> tuple[str, ...]:
        """A member reports the checksum of its base. Returns the names of the members that are now
        known to have another base.

        A checksum is known once more than half of `members` report it, or once all have reported:
        of two that disagree, or where none has a majority, the most frequent and then the first is
        believed, because nothing better can be done.
        """
        known = self._known.get(applied)
        if known is not None:
            return () if checksum == known else (name,)
        reported = self._reported.setdefault(applied, {})
        reported[name] = checksum
        if 2 * len(reported) <= members:  # counting takes as long as there are
            return ()
        found, votes = Counter(reported.values()).most_common(1)[0]
        if 2 * votes <= members and len(reported) < members:
            return ()
        self.add_known(applied, found)
        return tuple(name for name, value in reported.items() if value != found)
