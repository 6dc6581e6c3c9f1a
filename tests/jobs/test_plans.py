"""What a job says, looked up: codecs that do not go with the strategy are refused by name."""

from __future__ import annotations

import pytest

from edgetrain import errors
from edgetrain.errors import ConfigError
from edgetrain.exchange.delay import APART_SHARE, SHARE, SYNCED_SHARE
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.resolved import look_up, mask_terms_of
from edgetrain.jobs.rules import resolve


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["codec=dgc(0.01) | q2"], ["'dgc(0.01) | q2'", "dga", "take 'topk(0.01) | q2'"]),
        (["codec=powersgd(2)"], ["the codec is for gradients", "take 'low-rank(2)'"]),
        (["strategy=sync-sgd", "codec=dgc(0.01)"], ["momentum = 0.9", "optimizer.momentum=0"]),
        (["reply_codec=dgc(0.01)"], ["'dgc(0.01)'", "take 'dgc(0.01, 0.0)'"]),
        (["strategy=sync-sgd", "codec=powersgd(2)", "reply_codec=fp32"], ["leave reply_codec out"]),
        (["strategy=sync-sgd", "reply_codec=powersgd(2)"], ["leave reply_codec out"]),
    ],
    ids=lambda value: value[-1] if value[0].count("=") else "",
)
def test_codecs_that_do_not_go_with_the_job_are_refused_with_the_way_out(overrides, said):
    with pytest.raises(ConfigError) as caught:
        resolve(load(None, overrides))
    assert all(words in str(caught.value) for words in said), str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["codec=topk(0.01)"], ["'topk(0.01)'", "has to be whole", "leave codec out"]),
        (["codec=bf16"], ["'bf16'", "leave codec out"]),
        (["merge=median"], ["'median'", "compares members", "merge = 'mean'"]),
        (["members=1"], ["1 members: allowed are 2 to 64"]),
        (["members=65"], ["65 members", "gateways"]),
        (["members=10", "threshold=5"], ["threshold = 5: allowed are 7 to 10", "honest_hub=true"]),
        (["members=10", "threshold=11"], ["threshold = 11: allowed are 7 to 10"]),
        (["members=10", "threshold=6"], ["threshold = 6", "help of 2 of them, and of 4 with 7"]),
        (["members=10", "threshold=5", "honest_hub=true"], ["threshold = 5: allowed are 6 to 10"]),
        (["secure=false", "honest_hub=true"], ["honest_hub = true", "strategy.secure=true"]),
        (["secure=false", "threshold=3"], ["threshold = 3", "strategy.secure=true"]),
    ],
    ids=lambda value: value[-1] if value[0].count("=") else "",
)
def test_what_masks_do_not_go_with_is_refused_with_the_way_out(overrides, said):
    with pytest.raises(ConfigError) as caught:
        resolve(load(None, ["secure=true", *overrides]))
    assert all(words in str(caught.value) for words in said), str(caught.value)


def test_masks_without_their_packages_name_what_to_install(monkeypatch):
    real = errors.find_spec
    monkeypatch.setattr(
        errors, "find_spec", lambda name: None if name == "cryptography" else real(name)
    )
    with pytest.raises(ConfigError, match=r"\[private\]"):
        resolve(load(None, ["secure=true"]))


def test_a_verdict_over_masked_contributions_is_refused():
    from chaos.laws import Merging

    with pytest.raises(ConfigError, match="leave secure out"):
        Merging.of(look_up(load(None, ["secure=true"])))


def test_what_a_secure_job_agrees_on():
    agreed = mask_terms_of(load(None, ["secure=true", "members=10", "clip_range=2"]))
    assert (agreed.members, agreed.threshold, agreed.clip_range) == (10, 7, 2.0)
    assert mask_terms_of(load(None)) is None


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
    found = resolve(load(None, overrides))
    assert [found.codec.name, found.reply_codec.name] == [codec, reply_codec]


@pytest.mark.parametrize(
    ("overrides", "local_steps"),
    [
        (["steps=400"], 5),
        (["steps=80"], 5),
        (["steps=79"], 4),
        (["steps=40"], 2),
        (["steps=1"], 1),
        (["steps=40", "local_steps=5"], 5),
        (["steps=40", "delay=5"], 5),
        (["steps=40", "strategy=fedavg"], 5),
    ],
)
def test_rounds_of_a_short_run_are_shorter_where_the_job_does_not_say(overrides, local_steps):
    assert resolve(load(None, ["strategy=dga", *overrides])).local_steps == local_steps


def test_a_job_may_say_which_figure_counts_as_trained():
    assert plan(load(None, [])).target == 0.97
    assert plan(load(None, ["target=0.9"])).target == 0.9
    with pytest.raises(ConfigError, match=r"train.target = 97 \(accuracy is a share of 1: 0.97"):
        plan(load(None, ["target=97"]))


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ([], SHARE),
        (["data.partition=iid"], SHARE),
        (["data.partition=shared(64)"], SHARE),
        (["data.partition=dirichlet(3)"], SYNCED_SHARE),
        (["data.partition=dirichlet(3)", "final_sync=0"], APART_SHARE),
        (["data.partition=dirichlet(3)", "batch=4"], APART_SHARE),
        (["task=mine.py:task"], SYNCED_SHARE),
        (["task=mine.py:task", "data.partition=iid"], SHARE),
        (["batch=4"], APART_SHARE),
        (["batch=4", "train.accumulate=2"], SHARE),
    ],
)
def test_the_share_of_a_run_that_a_delay_has_is_less_where_members_are_led_apart(overrides, share):
    """Unless the run ends with a final sync."""
    assert look_up(load(None, overrides)).delay.share == share
    agreed = hub_of(look_up(load(None, [*overrides, "strategy=dga", "delay=auto", "steps=400"])))
    assert agreed.rounds.delay.most == 400 // share - 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["strategy=sync-sgd", "final_sync=0.1"],
            "final_sync = 0.1: it exchanges gradients at every",
        ),
        (
            ["strategy=streaming-diloco(2, 0.5)", "final_sync=1"],
            "members exchange a fragment",
        ),
        (["final_sync=1.5"], "allowed is a number or 'auto' from 0 to 1"),
        (["final_sync=soon"], "allowed is a number or 'auto' from 0 to 1"),
    ],
)
def test_a_final_sync_that_cannot_be_is_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        resolve(load(None, words))
