"""The state that belongs around a codec that encodes: feedback, and what is more than that."""

from __future__ import annotations

from edgetrain.codecs.base import Codec
from edgetrain.codecs.feedback import Feedback


def memory(codec: Codec, elements: int, members: int = 1) -> Feedback:
    """The state around a codec that encodes vectors of `elements`; `members` share the clip."""
    if not codec.whole or codec.two_trips:
        return Feedback(codec, elements)  # and neither of the modules below is loaded
    from edgetrain.codecs.auto import Auto, OnRungs
    from edgetrain.codecs.deep import Deep, DeepGradient

    if isinstance(codec, Auto):
        return OnRungs(codec, elements)
    assert isinstance(codec, Deep)
    return DeepGradient(
        codec,
        elements,
        codec.momentum,
        clip=codec.clip or None,
        members=members,
        warmup=codec.warmup,
    )
