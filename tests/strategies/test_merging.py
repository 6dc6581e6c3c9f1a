"""Robust merge rules: what they promise, against plain NumPy, and how a job names them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_merge import pieces_of

from edgetrain.errors import ConfigError
from edgetrain.jobs.reading import parse
from edgetrain.jobs.rules import resolve
from edgetrain.strategies import merging
from edgetrain.strategies.merging import elementwise
from edgetrain.strategies.merging.rule import Mean, RoundRule, SliceRule

PART = 5
"""Elements of a part, so that a vector of a few elements has several."""

ROUND_RULES = ["median", "trimmed-mean(0.3)", "krum(2)", "multi-krum(2)", "multi-krum(1, 3)",
               "centered-clip(1.5)", "centered-clip(2x, 5)", "norm-clip(2)", "norm-clip(1x)",
               "norm-bound(1.2x)"]  # fmt: skip
MOVABLE = [r for r in ROUND_RULES if not r.startswith("norm")]
"""Rules for which it does not matter where zero is."""

FLEETS = st.tuples(st.integers(7, 12), st.integers(1, 23), st.integers(0, 999))
"""Members, elements, seed."""


def drawn(members, elements, seed):
    return np.random.default_rng(seed).standard_normal((members, elements)).astype(np.float32)


def merged(spelled, vectors, weights=None):
    """(result, cuts) of a rule over vectors in parts of PART elements."""
    rule = merging.parse(spelled) if isinstance(spelled, str) else spelled
    elements = len(vectors[0])
    cuts = [slice(s, min(s + PART, elements)) for s in range(0, elements, PART)]
    weights = [1.0] * len(vectors) if weights is None else weights
    by_part = [pieces_of([np.ascontiguousarray(v[c]) for v in vectors], weights) for c in cuts]
    contributions = [list(pieces) for pieces in zip(*by_part, strict=True)]
    out = np.full(elements, np.nan, np.float32)
    return out, rule.merge_round(contributions, [out[c] for c in cuts])


# -- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelled", ROUND_RULES)
@given(FLEETS)
def test_the_order_of_members_does_not_matter(spelled, fleet):
    vectors = drawn(*fleet)
    order = np.random.default_rng(fleet[2]).permutation(len(vectors))
    one, cuts = merged(spelled, vectors)
    other, moved = merged(spelled, vectors[order])
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert {c.index for c in cuts} == {order[c.index] for c in moved}


@pytest.mark.parametrize("spelled", MOVABLE)
@given(FLEETS, st.floats(-8, 8))
def test_it_moves_with_what_it_is_given(spelled, fleet, by):
    vectors = drawn(*fleet)
    shift = np.float32(by) * drawn(1, fleet[1], 5)[0]
    one, _ = merged(spelled, vectors)
    other, _ = merged(spelled, vectors + shift)
    np.testing.assert_allclose(one + shift, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("spelled", ["median", "trimmed-mean(0.2)", "krum(1)", "multi-krum(1)",
                                     "centered-clip(0.1)", "norm-clip(1x)",
                                     "norm-bound(1x)"])  # fmt: skip
@given(FLEETS)
def test_equal_contributions_are_what_comes_out(spelled, fleet):
    (vector,) = drawn(1, fleet[1], fleet[2])
    out, cuts = merged(spelled, [vector] * fleet[0])
    np.testing.assert_allclose(out, vector, rtol=1e-5, atol=1e-6)
    assert all(cut.share == 1 and "krum" in spelled for cut in cuts)


@pytest.mark.parametrize("spelled", ROUND_RULES)
def test_one_member_gets_its_own_back(spelled):
    (vector,) = drawn(1, 7, 3)
    out, _ = merged(spelled.replace("norm-clip(2)", "norm-clip(9)"), [vector])
    np.testing.assert_allclose(out, vector, rtol=1e-6)


@st.composite
def attacks(draw):
    """Honest vectors and a minority of anything, of any size."""
    honest = drawn(draw(st.integers(5, 9)), draw(st.integers(1, 23)), draw(st.integers(0, 999)))
    liars = draw(st.integers(0, (len(honest) - 3) // 2))
    size = 10.0 ** draw(st.integers(-3, 37))
    same = draw(st.booleans())
    lies = drawn(1 if same else liars, honest.shape[1], draw(st.integers(0, 999))) * size
    lies = np.resize(lies.astype(np.float32), (liars, honest.shape[1]))
    return honest, lies


def mixed(honest, lies):
    both = np.concatenate([honest, lies])
    return both[np.random.default_rng(0).permutation(len(both))]


def diameter(vectors):
    pairs = itertools.combinations(vectors.astype(np.float64), 2)
    return max((math.dist(a, b) for a, b in pairs), default=0.0)


@given(attacks())
def test_elementwise_rules_stay_within_the_range_of_the_honest(attack):
    honest, lies = attack
    members = len(honest) + len(lies)
    for spelled in ("median", f"trimmed-mean({len(lies) / members})"):
        out, _ = merged(spelled, mixed(honest, lies))
        slack = 1e-5
        assert (out >= honest.min(axis=0) - slack).all(), spelled
        assert (out <= honest.max(axis=0) + slack).all(), spelled


@given(attacks())
def test_krum_stays_near_an_honest_contribution(attack):
    honest, lies = attack
    members, f = len(honest) + len(lies), len(lies)
    bound = math.sqrt(members - f - 2) * diameter(honest)
    out, _ = merged(f"krum({f})", mixed(honest, lies))
    assert min(math.dist(out, h) for h in honest) <= bound * (1 + 1e-6)
    out, _ = merged(f"multi-krum({f})", mixed(honest, lies))
    assert math.dist(out, honest.mean(axis=0)) <= (bound + diameter(honest)) * (1 + 1e-5)


@given(attacks(), st.floats(0.1, 5.0), st.integers(1, 4))
def test_clipping_goes_no_further_than_it_may(attack, tau, turns):
    honest, lies = attack
    vectors = mixed(honest, lies)
    out, _ = merged(f"centered-clip({tau}, {turns})", vectors)
    bound = 2 * diameter(honest) + turns * tau
    assert math.dist(out, honest.mean(axis=0)) <= bound * (1 + 1e-4)
    for spelled in (f"norm-clip({tau})", f"norm-bound({tau})"):
        out, _ = merged(spelled, vectors)
        assert np.linalg.norm(out) <= tau * (1 + 1e-5)


# -- against plain definitions --------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 99))
def test_the_median_is_numpys(members, elements, seed):
    vectors = drawn(members, elements, seed)
    out, _ = merged("median", vectors)
    np.testing.assert_allclose(out, np.median(vectors, axis=0), rtol=1e-5, atol=1e-7)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 99), st.floats(0, 0.499))
def test_the_trimmed_mean_is_that_of_what_is_left(members, elements, seed, share):
    vectors = drawn(members, elements, seed)
    ends = min(math.ceil(share * members - 1e-9), (members - 1) // 2)
    kept = np.sort(vectors, axis=0)[ends : members - ends]
    out, _ = merged(f"trimmed-mean({share})", vectors)
    np.testing.assert_allclose(out, kept.mean(axis=0), rtol=1e-4, atol=1e-5)


@given(st.integers(1, 70), st.data())
def test_the_network_sorts_the_places_that_are_asked_for(members, data):
    first = data.draw(st.integers(0, (members - 1) // 2))
    watched = data.draw(st.integers(0, (members - 1) // 2))
    rows = drawn(members, 9, members)
    rows[:, ::2] = np.round(rows[:, ::2])  # equal values too
    ordered, right = elementwise.in_order(rows, first, watched), np.sort(rows, axis=0)
    for place in {*range(first, members - first), watched, members - 1 - watched}:
        np.testing.assert_array_equal(ordered[place], right[place])


def naive_krum(vectors, f, chosen):
    x = vectors.astype(np.float64)
    scores = []
    for i in range(len(x)):
        others = sorted(((x[i] - x[j]) ** 2).sum() for j in range(len(x)) if j != i)
        scores.append(sum(others[: len(x) - f - 2]))
    return x[np.argsort(scores)[:chosen]].mean(axis=0)


@given(FLEETS, st.integers(0, 2), st.integers(1, 3))
def test_krum_is_as_defined(fleet, f, chosen):
    vectors = drawn(*fleet)
    out, cuts = merged(f"multi-krum({f}, {chosen})", vectors)
    np.testing.assert_allclose(out, naive_krum(vectors, f, chosen), rtol=1e-5, atol=1e-6)
    assert len(cuts) == len(vectors) - chosen
    assert {cut.share for cut in cuts} <= {1.0}


@given(FLEETS, st.floats(0.2, 4.0), st.integers(1, 4))
def test_centred_clipping_is_as_defined(fleet, tau, turns):
    x = drawn(*fleet)
    wide = x.astype(np.float64)
    apart = np.linalg.norm(wide[:, None] - wide[None], axis=2)
    nearer = np.sort(apart**2, axis=1)[:, : (len(x) + 1) // 2].sum(axis=1)
    v = wide[np.lexsort((nearer, np.median(apart**2, axis=1).round(9)))[0]]
    for _ in range(turns):
        ways = wide - v
        lengths = np.maximum(np.linalg.norm(ways, axis=1, keepdims=True), 1e-30)
        v = v + (ways * np.minimum(1, tau / lengths)).mean(axis=0)
    out, _ = merged(f"centered-clip({tau}, {turns})", x)
    np.testing.assert_allclose(out, v, rtol=1e-4, atol=1e-4)


@given(FLEETS, st.floats(0.2, 4.0), st.booleans())
def test_norm_rules_are_as_defined_and_weigh(fleet, tau, relative):
    x = drawn(*fleet).astype(np.float64)
    weights = np.random.default_rng(fleet[2]).uniform(0.1, 9, len(x))
    lengths = np.linalg.norm(x, axis=1)
    limit = tau * np.median(lengths) if relative else tau
    spelled = f"{tau}x" if relative else f"{tau}"
    clipped = x * np.minimum(1, limit / np.maximum(lengths, 1e-30))[:, None]
    out, cuts = merged(f"norm-clip({spelled})", x.astype(np.float32), weights)
    np.testing.assert_allclose(out, np.average(clipped, axis=0, weights=weights), atol=1e-5)
    assert {c.index for c in cuts} == set(np.flatnonzero(lengths > limit))
    out, cuts = merged(f"norm-bound({spelled})", x.astype(np.float32), weights)
    kept = lengths <= limit
    right = np.average(x[kept], axis=0, weights=weights[kept]) if kept.any() else 0 * x[0]
    np.testing.assert_allclose(out, right, atol=1e-5)
    assert {c.index for c in cuts} == set(np.flatnonzero(~kept))


# -- who was cut ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spelled", ["median", "trimmed-mean(0.3)", "krum(3)", "centered-clip(2x)",
                                     "norm-clip(2x)", "norm-bound(2x)"])  # fmt: skip
def test_the_report_names_those_who_lied(spelled):
    vectors = 1 + 0.1 * drawn(10, 500, 1)
    vectors[[2, 5, 7]] *= -9
    _, cuts = merged(spelled, vectors)
    named = {c.index for c in cuts}
    assert named == {2, 5, 7} if spelled != "krum(3)" else {2, 5, 7} <= named
    assert all(0 < c.share <= 1 and c.reason for c in cuts)


def test_a_report_of_honest_members_is_empty():
    for spelled in ("median", "trimmed-mean(0.3)"):
        assert merged(spelled, drawn(10, 3000, 1))[1] == ()


def test_krum_says_when_a_round_is_too_small_for_it():
    out, cuts = merged("krum(3)", drawn(6, 4, 1))
    np.testing.assert_allclose(out, naive_krum(drawn(6, 4, 1), 1, 1), rtol=1e-6)
    assert (cuts[-1].index, cuts[-1].reason) == (
        -1,
        "6 contributions: 1 that lie are tolerated, not 3",
    )


# -- spelling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelled", "said"),
    [
        ("medain", "no merge rule 'medain' (did you mean 'median'?)"),
        ("krumm(1)", "no merge rule 'krumm' (did you mean 'krum'?)"),
        ("", "no merge rule '' (known: centered-clip"),
        ("median(", "no merge rule 'median(' (did you mean 'median'?)"),
        ("mean(2)", "'mean' takes no arguments, not (2)"),
        ("median(2)", "'median' takes no arguments, not (2)"),
        ("trimmed-mean", "trimmed-mean with arguments none (it reads trimmed-mean(share))"),
        ("trimmed-mean(1, 2)", "trimmed-mean with arguments (1, 2) (it reads"),
        ("trimmed-mean(0.5)", "share = 0.5 (allowed are 0 to less than 0.5)"),
        ("trimmed-mean(-0.1)", "share = -0.1 (allowed are 0"),
        ("trimmed-mean(nan)", "share = nan (allowed are 0"),
        ("krum(x)", "f = x (allowed are whole numbers from 0"),
        ("krum(-1)", "f = -1 (allowed are whole numbers from 0"),
        ("krum(²)", "f = ² (allowed are whole numbers from 0"),
        ("multi-krum(1, 0)", "m = 0 (allowed are whole numbers from 1"),
        ("multi-krum(1, 2, 3)", "it reads multi-krum(f[, m])"),
        ("centered-clip(0)", "tau = 0 (allowed are a length greater than 0"),
        ("centered-clip(1, 0)", "iterations = 0"),
        ("norm-clip(inf)", "tau = inf"),
        ("norm-clip(x)", "tau = x (allowed are a length"),
        ("norm-bound(2xx)", "tau = 2xx"),
    ],
)
def test_what_is_no_rule_is_named(spelled, said):
    with pytest.raises(ConfigError) as caught:
        merging.parse(spelled)
    assert said in str(caught.value)


def test_every_row_can_be_spelled():
    spelled = ["mean", *ROUND_RULES]
    assert {merging.find(text).name for text in spelled} == set(merging.TABLE)
    for text in spelled:
        for keeps in (True, False):
            rule = merging.parse(f" {text} ", keeps)
            assert rule.keeps_late is keeps
            assert isinstance(rule, SliceRule if text == "mean" else RoundRule)
            assert not isinstance(rule, RoundRule if text == "mean" else SliceRule)
    assert isinstance(merging.parse("mean"), Mean)


def why(text, *, strategy="dga", members=10, codec="fp32"):
    words = f"merge={text}", f"strategy={strategy}", f"members={members}", f"codec={codec}"
    try:
        resolve(parse({}, words))
    except ConfigError as refused:
        return refused.message
    return ""


def test_what_does_not_go_together_is_said():
    for text in ROUND_RULES:
        assert why(text) == ""
        said = why(text, strategy="fedavg")
        assert said == "" if text.startswith("norm") else "counts each member once" in said
    assert why("mean", strategy="fedavg", members=1, codec="topk(0.01)") == ""
    assert "of mostly zeros is zero" in why("median", codec="small(8): fp32; topk(0.01) | q2")
    assert "of mostly zeros is zero" in why("trimmed-mean(0.2)", codec="dgc(0.01)")
    assert why("multi-krum(2)", codec="topk(0.01)") == ""
    gradients = {"strategy": "sync-sgd", "codec": "powersgd(4)"}
    assert "compares members" in why("norm-clip(2x)", **gradients)
    assert "compares" not in why("mean", **gradients)
    assert why("krum(3)", members=9) == ""
    assert why("krum(3)", members=8).endswith("it needs at least 9 members, the job has 8")
    assert why("multi-krum(1, 4)", members=6).endswith("at least 7 members, the job has 6")


@pytest.mark.parametrize("tensor", ["topk", "randk.weight", "dgc.*", "powersgd"])
def test_the_name_of_a_tensor_says_nothing_about_its_codec(tensor):
    for text in ROUND_RULES:
        assert why(text, codec=f"{tensor}: bf16; int8") == ""
