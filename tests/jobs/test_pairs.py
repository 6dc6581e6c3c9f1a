"""Choices that do not go together: each pair is refused in a sentence with the names of both and
why, which is a property of one of them, and the way out of either."""

from __future__ import annotations

import pytest

from edgetrain.errors import ConfigError
from edgetrain.jobs.pairs import WHY
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve

HUBS = "hub.hubs=['tcp://a:1', 'tcp://b:1']"
TOPOLOGIES = {
    "hub.hubs with 2 hubs": (HUBS, "ranges=4"),
    "fleet.topology = 'direct'": ("topology=direct", "ranges=4"),
    "fleet.topology = 'ring'": ("topology=ring",),
    "fleet.topology = 'tree'": ("topology=tree",),
    "fleet.topology = 'butterfly'": ("topology=butterfly",),
    "fleet.gateways = true": ("fleet.gateways=true",),
}
GROUP = "fleet.device=host:3, servers"
SECURE = ("strategy.secure=true",)
FALLBACK = ("fleet.device=host:4", "servers.fallback=when-needed", "servers.data.partition=iid",
            "servers.after_s=30", "servers.back_s=60")  # fmt: skip
BUFFERED = ("strategy=fedbuff(2, 0.5)",)
STREAMED = ("strategy=streaming-diloco(2, 0.5)",)
REPLICA = ("hub.replica=tcp://c:1", "quorum=3")
DEALT = ("strategy=lbfgs", "data.partition=shared(all)")
STAGES = ("strategy=sync-sgd", "fleet.placement=pipeline=4")
AT_HUB = ("unit=member", "where=hub", "noise=1", "strategy=local-sgd")
CHOICES = {
    "strategy.secure": (SECURE, "hidden"),
    "strategy.merge = 'median'": (("merge=median",), "compares"),
    "privacy.where = 'hub'": (AT_HUB, "cuts"),
    "fedbuff(2, 0.5)": (BUFFERED, "apart"),
    "streaming-diloco(2, 0.5)": (STREAMED, "fragments"),
    "hub.min_members = 3": (("min_members=3",), "few"),
    "hub.replica": (REPLICA, "replica"),
    "fleet.device = 'host:3, servers'": ((GROUP,), "group"),
}


def refusal(*words):
    with pytest.raises(ConfigError) as refused:
        resolve(load(None, ["members=4", "strategy=fedavg", *words]))
    assert "\n" not in str(refused.value)
    assert " or " in refused.value.hint
    return refused.value.message


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("said", CHOICES)
def test_topologies_and_what_needs_one_hub(topology, said):
    words, why = CHOICES[said]
    assert refusal(*TOPOLOGIES[topology], *words) == f"{topology} and {said}: {WHY[why]}"


@pytest.mark.parametrize(
    ("words", "said", "why"),
    [
        ((*DEALT, "topology=direct"), "fleet.topology = 'direct' and lbfgs", "deals"),
        ((*DEALT, "topology=ring"), "fleet.topology = 'ring' and lbfgs", "deals"),
        ((*DEALT, "fleet.gateways=true"), "fleet.gateways = true and lbfgs", "deals"),
        (("topology=ring", "codec=int8"), "'ring' and strategy.codec = 'int8'", "rounds"),
        (("topology=ring", "reply_codec=fp16"), "and strategy.reply_codec = 'fp16'", "rounds"),
        (("topology=ring", "gateways=true"), "'ring' and fleet.gateways = true", "sites"),
        (("topology=ring", "ranges=2", HUBS), "'ring' and hub.hubs with 2 hubs", "several"),
        ((HUBS, "ranges=4", "gateways=true"), "2 hubs and fleet.gateways = true", "sites"),
        (("gateways=true", "merge=norm-clip(2x)"), "merge = 'norm-clip(2x)'", "compares"),
        (("gateways=true", "ranges=4"), "and strategy.ranges = 4", "ranged"),
        (("gateways=true", "strategy=sync-sgd", "codec=powersgd(2)"), "'powersgd(2)'", "bound"),
        ((*SECURE, "merge=median"), "strategy.secure and strategy.merge = 'median'", "compares"),
        ((*SECURE, *BUFFERED), "strategy.secure and fedbuff(2, 0.5)", "hidden"),
        ((*SECURE, *DEALT), "strategy.secure and lbfgs", "hidden"),
        ((*SECURE, "ranges=4"), "strategy.secure and strategy.ranges = 4", "hidden"),
        ((*STREAMED, "ranges=4"), "streaming-diloco(2, 0.5) and strategy.ranges = 4", "fragments"),
        ((*DEALT, "merge=median"), "strategy.merge = 'median' and lbfgs", "compares"),
        ((*DEALT, GROUP), "and fleet.device = 'host:3, servers'", "group"),
        (("min_members=3", "strategy=sync-sgd"), "sync-sgd and hub.min_members = 3", "closed"),
        ((*REPLICA, *SECURE), "strategy.secure and hub.replica", "hidden"),
        ((*REPLICA, "strategy=ssp(2)"), "ssp(2) and hub.quorum = 3", "counted"),
        ((*REPLICA, *DEALT), "lbfgs and hub.quorum = 3", "counted"),
        ((*REPLICA, "hub.hubs=['tcp://a:1']"), "hub.hubs with 1 hubs and hub.replica", "replica"),
        ((*STAGES, *SECURE), "strategy.secure and fleet.placement = 'pipeline=4'", "hidden"),
        ((*STAGES, "privacy.unit=example", "noise=1"), "'example' and fleet.placement", "private"),
        ((*STAGES, "strategy=dga"), "dga and fleet.placement", "local"),
        ((*STAGES, "merge=median"), "'median' and fleet.placement", "compares"),
        (
            (*STAGES, "lr_reference_batch=16"),
            "'pipeline=4' and train.lr_reference_batch = 16",
            "rated",
        ),
        ((*STAGES, *REPLICA), "'pipeline=4' and hub.replica", "replica"),
        ((*STAGES, HUBS), "hub.hubs with 2 hubs and fleet.placement", "staged"),
        ((*STAGES, "topology=ring"), "fleet.topology = 'ring' and fleet.placement", "staged"),
        ((*STAGES, "gateways=true"), "fleet.gateways = true and fleet.placement", "staged"),
        ((*STAGES, GROUP), "and fleet.device", "group"),
        ((*FALLBACK, "strategy=sync-sgd"), "sync-sgd and servers.fallback", "closed"),
        ((*FALLBACK, *BUFFERED), "fedbuff(2, 0.5) and servers.fallback", "apart"),
        ((*FALLBACK, *REPLICA), "hub.replica and servers.fallback", "replica"),
        ((*FALLBACK, "gateways=true"), "gateways = true and servers.fallback", "group"),
        ((*FALLBACK, "topology=ring"), "'ring' and servers.fallback", "group"),
        ((*FALLBACK, HUBS, "ranges=4"), "2 hubs and servers.fallback", "group"),
        ((*FALLBACK, *SECURE), "strategy.secure and servers.fallback", "hidden"),
        ((*FALLBACK, "privacy=example", "noise=1"), "'example' and servers.fallback", "private"),
        ((*FALLBACK, "lr_reference_batch=64"), "and train.lr_reference_batch = 64", "rated"),
        (("merge=median",), "strategy.merge = 'median' and fedavg", "once"),
        (("strategy=dga", "merge=median", "codec=topk(0.01)"), "strategy.codec = 'topk", "zeros"),
        (("strategy=sync-sgd", "merge=krum(0)", "codec=powersgd(2)"), "powersgd", "compares"),
        (("strategy=dga(variates)", "merge=median"), "and dga(variates)", "compares"),
    ],
)
def test_what_does_not_go_together_is_refused_for_a_property(words, said, why):
    told = refusal(*words)
    assert said in told
    assert told.endswith(f": {WHY[why]}")
