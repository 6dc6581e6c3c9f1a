"""The text of a job's `codec` to a codec, and the sentence that helps when it is misspelt.

spec    = rule { ";" rule }         the last rule has no pattern and takes the rest
rule    = [ pattern ":" ] chain     pattern: small(elements), or a tensor name with * and ?
chain   = stage [ "|" stage ]       what is kept, then how its values are coded
stage   = name [ "(" argument { "," argument } ")" ]
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain import extensions
from edgetrain.codecs.base import Codec
from edgetrain.codecs.dense import BFloat, Dense, Half
from edgetrain.codecs.fixed import Ranged
from edgetrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from edgetrain.codecs.deep import Deep
    from edgetrain.codecs.rules import Rule

_STAGE = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*(?:\(([^()]*)\))?\s*\Z")

_DENSE = {"fp32": Dense, "dense": Dense, "fp16": Half, "bf16": BFloat}
_BLOCKS = ("int8", "int4", "ternary", "sign", "q1", "q2", "q3", "q4")
_PLAIN = (*_DENSE, *_BLOCKS)
_CHAINED = ("topk", "dgc", "randk", "low-rank")


def load_own(text: str, beside: Path | None, open_bundle: Callable[[str], Path]) -> None:
    """Import the user's own codecs in a job's spelling, as `extensions.load`. What stands before
    the colon of a rule is a pattern where a codec of the table follows: "fc.weight:int8"."""
    if ":" not in text:
        return
    from edgetrain.codecs.table import TABLE

    for rule in text.split(";"):
        for stage in rule.split("|"):
            last = stage.rpartition(":")[2].partition("(")[0].strip()
            if last not in TABLE and last != "dense":
                extensions.load(stage, beside, open_bundle)


def parse(text: str) -> Codec:
    """The codec that `text` names; `parse(codec.name)` gives an equal one. Raises ConfigError.

    A codec's module is loaded where it is named: most jobs take one.
    """
    # Simulated members look up the same ones in each round. A user's own may be loaded anew.
    return _parse.__wrapped__(extensions.dotted(text)) if extensions.loaded else _parse(text)


@functools.lru_cache(64)
def _parse(text: str) -> Codec:
    if ";" not in text and ":" not in text:
        return _chain(text)
    from edgetrain.codecs.rules import Rules

    rules = [_rule(part) for part in text.split(";")]
    for rule in rules[:-1]:
        if not (rule.pattern or rule.small):
            raise ConfigError(
                f"'{rule.name}' in '{text}' takes every tensor, so what follows takes none",
                "put a pattern before it, as in '*.bias: fp32'",
            )
    last = rules[-1]
    if last.pattern or last.small:
        raise ConfigError(
            f"'{text}' says nothing for the tensors that no pattern matches",
            "end it with a codec without a pattern",
        )
    if len(rules) == 1:
        return last.codec
    for rule in rules:
        if rule.codec.whole:
            raise ConfigError(
                f"'{rule.codec.name}' codes a whole vector, not a part as in '{text}'"
            )
    return Rules(tuple(rules))


def _rule(text: str) -> Rule:
    from edgetrain.codecs.rules import Rule

    pattern, colon, chain = text.rpartition(":")
    codec = _chain(chain)
    if not colon:
        return Rule(codec)
    name, arguments = _stage(pattern) if pattern.strip().startswith("small(") else ("", [])
    if name == "small":
        return Rule(codec, small=_whole(name, arguments, 1, 2**31))
    if not pattern.strip():
        raise ConfigError(f"'{text.strip()}' has no pattern before the colon")
    return Rule(codec, pattern=pattern.strip())


def _chain(text: str) -> Codec:
    stages = text.split("|")
    name, arguments = _stage(stages[0])
    if len(stages) > 2:
        raise ConfigError(f"'{text.strip()}' has {len(stages)} stages; a chain has at most 2")
    if name in _CHAINED:
        return _first(name, arguments, _values(stages[1]) if len(stages) == 2 else None)
    if len(stages) == 2:
        raise ConfigError(
            f"'{name}' sends every element, nothing can follow it",
            f"before '|' stand {', '.join(_CHAINED)}",
        )
    if name == "auto":
        from edgetrain.codecs.auto import FLOOR, Auto

        return Auto(_density(name, arguments, "smallest share") if arguments else FLOOR)
    if name == "powersgd":
        from edgetrain.codecs.lowrank import TwoTrips

        return TwoTrips(_whole(name, arguments, 1, 64))
    return _plain(name, arguments)


def _values(text: str) -> Ranged:
    name, arguments = _stage(text)
    if name in _CHAINED or name == "auto" or extensions.is_own(name):
        raise ConfigError(
            f"'{name}' cannot code values", f"after '|' stand {', '.join(sorted(_PLAIN))}, qsgd"
        )
    return _plain(name, arguments)


def _plain(name: str, arguments: list[str]) -> Ranged:
    if name not in _DENSE:
        from edgetrain.codecs import blocks
    if name == "qsgd":
        return blocks.qsgd(_whole(name, arguments or ["7"], 1, 127))
    if name not in _PLAIN:
        return _own(name, arguments)  # type: ignore[return-value]  # `_values` refuses it
    if arguments:
        raise ConfigError(f"'{name}' takes no arguments, not ({', '.join(arguments)})")
    if name in _DENSE:
        return _DENSE[name]()
    if name == "sign":
        return blocks.Sign()
    made = {"int8": blocks.int8, "int4": blocks.int4, "ternary": blocks.ternary}
    return made[name]() if name in made else blocks.Planes(int(name[1:]))


def _own(name: str, arguments: list[str]) -> Codec:
    """A user's own codec, called by its name in the job. ConfigError."""
    from edgetrain.codecs.table import TABLE

    known = {key: Codec for key in (*TABLE, "dense") if key != name}
    cls: Any = extensions.find("codec", name, known, Codec)
    codec: Codec = extensions.build("codec", name, arguments, cls)
    codec.name = f"{name}({', '.join(arguments)})" if arguments else name
    return codec


def _first(name: str, arguments: list[str], values: Ranged | None) -> Codec:
    numbers = [a for a in arguments if not a[:1].isalpha()]
    flags = [a for a in arguments if a[:1].isalpha()]
    if name == "low-rank":
        _check_flags(name, flags, [])
        if len(numbers) not in (1, 2):
            raise ConfigError(
                f"low-rank takes a rank, as in low-rank(4), not {len(numbers)} numbers"
            )
        from edgetrain.codecs.lowrank import LowRank

        iterations = _whole(name, numbers[1:], 1, 8) if len(numbers) == 2 else 1
        return LowRank(_whole(name, numbers[:1], 1, 64), values, iterations)
    if name == "dgc":
        _check_flags(name, flags, [])
        return _deep(numbers, values)
    from edgetrain.codecs.sparse import RandK, TopK

    density = _density(name, numbers)
    if name == "randk":
        _check_flags(name, flags, [])
        return RandK(density, values)
    _check_flags(name, flags, ["exact", "tensor"])
    codec = TopK(density, values, exact="exact" in flags)
    if "tensor" not in flags:
        return codec
    from edgetrain.codecs.rules import PerTensor

    return PerTensor(codec.name.replace(")", ", tensor)", 1), codec)


def _deep(numbers: list[str], values: Ranged | None) -> Deep:
    from edgetrain.codecs.deep import Deep

    if len(numbers) > 4:
        from edgetrain.codecs.table import TABLE

        row = TABLE["dgc"]
        raise ConfigError(
            f"dgc takes 1 to 4 numbers, not {len(numbers)}", f"{row.spelling}: {row.summary}"
        )
    density = _density("dgc", numbers[:1])
    momentum = _density("dgc", numbers[1:2], "momentum") if len(numbers) > 1 else 0.9
    warmup = _whole("dgc", numbers[2:3], 0, 10**6) if len(numbers) > 2 else 0
    clip = _density("dgc", numbers[3:], "norm to clip at") if len(numbers) > 3 else 0.0
    return Deep(density, momentum, warmup, clip, values)


def _stage(text: str) -> tuple[str, list[str]]:
    match = _STAGE.match(text)
    if not match:
        raise ConfigError(
            f"'{text.strip()}' is not a codec", 'write it as in "topk(0.01) | q2" or "int8"'
        )
    arguments = [a.strip() for a in (match[2] or "").split(",")]
    return match[1], [a for a in arguments if a]


def _whole(name: str, arguments: list[str], least: int, most: int) -> int:
    try:
        (value,) = (int(a) for a in arguments)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ConfigError(
            f"{name}({', '.join(arguments)}): needs one whole number from {least} to {most}"
        )
    return value


def _density(name: str, numbers: list[str], what: str = "density") -> float:
    try:
        (value,) = (float(a) for a in numbers)
    except ValueError:
        raise ConfigError(
            f"{name}({', '.join(numbers)}): needs one {what}", f"as in {name}(0.01), for 1 %"
        ) from None
    return value


def _check_flags(name: str, flags: list[str], known: list[str]) -> None:
    for flag in flags:
        if flag not in known:
            raise ConfigError(f"{name} has no option '{flag}'", did_you_mean(flag, known))
