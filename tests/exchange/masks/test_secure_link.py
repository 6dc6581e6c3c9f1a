"""What a member demands of a hub before it masks, and what a loop of one's own gets."""

from __future__ import annotations

import numpy as np
import pytest

from edgetrain.errors import ConfigError, Refused
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.exchange.member.link import _masker_of
from edgetrain.exchange.messages import Welcome
from edgetrain.exchange.seam import Request


def welcome(**other):
    fields = {
        "name": "a", "index": 0, "members": 5, "strategy": "dga", "every": 1, "delay": 0,
        "codec": "fp32", "reply_codec": "fp32", "beat_s": 1.0, "upload": False, "epoch": 3,
        "threshold": 4, "span": 8.0,
    }  # fmt: skip
    return Welcome(**(fields | other))


def request(secure):
    return Request("", secure=secure)


@pytest.mark.parametrize(
    ("secure", "told"),
    [
        (False, {}),
        (True, {}),
        (True, {"threshold": 3}),
        (MaskTerms(5, 4, 8.0), {}),
    ],
)
def test_masks_as_agreed(secure, told):
    masker = _masker_of(welcome(**told), request(secure), 7)
    assert masker is not None
    assert masker.epoch == 3


@pytest.mark.parametrize(
    ("secure", "told", "said"),
    [
        (True, {"threshold": 0}, "threshold is 0 of 5"),
        (True, {"threshold": 2}, "threshold is 2 of 5"),
        (MaskTerms(5, 4, 8.0), {"threshold": 0}, "not masked"),
        (MaskTerms(5, 4, 8.0), {"threshold": 3}, "threshold=3"),
        (MaskTerms(5, 4, 8.0), {"span": 100.0}, "span=100"),
        (MaskTerms(5, 4, 8.0), {"members": 4}, "members=4"),
    ],
)
def test_a_hub_that_would_see_more_than_was_agreed_is_left(secure, told, said):
    with pytest.raises(Refused, match=said) as caught:
        _masker_of(welcome(**told), request(secure), 7)
    assert caught.value.code == "masks"


def test_without_masks_there_is_nothing_to_agree_on():
    assert _masker_of(welcome(threshold=0), request(False), 7) is None


def test_a_threshold_that_cannot_be():
    with pytest.raises(ConfigError, match="cannot be"):
        _masker_of(welcome(threshold=6), request(False), 7)


def test_what_does_not_fit_into_the_span_is_told_once(caplog):
    from edgetrain.exchange.loopback import Loopback
    from edgetrain.exchange.masks.masker import Masker
    from edgetrain.exchange.member.link import Link

    link = Link(Loopback().connect(), lambda: 0.0)
    link._settle(welcome(), request(False))
    link._elements = 2
    link.memory = type(link.memory)(2)
    link._masker = masker = Masker(MaskTerms(5, 4, 8.0), 2)
    masker.state = lambda round: "ready"
    masker.mask = lambda round, vector, weight, out: setattr(masker, "cut", 1)
    for round in range(3):
        link.submit(
            round, np.zeros(2, np.float32), weight=1.0, applied=0, checksum=0, wanted_delay=0
        )
    assert caplog.text.count("beyond the range of strategy.span") == 1
