"""`hub.min_members`: what it does not go together with."""

from __future__ import annotations

import pytest

from edgetrain.errors import ConfigError
from edgetrain.jobs.job import COLLECTIVES
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve

HUBS = "hub.hubs=['tcp://a:1', 'tcp://b:1']"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["min_members=5"], "hub.min_members = 5: the job has only 4 members"),
        (["min_members=3", "strategy=sync-sgd"], "sync-sgd and hub.min_members = 3: no member"),
        (["min_members=2", "quorum=3"], "hub.min_members = 2 and hub.quorum = 3"),
        (["min_members=2", "secure=true"], "hub.min_members = 2 and strategy.threshold = 3"),
        (["min_members=3", "ranges=4", HUBS], "hub.hubs with 2 hubs and hub.min_members = 3"),
        (["min_members=3", "fleet.gateways=true"], "hub.min_members = 3: members begin together"),
        (["min_members=2", "strategy=fedbuff(3, 0.5)"], "with 2 members"),
        (["min_members=2", "merge=multi-krum(1)"], "the job has 2"),
        *(
            (["min_members=3", f"topology={name}", "strategy=fedavg"], "members begin together")
            for name in COLLECTIVES
        ),
        (["min_members=3", "topology=direct", "ranges=4"], "members begin together"),
    ],
)
def test_what_it_does_not_go_with_is_one_line(words, said):
    with pytest.raises(ConfigError) as refused:
        resolve(load(None, ["members=4", *words]))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "words", [["sync-sgd"], ["fedavg", "topology=ring"], ["dga", "ranges=4", "topology=direct"]]
)
def test_all_of_them_is_no_restriction(words):
    resolve(load(None, ["members=4", "min_members=4", f"strategy={words[0]}", *words[1:]]))


def test_it_is_not_in_the_digest():
    assert load(None, ["min_members=2", "start_after_s=1"]).digest() == load(None, []).digest()
