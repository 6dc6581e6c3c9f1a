"""What a job says, looked up: codecs that do not go with the strategy are refused by name."""

from __future__ import annotations

import pytest

from edgetrain import config, plans
from edgetrain.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["codec=dgc(0.01) | q2"], ["'dgc(0.01) | q2'", "dga", "take 'topk(0.01) | q2'"]),
        (["codec=powersgd(2)"], ["two trips a step are for gradients", "take 'low-rank(2)'"]),
        (["strategy=sync-sgd", "codec=dgc(0.01)"], ["momentum = 0.9", "optimizer.momentum=0"]),
        (["reply_codec=dgc(0.01)"], ["'dgc(0.01)'", "take 'dgc(0.01, 0.0)'"]),
        (["strategy=sync-sgd", "codec=powersgd(2)", "reply_codec=fp32"], ["leave reply_codec out"]),
        (["strategy=sync-sgd", "reply_codec=powersgd(2)"], ["leave reply_codec out"]),
    ],
    ids=lambda value: value[-1] if value[0].count("=") else "",
)
def test_codecs_that_do_not_go_with_the_job_are_refused_with_the_way_out(overrides, said):
    with pytest.raises(ConfigError) as caught:
        plans.hub_of(config.load(None, overrides))
    assert all(words in str(caught.value) for words in said), str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "codec", "reply_codec"),
    [
        ([], "fp32", "fp32"),
        (["codec=topk(0.01)|q2"], "topk(0.01) | q2", "topk(0.01) | q2"),
        (["codec=topk(0.01)", "reply_codec=bf16"], "topk(0.01)", "bf16"),
        (["codec=low-rank(2)"], "low-rank(2)", "low-rank(2)"),
        (
            ["strategy=sync-sgd", "codec=dgc(0.01, 0.9, 50) | q2", "optimizer.momentum=0"],
            "dgc(0.01, 0.9, 50) | q2",
            "dgc(0.01, 0.0, 50) | q2",
        ),
        (["strategy=sync-sgd", "codec=powersgd(2)"], "powersgd(2)", "powersgd(2)"),
    ],
    ids=str,
)
def test_replies_go_like_contributions_unless_it_is_said(overrides, codec, reply_codec):
    hub = plans.hub_of(config.load(None, overrides))
    assert [named.name for named in hub._codecs] == [codec, reply_codec]
