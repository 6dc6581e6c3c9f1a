"""The text of a job's `codec` to a codec, and the sentence that helps when it is misspelt."""

from __future__ import annotations

from edgetrain.codecs.base import Codec
from edgetrain.codecs.dense import BFloat, Dense, Half
from edgetrain.errors import ConfigError, did_you_mean

_SIMPLE: dict[str, type[Dense] | type[Half] | type[BFloat]] = {
    "fp32": Dense,
    "dense": Dense,
    "fp16": Half,
    "bf16": BFloat,
}


def parse(text: str) -> Codec:
    """The codec that `text` names, as in `"fp32"`.

    Raises ConfigError, with the near miss, for a name that is not a codec's.
    """
    name = text.strip()
    if name not in _SIMPLE:
        raise ConfigError(f"no codec '{name}'", did_you_mean(name, _SIMPLE))
    return _SIMPLE[name]()
