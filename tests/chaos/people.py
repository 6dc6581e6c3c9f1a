"""People who tell the hub of a schedule what to do: each order again until it is answered, since
the hub may be down. Pure; what they reach the hub over is the caller's.

    happening     told as it begins        told as it heals
    control-pause    pause                    resume
    control-remove   remove MEMBER            -; the caller starts its process again
    control-stop     stop                     -
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Iterator

from chaos.schedule import Happening
from edgetrain.exchange.hub.orders import Answer, Order

STOPPING = "the job is ending"


class People:
    """Give orders one after the other."""

    def __init__(self) -> None:
        self.removed: set[str] = set()
        """Members that the hub was told to remove."""
        self.stopped_at: int | None = None
        """The round that the hub was at when it said that the job ends; None: it has not."""
        self._unanswered: deque[tuple[str, ...]] = deque()

    def begin(self, happening: Happening) -> None:
        """Tell the hub, from now on."""
        match happening.kind:
            case "control-pause":
                self._unanswered.append(("pause",))
            case "control-stop":
                self._unanswered.append(("stop",))
            case "control-remove":
                for index in happening.members:
                    self.removed.add(f"m{index}")
                    self._unanswered.append(("remove", f"m{index}"))

    def heal(self, happening: Happening) -> None:
        """It has lasted long enough."""
        if happening.kind == "control-pause":
            self._unanswered.append(("resume",))

    def orders(self) -> Iterator[Order]:
        """The oldest order that was not answered yet, if there is one."""
        if self._unanswered:
            words = self._unanswered[0]
            yield Order(words, functools.partial(self._hear, words))

    def _hear(self, words: tuple[str, ...], answer: Answer) -> None:
        if self._unanswered and self._unanswered[0] is words:
            self._unanswered.popleft()
        if self.stopped_at is not None:
            return
        if answer.get("course") == "stopped":
            self.stopped_at = answer["round"]
        elif STOPPING in str(answer.get("error", "")):
            self.stopped_at = sys.maxsize  # it obeyed and crashed; at which round it did not say
