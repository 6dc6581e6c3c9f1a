"""Every error that can leave edgetrain, as a tree; each has a hint that says what to do.

    EdgetrainError            anything edgetrain raises on purpose: the command line prints one
    │                         clear line and exits with 2; `hub`, `member` and `keys` with 75 if
    │                         the error is `passing`
    ├── ConfigError           a job, a profile or an argument has a value that is not allowed
    ├── TaskError             the task cannot be loaded, or its data is missing or damaged
    ├── NetworkError          an address, an interface or an emulated network is not usable
    │   └── HubUnreachable    the hub's address does not answer, or the hub fell silent
    ├── Refused               the hub refused; `code` names the rule, the message has both values
    ├── Diverged              base differs between replicas, or training left the finite numbers
    ├── BadMessage            bytes that are not a valid message; `unpack` raises nothing else
    └── BadPayload            bytes that a codec cannot have produced for this vector
    Stopped                   not an error: the process was asked to end (a signal) and has ended.
                              A SystemExit

An exception that another module defines never leaves that module's room (`Spoilt` in
exchange/hub, `CannotCompile` in codecs/kernels). This module imports only the standard library.
"""

from __future__ import annotations

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path


class EdgetrainError(Exception):
    """Base of all errors raised on purpose. `hint` says what to do about it; "" is no hint."""

    passing: bool = False
    """Whether the same may work later, if nobody does anything about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(EdgetrainError):
    """A job, a profile or an argument has a value that is not allowed."""


class TaskError(EdgetrainError):
    """The task cannot be loaded, or its data is missing or damaged."""


def require(what: str, extra: str, *packages: str) -> None:
    """ConfigError unless these packages, which come with an extra of edgetrain, are installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        from edgetrain.extras import install_command

        raise ConfigError(f"{what} needs {' and '.join(missing)}", install_command(extra))


class NetworkError(EdgetrainError):
    """An address, an interface or an emulated network is not usable."""

    def __init__(self, message: str, hint: str = "", *, passing: bool = False) -> None:
        super().__init__(message, hint)
        self.passing = passing


class HubUnreachable(NetworkError):
    """The hub's address does not answer, or the hub fell silent."""

    def __init__(self, message: str, hint: str = "", *, passing: bool = True) -> None:
        super().__init__(message, hint, passing=passing)


PASSING_CODES = frozenset({"name", "full", "started", "unknown", "session", "again", "few"})
"""Codes of refusals that may not be repeated later: a place gets free, another job begins, the hub
notices that a member of this name is gone, or is resumed."""


class Refused(EdgetrainError):
    """The hub refused. `code` names the rule; the message has both values that disagree."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.code = code
        self.passing = code in PASSING_CODES


class Diverged(EdgetrainError):
    """A checksum of base disagrees, or a number is no longer finite: training cannot go on."""


class BadMessage(EdgetrainError):
    """Bytes that are not a valid message."""


class BadPayload(EdgetrainError):
    """Bytes that a codec cannot have produced for this vector."""


class Stopped(SystemExit):
    """The process was asked to end by a signal, and training has ended.

    If it is not caught, the process prints nothing and exits with 128 + `signum`, as in a shell.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def refuse_first(*rows: tuple[object, str, str]) -> None:
    """ConfigError for the first row that holds: (whether it does, what is wrong, the way out)."""
    for holds, what, way_out in rows:
        if holds:
            raise ConfigError(what, way_out)


@contextmanager
def explain_os_errors(what: str, way_out: str = "") -> Iterator[None]:
    """Let an OSError within the block be a ConfigError: `what`, then what the system says."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}", way_out) from None


RENAMED = {
    "every": "local_steps", "landing": "final_sync", "own": "paper", "leave": "decay",
    "drift": "predict", "beat_s": "heartbeat_s", "gone_s": "lost_after_s", "return_s": "rejoin_s",
    "deserted_s": "empty_after_s", "outage_s": "hub_timeout_s", "most_mb": "max_model_mb",
    "rate_for": "lr_reference_batch", "fixed": "frozen", "start_with": "min_members",
    "weigh": "weighting", "when_full": "on_disk_full", "stays_s": "online_s",
    "away_s": "offline_s", "span": "clip_range", "tell": "control", "go-on": "resume",
}  # fmt: skip
"""Former names of keys, values and verbs: errors say what they are called now."""


MEANT = {
    "gpu": "cuda", "learning_rate": "lr", "clients": "members", "workers": "members",
    "epochs": "steps", "rounds": "steps", "compression": "codec", "model": "task",
    "train": "run", "start": "run", "demo": "compare", "list": "runs", "--port": "--bind",
}  # fmt: skip
"""What others call it, or where it stands."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A hint for a misspelt name: the nearest choice if one is near, else all choices.

    >>> did_you_mean("wan-20ms", ["wan-200ms", "wifi"])
    "did you mean 'wan-200ms'?"
    """
    known = sorted(choices)
    return nearest(name, known) or ("known: " + ", ".join(known) if known else "none is known")


def nearest(name: str, choices: Iterable[str]) -> str:
    """A hint that names the choice which a misspelt or a former name means; "": none is near."""
    known = sorted(choices)
    if (new := RENAMED.get(name.rpartition(".")[2])) in known:
        return f"it is called '{new}' now"
    plain = name.lower()
    same = [each for each in known if each.lower() in (plain, MEANT.get(plain))]
    same = same or [each for each in known if sorted(each) == sorted(plain)]
    near = next(iter(same or difflib.get_close_matches(plain, known, n=1, cutoff=0.6)), "")
    if not near and re.fullmatch(r"[a-z]+-?\d\w*", plain):  # "rpi4", for raspberry-pi-4b
        near = next((e for e in sorted(known, key=len) if re.search(".*".join(plain), e)), "")
    return near and f"did you mean '{near}'?"


_MEMORY = re.compile(r"^memory: |MemoryError|OutOfMemoryError|can't allocate memory")


def lacks_memory(reason: str) -> bool:
    """Whether a member that leaves for this reason could not have the memory that it needs."""
    return _MEMORY.search(reason) is not None


def quoted(error: BaseException) -> str:
    """An exception's kind and the first sentence that it says: what follows in a library's error is
    advice to those who develop it."""
    first = next(iter(str(error).strip().splitlines()), "")
    said = re.split(r"(?<=[.!]) +(?=[A-Z(])", first)[0].removesuffix(".")
    return f"{type(error).__name__}: {said}".removesuffix(": ")


def in_words(error: BaseException) -> str:
    """An exception in one line; below it the frames of the user's own code, innermost last."""
    own = own_frames(error)
    said = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", said)
    if (
        isinstance(error, MemoryError)
        or "OutOfMemory" in type(error).__name__
        or (asked and "memory" in said)
    ):
        amount = f", {asked[1]} were asked for at once" if asked else ""
        said = f"out of memory{amount} (lower train.batch, or the number of members on one machine)"
    if not own:
        return said
    last = own[-1]
    said += f" (in {last.name}, {Path(last.filename).name} line {last.lineno})"
    return "\n".join([said, *"".join(traceback.format_list(own)).splitlines()])


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an exception that are neither edgetrain's nor those of installed packages."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    others = (f"{Path(__file__).parent}/", *(f"{path}/" for path in paths if path))
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*others, "<")) and "site-packages" not in frame.filename
    ]
