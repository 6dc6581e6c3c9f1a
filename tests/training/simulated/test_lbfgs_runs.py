"""lbfgs in virtual time: the bits do not depend on who computes; in one line what cannot be."""

from __future__ import annotations

import re

import pytest

from edgetrain.errors import ConfigError
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.runs.folder import create, read_metrics
from edgetrain.training.simulated import simulation

JOB = [
    "data.partition=shared(all)",
    "steps=5",
    "evaluate_every=5",
    "network=wan-200ms",
    "batch=512",
]


def trained(folder, name, *words):
    inside = create(folder, name)
    simulation.run(plan(load(None, [*JOB, *words])), inside)
    return inside


def base_of(inside) -> str:
    """The checksum of the base at the end, which all members report."""
    said = [line["reason"] for line in read_metrics(inside, "event")]
    (base,) = {found[1] for each in said if (found := re.search(r"base (\w+)", each))}
    return base


def test_bits_do_not_depend_on_how_many_members_compute(tmp_path):
    one = trained(tmp_path, "one", "members=1", "strategy=lbfgs(4, 6)", "pace_s=0.3")
    three = trained(tmp_path, "three", "members=3", "strategy=lbfgs(4, 2)", "pace_s=0.3")
    assert base_of(one) == base_of(three)
    rounds = [*read_metrics(three, "round")]
    assert [line["slices"] for line in rounds] == [6] * 5
    assert rounds[-1]["loss"] < rounds[0]["loss"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.partition=iid"], "slices are of a batch that all members hold"),
        (["secure=true"], "masks cancel over one contribution of each member"),
        (["merge=median"], "the hub sums slices, and judges no member"),
        (["codec=int8"], "a codec's rounding would be in them"),
        (["reply_codec=fp16"], "a codec's rounding would be in them"),
        (["privacy=example", "noise=1"], "epsilon does not count that"),
        (["strategy=lbfgs(0)"], "history = 0 (allowed are whole numbers from 1"),
        (["strategy=lbfgs(10, 8, 0)"], "batch = 0 (allowed are whole numbers from 1"),
        (
            ["strategy=lbfgs(10, 8, all, 1, golden)"],
            "search = golden (allowed are armijo and wolfe)",
        ),
        (["strategy=lbfgs | adam"], "the hub moves the base by a search of its own"),
        (["topology=direct"], "hands out work"),
        (["quorum=2"], "a round has every slice"),
        (["replica=tcp://127.0.0.1:1"], "hub.replica"),
        (["strategy.ranges=4"], "one hub has the search"),
        (["gateways=true"], "hands out work"),
        (["accumulate=2"], "train.batch samples at a time"),
        (["every=5"], "exchanges gradients at every step"),
        (["delay=5"], "lbfgs waits for every reply"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(words, said):
    with pytest.raises(ConfigError) as refused:
        resolve(load(None, ["strategy=lbfgs", "data.partition=shared(all)", *words]))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["strategy=lbfgs(10, 8, 100000)"], "the data have"),
        (["strategy=lbfgs(10, 8, 16)"], "cuts a batch into 32 slices, and it has 16 samples"),
        (["data.partition=shared(64)"], "members hold other data"),
    ],
)
def test_what_the_data_do_not_have_is_refused_before_anything_starts(words, said):
    with pytest.raises(ConfigError) as refused:
        plan(load(None, ["strategy=lbfgs", "data.partition=shared(all)", *words]))
    assert said in str(refused.value)
