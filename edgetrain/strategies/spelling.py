"""Names with arguments, as jobs spell strategies, merge rules and outer rules: "dga", "krum(2)".

spelling = name [ "(" argument { "," argument } ")" ]

Codecs have the same spelling inside a larger grammar (`codecs/spec.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgetrain.errors import ConfigError

_SPELLED = re.compile(r"\s*([A-Za-z_.~/][\w.:#@~/-]*)\s*(?:\(([^()]*)\))?\s*\Z")
_COMMA = re.compile(r",(?![^(]*\))")


@dataclass(frozen=True)
class Parameter:
    """An argument of a strategy or an outer rule: a number, low <= value < high, or a whole number
    from low on."""

    name: str
    low: float
    high: float = 0.0
    """0: it is a whole number."""
    default: float | None = None
    """None: it has to be given. Parameters with defaults follow those without."""
    may_be_inf: bool = False
    most_members: bool = False
    """Whether it is a number of members, and so at most those of the job."""
    words: tuple[str, ...] = ()
    """How the values 0, 1, … are spelled."""
    has_numbers: bool = True
    """Whether it may be a number, too."""

    def read(self, strategy: str, text: str) -> float:
        """Its value in a spelling; ConfigError names the range."""
        if text in self.words:
            return float(self.words.index(text))
        if not self.has_numbers:
            raise ConfigError(
                f"{strategy}: {self.name} = {text}", f"allowed are {' and '.join(self.words)}"
            )
        if self.may_be_inf and text == "inf":
            return math.inf
        if not self.high:
            more = " and inf" if self.may_be_inf else "".join(f" and {w}" for w in self.words)
            return whole(strategy, self.name, text, int(self.low), more)
        return number(strategy, self.name, text, self.low, self.high)

    def spell(self, value: float) -> float | str:
        return self.words[int(value)] if 0 <= value < len(self.words) else value


def split(text: str) -> tuple[str, list[str]]:
    """The name and its arguments. A text that is not spelled like this is a name as a whole.

    >>> split("multi-krum(2, 5)")
    ('multi-krum', ['2', '5'])
    """
    match = _SPELLED.match(text)
    if match is None:
        return text.strip(), []
    name, inside = match[1], match[2]
    return name, [] if inside is None else [word.strip() for word in inside.split(",")]


def split_list(text: str) -> list[str]:
    """The spellings in a list with commas, which may have commas in their arguments.

    >>> split_list("dga, krum(1, 2)")
    ['dga', 'krum(1, 2)']
    """
    return [word.strip() for word in _COMMA.split(text)]


def check_count(name: str, spelling: str, arguments: list[str], least: int, most: int) -> None:
    """ConfigError unless there are `least` to `most` arguments."""
    if arguments and not most:
        raise ConfigError(f"'{name}' takes no arguments, not ({', '.join(arguments)})")
    if not least <= len(arguments) <= most:
        given = f"({', '.join(arguments)})" if arguments else "none"
        raise ConfigError(f"{name} with arguments {given}", f"it reads {spelling}")


def arguments_of(
    name: str, spelling: str, parameters: Sequence[Parameter], words: Sequence[str]
) -> tuple[float, ...]:
    """The value of each parameter: of `words`, or else its default. ConfigError."""
    least = sum(each.default is None for each in parameters)
    check_count(name, spelling, list(words), least, len(parameters))
    given = [each.read(name, word) for each, word in zip(parameters, words, strict=False)]
    rest = (each.default for each in parameters[len(given) :])
    return *given, *(value for value in rest if value is not None)


def number(name: str, what: str, text: str, low: float, high: float) -> float:
    """The value of the argument `what`: low <= value < high. ConfigError names the range."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value < high:
        raise ConfigError(f"{name}: {what} = {text}", f"allowed are {low:g} to less than {high:g}")
    return value


def whole(name: str, what: str, text: str, low: int, more: str = "") -> int:
    """The value of `what`: a whole number, low <= value <= 100000. ConfigError names `more`."""
    if not (text.isascii() and text.isdigit() and low <= int(text) <= 100_000):
        raise ConfigError(
            f"{name}: {what} = {text}", f"allowed are whole numbers from {low} to 100000{more}"
        )
    return int(text)


def spell(value: float) -> str:
    return repr(value).removesuffix(".0")


def spelled(name: str, arguments: Iterable[float | str]) -> str:
    """A name with its arguments, as `split` reads it."""
    words = [each if isinstance(each, str) else spell(each) for each in arguments]
    return f"{name}({', '.join(words)})" if words else name
