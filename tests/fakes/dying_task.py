"""A task whose member 1 is killed at its sixth batch."""

from __future__ import annotations

import itertools
import os
import signal

from edgetrain.tasks import digits

KILLED, AT = 1, 6


class Dying:
    """Digits."""

    def __init__(self) -> None:
        self._digits = digits()

    def __getattr__(self, name):
        return getattr(self._digits, name)

    def batches_from(self, member, members, batch, seed, start):
        """As the digits', up to that one."""
        found = self._digits.batches_from(member, members, batch, seed, start)
        if member != KILLED:
            return found
        return itertools.chain(itertools.islice(found, AT - 1), _killed())


def _killed():
    yield os.kill(os.getpid(), signal.SIGKILL)


def dying():
    """For a job's `task`."""
    return Dying()
