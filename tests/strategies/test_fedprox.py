"""FedProx: its law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import strategies
from edgetrain.errors import ConfigError
from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.strategies.displacement import Displacement
from edgetrain.strategies.fedprox import FedProx

ELEMENTS = 5


def quadratic(rng):
    """The gradient of 1/2 (w - c)^T A (w - c), and A and c in float64."""
    root = rng.normal(size=(ELEMENTS, ELEMENTS))
    hessian, centre = root @ root.T / ELEMENTS, rng.normal(size=ELEMENTS)
    return lambda w: hessian @ (w - centre)


@given(st.integers(0, 2**32), st.floats(0, 2), st.integers(1, 7), st.integers(1, 4))
def test_it_is_sgd_on_the_loss_and_the_proximal_term(seed, mu, local_steps, rounds):
    """Against a reference in float64 that knows no strategy: rounds of one member alone."""
    rng = np.random.default_rng(seed)
    gradient_of, rate = quadratic(rng), 0.05
    start = rng.normal(size=ELEMENTS).astype(np.float32)
    params, gradient = start.copy(), np.zeros(ELEMENTS, np.float32)
    half = strategies.find(f"fedprox({mu!r})").member_half(
        strategies.Setting(params, gradient, local_steps, 0)
    )
    w = start.astype(np.float64)
    for round in range(rounds):
        base = w.copy()
        for _ in range(local_steps):
            assert half.quiet_steps() == 0
            gradient[:] = gradient_of(params)
            assert half.before_step() is None
            params -= np.float32(rate) * gradient
            w -= rate * (gradient_of(w) + mu * (w - base))
            given_up = half.after_step()
        assert half.due() == round
        half.apply([given_up.copy()])  # the mean of one member's contribution is that contribution
        np.testing.assert_allclose(params, w, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(params, half.base)


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_without_the_term_it_is_fedavg_bit_for_bit(seed, local_steps):
    rng = np.random.default_rng(seed)
    start = rng.normal(size=ELEMENTS).astype(np.float32)
    steps = rng.normal(size=(local_steps, ELEMENTS)).astype(np.float32)
    ours, theirs, gradient = start.copy(), start.copy(), np.empty_like(start)
    halves = FedProx(ours, gradient, 0.0, local_steps), Displacement(theirs, local_steps, 0)
    for step in steps:
        for half, params in zip(halves, (ours, theirs), strict=True):
            gradient[:] = step
            half.before_step()
            params -= gradient
            found = half.after_step()
        assert ours.tobytes() == theirs.tobytes()
    assert found is not None


def test_a_wrong_mu_is_one_clear_line():
    with pytest.raises(ConfigError, match=r"fedprox: mu = -1.*allowed are 0 to less than 1000"):
        strategies.find("fedprox(-1)")
    with pytest.raises(ConfigError, match=r"it reads fedprox\(mu\)"):
        strategies.find("fedprox")
    with pytest.raises(ConfigError, match=r"delay = 3"):
        plan(reading.load(None, ["strategy=fedprox(0.1)", "delay=3"]))
