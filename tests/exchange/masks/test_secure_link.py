"""What a member demands of a hub before it masks, and what a loop of one's own gets."""

from __future__ import annotations

import pytest

from edgetrain import codecs
from edgetrain.errors import ConfigError, Refused
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.exchange.member.outbox import Outbox, masker_of
from edgetrain.exchange.messages import Contribute, Welcome
from edgetrain.exchange.seam import Request
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.ranges import Ranges


def welcome(**other):
    fields = {
        "name": "a", "index": 0, "members": 5, "strategy": "dga", "local_steps": 1, "delay": 0,
        "codec": "fp32", "reply_codec": "fp32", "heartbeat_s": 1.0, "upload": False, "epoch": 3,
        "threshold": 4, "clip_range": 8.0,
    }  # fmt: skip
    return Welcome(**(fields | other))


def request(secure, honest_hub=False):
    return Request("", secure=secure, honest_hub=honest_hub)


@pytest.mark.parametrize(
    ("secure", "told", "honest_hub"),
    [
        (False, {}, False),
        (True, {}, False),
        (True, {"threshold": 3}, True),
        (MaskTerms(5, 4, 8.0), {}, False),
        (MaskTerms(5, 3, 8.0), {"threshold": 3}, False),  # as its own job says
    ],
)
def test_masks_as_agreed(secure, told, honest_hub):
    masker = masker_of(welcome(**told), request(secure, honest_hub), 7)
    assert masker is not None
    assert masker.epoch == 3


@pytest.mark.parametrize(
    ("secure", "told", "said"),
    [
        (True, {"threshold": 0}, "threshold is 0 of 5"),
        (True, {"threshold": 3}, "threshold is 3 of 5 members, and at least 4 are wanted"),
        (True, {"threshold": 2}, "threshold is 2 of 5"),
        (MaskTerms(5, 4, 8.0), {"threshold": 0}, "not masked"),
        (MaskTerms(5, 4, 8.0), {"threshold": 3}, "threshold=3"),
        (MaskTerms(5, 4, 8.0), {"clip_range": 100.0}, "clip_range=100"),
        (MaskTerms(5, 4, 8.0), {"members": 4}, "members=4"),
    ],
)
def test_a_hub_that_would_see_more_than_was_agreed_is_left(secure, told, said):
    with pytest.raises(Refused, match=said) as caught:
        masker_of(welcome(**told), request(secure), 7)
    assert caught.value.code == "masks"


def test_without_masks_there_is_nothing_to_agree_on():
    assert masker_of(welcome(threshold=0), request(False), 7) is None


def test_a_threshold_that_cannot_be():
    with pytest.raises(ConfigError, match="cannot be"):
        masker_of(welcome(threshold=6), request(False), 7)


def test_what_does_not_fit_into_the_span_is_told_once(caplog):
    from edgetrain.exchange.masks.masker import Masker

    masker, memory = Masker(MaskTerms(5, 4, 8.0), 2), VectorPool(2)
    masker.state = lambda round: "ready"
    masker.mask = lambda round, vector, weight, out: setattr(masker, "cut", 1)
    outbox = Outbox("a", codecs.Dense(), Ranges(2), 5, memory, masker)
    for round in range(3):
        outbox.add_unmasked(Contribute(round, 0, 1, 1.0, 0, 0, 0, b""), memory.borrow_vector())
        assert list(outbox.mask_ready()) == [round]
    assert caplog.text.count("beyond the range of strategy.clip_range") == 1
