"""Outer rules: each is the ten lines of its paper, bit for bit, in ranges of any size."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from fleet import Fleet, noisy_descent
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import strategies
from edgetrain.errors import ConfigError
from edgetrain.jobs.grid import variants
from edgetrain.jobs.reading import parse
from edgetrain.jobs.rules import resolve
from edgetrain.runs.folder import write_job
from edgetrain.runs.summary import summarise
from edgetrain.strategies import outer, outer_rules
from edgetrain.strategies.spelling import split_list
from edgetrain.vectors.vector import TILE

SPELLED = [
    "sgd(0.5)", "momentum(0.5, 0.9)", "nesterov(0.7, 0.9)", "adam(0.1, 0.9, 0.99, 0.001)",
    "yogi(0.1, 0.9, 0.99, 0.001)", "adagrad(0.1, 0.001)",
]  # fmt: skip


def naive_steps(text, pseudo_gradients):
    """The steps that the papers' server optimizers take, in float32: x_new = x - step(gradient).

    They take the parameters before a round minus those after it for the gradient, which points
    uphill, and subtract; here it is turned round, and what is returned is added.
    """
    name, numbers = text.split("(")[0], [float(n) for n in text.split("(")[1].strip(")").split(",")]
    lr, m, v = numbers[0], np.float32(0), np.float32(numbers[-1] ** 2)
    for g in pseudo_gradients:
        if name == "sgd":
            step = lr * g
        elif name in ("momentum", "nesterov"):  # torch.optim.SGD
            m = numbers[1] * m + g
            step = lr * (g + numbers[1] * m if name == "nesterov" else m)
        elif name == "adagrad":
            v = v + g * g
            step = lr * g / (np.sqrt(v) + numbers[1])
        else:  # algorithm 2 of Reddi et al., whose Delta is -g
            b1, b2, eps = numbers[1:]
            m = b1 * m + (1 - b1) * g
            square = g * g
            v = b2 * v + (1 - b2) * square if name == "adam" else (
                v - (1 - b2) * square * np.sign(v - square)
            )  # fmt: skip
            step = lr * m / (np.sqrt(v) + eps)
        yield -step


def rounds_of(seed, elements, count=6):
    """Merged contributions: some elements never move, some are tiny, some long."""
    rng = np.random.default_rng(seed)
    scale = rng.choice([0.0, 1e-30, 1e-3, 1.0, 1e6], elements)
    return [(scale * rng.standard_normal(elements)).astype(np.float32) for _ in range(count)]


def stepped(rule, merged):
    out = merged.copy()
    rule.step(out, 0)
    return out


@pytest.mark.parametrize("text", SPELLED)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_a_rule_is_its_papers_lines_bit_for_bit(text, seed, elements):
    rule = outer.parse(text)
    rule.start(elements)
    merged = rounds_of(seed, elements)
    for ours, theirs in zip(merged, naive_steps(text, [-each for each in merged]), strict=True):
        np.testing.assert_array_equal(stepped(rule, ours), theirs)
        assert theirs.dtype == np.float32


@pytest.mark.parametrize("text", SPELLED)
@given(st.data())
def test_ranges_may_be_stepped_one_at_a_time_in_any_order(text, data):
    elements = data.draw(st.sampled_from([7, TILE + 3]))
    cuts = sorted(data.draw(st.sets(st.integers(0, elements), max_size=4)) | {0, elements})
    ranges = data.draw(st.permutations(list(itertools.pairwise(cuts))))
    whole, pieces = outer.parse(text), outer.parse(text)
    for rule in (whole, pieces):
        rule.start(elements)
    for merged in rounds_of(1, elements, 3):
        found = merged.copy()
        for start, stop in ranges:
            pieces.step(found[start:stop], start)
        assert found.tobytes() == stepped(whole, merged).tobytes()


@pytest.mark.parametrize("text", SPELLED)
def test_a_restored_rule_goes_on_with_the_same_bits_and_its_own_memory(text):
    first, second, third = (outer.parse(text) for _ in range(3))
    before, after = rounds_of(3, 50)[:3], rounds_of(4, 50)[:3]
    first.start(50)
    for merged in before:
        first.step(merged.copy(), 0)
    second.restore(first.state())
    kept = {name: vector.copy() for name, vector in first.state().items()}
    ends = [stepped(first, merged).tobytes() for merged in after]
    third.restore(kept)
    for rule in (second, third):
        assert [stepped(rule, merged).tobytes() for merged in after] == ends
    first.start(50)
    fresh = outer.parse(text)
    fresh.start(50)
    assert [stepped(first, m).tobytes() for m in after] == [
        stepped(fresh, m).tobytes() for m in after
    ]


def test_steps_of_the_largest_contributions_stay_finite():
    for text in [*SPELLED, "nesterov(999, 0.9999999999)", "adam(999, 0.9999999, 0, 1e-12)"]:
        rule = outer.parse(text)
        rule.start(3)
        for _ in range(300):
            merged = np.array([1, -1, 0], np.float32) * np.float32(outer_rules.MOST_MAGNITUDE)
            rule.step(merged, 0)
            assert np.abs(merged).max() <= 2.0**100, text  # that much a lossy reply carries


# -- as a job spells them -------------------------------------------------------------------------


@pytest.mark.parametrize("text", SPELLED)
def test_what_is_spelled_is_found_again(text):
    assert outer.parse(text).spelled == text
    assert outer.parse(text.split("(")[0]).spelled.startswith(text.split("(")[0])


def test_defaults_are_the_papers():
    assert outer.parse("sgd").spelled == "sgd(1)"
    assert outer.parse("nesterov").spelled == "nesterov(0.7, 0.9)"
    assert outer.parse("momentum( 0.5 )").spelled == "momentum(0.5, 0.9)"
    assert outer.parse("adam").spelled.endswith(", 0.9, 0.99, 0.001)")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["outer=nestorov"], "no outer rule 'nestorov' (did you mean 'nesterov'?)"),
        (["outer=sgd(0)"], "sgd: lr = 0 (allowed are 1e-09 to less than 1000)"),
        (["outer=nesterov(0.7, 1)"], "nesterov: m = 1 (allowed are 0 to less than 1)"),
        (
            ["outer=adagrad(1, 1, 1)"],
            "adagrad with arguments (1, 1, 1) (it reads adagrad(lr = 0.03, eps = 0.001))",
        ),
        (
            ["strategy=sync-sgd", "outer=nesterov"],
            "sync-sgd: outer = nesterov: its replies are gradients, and each member's own "
            "optimizer steps on them (leave it out, or choose diloco or fedavg)",
        ),
        (
            ["strategy=sync-sgd | sgd(1)"],
            "sync-sgd: outer = sgd(1): its replies are gradients, and each member's own "
            "optimizer steps on them (leave it out, or choose diloco or fedavg)",
        ),
        (
            ["strategy=fedavg | adam", "outer=yogi"],
            "strategy.name = 'fedavg | adam' and strategy.outer = 'yogi' (say one of them)",
        ),
        (
            ["strategy=fedavg |"],
            "no outer rule '' (known: adagrad, adam, momentum, nesterov, sgd, yogi)",
        ),
    ],
)
def test_a_wrong_outer_rule_is_one_clear_line(words, said):
    with pytest.raises(ConfigError) as refused:
        resolve(parse({}, words))
    assert str(refused.value) == said


def test_an_outer_rule_is_spelled_behind_a_bar_or_as_a_key_of_the_job():
    for words in (["strategy=fedavg|nesterov"], ["strategy=fedavg", "outer=nesterov(0.70)"]):
        found = resolve(parse({}, words)).strategy
        assert (found.name, found.outer) == ("fedavg", "nesterov(0.7, 0.9)")
        assert found.spelled == "fedavg | nesterov(0.7, 0.9)"
        assert strategies.find(found.spelled) == found
    assert strategies.find("dga(predict) | sgd(0.5)").spelled == "dga(predict) | sgd(0.5)"
    own = resolve(parse({}, ["strategy=diloco"])).strategy
    assert own.spelled == "diloco"
    assert own == strategies.find(f"diloco | {own.outer}")


def test_every_row_names_its_outer_rule_as_it_is_spelled():
    for row in strategies.TABLE.values():
        rule = row.outer_rule()
        assert row.outer == ("" if rule is None else rule.spelled)


def test_strategies_with_outer_rules_are_compared():
    names = split_list("dga,fedprox(0.01),diloco,fedavg | adam(0.1, 0.9),sync-sgd")
    found = variants(parse({}, ["local_steps=3", "outer=sgd(0.5)"]), names)
    assert [each.strategy.name for each in found] == [
        "dga", "fedprox(0.01)", "diloco", "fedavg | adam(0.1, 0.9, 0.99, 0.001)", "sync-sgd",
    ]  # fmt: skip
    assert [each.strategy.outer for each in found] == ["sgd(0.5)"] * 3 + ["", ""]
    assert [resolve(each).strategy.outer for each in found][2:4] == [
        "sgd(0.5)", "adam(0.1, 0.9, 0.99, 0.001)",
    ]  # fmt: skip


# -- in a fleet -----------------------------------------------------------------------------------


def ends_of(strategy, **other):
    fleet = Fleet(strategy, 3, 2, 4, 11, rng=random.Random(7), **other).run()
    assert {m.params.tobytes() for m in fleet.members} == {fleet.members[0].half.base.tobytes()}
    return fleet


@pytest.mark.parametrize("codec", ["fp32", "topk(0.5) | q2", "auto(0.3)"])
@pytest.mark.parametrize("strategy", ["local-sgd", "fedavg", "dga(predict)"])
def test_a_rate_of_one_is_no_outer_rule_bit_for_bit(strategy, codec):
    plain, ours = (ends_of(s, codec=codec, elements=24) for s in (strategy, f"{strategy} | sgd(1)"))
    assert ours.hub.base.tobytes() == plain.hub.base.tobytes()
    assert [m.checksums for m in ours.members] == [m.checksums for m in plain.members]


def test_diloco_with_a_rate_of_one_is_local_sgd_bit_for_bit():
    plain, ours = ends_of("local-sgd"), ends_of("diloco | sgd(1)")
    assert ours.hub.base.tobytes() == plain.hub.base.tobytes()
    assert ends_of("diloco").hub.base.tobytes() != plain.hub.base.tobytes()


@pytest.mark.parametrize("text", SPELLED)
def test_a_fleet_with_an_outer_rule_is_the_papers_algorithm_bit_for_bit(text):
    """Three members, two local steps a round, no delay: x <- x - step(x - mean of members)."""
    fleet = ends_of(f"local-sgd | {text}")
    base, gradients = fleet.initial.copy(), []
    for round in range(6):
        moved = []
        for member in range(3):
            w = base.copy()
            for step in range(2 * round, min(2 * round + 2, 11)):
                w -= noisy_descent(member, step, w)
            moved.append(w - base)
        total = moved[0] + moved[1] + moved[2]
        gradients.append(-(total * np.float32(1 / 3)))
        *_, last = naive_steps(text, gradients)
        base = base + last
    assert fleet.hub.base.tobytes() == base.tobytes()


class Noted:
    """An outer rule that passes on to another, and adds up what it was asked and answered."""

    def __init__(self, rule, elements):
        self.rule, self.stepped = rule, np.zeros(elements)

    def __getattr__(self, name):
        return getattr(self.rule, name)

    def step(self, merged, start):
        self.rule.step(merged, start)
        self.stepped[start : start + merged.size] += merged


@pytest.mark.parametrize("strategy", ["diloco", "fedadam", "dga | nesterov"])
@pytest.mark.parametrize("codec", ["topk(0.3) | q2", "sign", "*b: bf16; low-rank(1)", "int8"])
@given(st.integers(0, 2**32))
def test_what_lossy_replies_leave_out_of_outer_steps_is_sent_later(strategy, codec, seed):
    fleet = Fleet(
        strategy, 3, 2, 4, 12, rng=random.Random(seed), codec="fp32", reply_codec=codec, elements=20
    )
    merger = fleet.hub.rounds.merger
    merger.outer = noted = Noted(merger.outer, 20)
    fleet.run()
    moved = fleet.hub.base.astype(np.float64) - fleet.initial
    assert np.abs(noted.stepped).max() > 0.01
    np.testing.assert_allclose(moved + merger.replies.residual, noted.stepped, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "name"),
    [(["strategy=fedavg", "outer=sgd(2)"], "fedavg | sgd(2)"), (["strategy=diloco"], "diloco")],
)
def test_a_run_is_named_with_the_outer_rule_of_its_job(words, name, tmp_path):
    write_job(tmp_path, parse({}, words).to_dict())
    assert summarise(tmp_path)["strategy"] == name
