"""Which links the way between two nodes passes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgetrain.fleet.networks import Profile, Site
from edgetrain.fleet.networks.nodes import LEAD, NodeLinks, hub_node

BARE = Profile("none")


def pair(name: str) -> tuple[str, str]:
    return f"{name} up", f"{name} down"


def links(sites: tuple[Site, ...] = ()) -> NodeLinks[str]:
    """Three members, a lead without a link, and hub 1 with one."""
    access = {node: pair(f"m{node}") for node in range(3)} | {hub_node(1): pair("h1")}
    return NodeLinks(access, [(site, pair(f"s{n}")) for n, site in enumerate(sites)])


def test_a_way_is_up_and_down() -> None:
    network = links()
    assert network.way(0, LEAD) == ["m0 up"]
    assert network.way(LEAD, 0) == ["m0 down"]
    assert network.way(0, hub_node(1)) == ["m0 up", "h1 down"]
    assert network.way(0, 2) == ["m0 up", "m2 down"]
    assert network.way(LEAD, hub_node(1)) == ["h1 down"]


def test_uplinks_are_passed_between_sites_only() -> None:
    network = links((Site(BARE, (0, 1), hubs=(1,)), Site(BARE, (2,))))
    assert network.way(0, 1) == ["m0 up", "m1 down"]
    assert network.way(0, hub_node(1)) == ["m0 up", "h1 down"]
    assert network.way(0, 2) == ["m0 up", "s0 up", "s1 down", "m2 down"]
    assert network.way(hub_node(1), LEAD) == ["h1 up", "s0 up"]
    assert network.way(LEAD, 2) == ["s1 down", "m2 down"]


@given(st.sampled_from([0, 1, 2, LEAD, hub_node(1)]), st.sampled_from([0, 1, 2, LEAD, hub_node(1)]))
def test_the_way_back_passes_the_same_links(source: int, target: int) -> None:
    network = links((Site(BARE, (0, 1), hubs=(1,)), Site(BARE, (2,))))
    there = [stage.split()[0] for stage in network.way(source, target)]
    back = [stage.split()[0] for stage in network.way(target, source)]
    assert there == back[::-1]
    assert bool(there) == (source != target and {source, target} != {LEAD})
