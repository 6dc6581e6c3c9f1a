"""What a way in loads: lines of edgetrain in a fresh interpreter, and modules that a job of a star
does not use.

A bound is what was reached, rounded up to the next hundred: who needs more of it says so here. The
aim is 14,000 lines for `edgetrain.join` and `edgetrain member` and 15,000 for `edgetrain hub`,
trained as well as imported. Names of a user's own (`extensions/`, which tables of names ask) took
about 240 lines of each, personal layers and cohorts about 100, as did evaluation on members' data;
answers to former names of keys, and to what others call a board or a key, about 20; the help took
70 for the verb `simulate`, an output that takes nothing, and flags that belong to another verb.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

BOUNDS = {
    "import edgetrain": 100,
    "help of edgetrain": 11_000,
    "edgetrain.join": 12_300,
    "a member": 14_600,
    "a hub": 17_300,
}
TRAINED = {
    "edgetrain.join, trained": 13_600,
    "a member, trained": 18_800,
    "a hub, trained": 19_400,
}
UNUSED = (
    *(f"codecs.{name}" for name in ("auto", "blocks", "deep", "lowrank", "pieces", "rules")),
    "codecs.sparse", "codecs.table",
    *(f"exchange.{name}" for name in ("further_messages", "gateway", "masks", "peers", "pipeline")),
    *(f"exchange.hub.{name}" for name in ("collective", "deal", "density", "direct", "fallback",
                                          "lead", "masked_rounds", "reducer", "replicated",
                                          "shared")),
    "exchange.member.checkpoint", "exchange.member.work",
    *(f"jobs.{name}" for name in ("bundles", "capacity", "choosing", "placement", "plan",
                                  "privacy", "topology")),
    "fleet.cluster", "fleet.networks",
    *(f"runs.{name}" for name in ("dashboard", "looking", "tracking", "reports.plot")),
    *(f"strategies.{name}" for name in ("lbfgs", "merging.private", "outer", "scaffold",
                                        "streaming")),
    *(f"training.{name}" for name in ("emulated", "fallback", "gateway", "pipelined", "replica",
                                      "servers", "several", "simulated.simulation")),
    "training.member.keeping", "training.member.state",
)  # fmt: skip
"""What a star with the default strategy and codec does not use, as modules begin."""


@pytest.fixture(scope="module")
def weight():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        import weight

        yield weight
    del sys.modules["weight"]


def unused(names: list[str]) -> list[str]:
    """Those of these modules that are UNUSED."""
    begins = tuple(f"edgetrain.{each}." for each in UNUSED)
    return [name for name in names if f"{name}.".startswith(begins)]


@pytest.mark.parametrize("door", BOUNDS)
def test_a_door_loads_no_more_lines(weight, door):
    found = weight.weigh(f"{weight.DOORS[door]}\nreport()")
    assert found["lines"] <= BOUNDS[door]
    assert door == "help of edgetrain" or not unused(found["names"])


def test_a_star_loads_no_more_lines_while_it_trains(weight, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # a machine without keys
    found = dict(weight.trained(1000, tmp_path))
    assert found.keys() == TRAINED.keys()
    more = {what: row["lines"] for what, row in found.items() if row["lines"] > TRAINED[what]}
    assert more == {}
    assert not [each for row in found.values() for each in unused(row["names"])]
