"""`fleet.topology`: which names there are, what is refused with which, what is in the digest."""

from __future__ import annotations

import pytest

from edgetrain.errors import ConfigError
from edgetrain.jobs.job import COLLECTIVES, TOPOLOGIES, Job
from edgetrain.jobs.plan import check
from edgetrain.jobs.reading import load, parse
from edgetrain.jobs.rules import resolve


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["topology=rign"], "fleet.topology = 'rign' (did you mean 'ring'?)"),
        (["topology=direct"], "strategy.ranges = 1 leaves several reducers nothing to share"),
        (["topology=direct", "ranges=4", "strategy=fedbuff(2, 0.5)"], "are out of step"),
        (["topology=direct", "ranges=4", "merge=median"], "compares members"),
        (["topology=direct", "ranges=4", "fleet.gateways=true"], "fleet.gateways = true"),
        (["topology_trust=2"], "fleet.topology_trust = 2 (allowed is true or false)"),
    ],
)
def test_a_slip_is_one_clear_line(words, said):
    with pytest.raises(ConfigError) as refused:
        resolve(load(None, words))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_reducers_wait_longer_than_a_contribution_takes_to_another_member():
    """Else a round closes with that of the reducer's own machine alone, and all others are late."""
    words = ["topology=direct", "ranges=4", "network=wan-200ms"]
    check(load(None, [*words, "deadline_s=0.25"]))
    with pytest.raises(ConfigError, match=r"deadline_s = 0.1, and a contribution takes 0.2 s to"):
        check(load(None, [*words, "deadline_s=0.1"]))


def test_devices_come_back_into_a_ring_unless_only_its_members_know_an_outer_rule():
    away = "absences=[{members = [1], at_s = 2, for_s = 4}]"
    words = ["topology=ring", "members=3", away]
    check(load(None, [*words, "strategy=fedavg"]))
    with pytest.raises(ConfigError, match="diloco in a ring: a device that comes back cannot join"):
        check(load(None, [*words, "strategy=diloco"]))


@pytest.mark.parametrize("name", ["star", "auto", *COLLECTIVES])
def test_topologies_that_are_there(name):
    job = {"fleet": {"topology": name}, "strategy": {"name": "fedavg"}}
    assert resolve(parse(job)).job.fleet.topology == name


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_only_a_topology_that_changes_bits_is_in_the_digest(name):
    same = parse({"fleet": {"topology": name, "topology_trust": True}}).digest() == Job().digest()
    assert same == (name not in COLLECTIVES)


@pytest.mark.parametrize("name", sorted(COLLECTIVES))
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["codec=int8"], "strategy.codec = 'int8'"),
        (["reply_codec=fp16"], "strategy.reply_codec = 'fp16'"),
        (["merge=median"], "strategy.merge = 'median': the rule compares members"),
        (["strategy=fedbuff(2, 0.5)"], "are out of step"),
        (["strategy=streaming-diloco(2, 0.5)"], "a fragment a round"),
        (["secure=true"], "masks are removed from the sum"),
        (["unit=member", "where=hub", "noise=1", "clip=1"], "the hub has to see contributions"),
        (["fleet.gateways=true"], "a gateway adds up for its site"),
        (["ranges=2", "hub.hubs=['tcp://a:1', 'tcp://b:1']"], "hub.hubs with 2 hubs"),
    ],
)
def test_what_sums_between_members_do_not_go_with(name, words, said):
    with pytest.raises(ConfigError) as refused:
        resolve(load(None, [f"topology={name}", *words]))
    assert f"fleet.topology = '{name}' and " in str(refused.value)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
