"""The accountant against what others have published, and what a job's numbers make of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.__main__ import main
from edgetrain.errors import ConfigError
from edgetrain.jobs.privacy.accounting import Releases, epsilon, noise_for
from edgetrain.jobs.privacy.promise import fix_noise, promise, releases_of
from edgetrain.jobs.reading import parse
from edgetrain.jobs.resolved import look_up

# TensorFlow Privacy, privacy/analysis/compute_dp_sgd_privacy_test.py, values of its authors:
# (accountant, noise, steps, rate, delta, epsilon). Half the noise: that of "microbatching", which
# doubles the sensitivity.
TENSORFLOW_PRIVACY = [
    ("rdp", 1.3, 6_000, 150 / 60_000, 1e-5, 0.7242234026109595),
    ("rdp", 1.0, 30_000, 100 / 100_000, 1e-7, 1.4154988495444842),
    ("rdp", 0.7, 2, 1.0, 1e-5, 10.8602036),
    ("rdp", 0.35, 2, 1.0, 1e-5, 26.2880374),
    ("rdp", 0.7, 120, 1e-2, 1e-5, 3.2392676),
    ("rdp", 0.35, 120, 1e-2, 1e-5, 22.6248601),
    ("pld", 0.7, 2, 1.0, 1e-5, 10.1224946),
    ("pld", 0.35, 2, 1.0, 1e-5, 24.7160779),
    ("pld", 0.7, 120, 1e-2, 1e-5, 2.4612381),
    ("pld", 0.35, 120, 1e-2, 1e-5, 18.6977407),
]


@pytest.mark.parametrize(("how", "noise", "steps", "rate", "delta", "expected"), TENSORFLOW_PRIVACY)
def test_epsilon_is_what_tensorflow_privacy_publishes(how, noise, steps, rate, delta, expected):
    found = epsilon(Releases(noise, steps, rate), delta, how)
    assert found == pytest.approx(expected, rel=1e-5)


# Epsilon as papers and tutorials told it before 2020, when Renyi divergences were turned into
# epsilon by Mironov 2017, proposition 3: epsilon = min over orders of divergence + log(1/delta) /
# (order - 1). (noise, steps, rate, delta, orders, epsilon)
INTEGERS = tuple(range(2, 34))
MOMENTS = [
    # Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, section 3.2
    pytest.param(4.0, 10_000, 0.01, 1e-5, INTEGERS, 1.26, id="Abadi 2016"),
    # TensorFlow Privacy, tutorials/README.md, MNIST: 256 of 60,000, 60 and 10 epochs
    pytest.param(1.12, 14_062, 256 / 60_000, 1e-5, None, 2.92, id="tutorial, 60 epochs"),
    pytest.param(1.2, 2_343, 256 / 60_000, 1e-5, None, 1.20, id="tutorial, 10 epochs"),
]


@pytest.mark.parametrize(("noise", "steps", "rate", "delta", "orders", "expected"), MOMENTS)
def test_its_divergences_are_those_of_the_moments_accountant(
    noise, steps, rate, delta, orders, expected
):
    """Divergences are what is accounted; since then less epsilon follows from them."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant, compute_epsilon

    accountant = RdpAccountant(orders=orders)
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, steps)
    told = min(
        divergence + math.log(1 / delta) / (order - 1)
        for order, divergence in zip(accountant._orders, accountant._rdp, strict=True)
    )
    assert told == pytest.approx(expected, abs=0.005)
    less = compute_epsilon(accountant._orders, accountant._rdp, delta)[0]
    if orders is None:
        assert epsilon(Releases(noise, steps, rate), delta, "rdp") == pytest.approx(less)
    assert epsilon(Releases(noise, steps, rate), delta) <= less < told


@pytest.mark.parametrize("sigma", [0.3, 1.0, 7.0])
def test_one_release_is_the_gaussian_mechanism_of_balle_and_wang(sigma):
    """delta(epsilon) = Phi(1/2s - e s) - exp(e) Phi(-1/2s - e s), ICML 2018, theorem 8."""
    from scipy.stats import norm

    found = epsilon(Releases(sigma, 1), 1e-5)
    delta = norm.cdf(0.5 / sigma - found * sigma) - math.exp(found) * norm.cdf(
        -0.5 / sigma - found * sigma
    )
    assert delta == pytest.approx(1e-5, rel=1e-3)


@settings(max_examples=10, deadline=None)
@given(
    noise=st.floats(0.5, 20),
    count=st.integers(1, 3000),
    rate=st.sampled_from([1.0, 0.3, 0.01]),
    delta=st.sampled_from([1e-7, 1e-5, 1e-2]),
)
def test_more_noise_fewer_releases_and_rarer_ones_cost_less(noise, count, rate, delta):
    def rdp(noise, count, rate):
        return epsilon(Releases(noise, count, rate), delta, "rdp")

    here = rdp(noise, count, rate)
    assert rdp(2 * noise, count, rate) <= here <= rdp(noise, 2 * count, rate)
    assert rdp(noise, count, rate / 2) <= here


@pytest.mark.parametrize(
    ("target", "count", "rate", "how"),
    [
        (0.001, 100, 1.0, "pld"),
        (8.0, 100, 1.0, "pld"),
        (600.0, 100, 1.0, "pld"),
        (60.0, 50, 0.2, "pld"),
        pytest.param(2.0, 20, 0.01, "pld", marks=pytest.mark.real),
        (0.5, 50, 0.2, "rdp"),
    ],
)
def test_the_noise_found_keeps_to_the_target_and_hardly_less_would(target, count, rate, how):
    noise = noise_for(target, count, 1e-5, rate, how)
    assert epsilon(Releases(noise, count, rate), 1e-5, how) <= target
    assert epsilon(Releases(noise * 0.995, count, rate), 1e-5, how) > target


def test_borders():
    assert epsilon(Releases(0.0, 5), 1e-5) is None
    assert epsilon(Releases(math.inf, 5), 1e-5) == 0.0
    assert epsilon(Releases(1.0, 0), 1e-5) == 0.0
    assert epsilon(Releases(1.0, 5, 0.0), 1e-5) == 0.0
    huge = epsilon(Releases(0.01, 10**6), 1e-5)
    assert huge > 1e6


@pytest.mark.parametrize(
    ("releases", "delta", "how"),
    [
        (Releases(-1.0, 1), 1e-5, "pld"),
        (Releases(math.nan, 1), 1e-5, "pld"),
        (Releases(1.0, -1), 1e-5, "pld"),
        (Releases(1.0, 1, 1.5), 1e-5, "pld"),
        (Releases(1.0, 1, math.nan), 1e-5, "pld"),
        (Releases(1.0, 1), 0.0, "pld"),
        (Releases(1.0, 1), 1.0, "pld"),
        (Releases(1.0, 1), math.nan, "pld"),
        (Releases(1.0, 1), 1e-5, "prv"),
    ],
)
def test_numbers_that_cannot_be_are_refused(releases, delta, how):
    with pytest.raises(ConfigError):
        epsilon(releases, delta, how)


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf, 1e-12])
def test_targets_that_cannot_be_are_refused(target):
    with pytest.raises(ConfigError, match="epsilon"):
        noise_for(target, 100, 1e-5)


# -- of a job --------------------------------------------------------------------------------------


def job(*overrides):
    return look_up(parse({}, ["members=3", "steps=101", "batch=10", "noise=2", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["privacy=member", "strategy=dga", "local_steps=5"], Releases(2.0, 21)),
        (["privacy=member", "strategy=sync-sgd"], Releases(2.0, 101)),
        (["privacy=example"], Releases(2.0, 101, 0.25)),
        (["privacy=example", "batch=100"], Releases(2.0, 101, 1.0)),
        (["privacy=example", "privacy.sampling=shuffle"], Releases(2.0, 26)),
        (
            ["privacy=example", "privacy.sampling=shuffle", "batch=30"],
            Releases(2.0 / math.sqrt(2), 76),
        ),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_job_releases_what_its_smallest_shard_is_released(overrides, expected):
    samples = (60, 40, 41)
    assert releases_of(job(*overrides), samples) == expected


COHORT = ["privacy=member", "strategy=local-sgd", "local_steps=5", "members=100", "cohort=10"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["privacy.where=hub", "strategy.sampling=poisson"], Releases(2.0, 21, 0.1)),
        (["strategy.sampling=poisson"], "the most drawn"),
        (["privacy.where=hub"], "the most drawn"),
        ([], "the most drawn"),
        (["privacy.where=hub", "strategy.sampling=available"], Releases(2.0, 21)),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_member_of_a_cohort_releases_in_its_rounds(overrides, expected):
    """Those that anyone can work out cost a whole release each; those that nobody can are a
    chance."""
    named = job(*COHORT, *overrides)
    if expected == "the most drawn":
        rosters = [named.job.cohort.drawn(round) for round in range(21)]
        times = [sum(member in roster for roster in rosters) for member in range(100)]
        expected = Releases(2.0, max(times))
        assert 3 <= max(times) <= 10
    assert releases_of(named, ()) == expected
    assert releases_of(named, (), rounds=1).count == 1


@pytest.mark.parametrize(
    ("size", "steps", "noise"), [(10, 500, 1.0), (50, 1000, 2.0), (1, 100, 0.5)]
)
def test_what_drawing_members_saves_is_what_the_accountant_says(size, steps, noise):
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    words = [*COHORT, "privacy.where=hub", "strategy.sampling=poisson", f"noise={noise}"]
    found = promise(job(*words, "members=1000", f"cohort={size}", f"steps={steps}"))
    each = PoissonSampledDpEvent(size / 1000, GaussianDpEvent(noise))
    wanted = PLDAccountant().compose(SelfComposedDpEvent(each, steps // 5)).get_epsilon(1e-5)
    assert found.epsilon == pytest.approx(wanted, rel=0.01)
    whole = promise(job(*words, "members=1000", "strategy.sampling=uniform", "cohort=0"))
    assert found.epsilon < whole.epsilon


def test_of_a_run_that_was_interrupted_only_what_was_done_counts():
    named = job("privacy=example")
    assert releases_of(named, (40,), steps=7, rounds=2) == Releases(2.0, 7, 0.25)
    assert releases_of(job("privacy=member"), (40,), steps=7, rounds=2) == Releases(2.0, 2)


@pytest.mark.parametrize(
    "more", [[], ["privacy.sampling=shuffle"], ["privacy.sampling=shuffle", "batch=7"]]
)
def test_a_target_becomes_the_noise_that_keeps_it(more):
    named = job("privacy=example", "noise=0", "privacy.epsilon=60", *more)
    fixed = fix_noise(named, (40, 50))
    assert fixed.job.privacy.noise > 0
    found = promise(fixed, (40, 50))
    assert 59 < found.epsilon <= 60
    assert fix_noise(fixed, (40, 50)) is fixed
    assert fix_noise(job("noise=0"), ()).job.privacy.noise == 0


# -- the command -----------------------------------------------------------------------------------


def test_the_command_answers_ahead_of_time(capsys):
    words = ["privacy", "--rounds", "120", "--sample-rate", "0.01", "--delta", "1e-5", "--json"]
    assert main([*words, "--noise", "0.7"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == pytest.approx(2.4612381, rel=1e-5)
    assert main([*words, "--epsilon", "3.25", "--accountant", "rdp"]) == 0
    back = json.loads(capsys.readouterr().out)
    assert back["noise"] == pytest.approx(0.7, abs=0.01)  # TensorFlow Privacy: 3.239 at 0.7
    assert back["epsilon"] <= 3.25
    assert main([*words[:-1], "--noise", "0"]) == 0
    assert "no promise" in capsys.readouterr().out


def test_the_command_answers_for_a_job(capsys):
    assert main(["privacy", "members=4", "privacy=example", "noise=1.1", "steps=50", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["count"] == 50
    assert found["rate"] == pytest.approx(16 / 359)
    assert found["epsilon"] == pytest.approx(epsilon(Releases(1.1, 50, 16 / 359), 1e-5))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--noise", "1"],
        ["--noise", "1", "--epsilon", "1", "--rounds", "5"],
        ["members=3"],
        ["--noise", "-1", "--rounds", "5"],
    ],
    ids=" ".join,
)
def test_the_command_says_what_is_missing(words, capsys):
    assert main(["privacy", *words]) == 2
    assert capsys.readouterr().err.startswith("edgetrain: ")


@pytest.mark.real
def test_without_the_library_it_is_named_and_noise_needs_it_not():
    code = """
import sys
sys.modules["dp_accounting"] = None
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.privacy.accounting import Releases, epsilon
from edgetrain.jobs.privacy.promise import fix_noise
from edgetrain.jobs.reading import parse
from edgetrain.jobs.rules import resolve
from edgetrain.training.member.member import release_of
job = parse({}, ["privacy=member", "noise=1", "where=hub"])
hub_of(fix_noise(resolve(job))), release_of(job.privacy)
try:
    epsilon(Releases(1.0, 1), 1e-5)
except Exception as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[private]" in done.stdout
