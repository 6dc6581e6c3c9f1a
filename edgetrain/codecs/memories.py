"""The state that belongs around a codec that encodes: feedback, and what is more than that."""

from __future__ import annotations

from edgetrain.codecs.auto import Auto, OnRungs
from edgetrain.codecs.base import Codec
from edgetrain.codecs.feedback import Deep, DeepGradient, Feedback


def memory(codec: Codec, elements: int, members: int = 1) -> Feedback:
    """The state around a codec that encodes vectors of `elements`; `members` share the clip."""
    if isinstance(codec, Auto):
        return OnRungs(codec, elements)
    if not isinstance(codec, Deep):
        return Feedback(codec, elements)
    return DeepGradient(
        codec,
        elements,
        codec.momentum,
        clip=codec.clip or None,
        members=members,
        warmup=codec.warmup,
    )
