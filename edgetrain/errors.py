"""What can go wrong, as a tree, and the sentence that helps.

    EdgetrainError            anything edgetrain raises on purpose: the command line prints one
    │                         clear line and exits with 2
    ├── ConfigError           a job, a profile or an argument says something that cannot be
    ├── TaskError             the task cannot be loaded, or its data is missing or damaged
    ├── NetworkError          an address, an interface or an emulated network is not usable
    │   └── HubUnreachable    nobody answers at the hub's address, or the hub fell silent
    ├── Refused               the hub answered no; `code` says which rule, with both values
    ├── Diverged              base differs between replicas, or training left the finite numbers
    ├── BadMessage            bytes that are not a valid message; nothing else leaves `unpack`
    └── BadPayload            bytes that a codec cannot have produced for this vector
    Stopped                   no error: it was asked to end (a signal), and has. A SystemExit

No other module defines an exception. This one imports only the standard library.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EdgetrainError(Exception):
    """Base of all errors raised on purpose. `hint` says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(EdgetrainError):
    """A job, a profile or an argument says something that cannot be."""


class TaskError(EdgetrainError):
    """The task cannot be loaded, or its data is missing or damaged."""


class NetworkError(EdgetrainError):
    """An address, an interface or an emulated network is not usable."""


class HubUnreachable(NetworkError):
    """Nobody answers at the hub's address, or the hub fell silent."""


class Refused(EdgetrainError):
    """The hub said no. `code` names the rule; the message holds both values that disagree."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.code = code


class Diverged(EdgetrainError):
    """A checksum of base disagrees, or a number is no longer finite: training cannot go on."""


class BadMessage(EdgetrainError):
    """Bytes that are not a valid message."""


class BadPayload(EdgetrainError):
    """Bytes that a codec cannot have produced for this vector."""


class Stopped(SystemExit):
    """It was asked to end, and has: by default the process ends with 128 + `signum`, as shells have
    it, and without a word."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A hint for a misspelt name: the near miss if there is one, else all the choices.

    >>> did_you_mean("wan-20ms", ["wan-200ms", "lora"])
    "did you mean 'wan-200ms'?"
    """
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    return "known: " + ", ".join(known) if known else "none is known"
