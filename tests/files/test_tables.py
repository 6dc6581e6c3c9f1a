"""Tables into dataclasses: what fits is taken as the field has it, all else named with its key."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from edgetrain.errors import ConfigError
from edgetrain.files.tables import key, ranged, read


def lower(value: str, where: str) -> str:
    if not value.isalpha():
        raise ConfigError(f"{where}: letters only")
    return value.lower()


@dataclass(frozen=True)
class Part:
    size: float = ranged(MISSING, 0, 2, "how large it is", unit="m")


@dataclass(frozen=True)
class Whole:
    part: Part | None = None
    parts: tuple[Part, ...] = key((), name="piece")
    count: int | Literal["auto"] = ranged("auto", 1, 9)
    color: str = key("red", "its color", choices=("red", "blue"))
    words: tuple[str, ...] = key((), check=lower)
    file: Path = Path()
    more: dict[str, Any] = key(dict)
    seats: tuple[int, ...] = ()


def whole(**values: Any) -> Whole:
    return read(Whole, values, "/folder/a.toml", within={"seats": 3})


def test_what_fits_is_taken_as_the_field_has_it():
    assert whole() == Whole()
    assert whole(part={"size": 1}, piece=[{"size": 2}], count=3.0, words=["Ab"], file="b") == Whole(
        Part(1.0), (Part(2.0),), 3, words=("ab",), file=Path("/folder/b")
    )
    assert type(whole(part={"size": 1}).part.size) is float
    assert whole(count="auto", seats=[0, 3]).seats == (0, 3)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"cuont": 1}, "no key 'cuont' (did you mean 'count'?)"),
        ({"part": {"sise": 1}}, "no key 'part.sise' (did you mean 'size'?)"),
        ({"piece": [{"size": 1}, {}]}, "piece[1].size is missing (how large it is)"),
        ({"piece": {"size": 1}}, "piece = {'size': 1} (allowed is a list of tables)"),
        ({"piece": [3]}, "piece[0] = 3 (allowed is a table)"),
        ({"part": {"size": 2.5}}, "part.size = 2.5 (allowed is a number from 0 to 2 m)"),
        ({"part": {"size": float("nan")}}, "part.size = nan (allowed is a number from 0 to 2 m)"),
        ({"part": {"size": True}}, "part.size = True (allowed is a number from 0 to 2 m)"),
        ({"count": 10**400}, "… (allowed is an integer or 'auto' from 1 to 9)"),
        ({"count": 1.5}, "count = 1.5 (allowed is an integer or 'auto' from 1 to 9)"),
        ({"count": "soon"}, "count = 'soon' (allowed is an integer or 'auto' from 1 to 9)"),
        ({"color": "bleu"}, "color = 'bleu' (did you mean 'blue'?)"),
        ({"color": 3}, "color = 3 (allowed is text)"),
        ({"words": "ab"}, "words = 'ab' (allowed is a list of texts)"),
        ({"words": ["ab", "a1"]}, "words[1]: letters only"),
        ({"file": ""}, "file = '' (allowed is the name of a file)"),
        ({"seats": [4]}, "seats[0] = 4 (allowed is an integer from 0 to 3)"),
    ],
)
def test_what_does_not_is_one_line_with_file_and_key(values, said):
    with pytest.raises(ConfigError) as caught:
        whole(**values)
    assert str(caught.value).startswith("/folder/a.toml: ")
    assert str(caught.value).endswith(said)
